"""The database of runs: write side, read side, the scheduler and the training process.

    tables, database, migrations/   what is stored, where, and how an older database is brought up to date
    runs, recorder                  the write side: the life of a run, the history it reports
    queries                         the read side, for pages
    scheduler, worker, __main__     who starts runs, what trains one, `python -m storage ...`
"""

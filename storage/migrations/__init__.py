"""Alembic revisions: each brings the schema one step further. `storage.database` runs them when it opens a database."""

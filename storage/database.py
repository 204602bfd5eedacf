"""Engine per URL, session context, SQLite pragmas, migrations on open with a backup first.

COMET_DATABASE_URL names the database; without it, it is the SQLite file `comet.db` in COMET_HOME. SQLite and PostgreSQL
are the two that are tested. Two contexts lead to it: `session()` for reading, `transaction()` for writing.

On SQLite a transaction begins IMMEDIATE: one that reads first and asks for the write lock later fails in WAL mode
when another writer was faster, whatever the timeout; one that asks first waits. On PostgreSQL writers lock the rows
they read (`with_for_update`, which SQLite does not need and does not see).

The first use of a database by a process brings its schema up to date, one process at a time: under a file lock beside
an SQLite file, under an advisory lock on PostgreSQL. The whole upgrade is one transaction on both. Before an upgrade an
SQLite file is copied by SQLite's own backup; a PostgreSQL server has its own ways to do that.
"""

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from comet_core.config import comet_home

PROJECT = Path(__file__).resolve().parent.parent
BUSY_SECONDS = 10  # how long a writer waits for another one
_MIGRATION_LOCK = 7_206_638  # a number of our own among PostgreSQL's advisory locks

_engines: dict[str, Engine] = {}
_engines_lock = threading.Lock()


def database_url() -> URL:
    """The database that COMET_DATABASE_URL names, else `comet.db` in COMET_HOME; paths become absolute.

    Raises ValueError for what is no URL, an SQLite database in memory, and anything but SQLite and PostgreSQL.
    """
    given = os.environ.get("COMET_DATABASE_URL", "")
    if not given:
        return URL.create("sqlite", database=str(comet_home() / "comet.db"))
    try:
        url = make_url(given)
    except ArgumentError:
        raise ValueError(
            "COMET_DATABASE_URL is no database URL; write sqlite:////absolute/path.db or "
            "postgresql://user:password@host/database."
        ) from None
    kind = url.get_backend_name()
    if kind == "sqlite":
        name = url.database or ""
        if not name or ":memory:" in name or url.query.get("mode") == "memory":
            raise ValueError(
                "COMET_DATABASE_URL names an SQLite database in memory, which no other process can see; "
                "name a file, or leave it empty for comet.db in COMET_HOME."
            )
        return url.set(database=str(PROJECT / name))
    if kind == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    raise ValueError(f"COMET_DATABASE_URL names a {kind} database; allowed: sqlite, postgresql.")


def engine() -> Engine:
    """The engine of the database that the environment names, its schema up to date.

    Raises ValueError as `database_url` does and for a schema that is newer than this program, ModuleNotFoundError where
    PostgreSQL's driver is missing, sqlalchemy.exc.OperationalError where the database cannot be reached.
    """
    url = database_url()
    key = url.render_as_string(hide_password=False)
    with _engines_lock:
        if key not in _engines:
            _engines[key] = _open(url)
        return _engines[key]


@contextmanager
def session() -> Iterator[Session]:
    """A session to read with: one snapshot of the database (SQLite), nothing is kept. Raises what `engine` raises."""
    with Session(engine(), expire_on_commit=False) as opened:
        yield opened


@contextmanager
def transaction() -> Iterator[Session]:
    """A session to write with: committed at the end, rolled back on an exception. Raises what `engine` raises."""
    writing = engine().execution_options(immediate=True)
    with Session(writing, expire_on_commit=False) as opened, opened.begin():
        yield opened


def _open(url: URL) -> Engine:
    lock: AbstractContextManager[None] = nullcontext()
    sqlite_path = None
    if url.get_backend_name() == "sqlite":
        sqlite_path = Path(str(url.database))
        sqlite_path.parent.mkdir(parents=True, exist_ok=True)
        opened = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
        event.listen(opened, "connect", _prepare_sqlite)
        event.listen(opened, "begin", _begin_sqlite)
        lock = _file_lock(sqlite_path.with_name(sqlite_path.name + ".lock"))
    else:
        try:
            opened = create_engine(url, pool_pre_ping=True)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"COMET_DATABASE_URL names PostgreSQL, but Python has no {missing.name}; pip install 'psycopg[binary]'."
            ) from None
    try:
        with lock:
            _migrate(opened, sqlite_path)
    except BaseException:
        opened.dispose()
        raise
    return opened


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin_sqlite does
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by the death of the process
        yield


def _migrate(opened: Engine, sqlite_path: Path | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    settings = Config()
    settings.set_main_option("script_location", str(PROJECT / "storage" / "migrations").replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(settings)
    known = {script.revision for script in scripts.walk_revisions()}

    with opened.execution_options(immediate=True).begin() as connection:
        if sqlite_path is None:
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATION_LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        if current == scripts.get_current_head():
            return
        if current is not None and current not in known:
            raise ValueError(
                f"The database {opened.url.render_as_string(hide_password=True)} has the schema {current!r}, which "
                "this version does not know: a newer COMET Lab wrote it. Update COMET Lab, or name another database by "
                "COMET_DATABASE_URL."
            )
        if current is not None and sqlite_path is not None:
            _back_up(sqlite_path, sqlite_path.with_name(f"{sqlite_path.name}.backup-{current}-{time.time():.0f}"))
        settings.attributes["connection"] = connection
        command.upgrade(settings, "head")


def _back_up(path: Path, target: Path) -> None:
    half = target.with_name(target.name + ".part")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(half)) as copy:
        source.backup(copy)
    half.replace(target)

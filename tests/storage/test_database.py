"""Opening a database: which are taken, how SQLite is set up, how its schema comes up to date."""

import math
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

from comet_core.config import RunConfig
from comet_core.launcher import PROJECT
from comet_core.metrics import PEAK_PARTS
from storage import database, queries, runs
from storage.tables import AuditRow, Base, EventRow, Run, StepRow
from tests.storage.conftest import close_databases

LATER = '''"""A later step."""
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9000", "0003"
def upgrade() -> None:
    op.add_column("runs", sa.Column("colour", sa.Text()))
    {more}
'''


@pytest.fixture
def later_version(tmp_path, monkeypatch):
    """A function that makes this program a later version, with one revision more."""

    def make(more: str = "pass") -> None:
        migrations = tmp_path / "later" / "storage" / "migrations"
        shutil.copytree(PROJECT / "storage" / "migrations", migrations)
        (migrations / "versions" / "9000_later.py").write_text(LATER.format(more=more))
        monkeypatch.setattr(database, "PROJECT", tmp_path / "later")
        close_databases()

    return make


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_database_in_memory_is_refused(monkeypatch, url):
    monkeypatch.setenv("COMET_DATABASE_URL", url)
    with pytest.raises(ValueError, match="in memory, which no other process can see; name a file"):
        database.engine()


@pytest.mark.parametrize(("url", "sentence"), [("comet.db", "no database URL"), ("mysql://host/lab", "names a mysql")])
def test_what_cannot_be_a_database_is_refused(monkeypatch, url, sentence):
    monkeypatch.setenv("COMET_DATABASE_URL", url)
    with pytest.raises(ValueError, match=sentence):
        database.engine()


def test_a_relative_path_starts_at_the_project(monkeypatch):
    monkeypatch.setenv("COMET_DATABASE_URL", "sqlite:///var/other.db")
    assert database.database_url().database == str(PROJECT / "var" / "other.db")


def test_the_default_lies_in_comet_home(comet_home):
    database.engine()
    assert (comet_home / "comet.db").is_file()


def test_sqlite_is_set_up_for_many_processes():
    with database.session() as reading:
        pragmas = {
            name: reading.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 10_000}


def test_writers_that_read_first_never_fail_each_other():
    run_id = runs.create_run(RunConfig())
    failures = []

    def count_up() -> None:
        try:
            for _ in range(50):
                with database.transaction() as writing:
                    writing.get_one(Run, run_id).seed += 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.session() as reading:
        assert not failures and reading.get_one(Run, run_id).seed == 200


def test_a_transaction_is_kept_whole_or_not_at_all(any_database):
    with pytest.raises(KeyError), database.transaction() as writing:
        run_id = runs._add(writing, RunConfig()).id
        raise KeyError
    with database.session() as reading:
        assert reading.get(Run, run_id) is None


def test_the_migrated_schema_is_what_the_models_say(any_database):
    with database.engine().connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_two_processes_may_open_a_new_database_at_once(comet_home):
    code = "from storage import database; database.engine()"
    opening = [subprocess.Popen([sys.executable, "-W", "error", "-c", code], cwd=PROJECT) for _ in range(3)]
    assert [process.wait(30) for process in opening] == [0, 0, 0]


def test_an_older_database_is_copied_then_upgraded_with_its_data(comet_home, later_version):
    run_id = runs.create_run(RunConfig(name="old"))
    later_version()
    with database.session() as reading:
        assert reading.scalar(text("SELECT name FROM runs WHERE colour IS NULL")) == "old"
    (backup,) = comet_home.glob("comet.db.backup-0003-*")
    with closing(sqlite3.connect(backup)) as copy:
        assert copy.execute("SELECT id, name FROM runs").fetchall() == [(run_id, "old")]
        assert "colour" not in copy.execute("SELECT sql FROM sqlite_master WHERE name = 'runs'").fetchone()[0]


def test_a_database_of_the_first_version_opens_and_misses_what_came_later(any_database, tmp_path, monkeypatch):
    """The first version's own migrations make it, and its rows are written as that version did."""
    shutil.copytree(PROJECT / "storage" / "migrations", tmp_path / "first" / "storage" / "migrations")
    for later in (tmp_path / "first" / "storage" / "migrations" / "versions").glob("000[2-9]*.py"):
        later.unlink()
    monkeypatch.setattr(database, "PROJECT", tmp_path / "first")
    close_databases()
    with database.transaction() as writing:
        assert writing.scalar(text("SELECT version_num FROM alembic_version")) == "0001"
    run_id = runs.create_run(RunConfig())
    old = dict.fromkeys(("saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes"), 7)
    old |= {"run_id": run_id, "step": 1, "batch_bytes": 0, "static_bytes": 5, "peak_rss_bytes": 9}
    layer = {"run_id": run_id, "step": 1, "operator": "conv2d", "saved_bytes": 7, "held_bytes": 7, "error_bound": 0.5}
    rows = [("step_metrics", old), *(("layer_metrics", layer | {"name": name}) for name in ("conv10", "conv2"))]
    with database.transaction() as writing:
        for table, row in rows:
            columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
            writing.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), row)
    monkeypatch.setattr(database, "PROJECT", PROJECT)
    close_databases()
    (row,) = queries.step_frame(run_id).to_dict("records")
    assert (row["saved_bytes"], row["static_bytes"], row["peak_rss_bytes"]) == (7, 5, 9)
    assert all(math.isnan(row[name]) for name in PEAK_PARTS if name != "batch_bytes")
    assert queries.peak_frame([run_id]).empty
    layers = queries.layer_frame(run_id)
    assert layers["error_bound"].tolist() == [0.5, 0.5] and layers["audit_factor"].isna().all()
    assert queries.layer_names(run_id) == ["conv2", "conv10"]
    assert queries.audit_frame(run_id).empty and queries.event_frame(run_id).empty


def test_an_upgrade_that_fails_leaves_the_older_database_as_it_was(any_database, later_version):
    run_id = runs.create_run(RunConfig(name="old"))
    later_version(more='raise RuntimeError("power cut")')
    with pytest.raises(RuntimeError, match="power cut"):
        database.engine()
    raw = create_engine(database.database_url())
    with raw.connect() as connection:
        assert connection.execute(text("SELECT * FROM runs")).mappings().one()["id"] == run_id
        assert "colour" not in connection.execute(text("SELECT * FROM runs")).one()._mapping
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "0003"
    raw.dispose()


def test_a_newer_schema_is_refused_and_left_alone(any_database):
    with database.transaction() as writing:
        writing.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    close_databases()
    with pytest.raises(ValueError, match="has the schema '9999', which this version does not know: a newer COMET Lab"):
        database.engine()
    raw = create_engine(database.database_url())
    with raw.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    raw.dispose()


def test_deleting_a_run_deletes_its_rows(any_database):
    run_id = runs.create_run(RunConfig())
    with database.transaction() as writing:
        counts = dict.fromkeys(
            ("saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes", "batch_bytes"), 0
        )
        writing.add(StepRow(run_id=run_id, step=1, **counts))
        audit = {"operator": "conv2d", "gradient": "weight", "num_elements": 1, "extra_bytes": 0}
        writing.add(AuditRow(run_id=run_id, step=1, name="conv", **audit))
        writing.add(EventRow(run_id=run_id, step=1, place=0, kind="factor", message=""))
    runs.delete_run(run_id)
    with database.session() as reading:
        for table in ("step_metrics", "audit_metrics", "controller_events", "run_summary"):
            assert reading.scalar(text(f"SELECT count(*) FROM {table}")) == 0

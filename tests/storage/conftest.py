"""Both databases for the conformance tests: SQLite files, and a PostgreSQL server that lives as long as the tests."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psycopg
import pytest

from comet_core.config import RunConfig
from comet_core.launcher import identify
from storage import database, runs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def close_databases() -> None:
    for engine in database._engines.values():
        engine.dispose()
    database._engines.clear()


@pytest.fixture(scope="session")
def postgres_server():
    """Port of a fresh PostgreSQL server, run by an ordinary user as PostgreSQL demands."""
    found = [shutil.which("initdb"), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True))]
    initdb = next((path for path in found if path), None)
    if initdb is None:
        pytest.skip("missing tool: initdb (on Debian: apt-get install postgresql)")
    binaries = Path(initdb).resolve().parent
    user = None
    if os.getuid() == 0:
        user = "postgres"
        try:
            pwd.getpwnam(user)
        except KeyError:
            pytest.skip("missing tool: a user postgres, which the package postgresql makes")
    folder = Path(tempfile.mkdtemp(prefix="comet-postgres-"))
    if user:
        shutil.chown(folder, user)
    port = free_port()

    def run(*command: str) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)

    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    run(str(binaries / "initdb"), "-D", str(folder / "data"), "-U", "comet", "-A", "trust", "-N")
    run(str(binaries / "pg_ctl"), "-D", str(folder / "data"), "-o", options, "-l", str(folder / "log"), "-w", "start")
    yield port
    run(str(binaries / "pg_ctl"), "-D", str(folder / "data"), "-m", "immediate", "stop")
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request, comet_home, monkeypatch):
    """An empty database of each kind, which COMET_DATABASE_URL names."""
    if request.param == "sqlite":
        yield request.param
        return
    port = request.getfixturevalue("postgres_server")
    with psycopg.connect(f"host=127.0.0.1 port={port} user=comet dbname=postgres", autocommit=True) as server:
        server.execute("DROP DATABASE IF EXISTS lab")
        server.execute("CREATE DATABASE lab")
    monkeypatch.setenv("COMET_DATABASE_URL", f"postgresql://comet@127.0.0.1:{port}/lab")
    yield request.param
    close_databases()  # the next test's database has the same name and is another one


@pytest.fixture
def started_run():
    """A function that makes a run whose training process is this one, as far as the database knows."""

    def start(**options) -> int:
        run_id = runs.create_run(RunConfig(**options))
        assert runs.claim_next(slots=1000) == run_id
        myself = identify(os.getpid())
        assert myself is not None
        runs.mark_starting(run_id, myself)
        runs.start(run_id, num_steps_total=100, environment={"torch": "2.14.1"}, start_rss_bytes=1000)
        return run_id

    return start

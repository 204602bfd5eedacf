"""`python -m storage`: the lab starts both its processes and keeps them going; runs are seen and handled by command."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from comet_core import launcher
from comet_core.config import RunConfig
from comet_core.launcher import PROJECT
from storage import queries, runs
from storage.__main__ import main
from tests.storage.conftest import free_port


def until(reached: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.1)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
def test_serve_starts_web_and_scheduler_restarts_what_dies_and_ends_both(comet_home, started_run):
    port = free_port()
    training = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    identity = launcher.identify(training.pid)
    run_id = runs.create_run(RunConfig())
    assert runs.claim_next(slots=1) == run_id and identity is not None
    runs.mark_starting(run_id, identity)
    log = open(comet_home / "serve.log", "w+")  # noqa: SIM115
    serve = subprocess.Popen([sys.executable, "-m", "storage", "serve", "--port", str(port)], cwd=PROJECT, stderr=log)
    try:

        def child(word: str) -> psutil.Process | None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(serve.pid).children()
                return next((one for one in children if word in one.cmdline()), None)
            return None

        def scheduler_works() -> bool:
            return (queries.scheduler_promise() or 0) > time.time()

        until(lambda: answers(port) and scheduler_works(), 40, "web and scheduler")
        web, scheduler = child("streamlit"), child("scheduler")
        assert web is not None and scheduler is not None
        web.kill()
        scheduler.kill()
        until(lambda: answers(port) and child("scheduler"), 40, "web and scheduler once more")
        again = child("streamlit"), child("scheduler")
        assert again[0] not in (None, web) and again[1] not in (None, scheduler)
        second = subprocess.run(
            [sys.executable, "-m", "storage", "serve", "--port", str(port)], cwd=PROJECT, capture_output=True, text=True
        )
        assert second.returncode == 1 and second.stderr.startswith(f"error: Port {port} on 127.0.0.1 cannot be used")

        serve.send_signal(signal.SIGTERM)
        assert serve.wait(20) == 0
        until(lambda: not any(psutil.pid_exists(one.pid) for one in again if one), 5, "the end of both")
        assert training.poll() is None and queries.live_counts()["starting"] == 1
        log.seek(0)
        said = log.read()
        assert "web ended with code -9; again in 1 s" in said and "scheduler ended with code -9; again in 1 s" in said
        assert "1 training goes on; the lab finds it again when it starts." in said and "Traceback" not in said
    finally:
        log.close()
        serve.kill()
        serve.wait()
        training.kill()
        training.wait()


def test_a_port_in_use_is_said_in_a_sentence(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: Port {port} on 127.0.0.1 cannot be used (Address already in use): end what listens")


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("PORT", "http", "PORT is 'http'; write a whole number, or use --port."),
        ("PORT", "70000", "port is 70000; allowed: a whole number from 1 to 65,535."),
        ("COMET_SLOTS", "two", "COMET_SLOTS is 'two'; write a whole number, or use --slots."),
        ("COMET_DATABASE_URL", "sqlite://", "COMET_DATABASE_URL names an SQLite database in memory"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(monkeypatch, capsys, variable, value, sentence):
    monkeypatch.setenv("PORT", str(free_port()))
    monkeypatch.setenv(variable, value)
    assert main(["serve"]) == 1
    assert sentence in capsys.readouterr().err


def test_runs_are_listed_shown_stopped_and_deleted_by_command(capsys):
    run_id = runs.create_run(RunConfig(name="a run"))

    def call(*arguments: str):
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert [found["name"] for found in call("list")] == ["a run"]
    assert call("show", str(run_id))["config"]["model"] == "resnet20"
    assert main(["list"]) == 0 and "queued" in capsys.readouterr().out
    assert main(["show", str(run_id)]) == 0 and "status: queued" in capsys.readouterr().out
    assert call("stop", str(run_id)) == {"id": run_id, "status": "stopped"}
    assert main(["stop", str(run_id)]) == 1 and "is stopped already" in capsys.readouterr().err
    assert call("delete", str(run_id)) == {"id": run_id, "deleted": True}
    assert main(["show", str(run_id)]) == 1 and f"There is no run {run_id}." in capsys.readouterr().err
    assert call("list") == []

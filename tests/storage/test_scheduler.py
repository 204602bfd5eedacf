"""Scheduler and training processes, real ones: runs are trained, stopped, lost and found again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from comet_core import launcher
from comet_core.config import RunConfig
from comet_core.launcher import PROJECT, Identity
from storage import database, queries, runs
from storage.recorder import spool_path, spooled_runs
from storage.scheduler import Scheduler
from storage.tables import Run, SchedulerLease

QUICK: dict[str, Any] = {"max_steps_per_epoch": 3, "batch_size": 32}
ENDLESS: dict[str, Any] = {"epochs": 10_000, "batch_size": 32, "num_threads": 1}


def until(reached: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        failed = [run_id for run_id, status in statuses().items() if status == "failed"]
        assert not failed, queries.log_tail(failed[0])
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s; runs: {statuses()}"
        time.sleep(0.1)


def statuses() -> dict[int, str]:
    frame = queries.runs_frame()
    return dict(zip(frame["id"].tolist(), frame["status"].tolist(), strict=True))


def row(run_id: int) -> dict:
    found = queries.run(run_id)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory):
    return tmp_path_factory.mktemp("numba")


@pytest.fixture
def start_scheduler(comet_home, compiled_kernels):
    """A function that starts `python -m storage scheduler`; it and all training processes end with the test."""
    (comet_home / "numba").symlink_to(compiled_kernels)  # compile once, not in each test
    started: list[subprocess.Popen[bytes]] = []

    def start(slots: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "storage", "scheduler", "--slots", str(slots)]
        with open(comet_home / f"scheduler-{len(started)}.log", "wb") as log:
            started.append(subprocess.Popen(command, cwd=PROJECT, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    for run in runs.live_runs():
        if run.pid is not None:
            launcher.terminate(Identity(run.host or "", run.pid, run.process_start_time or ""), 0)


@pytest.mark.slow
def test_twins_train_one_after_the_other_and_their_history_is_kept(start_scheduler):
    compressed, baseline = runs.create_twins(RunConfig(**QUICK))
    start_scheduler(slots=1)
    until(lambda: set(statuses().values()) == {"finished"}, 180, "the end of both")
    for run_id in (compressed, baseline):
        found = row(run_id)
        assert (found["last_step"], found["num_steps_total"], found["error"]) == (3, 3, None)
        assert found["environment"] and not found["timings_shared"]
        assert found["start_rss_bytes"] > 0 and found["peak_rss_above_start_bytes"] > 0
        assert queries.step_frame(run_id, ["train_loss"])["train_loss"].notna().all()
        assert queries.eval_frame(run_id)["test_accuracy"].tolist() == [found["last_test_accuracy"]]
        assert "step 3 of 3" in queries.log_tail(run_id)
    pids = [row(run_id)["pid"] for run_id in (compressed, baseline)]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10, "the end of both processes")
    assert row(compressed)["finished_at"] <= row(baseline)["started_at"]
    assert row(compressed)["compression_ratio"] > row(baseline)["compression_ratio"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_killed_run_is_lost_a_living_one_is_found_again_and_can_be_stopped(start_scheduler, comet_home):
    killed, living = (runs.create_run(RunConfig(**ENDLESS, seed=seed)) for seed in (1, 2))
    waiting = runs.create_run(RunConfig(**ENDLESS, seed=3))
    first = start_scheduler(slots=2)
    until(lambda: statuses() == {killed: "running", living: "running", waiting: "queued"}, 120, "training")
    assert row(killed)["timings_shared"] and row(living)["timings_shared"]
    runs.request_stop(waiting)

    first.kill()
    os.kill(row(killed)["pid"], signal.SIGKILL)
    pid = row(living)["pid"]
    start_scheduler(slots=2)
    until(lambda: statuses()[killed] == "lost", 15, "the loss")
    assert "did not say how it ended" in row(killed)["error"]

    start_scheduler(slots=2)  # by mistake
    log = comet_home / "scheduler-2.log"
    until(lambda: "waits: another scheduler works" in log.read_text(), 15, "the second scheduler's refusal")
    assert (row(living)["status"], row(living)["pid"]) == ("running", pid)
    assert psutil.pid_exists(pid)

    until(lambda: (row(living)["last_step"] or 0) > 0, 90, "the first step")
    assert runs.request_stop(living) == "stopping"
    until(lambda: statuses()[living] == "stopped", 40, "the stop")
    until(lambda: not [p for p in psutil.process_iter() if _group(p.pid) == pid], 10, "the end of all its processes")
    assert len(queries.step_frame(living)) == row(living)["last_step"]
    assert statuses() == {killed: "lost", living: "stopped", waiting: "stopped"}


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
def test_a_run_that_cannot_train_fails_with_one_sentence(start_scheduler, tmp_path):
    missing = str(tmp_path / "nothing-here")
    run_id = runs.create_run(RunConfig(dataset="image_folder", dataset_path=missing))
    start_scheduler(slots=1)
    deadline = time.monotonic() + 120
    while statuses()[run_id] != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert missing in row(run_id)["error"] and "\n" not in row(run_id)["error"]
    assert "Traceback" in queries.log_tail(run_id)


def quiet_turn(scheduler: Scheduler) -> None:
    assert scheduler.turn(), "no other scheduler is at it"


def age(run_id: int, seconds: float) -> None:
    with database.transaction() as writing:
        writing.get_one(Run, run_id).heartbeat_at = time.time() - seconds


def test_a_claim_of_a_scheduler_that_died_is_queued_again():
    run_id = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    scheduler = Scheduler(slots=1)
    quiet_turn(scheduler)
    assert statuses() == {run_id: "starting"}, "its process may be on its way"
    runs.request_stop(run_id)
    age(run_id, 20)
    quiet_turn(scheduler)
    assert statuses() == {run_id: "stopped"}
    other = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    runs.give_back(other)
    assert statuses()[other] == "queued"


def test_a_run_of_another_machine_is_lost_by_silence_only(any_database):
    run_id = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    runs.mark_starting(run_id, Identity("elsewhere", 1, "boot/1"))
    scheduler = Scheduler(slots=1)
    age(run_id, 10)
    quiet_turn(scheduler)
    assert statuses() == {run_id: "starting"}
    age(run_id, 20)
    quiet_turn(scheduler)
    assert statuses() == {run_id: "lost"}


def test_a_living_process_is_never_lost_however_long_it_is_silent(started_run):
    run_id = started_run()
    age(run_id, 3600)
    quiet_turn(Scheduler(slots=1))
    assert statuses() == {run_id: "running"}


def test_a_stopped_process_that_said_nothing_is_stopped_not_lost():
    run_id = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = launcher.identify(child.pid)
    assert identity is not None
    runs.mark_starting(run_id, identity)
    runs.request_stop(run_id)
    child.kill()
    child.wait()
    quiet_turn(Scheduler(slots=1))
    assert statuses() == {run_id: "stopped"}


def test_a_process_that_cannot_be_started_fails_its_run(comet_home):
    run_id = runs.create_run(RunConfig())
    runs.log_path(run_id).mkdir(parents=True)
    quiet_turn(Scheduler(slots=1))
    assert statuses() == {run_id: "failed"}
    assert re.match("The training process could not be started: .*Is a directory", row(run_id)["error"])


def test_late_points_of_an_ended_run_are_entered(comet_home, started_run):
    run_id = started_run()
    spool_path(run_id).parent.mkdir()
    spool_path(run_id).write_text('["eval_metrics", {"step": 5, "test_accuracy": 0.5, "wall_seconds": 1.0}]\n')
    scheduler = Scheduler(slots=1)
    quiet_turn(scheduler)
    assert spooled_runs() == [run_id], "its recorder is still at it"
    runs.finish(run_id)
    quiet_turn(scheduler)
    assert spooled_runs() == [] and row(run_id)["best_test_accuracy"] == 0.5


def test_one_scheduler_works_and_the_next_takes_over_when_it_is_gone(any_database):
    one, other = Scheduler(slots=1), Scheduler(slots=1)
    parent = launcher.identify(os.getppid())
    assert parent is not None
    other.identity = parent  # somebody else who lives
    assert one.turn() and not other.turn() and one.turn()
    one.identity = Identity(one.identity.host, 999_999_999, "boot/1")
    assert not one.turn(), "somebody else has the lease"
    with database.transaction() as writing:
        writing.get_one(SchedulerLease, 1).pid = 999_999_999
    assert other.turn(), "its holder is dead"
    promise = queries.scheduler_promise()
    assert promise is not None and 5 < promise - time.time() <= 10


def test_slots_below_one_are_refused():
    with pytest.raises(ValueError, match="slots is 0; allowed: a whole number from 1"):
        Scheduler(slots=0)

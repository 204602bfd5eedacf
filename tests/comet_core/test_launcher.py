"""Real processes: found again, ended with their children, never mistaken for others."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from comet_core import launcher

WAIT = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}]).wait()"


@pytest.fixture
def start(tmp_path):
    """A function that starts Python code and waits until it prints; what it leaves is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> launcher.Identity:
        log = tmp_path / f"{len(started)}.log"
        process = launcher.start(["-c", code], log, launcher.training_environment())
        started.append(process)
        deadline = time.monotonic() + 20
        while not log.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        identity = launcher.identify(process.pid)
        assert identity is not None
        return identity

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def group(pid: int) -> list[int]:
    """The living processes of a group, zombies left out."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(one) for one, its_group, state in rows if int(its_group) == pid and not state.startswith("Z")]


def test_a_training_process_has_a_session_of_its_own_and_a_log(start, tmp_path):
    identity = start("import os, time; print(os.getcwd(), os.getsid(0), flush=True); time.sleep(60)")
    folder, session = (tmp_path / "0.log").read_text().split()
    assert folder == str(launcher.PROJECT) and int(session) == identity.pid != os.getsid(0)


def test_a_log_is_added_to(tmp_path):
    log = tmp_path / "logs" / "run-1.log"
    for word in ("one", "two"):
        launcher.start(["-c", f"print({word!r})"], log, dict(os.environ)).wait(20)
    assert log.read_text().split() == ["one", "two"]


def test_a_process_is_told_from_a_later_one_with_its_number(start):
    identity = start(WAIT)
    assert launcher.is_alive(identity)
    assert not launcher.is_alive(replace(identity, start_time=identity.start_time + "1"))
    with pytest.raises(ValueError, match="runs on elsewhere; ask there"):
        launcher.is_alive(replace(identity, host="elsewhere"))


def test_a_zombie_counts_as_dead(start):
    identity = start(WAIT)
    os.kill(identity.pid, signal.SIGKILL)  # nobody waits for it yet
    deadline = time.monotonic() + 5
    while launcher.is_alive(identity):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(identity.pid, 0)  # the number is still taken
    assert launcher.identify(identity.pid) is None


def test_term_is_enough_for_a_process_that_heeds_it(start):
    identity = start(WAIT)
    before = time.monotonic()
    launcher.terminate(identity, 20)
    assert time.monotonic() - before < 5 and not launcher.is_alive(identity)
    launcher.terminate(identity, 20)


def test_a_process_that_ignores_term_is_killed_after_the_grace(start):
    identity = start(DEAF)
    before = time.monotonic()
    launcher.terminate(identity, 0.5)
    assert 0.5 <= time.monotonic() - before < 5 and group(identity.pid) == []


@pytest.mark.parametrize("parent_dies_first", [False, True])
def test_children_end_with_their_parent(start, parent_dies_first):
    identity = start(PARENT)
    assert len(group(identity.pid)) == 2
    if parent_dies_first:
        os.kill(identity.pid, signal.SIGKILL)
        while launcher.is_alive(identity):
            time.sleep(0.01)
        assert len(group(identity.pid)) == 1
    launcher.terminate(identity, 5)
    deadline = time.monotonic() + 5
    while group(identity.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stranger_with_the_same_number_is_left_alone(start):
    identity = start(WAIT)
    launcher.terminate(replace(identity, start_time="another boot/1"), 0.1)
    assert launcher.is_alive(identity)


def test_the_environment_sets_allocator_threads_and_gpus(comet_home, monkeypatch):
    monkeypatch.setattr(launcher, "num_cores", lambda: 8)
    monkeypatch.setenv("COMET_DATABASE_URL", "postgresql://somebody:secret@host/lab")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = launcher.training_environment(slots=3)
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1048576"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert launcher.training_environment()["OMP_WAIT_POLICY"] == "active"
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "2"
    assert launcher.training_environment(slots=100)["MKL_NUM_THREADS"] == "1"
    assert launcher.training_environment(num_threads=5, slots=2)["OPENBLAS_NUM_THREADS"] == "5"
    assert Path(environment["NUMBA_CACHE_DIR"]).is_relative_to(comet_home)
    assert environment["COMET_DATABASE_URL"].endswith("secret@host/lab")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launcher.training_environment(device="cuda")["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert launcher.training_environment(device="cuda")["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator's settings are glibc's")
def test_the_interpreter_starts_under_the_allocator_settings(start, tmp_path):
    start("import os, time; print(os.environ['GLIBC_TUNABLES'], flush=True); time.sleep(60)")
    assert (tmp_path / "0.log").read_text().strip() == launcher.ALLOCATOR_TUNABLES

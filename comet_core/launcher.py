"""Start, signal and look after a training process. Stdlib only.

A training process lives in a session of its own, so that it outlives whoever started it and can be ended together with
its children by one signal to its group. It is found again by host, process id and start time: a process id alone is
given to somebody else sooner or later.

The environment is set here and nowhere else: the allocator's settings (without them freed activations stay resident,
DESIGN section 4), threads, visible GPUs. Secrets such as a database URL travel in it, never on the command line, which
every user of the machine can read.
"""

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from comet_core.config import comet_home

PROJECT = Path(__file__).resolve().parent.parent
ALLOCATOR_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1048576"
WAIT_POLICY = "passive"
"""OpenMP's threads sleep between two operations of torch. By default they turn in circles for a while, and the codec's
threads, which come next, get half a core."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Identity:
    """Which process: `start_time` tells it from a later one with the same id."""

    host: str
    pid: int
    start_time: str


def num_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def training_environment(*, device: str = "cpu", num_threads: int = 0, slots: int = 1) -> dict[str, str]:
    """This process's environment with what a training process needs.

    `num_threads` 0 means the cores divided by `slots`, one at least. `device` "cpu" hides every GPU; "cuda" leaves
    those that are visible here, or the first.
    """
    threads = str(num_threads or max(1, num_cores() // slots))
    home = comet_home()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if device == "cuda" else ""
    return {
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, threads),
        "GLIBC_TUNABLES": ALLOCATOR_TUNABLES,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY),
        "CUDA_VISIBLE_DEVICES": visible,
        "NUMBA_CACHE_DIR": str(home / "numba"),
        "COMET_HOME": str(home),
        "PYTHONUNBUFFERED": "1",
    }


def start(arguments: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `python <arguments>` from the project root in a session of its own; its output is added to `log`.

    The caller keeps the result and polls it, or the dead process stays a zombie. Raises OSError where the log cannot be
    written or the process cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def identify(pid: int) -> Identity | None:
    """The process that has this id on this machine now; None where there is none, or a zombie."""
    started = _start_time(pid)
    return None if started is None else Identity(socket.gethostname(), pid, started)


def is_here(identity: Identity) -> bool:
    """Whether the process ran on this machine, so that this machine can say how it is."""
    return identity.host == socket.gethostname()


def is_alive(identity: Identity) -> bool:
    """Whether that very process still runs; a zombie does not. Raises ValueError for a process of another machine."""
    if not is_here(identity):
        raise ValueError(f"Process {identity.pid} runs on {identity.host}; ask there, this is {socket.gethostname()}.")
    return identify(identity.pid) == identity


def terminate(identity: Identity, grace_seconds: float) -> None:
    """End a process and its group: TERM, up to `grace_seconds` for it to leave, then KILL for all that is left.

    Returns when the process is gone. A process that is already dead leaves its children; these are killed. Raises
    ValueError for a process of another machine.
    """
    if is_alive(identity):
        _signal_group(identity.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while is_alive(identity) and time.monotonic() < deadline:
            time.sleep(0.05)
    # The group is still ours while its leader lives, or while it has none and the machine was not restarted.
    now = _start_time(identity.pid)
    if now == identity.start_time or (now is None and _boot() == identity.start_time.partition("/")[0]):
        _signal_group(identity.pid, signal.SIGKILL)
    while is_alive(identity):
        time.sleep(0.02)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says the latter of a group of zombies
        os.killpg(group, number)


def _boot() -> str:
    """What changes when the machine restarts: process start times count from there on Linux."""
    if platform.system() == "Linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.system()


def _start_time(pid: int) -> str | None:
    if platform.system() == "Linux":
        try:
            # "pid (name) state ..."; the name may hold blanks and brackets, so count from its last bracket
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if after_name[0] in "ZX" else f"{_boot()}/{after_name[19]}"
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else f"{_boot()}/{' '.join(started.split())}"

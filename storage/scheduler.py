"""Takes queued runs, starts workers, notices the dead.

One scheduler works at a time: whoever holds the lease, a row in the database that it renews at every turn. Another one
waits, and takes over when the lease ran out, or at once when the holder died on this machine. What is to be done is
read from the database at every turn and nothing is remembered that matters, so a restarted scheduler goes on where the
last one was: it finds running workers by host, process id and start time.

A process of this machine is dead when it is gone, never because it is slow. One of another machine is dead when it has
not given a sign of life for LOST_AFTER_SECONDS.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from comet_core import launcher
from comet_core.launcher import Identity
from storage import runs
from storage.database import transaction
from storage.recorder import replay_spool, spooled_runs
from storage.tables import Run, SchedulerLease

TURN_SECONDS = 0.5
LEASE_SECONDS = 10.0
LOST_AFTER_SECONDS = 15.0
GRACE_SECONDS = 20.0  # from the TERM signal to KILL: the current step, the last metrics


class Scheduler:
    """`turn()` looks once at everything; `slots` runs are live at the same time at most."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; allowed: a whole number from 1, the runs that train at the same time.")
        identity = launcher.identify(os.getpid())
        assert identity is not None
        self.identity = identity
        self.slots = slots
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # to reap them and to know how they ended
        self._stopping: dict[int, threading.Thread] = {}

    def turn(self) -> bool:
        """Do what is to be done now; False where another scheduler works. Raises SQLAlchemyError: database away."""
        if not _take_lease(self.identity):
            return False
        live = runs.live_runs()
        for run in live:
            self._look_after(run)
        ids = {run.id for run in live}
        self._children = {i: child for i, child in self._children.items() if i in ids or child.poll() is None}
        self._stopping = {i: thread for i, thread in self._stopping.items() if thread.is_alive()}
        while (run_id := runs.claim_next(self.slots)) is not None:
            self._launch(run_id)
        for run_id in set(spooled_runs()) - ids:
            replay_spool(run_id)
        return True

    def _launch(self, run_id: int) -> None:
        try:
            config = runs.config_of(run_id)
            environment = launcher.training_environment(
                device=config.device, num_threads=config.num_threads, slots=self.slots
            )
            process = launcher.start(["-m", "storage.worker", str(run_id)], runs.log_path(run_id), environment)
        except (OSError, ValueError) as error:
            runs.fail(run_id, f"The training process could not be started: {error}")
            return
        self._children[run_id] = process
        identity = launcher.identify(process.pid)
        if identity is not None:  # else it is dead already, which the next turn sees
            with suppress(runs.RunStateError):  # it was quick and has come to its end
                runs.mark_starting(run_id, identity)
        _say(f"run {run_id} starts as process {process.pid}")

    def _look_after(self, run: Run) -> None:
        child = self._children.get(run.id)
        exit_code = child.poll() if child else None
        silent_seconds = time.time() - (run.heartbeat_at or 0.0)
        try:
            if run.host is None or run.pid is None or run.process_start_time is None:
                if exit_code is not None:
                    runs.lose(run.id, _how_it_ended(exit_code))
                elif child is None and silent_seconds > LOST_AFTER_SECONDS:
                    runs.give_back(run.id)  # claimed by a scheduler that died before it started the process
                return
            identity = Identity(run.host, run.pid, run.process_start_time)
            here = launcher.is_here(identity)
            if launcher.is_alive(identity) if here else silent_seconds < LOST_AFTER_SECONDS:
                if here and run.stop_requested and run.id not in self._stopping:
                    self._stopping[run.id] = threading.Thread(
                        target=launcher.terminate, args=(identity, GRACE_SECONDS), daemon=True
                    )
                    self._stopping[run.id].start()
                return
            if here:
                launcher.terminate(identity, 0.0)  # its children, if it left any
            if run.stop_requested:
                runs.mark_stopped(run.id)
            else:
                runs.lose(run.id, _how_it_ended(exit_code))
            _say(f"run {run.id}: process {run.pid} is gone")
        except runs.RunStateError:
            pass  # it said itself how it ended, between our look at the list and now


def run(slots: int) -> None:
    """Be a scheduler until SIGTERM or SIGINT. Raises ValueError for fewer than one slot, and as `database.engine`."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    scheduler = Scheduler(slots)
    state = ""
    while not stop.is_set():
        try:
            now = "works" if scheduler.turn() else "waits: another scheduler works on this database"
        except SQLAlchemyError as error:
            now = f"waits: the database is away ({str(error).partition(chr(10))[0]})"
        if now != state:
            state = now
            _say(state)
        stop.wait(TURN_SECONDS)


def _take_lease(identity: Identity) -> bool:
    """Become, or stay, the one scheduler that works, for LEASE_SECONDS; False where another one is at it."""
    with transaction() as writing:
        now = time.time()
        lease = writing.get(SchedulerLease, 1, with_for_update=True)
        if lease is None:
            lease = SchedulerLease(id=1)
            writing.add(lease)
        elif lease.expires_at > now:
            holder = Identity(lease.host, lease.pid, lease.process_start_time)
            if holder != identity and (not launcher.is_here(holder) or launcher.is_alive(holder)):
                return False
        lease.host, lease.pid, lease.process_start_time = identity.host, identity.pid, identity.start_time
        lease.expires_at = now + LEASE_SECONDS
        return True


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "The process is gone and did not say how it ended: it was killed, or the machine was restarted."
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"The process was ended by {name} from outside; SIGKILL often means that memory ran out."
    return f"The process ended with code {exit_code} and did not say why; the log may."


def _say(text: str) -> None:
    print(f"scheduler: {text}", file=sys.stderr, flush=True)

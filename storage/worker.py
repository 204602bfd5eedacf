"""The training process: read one run's config, train it, write its history.

    python -m storage.worker RUN_ID

The one module that joins engine and database. Started by the scheduler with its output in the run's log. It says that
it lives before it imports the engine, which takes seconds. Whatever happens, the run ends in a true state: a TERM
signal or a request in the database ends training after the current step (`stopped`), an exception is one sentence in
the run's row and a traceback in the log (`failed`). What cannot be said any more (KILL) the scheduler says (`lost`).
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from comet_core.launcher import identify
from storage import runs
from storage.recorder import DatabaseRecorder

HEARTBEAT_SECONDS = 2.0
INSIST_SECONDS = 60.0  # how long a change of state is tried on a database that is away
PROGRESS_SECONDS = 5.0


def work(run_id: int) -> int:
    """Train a claimed run; 0 when its end, good or bad, is in the database.

    Raises RunStateError where the run is not this process's to train, SQLAlchemyError where the database stays away.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    identity = identify(os.getpid())
    assert identity is not None
    _insist(partial(runs.mark_starting, run_id, identity))
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(run_id, stop, over), name="heartbeat", daemon=True)
    heart.start()
    last_word = _train(run_id, stop)
    over.set()
    heart.join()
    _insist(last_word)
    return 0


def _train(run_id: int, stop: threading.Event) -> Callable[[], None]:
    """Train; what is to be said about the end."""
    heeded = False
    next_line = 0.0

    def should_stop() -> bool:
        nonlocal heeded
        heeded = heeded or stop.is_set()
        return heeded

    def on_start(facts: dict[str, Any]) -> None:
        _insist(partial(runs.start, run_id, **facts))

    def progress(step: int, num_steps: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line or step == num_steps:
            next_line = time.monotonic() + PROGRESS_SECONDS
            print(f"step {step:,} of {num_steps:,}", flush=True)

    recorder = DatabaseRecorder(run_id)
    try:
        config = runs.config_of(run_id)
        print(f"run {run_id}: {config.title}, process {os.getpid()}", flush=True)
        from comet_core import trainer

        trainer.train(config, recorder, should_stop=should_stop, progress=progress, on_start=on_start)
    except BaseException as error:
        traceback.print_exc()
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        return partial(runs.fail, run_id, str(error) if isinstance(error, ValueError) else first_line)
    finally:
        recorder.close()
    return partial(runs.mark_stopped if heeded else runs.finish, run_id)


def _beat(run_id: int, stop: threading.Event, over: threading.Event) -> None:
    """A sign of life every two seconds; ends training when asked to, or when the run is not live any more."""
    while not over.wait(HEARTBEAT_SECONDS):
        try:
            if runs.heartbeat(run_id):
                stop.set()
        except runs.RunStateError as error:
            print(error, file=sys.stderr, flush=True)
            stop.set()
            return
        except SQLAlchemyError:  # away for now; the recorder says so
            continue


def _insist(change: Callable[[], None]) -> None:
    deadline = time.monotonic() + INSIST_SECONDS
    while True:
        try:
            return change()
        except SQLAlchemyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1])))

"""`DatabaseRecorder`: the engine's `Recorder`, batched, never raising into training.

Training puts metrics into a bounded queue, which takes a microsecond; a thread writes them in batches of up to 100 rows
or half a second, each batch and the summary it changes in one transaction. If the database is away, locked or full,
the batch goes to a spool file in COMET_HOME/spool instead, and all later ones behind it, so that the order stays.
Every second the spool is tried again. What is still in it when the run ends is entered later by the scheduler.

Rows are entered at most once: steps that are there already are left as they are, and the summary skips them too.
Messages go to stderr, which is the run's log.
"""

import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite

from comet_core.config import comet_home
from comet_core.metrics import AuditMetrics, ControllerEvent, EvalMetrics, LayerMetrics, StepMetrics
from storage.database import transaction
from storage.tables import Base, Run, RunSummary, split_nonfinite

BATCH_ROWS = 100
BATCH_SECONDS = 0.5
QUEUE_ROWS = 20_000
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # how long close() goes on trying a database that is away

Metrics = StepMetrics | LayerMetrics | AuditMetrics | ControllerEvent | EvalMetrics
Entry = tuple[str, dict[str, Any]]  # name of the table, and a row of it without run_id

_NAMES = {
    StepMetrics: "step_metrics",
    LayerMetrics: "layer_metrics",
    AuditMetrics: "audit_metrics",
    ControllerEvent: "controller_events",
    EvalMetrics: "eval_metrics",
}


class DatabaseRecorder:
    """Keeps the history of one run. No method raises; `close` may take some ten seconds where the database is away."""

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id
        # metrics and what the recorder adds to them; None: the last entry
        self._queue: queue.Queue[tuple[Metrics, dict[str, int]] | None] = queue.Queue(QUEUE_ROWS)
        self._event_places = itertools.count()
        self._spool = spool_path(run_id)
        self._num_late = 0  # points in the spool file
        self._num_lost = 0
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def record_step(self, metrics: StepMetrics) -> None:
        self._put(metrics)

    def record_layers(self, metrics: Sequence[LayerMetrics]) -> None:
        for place, layer in enumerate(metrics):
            self._put(layer, place=place)

    def record_audits(self, metrics: Sequence[AuditMetrics]) -> None:
        for audit in metrics:
            self._put(audit)

    def record_events(self, events: Sequence[ControllerEvent]) -> None:
        for event in events:
            self._put(event, place=next(self._event_places))

    def record_eval(self, metrics: EvalMetrics) -> None:
        self._put(metrics)

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _put(self, metrics: Metrics, **added: int) -> None:
        try:
            self._queue.put_nowait((metrics, added))
        except queue.Full:
            self._lose(1, "the queue is full")

    def _work(self) -> None:
        open_end = True
        next_try = 0.0
        while open_end:
            batch, open_end = self._take()
            if batch and (self._num_late or not self._entered(batch)):
                self._put_aside(batch)
            if self._num_late and time.monotonic() > next_try:
                self._catch_up()
                next_try = time.monotonic() + RETRY_SECONDS
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._num_late and time.monotonic() < deadline:
            time.sleep(0.2)
            self._catch_up()
        if self._num_late:
            waiting = f"{self._num_late:,} points are late; they wait in {self._spool}, the scheduler enters them"
            self._say(waiting, urgent=True)

    def _take(self) -> tuple[list[Entry], bool]:
        """Up to BATCH_ROWS rows, after BATCH_SECONDS at the latest; and whether more may follow."""
        batch: list[Entry] = []
        deadline = time.monotonic() + BATCH_SECONDS
        while len(batch) < BATCH_ROWS and (left := deadline - time.monotonic()) > 0:
            try:
                taken = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if taken is None:
                return batch, False
            metrics, added = taken
            batch.append((_NAMES[type(metrics)], {**added, **split_nonfinite(asdict(metrics))}))
        return batch, True

    def _entered(self, batch: Sequence[Entry]) -> bool:
        try:
            _enter(self._run_id, batch)
        except Exception as error:  # whatever it is, training goes on and the rows are kept elsewhere
            reason = str(error).partition("\n")[0]
            self._say(f"the database does not take the metrics ({type(error).__name__}: {reason})")
            return False
        return True

    def _put_aside(self, batch: Sequence[Entry]) -> None:
        try:
            self._spool.parent.mkdir(parents=True, exist_ok=True)
            with open(self._spool, "a") as file:
                # the break in front ends a line that an earlier write may have left torn
                file.write("\n" + "\n".join(json.dumps(entry) for entry in batch) + "\n")
        except Exception as error:
            self._lose(len(batch), f"{type(error).__name__}: {error}")
        else:
            self._num_late += len(batch)
            self._say(f"{self._num_late:,} points late, kept in {self._spool}", urgent=self._num_late == len(batch))

    def _catch_up(self) -> None:
        try:
            replay_spool(self._run_id)
        except Exception:  # still away; was said
            return
        self._say(f"{self._num_late:,} late points entered, none is late now", urgent=True)
        self._num_late = 0

    def _lose(self, number: int, reason: str) -> None:
        self._num_lost += number
        self._say(f"{self._num_lost:,} points lost ({reason})")

    def _say(self, text: str, urgent: bool = False) -> None:
        if urgent or time.monotonic() > self._quiet_until:
            self._quiet_until = time.monotonic() + 10
            print(f"recorder: {text}", file=sys.stderr, flush=True)


def spool_path(run_id: int) -> Path:
    """Where a run's metrics wait that the database did not take: a line of JSON a row."""
    return comet_home() / "spool" / f"run-{run_id}.jsonl"


def spooled_runs() -> list[int]:
    """The runs that have such a file."""
    return sorted(int(path.stem.removeprefix("run-")) for path in spool_path(0).parent.glob("run-*.jsonl"))


def replay_spool(run_id: int) -> None:
    """Enter what a spool file holds and remove it; the file of a deleted run is removed only.

    For the recorder of the run, or for others when its process is dead. Raises sqlalchemy.exc.SQLAlchemyError where the
    database is still away; the file stays then.
    """
    path = spool_path(run_id)
    if not path.exists():
        return
    with open(path) as file:
        batch: list[Entry] = []
        for line in file:
            try:
                name, row = json.loads(line)
            except ValueError:  # torn by a kill or a full disk, or empty
                continue
            batch.append((name, row))
            if len(batch) == 10 * BATCH_ROWS:
                _enter(run_id, batch)
                batch = []
        _enter(run_id, batch)
    path.unlink()


def _enter(run_id: int, batch: Sequence[Entry]) -> None:
    """Add rows and bring the summary up to date, in one transaction."""
    with transaction() as writing:
        run = writing.get(Run, run_id)
        summary = writing.get(RunSummary, run_id, with_for_update=True)
        if run is None or summary is None:
            return
        insert = postgresql.insert if writing.get_bind().dialect.name == "postgresql" else sqlite.insert
        for name in _NAMES.values():
            rows = [{"run_id": run_id, **row} for to, row in batch if to == name]
            if rows:
                writing.execute(insert(Base.metadata.tables[name]).on_conflict_do_nothing(), rows)
        for name, row in batch:
            if name == "step_metrics":
                summary.add_step(row, run.start_rss_bytes)
            elif name == "eval_metrics":
                summary.add_evaluation(row)

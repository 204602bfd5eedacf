"""Life of a run: create, claim, start, heartbeat, finish, lose, stop, delete.

    queued -> starting -> running -> finished
                 |           |----> failed     an exception ended it
                 |           |----> lost       the process is gone without a word
                 |-> stopping -> stopped       (running too; a queued run is stopped at once)

Every change is one transaction that looks at the status first; one that the table below does not allow is refused
with RunStateError. The scheduler claims and starts, the process itself says everything that follows; the scheduler
speaks for a process only when that is dead. Uploaded images and log files belong to a run too and are looked after
here.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import select
from sqlalchemy.orm import Session

from comet_core.config import FIELDS, RunConfig, comet_home, config_from_json
from comet_core.launcher import PROJECT, Identity
from storage.database import session, transaction
from storage.tables import LIVE, Run, RunSummary, SchedulerLease

_NEXT = {
    "queued": ("starting",),  # and stopped, by request_stop alone
    "starting": ("queued", "running", "stopping", "stopped", "finished", "failed", "lost"),
    "running": ("stopping", "stopped", "finished", "failed", "lost"),
    "stopping": ("stopped", "finished", "failed", "lost"),
    "stopped": (),
    "finished": (),
    "failed": (),
    "lost": (),
}


class RunStateError(ValueError):
    """A change that the run's state does not allow, or a run that does not exist."""


def create_run(config: RunConfig) -> int:
    """Put a run at the end of the queue; its id."""
    with transaction() as writing:
        return _add(writing, config).id


def create_twins(config: RunConfig) -> tuple[int, int]:
    """Queue a run and its twin without compression, each linked to the other: (id of `config`, id of the baseline).

    Raises ValueError where `config` is itself a baseline.
    """
    if config.policy == "baseline":
        raise ValueError("policy is 'baseline', and so would be its twin; choose another policy, or launch it alone.")
    name = f"{config.name} (baseline)" if config.name else ""
    with transaction() as writing:
        run = _add(writing, config)
        twin = _add(writing, RunConfig(**{**config.to_dict(), "policy": "baseline", "name": name}))
        run.twin_id, twin.twin_id = twin.id, run.id
        return run.id, twin.id


def claim_next(slots: int) -> int | None:
    """Take the oldest queued run if fewer than `slots` runs are live: it is starting from now on. None: nothing to do.

    A run that starts beside live ones shares its timings with them; all of them are marked.
    """
    with transaction() as writing:
        writing.get(SchedulerLease, 1, with_for_update=True)  # one claim at a time, on PostgreSQL too
        live = writing.scalars(select(Run).where(Run.status.in_(LIVE))).all()
        oldest = select(Run).where(Run.status == "queued").order_by(Run.id).limit(1).with_for_update()
        run = writing.scalar(oldest) if len(live) < slots else None
        if run is None:
            return None
        _change(run, "starting", heartbeat_at=time.time())
        for other in live:
            run.timings_shared = other.timings_shared = True
        return run.id


def mark_starting(run_id: int, identity: Identity) -> None:
    """Note which process trains a claimed run; said by the scheduler and by the process, whoever comes first.

    Raises RunStateError where the run is not live, or another process has it.
    """
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        known = (run.host, run.pid, run.process_start_time)
        told = (identity.host, identity.pid, identity.start_time)
        if run.status not in LIVE or known not in ((None, None, None), told):
            raise RunStateError(f"Run {run_id} is {run.status} with process {run.pid}, not for {identity.pid} to take.")
        run.host, run.pid, run.process_start_time = told
        run.heartbeat_at = time.time()


def start(run_id: int, *, num_steps_total: int, environment: Mapping[str, Any], start_rss_bytes: int) -> None:
    """Training begins. Raises RunStateError where the run is not starting; one that is stopping stays so."""
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        if run.status != "stopping":
            _change(run, "running")
        run.started_at = run.heartbeat_at = time.time()
        run.num_steps_total, run.start_rss_bytes = num_steps_total, start_rss_bytes
        run.environment = json.dumps(dict(environment), sort_keys=True)


def heartbeat(run_id: int) -> bool:
    """A sign of life; whether somebody asked the run to stop. Raises RunStateError where the run is not live."""
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        if run.status not in LIVE:
            raise RunStateError(f"Run {run_id} is {run.status}; it has no process any more.")
        run.heartbeat_at = time.time()
        return run.stop_requested


def finish(run_id: int) -> None:
    """Training came to its end. Raises RunStateError where the run is not live."""
    _end(run_id, "finished")


def mark_stopped(run_id: int) -> None:
    """Training ended early because it was asked to. Raises RunStateError where the run is not live."""
    _end(run_id, "stopped")


def fail(run_id: int, error: str) -> None:
    """An exception ended the run; `error` is one sentence. Raises RunStateError where the run is not live."""
    _end(run_id, "failed", error)


def lose(run_id: int, error: str) -> None:
    """The process is gone without a word. Raises RunStateError where the run is not live."""
    _end(run_id, "lost", error)


def give_back(run_id: int) -> None:
    """A claimed run that no process took is queued again. Raises RunStateError where that is not so."""
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        if run.pid is not None:
            raise RunStateError(f"Run {run_id} has process {run.pid}; it cannot be queued again.")
        if run.stop_requested:
            _change(run, "stopped", finished_at=time.time())
        else:
            _change(run, "queued", heartbeat_at=None)


def request_stop(run_id: int) -> str:
    """Ask a run to stop; its new status. Queued: stopped at once. Live: stopping, the process gets a signal.

    Raises RunStateError where the run has ended.
    """
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        if run.status == "queued":
            run.status, run.stop_requested, run.finished_at = "stopped", True, time.time()
        elif run.status in LIVE:
            run.status, run.stop_requested = "stopping", True
        else:
            raise RunStateError(f"Run {run_id} is {run.status} already; only queued and live runs can be stopped.")
        return run.status


def delete_run(run_id: int) -> None:
    """Delete a run with its history and its log file. Raises RunStateError where it is live: stop it first."""
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        if run.status in LIVE:
            raise RunStateError(f"Run {run_id} is {run.status}; stop it before you delete it.")
        writing.delete(run)
    log_path(run_id).unlink(missing_ok=True)


def config_of(run_id: int) -> RunConfig:
    """The configuration of a run. Raises RunStateError where there is no run, ConfigError where it cannot run now."""
    with session() as reading:
        return config_from_json(_get(reading, run_id).config)


def live_runs() -> list[Run]:
    """The runs that have a process or are about to, oldest first; detached rows."""
    with session() as reading:
        return list(reading.scalars(select(Run).where(Run.status.in_(LIVE)).order_by(Run.id)))


def log_path(run_id: int) -> Path:
    """Where the process of a run writes what it prints."""
    return comet_home() / "logs" / f"run-{run_id}.log"


def uploads_dir() -> Path:
    """Where uploaded images lie."""
    return comet_home() / "uploads"


def save_upload(data: bytes | BinaryIO, filename: str) -> str:
    """Keep an uploaded zip of images; its absolute path, the same for the same content.

    Only whether it is a zip is checked here; `check_dataset` looks inside. Raises ValueError for what is no zip; then
    nothing is kept.
    """
    folder = uploads_dir()
    folder.mkdir(parents=True, exist_ok=True)
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    digest = hashlib.sha256()
    handle, half = tempfile.mkstemp(dir=folder, prefix=".half-")
    try:
        with open(handle, "wb") as file:
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
        if not zipfile.is_zipfile(half):
            raise ValueError(
                f"{filename!r} is no zip file; upload a .zip with train/<class>/ and test/<class>/, or class folders."
            )
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(filename).stem).strip("-")[:40] or "images"
        target = folder / f"{stem}-{digest.hexdigest()[:16]}.zip"
        Path(half).replace(target)
    finally:
        Path(half).unlink(missing_ok=True)
    return str(target)


def check_dataset(config: RunConfig) -> dict[str, Any]:
    """Read a configuration's data set once, in a process of its own: counts and classes, as `data-check` prints them.

    Raises ValueError with a sentence about what is wrong with the data, RuntimeError where the check itself broke. A
    refused upload is removed, unless a run uses it.
    """
    changed = {name: value for name, value in config.to_dict().items() if value != FIELDS[name].default}
    settings = [part for name, value in changed.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "comet_core", "data-check", *settings, "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"The check of the data set broke: {done.stderr.strip()[-1000:]}") from None
    if not answer["ok"]:
        upload = Path(config.dataset_path)
        if upload.parent == uploads_dir() and not _is_used(upload):
            upload.unlink(missing_ok=True)
        raise ValueError(answer["error"])
    return answer


def _is_used(upload: Path) -> bool:
    uses = Run.config.contains(json.dumps(str(upload)), autoescape=True)
    with session() as reading:
        return reading.scalar(select(Run.id).where(uses).limit(1)) is not None


def _add(writing: Session, config: RunConfig) -> Run:
    copies = {name: getattr(config, name) for name in ("dataset", "model", "policy", "controller", "seed")}
    run = Run(name=config.title, status="queued", config=config.to_json(), created_at=time.time(), **copies)
    writing.add(run)
    writing.flush()
    writing.add(RunSummary(run_id=run.id))
    return run


def _get(opened: Session, run_id: int, lock: bool = False) -> Run:
    run = opened.get(Run, run_id, with_for_update=lock)
    if run is None:
        raise RunStateError(f"There is no run {run_id}.")
    return run


def _change(run: Run, status: str, **columns: Any) -> None:
    if status not in _NEXT[run.status]:
        allowed = ", ".join(_NEXT[run.status]) or "nothing, it has ended"
        raise RunStateError(f"Run {run.id} is {run.status} and cannot become {status}; allowed: {allowed}.")
    run.status = status
    for name, value in columns.items():
        setattr(run, name, value)


def _end(run_id: int, status: str, error: str | None = None) -> None:
    with transaction() as writing:
        run = _get(writing, run_id, lock=True)
        _change(run, status, finished_at=time.time(), error=error)

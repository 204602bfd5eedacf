"""ORM rows, typed columns (SQLAlchemy 2 `Mapped[]`).

The metric tables have a column for every field of the dataclass of the same purpose in `comet_core.metrics`, under the
same name; a test holds them together. Numbers are nullable where a field may be None ("not measured"). `place` is the
recorder's own: it keeps the order in which layers and events came.

SQLite stores NaN as NULL. So a number that is not finite is stored as NULL on every database, and the row's column
`nonfinite` says which field it was and what it held: "train_loss=nan measured_sigma=inf". `split_nonfinite` writes that
form and `join_nonfinite` reads it. One column for all fields, because any measured number can turn out not finite.
"""

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, Double, ForeignKey, Integer, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

STATUSES = ("queued", "starting", "running", "stopping", "stopped", "finished", "failed", "lost")
LIVE = ("starting", "running", "stopping")  # a process exists, or is about to
UNTIMED_STEPS = 10  # the first steps compile kernels and warm caches up; the mean step time leaves them out


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {int: BigInteger, float: Double, str: Text}  # noqa: RUF012 (SQLAlchemy's own form)


def _run_id() -> Any:
    return mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False)


class Run(Base):
    """A run: what was asked for, where it stands, which process trains it. Times are seconds since 1970 (UTC)."""

    __tablename__ = "runs"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 - an id is never used twice, its log may still lie there

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(index=True)  # one of STATUSES
    config: Mapped[str]  # JSON of the whole RunConfig; the five columns below are copies to filter by
    dataset: Mapped[str]
    model: Mapped[str]
    policy: Mapped[str]
    controller: Mapped[str]
    seed: Mapped[int]
    twin_id: Mapped[int | None] = mapped_column(Integer, ForeignKey("runs.id", ondelete="SET NULL"))
    created_at: Mapped[float]
    started_at: Mapped[float | None]  # when training began
    finished_at: Mapped[float | None]  # when the run came to rest, in whatever way
    heartbeat_at: Mapped[float | None]  # the last sign of life; from the claim on
    host: Mapped[str | None]
    pid: Mapped[int | None]
    process_start_time: Mapped[str | None]  # as comet_core.launcher writes it
    stop_requested: Mapped[bool] = mapped_column(default=False)
    timings_shared: Mapped[bool] = mapped_column(default=False)  # another run computed at the same time
    error: Mapped[str | None]  # one sentence; the traceback is in the log
    environment: Mapped[str | None]  # JSON: versions, device, threads, commit
    num_steps_total: Mapped[int | None]
    start_rss_bytes: Mapped[int | None]  # resident memory of the process before training


class RunSummary(Base):
    """A row a run, kept in the same transaction as its metrics, so that lists never scan them."""

    __tablename__ = "run_summary"

    run_id: Mapped[int] = _run_id()
    last_step: Mapped[int | None]
    last_epoch: Mapped[int | None]
    last_train_loss: Mapped[float | None]
    last_test_accuracy: Mapped[float | None]
    best_test_accuracy: Mapped[float | None]
    best_step: Mapped[int | None]  # the first step with the best test accuracy
    compression_ratio: Mapped[float | None]  # of the last epoch: sum of saved by sum of held bytes
    conv_input_ratio: Mapped[float | None]  # the same for convolution inputs
    max_saved_bytes: Mapped[int | None]  # of any step
    max_held_bytes: Mapped[int | None]
    peak_rss_bytes: Mapped[int | None]
    peak_rss_above_start_bytes: Mapped[int | None]
    peak_allocated_bytes: Mapped[int | None]
    step_seconds: Mapped[float | None]  # mean over the steps after UNTIMED_STEPS
    wall_seconds: Mapped[float | None]
    nonfinite: Mapped[str | None]
    # what the ratios and the mean above go on from
    epoch_saved_bytes: Mapped[int] = mapped_column(default=0)
    epoch_held_bytes: Mapped[int] = mapped_column(default=0)
    epoch_conv_input_saved_bytes: Mapped[int] = mapped_column(default=0)
    epoch_conv_input_held_bytes: Mapped[int] = mapped_column(default=0)
    num_timed_steps: Mapped[int] = mapped_column(default=0)

    def add_step(self, row: Mapping[str, Any], start_rss_bytes: int | None) -> None:
        """Take a stored row of `step_metrics` into account. Steps come in order; one that was there is skipped."""
        if row["step"] <= (self.last_step or 0):
            return
        self.last_step, self.wall_seconds = row["step"], row["wall_seconds"]
        if row["epoch"] != self.last_epoch:
            self.last_epoch = row["epoch"]
            self.epoch_saved_bytes = self.epoch_held_bytes = 0
            self.epoch_conv_input_saved_bytes = self.epoch_conv_input_held_bytes = 0
        self.epoch_saved_bytes += row["saved_bytes"]
        self.epoch_held_bytes += row["held_bytes"]
        self.epoch_conv_input_saved_bytes += row["conv_input_saved_bytes"]
        self.epoch_conv_input_held_bytes += row["conv_input_held_bytes"]
        if self.epoch_held_bytes:
            self.compression_ratio = self.epoch_saved_bytes / self.epoch_held_bytes
        if self.epoch_conv_input_held_bytes:
            self.conv_input_ratio = self.epoch_conv_input_saved_bytes / self.epoch_conv_input_held_bytes
        self.max_saved_bytes = max(self.max_saved_bytes or 0, row["saved_bytes"])
        self.max_held_bytes = max(self.max_held_bytes or 0, row["held_bytes"])
        loss = join_nonfinite(row["nonfinite"]).get("train_loss", row["train_loss"])
        if loss is not None:
            stored = split_nonfinite({"last_train_loss": loss})
            self.last_train_loss, self.nonfinite = stored["last_train_loss"], stored["nonfinite"]
        if row["peak_rss_bytes"] is not None:
            self.peak_rss_bytes = max(self.peak_rss_bytes or 0, row["peak_rss_bytes"])
            if start_rss_bytes is not None:
                self.peak_rss_above_start_bytes = self.peak_rss_bytes - start_rss_bytes
        if row["peak_allocated_bytes"] is not None:
            self.peak_allocated_bytes = max(self.peak_allocated_bytes or 0, row["peak_allocated_bytes"])
        if row["step_seconds"] is not None and row["step"] > UNTIMED_STEPS:
            self.num_timed_steps += 1
            mean = self.step_seconds or 0.0
            self.step_seconds = mean + (row["step_seconds"] - mean) / self.num_timed_steps

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Take a row of `eval_metrics` into account."""
        self.wall_seconds = row["wall_seconds"]
        if row["test_accuracy"] is None:
            return
        self.last_test_accuracy = row["test_accuracy"]
        if self.best_test_accuracy is None or row["test_accuracy"] > self.best_test_accuracy:
            self.best_test_accuracy, self.best_step = row["test_accuracy"], row["step"]


class StepRow(Base):
    """`StepMetrics` of a run."""

    __tablename__ = "step_metrics"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - a run's steps lie together

    run_id: Mapped[int] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int | None]
    train_loss: Mapped[float | None]
    train_accuracy: Mapped[float | None]
    learning_rate: Mapped[float | None]
    num_samples: Mapped[int | None]
    saved_bytes: Mapped[int]
    held_bytes: Mapped[int]
    conv_input_saved_bytes: Mapped[int]
    conv_input_held_bytes: Mapped[int]
    batch_bytes: Mapped[int]
    compression_ratio: Mapped[float | None]
    conv_input_ratio: Mapped[float | None]
    static_bytes: Mapped[int | None]
    parameter_bytes: Mapped[int | None]
    optimizer_bytes: Mapped[int | None]
    gradient_bytes: Mapped[int | None]
    peak_saved_bytes: Mapped[int | None]
    peak_held_bytes: Mapped[int | None]
    scratch_bytes: Mapped[int | None]
    other_bytes: Mapped[int | None]
    peak_rss_bytes: Mapped[int | None]
    peak_allocated_bytes: Mapped[int | None]
    peak_reserved_bytes: Mapped[int | None]
    device_used_bytes: Mapped[int | None]
    step_seconds: Mapped[float | None]
    pack_seconds: Mapped[float | None]
    unpack_seconds: Mapped[float | None]
    wall_seconds: Mapped[float | None]
    nonfinite: Mapped[str | None]


class LayerRow(Base):
    """`LayerMetrics` of a run. `place` counts the layers of a step in the model's order; None in rows of before."""

    __tablename__ = "layer_metrics"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    run_id: Mapped[int] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[int | None]
    operator: Mapped[str]
    error_bound: Mapped[float | None]
    saved_bytes: Mapped[int]
    held_bytes: Mapped[int]
    compression_ratio: Mapped[float | None]
    bits_per_value: Mapped[float | None]
    predicted_sigma: Mapped[float | None]
    measured_sigma: Mapped[float | None]
    target_sigma: Mapped[float | None]
    gradient_noise: Mapped[float | None]
    nonzero_fraction: Mapped[float | None]
    audit_factor: Mapped[float | None]
    mean_output_gradient: Mapped[float | None]
    paper_coefficient: Mapped[float | None]
    nonfinite: Mapped[str | None]


class AuditRow(Base):
    """`AuditMetrics` of a run."""

    __tablename__ = "audit_metrics"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    run_id: Mapped[int] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str]
    gradient: Mapped[str]
    num_elements: Mapped[int]
    gradient_rms: Mapped[float | None]
    measured_sigma: Mapped[float | None]
    predicted_sigma: Mapped[float | None]
    mean_error: Mapped[float | None]
    slope: Mapped[float | None]
    correlation: Mapped[float | None]
    excess_kurtosis: Mapped[float | None]
    passed_error: Mapped[float | None]
    error_histogram: Mapped[str | None]
    extra_bytes: Mapped[int]
    audit_seconds: Mapped[float | None]
    nonfinite: Mapped[str | None]


class EventRow(Base):
    """`ControllerEvent` of a run. `place` counts the events of the run: a step may have several, of one layer too."""

    __tablename__ = "controller_events"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    run_id: Mapped[int] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    layer: Mapped[str | None]
    message: Mapped[str]
    nonfinite: Mapped[str | None]


class EvalRow(Base):
    """`EvalMetrics` of a run."""

    __tablename__ = "eval_metrics"

    run_id: Mapped[int] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int | None]
    test_loss: Mapped[float | None]
    test_accuracy: Mapped[float | None]
    num_samples: Mapped[int | None]
    eval_seconds: Mapped[float | None]
    wall_seconds: Mapped[float | None]
    nonfinite: Mapped[str | None]


class SchedulerLease(Base):
    """One row at most: the scheduler that works, and until when it may without renewing."""

    __tablename__ = "scheduler_lease"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    host: Mapped[str]
    pid: Mapped[int]
    process_start_time: Mapped[str]
    expires_at: Mapped[float]


def split_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values as they are stored: numbers that are not finite become None and are named in `nonfinite`."""
    odd = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    kinds = " ".join(f"{name}={value}" for name, value in odd.items())
    return {**values, **dict.fromkeys(odd), "nonfinite": kinds or None}


def join_nonfinite(nonfinite: str | None) -> dict[str, float]:
    """The fields that `nonfinite` names, with their values."""
    return {name: float(kind) for name, _, kind in (entry.partition("=") for entry in (nonfinite or "").split())}

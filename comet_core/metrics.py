"""`StepMetrics`, `LayerMetrics`, `EvalMetrics`, `AuditMetrics`, `ControllerEvent`, the `Recorder` protocol, a list.

One name from the engine to the axis of a chart: a field here is a column of the same name in the database and, with the
label and unit of its metadata, the title of an axis. A test holds the three together. Stdlib only.
A value that was not measured is None, never 0. Counts of bytes follow THEORY section 5: storages, each counted once.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol


def _metric(label: str, unit: str = "", default: Any = None) -> Any:
    return field(default=default, metadata={"label": label, "unit": unit})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One iteration. `saved_bytes` and `held_bytes` are taken at the same moment: when most was saved for backward."""

    step: int = field(metadata={"label": "Step", "unit": ""})  # 1 is the first iteration
    epoch: int | None = _metric("Epoch")  # 1 is the first
    train_loss: float | None = _metric("Training loss")
    train_accuracy: float | None = _metric("Training accuracy", "fraction")  # of this batch
    learning_rate: float | None = _metric("Learning rate")
    num_samples: int | None = _metric("Images", "images")
    saved_bytes: int = _metric("Saved for backward, uncompressed", "bytes", 0)
    held_bytes: int = _metric("Saved for backward, really held", "bytes", 0)
    conv_input_saved_bytes: int = _metric("Convolution inputs, uncompressed", "bytes", 0)
    conv_input_held_bytes: int = _metric("Convolution inputs, really held", "bytes", 0)
    batch_bytes: int = _metric("The batch itself", "bytes", 0)  # the model's input, kept as it is, not in saved_bytes
    compression_ratio: float | None = _metric("Compression ratio, whole graph", "x")
    conv_input_ratio: float | None = _metric("Compression ratio, convolution inputs", "x")
    static_bytes: int | None = _metric("Parameters, gradients, optimizer", "bytes")  # at the iteration's end
    # Of one moment, the one when most of these was there: with batch_bytes and other_bytes they sum to the peak below,
    # allocated on the GPU where there is one, else resident. How the moment is found stands in memory_parts.py.
    parameter_bytes: int | None = _metric("Parameters and buffers", "bytes")
    optimizer_bytes: int | None = _metric("Optimizer state", "bytes")
    gradient_bytes: int | None = _metric("Gradients at the peak", "bytes")
    peak_saved_bytes: int | None = _metric("Saved for backward at the peak, uncompressed", "bytes")  # not in the sum
    peak_held_bytes: int | None = _metric("Saved for backward at the peak, really held", "bytes")
    scratch_bytes: int | None = _metric("Decoded tensors at the peak", "bytes")
    other_bytes: int | None = _metric("Rest of the peak", "bytes")  # workspaces; resident: interpreter, libraries, data
    peak_rss_bytes: int | None = _metric("Peak resident memory of the process", "bytes")  # of this iteration
    peak_allocated_bytes: int | None = _metric("Peak allocated on the GPU", "bytes")
    peak_reserved_bytes: int | None = _metric("Peak reserved on the GPU", "bytes")
    device_used_bytes: int | None = _metric("Used on the GPU by all processes", "bytes")  # at the iteration's end
    step_seconds: float | None = _metric("Step time", "s")
    pack_seconds: float | None = _metric("Time spent encoding", "s")
    unpack_seconds: float | None = _metric("Time spent decoding", "s")
    wall_seconds: float | None = _metric("Time since the start", "s")

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak: allocated on the GPU where there is one, else resident."""
        return self.peak_rss_bytes if self.peak_allocated_bytes is None else self.peak_allocated_bytes


PEAK_PARTS = (
    "parameter_bytes", "optimizer_bytes", "gradient_bytes", "batch_bytes", "peak_held_bytes", "scratch_bytes",
    "other_bytes",
)  # fmt: skip
"""What sums to the measured peak of an iteration, `StepMetrics.peak_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMetrics:
    """One layer's record at one iteration: what its input was stored with and what that does to the gradient."""

    step: int = field(metadata={"label": "Step", "unit": ""})
    name: str = field(metadata={"label": "Layer", "unit": ""})  # path in the model
    operator: str = field(metadata={"label": "Operator", "unit": ""})
    error_bound: float | None = _metric("Error bound")  # absolute; mean over channels for norms; None: exact, unbounded
    saved_bytes: int = _metric("Saved for backward, uncompressed", "bytes", 0)
    held_bytes: int = _metric("Saved for backward, really held", "bytes", 0)
    compression_ratio: float | None = _metric("Compression ratio", "x")
    bits_per_value: float | None = _metric("Bits a value", "bits")
    predicted_sigma: float | None = _metric("Predicted gradient error (standard deviation)")
    measured_sigma: float | None = _metric("Measured gradient error (standard deviation)")
    target_sigma: float | None = _metric("Allowed gradient error (standard deviation)")
    gradient_noise: float | None = _metric("Sampling noise of the gradient (standard deviation)")
    nonzero_fraction: float | None = _metric("Share of non-zero values", "fraction")
    audit_factor: float | None = _metric("Measured over modelled gradient error, as learned")  # part of predicted_sigma
    # What the papers' form of the rule reads: sigma = a * L * sqrt(N * R) * bound, with a = 0.32 there
    mean_output_gradient: float | None = _metric("Mean magnitude of the output's gradient (L)")
    paper_coefficient: float | None = _metric("Coefficient of the papers' form (a)")


AUDIT_BINS = 32
"""Bins of `AuditMetrics.error_histogram`, of equal width over -4 to 4 measured standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditMetrics:
    """One layer's gradient formed twice in one iteration: from the exact tensor and from what was stored.

    The gradient is that of the weight ("weight"), of a norm's scale ("norm"), or the one passed on ("upstream").
    All figures are of the same samples, a share of the batch, without a loss scale; the two sigmas are scaled up from
    them to the whole batch.
    """

    step: int = field(metadata={"label": "Step", "unit": ""})
    name: str = field(metadata={"label": "Layer", "unit": ""})
    operator: str = field(metadata={"label": "Operator", "unit": ""})
    gradient: str = field(metadata={"label": "Gradient of", "unit": ""})
    num_elements: int = _metric("Gradient elements compared", "elements", 0)
    gradient_rms: float | None = _metric("Gradient (root mean square)")
    measured_sigma: float | None = _metric("Measured gradient error (standard deviation)")
    predicted_sigma: float | None = _metric("Predicted gradient error (standard deviation)")  # at the bound used
    mean_error: float | None = _metric("Mean error over its standard error")  # beyond 3: biased
    slope: float | None = _metric("Slope of the error on the exact gradient")  # -0.1: the gradient shrinks by a tenth
    correlation: float | None = _metric("Correlation of the error with the exact gradient")
    excess_kurtosis: float | None = _metric("Excess kurtosis of the error")  # 0: as a normal distribution's
    passed_error: float | None = _metric("Relative error of the gradient passed on")  # None: none is made here
    error_histogram: str | None = _metric("Histogram of the error")  # AUDIT_BINS counts, separated by commas
    extra_bytes: int = _metric("Kept for the audit", "bytes", 0)  # samples, until backward; not in held_bytes
    audit_seconds: float | None = _metric("Time of the audit", "s")


EVENT_KINDS = (
    "budget", "clamped", "exact", "override", "not finite", "factor", "warm-up", "loss spike", "recovering", "memory",
)  # fmt: skip
"""Why a controller did what it did, `ControllerEvent.kind`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerEvent:
    """A decision of the controller and its reason."""

    step: int = field(metadata={"label": "Step", "unit": ""})
    kind: str = field(metadata={"label": "Kind", "unit": ""})  # one of EVENT_KINDS
    layer: str | None = _metric("Layer")  # None: all layers
    message: str = _metric("Reason", "", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """One evaluation on the test images."""

    step: int = field(metadata={"label": "Step", "unit": ""})
    epoch: int | None = _metric("Epoch")
    test_loss: float | None = _metric("Test loss")
    test_accuracy: float | None = _metric("Test accuracy", "fraction")
    num_samples: int | None = _metric("Test images", "images")
    eval_seconds: float | None = _metric("Evaluation time", "s")
    wall_seconds: float | None = _metric("Time since the start", "s")


def compression_ratio(saved_bytes: int, held_bytes: int) -> float | None:
    """Bytes without compression over bytes really held; None where nothing is held."""
    return saved_bytes / held_bytes if held_bytes else None


def axis_label(metric: type, name: str) -> str:
    """Label and unit of a field, as an axis shows it: "Step time (s)"."""
    metadata = next(entry.metadata for entry in fields(metric) if entry.name == name)
    return f"{metadata['label']} ({metadata['unit']})" if metadata["unit"] else metadata["label"]


class Recorder(Protocol):
    """Takes a run's history. No method may raise into the training loop or hold it up."""

    def record_step(self, metrics: StepMetrics) -> None: ...
    def record_layers(self, metrics: Sequence[LayerMetrics]) -> None: ...
    def record_audits(self, metrics: Sequence[AuditMetrics]) -> None: ...
    def record_events(self, events: Sequence[ControllerEvent]) -> None: ...
    def record_eval(self, metrics: EvalMetrics) -> None: ...
    def close(self) -> None:
        """Returns once everything taken so far is kept, or has been given up with a message."""


class ListRecorder:
    """Keeps the history in lists: for tests, for `--json` and for notebooks."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.layers: list[LayerMetrics] = []
        self.evals: list[EvalMetrics] = []
        self.audits: list[AuditMetrics] = []
        self.events: list[ControllerEvent] = []

    def record_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def record_layers(self, metrics: Sequence[LayerMetrics]) -> None:
        self.layers.extend(metrics)

    def record_audits(self, metrics: Sequence[AuditMetrics]) -> None:
        self.audits.extend(metrics)

    def record_events(self, events: Sequence[ControllerEvent]) -> None:
        self.events.extend(events)

    def record_eval(self, metrics: EvalMetrics) -> None:
        self.evals.append(metrics)

    def close(self) -> None:
        pass

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [asdict(row) for row in rows]
            for name, rows in (
                ("steps", self.steps),
                ("evals", self.evals),
                ("layers", self.layers),
                ("audits", self.audits),
                ("events", self.events),
            )
        }


def to_json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the texts "nan", "inf" and "-inf", not null."""
    if isinstance(value, dict):
        return {key: to_json_number(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_number(entry) for entry in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """JSON text of nested dicts and lists, strict: non-finite numbers are texts."""
    return json.dumps(to_json_number(value), allow_nan=False, indent=1)

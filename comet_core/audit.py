"""Measured against predicted gradient error: one layer an iteration forms its gradient twice, exactly and as stored.

The layer whose turn it is keeps, beside its record, what its operator was called with. When the gradient d at its
output arrives, the operator runs once more under hooks of its own, and goes backward twice: with the tensor that was
saved and with the one that the record gives back. So every operator is audited by its own backward, with whatever else
it saved (a norm's mean and deviation) the same in both. Activations, which may have worked in place, are their slope.

An error has a standard deviation of its own, which the error models predict up to a factor (THEORY section 1: plain
rounding at coarse bounds follows the gradient): `ratio` is measured over modelled, and the controller learns from it.

It keeps a share of the samples, one in SAMPLED: a gradient is a sum over samples, and so is its error, with the same
factor, slope and shape; standard deviations are scaled up to the whole batch. Batch norm, whose statistics are those of
all samples, is computed from them for its scale alone. Costs, in the iterations of a turn only: these samples until
backward has come (`extra_bytes`, not in `held_bytes`), the operator once forward and twice backward for them. A weight
of more than LARGEST_WEIGHT elements is audited on some of its outputs. Not audited: what was stored exactly, and
products in place.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comet_core import error_models
from comet_core.gradient_statistics import loss_scale
from comet_core.metrics import AUDIT_BINS, AuditMetrics
from comet_core.operators import (
    BATCH_NORM,
    CONV1D,
    CONV2D,
    CONV3D,
    INSTANCE_NORM,
    LAYER_NORM,
    LINEAR,
    PRELU,
    RMS_NORM,
    Call,
    Kind,
    Need,
    bind,
    same_storage,
)
from comet_core.saved_records import RecordHandle

SAMPLED = 16
LARGEST_WEIGHT = 2**20
LARGEST_SAMPLE = 2**18  # gradient elements whose errors are compared, evenly spaced ones of a larger gradient


@dataclass
class _Sums:
    """What the backward calls of an iteration add up to, unscaled."""

    exact: Tensor
    error: Tensor
    square: float  # sum of bound^2 * energy: three times the channels' sum of squared errors, by the model
    channels: float  # by which it is shared out
    passed_error: float | None
    to_batch: float  # standard deviation for the whole batch over that for the samples
    seconds: float = 0.0


@dataclass
class _Turn:
    layer: str
    operator: str = ""
    gradient: str = ""
    extra_bytes: int = 0
    num_watched: int = 0
    sums: list[_Sums] = field(default_factory=list)


class GradientAudit:
    """Whose turn it is, and what came of it. Safe with a backward in another thread."""

    def __init__(self, grad_scaler: Any) -> None:
        self._grad_scaler = grad_scaler
        self._queue: deque[str] = deque()
        self._turn: _Turn | None = None
        self._lock = threading.Lock()

    def start_round(self, layers: Iterable[str]) -> None:
        """Each of these layers has a turn, one an iteration; a round that is not over yet goes on instead."""
        self._queue = self._queue or deque(layers)

    def next_turn(self) -> None:
        """An iteration begins: it is the next layer's, where one is left."""
        self._turn = _Turn(self._queue.popleft()) if self._queue else None

    def is_due(self, layer: str) -> bool:
        return self._turn is not None and self._turn.layer == layer

    def watch(self, call: Call, output: Any, energy: Callable[[], tuple[float, float]], gradient: str) -> None:
        """The layer's operator returned `output`: audit this call once backward reaches it.

        `energy` gives, when the record is there and before the iteration ends, the square of the bound in the model's
        units times the sensitivity, and the channels that share the error out. `gradient`: what is compared.
        """
        turn = self._turn
        if turn is None or not isinstance(output, Tensor) or output.grad_fn is None:
            return
        if not any(isinstance(handle, RecordHandle) for _, handle in call.stored):
            return
        kind = call.operator.kind
        if kind is not Kind.ACTIVATION and any(same_storage(output, part) for part in _tensors(call.spelling)):
            return
        if turn.num_watched and kind in (Kind.ACTIVATION, Kind.PRODUCT) and gradient == "upstream":
            return  # another call's gradient is another tensor
        turn.operator, turn.gradient, turn.num_watched = call.operator.name, gradient, turn.num_watched + 1
        replay = _Replay(call, gradient, energy)
        turn.extra_bytes += replay.nbytes

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            nonlocal replay
            with self._lock:
                once, replay = replay, None  # type: ignore[assignment]
            if once is not None and gradients[0] is not None:
                started = time.perf_counter()
                sums = once.sums(gradients[0].detach(), loss_scale(self._grad_scaler))
                if sums is not None:
                    sums.seconds = time.perf_counter() - started
                    with self._lock:
                        turn.sums.append(sums)

        output.grad_fn.register_prehook(arrived)

    def close_iteration(
        self, step: int, factor_of: Callable[[str, str], float]
    ) -> tuple[AuditMetrics, float | None] | None:
        """The audit of the layer whose turn it was, and measured over modelled sigma.

        `factor_of(layer, gradient)` is the factor in the predictions. None: the layer was exact, or had no gradient.
        """
        with self._lock:
            turn, self._turn = self._turn, None
        if turn is None or not turn.sums:
            return None
        return _audited(step, turn, factor_of(turn.layer, turn.gradient))


def _audited(step: int, turn: _Turn, factor: float) -> tuple[AuditMetrics, float | None] | None:
    first = turn.sums[0]
    exact = sum((one.exact for one in turn.sums[1:]), start=first.exact)
    error = sum((one.error for one in turn.sums[1:]), start=first.error)
    if not bool(torch.isfinite(exact).all()) or not bool(torch.isfinite(error).all()) or error.numel() == 0:
        return None
    sigma = math.sqrt(float(error.square().mean()))
    measured = first.to_batch * sigma
    square = math.fsum(one.square for one in turn.sums)
    modelled = error_models.modelled_sigma(1.0, square, first.channels) if math.isfinite(square) else None
    passed = [one.passed_error for one in turn.sums if one.passed_error is not None]
    audit = AuditMetrics(
        step=step,
        name=turn.layer,
        operator=turn.operator,
        gradient=turn.gradient,
        num_elements=error.numel(),
        gradient_rms=math.sqrt(float(exact.square().mean())),
        measured_sigma=measured,
        predicted_sigma=None if modelled is None else first.to_batch * factor * modelled,
        passed_error=math.sqrt(math.fsum(part**2 for part in passed) / len(passed)) if passed else None,
        extra_bytes=turn.extra_bytes,
        audit_seconds=math.fsum(one.seconds for one in turn.sums),
        **_error_statistics(exact, error, sigma),
    )
    return audit, sigma / modelled if modelled and sigma else None


def _error_statistics(exact: Tensor, error: Tensor, sigma: float) -> dict[str, Any]:
    """Slope, correlation, bias and shape of the error; None where a figure is not defined."""
    if sigma == 0:
        return {"slope": 0.0}
    n = error.numel()
    mean = float(error.mean())
    centred = error - mean
    deviation = math.sqrt(float(centred.square().mean()))
    exact_mean = float(exact.mean())
    exact_deviation = math.sqrt(float((exact - exact_mean).square().mean()))
    square = float(exact.square().sum())
    spread = exact_deviation * deviation
    counts = torch.histc((error / sigma).clamp(-4, 4).float(), AUDIT_BINS, -4, 4)
    return {
        "mean_error": mean * math.sqrt(n) / deviation if n > 1 and deviation > 0 else None,
        "slope": float((error * exact).sum()) / square if square > 0 else None,
        "correlation": float((centred * (exact - exact_mean)).mean()) / spread if spread > 0 else None,
        "excess_kurtosis": float((centred / deviation).pow(4).mean()) - 3 if deviation > 0 else None,
        "error_histogram": ",".join(str(int(count)) for count in counts),
    }


class _Replay:
    """A share of one call's samples with what the operator was given for them, to go backward twice."""

    def __init__(self, call: Call, gradient: str, energy: Callable[[], tuple[float, float]]) -> None:
        self.gradient, self.inverse_std = gradient, call.inverse_std
        self.handles = [handle for _, handle in call.stored]
        self.samples = call.input.shape[0] if call.input.dim() else 1
        self.num = max(self.samples // SAMPLED, 1) if _has_samples(call) else self.samples
        self.to_batch = math.sqrt(self.samples / max(self.num, 1)) if gradient != "upstream" else 1.0
        self.exact = [self._first(tensor).clone() for tensor, _ in call.stored]
        if call.operator is BATCH_NORM:
            x = call.input.detach()
            self.mean = x.mean([dim for dim in range(x.dim()) if dim != 1]) if call.inverse_std is not None else None
        self.square, self.channels = energy()
        leaves: dict[int, Tensor] = {}
        function, args, kwargs = call.spelling
        self.spelling = (
            function,
            _leaf(args, call, self.num, leaves),
            {name: _leaf(value, call, self.num, leaves) for name, value in kwargs.items()},
        )
        self.rows = _some_outputs(call)
        if self.rows is not None and call.weight is not None:
            leaves[id(call.weight)] = call.weight.detach()[self.rows].requires_grad_()
            kept = {name: value for name, value in call.arguments.items() if name != "bias"}
            self.spelling = function, (), {name: _leaf(value, call, self.num, leaves) for name, value in kept.items()}
            self.channels = len(self.rows)
        # From here on nothing of what was given: neither whole tensors nor the graph before them.
        self.wanted = [leaves[id(one)] for one in _wanted(call, gradient)]
        arguments = bind(call.operator, *self.spelling[1:])
        if call.weight is not None:
            arguments["weight"] = leaves[id(call.weight)]
        self.call = Call(call.operator, arguments, call.layer, call.site)
        device = self.exact[0].device.type
        enabled = torch.is_autocast_enabled(device)
        self.autocast = torch.autocast(device, torch.get_autocast_dtype(device) if enabled else None, enabled)
        own = [*self.exact, *(one for one in leaves.values() if one is not arguments.get("weight"))]
        self.nbytes = sum(tensor.nbytes for tensor in own)

    def sums(self, d: Tensor, scale: float) -> _Sums | None:
        """Both gradients of these samples; None where none is asked for."""
        call = self.call
        with torch.no_grad():
            d = self._first(d)
            decoded = [self._first(handle.unpack()) for handle in self.handles]
            if call.operator.kind is Kind.ACTIVATION:
                slope = call.operator.slope
                assert slope is not None
                pairs = [(d * slope(self.exact[0], call.arguments), d * slope(decoded[0], call.arguments))]
            elif call.operator is BATCH_NORM:
                pairs = self._of_scale(d, decoded[0])
            else:
                d, pairs = self._both(d, decoded)
            if not pairs:
                return None
            energy = (float(torch.linalg.vector_norm(d, dtype=torch.float64)) / scale) ** 2
            passed = None
            if self.gradient != "weight" and call.operator is not BATCH_NORM:
                exact, stored = pairs[-1]
                norm = float(torch.linalg.vector_norm(exact.float()))
                passed = float(torch.linalg.vector_norm((stored - exact).float())) / norm if norm > 0 else None
            exact, stored = pairs[0]
            channels = exact.numel() if self.gradient == "upstream" else self.channels
            every = -(-exact.numel() // LARGEST_SAMPLE)
            exact, stored = (one.reshape(-1)[::every].double() / scale for one in (exact, stored))
            return _Sums(exact, stored - exact, self.square * energy, channels, passed, self.to_batch)

    def _first(self, tensor: Tensor) -> Tensor:
        return _first(tensor.detach(), self.samples, self.num)

    def _of_scale(self, d: Tensor, decoded: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Batch norm's scale, whose mean and deviation are those of the whole batch."""
        if self.mean is None or self.inverse_std is None or self.call.weight is None:
            return []
        shape = [1, -1] + [1] * (d.dim() - 2)
        others = [dim for dim in range(d.dim()) if dim != 1]
        mean, inverse = self.mean.double().view(shape), self.inverse_std.double()
        exact, stored = (((x.double() - mean) * d.double()).sum(others) * inverse for x in (self.exact[0], decoded))
        return [(exact, stored)]

    def _both(self, d: Tensor, decoded: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The output's gradient as used, and pairs of gradients: of the weight, or of scale and input, or passed on."""
        call = self.call
        if self.rows is not None and call.weight is not None:
            d = d.index_select(-1 if call.operator is LINEAR else d.dim() - call.weight.dim() + 1, self.rows)
        if not self.wanted or not all(one.requires_grad for one in self.wanted):
            return d, []
        function, args, kwargs = self.spelling
        approximate = iter(decoded)
        as_stored = False

        def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
            other = next(approximate, tensor) if call.need_of(tensor) is Need.APPROXIMATE else tensor
            return tensor.detach(), other.detach()

        with torch.enable_grad(), self.autocast:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[as_stored]):
                output = function(*args, **kwargs)
            exact = torch.autograd.grad(output, self.wanted, d, retain_graph=True)
            as_stored = True
            stored = torch.autograd.grad(output, self.wanted, d)
        return d, list(zip(exact, stored, strict=True))


def _first(tensor: Tensor, samples: int, num: int) -> Tensor:
    """Of what has one line for each sample, or as many for each, those of the first `num`."""
    return tensor if num == samples else tensor[: tensor.shape[0] // samples * num]


def _leaf(value: Any, call: Call, num: int, leaves: dict[int, Tensor]) -> Any:
    """An argument as a leaf of a graph of its own, of `num` samples; `leaves`: by the identity of what is meant."""
    if isinstance(value, list | tuple):
        return type(value)([_leaf(part, call, num, leaves) for part in value])
    if not isinstance(value, Tensor):
        return value
    if id(value) not in leaves:
        own, given = value.detach(), call.input
        if value is not call.weight:
            # a factor beside the input may have a line for each sample too
            factor = call.operator.kind is Kind.PRODUCT and value.dim() == given.dim()
            if value is given or (factor and value.shape[0] == given.shape[0]):
                own = _first(own, given.shape[0] if given.dim() else 1, num)
            own = own.clone()  # running statistics too, which the operator would move on once more
        leaves[id(value)] = own.requires_grad_(value.requires_grad)
    return leaves[id(value)]


def _some_outputs(call: Call) -> Tensor | None:
    """Of a large weight as many outputs as LARGEST_WEIGHT allows, evenly spaced; None: all."""
    weight = call.weight
    convolution = call.operator in (CONV1D, CONV2D, CONV3D) and call.arguments.get("groups", 1) == 1
    if weight is None or weight.numel() <= LARGEST_WEIGHT or not (call.operator is LINEAR or convolution):
        return None
    num = max(LARGEST_WEIGHT // (weight.numel() // weight.shape[0]), 1)
    return torch.linspace(0, weight.shape[0] - 1, num, device=weight.device).round().long()


def _wanted(call: Call, gradient: str) -> list[Tensor]:
    """Whose gradients are compared: the weight's, or the scale's and the input's, or the other factor's."""
    if call.operator.kind is Kind.ACTIVATION:
        return []
    if gradient == "upstream":
        factors = [call.arguments[name] for name in call.operator.operands]
        return [factors[place] for place in call.passed_on()[:1]]
    wanted = [] if call.weight is None else [call.weight]
    return [*wanted, call.input] if gradient == "norm" and call.input.requires_grad else wanted


def _has_samples(call: Call) -> bool:
    """Whether the first dimension counts samples that the operator treats apart, or as batch norm does."""
    operator, dims = call.operator, call.input.dim()
    if operator.name.startswith("conv"):
        return call.weight is not None and dims == call.weight.dim()
    if operator in (LAYER_NORM, RMS_NORM):
        return dims > len(call.arguments["normalized_shape"])
    if operator.kind is Kind.PRODUCT:
        return dims > 1 and (call.weight is None or call.weight.dim() < dims)
    if operator is INSTANCE_NORM:  # it saves all samples' channels side by side
        return False
    return dims > 1 and (operator in (LINEAR, PRELU) or operator.kind in (Kind.ACTIVATION, Kind.NORM))


def bound_square(call: Call, spread: Tensor | float | None) -> float:
    """Mean square of the bound with which the call's input was stored; in units of `spread`, a norm's deviation.

    NaN where the record has no bound, or a norm's deviation is not known: nothing is predicted then.
    """
    bounds = [handle.record.bound for _, handle in call.stored if isinstance(handle, RecordHandle)]
    if not bounds or bounds[0] is None or bounds[0].kind != "abs":
        return math.nan
    value = torch.as_tensor(bounds[0].value).double().cpu()
    if call.operator.kind is Kind.NORM:
        if spread is None:
            return math.nan
        value = value / torch.as_tensor(spread).double().cpu()
        value = value[torch.isfinite(value)] if value.dim() else value
    return float(value.square().mean())


def _tensors(spelling: tuple[Any, Any, Any]) -> list[Tensor]:
    _, args, kwargs = spelling
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


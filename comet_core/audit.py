"""Measured against predicted gradient error: one layer an iteration forms its gradient twice, exactly and as stored.

The layer whose turn it is keeps, beside its record, what its operator was called with. When the gradient d at its
output arrives, the operator runs once more under hooks of its own, and goes backward twice: with the tensor that was
saved and with the one that the record gives back. So every operator is audited by its own backward, with whatever else
it saved (a norm's mean and deviation) the same in both. Activations, which may have worked in place, are their slope.

An error has a standard deviation of its own, which the error models predict up to a factor (THEORY section 1: plain
rounding at coarse bounds follows the gradient): `ratio` is measured over modelled, and the controller learns from it.

Costs, in the iterations of a turn only: the exact tensor until backward has come (`extra_bytes`, and in `held_bytes`),
one more forward and two backwards of one operator. A weight of more than LARGEST_WEIGHT
elements is audited on some of its outputs. Not audited: what was stored exactly, and products in place.
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
from comet_core.operators import CONV1D, CONV2D, CONV3D, LINEAR, Call, Kind, Need, bind, same_storage
from comet_core.saved_records import RecordHandle

TURN_EVERY = 4  # iterations, once the first collections are over: a turn holds a whole tensor
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

    def next_turn(self, iteration: int, collect_every: int) -> None:
        """`iteration` begins: it may be the next layer's, where one is left."""
        if self._queue and (iteration <= collect_every or iteration % TURN_EVERY == 0):
            self._turn = _Turn(self._queue.popleft())

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
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor, _ in call.stored}
        turn.extra_bytes += sum(storage.nbytes() for storage in storages.values())
        replay = _Replay(call, gradient, energy())

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
    measured = math.sqrt(float(error.square().mean()))
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
        predicted_sigma=None if modelled is None else factor * modelled,
        passed_error=math.sqrt(math.fsum(part**2 for part in passed) / len(passed)) if passed else None,
        extra_bytes=turn.extra_bytes,
        audit_seconds=math.fsum(one.seconds for one in turn.sums),
        **_error_statistics(exact, error, measured),
    )
    return audit, measured / modelled if modelled and measured else None


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
    """One call with what it was given, to go backward twice."""

    def __init__(self, call: Call, gradient: str, energy: tuple[float, float]) -> None:
        self.call, self.gradient, (self.square, self.channels) = call, gradient, energy
        self.versions = [tensor._version for tensor, _ in call.stored]
        for _, handle in call.stored:
            handle.entry.hold_exact(+1)
        device = call.stored[0][0].device.type
        enabled = torch.is_autocast_enabled(device)
        self.autocast = torch.autocast(device, torch.get_autocast_dtype(device) if enabled else None, enabled)

    def __del__(self) -> None:
        for _, handle in self.call.stored:
            handle.entry.hold_exact(-1)

    def sums(self, d: Tensor, scale: float) -> _Sums | None:
        """Both gradients of this call. None where the exact tensor was changed in place meanwhile."""
        call = self.call
        if self.versions != [tensor._version for tensor, _ in call.stored]:
            return None
        with torch.no_grad():
            decoded = [handle.unpack() for _, handle in call.stored]
            if call.operator.kind is Kind.ACTIVATION:
                slope = call.operator.slope
                assert slope is not None
                exact, stored = (d * slope(x, call.arguments) for x in (call.stored[0][0].detach(), decoded[0]))
                pairs = [(exact, stored)]
            else:
                d, found = self._both(d, decoded)
                if found is None:
                    return None
                pairs = found
            energy = (float(torch.linalg.vector_norm(d, dtype=torch.float64)) / scale) ** 2
            passed = None
            if self.gradient != "weight":
                exact, stored = pairs[-1]
                norm = float(torch.linalg.vector_norm(exact.float()))
                passed = float(torch.linalg.vector_norm((stored - exact).float())) / norm if norm > 0 else None
            exact, stored = pairs[0]
            channels = exact.numel() if self.gradient == "upstream" else self.channels
            every = -(-exact.numel() // LARGEST_SAMPLE)
            exact, stored = (one.reshape(-1)[::every].double() / scale for one in (exact, stored))
            return _Sums(exact, stored - exact, self.square * energy, channels, passed)

    def _both(self, d: Tensor, decoded: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]] | None]:
        """The output's gradient as used, and pairs of gradients: of the weight, or of scale and input, or passed on."""
        call = self.call
        leaves: dict[int, Tensor] = {}
        function, args, kwargs = call.spelling
        args, kwargs = self._leaf(args, leaves), {name: self._leaf(value, leaves) for name, value in kwargs.items()}
        weight = call.weight
        if weight is not None and weight.numel() > LARGEST_WEIGHT and self._rows_are_outputs():
            d, args, kwargs = self._some_outputs(d, leaves)
        arguments = bind(call.operator, args, kwargs)
        if weight is not None:
            arguments["weight"] = leaves[id(weight)]
        again = Call(call.operator, arguments, call.layer, call.site, (function, args, kwargs))
        if self.gradient == "upstream":
            factors = [call.arguments[name] for name in call.operator.operands]
            wanted = [leaves[id(factors[place])] for place in call.passed_on()[:1]]
        else:
            wanted = [] if weight is None else [leaves[id(weight)]]
            if self.gradient == "norm" and call.input.requires_grad:
                wanted.append(leaves[id(call.input)])
        if not wanted or not all(one.requires_grad for one in wanted):
            return d, None
        approximate = iter(decoded)
        as_stored = False

        def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
            other = next(approximate, tensor) if again.need_of(tensor) is Need.APPROXIMATE else tensor
            return tensor.detach(), other.detach()

        with torch.enable_grad(), self.autocast:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[as_stored]):
                output = function(*args, **kwargs)
            exact = torch.autograd.grad(output, wanted, d, retain_graph=True)
            as_stored = True
            stored = torch.autograd.grad(output, wanted, d)
        return d, list(zip(exact, stored, strict=True))

    def _rows_are_outputs(self) -> bool:
        operator, arguments = self.call.operator, self.call.arguments
        return operator is LINEAR or (operator in (CONV1D, CONV2D, CONV3D) and arguments.get("groups", 1) == 1)

    def _leaf(self, value: Any, leaves: dict[int, Tensor]) -> Any:
        """An argument as a leaf of a graph of its own; `leaves`: by the identity of what they stand for."""
        if isinstance(value, list | tuple):
            return type(value)([self._leaf(part, leaves) for part in value])
        if not isinstance(value, Tensor):
            return value
        if id(value) not in leaves:
            own = value.detach()
            if self.call.operator.kind is Kind.NORM and not value.requires_grad and value is not self.call.input:
                own = own.clone()  # running statistics, which the operator would move on once more
            leaves[id(value)] = own.requires_grad_(value.requires_grad)
        return leaves[id(value)]

    def _some_outputs(self, d: Tensor, leaves: dict[int, Tensor]) -> tuple[Tensor, Any, Any]:
        """The same call for as many of its outputs as LARGEST_WEIGHT allows, evenly spaced; without bias."""
        call, weight = self.call, self.call.weight
        assert weight is not None
        num = max(LARGEST_WEIGHT // (weight.numel() // weight.shape[0]), 1)
        rows = torch.linspace(0, weight.shape[0] - 1, num, device=weight.device).round().long()
        leaves[id(weight)] = weight.detach()[rows].requires_grad_()
        self.channels = num
        dim = -1 if call.operator is LINEAR else d.dim() - weight.dim() + 1
        kept = {name: self._leaf(value, leaves) for name, value in call.arguments.items() if name != "bias"}
        return d.index_select(dim, rows), (), kept


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


"""Which bound each layer gets: fixed, momentum, noise, memory rule. Numbers in, numbers out: sees no tensors.

A controller is asked `bound_for(layer)` by every forward, told `update(statistics)` at each collection and
`end_iteration` after each iteration. Until a layer has statistics it gets the start-up bound, a share of its range, so
that the peak is compressed from iteration 1. Statistics that are not finite (a skipped step, a diverged loss) change
nothing, and neither does a collection without a gradient; a layer that never had one is stored exactly.

What audits measured of a layer over what its error model says is its factor, smoothed over audits: a bound spends the
budget with the factor in. When the loss jumps, all bounds are divided at once and come back slowly. Every decision
whose reason is another than before is an event. Sources: THEORY section 4; the momentum rule is COMET's (VLDB 2022,
section 4) in its rms form.
"""

import math
import statistics as middle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from comet_core import error_models
from comet_core.metrics import ControllerEvent

START_RANGE_FRACTION = 1 / 64  # THEORY section 4: kappa about 1 % at initialisation
LARGEST_RANGE_FRACTION = 1 / 8
LARGEST_BOUND_IN_STD = 1.0
WARM_UP_ITERATIONS = 100  # with a quarter of the budget: differences of gradients overstate the noise early on
WARM_UP_SHARE = 0.25
FACTOR_MEMORY = 0.7  # of a factor's logarithm, at the next audit: a norm of 16 channels gives a noisy one
FIRST_FACTOR_MEMORY = 0.5  # at the first one
LARGEST_FACTOR = 16.0
USUAL_FACTORS = (0.5, 2.0)
SPIKE_DEVIATIONS = 10.0  # median absolute deviations above the median of the last losses
NUM_LOSSES, FEWEST_LOSSES = 50, 20
TIGHTENING, TIGHTEST = 1 / 4, 1 / 16
RECOVERY, RECOVERY_ITERATIONS = 2**0.5, 10  # a step back, after so many iterations without a jump
MEMORY_MARGIN = 0.97
BUDGET_RANGE = (1e-6, 10.0)


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What one collection saw of a layer. None where it was not measured."""

    name: str
    kind: Literal["weight", "norm", "upstream"]  # which gradient an error in the saved input changes
    energy: float  # sum of sensitivity * d^2 at the output, over all backward calls of the iteration
    out_channels: float  # by which the energy is shared out; upstream: elements of the gradient passed on
    value_std: float | None = None  # of the saved input, weighted layers
    value_range: float | None = None  # largest minus smallest
    gradient_variance: float | None = None  # Var(xi): sampling noise of one weight-gradient element
    gradient_square: float | None = None  # upstream: mean square of the gradient passed on
    budget_share: float = 1.0  # upstream: this layer's part of what all together may spend
    momentum_magnitude: float | None = None  # mean |momentum| of the weight, in SGD's units
    audit_ratio: float | None = None  # measured over modelled sigma, of an audit since the last collection


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A layer's bound. `kind`: "abs" in units of the tensor, "std" in standard deviations of the channel (norms),
    "range" in shares of the range (start-up), "exact"."""

    kind: str
    value: float = 0.0
    target_sigma: float | None = None  # gradient error that the controller allowed
    predicted_sigma: float | None = None  # gradient error expected at this bound, after clamps


START = Bound(kind="range", value=START_RANGE_FRACTION)
EXACT = Bound(kind="exact")


class Controller:
    """The rule that all share; a subclass says which gradient error a layer may have.

    `layer_bounds`: pattern (as in file names, `layer1.*`) -> absolute bound, or None for exactly; the first that fits a
    layer's name takes the rule's place.
    """

    name: str
    reads_momentum = False  # whether statistics need `momentum_magnitude`

    def __init__(self, *, layer_bounds: Mapping[str, float | None] | None = None) -> None:
        self._given = dict(layer_bounds or {})
        self._bounds: dict[str, Bound] = {}
        self._factors: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._events: list[ControllerEvent] = []
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._share = 1.0  # of every bound that the rule sets; below 1 after a jump of the loss
        self._num_quiet = 0

    def bound_for(self, layer: str) -> Bound:
        bound = self._bounds.get(layer)
        if bound is None:
            bound = self._bounds[layer] = self._given_bound(layer) or self._start()
        if self._share == 1 or bound.kind == "exact" or self._pattern_of(layer) is not None:
            return bound
        predicted = None if bound.predicted_sigma is None else self._share * bound.predicted_sigma
        return replace(bound, value=self._share * bound.value, predicted_sigma=predicted)

    def factor_of(self, layer: str, kind: str) -> float:
        """Measured over modelled gradient error, as audits of the layer have shown it so far."""
        return self._factors.get(layer, error_models.START_FACTORS[kind])

    def update(self, statistics: LayerStatistics, iteration: int) -> None:
        """Set the layer's bound for the iterations after `iteration` (1 is the first)."""
        name = statistics.name
        self._learn(statistics, iteration)
        if not math.isfinite(statistics.energy):
            self._note(name, iteration, "not finite", "its gradient is not finite: the bound stays as it was")
            return
        given = self._given_bound(name)
        if given is not None:
            self._bounds[name] = replace(given, predicted_sigma=self._predicted(given.value, statistics))
            text = "stored exactly" if given.kind == "exact" else f"bound {given.value:.3g}"
            self._note(name, iteration, "override", f"{text}, as given for {self._pattern_of(name)!r}")
        elif statistics.energy > 0:
            self._set_bound(statistics, iteration)
        elif name not in self._reasons:
            self._bounds[name] = EXACT
            self._note(name, iteration, "exact", "no gradient arrived yet: stored exactly until one does")

    def end_iteration(self, iteration: int, *, loss: float | None, held_bytes: int) -> bool:
        """The iteration is over, with this loss where it is known. Returns whether bounds have changed.

        A loss that is not finite, or far above the last ones, divides all bounds by four, at most by sixteen.
        """
        if loss is None:
            return False
        before = self._share
        jumped = self._jumped(loss)
        self._losses.append(loss)
        self._num_quiet = 0 if jumped else self._num_quiet + 1
        if jumped:
            self._share = max(self._share * TIGHTENING, TIGHTEST)
            if self._share != before:
                self._say(iteration, "loss spike", f"loss {loss:.4g}: all bounds at {self._share:.3g} of their rule")
        elif self._share < 1 and self._num_quiet % RECOVERY_ITERATIONS == 0:
            self._share = min(self._share * RECOVERY, 1.0) if self._share * RECOVERY < 0.99 else 1.0
            self._say(iteration, "recovering", f"no jump of the loss: all bounds at {self._share:.3g} of their rule")
        return self._share != before

    def take_events(self) -> list[ControllerEvent]:
        """Decisions since the last call."""
        events, self._events = self._events, []
        return events

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        """Allowed standard deviation of a weight-gradient element's error; None: not known yet."""
        raise NotImplementedError

    def upstream_share(self) -> float:
        """What all layers that pass errors upstream may add to a gradient together, as a share of its mean square."""
        raise NotImplementedError

    def unmatched_patterns(self, layers: set[str]) -> list[str]:
        """Patterns of `layer_bounds` that fit none of these layers."""
        return [pattern for pattern in self._given if not any(fnmatchcase(layer, pattern) for layer in layers)]

    def _start(self) -> Bound:
        return START

    def _pattern_of(self, layer: str) -> str | None:
        return next((pattern for pattern in self._given if fnmatchcase(layer, pattern)), None)

    def _given_bound(self, layer: str) -> Bound | None:
        pattern = self._pattern_of(layer)
        if pattern is None:
            return None
        value = self._given[pattern]
        return EXACT if value is None else Bound(kind="abs", value=value)

    def _predicted(self, value: float, statistics: LayerStatistics) -> float | None:
        if statistics.kind == "norm":  # a bound in the tensor's units says nothing without the channels' deviations
            return None
        factor = self.factor_of(statistics.name, statistics.kind)
        return factor * error_models.modelled_sigma(value, statistics.energy, statistics.out_channels)

    def _set_bound(self, statistics: LayerStatistics, iteration: int) -> None:
        bound, limit = (
            self._norm_bound(statistics) if statistics.kind == "norm" else self._abs_bound(statistics, iteration)
        )
        if bound is None:
            return
        self._bounds[statistics.name] = bound
        unit = " standard deviations" if bound.kind == "std" else ""
        if limit:
            self._note(statistics.name, iteration, "clamped", f"bound {bound.value:.3g}{unit}: {limit}")
        else:
            spent = "" if bound.target_sigma is None else f" for a gradient error of {bound.target_sigma:.3g}"
            self._note(statistics.name, iteration, "budget", f"bound {bound.value:.3g}{unit}{spent}")

    def _abs_bound(self, statistics: LayerStatistics, iteration: int) -> tuple[Bound | None, str]:
        """The bound, and in words what limits it where that is not the budget."""
        if statistics.kind == "upstream":
            square = statistics.gradient_square
            sigma = None if square is None else math.sqrt(self.upstream_share() * statistics.budget_share * square)
        else:
            sigma = self.target_sigma(statistics, iteration)
        if sigma is None or not math.isfinite(sigma):
            return None, ""
        energy, channels = statistics.energy, statistics.out_channels
        factor = self.factor_of(statistics.name, statistics.kind)
        value, limit = error_models.bound_at(sigma / factor, energy, channels), ""
        if statistics.value_range is not None and value > statistics.value_range * LARGEST_RANGE_FRACTION:
            value, limit = statistics.value_range * LARGEST_RANGE_FRACTION, "an eighth of the values' range"
        if statistics.value_std is not None and value > statistics.value_std * LARGEST_BOUND_IN_STD:
            value, limit = statistics.value_std * LARGEST_BOUND_IN_STD, "the values' standard deviation"
        if not math.isfinite(value):
            return None, ""
        predicted = factor * error_models.modelled_sigma(value, energy, channels)
        return Bound(kind="abs", value=value, target_sigma=sigma, predicted_sigma=predicted), limit

    def _norm_bound(self, statistics: LayerStatistics) -> tuple[Bound | None, str]:
        raise NotImplementedError

    def _std_bound(self, value: float, statistics: LayerStatistics, target: float | None) -> tuple[Bound, str]:
        """A norm's bound of `value` standard deviations, the factor taken into account."""
        factor = self.factor_of(statistics.name, "norm")
        value, limit = value / factor, ""
        if value > LARGEST_BOUND_IN_STD:
            value, limit = LARGEST_BOUND_IN_STD, "a channel's standard deviation"
        predicted = factor * error_models.modelled_sigma(value, statistics.energy, statistics.out_channels)
        return Bound(kind="std", value=value, target_sigma=target, predicted_sigma=predicted), limit

    def _learn(self, statistics: LayerStatistics, iteration: int) -> None:
        ratio = statistics.audit_ratio
        if ratio is None or not (math.isfinite(ratio) and ratio > 0):
            return
        before = self.factor_of(statistics.name, statistics.kind)
        memory = FACTOR_MEMORY if statistics.name in self._factors else FIRST_FACTOR_MEMORY
        factor = before**memory * min(max(ratio, 1 / LARGEST_FACTOR), LARGEST_FACTOR) ** (1 - memory)
        self._factors[statistics.name] = factor
        low, high = USUAL_FACTORS
        if (low <= before <= high) != (low <= factor <= high):
            where = "is back within" if low <= factor <= high else "has left"
            text = f"measured over modelled gradient error, {factor:.2f}, {where} {low} to {high}; the bound follows it"
            self._say(iteration, "factor", text, statistics.name)

    def _jumped(self, loss: float) -> bool:
        finite = [one for one in self._losses if math.isfinite(one)]
        if not math.isfinite(loss):
            return True
        if len(finite) < FEWEST_LOSSES:
            return False
        usual = middle.median(finite)
        deviation = middle.median(abs(one - usual) for one in finite)
        # beyond twice the last ones' largest excess too: where the loss is small, its tail is long
        return loss - usual > max(SPIKE_DEVIATIONS * deviation, 2 * (max(finite) - usual), 0.1 * abs(usual))

    def _note(self, layer: str, iteration: int, kind: str, message: str) -> None:
        """An event, where the reason is another than the layer's last one."""
        if self._reasons.get(layer) != kind:
            self._reasons[layer] = kind
            self._say(iteration, kind, message, layer)

    def _say(self, iteration: int, kind: str, message: str, layer: str | None = None) -> None:
        self._events.append(ControllerEvent(step=iteration, kind=kind, layer=layer, message=message))


class NoiseController(Controller):
    """Compression noise as a share of the mini-batch's own sampling noise (THEORY section 4, the noise rule)."""

    name = "noise"
    warm_up_share = WARM_UP_SHARE

    def __init__(
        self,
        *,
        noise_budget: float,
        norm_budget: float,
        layer_bounds: Mapping[str, float | None] | None = None,
    ) -> None:
        super().__init__(layer_bounds=layer_bounds)
        self.noise_budget, self.norm_budget = noise_budget, norm_budget
        self._warming_up = self.warm_up_share != 1

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        if statistics.gradient_variance is None:
            return None
        share = self.warm_up_share if iteration < WARM_UP_ITERATIONS else 1.0
        if self._warming_up and share == 1:
            self._warming_up = False
            self._say(iteration, "warm-up", f"over: the whole budget instead of {self.warm_up_share:g} of it")
        return math.sqrt(share * self.noise_budget * statistics.gradient_variance)

    def upstream_share(self) -> float:
        return self.noise_budget

    def _norm_bound(self, statistics: LayerStatistics) -> tuple[Bound | None, str]:
        return self._std_bound(error_models.norm_budget_in_std(self.norm_budget), statistics, None)


class MemoryController(NoiseController):
    """The noise rule with the smallest budget at which what is held for backward fits into `memory_bytes`.

    Solved anew at each collection, and at once when more is held. Bytes fall with the budget's logarithm: the slope
    between the last two budgets says how fast. Norms get four times the weights' budget, as by default.
    """

    name = "memory"
    warm_up_share = 1.0
    norms_over_weights = 4.0

    def __init__(self, *, memory_bytes: int, layer_bounds: Mapping[str, float | None] | None = None) -> None:
        budget = 0.05
        super().__init__(
            noise_budget=budget, norm_budget=self.norms_over_weights * budget, layer_bounds=layer_bounds
        )
        self.memory_bytes = memory_bytes
        self._seen: dict[str, LayerStatistics] = {}
        self._collected = False
        self._changed_at = 0
        self._before: tuple[float, float] | None = None  # logarithms of a budget and of the bytes held with it
        self._slope = -0.25

    def update(self, statistics: LayerStatistics, iteration: int) -> None:
        super().update(statistics, iteration)
        self._collected = True

    def _set_bound(self, statistics: LayerStatistics, iteration: int) -> None:
        self._seen[statistics.name] = statistics
        super()._set_bound(statistics, iteration)

    def end_iteration(self, iteration: int, *, loss: float | None, held_bytes: int) -> bool:
        changed = super().end_iteration(iteration, loss=loss, held_bytes=held_bytes)
        due = self._collected or held_bytes > self.memory_bytes
        self._collected = False
        if not due or held_bytes <= 0 or not self._seen or iteration <= self._changed_at + 1:
            return changed
        here = math.log(self.noise_budget), math.log(held_bytes)
        if self._before is not None and abs(here[0] - self._before[0]) > 0.05:
            slope = (here[1] - self._before[1]) / (here[0] - self._before[0])
            self._slope = min(max(slope, -1.0), -0.05)
        wanted = here[0] + (math.log(MEMORY_MARGIN * self.memory_bytes) - here[1]) / self._slope
        wanted = min(max(wanted, here[0] - math.log(16)), here[0] + math.log(16))
        low, high = BUDGET_RANGE
        budget = min(max(math.exp(wanted), low), high)
        if held_bytes > self.memory_bytes and self.noise_budget == high:
            text = f"{held_bytes:,} bytes held at the largest budget, more than {self.memory_bytes:,}: batch too large"
            self._note("", iteration, "memory", text)
        if abs(math.log(budget) - here[0]) < 0.05:
            return changed
        self._before, self._changed_at = here, iteration
        self.noise_budget, self.norm_budget = budget, self.norms_over_weights * budget
        self._say(
            iteration, "memory", f"{held_bytes:,} of {self.memory_bytes:,} bytes held: noise budget now {budget:.3g}"
        )
        for statistics in self._seen.values():
            self._set_bound(statistics, iteration)
        return True


class MomentumController(Controller):
    """Gradient error at a fraction of the mean momentum's magnitude (COMET's rule)."""

    name = "momentum"
    reads_momentum = True

    def __init__(self, *, momentum_fraction: float, layer_bounds: Mapping[str, float | None] | None = None) -> None:
        super().__init__(layer_bounds=layer_bounds)
        self.momentum_fraction = momentum_fraction

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        if statistics.momentum_magnitude is None:
            return None
        return self.momentum_fraction * statistics.momentum_magnitude

    def upstream_share(self) -> float:
        return self.momentum_fraction**2

    def _norm_bound(self, statistics: LayerStatistics) -> tuple[Bound | None, str]:
        sigma = self.target_sigma(statistics, 0)
        if sigma is None or not math.isfinite(sigma):
            return None, ""
        return self._std_bound(
            error_models.bound_at(sigma, statistics.energy, statistics.out_channels), statistics, sigma
        )


class FixedController(Controller):
    """One absolute bound for every lossy tensor, from the first iteration on. What it does to gradients is reported."""

    name = "fixed"

    def __init__(self, *, error_bound: float, layer_bounds: Mapping[str, float | None] | None = None) -> None:
        super().__init__(layer_bounds=layer_bounds)
        self.error_bound = error_bound

    def update(self, statistics: LayerStatistics, iteration: int) -> None:
        self._learn(statistics, iteration)
        bound = self._given_bound(statistics.name) or self._start()
        if bound.kind == "abs" and math.isfinite(statistics.energy):
            bound = replace(bound, predicted_sigma=self._predicted(bound.value, statistics))
        self._bounds[statistics.name] = bound

    def end_iteration(self, iteration: int, *, loss: float | None, held_bytes: int) -> bool:
        return False

    def _start(self) -> Bound:
        return Bound(kind="abs", value=self.error_bound)


CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "noise": NoiseController,
    "momentum": MomentumController,
    "memory": MemoryController,
    "fixed": FixedController,
}


def is_collection(iteration: int, collect_every: int) -> bool:
    """Whether bounds are updated after this iteration: 1, 2, 4, 8, ... until `collect_every`, then every so many."""
    if iteration < collect_every:
        return iteration & (iteration - 1) == 0
    return iteration % collect_every == 0


def samples_gradients(iteration: int, collect_every: int) -> bool:
    """Whether this iteration's gradient is one of the five before a collection that give the last four differences."""
    return any(is_collection(iteration + ahead, collect_every) for ahead in range(5))

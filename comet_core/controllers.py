"""Which bound each layer gets: fixed, momentum rule, noise rule. Numbers in, numbers out: sees no tensors.

A controller is asked `bound_for(layer)` by every forward and told `update(statistics)` at each collection. Until a
layer has statistics it gets the start-up bound, a share of its range, so that the peak is compressed from iteration
1. A layer whose output gradient is zero is stored exactly. Statistics that are not finite (a skipped step, a diverged
loss) change nothing. Sources: THEORY section 4; the momentum rule is COMET's (VLDB 2022, section 4) in its rms form.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from comet_core import error_models

START_RANGE_FRACTION = 1 / 64  # THEORY section 4: kappa about 1 % at initialisation
LARGEST_RANGE_FRACTION = 1 / 8
LARGEST_BOUND_IN_STD = 1.0
WARM_UP_ITERATIONS = 100  # with a quarter of the budget: differences of gradients overstate the noise early on
WARM_UP_SHARE = 0.25


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
    """The rule that all share; a subclass says which gradient error a layer may have."""

    name: str
    reads_momentum = False  # whether statistics need `momentum_magnitude`

    def __init__(self) -> None:
        self._bounds: dict[str, Bound] = {}

    def bound_for(self, layer: str) -> Bound:
        return self._bounds.get(layer, START)

    def update(self, statistics: LayerStatistics, iteration: int) -> None:
        """Set the layer's bound for the iterations after `iteration` (1 is the first)."""
        if not math.isfinite(statistics.energy):
            return
        if statistics.energy <= 0:
            self._bounds[statistics.name] = EXACT
            return
        bound = self._norm_bound(statistics) if statistics.kind == "norm" else self._abs_bound(statistics, iteration)
        if bound is not None:
            self._bounds[statistics.name] = bound

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        """Allowed standard deviation of a weight-gradient element's error; None: not known yet."""
        raise NotImplementedError

    def upstream_share(self) -> float:
        """What all layers that pass errors upstream may add to a gradient together, as a share of its mean square."""
        raise NotImplementedError

    def _abs_bound(self, statistics: LayerStatistics, iteration: int) -> Bound | None:
        if statistics.kind == "upstream":
            square = statistics.gradient_square
            sigma = None if square is None else math.sqrt(self.upstream_share() * statistics.budget_share * square)
        else:
            sigma = self.target_sigma(statistics, iteration)
        if sigma is None or not math.isfinite(sigma):
            return None
        energy, channels = statistics.energy, statistics.out_channels
        value = error_models.weight_error_bound(sigma, energy, channels)
        if statistics.value_range is not None:
            value = min(value, statistics.value_range * LARGEST_RANGE_FRACTION)
        if statistics.value_std is not None:
            value = min(value, statistics.value_std * LARGEST_BOUND_IN_STD)
        if not math.isfinite(value):
            return None
        predicted = error_models.weight_sigma(value, energy, channels)
        return Bound(kind="abs", value=value, target_sigma=sigma, predicted_sigma=predicted)

    def _norm_bound(self, statistics: LayerStatistics) -> Bound | None:
        raise NotImplementedError


class NoiseController(Controller):
    """Compression noise as a share of the mini-batch's own sampling noise (THEORY section 4, the noise rule)."""

    name = "noise"

    def __init__(self, *, noise_budget: float, norm_budget: float) -> None:
        super().__init__()
        self.noise_budget, self.norm_budget = noise_budget, norm_budget

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        if statistics.gradient_variance is None:
            return None
        share = WARM_UP_SHARE if iteration < WARM_UP_ITERATIONS else 1.0
        return math.sqrt(share * self.noise_budget * statistics.gradient_variance)

    def upstream_share(self) -> float:
        return self.noise_budget

    def _norm_bound(self, statistics: LayerStatistics) -> Bound | None:
        value = min(error_models.norm_budget_in_std(self.norm_budget), LARGEST_BOUND_IN_STD)
        predicted = error_models.norm_sigma(value, statistics.energy, statistics.out_channels)
        return Bound(kind="std", value=value, predicted_sigma=predicted)


class MomentumController(Controller):
    """Gradient error at a fraction of the mean momentum's magnitude (COMET's rule)."""

    name = "momentum"
    reads_momentum = True

    def __init__(self, *, momentum_fraction: float) -> None:
        super().__init__()
        self.momentum_fraction = momentum_fraction

    def target_sigma(self, statistics: LayerStatistics, iteration: int) -> float | None:
        if statistics.momentum_magnitude is None:
            return None
        return self.momentum_fraction * statistics.momentum_magnitude

    def upstream_share(self) -> float:
        return self.momentum_fraction**2

    def _norm_bound(self, statistics: LayerStatistics) -> Bound | None:
        sigma = self.target_sigma(statistics, 0)
        if sigma is None or not math.isfinite(sigma):
            return None
        energy, channels = statistics.energy, statistics.out_channels
        value = min(error_models.norm_bound_in_std(sigma, energy, channels), LARGEST_BOUND_IN_STD)
        predicted = error_models.norm_sigma(value, energy, channels)
        return Bound(kind="std", value=value, target_sigma=sigma, predicted_sigma=predicted)


class FixedController(Controller):
    """One absolute bound for every lossy tensor, from the first iteration on. What it does to gradients is reported."""

    name = "fixed"

    def __init__(self, *, error_bound: float) -> None:
        super().__init__()
        self.error_bound = error_bound

    def bound_for(self, layer: str) -> Bound:
        return self._bounds.get(layer, Bound(kind="abs", value=self.error_bound))

    def update(self, statistics: LayerStatistics, iteration: int) -> None:
        if statistics.kind == "norm" or not math.isfinite(statistics.energy):
            return
        predicted = error_models.weight_sigma(self.error_bound, statistics.energy, statistics.out_channels)
        self._bounds[statistics.name] = Bound(kind="abs", value=self.error_bound, predicted_sigma=predicted)


CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "noise": NoiseController,
    "momentum": MomentumController,
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

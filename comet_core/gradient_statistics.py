"""What controllers need to know of gradients: sampling noise, momentum, energy at outputs; gathered in backward.

Gradients are sampled in post-accumulate hooks, at most 16,384 fixed random elements a weight, because a full copy would
cost more than compression saves on AlexNet and VGG (THEORY section 4), and because at `step()` the user may have zeroed
them already. Sampling uses a generator of its own: the user's random numbers are not touched.
"""

import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from comet_core.activations import weakly
from comet_core.controllers import LayerStatistics

SAMPLE_SIZE = 16_384
NUM_PAIRS = 4  # the smallest of the last four differences: consecutive ones overstate the noise, since the model moves
AVERAGE_DECAY = 0.9  # of the gradient's running mean, where the optimizer keeps no momentum


class GradientSampler:
    """Sampling noise and mean momentum of one weight."""

    def __init__(self, weight: Tensor, grad_scaler: Any) -> None:
        self.weight, self.grad_scaler = weight, grad_scaler
        self.enabled = True
        self._index: Tensor | None = None
        self._current: Tensor | None = None
        self._previous: tuple[int, Tensor] | None = None
        self._variances: deque[float] = deque(maxlen=NUM_PAIRS)
        self._average: Tensor | None = None
        self._hook = weight.register_post_accumulate_grad_hook(weakly(self._sample))
        weakref.finalize(self, self._hook.remove)

    def close(self) -> None:
        self._hook.remove()

    @property
    def gradient_variance(self) -> float | None:
        """Var(xi) of one element; None until two consecutive iterations were sampled."""
        return min(self._variances) if self._variances else None

    def _sample(self, weight: Tensor) -> None:
        if not self.enabled or weight.grad is None or weight.grad.layout is not torch.strided:
            return
        flat = weight.grad.detach().reshape(-1)
        if self._index is None and flat.numel() > SAMPLE_SIZE:
            generator = torch.Generator().manual_seed(flat.numel())
            self._index = torch.randint(flat.numel(), (SAMPLE_SIZE,), generator=generator).to(flat.device)
        sample = (flat if self._index is None else flat[self._index]).to(torch.float32, copy=True)
        self._current = sample / loss_scale(self.grad_scaler)  # the last backward of an iteration has the whole sum

    def close_iteration(self, iteration: int) -> None:
        """Compare with the previous iteration's sample. A sample that is not finite (a skipped step) is dropped."""
        sample, self._current = self._current, None
        if sample is None or not bool(torch.isfinite(sample).all()):
            self._previous = None
            return
        if self._previous is not None and self._previous[0] == iteration - 1:
            self._variances.append(float((sample - self._previous[1]).square().mean()) / 2)
        self._previous = (iteration, sample)
        before = self._average if self._average is not None else torch.zeros_like(sample)
        self._average = AVERAGE_DECAY * before + sample

    def momentum_magnitude(self, optimizers: Iterable[torch.optim.Optimizer]) -> float | None:
        """Mean |momentum| in SGD's units: from SGD's buffer, Adam's exp_avg, else an average of sampled gradients."""
        kept = self._kept_momentum(optimizers)
        if kept is not None:
            return kept
        return None if self._average is None else float(self._average.abs().mean())

    def _kept_momentum(self, optimizers: Iterable[torch.optim.Optimizer]) -> float | None:
        """None where the optimizer keeps no momentum of the weight, or one in other units (RMSprop, Lion)."""
        for optimizer in optimizers:
            state = optimizer.state.get(self.weight, {})
            group = next((g for g in optimizer.param_groups if any(p is self.weight for p in g["params"])), {})
            if isinstance(state.get("momentum_buffer"), Tensor) and group.get("dampening", 1) < 1:
                return float(state["momentum_buffer"].abs().mean()) / (1 - group["dampening"])
            if isinstance(state.get("exp_avg"), Tensor) and "step" in state and "betas" in group:
                steps = float(state["step"])
                unit = (1 - AVERAGE_DECAY**steps) / (1 - AVERAGE_DECAY) / (1 - group["betas"][0] ** steps)
                return float(state["exp_avg"].abs().mean()) * unit
        return None

    def needs_every_gradient(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Whether the running mean stands in for a momentum that no optimizer keeps."""
        return self._kept_momentum(optimizers) is None


class Energy(NamedTuple):
    """Sums over the backward calls of an iteration, unscaled."""

    output: float  # of sensitivity * d^2, d the gradient at the output
    passed: float | None = None  # of the squares of the gradient passed on that errors change; None: not watched
    num_passed: int = 0  # elements of it
    mean_magnitude: float | None = None  # of d; the papers' L


class _Part(NamedTuple):
    """One backward call's share of an `Energy`."""

    output: Tensor
    passed: Tensor | None
    num_passed: int
    magnitude: Tensor
    num_output: int


class OutputEnergy:
    """Energy per layer at each collection. `sensitivity`: the mean square of what an error at the input does."""

    def __init__(self, grad_scaler: Any) -> None:
        self.grad_scaler = grad_scaler
        self._lock = threading.Lock()
        self._sums: defaultdict[str, list[_Part]] = defaultdict(list)

    def watch(self, layer: str, output: Tensor, sensitivity: float, passed_on: list[int]) -> None:
        """Add this call's energy once backward reaches its output; the hook lives and dies with the graph.

        `passed_on`: places of the gradients that the operator gives back and errors change; of several, the weakest
        counts.
        """
        node = output.grad_fn
        if node is None:
            return

        def add(passed: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> None:
            if not arrived or arrived[0] is None:
                return
            changed = [passed[i] for i in passed_on if i < len(passed)]
            squares = [(self._square(one), one.numel()) for one in changed if one is not None]
            square, number = min(squares, key=lambda pair: float(pair[0])) if squares else (None, 0)
            d = arrived[0].detach()
            working = torch.promote_types(d.dtype, torch.float32)
            magnitude = torch.linalg.vector_norm(d, 1, dtype=working) / loss_scale(self.grad_scaler)
            part = _Part(sensitivity * self._square(d), square, number, magnitude, d.numel())
            with self._lock:
                self._sums[layer].append(part)

        if passed_on:
            node.register_hook(add)
        else:  # before the operator's backward: nothing that it makes is alive yet
            node.register_prehook(lambda arrived: add((), arrived))

    def _square(self, gradient: Tensor) -> Tensor:
        gradient = gradient.detach()
        working = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, dtype=working).float()
        return (norm / loss_scale(self.grad_scaler)) ** 2

    def take(self) -> dict[str, Energy]:
        """The sums of this iteration; counting starts again from nothing."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(list)
        energies = {}
        for layer, parts in sums.items():
            passed = [float(part.passed) for part in parts if part.passed is not None]
            energies[layer] = Energy(
                math.fsum(float(part.output) for part in parts),
                math.fsum(passed) if len(passed) == len(parts) else None,
                sum(part.num_passed for part in parts),
                math.fsum(float(part.magnitude) for part in parts) / sum(part.num_output for part in parts),
            )
        return energies


def agreed_between_ranks(
    statistics: list[LayerStatistics], group: torch.distributed.ProcessGroup
) -> list[LayerStatistics]:
    """The layers' statistics, averaged over the ranks of `group` in a collective call: the same list on every rank.

    Samples are taken before gradients are averaged, so the mean of the ranks' variances is world * Var(averaged), and
    the mean of their energies gives that error whose variance the average divides by world in turn (THEORY section
    4). A layer that a rank did not use had no energy there.
    """
    by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(by_rank, {layer.name: layer for layer in statistics}, group=group)
    agreed = []
    for name in sorted({name for layers in by_rank for name in layers}):
        one, *others = [layers[name] for layers in by_rank if name in layers]
        changes: dict[str, float] = {}
        for field in fields(one):
            known = [value for layer in (one, *others) if type(value := getattr(layer, field.name)) in (int, float)]
            if known:
                changes[field.name] = math.fsum(known) / (len(by_rank) if field.name == "energy" else len(known))
        agreed.append(replace(one, **changes))
    return agreed


def loss_scale(grad_scaler: Any) -> float:
    """The factor on the gradients that are in flight; 1 without a scaler."""
    return float(grad_scaler.get_scale()) if grad_scaler is not None else 1.0

"""Saved tensors are stored compressed, within bounds that a controller sets from gradient statistics.

Statistics are gathered at collections only (iterations 1, 2, 4, ... and then every `collect_every`): a pass over each
input for its spread and share of non-zeros, a norm over each output's gradient. After a collection each layer is
audited, one an iteration (audit.py); in all other iterations a step costs the codec and nothing else.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comet_core.audit import GradientAudit, bound_square
from comet_core.codecs.base import Codec, ErrorBound
from comet_core.controllers import (
    START_RANGE_FRACTION,
    Bound,
    Controller,
    LayerStatistics,
    is_collection,
    samples_gradients,
)
from comet_core.gradient_statistics import SAMPLE_SIZE, Energy, GradientSampler, OutputEnergy, agreed_between_ranks
from comet_core.metrics import AuditMetrics, ControllerEvent
from comet_core.operators import Call, Kind, root_of, scale_sensitivity, spread_of_groups
from comet_core.policies.base import MemoryPolicy


@dataclass
class _Layer:
    """What the policy remembers of a layer between iterations."""

    kind: Literal["weight", "norm", "upstream"]
    out_channels: float = 1.0
    weight: Tensor | None = None  # where it is trained itself, not computed from others
    std: Tensor | float | None = None  # of each channel or of all groups, norms
    mean_bound: float | None = None  # absolute, as last used
    value_std: float | None = None
    value_range: float | None = None
    nonzero_fraction: float | None = None
    num_values: int = 0  # at the last collection
    batch_size: int = 1
    mean_output_gradient: float | None = None  # at the last collection
    audit_ratio: float | None = None  # measured over modelled sigma, since the last collection
    measured_sigma: float | None = None  # at the last audit


class CompressPolicy(MemoryPolicy):
    """Lossy inputs by an error-bounded codec, everything else exact or by what its backward needs."""

    name = "compress"

    def __init__(self, *, controller: Controller, codec: Codec, collect_every: int, grad_scaler: Any = None) -> None:
        self.controller, self.codec, self.collect_every = controller, codec, collect_every
        self._grad_scaler = grad_scaler
        self._energy = OutputEnergy(grad_scaler)
        self._samplers: dict[str, GradientSampler] = {}
        self._layers: dict[str, _Layer] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._ranks: torch.distributed.ProcessGroup | None = None  # that average gradients, where a DDP is attached
        self._collecting = is_collection(1, collect_every)
        self._audit = GradientAudit(grad_scaler)
        self._audits: list[AuditMetrics] = []

    def attach(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._ranks = model.process_group if isinstance(model, DistributedDataParallel) else None

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    def keeps_exact(self) -> bool:
        return False

    def observe(self, call: Call, tensor: Tensor) -> None:
        layer = self._layers.get(call.layer)
        if layer is None:
            layer = self._layers[call.layer] = _Layer(_kind(call))
        weight = root_of(call.weight)
        if weight is not None and weight.requires_grad and weight.is_leaf and weight is not layer.weight:
            layer.weight = weight
            self._samplers[call.layer] = GradientSampler(weight, self._grad_scaler)
        if self._collecting and layer.kind != "norm":
            values = tensor.detach()
            layer.num_values = values.numel()
            layer.value_range = _spread(values)
            layer.value_std = float(values.float().std(correction=0))
            layer.nonzero_fraction = int(torch.count_nonzero(values)) / values.numel()
            call.sensitivity = self._sensitivity(call, values)

    def called(self, call: Call, output: Any) -> None:
        layer = self._layers.get(call.layer)
        if layer is None or not isinstance(output, Tensor) or layer.kind != _kind(call):
            return
        if layer.kind == "norm":
            layer.std = spread_of_groups(call)
            call.sensitivity = scale_sensitivity(call, layer.std)
        if layer.kind != "upstream":
            layer.out_channels = call.out_channels(output)
            layer.batch_size = output.shape[0] if output.dim() else 1
        if self._collecting:
            self._energy.watch(call.layer, output, call.sensitivity, call.passed_on())

    def stored(self, call: Call, output: Any) -> None:
        layer = self._layers.get(call.layer)
        if layer is None or layer.kind != _kind(call) or not self._audit.is_due(call.layer):
            return

        def energy() -> tuple[float, float]:
            if layer.kind != "norm":
                call.sensitivity = self._sensitivity(call, call.stored[0][0])
            return bound_square(call, layer.std) * call.sensitivity, layer.out_channels

        self._audit.watch(call, output, energy, layer.kind)

    def _sensitivity(self, call: Call, values: Tensor) -> float:
        """Mean square of what an error in the input does, for each unit of d^2 and of squared error (error_models)."""
        if call.operator.slope is not None:
            return self._slope_sensitivity(call, values)
        if call.reads_signs:  # the weight meets negative values only
            values = values < 0
        return int(torch.count_nonzero(values)) / values.numel()

    def _slope_sensitivity(self, call: Call, values: Tensor) -> float:
        """Mean square by which the slope changes at the bound in use, for each unit of squared error.

        At that bound, not in the limit, so that kinks count as what they do; from a fixed random sample.
        """
        slope, bound = call.operator.slope, self._absolute(call.layer, values)
        assert slope is not None
        error = (bound if isinstance(bound, float) and bound > 0 else START_RANGE_FRACTION * _spread(values)) / 3**0.5
        if error == 0:
            return 0.0
        flat = values.reshape(-1)
        generator = torch.Generator().manual_seed(flat.numel())
        index = torch.randint(flat.numel(), (SAMPLE_SIZE,), generator=generator).to(flat.device)
        sample = flat[index].double()
        with torch.no_grad():
            exact = slope(sample, call.arguments)
            changes = [slope(sample + sign * error, call.arguments) - exact for sign in (1, -1)]
        square = sum(change.square() for change in changes) / 2 * (sample != 0)
        return float(torch.as_tensor(square).mean()) / error**2

    def bound_for(self, layers: set[str], tensor: Tensor) -> ErrorBound | None:
        smallest: float | Tensor = math.inf
        for name in sorted(layers):
            bound = self._absolute(name, tensor)
            if bound is None:
                return None
            if isinstance(smallest, Tensor) or isinstance(bound, Tensor):
                smallest = torch.minimum(torch.as_tensor(smallest), torch.as_tensor(bound))
            else:
                smallest = min(smallest, bound)
        if isinstance(smallest, Tensor):
            return ErrorBound("abs", smallest, channel_dim=1)
        return ErrorBound("abs", smallest)

    def _absolute(self, name: str, tensor: Tensor) -> float | Tensor | None:
        """A layer's bound in the units of `tensor`: a float, or one value a channel for norms; None: exactly."""
        bound = self.controller.bound_for(name)
        layer = self._layers.get(name)
        if bound.kind == "exact" or layer is None:
            return None
        value: float | Tensor
        if bound.kind == "abs":
            value = bound.value
        elif bound.kind == "std" and isinstance(layer.std, float):
            value = bound.value * layer.std if math.isfinite(layer.std) else 0.0
        elif layer.kind == "norm" and tensor.dim() < 2:
            return None
        elif bound.kind == "std" and isinstance(layer.std, Tensor) and layer.std.numel() == tensor.shape[1]:
            value = torch.nan_to_num(bound.value * layer.std.cpu(), nan=0.0, posinf=0.0)
        elif layer.kind == "norm":
            others = [dim for dim in range(tensor.dim()) if dim != 1]
            spread = (tensor.detach().amax(others) - tensor.detach().amin(others)).float().cpu()
            value = START_RANGE_FRACTION * torch.nan_to_num(spread, nan=0.0, posinf=0.0)
        else:
            value = bound.value * _spread(tensor.detach())
        layer.mean_bound = float(value.mean()) if isinstance(value, Tensor) else value
        return value

    def after_step(self, iteration: int, *, loss: float | None = None, held_bytes: int = 0) -> bool:
        collecting = self._collecting
        self._close_audit(iteration)
        if iteration == 1:
            self._warn_of_patterns()
        for sampler in self._samplers.values():
            sampler.close_iteration(iteration)
        if collecting:
            energies = self._energy.take()
            num_upstream = sum(layer.num_values for layer in self._layers.values() if layer.kind == "upstream")
            collected = []
            for name, layer in self._layers.items():
                # Without a gradient seen, a weight has none either; what goes upstream unseen is kept exactly.
                energy = energies.get(name, Energy(0.0) if layer.kind == "upstream" else None)
                if energy is not None:
                    collected.append(self._statistics(name, energy, num_upstream))
            if self._ranks is not None:
                collected = agreed_between_ranks(collected, self._ranks)
            for statistics in collected:
                self.controller.update(statistics, iteration)
            self._audit.start_round(self._layers)
        self._audit.next_turn()
        changed = self.controller.end_iteration(iteration, loss=loss, held_bytes=held_bytes)
        self._collecting = is_collection(iteration + 1, self.collect_every)
        sampling = samples_gradients(iteration + 1, self.collect_every)
        for sampler in self._samplers.values():
            sampler.enabled = sampling or (
                self.controller.reads_momentum and sampler.needs_every_gradient(self._optimizers)
            )
        return collecting or changed

    def _close_audit(self, iteration: int) -> None:
        found = self._audit.close_iteration(iteration, self.controller.factor_of)
        if found is None:
            return
        audit, ratio = found
        self._audits.append(audit)
        layer = self._layers[audit.name]
        layer.audit_ratio, layer.measured_sigma = ratio, audit.measured_sigma

    def take_audits(self) -> list[AuditMetrics]:
        audits, self._audits = self._audits, []
        return audits

    def take_events(self) -> list[ControllerEvent]:
        return self.controller.take_events()

    def _warn_of_patterns(self) -> None:
        for pattern in self.controller.unmatched_patterns(set(self._layers)):
            known = ", ".join(self._layers) or "none was compressed"
            warnings.warn(f"layer_bounds: {pattern!r} fits none of the layers ({known}).", stacklevel=4)

    def _statistics(self, name: str, energy: Energy, num_upstream: int) -> LayerStatistics:
        layer = self._layers[name]
        sampler = self._samplers.get(name)
        if layer.kind == "upstream":
            layer.out_channels = max(energy.num_passed, 1)
        layer.mean_output_gradient = energy.mean_magnitude
        ratio, layer.audit_ratio = layer.audit_ratio, None
        return LayerStatistics(
            name=name,
            kind=layer.kind,
            energy=energy.output if layer.kind != "upstream" or energy.passed is not None else 0.0,
            out_channels=layer.out_channels,
            gradient_square=None if energy.passed is None else energy.passed / layer.out_channels,
            budget_share=layer.num_values / num_upstream if layer.kind == "upstream" else 1.0,
            value_std=layer.value_std,
            value_range=layer.value_range,
            gradient_variance=sampler.gradient_variance if sampler else None,
            momentum_magnitude=(
                sampler.momentum_magnitude(self._optimizers) if sampler and self.controller.reads_momentum else None
            ),
            audit_ratio=ratio,
        )

    def _known(self, name: str) -> dict[str, Any]:
        layer = self._layers.get(name)
        if layer is None:
            return {}
        bound = self.controller.bound_for(name)
        sampler = self._samplers.get(name)
        variance = sampler.gradient_variance if sampler else None
        kept = self.codec.guarantee == "bounded"  # other codecs read no bound, so nothing follows from it
        return {
            "error_bound": layer.mean_bound if kept and bound.kind != "exact" else None,
            "predicted_sigma": bound.predicted_sigma if kept else None,
            "measured_sigma": layer.measured_sigma,
            "target_sigma": bound.target_sigma if kept else None,
            "gradient_noise": None if variance is None else variance**0.5,
            "nonzero_fraction": layer.nonzero_fraction,
            "audit_factor": self.controller.factor_of(name, layer.kind) if kept else None,
            "mean_output_gradient": layer.mean_output_gradient,
            "paper_coefficient": _paper_coefficient(layer, bound) if kept and bound.kind == "abs" else None,
        }


def _kind(call: Call) -> Literal["weight", "norm", "upstream"]:
    """Which gradient an error in what the call saves changes."""
    if call.passes_upstream:
        return "upstream"
    return "norm" if call.operator.kind is Kind.NORM else "weight"


def _paper_coefficient(layer: _Layer, bound: Bound) -> float | None:
    """a in the papers' sigma = a * L * sqrt(N * R) * bound, at which it gives what is predicted here (0.32 there)."""
    gradient, nonzero = layer.mean_output_gradient, layer.nonzero_fraction
    if layer.kind != "weight" or bound.predicted_sigma is None or not gradient or not nonzero or not bound.value:
        return None
    share = gradient * math.sqrt(layer.batch_size * nonzero) * bound.value
    return bound.predicted_sigma / share if share > 0 else None


def _spread(values: Tensor) -> float:
    """Largest minus smallest value; 0, which means exactly, where there are values that are not finite."""
    low, high = torch.aminmax(values)
    spread = float(high) - float(low)
    return spread if math.isfinite(spread) else 0.0

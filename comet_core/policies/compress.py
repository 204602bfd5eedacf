"""Saved tensors are stored compressed, within bounds that a controller sets from gradient statistics.

Statistics are gathered at collections only (iterations 1, 2, 4, ... and then every `collect_every`): a pass over each
input for its spread and share of non-zeros, a norm over each output's gradient. Between collections a step costs the
codec and nothing else.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.codecs.base import Codec, ErrorBound
from comet_core.controllers import START_RANGE_FRACTION, Controller, LayerStatistics, is_collection, samples_gradients
from comet_core.gradient_statistics import GradientSampler, OutputEnergy
from comet_core.operators import Call, channel_std
from comet_core.policies.base import MemoryPolicy


@dataclass
class _Layer:
    """What the policy remembers of a layer between iterations."""

    is_norm: bool
    out_channels: int
    weight: Tensor | None = None  # where it is trained itself, not computed from others
    std: Tensor | None = None  # per channel, norms
    mean_bound: float | None = None  # absolute, as last used
    value_std: float | None = None
    value_range: float | None = None
    nonzero_fraction: float | None = None


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
        self._collecting = is_collection(1, collect_every)

    def attach(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    def keeps_exact(self) -> bool:
        return False

    def observe(self, call: Call, tensor: Tensor) -> None:
        weight = call.weight
        layer = self._layers.get(call.layer)
        if layer is None:
            channels = weight.shape[0] if weight is not None else tensor.shape[1]
            layer = self._layers[call.layer] = _Layer(call.operator.is_norm, channels)
        if weight is not None and weight.requires_grad and weight.is_leaf and weight is not layer.weight:
            layer.weight = weight
            self._samplers[call.layer] = GradientSampler(weight, self._grad_scaler)
        if self._collecting and not layer.is_norm:
            values = tensor.detach()
            layer.value_range = _spread(values)
            layer.value_std = float(values.float().std(correction=0))
            layer.nonzero_fraction = call.nonzero_fraction = int(torch.count_nonzero(values)) / values.numel()

    def called(self, call: Call, output: Any) -> None:
        layer = self._layers.get(call.layer)
        if layer is None or not (call.operator.is_weighted or call.operator.is_norm):
            return
        if layer.is_norm:
            layer.std = channel_std(call)
        if self._collecting and isinstance(output, Tensor):
            self._energy.watch(call.layer, output, call.nonzero_fraction)

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
        elif layer.is_norm and tensor.dim() < 2:
            return None
        elif bound.kind == "std" and layer.std is not None and layer.std.numel() == tensor.shape[1]:
            value = torch.nan_to_num(bound.value * layer.std.cpu(), nan=0.0, posinf=0.0)
        elif layer.is_norm:
            others = [dim for dim in range(tensor.dim()) if dim != 1]
            spread = (tensor.detach().amax(others) - tensor.detach().amin(others)).float().cpu()
            value = START_RANGE_FRACTION * torch.nan_to_num(spread, nan=0.0, posinf=0.0)
        else:
            value = bound.value * _spread(tensor.detach())
        layer.mean_bound = float(value.mean()) if isinstance(value, Tensor) else value
        return value

    def after_step(self, iteration: int) -> bool:
        collecting = self._collecting
        for sampler in self._samplers.values():
            sampler.close_iteration(iteration)
        if collecting:
            for name, energy in self._energy.take().items():
                if name in self._layers:
                    self.controller.update(self._statistics(name, energy), iteration)
        self._collecting = is_collection(iteration + 1, self.collect_every)
        sampling = samples_gradients(iteration + 1, self.collect_every)
        for sampler in self._samplers.values():
            sampler.enabled = sampling or (
                self.controller.reads_momentum and sampler.needs_every_gradient(self._optimizers)
            )
        return collecting

    def _statistics(self, name: str, energy: float) -> LayerStatistics:
        layer = self._layers[name]
        sampler = self._samplers.get(name)
        return LayerStatistics(
            name=name,
            is_norm=layer.is_norm,
            energy=energy,
            out_channels=layer.out_channels,
            value_std=layer.value_std,
            value_range=layer.value_range,
            gradient_variance=sampler.gradient_variance if sampler else None,
            momentum_magnitude=(
                sampler.momentum_magnitude(self._optimizers) if sampler and self.controller.reads_momentum else None
            ),
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
            "target_sigma": bound.target_sigma if kept else None,
            "gradient_noise": None if variance is None else variance**0.5,
            "nonzero_fraction": layer.nonzero_fraction,
        }


def _spread(values: Tensor) -> float:
    """Largest minus smallest value; 0, which means exactly, where there are values that are not finite."""
    low, high = torch.aminmax(values)
    spread = float(high) - float(low)
    return spread if math.isfinite(spread) else 0.0

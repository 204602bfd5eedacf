"""`MemoryPolicy`: what a way to spend less memory must answer.

A policy is the plan that the hooks of activations.py ask. The session owns the hooks and the byte counts, so that every
policy is counted by the same code; a policy only decides. A lossless policy gives gradients equal to the baseline's bit
for bit; `baseline` is bit-identical to no wrapper at all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.codecs.base import Codec, ErrorBound
from comet_core.metrics import AuditMetrics, ControllerEvent, LayerMetrics, compression_ratio
from comet_core.operators import Call


class MemoryPolicy:
    """Keeps every tensor as it is; a subclass overrides what it changes."""

    name: str
    codec: Codec  # for approximate inputs; only where `keeps_exact` says no

    def attach(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """The session begins. Raises ValueError where the policy cannot serve this model."""

    def close(self) -> None:
        """The session ends: remove every hook of the policy's own."""

    def keeps_exact(self) -> bool:
        """True: every tensor is kept as it is and only counted."""
        return True

    def observe(self, call: Call, tensor: Tensor) -> None:
        """An approximate input is about to be packed for `call`: a moment to gather statistics."""

    def bound_for(self, layers: set[str], tensor: Tensor) -> ErrorBound | None:
        """Absolute bound for an input that these layers share, the smallest of theirs; None: keep it exactly."""
        return None

    def called(self, call: Call, output: Any) -> None:
        """The operator returned `output`: a moment to watch its gradient."""

    def stored(self, call: Call, output: Any) -> None:
        """What the operator saved approximately is stored now, as `call.stored` says: a moment to audit it."""

    def after_step(self, iteration: int, *, loss: float | None = None, held_bytes: int = 0) -> bool:
        """The iteration is over; `held_bytes` at its peak. Returns whether bounds may have changed."""
        return False

    def take_audits(self) -> list[AuditMetrics]:
        """Audits since the last call."""
        return []

    def take_events(self) -> list[ControllerEvent]:
        """Decisions since the last call."""
        return []

    def layer_metrics(self, step: int, layer_bytes: Mapping[str, tuple[str, int, int, int]]) -> list[LayerMetrics]:
        """A row a layer from its counted bytes (operator, saved, held, number of values) and what the policy knows."""
        return [
            LayerMetrics(
                step=step,
                name=name,
                operator=operator,
                saved_bytes=saved,
                held_bytes=held,
                compression_ratio=compression_ratio(saved, held),
                bits_per_value=8 * held / count if count else None,
                **self._known(name),
            )
            for name, (operator, saved, held, count) in layer_bytes.items()
        ]

    def _known(self, layer: str) -> dict[str, Any]:
        return {}

"""Stages of the codecs: the definition in PyTorch and its twins, and which of them serves a tensor."""

import torch
from torch import Tensor

from comet_core.codecs.kernels import reference

try:
    from comet_core.codecs.kernels import cpu
except ImportError:  # numba is missing: the definition serves everything
    cpu = None  # type: ignore[assignment]


def has_twin(x: Tensor) -> bool:
    """Whether `cpu`, rather than `reference`, serves this tensor."""
    return cpu is not None and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64, torch.uint8)


__all__ = ["cpu", "has_twin", "reference"]

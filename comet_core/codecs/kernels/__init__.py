"""Stages of the codecs: the definition in PyTorch, its twins, and which of them serves a tensor."""

import importlib
from types import ModuleType

import torch
from torch import Tensor

_cpu: ModuleType | None
try:
    _cpu = importlib.import_module("comet_core.codecs.kernels.cpu")
except ImportError:  # numba is missing: the definition serves everything
    _cpu = None


def twin_of(x: Tensor) -> ModuleType | None:
    """The module with compiled twins of the reference's stages for this tensor, None where there is none."""
    served = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64, torch.uint8)
    return _cpu if served else None

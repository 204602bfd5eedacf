"""Stages of the codecs: the definition in PyTorch, its twins, and which of them serves a tensor."""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from comet_core.codecs.kernels import cuda, reference

_cpu: ModuleType | None
_error_bounded: ModuleType = reference
try:
    importlib.import_module("numba")
    _cpu = importlib.import_module("comet_core.codecs.kernels.cpu")
    _error_bounded = importlib.import_module("comet_core.codecs.kernels.context_coder")
except ImportError:  # numba is missing: the definition serves everything
    _cpu = None


def twin_of(x: Tensor) -> ModuleType | None:
    """The module with compiled twins of the reference's stages for this tensor, None where there is none."""
    served = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64, torch.uint8)
    return _cpu if served else None


def error_bounded_of(x: Tensor) -> Any:
    """The module whose encode_values, decode_values, quantize_runs and GROUPS_A_TASK serve a tensor of floats."""
    return _error_bounded if x.device.type == "cpu" else cuda if cuda.serves(x) else reference

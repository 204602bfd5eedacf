"""Stages of the codecs: the definition in PyTorch, its twins, and which of them serves a tensor."""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from comet_core.codecs.kernels import cuda, reference

_cpu: ModuleType | None
_quantizer: ModuleType = reference
_coder: ModuleType = reference
try:
    importlib.import_module("numba")
    _cpu = importlib.import_module("comet_core.codecs.kernels.cpu")
    _quantizer = importlib.import_module("comet_core.codecs.kernels.quantizer")
    _coder = importlib.import_module("comet_core.codecs.kernels.context_coder")
except ImportError:  # numba is missing: the definition serves everything
    _cpu = None


def twin_of(x: Tensor) -> ModuleType | None:
    """The module with compiled twins of the reference's stages for this tensor, None where there is none."""
    served = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64, torch.uint8)
    return _cpu if served else None


def quantizer_of(x: Tensor) -> Any:
    """The module whose quantize, quantize_runs and dequantize serve a tensor of floats."""
    return _quantizer if x.device.type == "cpu" else cuda if cuda.serves(x) else reference


def coder_of(x: Tensor) -> Any:
    """The module whose encode_bands and decode_bands serve codes beside a tensor."""
    return _coder if x.device.type == "cpu" else cuda if cuda.serves(x) else reference

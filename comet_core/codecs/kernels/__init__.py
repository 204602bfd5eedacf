"""Stages of the codecs: the definition in PyTorch, its twins, and which of them serves a tensor."""

import importlib
import platform
from functools import cache
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
    if x.device.type != "cpu":
        return cuda if cuda.serves(x) else reference
    if x.dtype == torch.float16 and _error_bounded is not reference and not _converts_halves():
        return reference
    return _error_bounded


@cache
def _converts_halves() -> bool:
    """Whether the processor has instructions for float16: without, LLVM ends the process for want of a function."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    features: dict[str, bool] = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    return features.get("f16c", False)

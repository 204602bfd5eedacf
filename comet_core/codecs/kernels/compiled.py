"""`compiled`: numba's compiler with the settings that all kernels share."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

_njit: Any = importlib.import_module("numba").njit if importlib.util.find_spec("numba") else None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, for threads that hold no lock; cached on disk (NUMBA_CACHE_DIR, else beside the file).

    numba forms no fused multiply-add unless told to (fastmath), which the equality with the reference needs. numpy's
    error model: a division makes inf or NaN instead of a branch to an exception. Without numba: the function itself.
    """
    if _njit is None:
        return function
    compile_with = partial(_njit, nogil=True, error_model="numpy")
    try:
        result: Callable[..., Any] = compile_with(cache=True)(function)
    except RuntimeError:  # no folder to cache in can be written
        result = compile_with()(function)
    return result


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of compiled functions, put in where it is called: calls would pass vectors through memory."""
    return function if _njit is None else _njit(inline="always", error_model="numpy")(function)

"""From an error bound to the quantiser's grid: channels, steps, and what keeps the promise when all is rounded."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.base import ErrorBound, flat_of
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, run_chunks
from comet_core.codecs.kernels.compiled import compiled
from comet_core.codecs.kernels.reference import Grid

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MIDDLE_PLANES, _MIDDLE_VALUES = 16, 16
"""About so many planes of a channel, and values of each, decide where its levels lie."""
_MOST_FRACTION = 256
"""Offsets up to so many steps need not be whole numbers."""
_HALF_BITS = 11
"""Significant bits of a float16."""
_FEW_VALUES = 1 << 15
"""A channel of fewer values has a step of so few bits: up to 0.1 % smaller, stored in 16 bits less."""


@np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")
def grid_of(
    dense: Tensor, bound: ErrorBound, sign_exact: bool, middles: tuple[np.ndarray, np.ndarray] | None = None
) -> Grid | None:
    """The quantiser's grid; None where storage has to be lossless. `middles`: an earlier tensor's, to save time."""
    num_channels, inner = channels_of(dense, bound)
    if dense.dtype not in FLOATS or dense.numel() == 0:
        return None
    work: Any = np.float64 if dense.dtype == torch.float64 else np.float32
    absolute = np.broadcast_to(np.asarray(bound.value, np.float64), num_channels)
    # Beyond this, levels would not be finite in the tensor's dtype.
    huge = torch.finfo(dense.dtype).max / 8
    limited = absolute > huge
    if bound.kind == "range_rel" or limited.any():
        low, high = (extreme.numpy() for extreme in finite_range(dense, num_channels, inner))
        if bound.kind == "range_rel":
            extent = high - low
            extent = np.where(np.isinf(extent), absolute * high - absolute * low, absolute * extent)
            absolute = np.where(np.isnan(extent), 0, extent)  # an infinite bound times no range
        largest = np.maximum(np.abs(low), np.abs(high)) * (0.5 + 2.0**-20)  # such that the largest is within a step
        limited = absolute > huge
        absolute = np.where(limited, np.minimum(absolute, largest), absolute)

    # A little less than twice the bound: the levels are rounded, and values half-way between two must still fit.
    step = _rounded_down(2 * absolute * (1 - 2.0**-20), work)
    # Smaller levels could be flushed to zero by a processor set up so. Such channels are exact, by what misses.
    usable = step > 4 * np.finfo(work).tiny
    if not usable.any():
        return None
    step = np.where(usable, step, step[usable].max())
    if num_channels > 1 and dense.numel() // num_channels < _FEW_VALUES and not limited.any():
        mantissa, exponent = np.frexp(step)
        step = np.ldexp(np.floor(np.ldexp(mantissa, _HALF_BITS)), exponent - _HALF_BITS)
    offset = np.zeros_like(step)
    if bound.channel_dim is not None and not sign_exact:
        if middles is None or len(middles[0]) != num_channels:
            middles = _middles(dense, num_channels, inner, step)
        offset = middles[0] / step
        # A level at the middle leaves none at zero, so each zero would be kept as it is. Fractions of large offsets
        # would be lost in the rounding of levels; whole numbers are exact up to 2**21.
        whole = middles[1] | (np.abs(offset) > _MOST_FRACTION)
        offset = np.where(whole, np.clip(np.rint(offset), -(2.0**21), 2.0**21), offset.astype(np.float16)).astype(work)
    # A distance computed in float32 is off by one part in 2**24; in float64 it is what the bound is defined by.
    limit = absolute if work == np.float64 else _rounded_down(absolute * (1 - 2.0**-23), work)
    limit = np.where(usable, limit, work(0))

    def on_device(entries: np.ndarray) -> Tensor:
        return torch.from_numpy(entries).to(dense.device)

    return Grid(on_device(step), on_device(1 / step), on_device(offset), on_device(limit), inner, sign_exact)


def _rounded_down(values: np.ndarray, dtype: Any) -> np.ndarray:
    rounded = values.astype(dtype)
    return np.where(rounded > values, np.nextafter(rounded, dtype(0)), rounded)


def levels_part(grid: Grid) -> tuple[Tensor, int | None]:
    """Steps and offsets (2, C): float16 and the exponent of the steps' unit where that is exact, else as they are."""
    step, offset = (entry.cpu().numpy() for entry in (grid.step, grid.offset))
    _, exponent = math.frexp(step.max())
    exponent = max(exponent - 15, -1022)  # so that the largest is just within float16, and the unit's inverse finite
    levels = np.empty((2, len(step)))
    levels[0], levels[1] = step * 2.0**-exponent, offset
    with np.errstate(over="ignore", under="ignore"):
        halves = levels.astype(np.float16)
    if (halves == levels).all():
        return torch.from_numpy(halves).to(grid.step.device), exponent
    return torch.stack((grid.step, grid.offset)), None


def from_levels_part(part: Tensor, exponent: int | None, work: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of levels_part: steps and offsets in the working dtype."""
    step, offset = part.unbind()
    return (step if exponent is None else step.double() * 2.0**exponent).to(work), offset.to(work)


def middles_of(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """(C,) float64: where a grid's levels lie, and whether they are to stay at whole steps."""
    offset = grid.offset.double().cpu().numpy()
    return offset * grid.step.double().cpu().numpy(), offset == np.rint(offset)


def _middles(dense: Tensor, num_channels: int, inner: int, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(C,) float64: where a level serves each channel best, and whether there are zeros, from some of the values."""
    planes = flat_of(dense)[: dense.numel() // (num_channels * inner) * num_channels * inner].view(
        -1, num_channels, inner
    )
    # An odd distance takes values of all columns.
    planes = planes[:: -(-len(planes) // _MIDDLE_PLANES), :, :: max(inner // _MIDDLE_VALUES, 1) | 1]
    # By numpy: torch would take threads for it, which then stand in the way of the codec's.
    in_numpy = planes.device.type == "cpu" and planes.dtype in (torch.float32, torch.float64)
    some = (planes if in_numpy else planes.double().cpu()).numpy().astype(np.float64)
    return _best_middles(some, step.astype(np.float64))


@compiled
def _best_middles(some: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For values (planes, C, n): a level that most of a channel's are within half a step of, and whether any is 0.

    Tried are the mean, which steps of several deviations want; the middle of the bulk, which finer ones want where a
    few large values pull the mean away from it; and the middle of both.
    """
    num_planes, num_channels, length = some.shape
    middles, has_zeros = np.zeros(num_channels), np.zeros(num_channels, np.bool_)
    values = np.empty(num_planes * length)
    for channel in range(num_channels):
        count = 0
        total = 0.0
        for plane in range(num_planes):
            for j in range(length):
                value = some[plane, channel, j]
                if np.isfinite(value):
                    values[count] = value
                    total += value
                    count += 1
                    has_zeros[channel] |= value == 0
        if not count:
            continue
        mean = total / count
        bulk = mean
        for _ in range(2):
            spread, inside, num_inside = 0.0, 0.0, 0
            for j in range(count):
                spread += abs(values[j] - bulk)
            for j in range(count):
                near = abs(values[j] - bulk) * count <= spread
                inside += values[j] if near else 0.0
                num_inside += near
            bulk = inside / num_inside if num_inside else bulk
        most = -1
        for place in (mean, (mean + bulk) / 2, bulk):
            within = 0
            for j in range(count):
                within += abs(values[j] - place) <= step[channel] / 2
            if within > most:
                most, middles[channel] = within, place
    return middles, has_zeros


def channels_of(dense: Tensor, bound: ErrorBound) -> tuple[int, int]:
    """Number of channels, and how many neighbours in memory belong to one. Raises ValueError where they do not fit."""
    if bound.channel_dim is None:
        return 1, max(dense.numel(), 1)
    if not -dense.ndim <= bound.channel_dim < dense.ndim:
        raise ValueError(
            f"channel_dim of the error bound is {bound.channel_dim}, but the tensor has shape {tuple(dense.shape)}; "
            f"allowed: {-dense.ndim} to {dense.ndim - 1}." if dense.ndim else
            f"channel_dim of the error bound is {bound.channel_dim}, but the tensor has no dimension; leave it None."
        )  # fmt: skip
    num_channels = dense.shape[bound.channel_dim]
    if isinstance(bound.value, Tensor) and len(bound.value) != num_channels:
        raise ValueError(
            f"value of the error bound has {len(bound.value)} entries, but dimension {bound.channel_dim} of the tensor "
            f"has {num_channels} channels; give one entry a channel."
        )
    return num_channels, max(dense.stride(bound.channel_dim), 1) if num_channels > 1 else max(dense.numel(), 1)


def finite_range(dense: Tensor, num_channels: int, inner: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value of each channel, (C,) float64 on the CPU; zeros where none is finite."""
    chunks = flat_of(dense).split(CHUNK_VALUES)
    kernels = twin_of(dense) or reference

    def range_of(index: int) -> tuple[Tensor, Tensor]:
        low = torch.full((num_channels,), torch.inf, dtype=torch.float64)
        high = -low
        kernels.finite_range(chunks[index], index * CHUNK_VALUES, inner, low, high)
        return low, high

    lows, highs = zip(*run_chunks(range_of, len(chunks), threaded=kernels is not reference), strict=True)
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return low.where(low <= high, 0), high.where(low <= high, 0)

"""From an error bound to the quantiser's grid: channels, steps, and what keeps the promise when all is rounded."""

import torch
from torch import Tensor

from comet_core.codecs.base import ErrorBound, flat_of
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, run_chunks
from comet_core.codecs.kernels.reference import Grid

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A channel's middle, which gets a level near 0, is the mean of so many of its planes and of values of each.
_MIDDLE_PLANES, _MIDDLE_VALUES = 8, 64


def grid_of(dense: Tensor, bound: ErrorBound, sign_exact: bool) -> Grid | None:
    """The quantiser's grid; None where storage has to be lossless."""
    num_channels, inner = channels_of(dense, bound)
    if dense.dtype not in FLOATS or dense.numel() == 0:
        return None
    work = torch.promote_types(dense.dtype, torch.float32)
    absolute = torch.as_tensor(bound.value, dtype=torch.float64).expand(num_channels)
    # Beyond this, levels would not be finite in the tensor's dtype.
    huge = torch.finfo(dense.dtype).max / 8
    if bound.kind == "range_rel" or bool((absolute > huge).any()):
        low, high = finite_range(dense, num_channels, inner)
        if bound.kind == "range_rel":
            extent = high - low
            extent = torch.where(extent.isinf(), absolute * high - absolute * low, absolute * extent)
            absolute = extent.nan_to_num(nan=0.0, posinf=torch.inf)  # an infinite bound times no range
        largest = torch.maximum(low.abs(), high.abs()) * (0.5 + 2.0**-20)  # such that the largest is within a step
        absolute = torch.where(absolute > huge, torch.minimum(absolute, largest), absolute)

    # A little less than twice the bound: the levels are rounded, and values half-way between two must still fit.
    step = _rounded_down(2 * absolute * (1 - 2.0**-20), work)
    # Smaller levels could be flushed to zero by a processor set up so. Such channels are exact, by what misses.
    usable = step > 4 * torch.finfo(work).tiny
    if not bool(usable.any()):
        return None
    step = torch.where(usable, step, 1)
    offset = torch.zeros_like(step)
    if bound.channel_dim is not None and not sign_exact:
        # Up to 2**21 the offset is exact.
        offset = torch.round(_middles(dense, num_channels, inner) / step.double()).clamp(-(2.0**21), 2.0**21).to(work)
    # A distance computed in float32 is off by one part in 2**24; in float64 it is what the bound is defined by.
    limit = absolute if work == torch.float64 else _rounded_down(absolute * (1 - 2.0**-23), work)
    limit = torch.where(usable, limit, 0)
    step, inverse, offset, limit = (entry.to(dense.device) for entry in (step, 1 / step, offset, limit))
    return Grid(step, inverse, offset, limit, inner, sign_exact)


def _rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = values.to(dtype)
    return torch.where(rounded.double() > values, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def _middles(dense: Tensor, num_channels: int, inner: int) -> Tensor:
    """About the mean of each channel's finite values, (C,) float64 on the CPU."""
    planes = flat_of(dense)[: dense.numel() // (num_channels * inner) * num_channels * inner].view(
        -1, num_channels, inner
    )
    some = planes[:: -(-len(planes) // _MIDDLE_PLANES), :, :: -(-inner // _MIDDLE_VALUES)].double()
    return some.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).mean((0, 2)).cpu()


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

"""Bounds relative to each value: its bits, which as a whole number are about its logarithm, are coded in its place.

Between two powers of two the bits of a positive float count up evenly, so that as a number they are a piecewise linear
log2: who is off by s octaves on it is off by at most s * |x|, for any s up to 1. A value becomes its
distance in octaves from a little above the largest one, with its sign; the error-bounded codec stores these distances
within an absolute bound, zeros and signs exact. What the decoder will return is compared with the original, and what
misses is kept verbatim. All this is whole numbers and products with powers of two, the same on any machine.

The distances count from the largest value down, because values far below the others are more common than values far
above. What lies further down than two planes of codes reach is kept verbatim, and so are subnormals, whose bits are no
logarithm. As in `two_planes.py`, copies of the whole tensor are needed while encoding and decoding.

Sources: to code logarithms within an absolute bound is the scheme of Liang et al. 2018 (CLUSTER, pp. 179-189); the
logarithm is Mitchell's (1962).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet_core.codecs.base import Codec, DamagedRecord, Encoded, ErrorBound, empty_like_record, flat_of
from comet_core.codecs.grids import FLOATS, channels_of
from comet_core.codecs.outliers import put_outliers, take_outliers

_WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}
# Below 1, so that distances count from a whole number of the float's own width.
_MOST_BOUND = 1 - 2.0**-6
# In bounds; a little less than two planes of codes can tell apart.
_REACH = 32000
# A share. More of them mean a bound that is too fine; an outlier takes two to five times its bytes.
_MOST_OUTLIERS = 2.0**-5


@dataclass(frozen=True, slots=True)
class Octaves:
    """parts = those of the distances' record, outliers if there are any."""

    distances: Any
    num_distance_parts: int
    top: int
    """The float that distances count from, as its bits."""
    num_outliers: int


def encode_octaves(codec: Codec, dense: Tensor, bound: ErrorBound) -> Encoded | None:
    """A record of a dense tensor within a `pw_rel` bound; None where lossless storage is needed or does not cost more.

    Raises ValueError where the bound's channels do not fit the tensor.
    """
    channels_of(dense, bound)
    value = torch.as_tensor(bound.value, dtype=torch.float64)
    if dense.dtype not in FLOATS or not dense.numel() or not bool((value > 0).any()):
        return None
    wide = dense.to(torch.promote_types(dense.dtype, torch.float32))
    whole = _WHOLE[wide.dtype]
    bits = wide.view(whole) & torch.iinfo(whole).max
    # Rounding to the dtype leaves errors of whole units in its last place: n of them, if less than n + 0.5 before.
    eps, unit = torch.finfo(dense.dtype).eps, torch.finfo(wide.dtype).eps
    within = ((value.clamp(max=_MOST_BOUND) / eps).floor() + 0.5) * eps
    # No distance is below the bound, so that none can lose its sign.
    highest = int(bits.where(bits <= _largest_bits(dense.dtype), 0).max())
    top = highest + int(within.max().item() / unit) + 1
    distances = (top - bits).to(wide.dtype) * unit
    value, reach = (_along(entry, dense, bound).to(dense.device) for entry in (value, within * _REACH))
    is_coded = (bits >= int(1 / unit)) & (bits <= highest) & (distances <= reach)
    is_zero = bits == 0
    signed = _laid_out_as(dense, torch.copysign(distances, wide).where(is_coded, 0))
    # That distances are rounded needs no margin: for 127 codes it is 2**-16 of the bound, and two planes leave 2**-7.
    absolute = ErrorBound("abs", within if within.ndim else within.item(), bound.channel_dim)
    inner = codec.encode(signed, absolute, sign_exact=True)
    if inner.meta is None:
        return None
    y, x = _values_of(codec.decode(inner), top, dense.dtype), dense.double()
    good = is_coded & ((x - y.double()).abs() <= value * x.abs()) & (y.sign() == dense.sign())
    is_outlier = _laid_out_as(dense, ~(good | is_zero))
    if int(is_outlier.sum()) > _MOST_OUTLIERS * dense.numel():
        return None
    outliers, num_outliers = take_outliers(flat_of(dense), flat_of(is_outlier))
    meta = Octaves(inner.meta, len(inner.parts), top, num_outliers)
    encoded = codec.record(dense, (*inner.parts, *outliers), meta)
    return encoded if encoded.nbytes < dense.nbytes else None


def decode_octaves(codec: Codec, encoded: Encoded) -> Tensor:
    """The tensor of a record of encode_octaves. Raises DamagedRecord."""
    meta: Octaves = encoded.meta
    numbers = meta.num_distance_parts, meta.top, meta.num_outliers
    if encoded.dtype not in FLOATS or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise DamagedRecord(f"its dtype is {encoded.dtype} and its counts are {numbers}")
    wide = torch.promote_types(encoded.dtype, torch.float32)
    if meta.top > torch.iinfo(_WHOLE[wide]).max:
        raise DamagedRecord(f"its distances count from {meta.top}, which is no {wide}")
    if meta.distances is None or isinstance(meta.distances, Octaves):
        raise DamagedRecord(f"the numbers of its distances are a {type(meta.distances).__name__}")
    parts = encoded.parts[: meta.num_distance_parts]
    distances = codec.decode(dataclasses.replace(encoded, dtype=wide, parts=parts, meta=meta.distances))
    out = empty_like_record(encoded).copy_(_values_of(distances, meta.top, encoded.dtype))
    put_outliers(encoded, meta.num_distance_parts, meta.num_outliers, flat_of(out))
    return out


def _values_of(distances: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    """The values at signed distances, in octaves, below `top`; 0 for 0."""
    steps = (distances.abs() / torch.finfo(distances.dtype).eps).round_().clamp_(max=top)
    bits = (top - steps.to(_WHOLE[distances.dtype])).clamp_(1, _largest_bits(dtype))
    return torch.copysign(bits.view(distances.dtype), distances).where(distances != 0, 0).to(dtype)


def _largest_bits(dtype: torch.dtype) -> int:
    """The bits of the dtype's largest finite value, as a float32 or float64."""
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.promote_types(dtype, torch.float32))
    return int(largest.view(_WHOLE[largest.dtype]))


def _along(entry: Tensor, dense: Tensor, bound: ErrorBound) -> Tensor:
    """One number for all, or one a channel, to broadcast against the tensor."""
    if bound.channel_dim is None or not entry.ndim:
        return entry
    return entry.view([-1 if dim == bound.channel_dim % dense.ndim else 1 for dim in range(dense.ndim)])


def _laid_out_as(dense: Tensor, values: Tensor) -> Tensor:
    """The same values with the strides of the dense tensor."""
    return torch.empty_strided(dense.shape, dense.stride(), dtype=values.dtype, device=dense.device).copy_(values)

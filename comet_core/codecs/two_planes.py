"""Bounds too fine for codes of a byte: a coarse record, and a second one of what the first leaves over.

The first is made with the bound times 2**k and the second, of the rest, with the bound: together codes of up to 15
bits, the upper ones in the context of their neighbours. A bound that is too fine even for them makes the coarse record
one of two planes itself. Few values far from the others do not widen the codes of all: a sample says how many bits pay,
and what is out of reach is verbatim in the coarse record. What the sum of both misses is kept verbatim too.

Unlike in one plane, float copies of the whole tensor are needed while encoding and decoding: this is for the fixed
bounds of people who want nearly exact tensors, not for those that a controller sets.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet_core.codecs.base import Codec, DamagedRecord, Encoded, ErrorBound, flat_of
from comet_core.codecs.octaves import Octaves
from comet_core.codecs.outliers import put_outliers, take_outliers

_MOST_SHIFT = 7
_LEVELS = 127
"""Codes of a byte reach from -127 to 127."""
_SHIFT_BITS, _MISSED_BITS = 0.1, 36
"""What a value costs more if codes are a bit wider, since the rest knows no context; what it costs out of reach."""
_MOST_NESTED = 8
# The rest is quantised a little finer, since the sum of both planes is rounded.
_REST_SHARE = 1 - 2.0**-7


@dataclass(frozen=True, slots=True)
class TwoPlanes:
    """parts = those of the coarse record, those of the rest, outliers if there are any."""

    coarse: Any
    num_coarse_parts: int
    rest: Any
    num_rest_parts: int
    num_outliers: int


def encode_in_two(codec: Codec, dense: Tensor, bound: ErrorBound, reach: Tensor, sign_exact: bool) -> Encoded | None:
    """A record of a dense float tensor within an `abs` bound, None where no number of codes pays.

    `reach`, float64: how many steps of the quantiser some of the values are away from its middle, not finite where they
    are not. A channel with a bound of 0 is exact.
    """
    # Codes as wide as the values pay nowhere.
    bits = [
        _SHIFT_BITS * shift + _MISSED_BITS * (~(reach <= _LEVELS * 2.0**shift)).double().mean().item()
        for shift in range(8 * dense.itemsize - 7)
    ]
    needed = bits.index(min(bits))
    if not 0 < needed < len(bits) - 1:
        return None
    shift = min(needed, _MOST_SHIFT)
    value = torch.as_tensor(bound.value, dtype=torch.float64)

    def times(factor: float) -> ErrorBound:
        return dataclasses.replace(bound, value=value * factor if value.ndim else value.item() * factor)

    coarse = codec.encode(dense, times(2.0**shift), sign_exact=sign_exact)
    first = codec.decode(coarse)
    left = (dense - first).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    rest = codec.encode(left, times(_REST_SHARE))
    y = first + codec.decode(rest)
    if coarse.meta is None or rest.meta is None:
        return None
    if bound.channel_dim is not None:
        value = value.view([-1 if dim == bound.channel_dim % dense.ndim else 1 for dim in range(dense.ndim)])
    good = (dense.double() - y.double()).abs() <= value.to(dense.device)
    good &= (torch.sign(y) == torch.sign(dense)) if sign_exact else ((dense != 0) | (y == 0))
    # In the order of memory, as the decoder writes.
    is_outlier = torch.empty_strided(dense.shape, dense.stride(), dtype=torch.bool, device=dense.device).copy_(~good)
    outliers, num_outliers = take_outliers(flat_of(dense), flat_of(is_outlier))
    meta = TwoPlanes(coarse.meta, len(coarse.parts), rest.meta, len(rest.parts), num_outliers)
    return codec.record(dense, (*coarse.parts, *rest.parts, *outliers), meta)


def decode_in_two(codec: Codec, encoded: Encoded) -> Tensor:
    """The tensor of a record of encode_in_two. Raises DamagedRecord."""
    meta: TwoPlanes = encoded.meta
    numbers = meta.num_coarse_parts, meta.num_rest_parts, meta.num_outliers
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise DamagedRecord(f"its counts are {numbers}")
    innermost, num_nested = meta.coarse, 0
    while isinstance(innermost, TwoPlanes) and num_nested < _MOST_NESTED:
        innermost, num_nested = innermost.coarse, num_nested + 1
    if any(isinstance(plane, TwoPlanes | Octaves) for plane in (innermost, meta.rest)):
        raise DamagedRecord(f"its planes lie more than {_MOST_NESTED} deep, or one has octaves of its own")
    num_parts = meta.num_coarse_parts + meta.num_rest_parts
    coarse = dataclasses.replace(encoded, parts=encoded.parts[: meta.num_coarse_parts], meta=meta.coarse)
    rest = dataclasses.replace(encoded, parts=encoded.parts[meta.num_coarse_parts : num_parts], meta=meta.rest)
    out = codec.decode(coarse).add_(codec.decode(rest))
    put_outliers(encoded, num_parts, meta.num_outliers, flat_of(out))
    return out

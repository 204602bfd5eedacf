"""Another float format: float16, bfloat16 or one of the two float8 formats, with one power of two as scale.

The scale brings the largest finite magnitude of the tensor to the top of the format, so nothing overflows, and as a
power of two it costs no bit of any value. A value keeps the precision of the format down to the format's normal range
below the largest, and loses it bit by bit from there. Nothing is compressed further.

Source: FP8 formats for deep learning (Micikevicius et al. 2022): formats, and a scale a tensor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_core.codecs.base import (
    Codec,
    DamagedRecord,
    Encoded,
    ErrorBound,
    check_num_parts,
    dense_of,
    empty_like_record,
    flat_of,
    tensor_part,
)
from comet_core.codecs.kernels.chunks import CHUNK_VALUES
from comet_core.codecs.lossless import decode_exactly, encode_exactly
from comet_core.codecs.outliers import put_outliers, take_outliers
from comet_core.config import check_codec_params

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FORMATS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = codes (n * item size of the format,) uint8, then outliers if there are any."""

    dtype: str
    """Empty: stored losslessly."""
    exponent: int
    """The value stored is x * 2**exponent."""
    num_outliers: int


class CastCodec(Codec):
    """y = 2**-e * round(2**e * x), round to nearest in `dtype`, with the largest e for which no finite x overflows.

    In `dtype`'s normal range |x - y| <= |x| * eps / 2, with eps 2**-10 (float16), 2**-7 (bfloat16), 2**-3
    (float8_e4m3fn) or 2**-2 (float8_e5m2); below it half the distance of its subnormals. What would round to zero takes
    the smallest subnormal instead, so that zeros and signs are exact with and without `sign_exact`. NaN and infinities
    are kept verbatim: not every format has them, and none keeps the bits. `bound` is ignored. Formats that are not
    smaller than the tensor's own, and tensors that are not of floats, are stored losslessly.

    Raises ValueError for another `dtype`.
    """

    name = "cast"
    guarantee = "unbounded"
    exact_for = "what has no larger dtype than its format"

    def __init__(self, dtype: str = "float8_e4m3fn") -> None:
        self._dtype = check_codec_params(self.name, {"dtype": dtype})["dtype"]

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        if dense.dtype in _FLOATS and _FORMATS[self._dtype].itemsize < dense.itemsize and dense.numel():
            flat = flat_of(dense)
            outliers, num_outliers = take_outliers(flat, ~flat.isfinite())
            if outliers:
                flat = flat.nan_to_num(0.0, 0.0, 0.0)
            largest = max(abs(float(extreme)) for extreme in flat.aminmax())
            exponent = _exponent(largest, _FORMATS[self._dtype], _work_dtype(dense.dtype))
            codes = torch.cat([_cast(x, _FORMATS[self._dtype], exponent) for x in flat.split(CHUNK_VALUES)])
            if codes.nbytes + sum(part.nbytes for part in outliers) < dense.nbytes:
                return self.record(dense, (codes, *outliers), _Meta(self._dtype, exponent, num_outliers))
        return self.record(dense, encode_exactly(dense), _Meta("", 0, 0))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        meta = encoded.meta
        if not meta.dtype:
            return decode_exactly(encoded, out).to(device or encoded.device)
        work = _work_dtype(encoded.dtype)
        if meta.dtype not in _FORMATS or encoded.dtype not in _FLOATS or abs(meta.exponent) > _most_exponent(work):
            raise DamagedRecord(f"{meta} does not make {encoded.dtype}")
        check_num_parts(encoded, 1 + (meta.num_outliers != 0))
        stored = _FORMATS[meta.dtype]
        codes = tensor_part(encoded, 0, torch.uint8, math.prod(encoded.shape) * stored.itemsize)
        out = empty_like_record(encoded) if out is None else out
        flat, info = flat_of(out), torch.finfo(encoded.dtype)
        smallest = info.smallest_normal * info.eps
        for chunk, given in zip(flat.split(CHUNK_VALUES), codes.view(stored).split(CHUNK_VALUES), strict=True):
            x = given.to(work)
            y = (x * 2.0**-meta.exponent).clamp(info.min, info.max).to(encoded.dtype)
            chunk.copy_(torch.where((y == 0) & (x != 0), torch.copysign(torch.full_like(y, smallest), x), y))
        put_outliers(encoded, 1, meta.num_outliers, flat)
        return out.to(device or encoded.device)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _most_exponent(work: torch.dtype) -> int:
    """Up to here 2**exponent and 2**-exponent are normal numbers."""
    return 1022 if work == torch.float64 else 126


def _exponent(largest: float, stored: torch.dtype, work: torch.dtype) -> int:
    """The largest e with 2**e * largest <= the format's largest value."""
    if largest == 0:
        return 0
    (top, top_exponent), (mantissa, exponent) = math.frexp(torch.finfo(stored).max), math.frexp(largest)
    most = _most_exponent(work)
    return max(-most, min(most, top_exponent - exponent - (mantissa > top)))


def _cast(x: Tensor, stored: torch.dtype, exponent: int) -> Tensor:
    """The (n,) finite values in another format, as bytes."""
    info = torch.finfo(stored)
    smallest = info.smallest_normal * info.eps
    scaled = x.to(_work_dtype(x.dtype)) * 2.0**exponent
    lost = (scaled.abs() < smallest) & (x != 0)
    return torch.where(lost, torch.copysign(torch.full_like(scaled, smallest), x), scaled).to(stored).view(torch.uint8)

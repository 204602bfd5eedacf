"""Groups of 256 neighbours, each with its own range, rounded at random to 2, 4 or 8 bits a value.

Random rounding makes the decoded value right on average, so that errors cancel over the many terms of a gradient; the
price is a variance that only the number of bits decides. There is no bound: a wild value widens its whole group.

A group's minimum is kept in float32, its step in bfloat16, rounded up: six bytes a group, 0.19 bits a value. ActNN
keeps both in bfloat16, but a minimum that is off by 2**-8 of itself widens groups whose values lie far from zero, and
groups of equal values, here exact, would not be. The step is at most 2**-7 wider than needed. The group's size is
fixed, the paper's: smaller ones spend more on their ranges than two bits can gain.

The noise is a hash of seed, index and the values themselves, since a codec has no state: equal tensors give equal
records, and the errors of different tensors, such as one layer's inputs in two steps, are independent.

Source: ActNN (Chen et al. 2021, section 4.1, without the mixed precision of 4.2); packed codes as there, no entropy
coder.
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
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, run_chunks
from comet_core.codecs.kernels.reference import GROUP_VALUES
from comet_core.codecs.lossless import decode_exactly, encode_exactly
from comet_core.codecs.outliers import put_outliers, take_outliers
from comet_core.config import check_codec_params

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = minima and steps of the groups, uint8; codes, then sign bits if signed, uint8; outliers if any."""

    num_bits: int
    """0: stored losslessly."""
    sign_exact: bool
    signed: bool
    num_outliers: int


class GroupQuantizedCodec(Codec):
    """y = low + q * step with q = floor((x - low) / step + u), u uniform in [0, 1), in each group of 256 values.

    step = (max - low) / (2**num_bits - 1), rounded up to bfloat16. |x - y| < step, and y is x on average over seeds,
    both up to the rounding of y to the tensor's dtype. Groups without negative values keep their zeros.

    With `sign_exact` code 0 means zero, and the other codes, one level fewer, are magnitudes between the smallest and
    the largest of the group that are not zero. That costs no bit where nothing is negative, as behind a ReLU; else one
    bit a value for the sign.

    NaN, infinities and values beyond the range of float32 are kept verbatim and do not count for their group. `bound`
    is ignored. Tensors that are not of floats, and such as would not become smaller, are stored losslessly.

    Raises ValueError for other numbers of bits and for a seed that is not from 0 to 2**32 - 1.
    """

    name = "group_quantized"
    guarantee = "unbounded"
    exact_for = "groups of equal values, and what would not become smaller"

    def __init__(self, num_bits: int = 2, seed: int = 0) -> None:
        checked = check_codec_params(self.name, {"num_bits": num_bits, "seed": seed})
        self._num_bits, self._seed = checked["num_bits"], checked["seed"]

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        if dense.dtype in _FLOATS and dense.numel():
            encoded = self._encode_groups(dense, sign_exact)
            if sum(part.nbytes for part in encoded.parts) < dense.nbytes:
                return encoded
        return self.record(dense, encode_exactly(dense), _Meta(0, sign_exact, False, 0))

    def _encode_groups(self, dense: Tensor, sign_exact: bool) -> Encoded:
        flat, bits = flat_of(dense), self._num_bits
        chunks = flat.split(CHUNK_VALUES)
        work = torch.promote_types(flat.dtype, torch.float32)
        twin = twin_of(flat.new_empty(0, dtype=work))

        def encode_chunk(index: int) -> tuple[Tensor, Tensor, Tensor]:
            first_group = index * (CHUNK_VALUES // GROUP_VALUES)
            return (twin or reference).encode_groups(chunks[index].to(work), first_group, bits, self._seed, sign_exact)

        found = run_chunks(encode_chunk, len(chunks), threaded=twin is not None and work == flat.dtype)
        low, step, codes = (torch.cat(pieces) for pieces in zip(*found, strict=True))
        signed = sign_exact and bool((flat < 0).any())
        if signed:
            codes = torch.cat([codes, reference.pack_bits((flat < 0).to(torch.uint8), 1)])
        beyond = ~(flat.abs() <= torch.finfo(torch.float32).max) if work == torch.float64 else ~flat.isfinite()
        tables = torch.cat([low.view(torch.uint8), step.view(torch.uint8)])
        outliers, num_outliers = take_outliers(flat, beyond)
        return self.record(dense, (tables, codes, *outliers), _Meta(bits, sign_exact, signed, num_outliers))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        meta = encoded.meta
        bits, sign_exact, signed = meta.num_bits, meta.sign_exact, meta.signed
        if bits == 0:
            return decode_exactly(encoded, out).to(device or encoded.device)
        if bits not in _WIDTHS or encoded.dtype not in _FLOATS:
            raise DamagedRecord(f"codes of {bits} bits do not make {encoded.dtype}")
        check_num_parts(encoded, 2 + (meta.num_outliers != 0))
        work = torch.promote_types(encoded.dtype, torch.float32)
        count = math.prod(encoded.shape)
        num_groups, code_bytes = -(-count // GROUP_VALUES), -(-count * bits // 8)
        tables = tensor_part(encoded, 0, torch.uint8, num_groups * (work.itemsize + 2))
        codes = tensor_part(encoded, 1, torch.uint8, code_bytes + signed * -(-count // 8))
        # Views of another dtype must start at a multiple of its item size, as both do.
        minima, steps = tables.split((num_groups * work.itemsize, num_groups * 2))
        low, step = minima.view(work), steps.view(torch.bfloat16)
        out = empty_like_record(encoded) if out is None else out
        flat = flat_of(out)
        chunks, largest = flat.split(CHUNK_VALUES), torch.finfo(out.dtype).max
        twin = twin_of(flat.new_empty(0, dtype=work))

        def decode_chunk(index: int) -> None:
            first, groups_a_chunk = index * CHUNK_VALUES, CHUNK_VALUES // GROUP_VALUES
            of_chunk = slice(index * groups_a_chunk, (index + 1) * groups_a_chunk)
            packed = codes[first * bits // 8 : (min(first + CHUNK_VALUES, count) * bits + 7) // 8]
            target = chunks[index] if work == out.dtype else torch.empty_like(chunks[index], dtype=work)
            (twin or reference).decode_groups(packed, low[of_chunk], step[of_chunk], bits, sign_exact, largest, target)
            if target is not chunks[index]:
                chunks[index].copy_(target)

        run_chunks(decode_chunk, len(chunks), threaded=twin is not None and work == out.dtype)
        if signed:
            negative = reference.unpack_bits(codes[code_bytes:], 1, count) != 0
            flat.copy_(torch.where(negative, -flat, flat))
        put_outliers(encoded, 2, meta.num_outliers, flat)
        return out.to(device or encoded.device)

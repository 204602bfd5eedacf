"""A bit for each value, and the values that are not zero: for tensors with many zeros, as behind a ReLU.

Zero means that every bit is zero, so -0.0 is kept like any other value. Nothing is compressed further: the record costs
one pass to make and one to read, on any device. It pays from a share of zeros of 1 in 8 * item size on (3 % for
float32); what has fewer is stored losslessly.

Source: the sparse storage of Gist (Jain et al. 2018), with a bitmap in place of its column index of a byte for each
non-zero value: smaller where more than one value in eight is not zero.
"""

import math

import torch
from torch import Tensor

from comet_core.codecs.base import (
    Codec,
    Encoded,
    ErrorBound,
    check_num_parts,
    dense_of,
    empty_like_record,
    flat_of,
    tensor_part,
)
from comet_core.codecs.kernels import reference
from comet_core.codecs.lossless import decode_exactly, encode_exactly


class SparseCodec(Codec):
    """Every bit comes back. `bound` and `sign_exact` are ignored."""

    name = "sparse"
    guarantee = "exact"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        items = _items(flat_of(dense))
        present = items != 0
        if -(-len(items) // 8) + int(torch.count_nonzero(present)) * dense.itemsize >= dense.nbytes:
            return self.record(dense, encode_exactly(dense), False)
        return self.record(dense, (reference.pack_bits(present.to(torch.uint8), 1), items[present]), True)

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        if not encoded.meta:
            return decode_exactly(encoded, out).to(device or encoded.device)
        check_num_parts(encoded, 2)
        item_dtype = _item_dtype(encoded.dtype)
        count = math.prod(encoded.shape) * encoded.dtype.itemsize // item_dtype.itemsize
        bits = tensor_part(encoded, 0, torch.uint8, -(-count // 8))
        present = reference.unpack_bits(bits, 1, count) != 0
        values = tensor_part(encoded, 1, item_dtype, int(torch.count_nonzero(present)))
        out = empty_like_record(encoded) if out is None else out
        _items(flat_of(out)).zero_().masked_scatter_(present, values)
        return out.to(device or encoded.device)


_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _items(flat: Tensor) -> Tensor:
    """The (n,) values as integers of the same bits; real and imaginary parts of complex128 are two items."""
    return flat.view(_item_dtype(flat.dtype))


def _item_dtype(dtype: torch.dtype) -> torch.dtype:
    return _ITEMS[min(dtype.itemsize, 8)]

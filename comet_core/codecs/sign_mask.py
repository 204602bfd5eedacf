"""One bit an element, for tensors of which backward reads only which values are positive.

ReLU's backward asks `result > 0`. Dropout's noise is 0 or 1 / (1 - p), and comes back exactly, because the record
also holds the largest value. The bits are not compressed any further: they hardly repeat.

Source: the sign of ReLU results in one bit, Gist (Jain et al. 2018).
"""

import math

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


class SignMaskCodec(Codec):
    """y = m where not (x <= 0), else 0, with m = max(x) if that is finite and positive, else 1.

    So NaN counts as positive, tensors of {0, m} and bool tensors come back exactly, and (y > 0) == not (x <= 0).
    `bound` and `sign_exact` are ignored. Raises ValueError for complex tensors, which have no order.
    """

    name = "sign_mask"
    guarantee = "pattern"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        if tensor.is_complex():
            raise ValueError(f"tensor is {tensor.dtype}, which has no order; allowed: real and bool tensors.")
        dense = dense_of(tensor)
        flat = flat_of(dense)
        largest = flat.max().item() if len(flat) else 1
        chunks = flat.split(CHUNK_VALUES)
        twin = twin_of(flat)
        positive_bits = (twin or reference).positive_bits
        bits = run_chunks(lambda index: positive_bits(chunks[index]), len(chunks), threaded=twin is not None)
        return self.record(dense, (torch.cat(bits),), largest if 0 < largest < torch.inf else 1)

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        check_num_parts(encoded, 1)
        bits = tensor_part(encoded, 0, torch.uint8, -(-math.prod(encoded.shape) // 8)).split(CHUNK_VALUES // 8)
        try:
            value = torch.tensor(encoded.meta, dtype=encoded.dtype, device=encoded.device)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise DamagedRecord(f"its largest value {encoded.meta} is not a {encoded.dtype}") from error
        out = empty_like_record(encoded) if out is None else out
        values = flat_of(out).split(CHUNK_VALUES)
        twin = twin_of(out)
        fill = (twin or reference).fill_positive
        run_chunks(lambda index: fill(bits[index], value, values[index]), len(values), threaded=twin is not None)
        return out.to(device or encoded.device)

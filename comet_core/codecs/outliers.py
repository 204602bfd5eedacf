"""Values that a lossy codec keeps verbatim: their indices and their bits, in one part of its record.

For codecs whose codes cannot say everything, NaN and infinities above all. What is kept costs eight bytes and the value
itself, so it has to be rare; where it is not, the codecs fall back to lossless storage.
"""

import torch
from torch import Tensor

from comet_core.codecs.base import DamagedRecord, Encoded, check_num_parts, tensor_part

_INDEX_BYTES = 8


def take_outliers(flat: Tensor, is_outlier: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """The part, uint8, for those of the (n,) values where the mask is set, and their number; no part where it is 0."""
    indices = is_outlier.nonzero()[:, 0]
    if len(indices) == 0:
        return (), 0
    return (torch.cat([indices.view(torch.uint8), flat[indices].view(torch.uint8)]),), len(indices)


def put_outliers(encoded: Encoded, num_parts: int, num_outliers: int, flat: Tensor) -> None:
    """Write what take_outliers gave, the part behind the first `num_parts`, over the decoded (n,) values.

    Raises DamagedRecord for another number of parts or of outliers, and for indices beyond the values.
    """
    check_num_parts(encoded, num_parts + (num_outliers != 0))
    if num_outliers != 0:
        part = tensor_part(encoded, num_parts, torch.uint8, num_outliers * (_INDEX_BYTES + flat.itemsize))
        # Views of another dtype must start at a multiple of their item size: copy the two slices first.
        indices = part[: num_outliers * _INDEX_BYTES].clone().view(torch.int64)
        if bool(((indices < 0) | (indices >= len(flat))).any()):
            raise DamagedRecord(f"the index of an outlier is not among {len(flat)} values")
        flat[indices] = part[num_outliers * _INDEX_BYTES :].clone().view(flat.dtype)

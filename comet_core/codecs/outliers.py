"""Values that a lossy codec keeps verbatim: their indices and their bits, in one part of its record.

For codecs whose codes cannot say everything, NaN and infinities above all. What is kept costs eight bytes and the value
itself, so it has to be rare; where it is not, the codecs fall back to lossless storage.
"""

import torch
from torch import Tensor

from comet_core.codecs.base import DamagedRecord

_INDEX_BYTES = 8


def take_outliers(flat: Tensor, is_outlier: Tensor) -> tuple[Tensor, ...]:
    """The part, a uint8 tensor, for those of the (n,) values where the mask is set; no part where there are none."""
    indices = is_outlier.nonzero()[:, 0]
    if len(indices) == 0:
        return ()
    return (torch.cat([indices.view(torch.uint8), flat[indices].view(torch.uint8)]),)


def put_outliers(parts: tuple[Tensor, ...], flat: Tensor) -> None:
    """Write what take_outliers gave over the decoded (n,) values. Raises DamagedRecord for indices beyond them."""
    for part in parts:
        count, rest = divmod(part.nbytes, _INDEX_BYTES + flat.itemsize)
        if part.dtype != torch.uint8 or part.ndim != 1 or part.device != flat.device or rest or count > len(flat):
            raise DamagedRecord(f"{part.nbytes} bytes are no outliers of {len(flat)} values of {flat.dtype}")
        # Views of another dtype must start at a multiple of their item size: copy the two slices first.
        indices = part[: count * _INDEX_BYTES].clone().view(torch.int64)
        if bool(((indices < 0) | (indices >= len(flat))).any()):
            raise DamagedRecord(f"the index of an outlier is not among {len(flat)} values")
        flat[indices] = part[count * _INDEX_BYTES :].clone().view(flat.dtype)

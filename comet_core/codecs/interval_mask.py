"""One bit an element, for tensors of which backward reads only which values lie inside an interval.

Clamps (ReLU6, Hardtanh, Hardsigmoid) pass the gradient on where low < x < high and stop it elsewhere. The bits are
those of sign_mask.py, of a tensor that says so.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from comet_core.codecs.base import Codec, DamagedRecord, Encoded, ErrorBound, dense_of, empty_like_record
from comet_core.codecs.sign_mask import SignMaskCodec
from comet_core.config import as_plain, shown


class IntervalMaskCodec(Codec):
    """y inside the open interval where x is or where x is NaN, else y on its border; low < y, so high may be infinite.

    `bound` and `sign_exact` are ignored. Raises ValueError for an interval that is empty or has no lower end, and for
    complex tensors, which have no order. The defaults are ReLU6's.
    """

    name = "interval_mask"
    guarantee = "pattern"

    def __init__(self, low: float = 0.0, high: float = 6.0) -> None:
        low, high = as_plain(low), as_plain(high)
        numbers = isinstance(low, int | float) and isinstance(high, int | float)
        if not numbers or not -math.inf < low < high:
            raise ValueError(f"the interval is from {shown(low)} to {shown(high)}; allowed: a finite low below high.")
        self.low, self.high = float(low), float(high)
        self._mask = SignMaskCodec()

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        if tensor.is_complex():
            raise ValueError(f"tensor is {tensor.dtype}, which has no order; allowed: real and bool tensors.")
        dense = dense_of(tensor)
        dtype = dense.dtype if dense.is_floating_point() else torch.float64  # as torch's clamps round their ends
        low, high = (torch.tensor(end, dtype=dtype, device=dense.device) for end in (self.low, self.high))
        bits = self._mask.encode(~((dense <= low) | (dense >= high)))
        return self.record(dense, bits.parts, (self.low, self.high))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        inside = self._mask.decode(replace(encoded, codec=self._mask.name, dtype=torch.bool, meta=1))
        middle, border = self._ends(encoded)
        out = empty_like_record(encoded) if out is None else out
        return torch.where(inside, middle, border, out=out).to(device or encoded.device)

    @staticmethod
    def _ends(encoded: Encoded) -> tuple[Tensor, Tensor]:
        """A value inside the record's interval and one on its border, in its dtype."""
        try:
            low, high = encoded.meta
            middle = low + 1 + abs(low) if math.isinf(high) else low + (high - low) / 2
            inside, border = (torch.tensor(v, dtype=encoded.dtype, device=encoded.device) for v in (middle, low))
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise DamagedRecord(f"its interval {encoded.meta} has no values of {encoded.dtype}") from error
        return inside, border

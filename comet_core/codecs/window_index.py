"""Indices of max pooling, as the position within the window: 2 or 4 bits instead of 64.

Max pooling in two dimensions saves for each output the int64 index of its maximum in the plane of the input. That
index lies in the output's window, which follows from the output's own place: to name the position inside a window of
2x2 takes 2 bits, of 3x3 or 4x4 4 bits, and a byte up to 256 positions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_core.codecs.base import Codec, Encoded, ErrorBound, dense_of, empty_like_record, flat_of
from comet_core.codecs.kernels import reference
from comet_core.codecs.kernels.chunks import CHUNK_VALUES
from comet_core.codecs.lossless import decode_bytes, encode_bytes


@dataclass(frozen=True, slots=True)
class _Meta:
    bits: int
    """Of a code; 0: stored losslessly."""
    windows: reference.Windows


class WindowIndexCodec(Codec):
    """The indices of one pooling layer come back exactly, whatever they are: others than max pooling's are lossless.

    kernel_size, stride, padding, dilation and input_size (H, W) are pairs of ints as `max_pool2d` takes them; the
    tensor is int64 of shape (..., output height, output width). `bound` and `sign_exact` are ignored. Raises
    ValueError where a pair is not two ints in the range that max_pool2d allows.
    """

    name = "window_index"
    guarantee = "pattern"

    def __init__(
        self,
        kernel_size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        input_size: tuple[int, int],
    ) -> None:
        self._windows = reference.Windows(kernel_size, stride, padding, dilation, input_size)
        for name, lowest in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1), ("input_size", 1)):
            pair = getattr(self._windows, name)
            if len(pair) != 2 or min(pair) < lowest:
                raise ValueError(f"{name} is {pair!r}; allowed: a pair of ints of {lowest} or more.")

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        positions = math.prod(self._windows.kernel_size)
        bits = next((bits for bits in (1, 2, 4, 8) if positions <= 1 << bits), 0)
        if bits and dense.ndim >= 2 and dense.dtype == torch.int64 and dense.numel():
            planes = dense.reshape(-1, *dense.shape[-2:])
            codes = torch.empty(planes.shape, dtype=torch.uint8, device=dense.device)
            if all(
                reference.window_codes(indices, self._windows, out)
                for indices, out in zip(_split(planes), _split(codes), strict=True)
            ):
                packed = reference.pack_bits(codes.view(-1), bits)
                return self.record(dense, (packed,), _Meta(bits, self._windows))
        return self.record(dense, (encode_bytes(flat_of(dense)),), _Meta(0, self._windows))

    def decode(self, encoded: Encoded, device: torch.device | str | None = None) -> Tensor:
        self.check_own(encoded)
        out, meta = empty_like_record(encoded), encoded.meta
        if meta.bits:
            codes = reference.unpack_bits(encoded.parts[0], meta.bits, out.numel()).view(-1, *out.shape[-2:])
            planes = torch.cat([reference.window_indices(chunk, meta.windows) for chunk in _split(codes)])
            out.copy_(planes.view(out.shape))
        else:
            decode_bytes(encoded.parts[0], flat_of(out))
        return out.to(device or encoded.device)


def _split(planes: Tensor) -> tuple[Tensor, ...]:
    return planes.split(max(CHUNK_VALUES // planes[0].numel(), 1))

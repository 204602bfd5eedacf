"""Indices of max pooling, as the position within the window: 2 or 4 bits instead of 64.

Max pooling in two dimensions saves for each output the int64 index of its maximum in the plane of the input. That
index lies in the output's window, which follows from the output's own place: to name the position inside a window of
2x2 takes 2 bits, of 3x3 or 4x4 4 bits, and a byte up to 256 positions.
"""

import math
from dataclasses import dataclass
from typing import Any

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
    tensor_part,
)
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, run_chunks
from comet_core.codecs.lossless import decode_exactly, encode_exactly
from comet_core.config import shown

_WIDTHS = (1, 2, 4, 8)


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
        problem = _problem(self._windows)
        if problem:
            raise ValueError(problem)

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        positions = math.prod(self._windows.kernel_size)
        bits = next((bits for bits in _WIDTHS if positions <= 1 << bits), 0)
        if bits and dense.ndim >= 2 and dense.dtype == torch.int64 and dense.numel():
            planes = dense.reshape(-1, *dense.shape[-2:])
            tasks = planes.split(_planes_a_task(planes))
            kernels = _kernels_on(dense.device)

            def encode_task(index: int) -> Tensor | None:
                codes = torch.empty(tasks[index].shape, dtype=torch.uint8, device=dense.device)
                fit = kernels.window_codes(tasks[index], self._windows, codes)
                return kernels.pack_bits(codes.view(-1), bits) if fit else None

            found = run_chunks(encode_task, len(tasks), threaded=kernels is not reference)
            packed = [part for part in found if part is not None]
            if len(packed) == len(tasks):
                return self.record(dense, (torch.cat(packed),), _Meta(bits, self._windows))
        return self.record(dense, encode_exactly(dense), _Meta(0, self._windows))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        meta = encoded.meta
        if meta.bits == 0:
            return decode_exactly(encoded, out).to(device or encoded.device)
        problem = _problem(meta.windows)
        if problem:
            raise DamagedRecord(problem.rstrip("."))
        count = math.prod(encoded.shape)
        if meta.bits not in _WIDTHS or count == 0 or len(encoded.shape) < 2 or encoded.dtype != torch.int64:
            raise DamagedRecord(f"no codes of {meta.bits} bits stand for {encoded.dtype} of {tuple(encoded.shape)}")
        check_num_parts(encoded, 1)
        packed = tensor_part(encoded, 0, torch.uint8, -(-count * meta.bits // 8))
        out = empty_like_record(encoded) if out is None else out
        contiguous = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        planes = contiguous.view(-1, *out.shape[-2:])
        tasks, kernels = planes.split(_planes_a_task(planes)), _kernels_on(out.device)
        parts = packed.split(-(-tasks[0].numel() * meta.bits // 8))

        def decode_task(index: int) -> None:
            codes = kernels.unpack_bits(parts[index], meta.bits, tasks[index].numel())
            kernels.window_indices(codes.view(tasks[index].shape), meta.windows, tasks[index])

        run_chunks(decode_task, len(tasks), threaded=kernels is not reference)
        if contiguous is not out:
            out.copy_(contiguous)
        return out.to(device or encoded.device)


def _problem(windows: reference.Windows) -> str:
    """What makes this no geometry of a max_pool2d, as a sentence; empty where it is one."""
    for name, lowest in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1), ("input_size", 1)):
        pair = getattr(windows, name)
        whole = isinstance(pair, tuple | list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not whole or not lowest <= min(pair) <= max(pair) < 1 << 31:
            return f"{name} is {shown(pair)}; allowed: a pair of ints from {lowest} to {2**31 - 1}."
    return ""


def _planes_a_task(planes: Tensor) -> int:
    """A multiple of eight, so that a task's codes begin with a byte."""
    return 8 * max(CHUNK_VALUES // planes[0].numel() // 8, 1)


def _kernels_on(device: torch.device) -> Any:
    return twin_of(torch.empty(0, dtype=torch.uint8, device=device)) or reference

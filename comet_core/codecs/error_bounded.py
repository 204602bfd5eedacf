"""The error-bounded codec: quantise, check, pack two codes a byte, zstd; outliers verbatim.

Each chunk of memory is one task: its values become codes of 4 bits; the value that the decoder will return is compared
with the original, and what misses the bound is kept as it is (index and bits). Where too much misses, the chunk takes
codes of 8 bits; where even that does not pay, it is stored losslessly. So the width follows the data by itself, chunk
by chunk, and a chunk that needs more bits notices after a few blocks.

No spatial prediction: away from the image it adds the neighbours' noise to each value. The quantiser is defined in
`kernels/reference.py`. zstd then shortens frequent pairs and runs; tensors on a GPU keep packed codes without it.

Sources: the check and the verbatim outliers follow PFPL (Fallin et al. 2025); the quantiser that of cuSZ (Tian et al.
2020), with a zero of its own for the sign of ReLU results.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.base import (
    Codec,
    Encoded,
    ErrorBound,
    as_error_bound,
    dense_of,
    empty_like_record,
    flat_of,
)
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, compress, decompress, run_chunks
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.lossless import decode_bytes, encode_bytes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Bits a code -> one value in how many may be an outlier, which costs about 64 bits: beyond, more bits are cheaper.
_WIDTHS = {4: 16, 8: 8}
_LOSSLESS = 0  # in place of the bits
# The reference launches a dozen operations a chunk, so on a GPU chunks are larger.
_GPU_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = step (C,), offset (C,), then a blob for each chunk; blobs alone where every chunk is lossless."""

    inner: int
    sign_exact: bool
    bits: tuple[int, ...]
    num_outliers: tuple[int, ...]


class ErrorBoundedCodec(Codec):
    """Every finite value within the bound; see `ErrorBound` for its kinds and `Codec` for the rest.

    `sign_exact` keeps zeros apart from non-zeros and the sign of these, so that decoded > 0 is the mask of a ReLU.
    """

    name = "error_bounded"
    guarantee = "bounded"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense, checked = dense_of(tensor), as_error_bound(bound)
        found = _grid_and_bound(dense, checked, sign_exact)
        if found is not None:
            encoded = self._encode_quantized(dense, *found)
            if sum(len(part) if isinstance(part, bytes) else part.nbytes for part in encoded.parts) < dense.nbytes:
                return encoded
        chunks = flat_of(dense).split(_chunk_values(dense))
        blobs = run_chunks(lambda index: encode_bytes(chunks[index]), len(chunks), threaded=dense.device.type == "cpu")
        none = (_LOSSLESS,) * len(chunks)
        return self.record(dense, tuple(blobs), _Meta(1, sign_exact, none, none))

    def _encode_quantized(self, dense: Tensor, grid: Grid, bound: Tensor) -> Encoded:
        chunk_values = _chunk_values(dense)
        chunks = flat_of(dense).split(chunk_values)

        def encode_chunk(index: int) -> tuple[int, int, bytes | Tensor]:
            x = chunks[index]
            kernels = twin_of(x) or reference
            for bits, share in _WIDTHS.items():
                found = kernels.encode_chunk(x, index * chunk_values, grid, bound, bits, len(x) // share)
                if found is not None and found[0].nbytes < x.nbytes:
                    blob, num_outliers = found
                    return bits, num_outliers, _held(blob)
            return _LOSSLESS, 0, encode_bytes(x)

        bits, num_outliers, blobs = zip(*run_chunks(encode_chunk, len(chunks), threaded=_threaded(dense)), strict=True)
        return self.record(
            dense, (grid.step, grid.offset, *blobs), _Meta(grid.inner, grid.sign_exact, bits, num_outliers)
        )

    def decode(self, encoded: Encoded, device: torch.device | str | None = None) -> Tensor:
        self.check_own(encoded)
        out, meta = empty_like_record(encoded), encoded.meta
        chunk_values = _chunk_values(out)
        chunks = flat_of(out).split(chunk_values)
        tables = encoded.parts[: len(encoded.parts) - len(meta.bits)]
        blobs = encoded.parts[len(tables) :]
        grid = Grid(tables[0], tables[1], meta.inner, meta.sign_exact) if tables else None

        def decode_chunk(index: int) -> None:
            x, blob, bits, num_outliers = chunks[index], blobs[index], meta.bits[index], meta.num_outliers[index]
            if bits == _LOSSLESS:
                decode_bytes(blob, x)
                return
            twin, data = twin_of(x), blob
            if isinstance(blob, bytes):
                data = decompress(blob, (len(x) * bits + 7) // 8 + num_outliers * (4 + x.itemsize))
                data = data if twin else torch.from_numpy(data.copy())
            (twin or reference).decode_chunk(data, num_outliers, index * chunk_values, grid, bits, x)

        run_chunks(decode_chunk, len(chunks), threaded=_threaded(out))
        return out.to(device or encoded.device)


def _chunk_values(x: Tensor) -> int:
    return CHUNK_VALUES if x.device.type == "cpu" else _GPU_CHUNK_VALUES


def _threaded(x: Tensor) -> bool:
    return twin_of(x) is not None


def _held(blob: np.ndarray | Tensor) -> bytes | Tensor:
    if isinstance(blob, Tensor):
        return compress(blob.numpy()) if blob.device.type == "cpu" else blob
    return compress(blob)


def _grid_and_bound(dense: Tensor, bound: ErrorBound, sign_exact: bool) -> tuple[Grid, Tensor] | None:
    """The quantiser's grid and the absolute bound a channel, (C,) float64; None where storage has to be lossless."""
    num_channels, inner = _channels(dense, bound)
    if dense.dtype not in _FLOATS or dense.numel() == 0:
        return None
    work = torch.promote_types(dense.dtype, torch.float32)
    absolute = torch.as_tensor(bound.value, dtype=torch.float64).expand(num_channels)
    low = high = offset = torch.zeros(num_channels, dtype=torch.float64)
    centred = bound.channel_dim is not None and not sign_exact
    # Beyond this, levels would not be finite in the tensor's dtype.
    huge = torch.finfo(dense.dtype).max / 8
    if centred or bound.kind == "range_rel" or bool((absolute > huge).any()):
        low, high = _finite_range(dense, num_channels, inner)
    if bound.kind == "range_rel":
        extent = high - low
        extent = torch.where(extent.isinf(), absolute * high - absolute * low, absolute * extent)
        absolute = extent.nan_to_num(nan=0.0, posinf=torch.inf)  # an infinite bound times no range
    largest = torch.maximum(low.abs(), high.abs())
    absolute = torch.where(absolute > huge, torch.minimum(absolute, largest / 2), absolute)

    step = (2 * absolute).to(work)
    step = torch.where(step.double() > 2 * absolute, torch.nextafter(step, torch.zeros_like(step)), step)
    # Smaller levels could be flushed to zero by a processor set up so. Such channels are exact, by their outliers.
    usable = step > 4 * torch.finfo(work).tiny
    if not bool(usable.any()):
        return None
    step = torch.where(usable, step, 1)
    if centred:
        # Codes reach from -2**(b-1) to 2**(b-1) - 1: their middle is at -1/2. Up to 2**21 the offset is exact.
        offset = torch.round((low / 2 + high / 2) / step.double() + 0.5).clamp(-(2.0**21), 2.0**21)
    grid = Grid(step.to(dense.device), offset.to(dense.device, work), inner, sign_exact)
    return grid, torch.where(usable, absolute, 0).to(dense.device)


def _channels(dense: Tensor, bound: ErrorBound) -> tuple[int, int]:
    """Number of channels, and how many neighbours in memory belong to one. Raises ValueError where they do not fit."""
    if bound.channel_dim is None:
        return 1, max(dense.numel(), 1)
    if not -dense.ndim <= bound.channel_dim < dense.ndim:
        raise ValueError(
            f"channel_dim of the error bound is {bound.channel_dim}, but the tensor has shape {tuple(dense.shape)}; "
            f"allowed: {-dense.ndim} to {dense.ndim - 1}." if dense.ndim else
            f"channel_dim of the error bound is {bound.channel_dim}, but the tensor has no dimension; leave it None."
        )  # fmt: skip
    num_channels = dense.shape[bound.channel_dim]
    if isinstance(bound.value, Tensor) and len(bound.value) != num_channels:
        raise ValueError(
            f"value of the error bound has {len(bound.value)} entries, but dimension {bound.channel_dim} of the tensor "
            f"has {num_channels} channels; give one entry a channel."
        )
    return num_channels, max(dense.stride(bound.channel_dim), 1) if num_channels > 1 else max(dense.numel(), 1)


def _finite_range(dense: Tensor, num_channels: int, inner: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value of each channel, (C,) float64 on the CPU; zeros where none is finite."""
    chunk_values = _chunk_values(dense)
    chunks = flat_of(dense).split(chunk_values)
    kernels = twin_of(dense) or reference

    def range_of(index: int) -> tuple[Tensor, Tensor]:
        low = torch.full((num_channels,), torch.inf, dtype=torch.float64)
        high = -low
        kernels.finite_range(chunks[index], index * chunk_values, inner, low, high)
        return low, high

    lows, highs = zip(*run_chunks(range_of, len(chunks), threaded=_threaded(dense)), strict=True)
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return low.where(low <= high, 0), high.where(low <= high, 0)

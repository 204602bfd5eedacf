"""JPEG for feature maps: scaled channels, cosine transform of 8x8 blocks, quantisation table, zstd.

The table takes the larger steps at the higher frequencies, where maps have little and where most coefficients become
zero; coefficients of one frequency lie side by side, so that zstd finds these zeros as runs. There is no bound on a
single value, and maps rougher than photographs lose what they have at high frequencies.

Only 4-D tensors of floats whose maps are at least 4x4 have blocks; all others, and such with values that are not
finite, are stored losslessly. Maps that are no multiple of 8 are continued by their last row and column. Everything is
computed in float32, in an order that is the same on every device.

Sources: JPEG-ACT (Evans et al. 2020) for the scale a channel and the 8-bit coefficients, with zstd in place of its
zero-run coder; the table is that of ITU-T T.81, table K.1, its scaling by a quality the one of the Independent JPEG
Group.
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
from comet_core.codecs.kernels import reference
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, check_holds, compress, decompress
from comet_core.codecs.lossless import decode_exactly, encode_exactly
from comet_core.config import check_codec_params

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SMALLEST_MAP = 4  # smaller ones would be mostly padding


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = scales (C,), then coefficients, a part for each chunk of maps, then sign bits if there are any."""

    quality: int
    """0: stored losslessly."""
    num_signs: int
    """Bits a value for the sign: 0; 1, positive or zero; 2, also negative."""


class DctCodec(Codec):
    """Each channel (dimension 1) is divided by its largest magnitude a and multiplied by 127; then, by blocks,
    q = rint(DCT / t) with the table t >= 8 of `quality` (1 to 100); y = a / 127 * inverse DCT of q * t.

    The largest coefficient possible is 8 * 127: with steps of 8 or more all fit 8 bits, and the finer ones that high
    qualities ask for become 8. The transform is orthonormal, so over whole blocks the root mean square error of a
    channel is at most a / 254 * sqrt(mean t**2): 0.11 a at quality 80, 0.03 a at 100; for smooth maps 0.01 a.

    With `sign_exact` each value takes a bit, positive or zero, and another one where any value is negative; what comes
    back with another sign becomes the dtype's smallest normal number of the right one. `bound` is ignored.

    Raises ValueError for a quality that is not a whole number from 1 to 100.
    """

    name = "dct"
    guarantee = "unbounded"
    exact_for = "what holds values that are not finite, and what is not 4-D with maps of 4x4 or more"

    def __init__(self, quality: int = 80) -> None:
        self._quality = check_codec_params(self.name, {"quality": quality})["quality"]

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        if _has_blocks(dense.shape, dense.dtype) and bool(dense.isfinite().all()):
            encoded = self._encode_blocks(dense, sign_exact)
            if sum(len(part) if isinstance(part, bytes) else part.nbytes for part in encoded.parts) < dense.nbytes:
                return encoded
        return self.record(dense, encode_exactly(dense), _Meta(0, 0))

    def _encode_blocks(self, dense: Tensor, sign_exact: bool) -> Encoded:
        steps = reference.dct_steps(self._quality, dense.device)
        scale = torch.maximum(dense.amax((0, 2, 3)), -dense.amin((0, 2, 3)))
        # A channel of zeros has no largest value to divide by.
        divisors = torch.where(scale > 0, scale, 1).to(_work_dtype(dense.dtype)).repeat(dense.shape[0])[:, None, None]
        maps, maps_a_chunk = dense.reshape(-1, *dense.shape[2:]), _maps_a_chunk(dense.shape)
        parts: list[bytes | Tensor] = [scale]
        for chunk, divisor in zip(maps.split(maps_a_chunk), divisors.split(maps_a_chunk), strict=True):
            codes = reference.encode_blocks((chunk.to(divisor.dtype) / divisor).float() * 127, steps)
            parts.append(compress(codes.numpy()) if codes.device.type == "cpu" else codes)
        signs = []
        if sign_exact:
            flat = flat_of(dense)
            signs = [flat > 0, flat < 0] if bool((flat < 0).any()) else [flat > 0]
            parts.append(torch.cat([reference.pack_bits(sign.to(torch.uint8), 1) for sign in signs]))
        return self.record(dense, tuple(parts), _Meta(self._quality, len(signs)))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        quality, num_signs = encoded.meta.quality, encoded.meta.num_signs
        if quality == 0:
            return decode_exactly(encoded, out).to(device or encoded.device)
        if not 1 <= quality <= 100 or not 0 <= num_signs <= 2 or not _has_blocks(encoded.shape, encoded.dtype):
            raise DamagedRecord(f"{encoded.meta} does not make {encoded.dtype} of shape {tuple(encoded.shape)}")
        num_images, num_channels, height, width = encoded.shape
        num_maps, maps_a_chunk = num_images * num_channels, _maps_a_chunk(encoded.shape)
        check_num_parts(encoded, 1 + -(-num_maps // maps_a_chunk) + (num_signs > 0))
        scale = tensor_part(encoded, 0, encoded.dtype, num_channels)
        signs = self._signs(encoded, num_signs)
        counts = [
            min(maps_a_chunk, num_maps - first) * -(-height // 8) * -(-width // 8) * 64
            for first in range(0, num_maps, maps_a_chunk)
        ]
        for index, count in enumerate(counts, 1):  # before memory is taken for maps of the size that the shape claims
            if isinstance(encoded.parts[index], Tensor):
                tensor_part(encoded, index, torch.int8, count)
            else:
                check_holds(encoded.parts[index], count)
        out = empty_like_record(encoded) if out is None else out
        steps = reference.dct_steps(quality, encoded.device)
        factors = scale.to(_work_dtype(out.dtype)).repeat(num_images)[:, None, None]
        maps = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        chunks = maps.view(-1, height, width).split(maps_a_chunk), factors.split(maps_a_chunk)
        for part, count, chunk, factor in zip(encoded.parts[1:], counts, *chunks, strict=False):
            codes = part
            if not isinstance(part, Tensor):
                codes = torch.from_numpy(decompress(part, count).copy()).view(torch.int8).to(encoded.device)
            # Scaled values go from -1 to 1: what the table added beyond is taken off.
            chunk.copy_((reference.decode_blocks(codes, steps, chunk.shape) / 127).clamp(-1, 1) * factor)
        if maps is not out:
            out.copy_(maps)
        if signs:
            flat, tiny = flat_of(out), torch.finfo(out.dtype).smallest_normal
            kept = torch.where(signs[0], flat.clamp(min=tiny), 0)
            flat.copy_(torch.where(signs[1], flat.clamp(max=-tiny), kept) if num_signs == 2 else kept)
        return out.to(device or encoded.device)

    def _signs(self, encoded: Encoded, num_signs: int) -> list[Tensor]:
        """Masks of the positive and of the negative values, (n,) bool, as many as the record has."""
        if num_signs == 0:
            return []
        count = math.prod(encoded.shape)
        num_bytes = -(-count // 8)
        packed = tensor_part(encoded, len(encoded.parts) - 1, torch.uint8, num_signs * num_bytes)
        return [reference.unpack_bits(bits, 1, count) != 0 for bits in packed.split(num_bytes)]


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _has_blocks(shape: torch.Size, dtype: torch.dtype) -> bool:
    return dtype in _FLOATS and len(shape) == 4 and min(shape) > 0 and min(shape[2:]) >= _SMALLEST_MAP


def _maps_a_chunk(shape: torch.Size) -> int:
    return max(CHUNK_VALUES // (shape[2] * shape[3]), 1)

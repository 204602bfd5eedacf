"""Lossless storage of any tensor: byte shuffle and zstd.

The bytes of floats compress badly as they stand: sign and exponent repeat, the mantissa hardly does. Shuffling brings
the same byte of all items together, so that zstd finds the repeating ones. Chunks are independent and run in parallel.
Tensors on a GPU are kept as they are: the zstd stage runs on the CPU only.

Sources: the byte shuffle of HDF5 and Blosc.
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
)
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, compress, decompress, run_chunks


class LosslessCodec(Codec):
    """Every bit comes back. `bound` and `sign_exact` are ignored."""

    name = "lossless"
    guarantee = "exact"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        return self.record(dense, encode_exactly(dense))

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        return decode_exactly(encoded, out).to(device or encoded.device)


def encode_exactly(dense: Tensor) -> tuple[bytes | Tensor, ...]:
    """All values of a dense tensor, a part for each CHUNK_VALUES of them."""
    chunks = flat_of(dense).split(CHUNK_VALUES) if dense.numel() else ()
    threaded = dense.device.type == "cpu"
    return tuple(run_chunks(lambda index: encode_bytes(chunks[index]), len(chunks), threaded=threaded))


def decode_exactly(encoded: Encoded, out: Tensor | None = None) -> Tensor:
    """The tensor of a record all of whose parts encode_exactly made, in `out` if given. Raises DamagedRecord."""
    num_chunks = -(-math.prod(encoded.shape) // CHUNK_VALUES)
    check_num_parts(encoded, num_chunks)
    out = empty_like_record(encoded) if out is None else out
    chunks, threaded = flat_of(out).split(CHUNK_VALUES), out.device.type == "cpu"
    run_chunks(lambda index: decode_bytes(encoded.parts[index], chunks[index]), num_chunks, threaded=threaded)
    return out


def encode_bytes(x: Tensor) -> bytes | Tensor:
    """The (n,) values of x, n > 0, exactly; never more bytes than x has."""
    data = x.view(torch.uint8)
    if x.device.type != "cpu":
        return data.clone()
    twin = twin_of(data)
    if x.itemsize == 1:
        return compress(data.numpy())
    if twin is None:
        return compress(reference.shuffle_bytes(data, x.itemsize).numpy())
    return compress(twin.shuffle_bytes(data, x.itemsize))


def decode_bytes(part: bytes | Tensor, out: Tensor) -> None:
    """Write what encode_bytes stored into out (n,). Raises DamagedRecord for parts of another size or type."""
    target = out.view(torch.uint8)
    if isinstance(part, Tensor):
        if part.dtype != torch.uint8 or part.shape != target.shape:
            raise DamagedRecord(f"a part is {part.dtype} of shape {tuple(part.shape)} instead of {out.nbytes} bytes")
        target.copy_(part)
        return
    data, twin = decompress(part, out.nbytes), twin_of(target)
    if out.itemsize == 1:
        target.numpy()[:] = data
    elif twin is None:
        reference.unshuffle_bytes(torch.from_numpy(data.copy()), out.itemsize, target)
    else:
        twin.unshuffle_bytes(data, out.itemsize, target)

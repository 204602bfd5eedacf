"""Lossless storage of any tensor: byte shuffle and zstd.

The bytes of floats compress badly as they stand: sign and exponent repeat, the mantissa hardly does. Shuffling brings
the same byte of all items together, so that zstd finds the repeating ones. Chunks are independent and run in parallel.
Tensors on a GPU are kept as they are: the zstd stage runs on the CPU only.

Sources: the byte shuffle of HDF5 and Blosc.
"""

import torch
from torch import Tensor

from comet_core.codecs.base import Codec, Encoded, ErrorBound, dense_of, empty_like_record, flat_of
from comet_core.codecs.kernels import reference, twin_of
from comet_core.codecs.kernels.chunks import CHUNK_VALUES, compress, decompress, run_chunks


class LosslessCodec(Codec):
    """Every bit comes back. `bound` and `sign_exact` are ignored."""

    name = "lossless"
    guarantee = "exact"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense = dense_of(tensor)
        chunks = flat_of(dense).split(CHUNK_VALUES)
        parts = run_chunks(lambda index: encode_bytes(chunks[index]), len(chunks), threaded=dense.device.type == "cpu")
        return self.record(dense, tuple(parts))

    def decode(self, encoded: Encoded, device: torch.device | str | None = None) -> Tensor:
        self.check_own(encoded)
        out = empty_like_record(encoded)
        chunks = flat_of(out).split(CHUNK_VALUES)
        threaded = out.device.type == "cpu"
        run_chunks(lambda index: decode_bytes(encoded.parts[index], chunks[index]), len(chunks), threaded=threaded)
        return out.to(device or encoded.device)


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
    """Write what encode_bytes stored into out (n,)."""
    target = out.view(torch.uint8)
    if isinstance(part, Tensor):
        target.copy_(part)
        return
    data, twin = decompress(part, out.nbytes), twin_of(target)
    if out.itemsize == 1:
        target.numpy()[:] = data
    elif twin is None:
        reference.unshuffle_bytes(torch.from_numpy(data.copy()), out.itemsize, target)
    else:
        twin.unshuffle_bytes(data, out.itemsize, target)

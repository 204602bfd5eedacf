"""Memory for decoded tensors, used again as soon as nobody holds the tensor before.

A fresh tensor of some MiB costs a page fault for each 4 KiB of it, which takes longer than decoding them. Backward asks
for one decoded tensor after the other, so that one block serves nearly all of them. Blocks are whole huge pages where
the system has them; numpy counts who refers to a block, torch's storages included. On the CPU only: CUDA's allocator
keeps what was freed anyway.
"""

import mmap
import sys
import threading

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.base import Encoded

_PAGE_BYTES = 1 << 21
_LEAST_BYTES = 1 << 20
"""Smaller tensors come from malloc's own heap, whose pages are there already."""
_UNUSED = 2
"""References to a block that no tensor holds: the list's, and the question's own."""


class DecodedMemory:
    """Blocks for one session; safe to use from several threads."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or not."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, encoded: Encoded) -> Tensor | None:
        """Uninitialised memory for decoding the record into; None where new memory is as good."""
        nbytes = encoded.shape.numel() * encoded.dtype.itemsize
        if encoded.device.type != "cpu" or nbytes < _LEAST_BYTES:
            return None
        with self._lock:
            index = self._unused_of(nbytes)
            flat = torch.from_numpy(self._blocks[index])[:nbytes].view(encoded.dtype)
        return flat.as_strided(encoded.shape, encoded.stride)

    def give_back(self) -> None:
        """Let go of every block; those in use live on with their tensors."""
        with self._lock:
            self._blocks.clear()

    def _unused_of(self, nbytes: int) -> int:
        unused = [index for index in range(len(self._blocks)) if sys.getrefcount(self._blocks[index]) == _UNUSED]
        fitting = [index for index in unused if self._blocks[index].nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda index: self._blocks[index].nbytes)
        for index in reversed(unused):  # too small now: before another one is taken, these are given back
            del self._blocks[index]
        block = mmap.mmap(-1, -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        self._blocks.append(np.frombuffer(block, np.uint8))
        return len(self._blocks) - 1

"""How codes are predicted and coded: where neighbours lie, contexts, and a table of frequencies for each.

`contexts.py` chooses the tables; the coders (`reference.py`, `context_coder.py`, `kernels.cu`) follow them.
"""

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from comet_core.codecs.base import DamagedRecord
from comet_core.codecs.kernels.compiled import compiled

LANES = 32
"""Bands that are coded side by side and share a stream."""
SLOTS = 1024
"""Frequencies of a table add up to this."""
START = 1 << 16
"""The state that a coder begins with."""
MIDDLE = 128
"""The code of q = 0, which stands for a neighbour that there is not."""
NO_LEFT, NO_UP, ALONE = 13, 14, 15
"""Activity where there is no left neighbour, no upper one, neither."""
MOST_THRESHOLDS = 7
MOST_PLANE = 8192
"""Planes of more values are cut into bands by rows."""
# A thread of the CPU does more between two turns with the interpreter the longer its bands are; a GPU wants many bands.
_LONGEST_BAND = {"cpu": 16384, "cuda": 4096}
_MOST_UNPACKED = 512
"""Tables of so many layers, a few KiB each, are checked once and not for every record that has them."""
_HEADER = struct.Struct("<?bBBBB")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where neighbours lie in flat memory, in values. A band begins anew: its first row has no upper neighbour."""

    left: int
    up: int
    restart: int
    """After so many values a plane begins, whose first row has no upper neighbour."""
    band: int

    @property
    def group(self) -> int:
        """Values coded by one task."""
        return LANES * self.band

    def coded(self, count: int) -> int:
        """Places that the codes of `count` values need: whole bands, and three to read beyond."""
        return -(-count // self.band) * self.band + 3


def layout_of(dense: Tensor) -> Layout:
    """The layout for a dense tensor: rows and planes of its last two dimensions in memory; pixels of channels_last."""
    sizes = [int(size) for _, size in sorted(zip(dense.stride(), dense.shape, strict=True)) if size > 1] or [1]
    left, up = 1, sizes[0]
    plane = up * sizes[1] if len(sizes) > 2 else max(dense.numel(), 1)
    if dense.ndim == 4 and dense.shape[1] > 1 and dense.stride(1) == 1 and dense.shape[3] > 1:
        channels = dense.shape[1]
        left, up, plane = channels, channels * dense.shape[3], channels * dense.shape[2] * dense.shape[3]
    # Long bands cost fewer states and restarts, short ones keep all threads busy.
    fair = dense.numel() // (4 * LANES)
    longest = _LONGEST_BAND.get(dense.device.type, _LONGEST_BAND["cuda"])
    length = max(min(max(fair, 1024), longest), min(16 * up, fair))
    if plane <= MOST_PLANE:
        band = max(round(length / plane), 1) * plane
        return Layout(left, up, plane, band)
    if up <= MOST_PLANE:
        band = max(round(length / up), 1) * up
        return Layout(left, up, band, band)
    return Layout(left, length, length, length)


@dataclass(frozen=True, eq=False)
class Tables:
    """How codes (uint8, q + 128, or 0 for a value kept elsewhere) become symbols, and how these are coded.

    With l, u and ul the codes of the left, upper and upper left neighbour:

        predicts   there are all     p = median of l, u, l + u - ul   first = level of |l - ul| + |u - ul|, 255 at most
                   no upper one      p = l                            first = NO_UP
                   no left one       p = u                            first = NO_LEFT
                   neither           p = 128                          first = ALONE;  in all cases second = level of p
        else                         p = 128                          first = level of l, second = level of u, each
                                                                      ALONE where there is none

    A level is the number of thresholds that are no larger, `first_levels` for the first and `second_levels` for the
    second. The context is 16 * first + second. With d = code - p - low + 1 modulo 256, the symbol is d where d is below
    A, the number of symbols, and the code is not 0; else it is 0, and the code itself is an escape.
    """

    predicts: bool
    low: int
    """-128 to 127: the least difference that has a symbol."""
    first_levels: np.ndarray
    second_levels: np.ndarray
    """Up to MOST_THRESHOLDS thresholds, uint8, ascending, 1 or more."""
    contexts: np.ndarray
    """(256,) uint8: the table of each context."""
    frequencies: np.ndarray
    """(K, A) uint16, at least 1 each; a row adds up to SLOTS."""

    @property
    def shift(self) -> int:
        """What has to be taken from code - p, modulo 256."""
        return (self.low - 1) % 256

    @cached_property
    def packed(self) -> bytes:
        """The tables as bytes, see `unpack`."""
        num_tables, num_symbols = self.frequencies.shape
        levels = len(self.first_levels), len(self.second_levels)
        used = self.contexts[occurring_contexts(self.predicts, *levels)]
        header = _HEADER.pack(self.predicts, self.low, *levels, num_symbols - 1, num_tables)
        arrays = self.first_levels, self.second_levels, used, self.frequencies.astype("<u2")
        return header + b"".join(array.tobytes() for array in arrays)

    @staticmethod
    @lru_cache(maxsize=_MOST_UNPACKED)
    def unpack(data: bytes) -> "Tables":
        """The inverse of `packed`. Raises DamagedRecord for other bytes."""
        if len(data) < _HEADER.size:
            raise DamagedRecord(f"its tables have {len(data)} bytes")
        predicts, low, num_first, num_second, last_symbol, num_tables = _HEADER.unpack_from(data)
        occurring = occurring_contexts(predicts, min(num_first, MOST_THRESHOLDS), min(num_second, MOST_THRESHOLDS))
        sizes = num_first, num_second, len(occurring), 2 * (last_symbol + 1) * num_tables
        if max(num_first, num_second) > MOST_THRESHOLDS or not num_tables or len(data) != _HEADER.size + sum(sizes):
            raise DamagedRecord(f"its tables have {len(data)} bytes")
        rest = np.frombuffer(data, np.uint8, offset=_HEADER.size).copy()
        first, second, pairs, frequencies = np.split(rest, np.cumsum(sizes[:-1]))
        table = frequencies.copy().view("<u2").reshape(num_tables, last_symbol + 1)
        contexts = np.zeros(256, np.uint8)
        contexts[occurring] = pairs
        ascending = all((np.diff(levels, prepend=np.uint8(0)) > 0).all() for levels in (first, second))
        if not ascending or pairs.max() >= num_tables or table.min() < 1 or (table.sum(1) != SLOTS).any():
            raise DamagedRecord("its tables do not belong together")
        return Tables(predicts, low, first, second, contexts, table)

    @cached_property
    def for_encoding(self) -> tuple[np.ndarray, np.ndarray]:
        """context_of (256,) and slots (K * A,) uint32: where a table begins, and frequency << 16 | first slot."""
        first = np.cumsum(self.frequencies, axis=1, dtype=np.uint32) - self.frequencies
        slots = self.frequencies.astype(np.uint32) << 16 | first
        return self.contexts.astype(np.uint32) * np.uint32(self.frequencies.shape[1]), slots.ravel()

    @property
    def for_decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """context_of (256,) and slots (K * SLOTS,) uint32: symbol | (slot - first slot) << 12 | frequency << 22."""
        return self.contexts.astype(np.uint32) * np.uint32(SLOTS), _slots_for_decoding(self.frequencies)


@compiled
def _slots_for_decoding(frequencies: np.ndarray) -> np.ndarray:
    num_tables, num_symbols = frequencies.shape
    slots = np.empty(num_tables * SLOTS, np.uint32)
    at: Any = 0
    for table in range(num_tables):
        for symbol in range(num_symbols):
            frequency = np.int64(frequencies[table, symbol])
            for place in range(frequency):
                slots[at + place] = frequency << 22 | place << 12 | symbol
            at += frequency
    return slots


def occurring_contexts(predicts: bool, num_first: int, num_second: int) -> np.ndarray:
    """The contexts that there may be, given the numbers of thresholds."""
    first, second = list(range(num_first + 1)), list(range(num_second + 1))
    first += [NO_LEFT, NO_UP, ALONE] if predicts else [ALONE]
    second += [] if predicts else [ALONE]
    return np.asarray((np.array(first)[:, None] * 16 + np.array(second)).ravel())

"""The statistics of codes: where neighbours lie, which contexts there are, and a table of frequencies for each.

A code is coded given its left and its upper neighbour. Codes are grouped into a few levels, two levels make a context,
and contexts with like statistics share a table: merged greedily as long as a table of its own costs more bits than it
saves, down to 16 at most. All of that comes from a sample of about one value in 64, so that choosing costs
little beside coding.

Sources: contexts of quantised neighbours, Wu and Memon, "Context-based, adaptive, lossless image coding" (1997); the
merging is plain agglomerative clustering by description length.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
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
_LEAST_SAMPLE, _MOST_SAMPLE = 1 << 15, 1 << 16
NO_LEVEL = 15
"""Stands for a neighbour that there is not."""
_NUM_LEVELS = 10
_MOST_CONTEXTS = 16
_MOST_BINS = 24
_MOST_PLANE = 8192
# A thread of the CPU does more between two turns with the interpreter the longer its bands are; a GPU wants many bands.
_LONGEST_BAND = {"cpu": 16384, "cuda": 4096}
_RUN_VALUES, _RUN_ROWS, _LEAST_RUNS = 2048, 3, 8
_ESCAPE_BITS = 18
"""What an escape costs: a byte, and about as much for its rare code."""
_HEADER = struct.Struct("<hBBB")


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
    if plane <= _MOST_PLANE:
        band = max(round(length / plane), 1) * plane
        return Layout(left, up, plane, band)
    if up <= _MOST_PLANE:
        band = max(round(length / up), 1) * up
        return Layout(left, up, band, band)
    return Layout(left, length, length, length)


@dataclass(frozen=True, eq=False)
class Tables:
    """How codes are coded. Code 0 says that the value is kept elsewhere; code c > 0 is q = c - 1 + low."""

    low: int
    levels: np.ndarray
    """(A,) uint8: the level of each code, below NO_LEVEL."""
    contexts: np.ndarray
    """(256,) uint8: the table for 16 * level of the left neighbour + level of the upper one."""
    frequencies: np.ndarray
    """(K, A) uint16, at least 1 each; a row adds up to SLOTS."""

    def pack(self) -> bytes:
        """The tables as bytes, see `unpack`."""
        num_tables, num_codes = self.frequencies.shape
        num_levels = int(self.levels.max()) + 1
        used = self.contexts[_pairs(num_levels)]
        header = _HEADER.pack(self.low, num_codes - 1, num_levels, num_tables)
        return b"".join((header, self.levels.tobytes(), used.tobytes(), self.frequencies.astype("<u2").tobytes()))

    @staticmethod
    def unpack(data: bytes) -> "Tables":
        """The inverse of `pack`. Raises DamagedRecord for other bytes."""
        if len(data) < _HEADER.size:
            raise DamagedRecord(f"its tables have {len(data)} bytes")
        low, last_code, num_levels, num_tables = _HEADER.unpack_from(data)
        num_codes, num_pairs = last_code + 1, (num_levels + 1) ** 2
        sizes = (num_codes, num_pairs, 2 * num_codes * num_tables)
        if not (0 < num_levels <= NO_LEVEL and num_tables > 0 and len(data) == _HEADER.size + sum(sizes)):
            raise DamagedRecord(f"its tables have {len(data)} bytes")
        bytes_of = np.frombuffer(data, np.uint8, offset=_HEADER.size).copy()
        levels, pairs = bytes_of[:num_codes], bytes_of[num_codes : num_codes + num_pairs]
        table = bytes_of[num_codes + num_pairs :].copy().view("<u2").reshape(num_tables, num_codes)
        contexts = np.zeros(256, np.uint8)
        contexts[_pairs(num_levels)] = pairs
        if levels.max() >= num_levels or pairs.max() >= num_tables or table.min() < 1 or (table.sum(1) != SLOTS).any():
            raise DamagedRecord("its tables do not belong together")
        return Tables(low, levels, contexts, table)

    @cached_property
    def for_encoding(self) -> tuple[np.ndarray, np.ndarray]:
        """context_of (256,) and slots (K * A,) uint32 for `encode_steps`."""
        first = np.cumsum(self.frequencies, axis=1, dtype=np.uint32) - self.frequencies
        slots = self.frequencies.astype(np.uint32) << 16 | first
        return self.contexts.astype(np.uint32) * np.uint32(self.frequencies.shape[1]), slots.ravel()

    @cached_property
    def for_decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """context_of (256,) and slots (K * SLOTS,) uint32 for `decode_steps`."""
        return self.contexts.astype(np.uint32) * np.uint32(SLOTS), _slots_for_decoding(self.frequencies, self.levels)


@compiled
def _slots_for_decoding(frequencies: np.ndarray, levels: np.ndarray) -> np.ndarray:
    slots = np.empty(len(frequencies) * SLOTS, np.uint32)
    at: Any = 0
    for table in range(len(frequencies)):
        for code in range(len(levels)):
            frequency = np.int64(frequencies[table, code])
            entry = frequency << 22 | np.int64(levels[code]) << 8 | code
            for place in range(frequency):
                slots[at + place] = entry | place << 12
            at += frequency
    return slots


def _pairs(num_levels: int) -> np.ndarray:
    levels = np.append(np.arange(num_levels), NO_LEVEL)
    return np.asarray((levels[:, None] * 16 + levels).ravel())


def sample_starts(num_values: int, layout: Layout) -> tuple[np.ndarray, int]:
    """Flat indices where the sample's runs begin, and their length: whole planes or rows, spread over the tensor."""
    if layout.restart <= _MOST_PLANE:
        length = max(round(_RUN_VALUES / layout.restart), 1) * layout.restart
    else:
        length = max(round(_RUN_VALUES / layout.up), _RUN_ROWS) * layout.up
    length = min(length, num_values)
    wanted = max(min(max(num_values // 64, _LEAST_SAMPLE), _MOST_SAMPLE) // length, _LEAST_RUNS)
    num_runs = num_values // length
    if num_runs <= wanted:
        return np.arange(num_runs) * length, length
    # Multiples of the golden ratio: even, and in step with no number of channels.
    return np.sort((np.arange(1, wanted + 1) * 0.6180339887498949 % 1 * num_runs).astype(np.int64)) * length, length


def tables_of(sample: np.ndarray, layout: Layout, num_values: int) -> Tables | None:
    """Tables for the codes of a sample, (runs, length) uint8: q + 128, or 0 for what has no code.

    None where so many do not fit that the codes do not pay.
    """
    restart = min(layout.restart, sample.shape[1])
    first, levels, contexts, sums = _chosen(sample, layout.left, layout.up, restart, num_values, _X_LOG_X)
    return Tables(first - 128, levels, contexts, _frequencies(sums)) if first else None


@compiled
def _chosen(
    sample: np.ndarray, left: int, up: int, restart: int, num_values: int, x_log_x: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """The first value of the sample with a code of its own (0: codes do not pay), levels, contexts, counts (K, A)."""
    counts = _count(sample.ravel())
    total = sample.size
    # A code takes at least one slot in each table, which is what it costs not to be an escape.
    first, last = _most_gain(counts[1:] * _ESCAPE_BITS - total / (SLOTS * np.log(2)))
    first, last = first + 1, last + 1
    counts = counts[first - 1 : last + 1].copy()
    counts[0] = total - counts[1:].sum()
    num_codes = len(counts)
    contexts = np.zeros(256, np.uint8)
    if first == 0 or counts[0] > total // 16:
        return 0, contexts, contexts, np.zeros((1, 1), np.int64)
    levels = _levels_of(counts, _NUM_LEVELS)
    pairs = _count_pairs(sample, first, levels, left, up, restart)
    of_context = pairs.sum(1)
    used = np.flatnonzero(of_context)
    # Comparing contexts takes no more detail than some neighbouring codes together.
    bins = _levels_of(counts, _MOST_BINS)
    binned = np.zeros((len(used), bins.max() + 1), np.int64)
    for place in range(len(used)):
        for code in range(num_codes):
            binned[place, bins[code]] += pairs[used[place], code]
    table_of = _merge(binned, x_log_x, 16 * num_codes * total / num_values, _MOST_CONTEXTS)
    sums = np.zeros((table_of.max() + 1, num_codes), np.int64)
    contexts[:] = table_of[of_context[used].argmax()]
    for place in range(len(used)):
        contexts[used[place]] = table_of[place]
        sums[table_of[place]] += pairs[used[place]]
    if num_codes <= NO_LEVEL:
        # With a level of its own for each code nobody has to look levels up.
        of_level = contexts.copy()
        own = np.full(16, NO_LEVEL, np.uint8)
        own[:NO_LEVEL] = 0
        own[:num_codes] = levels
        for pair in range(256):
            contexts[pair] = of_level[16 * own[pair >> 4] + own[pair & 15]]
        levels = np.arange(num_codes).astype(np.uint8)
    num_levels = levels.max() + 1
    for pair in range(256):  # what does not occur has the table 0, as it has after unpacking
        if num_levels <= pair >> 4 < NO_LEVEL or num_levels <= pair & 15 < NO_LEVEL:
            contexts[pair] = 0
    return first, levels, contexts, sums


@compiled
def _levels_of(counts: np.ndarray, most: int) -> np.ndarray:
    """(A,) uint8, below `most`: neighbouring codes share a level, in shares of like weight.

    The square root of the counts favours rare codes.
    """
    levels = np.zeros(len(counts), np.uint8)
    if len(counts) - 1 <= most:
        levels[1:] = np.arange(len(counts) - 1)
    else:
        weight = np.sqrt(counts)
        whole, below, level, share_before = weight.sum(), 0.0, -1, -1.0
        for code in range(len(counts)):
            share = np.floor((below + weight[code] / 2) / whole * most)
            level += share > share_before
            levels[code] = level
            below += weight[code]
            share_before = share
    levels[0] = levels[counts.argmax()]  # what is kept elsewhere says nothing: take it for the most frequent one
    return levels


@compiled
def _frequencies(sums: np.ndarray) -> np.ndarray:
    """(K, A) uint16 of at least 1 that add up to SLOTS, close to the shares of the counts."""
    frequencies = np.empty(sums.shape, np.uint16)
    for row in range(len(sums)):
        total = max(sums[row].sum(), 1)
        excess: Any = -SLOTS  # numba's integers, which mypy takes for others
        for code in range(sums.shape[1]):
            frequency = max((2 * SLOTS * sums[row, code] + total) // (2 * total), 1)
            frequencies[row, code] = frequency
            excess += frequency
        while excess != 0:
            # The largest can spare most, and loses least.
            most = frequencies[row].argmax()
            spared = (np.int64(frequencies[row, most]) + 1) // 2
            change = excess if excess < spared else spared
            frequencies[row, most] -= change
            excess -= change
    return frequencies


@compiled
def _count(sample: np.ndarray) -> np.ndarray:
    """(256,) int64: how often each code occurs."""
    # In four places, since most codes are equal and one place would be waited for.
    parts = np.zeros((4, 256), np.int64)
    whole = len(sample) // 4 * 4
    for t in range(0, whole, 4):
        for place in range(4):
            parts[place, sample[t + place]] += 1
    for t in range(whole, len(sample)):
        parts[0, sample[t]] += 1
    return parts.sum(0)


@compiled
def _most_gain(gains: np.ndarray) -> tuple[int, int]:
    """First and last place of the run of neighbours with the largest sum, -1 where no gain is positive (Kadane)."""
    best, first, last = 0.0, -1, -1
    total, begin = 0.0, 0
    for place in range(len(gains)):
        if total <= 0:
            total, begin = 0.0, place
        total += gains[place]
        if total > best:
            best, first, last = total, begin, place
    return first, last


@compiled
def _count_pairs(sample: np.ndarray, first: int, levels: np.ndarray, left: int, up: int, restart: int) -> np.ndarray:
    """(256, A): how often each code occurs after 16 * left level + upper level; `first` in (runs, length) is code 1."""
    num_runs, length = sample.shape
    num_codes = len(levels)
    before = np.int32(first - 1)
    codes, of_codes, contexts = np.empty(length, np.uint8), np.empty(length, np.uint8), np.empty(length, np.uint8)
    even, odd = np.zeros(256 * num_codes, np.int32), np.zeros(256 * num_codes, np.int32)  # for two places see _count
    four = np.uint8(4)
    for run in range(num_runs):
        values = sample[run]
        for t in range(length):
            code = np.int32(values[t]) - before
            codes[t] = code if 0 < code < num_codes else 0
        for t in range(length):
            of_codes[t] = levels[codes[t]]
        shifted = contexts[left:]
        for t in range(len(shifted)):
            shifted[t] = of_codes[t] << four
        for row in range(0, length, up):
            contexts[row : row + left] = NO_LEVEL << 4
        for plane in range(0, length, restart):
            contexts[plane : plane + up] |= np.uint8(NO_LEVEL)
            below, above = contexts[plane + up : plane + restart], of_codes[plane : plane + restart]
            for t in range(len(below)):
                below[t] |= above[t]
        for t in range(0, length - 1, 2):
            even[np.uint32(contexts[t]) * np.uint32(num_codes) + codes[t]] += 1
            odd[np.uint32(contexts[t + 1]) * np.uint32(num_codes) + codes[t + 1]] += 1
        if length % 2:
            even[np.uint32(contexts[length - 1]) * np.uint32(num_codes) + codes[length - 1]] += 1
    return (even + odd).astype(np.int64).reshape(256, num_codes)


_X_LOG_X = np.arange(1 << 18) * np.log2(np.maximum(np.arange(1 << 18), 1))  # no sample has more values


@compiled
def _merge(counts: np.ndarray, x_log_x: np.ndarray, table_bits: float, most: int) -> np.ndarray:
    """(n,) the table of each of n contexts: the cheapest pair is merged until each table pays and there are few."""
    n, num_codes = counts.shape
    counts = counts.copy()
    table_of = np.arange(n)
    totals = counts.sum(1)
    bits = np.empty(n)
    for a in range(n):
        inside = 0.0
        for code in range(num_codes):
            inside += x_log_x[counts[a, code]]
        bits[a] = x_log_x[totals[a]] - inside
    costs = np.full((n, n), np.inf)
    nearest = np.zeros(n, np.int64)
    alive = np.ones(n, np.bool_)
    for a in range(n):
        for b in range(a):
            inside = 0.0
            for code in range(num_codes):
                inside += x_log_x[counts[a, code] + counts[b, code]]
            costs[a, b] = x_log_x[totals[a] + totals[b]] - inside - bits[a] - bits[b]
        if a:
            nearest[a] = costs[a, :a].argmin()
    left = n
    while left > 1:
        best = -1
        for a in range(1, n):
            if alive[a] and (best < 0 or costs[a, nearest[a]] < costs[best, nearest[best]]):
                best = a
        a, b = best, nearest[best]
        if a < 0 or (left <= most and costs[a, b] >= table_bits):
            break
        # b lives on with the counts of both.
        counts[b] += counts[a]
        totals[b] += totals[a]
        bits[b] += bits[a] + costs[a, b]
        alive[a] = False
        table_of[table_of == a] = b
        left -= 1
        for other in range(n):
            costs[max(a, other), min(a, other)] = np.inf
            if alive[other] and other != b:
                inside = 0.0
                for code in range(num_codes):
                    inside += x_log_x[counts[other, code] + counts[b, code]]
                cost = x_log_x[totals[other] + totals[b]] - inside - bits[other] - bits[b]
                costs[max(b, other), min(b, other)] = cost
        for other in range(1, n):
            if alive[other]:
                if other == b or nearest[other] == a or nearest[other] == b:
                    nearest[other] = costs[other, :other].argmin()
                elif b < other and costs[other, b] < costs[other, nearest[other]]:
                    nearest[other] = b
    number = -1
    numbers = np.full(n, -1)
    for a in range(n):
        if alive[a]:
            number += 1
            numbers[a] = number
    for a in range(n):
        table_of[a] = numbers[table_of[a]]
    return table_of

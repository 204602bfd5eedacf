"""The entropy coder for the CPU: range ANS with a table a context, 32 bands of values side by side.

A code is coded with the statistics of its left and upper neighbour, so a decoder has to know these first: within a band
it is one long chain. Bands do not know of each other, so 32 of them go side by side, one in each lane of two vectors.
All share one stream of 16-bit words: at each step the lanes that need one take the next ones, in the order of lanes.
An encoder walks from a band's last value to its first and appends, a decoder from the first to the last and takes
from the end; so it ends where the encoder began, at the state `START` and an empty stream, or the record is damaged.

The state x of a lane lies in [2**16, 2**32). With f of 1024 slots for the code in this context, from slot s on:

    encode: while x >= f << 22: append x mod 2**16, x >>= 16; then x = (x div f) * 1024 + x mod f + s
    decode: slot = x mod 1024 gives the code; x = f * (x div 1024) + slot - s; if x < 2**16: x = x << 16 | next word

The definition is `reference.encode_values`; parts are equal byte for byte. A task takes two compiled calls, one for all
its values and one for all its codes: between them Python holds the lock for which the other threads wait.

Sources: ANS, Duda (2013), section on range variants; states in the lanes of a vector: Giesen, "Interleaved entropy
coders" (2014).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from comet_core.codecs.kernels.chunks import scratch
from comet_core.codecs.kernels.compiled import compiled, inlined
from comet_core.codecs.kernels.contexts import LANES, NO_LEVEL, START, Layout, Tables
from comet_core.codecs.kernels.quantizer import array_of, dequantize_groups, key_of, quantize_groups, quantize_runs
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.vectors import (
    append,
    both,
    count,
    gather_at_bytes,
    gather_words,
    load_bytes,
    load_words,
    quotient,
    select,
    store_bytes,
    store_words,
    take,
)

__all__ = ["GROUPS_A_TASK", "decode_values", "encode_values", "quantize_runs"]

GROUPS_A_TASK = 2
"""Groups that are walked at once: one has its steps while the other waits for its look-ups."""
_WIDTH = GROUPS_A_TASK * LANES
_MIDDLE = 128
_ROOM = 32  # words before the first: a step that takes too many ends there
_NOTHING = np.frombuffer(bytes(1), np.uint8)[:0]  # read-only as what is read from bytes: another type to numba
_SIXTEEN_STEPS = (np.arange(16) * (_WIDTH // 4)).astype(np.uint32)


@compiled
def _interleave(codes: np.ndarray, band: int, offsets: np.ndarray, table: np.ndarray, of_step: np.ndarray) -> None:
    """of_step[64 * t + lane] = table[codes[offsets[lane] + t]] for t in range(band), three more at most.

    codes has to be readable up to three bytes past the last band; an empty table leaves the codes as they are.
    """
    for lane in range(0, _WIDTH, 16):
        places = load_words(offsets, lane)
        for t in range(0, band, 4):
            four = gather_at_bytes(codes, places + t)
            for place in range(4):
                code = four & 255
                store_bytes(of_step, _WIDTH * (t + place) + lane, gather_words(table, code) if len(table) else code)
                four = four >> 8


@inlined
def _context(context_of: np.ndarray, levels: np.ndarray, before: int, above: int, lane: int, none: Any) -> Any:
    """What context_of holds for 16 lanes; their neighbours' levels are `none` where a place in levels is negative.

    context_of is the table from its middle on: LLVM gathers with 32-bit places, twice as fast as with 64-bit ones, only
    while it cannot prove that they are unsigned.
    """
    left = load_bytes(levels, before + lane) if before >= 0 else none
    up = load_bytes(levels, above + lane) if above >= 0 else none
    return gather_words(context_of, (left << 4) + up - _MIDDLE)


@inlined
def _encoded(x: Any, entry: Any, active: Any, full: Any) -> Any:
    """The states of 16 lanes after coding, for the lanes that have a code; those in `full` gave a word away."""
    x = select(full, x >> 16, x)
    frequency = entry >> 16
    q = quotient(x, frequency)
    return select(active, (q << 10) + (x - q * frequency) + (entry & 0xFFFF), x)


@compiled
def _encode_steps(
    codes: np.ndarray, levels: np.ndarray, lengths: np.ndarray, band: int, left: int, up: int, restart: int,
    context_of: np.ndarray, slots: np.ndarray, states: np.ndarray, words_a: np.ndarray, words_b: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Encode two groups of 32 bands; gives the numbers of their words, and in `states` (64,) the last states.

    codes and levels are interleaved (see `_interleave`); context_of[16 * left level + upper level - _MIDDLE] is where
    slots has the context's entries, frequency << 16 | first slot, one a code.
    """
    x0, x1, x2, x3 = load_words(states, 0), load_words(states, 16), load_words(states, 32), load_words(states, 48)
    length0, length1 = load_words(lengths, 0), load_words(lengths, 16)
    length2, length3 = load_words(lengths, 32), load_words(lengths, 48)
    none = (x0 & 0) + NO_LEVEL
    used_a, used_b = 0, 0
    column, row = (band - 1) % up, (band - 1) % restart
    for t in range(band - 1, -1, -1):
        at = _WIDTH * t
        before = at - _WIDTH * left if column >= left else -1
        above = at - _WIDTH * up if row >= up else -1
        context0 = _context(context_of, levels, before, above, 0, none)
        context1 = _context(context_of, levels, before, above, 16, none)
        context2 = _context(context_of, levels, before, above, 32, none)
        context3 = _context(context_of, levels, before, above, 48, none)
        entry0 = gather_words(slots, context0 + load_bytes(codes, at))
        entry1 = gather_words(slots, context1 + load_bytes(codes, at + 16))
        entry2 = gather_words(slots, context2 + load_bytes(codes, at + 32))
        entry3 = gather_words(slots, context3 + load_bytes(codes, at + 48))
        active0, active1 = length0 >= t + 1, length1 >= t + 1
        active2, active3 = length2 >= t + 1, length3 >= t + 1
        full0 = both(x0 >= ((entry0 >> 16) << 22), active0)
        full1 = both(x1 >= ((entry1 >> 16) << 22), active1)
        full2 = both(x2 >= ((entry2 >> 16) << 22), active2)
        full3 = both(x3 >= ((entry3 >> 16) << 22), active3)
        append(words_a, used_a, x0, full0)
        used_a += count(full0)
        append(words_a, used_a, x1, full1)
        used_a += count(full1)
        append(words_b, used_b, x2, full2)
        used_b += count(full2)
        append(words_b, used_b, x3, full3)
        used_b += count(full3)
        x0, x1 = _encoded(x0, entry0, active0, full0), _encoded(x1, entry1, active1, full1)
        x2, x3 = _encoded(x2, entry2, active2, full2), _encoded(x3, entry3, active3, full3)
        column = column - 1 if column else up - 1
        row = row - 1 if row else restart - 1
    store_words(states, 0, x0)
    store_words(states, 16, x1)
    store_words(states, 32, x2)
    store_words(states, 48, x3)
    return used_a, used_b


@inlined
def _decoded(x: Any, entry: Any, active: Any) -> Any:
    """The states of 16 lanes without the code that the entry holds, before words are taken."""
    return select(active, (entry >> 22) * (x >> 10) + ((entry >> 12) & 1023), x)


@compiled
def _decode_steps(
    words_a: np.ndarray, words_b: np.ndarray, lengths: np.ndarray, band: int, left: int, up: int, restart: int,
    context_of: np.ndarray, slots: np.ndarray, states: np.ndarray, levels: np.ndarray, codes: np.ndarray,
) -> bool:  # fmt: skip
    """Decode two groups of 32 bands into interleaved codes and levels; in `states` what should be the start.

    slots[1024 * context + slot] = code | level << 8 | (slot - first slot) << 12 | frequency << 22, and context_of holds
    1024 * context. The words have 32 words of room before the first and 16 behind the last. False where there are not
    enough of them, or some are left.
    """
    x0, x1, x2, x3 = load_words(states, 0), load_words(states, 16), load_words(states, 32), load_words(states, 48)
    length0, length1 = load_words(lengths, 0), load_words(lengths, 16)
    length2, length3 = load_words(lengths, 32), load_words(lengths, 48)
    none = (x0 & 0) + NO_LEVEL
    used_a, used_b = len(words_a) - 16, len(words_b) - 16
    column, row = 0, 0
    for t in range(band):
        at = _WIDTH * t
        before = at - _WIDTH * left if column >= left else -1
        above = at - _WIDTH * up if row >= up else -1
        context0 = _context(context_of, levels, before, above, 0, none)
        context1 = _context(context_of, levels, before, above, 16, none)
        context2 = _context(context_of, levels, before, above, 32, none)
        context3 = _context(context_of, levels, before, above, 48, none)
        entry0, entry1 = gather_words(slots, context0 + (x0 & 1023)), gather_words(slots, context1 + (x1 & 1023))
        entry2, entry3 = gather_words(slots, context2 + (x2 & 1023)), gather_words(slots, context3 + (x3 & 1023))
        x0, x1 = _decoded(x0, entry0, length0 >= t + 1), _decoded(x1, entry1, length1 >= t + 1)
        x2, x3 = _decoded(x2, entry2, length2 >= t + 1), _decoded(x3, entry3, length3 >= t + 1)
        short0, short1, short2, short3 = x0 < START, x1 < START, x2 < START, x3 < START
        middle_a, middle_b = used_a - count(short1), used_b - count(short3)
        used_a, used_b = middle_a - count(short0), middle_b - count(short2)
        if min(used_a, used_b) < _ROOM:
            return False
        x0 = select(short0, (x0 << 16) | take(words_a, used_a, short0), x0)
        x1 = select(short1, (x1 << 16) | take(words_a, middle_a, short1), x1)
        x2 = select(short2, (x2 << 16) | take(words_b, used_b, short2), x2)
        x3 = select(short3, (x3 << 16) | take(words_b, middle_b, short3), x3)
        store_bytes(codes, at, entry0)
        store_bytes(codes, at + 16, entry1)
        store_bytes(codes, at + 32, entry2)
        store_bytes(codes, at + 48, entry3)
        store_bytes(levels, at, (entry0 >> 8) & 15)
        store_bytes(levels, at + 16, (entry1 >> 8) & 15)
        store_bytes(levels, at + 32, (entry2 >> 8) & 15)
        store_bytes(levels, at + 48, (entry3 >> 8) & 15)
        column = column + 1 if column + 1 < up else 0
        row = row + 1 if row + 1 < restart else 0
    store_words(states, 0, x0)
    store_words(states, 16, x1)
    store_words(states, 32, x2)
    store_words(states, 48, x3)
    return used_a == _ROOM and used_b == _ROOM


@compiled
def _deinterleave(of_step: np.ndarray, band: int, offsets: np.ndarray, codes: np.ndarray, length: int) -> None:
    """codes[offsets[lane] + t] = of_step[64 * t + lane], for the lanes that have a band and codes below `length`."""
    steps = load_words(_SIXTEEN_STEPS, 0)
    words = of_step.view(np.uint32)
    num_bands = len(offsets)
    for first in range(0, num_bands, 4):
        lanes = min(4, num_bands - first)
        # Whole vectors, as long as the last of the four bands has so many codes.
        rest = length - np.int64(offsets[first + lanes - 1])
        whole = (rest if rest < band else band) // 16 * 16
        for t in range(0, whole, 16):
            four = gather_words(words, steps + (_WIDTH // 4 * t + first // 4))
            for place in range(lanes):
                store_bytes(codes, np.int64(offsets[first + place]) + t, four)
                four = four >> 8
        for place in range(lanes):
            start = np.int64(offsets[first + place])
            rest = length - start
            for t in range(whole, rest if rest < band else band):
                codes[start + t] = of_step[_WIDTH * t + first + place]


@compiled
def _encode_pair(
    codes: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, band: int, left: int, up: int, restart: int,
    level_of: np.ndarray, context_of: np.ndarray, slots: np.ndarray, of_step: np.ndarray, levels: np.ndarray,
    states: np.ndarray, words_a: np.ndarray, words_b: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """`_encode_steps` for codes in the order of memory; of_step and levels are room for them interleaved."""
    _interleave(codes, band, offsets, np.empty(0, np.uint32), of_step)
    if len(level_of):
        _interleave(codes, band, offsets, level_of, levels)
    return _encode_steps(
        of_step, levels, lengths, band, left, up, restart, context_of, slots, states, words_a, words_b
    )


@compiled
def _decode_pair(
    payload_a: np.ndarray, payload_b: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, num_values: int, band: int,
    left: int, up: int, restart: int, context_of: np.ndarray, slots: np.ndarray, levels: np.ndarray,
    of_step: np.ndarray, words_a: np.ndarray, words_b: np.ndarray, codes: np.ndarray,
) -> bool:  # fmt: skip
    """`_decode_steps` for two payloads, into codes in the order of memory; words_a and words_b are room for theirs."""
    states = np.full(_WIDTH, START, np.uint32)
    of_states = states.view(np.uint8)
    num_bands = len(offsets)
    for first, payload, words in ((0, payload_a, words_a), (LANES, payload_b, words_b)):
        state_bytes = 4 * max(min(num_bands - first, LANES), 0)
        of_states[4 * first : 4 * first + state_bytes] = payload[:state_bytes]
        words[_ROOM:-16].view(np.uint8)[:] = payload[state_bytes:]
    if not _decode_steps(
        words_a, words_b, lengths, band, left, up, restart, context_of, slots, states, levels, of_step
    ):
        return False
    for state in states:
        if state != START:
            return False
    _deinterleave(of_step, band, offsets, codes, num_values)
    return True


def encode_values(
    x: Tensor, start: int, grid: Grid, layout: Layout, tables: Tables
) -> list[tuple[int, int, bytes] | None]:
    """Twin of reference.encode_values, for GROUPS_A_TASK groups at most."""
    array, group = array_of(x), layout.group
    num_groups, room = -(-len(x) // group), min(group, len(x)) // 4
    codes = scratch("codes", layout.coded(len(x)))
    codes[len(x) :] = 0
    escapes = scratch("escapes", num_groups * room).reshape(num_groups, room)
    missed = scratch("missed", 4 * num_groups * room).view(np.int32).reshape(num_groups, room)
    counts = np.empty((num_groups, 2), np.int64)
    entries = (entry.numpy() for entry in (grid.step, grid.inverse, grid.offset, grid.limit))
    quantize_groups(
        array, start, group, *entries, grid.inner, grid.sign_exact, key_of(grid), tables.low + 127, codes, escapes,
        missed, len(tables.levels), counts,
    )  # fmt: skip
    num_bands, band, offsets, lengths = _bands(len(x), layout)
    of_step = levels = scratch("of_step", _WIDTH * (band + 3))
    level_of = np.empty(0, np.uint32)
    if len(tables.levels) > NO_LEVEL:  # else each code is its own level
        levels, level_of = scratch("levels", len(of_step)), tables.levels.astype(np.uint32)
    states = np.full(_WIDTH, START, np.uint32)
    words = [scratch(f"words {index}", 2 * (LANES * band + 16)).view(np.uint16) for index in range(GROUPS_A_TASK)]
    context_of, slots = tables.for_encoding
    used = _encode_pair(
        codes, offsets, lengths, band, layout.left, layout.up, layout.restart, level_of, context_of[_MIDDLE:], slots,
        of_step, levels, states, *words,
    )  # fmt: skip
    found: list[tuple[int, int, bytes] | None] = []
    for index, (num_escapes, num_missed) in enumerate(counts.tolist()):
        if num_escapes < 0:
            found.append(None)
            continue
        exact = array[index * group + missed[index, :num_missed]]
        of_group = states[index * LANES : min((index + 1) * LANES, num_bands)]
        pieces = escapes[index, :num_escapes], exact, of_group, words[index][: used[index]]
        found.append((num_escapes, num_missed, b"".join(piece.data for piece in pieces)))
    return found


def decode_values(
    found: Sequence[tuple[bytes, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> bool:
    """Twin of reference.decode_values, for GROUPS_A_TASK groups at most."""
    array, group = array_of(out), layout.group
    num_bands, band, offsets, lengths = _bands(len(out), layout)
    words = [np.zeros(_ROOM + 16, np.uint16)] * GROUPS_A_TASK
    payloads = [_NOTHING] * GROUPS_A_TASK
    escapes, exact, counts = [], [], np.empty((len(found), 2), np.int64)
    for index, (part, num_escapes, num_missed) in enumerate(found):
        data, behind = np.frombuffer(part, np.uint8), num_escapes + num_missed * out.itemsize
        words_bytes = len(data) - behind - 4 * min(num_bands - index * LANES, LANES)
        if words_bytes < 0 or words_bytes % 2:
            return False
        words[index] = scratch(f"words {index}", 2 * (_ROOM + words_bytes // 2 + 16)).view(np.uint16)
        payloads[index] = data[behind:]
        escapes.append(data[:num_escapes])
        exact.append(data[num_escapes:behind])
        counts[index] = num_escapes, num_missed
    codes = scratch("codes", len(out))
    context_of, slots = tables.for_decoding
    if not _decode_pair(
        *payloads, offsets[:num_bands], lengths, len(out), band, layout.left, layout.up, layout.restart,
        context_of[_MIDDLE:], slots, scratch("levels", _WIDTH * band), scratch("of_step", _WIDTH * band), *words, codes,
    ):  # fmt: skip
        return False
    missed = np.empty(counts[:, 1].sum(), np.int32)
    if not dequantize_groups(
        codes, np.concatenate(escapes), start, group, grid.step.numpy(), grid.offset.numpy(), grid.inner,
        grid.sign_exact, key_of(grid), tables.low + 127, counts, missed, array,
    ):  # fmt: skip
        return False
    if len(missed):
        array[missed + np.repeat(np.arange(len(found)) * group, counts[:, 1])] = np.concatenate(exact).view(array.dtype)
    return True


def _bands(num_values: int, layout: Layout) -> tuple[int, int, np.ndarray, np.ndarray]:
    """For two groups: number of bands, steps, and for each lane where its band begins and how many codes it has."""
    num_bands = min(-(-num_values // layout.band), _WIDTH)
    band = layout.band if num_bands > 1 else num_values
    starts = np.arange(_WIDTH) * band
    lengths = np.clip(num_values - starts, 0, band).astype(np.uint32)
    # A lane without a band reads the first one, and writes nothing.
    return num_bands, band, np.where(lengths > 0, starts, 0).astype(np.uint32), lengths

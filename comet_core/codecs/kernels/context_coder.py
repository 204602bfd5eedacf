"""The entropy coder for the CPU: range ANS with a table a context, 32 bands of values side by side.

A code is predicted from its neighbours and coded with the statistics of their context (`tables.Tables`), so a decoder
has to know these first: within a band it is one long chain. Bands do not know of each other, so 32 of them go side by
side, one in each lane of two vectors, and two such groups at once. Codes lie interleaved, 64 in a row, so that all of a
step's predictions and contexts are a few operations on rows of bytes. The bands of a group share a stream of 16-bit
words: at each step the lanes that need one take the next ones, in the order of lanes. An encoder walks from a band's
last value to its first and appends, a decoder from the first to the last and takes from the end; so it ends where the
encoder began, at the state `START` and an empty stream, or the record is damaged. Escapes are a second stream, of
bytes, in the order of steps and within a step of lanes.

The state x of a lane lies in [2**16, 2**32). With f of 1024 slots for the symbol in this context, from slot s on:

    encode: while x >= f << 22: append x mod 2**16, x >>= 16; then x = (x div f) * 1024 + x mod f + s
    decode: slot = x mod 1024 gives the symbol; x = f * (x div 1024) + slot - s; if x < 2**16: x = x << 16 | next word

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
from comet_core.codecs.kernels.quantizer import array_of, dequantize_groups, key_of, quantize_groups, quantize_runs
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.tables import ALONE, LANES, MIDDLE, NO_LEFT, NO_UP, START, Layout, Tables
from comet_core.codecs.kernels.vectors import (
    append,
    bits_of,
    both,
    count,
    gather_at_bytes,
    gather_words,
    highest,
    joined,
    larger,
    load_row,
    load_words,
    lowest,
    mask_of,
    quarter_0,
    quarter_1,
    quarter_2,
    quarter_3,
    quotient,
    row_of,
    select,
    smaller,
    store_bytes,
    store_row,
    store_words,
    sum_up_to_255,
    take,
)

__all__ = ["GROUPS_A_TASK", "decode_values", "encode_values", "quantize_runs"]

GROUPS_A_TASK = 2
"""Groups that are walked at once: one has its steps while the other waits for its look-ups."""
_WIDTH = GROUPS_A_TASK * LANES
_ROOM = 32  # words before the first: a step that takes too many ends there
_NOTHING = np.frombuffer(bytes(1), np.uint8)[:0]  # read-only as what is read from bytes: another type to numba
_SIXTEEN_STEPS = (np.arange(16) * (_WIDTH // 4)).astype(np.uint32)


@compiled
def _interleave(codes: np.ndarray, band: int, offsets: np.ndarray, of_step: np.ndarray) -> None:
    """of_step[64 * t + lane] = codes[offsets[lane] + t] for t in range(band), three more at most.

    codes has to be readable up to three bytes past the last band.
    """
    for lane in range(0, _WIDTH, 16):
        places = load_words(offsets, lane)
        for t in range(0, band, 4):
            four = gather_at_bytes(codes, places + t)
            for place in range(4):
                store_bytes(of_step, _WIDTH * (t + place) + lane, four)
                four = four >> 8


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


@inlined
def _rows_of(thresholds: np.ndarray) -> Any:
    """A row for each of seven thresholds, in registers for all steps; of 255 where there are fewer."""
    return (
        row_of(thresholds[0] if len(thresholds) > 0 else np.uint8(255)),
        row_of(thresholds[1] if len(thresholds) > 1 else np.uint8(255)),
        row_of(thresholds[2] if len(thresholds) > 2 else np.uint8(255)),
        row_of(thresholds[3] if len(thresholds) > 3 else np.uint8(255)),
        row_of(thresholds[4] if len(thresholds) > 4 else np.uint8(255)),
        row_of(thresholds[5] if len(thresholds) > 5 else np.uint8(255)),
        row_of(thresholds[6] if len(thresholds) > 6 else np.uint8(255)),
    )


@inlined
def _level(row: Any, rows: Any) -> Any:
    """The number of thresholds that are smaller, for each lane."""
    none = row_of(0)
    # Two sums, for one would wait for each of its terms.
    some = select(row > rows[0], none + 1, none)
    some = select(row > rows[1], some + 1, some)
    some = select(row > rows[2], some + 1, some)
    others = select(row > rows[3], none + 1, none)
    others = select(row > rows[4], others + 1, others)
    others = select(row > rows[5], others + 1, others)
    return some + select(row > rows[6], others + 1, others)


@inlined
def _modelled(
    of_step: np.ndarray, at: int, left: int, up: int, has_left: bool, has_up: bool, predicts: bool, first_rows: Any,
    second_rows: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Predictions and contexts (rows) of the step whose codes are at of_step[at:], as `Tables` says."""
    before = load_row(of_step, at - _WIDTH * left) if has_left else row_of(MIDDLE)
    above = load_row(of_step, at - _WIDTH * up) if has_up else row_of(MIDDLE)
    prediction, first, second = row_of(MIDDLE), row_of(ALONE), row_of(ALONE)
    if predicts:
        if has_left and has_up:
            corner = load_row(of_step, at - _WIDTH * (left + up))
            least, most = smaller(before, above), larger(before, above)
            # Between the two, left + up - upper left cannot overflow.
            between = select(least >= corner, most, before + above - corner)
            prediction = select(corner >= most, least, between)
            activity = sum_up_to_255(
                larger(before, corner) - smaller(before, corner), larger(above, corner) - smaller(above, corner)
            )
            first = _level(activity, first_rows)
        elif has_left:
            prediction, first = before, row_of(NO_UP)
        elif has_up:
            prediction, first = above, row_of(NO_LEFT)
        second = _level(prediction, second_rows)
    else:
        if has_left:
            first = _level(before, first_rows)
        if has_up:
            second = _level(above, second_rows)
    return prediction, (first << 4) + second


@inlined
def _table(context_of: np.ndarray, contexts: Any) -> Any:
    """What context_of holds for 16 lanes.

    context_of is the table from its middle on: LLVM gathers with 32-bit places, twice as fast as with 64-bit ones, only
    while it cannot prove that they are unsigned.
    """
    return gather_words(context_of, contexts - MIDDLE)


@inlined
def _encoded(x: Any, entry: Any, active: Any, full: Any) -> Any:
    """The states of 16 lanes after coding, for the lanes that have a code; those in `full` gave a word away."""
    x = select(full, x >> 16, x)
    frequency = entry >> 16
    q = quotient(x, frequency)
    return select(active, (q << 10) + (x - q * frequency) + (entry & 0xFFFF), x)


@compiled
def _encode_steps(
    codes: np.ndarray, whole: int, last_lane: int, last_length: int, band: int, left: int, up: int, restart: int,
    predicts: bool, first_levels: np.ndarray, second_levels: np.ndarray, shift: int, num_symbols: int,
    context_of: np.ndarray, slots: np.ndarray, states: np.ndarray, words_a: np.ndarray, words_b: np.ndarray,
    escapes_a: np.ndarray, escapes_b: np.ndarray,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Encode two groups of 32 bands; gives the numbers of their words and escapes, and the last states in `states`.

    codes are interleaved. The bits of `whole` are the lanes with codes in all steps; the one in `last_lane` has them in
    so many. Escapes fill their array from its end.
    """
    x0, x1, x2, x3 = load_words(states, 0), load_words(states, 16), load_words(states, 32), load_words(states, 48)
    used_a, used_b = 0, 0
    first_a, first_b = len(escapes_a), len(escapes_b)
    column, row = (band - 1) % up, (band - 1) % restart
    first_rows, second_rows = _rows_of(first_levels), _rows_of(second_levels)
    for t in range(band - 1, -1, -1):
        at = _WIDTH * t
        active = whole | last_lane if t < last_length else whole
        prediction, contexts = _modelled(
            codes, at, left, up, column >= left, row >= up, predicts, first_rows, second_rows
        )
        code = load_row(codes, at)
        symbols = code - prediction - shift
        symbols = select(symbols >= num_symbols, row_of(0), symbols) if num_symbols < 256 else symbols
        symbols = select(code >= 1, symbols, row_of(0))
        escaping = bits_of(row_of(0) >= symbols) & active
        while escaping != 0:
            # From the last lane to the first, since the array fills from its end.
            lane = highest(escaping)
            escaping ^= np.int64(1) << lane
            if lane < LANES:
                first_a -= 1
                escapes_a[first_a] = codes[at + lane]
            else:
                first_b -= 1
                escapes_b[first_b] = codes[at + lane]
        entry0 = gather_words(slots, _table(context_of, quarter_0(contexts)) + quarter_0(symbols))
        entry1 = gather_words(slots, _table(context_of, quarter_1(contexts)) + quarter_1(symbols))
        entry2 = gather_words(slots, _table(context_of, quarter_2(contexts)) + quarter_2(symbols))
        entry3 = gather_words(slots, _table(context_of, quarter_3(contexts)) + quarter_3(symbols))
        active0, active1 = mask_of(active, 0), mask_of(active, 16)
        active2, active3 = mask_of(active, 32), mask_of(active, 48)
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
    return used_a, used_b, len(escapes_a) - first_a, len(escapes_b) - first_b


@inlined
def _decoded(x: Any, entry: Any, active: Any) -> Any:
    """The states of 16 lanes without the symbol that the entry holds, before words are taken."""
    return select(active, (entry >> 22) * (x >> 10) + ((entry >> 12) & 1023), x)


@compiled
def _decode_steps(
    words_a: np.ndarray, words_b: np.ndarray, escapes_a: np.ndarray, escapes_b: np.ndarray, whole: int, last_lane: int,
    last_length: int, band: int, left: int, up: int, restart: int, predicts: bool, first_levels: np.ndarray,
    second_levels: np.ndarray, shift: int, context_of: np.ndarray, slots: np.ndarray, states: np.ndarray,
    codes: np.ndarray,
) -> bool:  # fmt: skip
    """Decode two groups of 32 bands into interleaved codes; in `states` what should be the start.

    The words have 32 words of room before the first and 16 behind the last. False where there are not enough of them or
    of escapes, or some are left.
    """
    x0, x1, x2, x3 = load_words(states, 0), load_words(states, 16), load_words(states, 32), load_words(states, 48)
    used_a, used_b = len(words_a) - 16, len(words_b) - 16
    taken_a, taken_b = 0, 0
    column, row = 0, 0
    first_rows, second_rows = _rows_of(first_levels), _rows_of(second_levels)
    for t in range(band):
        at = _WIDTH * t
        active = whole | last_lane if t < last_length else whole
        prediction, contexts = _modelled(
            codes, at, left, up, column >= left, row >= up, predicts, first_rows, second_rows
        )
        entry0 = gather_words(slots, _table(context_of, quarter_0(contexts)) + (x0 & 1023))
        entry1 = gather_words(slots, _table(context_of, quarter_1(contexts)) + (x1 & 1023))
        entry2 = gather_words(slots, _table(context_of, quarter_2(contexts)) + (x2 & 1023))
        entry3 = gather_words(slots, _table(context_of, quarter_3(contexts)) + (x3 & 1023))
        symbols = joined(entry0, entry1, entry2, entry3)
        store_row(codes, at, symbols + prediction + shift)
        escaping = bits_of(row_of(0) >= symbols) & active
        while escaping != 0:
            lane = lowest(escaping)
            escaping &= escaping - 1
            if lane < LANES:
                if taken_a == len(escapes_a):
                    return False
                codes[at + lane] = escapes_a[taken_a]
                taken_a += 1
            else:
                if taken_b == len(escapes_b):
                    return False
                codes[at + lane] = escapes_b[taken_b]
                taken_b += 1
        x0, x1 = _decoded(x0, entry0, mask_of(active, 0)), _decoded(x1, entry1, mask_of(active, 16))
        x2, x3 = _decoded(x2, entry2, mask_of(active, 32)), _decoded(x3, entry3, mask_of(active, 48))
        short0, short1, short2, short3 = x0 < START, x1 < START, x2 < START, x3 < START
        middle_a, middle_b = used_a - count(short1), used_b - count(short3)
        used_a, used_b = middle_a - count(short0), middle_b - count(short2)
        if min(used_a, used_b) < _ROOM:
            return False
        x0 = select(short0, (x0 << 16) | take(words_a, used_a, short0), x0)
        x1 = select(short1, (x1 << 16) | take(words_a, middle_a, short1), x1)
        x2 = select(short2, (x2 << 16) | take(words_b, used_b, short2), x2)
        x3 = select(short3, (x3 << 16) | take(words_b, middle_b, short3), x3)
        column = column + 1 if column + 1 < up else 0
        row = row + 1 if row + 1 < restart else 0
    store_words(states, 0, x0)
    store_words(states, 16, x1)
    store_words(states, 32, x2)
    store_words(states, 48, x3)
    return used_a == _ROOM and used_b == _ROOM and taken_a == len(escapes_a) and taken_b == len(escapes_b)


@compiled
def _encode_pair(
    codes: np.ndarray, offsets: np.ndarray, whole: int, last_lane: int, last_length: int, band: int, left: int, up: int,
    restart: int, predicts: bool, first_levels: np.ndarray, second_levels: np.ndarray, shift: int, num_symbols: int,
    context_of: np.ndarray, slots: np.ndarray, of_step: np.ndarray, states: np.ndarray, words_a: np.ndarray,
    words_b: np.ndarray, escapes_a: np.ndarray, escapes_b: np.ndarray,
) -> tuple[int, int, int, int]:  # fmt: skip
    """`_encode_steps` for codes in the order of memory; of_step is room for them interleaved."""
    _interleave(codes, band, offsets, of_step)
    return _encode_steps(
        of_step, whole, last_lane, last_length, band, left, up, restart, predicts, first_levels, second_levels, shift,
        num_symbols, context_of, slots, states, words_a, words_b, escapes_a, escapes_b,
    )  # fmt: skip


@compiled
def _decode_pair(
    payload_a: np.ndarray, payload_b: np.ndarray, escapes_a: np.ndarray, escapes_b: np.ndarray, offsets: np.ndarray,
    num_values: int, whole: int, last_lane: int, last_length: int, band: int, left: int, up: int, restart: int,
    predicts: bool, first_levels: np.ndarray, second_levels: np.ndarray, shift: int, context_of: np.ndarray,
    slots: np.ndarray, of_step: np.ndarray, words_a: np.ndarray, words_b: np.ndarray, codes: np.ndarray,
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
        words_a, words_b, escapes_a, escapes_b, whole, last_lane, last_length, band, left, up, restart, predicts,
        first_levels, second_levels, shift, context_of, slots, states, of_step,
    ):  # fmt: skip
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
    missed = scratch("missed", 4 * num_groups * room).view(np.int32).reshape(num_groups, room)
    num_missed = np.empty(num_groups, np.int64)
    entries = (entry.numpy() for entry in (grid.step, grid.inverse, grid.offset, grid.limit))
    quantize_groups(
        array, start, group, *entries, grid.inner, grid.sign_exact, key_of(grid), codes, missed, num_missed
    )
    num_bands, *numbers, offsets = _bands(len(x), layout)
    band = numbers[-1]
    states = np.full(_WIDTH, START, np.uint32)
    words = [scratch(f"words {index}", 2 * (LANES * band + 16)).view(np.uint16) for index in range(GROUPS_A_TASK)]
    escapes = [scratch(f"escapes {index}", LANES * band) for index in range(GROUPS_A_TASK)]
    context_of, slots = tables.for_encoding
    used = _encode_pair(
        codes, offsets, *numbers, layout.left, layout.up, layout.restart, tables.predicts,
        *_below(tables), tables.shift, tables.frequencies.shape[1], context_of[MIDDLE:], slots,
        scratch("of_step", _WIDTH * (band + 3)), states, *words, *escapes,
    )  # fmt: skip
    found: list[tuple[int, int, bytes] | None] = []
    for index, of_group in enumerate(num_missed.tolist()):
        num_words, num_escapes = used[index], used[GROUPS_A_TASK + index]
        if of_group < 0 or num_escapes > min(group, len(x) - index * group) // 4:
            found.append(None)
            continue
        exact = array[index * group + missed[index, :of_group]]
        of_bands = states[index * LANES : min((index + 1) * LANES, num_bands)]
        pieces = escapes[index][LANES * band - num_escapes :], exact, of_bands, words[index][:num_words]
        found.append((num_escapes, of_group, b"".join(piece.data for piece in pieces)))
    return found


def decode_values(
    found: Sequence[tuple[bytes, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> bool:
    """Twin of reference.decode_values, for GROUPS_A_TASK groups at most."""
    array, group = array_of(out), layout.group
    num_bands, *numbers, offsets = _bands(len(out), layout)
    words = [np.zeros(_ROOM + 16, np.uint16)] * GROUPS_A_TASK
    payloads, escapes = [_NOTHING] * GROUPS_A_TASK, [_NOTHING] * GROUPS_A_TASK
    exact, num_missed = [], np.empty(len(found), np.int64)
    for index, (part, num_escapes, of_group) in enumerate(found):
        data, behind = np.frombuffer(part, np.uint8), num_escapes + of_group * out.itemsize
        words_bytes = len(data) - behind - 4 * min(num_bands - index * LANES, LANES)
        if words_bytes < 0 or words_bytes % 2:
            return False
        words[index] = scratch(f"words {index}", 2 * (_ROOM + words_bytes // 2 + 16)).view(np.uint16)
        payloads[index], escapes[index] = data[behind:], data[:num_escapes]
        exact.append(data[num_escapes:behind])
        num_missed[index] = of_group
    codes = scratch("codes", len(out))
    context_of, slots = tables.for_decoding
    if not _decode_pair(
        *payloads, *escapes, offsets[:num_bands], len(out), *numbers, layout.left, layout.up, layout.restart,
        tables.predicts, *_below(tables), tables.shift, context_of[MIDDLE:], slots,
        scratch("of_step", _WIDTH * numbers[-1]), *words, codes,
    ):  # fmt: skip
        return False
    missed = np.empty(num_missed.sum(), np.int32)
    if not dequantize_groups(
        codes, start, group, grid.step.numpy(), grid.offset.numpy(), grid.inner, grid.sign_exact, key_of(grid),
        num_missed, missed, array,
    ):  # fmt: skip
        return False
    if len(missed):
        array[missed + np.repeat(np.arange(len(found)) * group, num_missed)] = np.concatenate(exact).view(array.dtype)
    return True


def _below(tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """The thresholds less one: values are compared with what they have to be above, so that 255 is one for none."""
    return tables.first_levels - np.uint8(1), tables.second_levels - np.uint8(1)


def _bands(num_values: int, layout: Layout) -> tuple[int, int, int, int, int, np.ndarray]:
    """For two groups: number of bands, lanes with a whole one, the last lane and its length, steps, where bands begin.

    Lanes are bits of an int64.
    """
    num_bands = min(-(-num_values // layout.band), _WIDTH)
    band = layout.band if num_bands > 1 else num_values
    last = np.uint64(1 << (num_bands - 1))
    starts = np.arange(_WIDTH) * band
    # A lane without a band reads the first one, and writes nothing.
    offsets = np.where(starts < num_values, starts, 0).astype(np.uint32)
    last_length = min(num_values - (num_bands - 1) * band, band)
    whole, last_lane = (bits.astype(np.int64).item() for bits in (last - np.uint64(1), last))
    return num_bands, whole, last_lane, last_length, band, offsets

"""The entropy coder for the CPU: range ANS with a table a context, 32 bands of values side by side.

A code is coded with the statistics of its left and upper neighbour, so a decoder has to know these first: within a band
it is one long chain. Bands do not know of each other, so 32 of them go side by side, one in each lane of two vectors.
All share one stream of 16-bit words: at each step the lanes that need one take the next ones, in the order of lanes.
An encoder walks from a band's last value to its first and appends, a decoder from the first to the last and takes
from the end; so it ends where the encoder began, at the state `START` and an empty stream, or the record is damaged.

The state x of a lane lies in [2**16, 2**32). With f of 1024 slots for the code in this context, from slot s on:

    encode: while x >= f << 22: append x mod 2**16, x >>= 16; then x = (x div f) * 1024 + x mod f + s
    decode: slot = x mod 1024 gives the code; x = f * (x div 1024) + slot - s; if x < 2**16: x = x << 16 | next word

The definition is `reference.encode_bands`; the payload is equal byte for byte.

Sources: ANS, Duda (2013), section on range variants; states in the lanes of a vector: Giesen, "Interleaved entropy
coders" (2014).
"""

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.kernels.compiled import compiled
from comet_core.codecs.kernels.contexts import LANES, NO_LEVEL, START, Layout, Tables
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

_ROOM = 32  # words before the first: a step that takes too many ends there
_SIXTEEN_STEPS = (np.arange(16) * 8).astype(np.uint32)


@compiled
def _interleave(codes: np.ndarray, band: int, offsets: np.ndarray, table: np.ndarray, of_step: np.ndarray) -> None:
    """of_step[32 * t + lane] = table[codes[offsets[lane] + t]] for t in range(band), three more at most.

    codes has to be readable up to three bytes past the last band; an empty table leaves the codes as they are.
    """
    first, second = load_words(offsets, 0), load_words(offsets, 16)
    for t in range(0, band, 4):
        a, b = gather_at_bytes(codes, first + t), gather_at_bytes(codes, second + t)
        for place in range(4):
            at = 32 * (t + place)
            if len(table):
                store_bytes(of_step, at, gather_words(table, a & 255))
                store_bytes(of_step, at + 16, gather_words(table, b & 255))
            else:
                store_bytes(of_step, at, a)
                store_bytes(of_step, at + 16, b)
            a = a >> 8
            b = b >> 8


@compiled
def _encode_steps(
    codes: np.ndarray, levels: np.ndarray, lengths: np.ndarray, band: int, left: int, up: int, restart: int,
    context_of: np.ndarray, slots: np.ndarray, states: np.ndarray, words: np.ndarray,
) -> int:  # fmt: skip
    """Encode 32 bands; gives the number of words, and in `states` (32,) the last states.

    codes and levels are interleaved (see `_interleave`); context_of[16 * left level + upper level] is where slots has
    the context's entries, frequency << 16 | first slot, one a code.
    """
    x0 = load_words(states, 0)
    x1 = load_words(states, 16)
    length0, length1 = load_words(lengths, 0), load_words(lengths, 16)
    none = (x0 & 0) + NO_LEVEL
    used = 0
    column = (band - 1) % up
    row = (band - 1) % restart
    for t in range(band - 1, -1, -1):
        at = 32 * t
        left0, left1, up0, up1 = none, none, none, none
        if column >= left:
            left0 = load_bytes(levels, at - 32 * left)
            left1 = load_bytes(levels, at - 32 * left + 16)
        if row >= up:
            up0 = load_bytes(levels, at - 32 * up)
            up1 = load_bytes(levels, at - 32 * up + 16)
        entry0 = gather_words(slots, gather_words(context_of, (left0 << 4) + up0) + load_bytes(codes, at))
        entry1 = gather_words(slots, gather_words(context_of, (left1 << 4) + up1) + load_bytes(codes, at + 16))
        frequency0 = entry0 >> 16
        frequency1 = entry1 >> 16
        active0 = length0 >= t + 1
        active1 = length1 >= t + 1
        full0 = both(x0 >= (frequency0 << 22), active0)
        append(words, used, x0, full0)
        used += count(full0)
        full1 = both(x1 >= (frequency1 << 22), active1)
        append(words, used, x1, full1)
        used += count(full1)
        x0 = select(full0, x0 >> 16, x0)
        x1 = select(full1, x1 >> 16, x1)
        q0 = quotient(x0, frequency0)
        q1 = quotient(x1, frequency1)
        x0 = select(active0, (q0 << 10) + (x0 - q0 * frequency0) + (entry0 & 0xFFFF), x0)
        x1 = select(active1, (q1 << 10) + (x1 - q1 * frequency1) + (entry1 & 0xFFFF), x1)
        column = column - 1 if column else up - 1
        row = row - 1 if row else restart - 1
    store_words(states, 0, x0)
    store_words(states, 16, x1)
    return used


@compiled
def _decode_steps(
    words: np.ndarray, used: int, lengths: np.ndarray, band: int, left: int, up: int, restart: int,
    context_of: np.ndarray, slots: np.ndarray, states: np.ndarray, levels: np.ndarray, codes: np.ndarray,
) -> int:  # fmt: skip
    """Decode 32 bands into interleaved codes and levels; gives the number of words left, negative when there were not
    enough, and in `states` what should be the start.

    slots[1024 * context + slot] = code | level << 8 | (slot - first slot) << 12 | frequency << 22, and context_of holds
    1024 * context. words (uint16) has to have 32 words of room before the first, and `used` counts these in.
    """
    x0 = load_words(states, 0)
    x1 = load_words(states, 16)
    length0, length1 = load_words(lengths, 0), load_words(lengths, 16)
    none = (x0 & 0) + NO_LEVEL
    column = 0
    row = 0
    for t in range(band):
        at = 32 * t
        left0, left1, up0, up1 = none, none, none, none
        if column >= left:
            left0 = load_bytes(levels, at - 32 * left)
            left1 = load_bytes(levels, at - 32 * left + 16)
        if row >= up:
            up0 = load_bytes(levels, at - 32 * up)
            up1 = load_bytes(levels, at - 32 * up + 16)
        entry0 = gather_words(slots, gather_words(context_of, (left0 << 4) + up0) + (x0 & 1023))
        entry1 = gather_words(slots, gather_words(context_of, (left1 << 4) + up1) + (x1 & 1023))
        active0 = length0 >= t + 1
        active1 = length1 >= t + 1
        x0 = select(active0, (entry0 >> 22) * (x0 >> 10) + ((entry0 >> 12) & 1023), x0)
        x1 = select(active1, (entry1 >> 22) * (x1 >> 10) + ((entry1 >> 12) & 1023), x1)
        short1 = x1 < 65536
        used -= count(short1)
        short0 = x0 < 65536
        if used < 32:
            return -1
        x1 = select(short1, (x1 << 16) | take(words, used, short1), x1)
        used -= count(short0)
        if used < 32:
            return -1
        x0 = select(short0, (x0 << 16) | take(words, used, short0), x0)
        store_bytes(codes, at, entry0)
        store_bytes(codes, at + 16, entry1)
        store_bytes(levels, at, (entry0 >> 8) & 15)
        store_bytes(levels, at + 16, (entry1 >> 8) & 15)
        column = column + 1 if column + 1 < up else 0
        row = row + 1 if row + 1 < restart else 0
    store_words(states, 0, x0)
    store_words(states, 16, x1)
    return used - 32


@compiled
def _deinterleave(of_step: np.ndarray, band: int, offsets: np.ndarray, codes: np.ndarray, length: int) -> None:
    """codes[offsets[lane] + t] = of_step[32 * t + lane], for the lanes that have a band and codes below `length`."""
    steps = load_words(_SIXTEEN_STEPS, 0)
    words = of_step.view(np.uint32)
    num_bands = len(offsets)
    for first in range(0, num_bands, 4):
        lanes = min(4, num_bands - first)
        # Whole vectors, as long as the last of the four bands has so many codes.
        rest = length - np.int64(offsets[first + lanes - 1])
        whole = (rest if rest < band else band) // 16 * 16
        for t in range(0, whole, 16):
            four = gather_words(words, steps + (8 * t + first // 4))
            for place in range(lanes):
                store_bytes(codes, np.int64(offsets[first + place]) + t, four)
                four = four >> 8
        for place in range(lanes):
            start = np.int64(offsets[first + place])
            rest = length - start
            for t in range(whole, rest if rest < band else band):
                codes[start + t] = of_step[LANES * t + first + place]


def encode_bands(codes: Tensor, count: int, layout: Layout, tables: Tables) -> Tensor:
    """Twin of reference.encode_bands."""
    num_bands, band, offsets, lengths = _bands(count, layout)
    context_of, slots = tables.for_encoding
    array = codes.numpy()
    of_step = levels = np.empty(LANES * (band + 3), np.uint8)
    _interleave(array, band, offsets, np.empty(0, np.uint32), of_step)
    if len(tables.levels) > NO_LEVEL:  # else each code is its own level
        levels = np.empty_like(of_step)
        _interleave(array, band, offsets, tables.levels.astype(np.uint32), levels)
    states, words = np.full(LANES, START, np.uint32), np.empty(count + 16, np.uint16)
    used = _encode_steps(
        of_step, levels, lengths, band, layout.left, layout.up, layout.restart, context_of, slots, states, words
    )
    return torch.from_numpy(np.concatenate([states[:num_bands].view(np.uint8), words[:used].view(np.uint8)]))


def decode_bands(payload: Tensor, layout: Layout, tables: Tables, codes: Tensor) -> bool:
    """Twin of reference.decode_bands."""
    num_bands, band, offsets, lengths = _bands(len(codes), layout)
    if len(payload) < 4 * num_bands or len(payload) % 2:
        return False
    context_of, slots = tables.for_decoding
    array = payload.numpy()
    states = np.full(LANES, START, np.uint32)
    states[:num_bands].view(np.uint8)[:] = array[: 4 * num_bands]
    words = np.zeros(_ROOM + (len(array) - 4 * num_bands) // 2 + 16, np.uint16)
    words[_ROOM:-16].view(np.uint8)[:] = array[4 * num_bands :]
    of_step, levels = (np.empty(LANES * band, np.uint8) for _ in range(2))
    used = _decode_steps(
        words, len(words) - 16, lengths, band, layout.left, layout.up, layout.restart, context_of, slots, states,
        levels, of_step,
    )  # fmt: skip
    _deinterleave(of_step, band, offsets[:num_bands], codes.numpy(), len(codes))
    return used == 0 and bool((states == START).all())


def _bands(count: int, layout: Layout) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Number of bands, steps, and for each lane where its band begins and how many codes it has."""
    num_bands = -(-count // layout.band)
    band = layout.band if num_bands > 1 else count
    starts = np.arange(LANES) * band
    lengths = np.clip(count - starts, 0, band).astype(np.uint32)
    return num_bands, band, np.where(lengths > 0, starts, 0).astype(np.uint32), lengths

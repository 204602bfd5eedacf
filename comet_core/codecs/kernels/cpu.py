"""Twins of the reference stages in numba, for float32 and float64 (and bytes) on the CPU, equal bit for bit.

The kernels are serial and release the GIL: the codecs call them from their own threads (`chunks.py`), since numba's
parallel kernels must not be called from two threads at once. The twins of the error-bounded codec's quantiser and coder
have files of their own, `quantizer.py` and `context_coder.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.kernels import reference
from comet_core.codecs.kernels.chunks import scratch
from comet_core.codecs.kernels.compiled import compiled
from comet_core.codecs.kernels.reference import GROUP_VALUES, Windows

_LANES = 16


@compiled
def _finite_range(x: np.ndarray, start: int, inner: int, low: np.ndarray, high: np.ndarray) -> None:
    """Widen low and high (C,) by the finite values of x, in lanes: a plain minimum would wait for itself."""
    num_channels = len(low)
    largest = np.finfo(x.dtype).max
    lows, highs = np.empty(_LANES, x.dtype), np.empty(_LANES, x.dtype)
    first = 0
    while first < len(x):
        run = (start + first) // inner
        channel = run % num_channels
        if inner == 1:
            # A row of channels: each has its own lane.
            count = min(len(x) - first, num_channels - channel)
            values = x[first : first + count]
            row_low, row_high = low[channel : channel + count], high[channel : channel + count]
            for j in range(count):
                value = np.float64(values[j])
                finite = abs(value) <= largest
                row_low[j] = value if finite and value < row_low[j] else row_low[j]
                row_high[j] = value if finite and value > row_high[j] else row_high[j]
            first += count
            continue
        count = min(len(x) - first, (run + 1) * inner - (start + first))
        values = x[first : first + count]
        first += count
        lows[:] = np.inf
        highs[:] = -np.inf
        for group in range(0, count, _LANES):
            # The last lanes overlap the group before, which a minimum does not mind.
            lanes = values[max(min(group, count - _LANES), 0) :]
            for j in range(min(_LANES, count)):
                value = lanes[j]
                finite = abs(value) <= largest
                lows[j] = value if finite and value < lows[j] else lows[j]
                highs[j] = value if finite and value > highs[j] else highs[j]
        for j in range(min(_LANES, count)):
            low[channel] = min(low[channel], np.float64(lows[j]))
            high[channel] = max(high[channel], np.float64(highs[j]))


@compiled
def _shuffle(data: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    count = len(data) // itemsize
    for place in range(itemsize):
        plane = out[place * count : (place + 1) * count]
        for j in range(count):
            plane[j] = data[j * itemsize + place]


@compiled
def _unshuffle(data: np.ndarray, itemsize: int, out: np.ndarray) -> None:
    count = len(data) // itemsize
    for place in range(itemsize):
        plane = data[place * count : (place + 1) * count]
        for j in range(count):
            out[j * itemsize + place] = plane[j]


@compiled
def _positive_bits(x: np.ndarray, bits: np.ndarray) -> None:
    whole = len(x) // 8
    for k in range(whole):
        values = x[8 * k : 8 * k + 8]
        byte = 0
        for place in range(8):
            byte |= int(not values[place] <= 0) << place
        bits[k] = byte
    byte = 0
    for j in range(8 * whole, len(x)):
        byte |= int(not x[j] <= 0) << (j - 8 * whole)
    if whole < len(bits):
        bits[whole] = byte


@compiled
def _fill_positive(bits: np.ndarray, value: Any, out: np.ndarray) -> None:
    zero = out.dtype.type(0)
    whole = len(out) // 8
    for k in range(whole):
        values = out[8 * k : 8 * k + 8]
        for place in range(8):
            values[place] = value if bits[k] >> place & 1 else zero
    for j in range(8 * whole, len(out)):
        out[j] = value if bits[whole] >> (j - 8 * whole) & 1 else zero


@compiled
def _pack(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    per_byte = 8 // bits
    whole = len(codes) // per_byte
    if bits == 2:
        for k in range(whole):
            four = codes[4 * k : 4 * k + 4]
            packed[k] = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6
    elif bits == 4:
        for k in range(whole):
            packed[k] = codes[2 * k] | codes[2 * k + 1] << 4
    elif bits == 8:
        packed[:] = codes
    for k in range(whole if bits in (2, 4, 8) else 0, len(packed)):
        byte = 0
        for place in range(min(per_byte, len(codes) - k * per_byte)):
            byte |= codes[k * per_byte + place] << (place * bits)
        packed[k] = byte


@compiled
def _unpack(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    if bits == 8:
        codes[:] = packed
        return
    per_byte, mask = 8 // bits, (1 << bits) - 1
    whole = len(codes) // per_byte
    if bits == 2:
        for k in range(whole):
            four, byte = codes[4 * k : 4 * k + 4], packed[k]
            four[0], four[1], four[2], four[3] = byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6
    elif bits == 4:
        for k in range(whole):
            codes[2 * k], codes[2 * k + 1] = packed[k] & 15, packed[k] >> 4
    for j in range(whole * per_byte if bits in (2, 4) else 0, len(codes)):
        codes[j] = packed[j // per_byte] >> (j % per_byte * bits) & mask


@compiled
def _window_codes(
    indices: np.ndarray, corners: np.ndarray, row_distance: int, num_rows: int, column_distance: int, num_columns: int,
    codes: np.ndarray,
) -> bool:  # fmt: skip
    """Counts of borders passed stand in for divisions, which take longer than all the rest."""
    num_values = len(corners)
    distance, row = np.empty(num_values, np.int32), np.empty(num_values, np.int32)
    column = np.empty(num_values, np.int32)
    most = row_distance * num_rows
    step, width = np.int32(column_distance), np.int32(num_columns)
    for plane in range(len(indices)):
        given, out = indices[plane], codes[plane]
        num_wrong = 0
        for j in range(num_values):
            far = given[j] - corners[j]
            num_wrong += far < 0 or far >= most
            distance[j] = far
        row[:], column[:] = 0, 0
        for border in range(1, num_rows):
            passed = np.int32(border * row_distance)
            for j in range(num_values):
                row[j] += distance[j] >= passed
        for j in range(num_values):
            distance[j] -= row[j] * np.int32(row_distance)
        for border in range(1, num_columns):
            passed = np.int32(border * column_distance)
            for j in range(num_values):
                column[j] += distance[j] >= passed
        for j in range(num_values):
            num_wrong += distance[j] != column[j] * step
            out[j] = row[j] * width + column[j]
        if num_wrong:
            return False
    return True


@compiled
def _window_indices(codes: np.ndarray, corners: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for plane in range(len(codes)):
        given, indices = codes[plane], out[plane]
        for j in range(len(corners)):
            indices[j] = corners[j] + offsets[given[j]]


def finite_range(x: Tensor, start: int, inner: int, low: Tensor, high: Tensor) -> None:
    """Twin of reference.finite_range."""
    _finite_range(x.numpy(), start, inner, low.numpy(), high.numpy())


def shuffle_bytes(data: Tensor, itemsize: int) -> np.ndarray:
    """Twin of reference.shuffle_bytes."""
    out = np.empty(len(data), np.uint8)
    _shuffle(data.numpy(), itemsize, out)
    return out


def unshuffle_bytes(data: np.ndarray, itemsize: int, out: Tensor) -> None:
    """Twin of reference.unshuffle_bytes."""
    _unshuffle(data, itemsize, out.numpy())


def positive_bits(x: Tensor) -> Tensor:
    """Twin of reference.positive_bits."""
    bits = np.empty((len(x) + 7) // 8, np.uint8)
    _positive_bits(x.numpy(), bits)
    return torch.from_numpy(bits)


def fill_positive(bits: Tensor, value: Tensor, out: Tensor) -> None:
    """Twin of reference.fill_positive."""
    _fill_positive(bits.numpy(), value.numpy()[()], out.numpy())


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Twin of reference.pack_bits."""
    packed = np.empty(-(-len(codes) * bits // 8), np.uint8)
    _pack(codes.numpy(), bits, packed)
    return torch.from_numpy(packed)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Twin of reference.unpack_bits, in memory that its next call in this thread takes again."""
    codes = scratch("unpacked codes", count)
    _unpack(packed.numpy(), bits, codes)
    return torch.from_numpy(codes)


def window_codes(indices: Tensor, windows: Windows, codes: Tensor) -> bool:
    """Twin of reference.window_codes."""
    num_rows, num_columns = windows.kernel_size
    if windows.row_distance * num_rows >= 1 << 31:
        return reference.window_codes(indices, windows, codes)
    corners = windows.corners(indices.shape, indices.device).flatten()
    return bool(
        _window_codes(
            indices.flatten(1).numpy(), corners.numpy(), windows.row_distance, num_rows, windows.dilation[1],
            num_columns, codes.flatten(1).numpy(),
        )
    )  # fmt: skip


def window_indices(codes: Tensor, windows: Windows, out: Tensor) -> None:
    """Twin of reference.window_indices."""
    corners = windows.corners(codes.shape, codes.device).flatten()
    _window_indices(codes.flatten(1).numpy(), corners.numpy(), windows.offsets(256).numpy(), out.flatten(1).numpy())


@compiled
def mixed(h: Any) -> Any:
    """Twin of reference.mixed, for one np.uint32."""
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@compiled
def _encode_groups(
    x: np.ndarray, first_group: int, bits: int, seed: int, sign_exact: bool, low: np.ndarray, step: np.ndarray,
    packed: np.ndarray,
) -> None:  # fmt: skip
    """Fill low (G,), step (G,) with bits of bfloat16, and packed."""
    float32_max, golden = np.float64(np.finfo(np.float32).max), np.uint32(0x9E3779B9)
    num_steps = np.float64((1 << bits) - 1 - int(sign_exact))
    first_code = np.float64(sign_exact)
    zero, infinity = np.float64(0), np.float64(np.inf)
    # Places behind the values of a short last group stay unused.
    sizes, used = np.zeros(GROUP_VALUES, np.float64), np.zeros(GROUP_VALUES, np.bool_)
    singles, pair = np.zeros(GROUP_VALUES, np.float32), np.zeros(1, np.float32)
    singles_bits, pair_bits = singles.view(np.uint32), pair.view(np.int32)
    lows, highs = np.zeros(_LANES, np.float64), np.zeros(_LANES, np.float64)
    offsets = np.arange(1, GROUP_VALUES + 1).astype(np.uint32) * golden
    noise, codes = np.zeros(GROUP_VALUES, np.float64), np.zeros(GROUP_VALUES, np.uint8)
    per_byte = 8 // bits
    seed_key = mixed(np.uint32(seed))
    for group in range(len(low)):
        values = x[group * GROUP_VALUES : (group + 1) * GROUP_VALUES]
        count = len(values)
        used[count:], singles[count:] = False, 0
        for j in range(count):
            value = np.float64(values[j])
            finite = abs(value) <= float32_max
            value = value if finite else zero
            singles[j] = np.float32(value)
            sizes[j] = abs(value) if sign_exact else value
            used[j] = finite and (value != zero or not sign_exact)
        lows[:], highs[:] = infinity, -infinity
        for lane in range(0, GROUP_VALUES, _LANES):
            for j in range(_LANES):
                size, known = sizes[lane + j], used[lane + j]
                lows[j] = size if known and size < lows[j] else lows[j]
                highs[j] = size if known and size > highs[j] else highs[j]
        smallest, largest = lows.min(), highs.max()
        if not smallest <= largest:
            smallest = largest = zero
        exact_step = (largest - smallest) / num_steps
        exact_step = np.float64(max(exact_step, 2.0**-126)) if exact_step > 0 else exact_step
        pair[0] = np.float32(exact_step)
        step_bits = (pair_bits[0] + int(np.float64(pair[0]) < exact_step) + 0xFFFF) >> 16
        pair_bits[0] = step_bits << 16
        divisor = np.float64(pair[0]) if step_bits > 0 else np.float64(1)
        low[group], step[group] = smallest, step_bits

        # Modulo 2**32, which the reference does by masks.
        checksum = np.uint32(0)
        for j in range(GROUP_VALUES):
            checksum = np.uint32(checksum + singles_bits[j])
        key = mixed(checksum ^ mixed(np.uint32(first_group + group) ^ seed_key))
        for j in range(GROUP_VALUES):
            noise[j] = np.float64(mixed(np.uint32(key + offsets[j]))) / 4294967296.0
        for j in range(GROUP_VALUES):
            q = np.floor((sizes[j] - smallest) / divisor + noise[j])
            q = q if q < num_steps else num_steps
            q = q + first_code if used[j] else zero
            codes[j] = np.uint8(np.int32(q))
        places = packed[group * GROUP_VALUES // per_byte : (group + 1) * GROUP_VALUES // per_byte]
        if bits == 2:
            for k in range(len(places)):
                pairs = codes[4 * k : 4 * k + 4]
                places[k] = pairs[0] | pairs[1] << 2 | pairs[2] << 4 | pairs[3] << 6
        elif bits == 4:
            for k in range(len(places)):
                places[k] = codes[2 * k] | codes[2 * k + 1] << 4
        else:
            places[:] = codes[: len(places)]


@compiled
def _decode_groups(
    packed: np.ndarray, low: np.ndarray, step: np.ndarray, bits: int, sign_exact: bool, most: float, out: np.ndarray
) -> None:
    per_byte = 8 // bits
    levels = np.zeros(1 << bits, out.dtype)
    for group in range(len(low)):
        for q in range(1 << bits):
            y = np.float64(low[group]) + np.float64(q - int(sign_exact)) * np.float64(step[group])
            levels[q] = -most if y < -most else most if y > most else y
        if sign_exact:
            levels[0] = 0
        values = out[group * GROUP_VALUES : (group + 1) * GROUP_VALUES]
        places = packed[group * GROUP_VALUES // per_byte : (group + 1) * GROUP_VALUES // per_byte]
        whole = len(values) // per_byte
        for k in range(whole):
            byte = places[k]
            for place in range(per_byte):
                values[k * per_byte + place] = levels[byte >> (place * bits) & len(levels) - 1]
        for j in range(whole * per_byte, len(values)):
            values[j] = levels[places[whole] >> (j % per_byte * bits) & len(levels) - 1]


def encode_groups(x: Tensor, first_group: int, bits: int, seed: int, sign_exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of reference.encode_groups."""
    num_groups = -(-len(x) // GROUP_VALUES)
    low, step = torch.empty(num_groups, dtype=x.dtype), torch.empty(num_groups, dtype=torch.bfloat16)
    packed = torch.empty(-(-len(x) * bits // 8), dtype=torch.uint8)
    _encode_groups(
        x.numpy(), first_group, bits, seed, sign_exact, low.numpy(), step.view(torch.int16).numpy(), packed.numpy()
    )
    return low, step, packed


def decode_groups(
    packed: Tensor, low: Tensor, step: Tensor, bits: int, sign_exact: bool, largest: float, out: Tensor
) -> None:
    """Twin of reference.decode_groups."""
    _decode_groups(packed.numpy(), low.numpy(), step.float().numpy(), bits, sign_exact, largest, out.numpy())

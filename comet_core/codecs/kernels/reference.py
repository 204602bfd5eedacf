"""Every stage of the codecs in plain PyTorch: the definition, on any device.

The twins in `cpu.py`, `quantizer.py` and `context_coder.py` give the same codes, payloads and decoded values, bit for
bit; the tests hold them against this file. What is written here is therefore chosen to be exact everywhere: rint, ceil
and multiplication are correctly rounded IEEE operations, nothing is fused, and each result is rounded once. Speed is
not a goal.

The error-bounded codec's quantiser has a step s a little below 2 * bound, and for each channel an offset o. All
arithmetic is in the working dtype (float64 for float64, else float32), r is 1 / s:

    plain (mid-tread)        q = rint(x * r - o)                     y = (q + o) * s
    sign exact (mid-rise     q = sign(x) * max(ceil(|x| * r), 1)     y = sign(q) * ((2 |q| - 1) * (s / 2))
    with a zero of its own)  q = 0 where x = 0                       y = 0 where q = 0

Dithered, with d uniform in [-1/2, 1/2), a hash of a key and of the value's index, and a zero of its own in both:

    plain                    k = rint((x * r - o) + d)               y = ((k + o) - d) * s
                             q = k + 1 where k >= 0, else k
    sign exact               k = rint(|x| * r + d)                   y = sign(q) * |(k - d) * s|
                             q = sign(x) * (k + 1)

The error of a plain value is then uniform and independent of the value: subtractive dither (Roberts 1962; Schuchman
1964). So it is with the sign kept from |x| = s / 2 on; below, levels beyond zero are mirrored, since nothing else keeps
both sign and bound.

|q| must be at most 127, and |x - y| computed in the working dtype at most a limit that keeps the bound in exact
arithmetic, for the y that the decoder returns, rounded to the tensor's dtype; and zeros must stay zero, which they do
without checking where o is a whole number. What misses (so also NaN and infinities) is kept as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.kernels.tables import ALONE, MIDDLE, NO_LEFT, NO_UP, SLOTS, START, Layout, Tables


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the quantiser's levels lie, and how far from one a value may be; one entry a channel, in working dtype.

    The channel of the value at index i of flat memory is (i // inner) % len(step).
    """

    step: Tensor
    """(C,) finite, and above twice the smallest normal number."""
    inverse: Tensor
    """(C,) 1 / step."""
    offset: Tensor
    """(C,) in steps, at most 2**21 in magnitude; zero where sign_exact."""
    limit: Tensor
    """(C,) a distance that is no larger, computed in the working dtype, keeps the bound in exact arithmetic."""
    inner: int
    sign_exact: bool
    key: int | None = None
    """Of the dither, 32 bits; None: rounding is plain."""

    def noise(self, start: int, count: int) -> Tensor | None:
        """(count,) in working dtype: the dither d of the values from flat index `start`, multiples of 2**-24."""
        if self.key is None:
            return None
        index = torch.arange(start, start + count, device=self.step.device) & _UINT32
        return (mixed(index ^ self.key) >> 8).to(self.step.dtype) * 2.0**-24 - 0.5

    def of_values(self, start: int, count: int) -> tuple[Tensor, ...]:
        """Step, inverse, offset and limit of `count` values from flat index `start`, to broadcast to (count,)."""
        entries = self.step, self.inverse, self.offset, self.limit
        if len(self.step) == 1:
            return entries
        channel = channel_of_values(start, count, self.inner, len(self.step), self.step.device)
        return tuple(entry[channel] for entry in entries)


def channel_of_values(start: int, count: int, inner: int, num_channels: int, device: torch.device) -> Tensor:
    """(count,) int64: the channel of each of `count` values from flat index `start`."""
    return torch.arange(start, start + count, device=device).div_(inner, rounding_mode="floor").remainder_(num_channels)


def finite_range(x: Tensor, start: int, inner: int, low: Tensor, high: Tensor) -> None:
    """Widen low and high, (C,) float64 on the CPU, to the finite values of each channel among the (n,) values of x."""
    values, num_channels = x.double(), len(low)
    finite = values.isfinite()
    channel = channel_of_values(start, len(x), inner, num_channels, x.device)
    for extreme, start_value, reduce in ((low, torch.inf, "amin"), (high, -torch.inf, "amax")):
        found = torch.full((num_channels,), start_value, dtype=torch.float64, device=x.device)
        found.scatter_reduce_(0, channel, values.where(finite, start_value), reduce)
        better = torch.minimum if reduce == "amin" else torch.maximum
        extreme.copy_(better(extreme, found.cpu()))


GROUPS_A_TASK = 256
"""What encode_values and decode_values are given at once."""


def encode_values(
    x: Tensor, start: int, grid: Grid, layout: Layout, tables: Tables
) -> list[tuple[int, int, bytes | Tensor] | None]:
    """Encode the (n,) values of x, which begin with a group at index `start` of the whole memory.

    Gives for each group its numbers of escapes and of missed values, and its part: escapes, missed values, payload
    (`_encode_group`); bytes on the CPU, uint8 on a GPU. None where a quarter of a group's values are not enough for one
    of the numbers.
    """
    result: list[tuple[int, int, bytes | Tensor] | None] = []
    for index, group in enumerate(x.split(layout.group)):
        codes, missed = quantize(group, start + index * layout.group, grid)
        escapes, payload = _encode_group(codes, layout, tables)
        part = torch.cat([escapes, group[missed].view(torch.uint8), payload])
        held = part.numpy().tobytes() if x.device.type == "cpu" else part
        fits = max(len(escapes), len(missed)) <= len(group) // 4
        result.append((len(escapes), len(missed), held) if fits else None)
    return result


def decode_values(
    found: Sequence[tuple[bytes | Tensor, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables,
    out: Tensor,
) -> bool:  # fmt: skip
    """The inverse of encode_values: write the values of groups, each given by its part and its counts, into out (n,).

    False where the parts are not such. No part is shorter than its counts say.
    """
    for index, ((part, num_escapes, num_missed), group) in enumerate(zip(found, out.split(layout.group), strict=True)):
        data = torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else part
        sizes = num_escapes, num_missed * out.itemsize
        escapes, exact, payload = data.split((*sizes, len(data) - sum(sizes)))
        codes = torch.empty(len(group), dtype=torch.uint8, device=out.device)
        if not _decode_group(payload, escapes, layout, tables, codes):
            return False
        missed = dequantize(codes, start + index * layout.group, grid, group)
        if len(missed) != num_missed:
            return False
        group[missed] = exact.clone().view(out.dtype)
    return True


def quantize(x: Tensor, start: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes (n,) uint8 of the (n,) values of x, which begin at index `start` of the whole memory: q + 128.

    0 for q that does not keep the bound; the indices (int32) of these come second.
    """
    step, inverse, offset, limit = grid.of_values(start, len(x))
    values = x.to(step.dtype)
    noise = grid.noise(start, len(x))
    q = quantized(values, inverse, offset, grid.sign_exact, noise)
    fits = q.abs() <= 127
    q = torch.where(fits, q, 0)
    y = level(q, step, offset, grid.sign_exact, noise).to(x.dtype).to(step.dtype)
    good = fits & ((values - y).abs() <= limit)
    good &= (torch.sign(y) == torch.sign(values)) if grid.sign_exact else ((values != 0) | (y == 0))
    return torch.where(good, q + MIDDLE, 0).to(torch.uint8), (~good).nonzero()[:, 0].to(torch.int32)


def quantize_runs(x: Tensor, starts: np.ndarray, grid: Grid, codes: Tensor) -> None:
    """Fill codes (R, n) uint8 with those of the n values of x, the whole memory, from each of R starts on."""
    length = codes.shape[1]
    for start, of_run in zip(starts.tolist(), codes, strict=True):
        of_run.copy_(quantize(x[start : start + length], start, grid)[0])


def dequantize(codes: Tensor, start: int, grid: Grid, out: Tensor) -> Tensor:
    """Write the values of (n,) codes into out (n,); gives the indices (int32) of missed values, which out lacks."""
    step, _, offset, _ = grid.of_values(start, len(out))
    q = codes.to(step.dtype) - MIDDLE
    out.copy_(level(q, step, offset, grid.sign_exact, grid.noise(start, len(out))))
    return (codes == 0).nonzero()[:, 0].to(torch.int32)


def quantized(x: Tensor, inverse: Tensor, offset: Tensor, sign_exact: bool, noise: Tensor | None = None) -> Tensor:
    """The whole numbers q of values x, all in the working dtype; NaN and infinities stay such."""
    if noise is not None:
        k = torch.round((x.abs() * inverse if sign_exact else x * inverse - offset) + noise)
        return torch.where(x == 0, 0, torch.sign(x) * (k + 1) if sign_exact else k + (k >= 0).to(k.dtype))
    if sign_exact:
        magnitude = torch.ceil(x.abs() * inverse)
        # A product may underflow to 0; a non-zero must not become zero by that.
        return torch.sign(x) * torch.where(x == 0, magnitude, magnitude.clamp(min=1))
    return torch.round(x * inverse - offset)


def level(q: Tensor, step: Tensor, offset: Tensor, sign_exact: bool, noise: Tensor | None = None) -> Tensor:
    """The values that whole numbers q stand for, all in the working dtype."""
    if noise is not None:
        if sign_exact:
            y = torch.sign(q) * ((q.abs() - 1 - noise) * step).abs()
        else:
            y = (q - (q > 0).to(q.dtype) + offset - noise) * step
        return torch.where(q == 0, 0, y)
    if sign_exact:
        return torch.where(q == 0, 0, torch.sign(q) * ((2 * q.abs() - 1) * (step / 2)))
    return (q + offset) * step


def _encode_group(codes: Tensor, layout: Layout, tables: Tables) -> tuple[Tensor, Tensor]:
    """Escapes and payload, both uint8, of the codes of a group.

    A payload is the bands' last states (uint32), then the words (uint16). See `context_coder` for what happens to a
    state, and for the order of words and escapes.
    """
    count = len(codes)
    active = _active(count, layout, codes.device)
    band, num_bands = active.shape
    of_step = torch.nn.functional.pad(codes, (0, num_bands * band - count)).view(num_bands, band).t().long()
    context_of, slots = (torch.from_numpy(table.astype(np.int64)).to(codes.device) for table in tables.for_encoding)
    x = torch.full((num_bands,), START, dtype=torch.int64, device=codes.device)
    words, escapes = [], []
    for t in range(band - 1, -1, -1):
        prediction, context = _modelled(of_step, t, layout, tables)
        symbol = (of_step[t] - prediction - tables.shift) % 256
        symbol[(of_step[t] == 0) | (symbol >= tables.frequencies.shape[1])] = 0
        escapes.append(of_step[t][active[t] & (symbol == 0)])
        entry = slots[context_of[context] + symbol]
        frequency, first = entry >> 16, entry & 0xFFFF
        full = active[t] & (x >= frequency << 22)
        words.append(x[full] & 0xFFFF)
        x = torch.where(full, x >> 16, x)
        x = torch.where(active[t], (x // frequency << 10) + x % frequency + first, x)
    unsigned = torch.cat([x & 0xFFFF, x >> 16]).view(2, -1).t().reshape(-1)
    payload = torch.cat([unsigned, *words]).to(torch.uint16).view(torch.uint8)
    return torch.cat(escapes[::-1]).to(torch.uint8), payload


def _decode_group(payload: Tensor, escapes: Tensor, layout: Layout, tables: Tables, codes: Tensor) -> bool:
    """Fill codes (n,) uint8 from what _encode_group gave; False where it is not such."""
    active = _active(len(codes), layout, codes.device)
    band, num_bands = active.shape
    if len(payload) < 4 * num_bands or len(payload) % 2:
        return False
    halves = payload.clone().view(torch.uint16).to(torch.int64)
    x, words = halves[0 : 2 * num_bands : 2] | halves[1 : 2 * num_bands : 2] << 16, halves[2 * num_bands :]
    context_of, slots = (torch.from_numpy(table.astype(np.int64)).to(codes.device) for table in tables.for_decoding)
    used, taken = len(words), 0
    of_step = torch.zeros_like(active, dtype=torch.int64)
    for t in range(band):
        prediction, context = _modelled(of_step, t, layout, tables)
        entry = slots[context_of[context] + (x & (SLOTS - 1))]
        symbol = entry & 255
        of_step[t] = (symbol + prediction + tables.shift) % 256
        escaped = active[t] & (symbol == 0)
        count = int(escaped.sum())
        if count > len(escapes) - taken:
            return False
        of_step[t][escaped] = escapes[taken : taken + count].long()
        taken += count
        x = torch.where(active[t], (entry >> 22) * (x >> 10) + (entry >> 12 & 1023), x)
        short = x < START
        count = int(short.sum())
        if count > used:
            return False
        x[short] = x[short] << 16 | words[used - count : used]
        used -= count
    codes.copy_(of_step.t().reshape(-1)[: len(codes)])
    return used == 0 and taken == len(escapes) and bool((x == START).all())


def _modelled(of_step: Tensor, t: int, layout: Layout, tables: Tables) -> tuple[Tensor, Tensor]:
    """Predictions and contexts (bands,) of the codes of step t, of_step (steps, bands) int64, as `Tables` says."""
    has_left, has_up = t % layout.up >= layout.left, t % layout.restart >= layout.up
    middle = torch.full_like(of_step[0], MIDDLE)
    before = of_step[t - layout.left] if has_left else middle
    above = of_step[t - layout.up] if has_up else middle
    levels = [torch.from_numpy(levels).to(of_step) for levels in (tables.first_levels, tables.second_levels)]

    def level_of(values: Tensor, which: int) -> Tensor:
        return (values[:, None] >= levels[which]).sum(1)

    alone = torch.full_like(middle, ALONE)
    if not tables.predicts:
        first, second = level_of(before, 0) if has_left else alone, level_of(above, 1) if has_up else alone
        return middle, first << 4 | second
    if has_left and has_up:
        corner = of_step[t - layout.left - layout.up]
        prediction = torch.stack((before, above, before + above - corner)).median(0).values
        first = level_of(((before - corner).abs() + (above - corner).abs()).clamp(max=255), 0)
    else:
        prediction = before if has_left else above
        first = torch.full_like(middle, NO_UP if has_left else NO_LEFT if has_up else ALONE)
    return prediction, first << 4 | level_of(prediction, 1)


def _active(count: int, layout: Layout, device: torch.device) -> Tensor:
    """(steps, bands) bool: where the bands of `count` values have one."""
    num_bands = -(-count // layout.band)
    band = layout.band if num_bands > 1 else count
    return torch.arange(num_bands, device=device) * band + torch.arange(band, device=device)[:, None] < count


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack (n,) uint8 codes of 1, 2, 4 or 8 bits into ceil(n * bits / 8) bytes, the first code in the lowest bits."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of pack_bits: (count,) uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]


def shuffle_bytes(data: Tensor, itemsize: int) -> Tensor:
    """Bring the first bytes of all items together, then the second ones, ...: (n * itemsize,) uint8 to the same."""
    return data.view(len(data) // itemsize, itemsize).t().reshape(-1)


def unshuffle_bytes(data: Tensor, itemsize: int, out: Tensor) -> None:
    """The inverse of shuffle_bytes, written into out (n * itemsize,) uint8."""
    out.view(len(out) // itemsize, itemsize).copy_(data.view(itemsize, len(out) // itemsize).t())


def positive_bits(x: Tensor) -> Tensor:
    """One bit for each of (n,) values, eight a byte: not (x <= 0), so NaN counts as positive."""
    return pack_bits((~(x <= 0)).to(torch.uint8), 1)


def fill_positive(bits: Tensor, value: Tensor, out: Tensor) -> None:
    """Write value (0-d, dtype of out) into out (n,) where the bit is set, else 0."""
    out.copy_(torch.where(unpack_bits(bits, 1, len(out)) != 0, value, 0))


@dataclass(frozen=True, slots=True)
class Windows:
    """Geometry of a pooling in two dimensions: pairs for height and width, as in torch's max_pool2d."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    input_size: tuple[int, int]

    @property
    def row_distance(self) -> int:
        """Between two rows of a window, in positions of the input."""
        return self.dilation[0] * self.input_size[1]

    def corners(self, shape: torch.Size, device: torch.device) -> Tensor:
        """(oh, ow) int64: index of each window's first position in the input's plane, as if padding were part of it."""
        rows, columns = (
            torch.arange(shape[axis - 2], device=device) * self.stride[axis] - self.padding[axis] for axis in (0, 1)
        )
        return rows[:, None] * self.input_size[1] + columns

    def offsets(self, num_codes: int) -> Tensor:
        """(num_codes,) int64: how far behind the corner the position of each code is."""
        code = torch.arange(num_codes)
        row = code.div(self.kernel_size[1], rounding_mode="floor")
        return row * self.row_distance + (code - row * self.kernel_size[1]) * self.dilation[1]


def window_codes(indices: Tensor, windows: Windows, codes: Tensor) -> bool:
    """Positions within the window, row by row, of int64 indices (n, oh, ow) into the plane of the input.

    Written into codes (n, oh, ow) uint8. False where an index is at the distance of no position from its corner.
    """
    distance = indices - windows.corners(indices.shape, indices.device)
    row = distance.div(windows.row_distance, rounding_mode="floor")
    rest = distance - row * windows.row_distance
    column = rest.div(windows.dilation[1], rounding_mode="floor")
    inside = (row >= 0) & (row < windows.kernel_size[0]) & (column < windows.kernel_size[1])
    codes.copy_(row * windows.kernel_size[1] + column)
    return bool((inside & (column * windows.dilation[1] == rest)).all())


def window_indices(codes: Tensor, windows: Windows, out: Tensor) -> None:
    """The inverse of window_codes, written into out (n, oh, ow) int64."""
    offsets = windows.offsets(256).to(codes.device)
    torch.add(windows.corners(codes.shape, codes.device), offsets[codes.int()], out=out)


GROUP_VALUES = 256
"""Neighbours in memory that share one minimum and one step (`group_quantized`)."""
_FLOAT32_MAX = torch.finfo(torch.float32).max
_UINT32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mixed(h: Tensor) -> Tensor:
    """int64 numbers in 0 .. 2**32 - 1, well mixed to others in this range; the finaliser of MurmurHash3 (Appleby)."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _UINT32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _UINT32
    return h ^ (h >> 16)


def encode_groups(x: Tensor, first_group: int, bits: int, seed: int, sign_exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round the (n,) values of x, float32 or float64, at random to 2**bits levels of their group.

    x begins at group `first_group` of the whole tensor; its last group may be short. In float64, over the group's
    values v that are finite and not beyond the range of float32:

        plain        low = min v       step = (max v - low) / (2**bits - 1)      q = floor((v - low) / step + u)
        sign exact   the same with |v| of those not 0, one level fewer, and q one higher; q = 0 for 0

    q = 0 for all others. step is rounded up to bfloat16, at least 2**-126 where it is not 0, so that low + q * step
    reaches the largest. u is uniform in [0, 1), a hash of the seed, of the index and of all values of the group: the
    same tensor gives the same codes, and another one other noise.

    Gives low (G,) in the dtype of x, step (G,) bfloat16 and the packed codes.
    """
    count, num_groups = len(x), -(-len(x) // GROUP_VALUES)
    values = torch.nn.functional.pad(x, (0, -count % GROUP_VALUES)).view(num_groups, GROUP_VALUES).double()
    place = torch.arange(GROUP_VALUES, device=x.device)
    group = torch.arange(num_groups, device=x.device)[:, None]
    used = (group * GROUP_VALUES + place < count) & (values.abs() <= _FLOAT32_MAX)
    checksum = torch.where(used, values.float().view(torch.int32), 0).sum(1, keepdim=True) & _UINT32
    key = mixed(checksum ^ mixed(((first_group + group) & _UINT32) ^ mixed(torch.full_like(group, seed))))
    noise = mixed((key + (place + 1) * _GOLDEN) & _UINT32).double() / 2.0**32

    if sign_exact:
        values = values.abs()
        used &= values > 0
    num_steps = (1 << bits) - 1 - int(sign_exact)
    low, high = (values.where(used, extreme) for extreme in (torch.inf, -torch.inf))
    low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
    low, high = low.where(low <= high, 0), high.where(low <= high, 0)
    exact_step = (high - low) / num_steps
    rounded = exact_step.clamp(min=2.0**-126).where(exact_step > 0, 0)
    step32 = rounded.float().view(torch.int32) + (rounded.float().double() < rounded)
    step = ((step32 + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    divisor = step.double().where(step > 0, 1)
    q = torch.floor((values - low) / divisor + noise).clamp(max=num_steps) + int(sign_exact)
    codes = torch.where(used, q, 0).to(torch.uint8).view(-1)[:count]
    return low[:, 0].to(x.dtype), step[:, 0], pack_bits(codes, bits)


def decode_groups(
    packed: Tensor, low: Tensor, step: Tensor, bits: int, sign_exact: bool, largest: float, out: Tensor
) -> None:
    """Write low + q * step, computed in float64 and not beyond +-largest, into out (n,), float32 or float64.

    With sign_exact, magnitudes: 0 for code 0, else low + (q - 1) * step.
    """
    group = torch.arange(len(out), device=out.device) // GROUP_VALUES
    codes = unpack_bits(packed, bits, len(out))
    y = low.double()[group] + (codes.double() - int(sign_exact)) * step.double()[group]
    y = y.clamp(-largest, largest)
    out.copy_(torch.where(codes == 0, 0, y) if sign_exact else y)


# ITU-T T.81 table K.1, for luminance: rows are vertical frequencies.
_JPEG_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def dct_steps(quality: int, device: torch.device) -> Tensor:
    """(8, 8) float32 whole numbers from 8 to 255: the table of a JPEG quality from 1 to 100, none below 8."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = torch.tensor(_JPEG_STEPS, device=device) * percent
    return ((table + 50) // 100).clamp(8, 255).float()


def _cosines(device: torch.device) -> Tensor:
    """(8, 8) float32, the orthonormal DCT-II: row u holds cos((2 i + 1) u pi / 16) / 2, and sqrt(1/8) for u = 0."""
    rows = [
        [math.sqrt(1 / 8) if u == 0 else math.cos((2 * i + 1) * u * math.pi / 16) / 2 for i in range(8)]
        for u in range(8)
    ]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _transformed(blocks: Tensor, matrix: Tensor) -> Tensor:
    """matrix @ blocks over dimension 0, (8, 8, n); added up in a fixed order, as a matrix product need not be."""
    total = matrix[:, 0, None, None] * blocks[0]
    for i in range(1, 8):
        total = total + matrix[:, i, None, None] * blocks[i]
    return total


def encode_blocks(maps: Tensor, steps: Tensor) -> Tensor:
    """Quantised DCT coefficients of (n, h, w) float32 maps within -127 .. 127, as int8 (64 * blocks,).

    The coefficients of each frequency lie together, row by row of the 8x8 table; maps are padded with their last row
    and column to multiples of 8.
    """
    height, width = maps.shape[1:]
    padded = torch.nn.functional.pad(maps, (0, -width % 8, 0, -height % 8), mode="replicate")
    rows, columns = padded.shape[1] // 8, padded.shape[2] // 8
    blocks = padded.view(-1, rows, 8, columns, 8).permute(2, 4, 0, 1, 3).reshape(8, 8, -1)
    cosines = _cosines(maps.device)
    vertical = _transformed(blocks, cosines)
    coefficients = _transformed(vertical.transpose(0, 1), cosines).transpose(0, 1)
    return torch.round(coefficients / steps[:, :, None]).clamp(-127, 127).to(torch.int8).reshape(-1)


def decode_blocks(codes: Tensor, steps: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of encode_blocks for maps of shape (n, h, w), but for what rounding lost."""
    rows, columns = -(-shape[1] // 8), -(-shape[2] // 8)
    coefficients = codes.view(8, 8, -1).float() * steps[:, :, None]
    cosines = _cosines(codes.device).t()
    vertical = _transformed(coefficients, cosines)
    blocks = _transformed(vertical.transpose(0, 1), cosines).transpose(0, 1)
    maps = blocks.view(8, 8, -1, rows, columns).permute(2, 3, 0, 4, 1).reshape(-1, rows * 8, columns * 8)
    return maps[:, : shape[1], : shape[2]]

"""Every stage of the codecs in plain PyTorch: the definition, on any device.

The twin in `cpu.py` gives the same codes and the same decoded values, bit for bit; the tests hold it against this
file. What is written here is therefore chosen to be exact everywhere: division, rint, ceil and multiplication are
correctly rounded IEEE operations, nothing is fused, and each result is rounded once. Speed is not a goal.

The quantiser has step s = 2 * bound, rounded down to the working dtype (float64 for float64, else float32), and for
each channel an integer offset o. All arithmetic is in the working dtype:

    plain (mid-tread)        q = rint(x / s) - o                     y = (q + o) * s
    sign exact (mid-rise     q = sign(x) * max(ceil(|x| / s), 1)     y = sign(q) * ((2 |q| - 1) * (s / 2))
    with a zero of its own)  q = 0 where x = 0                       y = 0 where q = 0

q must lie in -2**(b-1) .. 2**(b-1) - 1 for codes of b bits, and |x - y| <= bound must hold in float64 for the y that
the decoder returns, rounded to the tensor's dtype. What misses (so also NaN and infinities) is an outlier: its index
and its bits are kept. The stored code is q + 2**(b-1).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the quantiser's levels lie, one entry a channel.

    The channel of the value at index i of flat memory is (i // inner) % len(step).
    """

    step: Tensor
    """(C,) in the working dtype; finite, and above twice the smallest normal number."""
    offset: Tensor
    """(C,) whole numbers in the working dtype, at most 2**21 in magnitude; zero where sign_exact."""
    inner: int
    sign_exact: bool

    def of_values(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Step and offset for each of `count` values from flat index `start`, as tensors that broadcast to (count,)."""
        if len(self.step) == 1:
            return self.step, self.offset
        channel = channel_of_values(start, count, self.inner, len(self.step), self.step.device)
        return self.step[channel], self.offset[channel]


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


def quantize(x: Tensor, step: Tensor, offset: Tensor, sign_exact: bool, bits: int) -> tuple[Tensor, Tensor]:
    """Codes q (n,) in the working dtype, 0 where they do not fit, and a mask of those that fit."""
    if sign_exact:
        magnitude = torch.ceil(x.abs() / step)
        # A quotient may underflow to 0; a non-zero must not become zero by that.
        q = torch.sign(x) * torch.where(x == 0, magnitude, magnitude.clamp(min=1))
    else:
        q = torch.round(x / step) - offset
    limit = 1 << (bits - 1)
    fits = (q >= -limit) & (q < limit)
    return torch.where(fits, q, 0), fits


def dequantize(q: Tensor, step: Tensor, offset: Tensor, sign_exact: bool) -> Tensor:
    """Values y (n,) in the working dtype for codes q (n,)."""
    if sign_exact:
        return torch.where(q == 0, 0, torch.sign(q) * ((2 * q.abs() - 1) * (step / 2)))
    return (q + offset) * step


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


def encode_chunk(
    x: Tensor, start: int, grid: Grid, bound: Tensor, bits: int, max_outliers: int
) -> tuple[Tensor, int] | None:
    """Quantise, check and pack the (n,) values of x, which begin at index `start` of the whole tensor's memory.

    `bound` is (C,) float64. Gives a uint8 blob, which holds the outliers' indices (int32), their values and the packed
    codes, and the number of outliers; None where there are more than max_outliers.
    """
    step, offset = grid.of_values(start, len(x))
    if len(bound) > 1:
        bound = bound[channel_of_values(start, len(x), grid.inner, len(bound), bound.device)]
    q, fits = quantize(x.to(step.dtype), step, offset, grid.sign_exact, bits)
    y = dequantize(q, step, offset, grid.sign_exact).to(x.dtype)
    outliers = (~(fits & ((x.double() - y.double()).abs() <= bound))).nonzero()[:, 0]
    if len(outliers) > max_outliers:
        return None
    codes = (q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    indices, values = outliers.to(torch.int32), x[outliers]
    return torch.cat([indices.view(torch.uint8), values.view(torch.uint8), pack_bits(codes, bits)]), len(outliers)


def decode_chunk(blob: Tensor, num_outliers: int, start: int, grid: Grid, bits: int, out: Tensor) -> None:
    """Write the values of a blob of encode_chunk into out (n,), which begins at index `start` of the whole memory."""
    step, offset = grid.of_values(start, len(out))
    values_at, codes_at = 4 * num_outliers, (4 + out.itemsize) * num_outliers
    q = unpack_bits(blob[codes_at:], bits, len(out)).to(step.dtype) - (1 << (bits - 1))
    out.copy_(dequantize(q, step, offset, grid.sign_exact))
    # Views of another dtype must start at a multiple of their item size: copy the two small slices first.
    indices = blob[:values_at].clone().view(torch.int32).long()
    out[indices] = blob[values_at:codes_at].clone().view(out.dtype)


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

    def corners(self, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row (oh, 1) and column (ow,) of each window's first position in the input; negative inside the padding."""
        rows, columns = (
            torch.arange(shape[axis - 2], device=device) * self.stride[axis] - self.padding[axis] for axis in (0, 1)
        )
        return rows[:, None], columns


def window_codes(indices: Tensor, windows: Windows, codes: Tensor) -> bool:
    """Positions within the window, row by row, of int64 indices (n, oh, ow) into the plane of the input.

    Written into codes (n, oh, ow) uint8. False where an index is not a position of its own window.
    """
    height, width = windows.input_size
    rows, columns = windows.corners(indices.shape, indices.device)
    index_row = indices.div(width, rounding_mode="floor")
    along = []
    for axis, distance in enumerate((index_row - rows, indices - index_row * width - columns)):
        step = distance.div(windows.dilation[axis], rounding_mode="floor")
        inside = (step >= 0) & (step < windows.kernel_size[axis]) & (step * windows.dilation[axis] == distance)
        if not bool(inside.all()):
            return False
        along.append(step)
    codes.copy_(along[0] * windows.kernel_size[1] + along[1])
    return bool((indices < height * width).all())


def window_indices(codes: Tensor, windows: Windows) -> Tensor:
    """The inverse of window_codes: (n, oh, ow) int64."""
    rows, columns = windows.corners(codes.shape, codes.device)
    code = codes.long()
    code_row = code.div(windows.kernel_size[1], rounding_mode="floor")
    row = rows + code_row * windows.dilation[0]
    return row * windows.input_size[1] + columns + (code - code_row * windows.kernel_size[1]) * windows.dilation[1]


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

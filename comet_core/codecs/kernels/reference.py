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

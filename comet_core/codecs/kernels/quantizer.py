"""The quantiser for the CPU: twins of `reference.quantize` and `reference.dequantize`, equal bit for bit.

`context_coder.py` calls them for the groups of a task at once.

One pass over the values quantises and compares what the decoder will return with the original, block by block in the
first-level cache. Within a block the loops have no branch, so that they become vector instructions; missed values are
rare, and found in a second walk over the blocks that have some. numba knows no 16-bit floats: a float16 comes as uint16
and a bfloat16 as int16, is widened to float32 on the way in, and rounded in the check as on the way out.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import overload
from torch import Tensor

from comet_core.codecs.kernels.compiled import compiled
from comet_core.codecs.kernels.cpu import mixed
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.vectors import intrinsic

_BLOCK = 256
_NUMBA_DTYPES = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}

_FLOAT, _WORD, _HALF_WORD = ir.FloatType(), ir.IntType(32), ir.IntType(16)


@intrinsic
def _float16_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, rounded to float16 (nearest, ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _HALF_WORD)

    return types.uint16(types.float32), generate


@intrinsic
def _from_float16(typing_context: Any, bits: Any) -> Any:
    """The float32 equal to a float16, given as its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def _bfloat16_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 that is no NaN, rounded to bfloat16 (nearest, ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _WORD)
        odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.add(bits, builder.add(odd, _WORD(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, _WORD(16)), _HALF_WORD)

    return types.int16(types.float32), generate


@intrinsic
def _from_bfloat16(typing_context: Any, bits: Any) -> Any:
    """The float32 equal to a bfloat16, given as its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), _WORD(16)), _FLOAT)

    return types.float32(types.int16), generate


# numba compares the signatures of these with those of their overloads, annotations included: hence none.
def _of(entry, j):  # type: ignore[no-untyped-def]
    """The entry for a block's value j, from an array of them or one number for all."""


def _value(x, j):  # type: ignore[no-untyped-def]
    """Value j of a block in the working dtype."""


def _bits(y, x):  # type: ignore[no-untyped-def]
    """A number of the working dtype as an element of x, rounded."""


def _rounded(y, x):  # type: ignore[no-untyped-def]
    """A number of the working dtype, rounded as by storing it in x."""


def _rounded_not_to_zero(y, x):  # type: ignore[no-untyped-def]
    """The same, but infinity where a number that is not 0 would become 0 and so lose its sign."""


@overload(_of)
def _overload_of(entry, j):  # type: ignore[no-untyped-def]
    return (lambda entry, j: entry[j]) if isinstance(entry, types.Array) else (lambda entry, j: entry)


@overload(_value)
def _overload_value(x, j):  # type: ignore[no-untyped-def]
    if x.dtype == types.uint16:
        return lambda x, j: _from_float16(x[j])
    if x.dtype == types.int16:
        return lambda x, j: _from_bfloat16(x[j])
    return lambda x, j: x[j]


@overload(_bits)
def _overload_bits(y, x):  # type: ignore[no-untyped-def]
    if x.dtype == types.uint16:
        return lambda y, x: _float16_bits(y)
    if x.dtype == types.int16:
        return lambda y, x: _bfloat16_bits(y)
    return lambda y, x: y


@overload(_rounded)
def _overload_rounded(y, x):  # type: ignore[no-untyped-def]
    if x.dtype == types.uint16:
        return lambda y, x: _from_float16(_float16_bits(y))
    if x.dtype == types.int16:
        return lambda y, x: _from_bfloat16(_bfloat16_bits(y))
    return lambda y, x: y


@overload(_rounded_not_to_zero)
def _overload_rounded_not_to_zero(y, x):  # type: ignore[no-untyped-def]
    if isinstance(x.dtype, types.Float):
        return lambda y, x: y

    def implement(y, x):  # type: ignore[no-untyped-def]
        rounded = _rounded(y, x)
        return rounded if rounded != 0 else np.float32(np.inf)

    return implement


@compiled
def _fill_block(of_channel: np.ndarray, start: int, count: int, inner: int, block: np.ndarray) -> None:
    """block[j] = of_channel[channel of flat index start + j], a run of one channel or of many after the other."""
    num_channels = len(of_channel)
    channel = start // inner % num_channels
    run = inner - start % inner
    at = 0
    while at < count:
        if inner == 1:
            run = min(num_channels - channel, count - at)
            block[at : at + run] = of_channel[channel : channel + run]
            channel = 0
        else:
            block[at : at + min(run, count - at)] = of_channel[channel]
            channel = channel + 1 if channel + 1 < num_channels else 0
        at += run
        run = inner


@compiled
def _one_channel(start: int, count: int, inner: int, num_channels: int) -> int:
    """The channel that all of a block's values have, or -1."""
    if num_channels == 1:
        return 0
    first = start // inner
    return first % num_channels if first == (start + count - 1) // inner else -1


@compiled
def _quantize_block(
    x: np.ndarray, step: Any, inverse: Any, offset: Any, limit: Any, sign_exact: bool, work: Any, wide: np.ndarray
) -> None:
    """wide[j] = q + 128 where q keeps the bound, else 0. Numbers that fill an int32 become vectors most easily."""
    zero, one, two, half, most = work(0), work(1), work(2), work(0.5), work(127)
    if sign_exact:
        for j in range(len(x)):
            value = _value(x, j)
            size = abs(value)
            q = np.ceil(size * _of(inverse, j))
            q = one if (q < one and size > zero) else q
            q = q if q <= most else zero  # also for NaN, which compares as false
            y = _rounded_not_to_zero((two * q - one) * (_of(step, j) * half), x)
            y = y if q > zero else zero
            code = np.int32(q)
            code = -code if value < zero else code
            wide[j] = code + 128 if abs(size - y) <= _of(limit, j) else 0
    else:
        for j in range(len(x)):
            value = _value(x, j)
            q = np.rint(value * _of(inverse, j) - _of(offset, j))
            q = q if abs(q) <= most else zero
            y = _rounded((q + _of(offset, j)) * _of(step, j), x)
            most_error = _of(limit, j) if value != zero else zero
            wide[j] = np.int32(q) + 128 if abs(value - y) <= most_error else 0


@compiled
def _fill_noise(key: int, start: int, noise: np.ndarray) -> None:
    """noise[j] = the dither of flat index start + j."""
    work = noise.dtype.type
    first, mask = np.uint32(start), np.uint32(key)
    for j in range(len(noise)):
        h = mixed(np.uint32(np.uint32(first + np.uint32(j)) ^ mask))
        noise[j] = work(np.int32(h >> np.uint32(8))) * work(2.0**-24) - work(0.5)


@compiled
def _quantize_dithered(
    x: np.ndarray, step: np.ndarray, inverse: np.ndarray, offset: np.ndarray, limit: np.ndarray, noise: np.ndarray,
    sign_exact: bool, wide: np.ndarray,
) -> None:  # fmt: skip
    """`_quantize_block` with dither."""
    work = step.dtype.type
    zero, one, most = work(0), work(1), work(127)
    for j in range(len(x)):
        value = _value(x, j)
        size = abs(value) if sign_exact else value
        k = np.rint((size * inverse[j] if sign_exact else size * inverse[j] - offset[j]) + noise[j])
        q = k + one if sign_exact else k + (one if k >= zero else zero)
        q = q if abs(q) <= most else zero
        place = (q - one if sign_exact else q - (one if q > zero else zero) + offset[j]) - noise[j]
        place = abs(place * step[j]) if sign_exact else place * step[j]
        y = _rounded_not_to_zero(place, x) if sign_exact else _rounded(place, x)
        # What is missed has q = 0, and so has zero.
        good = q != zero and abs(size - y) <= limit[j] and (y > zero or not sign_exact)
        code = np.int32(-q if sign_exact and value < zero else q) + 128
        wide[j] = 128 if value == zero else code if good else 0


@compiled
def _quantize(
    x: np.ndarray, start: int, step: np.ndarray, inverse: np.ndarray, offset: np.ndarray, limit: np.ndarray, inner: int,
    sign_exact: bool, key: int, codes: np.ndarray, missed: np.ndarray,
) -> int:  # fmt: skip
    """Fill codes and missed (indices into x); the number of the latter, or -1 where there is no room."""
    work = step.dtype.type
    steps, inverses = np.empty(_BLOCK, step.dtype), np.empty(_BLOCK, step.dtype)
    offsets, limits = np.empty(_BLOCK, step.dtype), np.empty(_BLOCK, step.dtype)
    noise = np.empty(_BLOCK, step.dtype)
    wide = np.empty(_BLOCK, np.int32)
    num_missed = 0
    for first in range(0, len(x), _BLOCK):
        values = x[first : first + _BLOCK]
        count = len(values)
        channel = -1 if key >= 0 else _one_channel(start + first, count, inner, len(step))
        if channel >= 0:
            _quantize_block(
                values, step[channel], inverse[channel], offset[channel], limit[channel], sign_exact, work, wide
            )
        else:
            _fill_block(step, start + first, count, inner, steps)
            _fill_block(inverse, start + first, count, inner, inverses)
            _fill_block(offset, start + first, count, inner, offsets)
            _fill_block(limit, start + first, count, inner, limits)
            if key >= 0:
                _fill_noise(key, start + first, noise)
                _quantize_dithered(values, steps, inverses, offsets, limits, noise, sign_exact, wide)
            else:
                _quantize_block(values, steps, inverses, offsets, limits, sign_exact, work, wide)
        of_block = codes[first : first + count]
        smallest = np.uint8(255)
        for j in range(count):
            code = np.uint8(wide[j])
            of_block[j] = code
            smallest = min(smallest, code)
        if smallest == 0:
            for j in range(count):
                if of_block[j] == 0:
                    if num_missed == len(missed):
                        return -1
                    missed[num_missed] = first + j
                    num_missed += 1
    return num_missed


@compiled
def _level_block(wide: np.ndarray, step: Any, offset: Any, sign_exact: bool, work: Any, out: np.ndarray) -> None:
    """out[j] = the value that q = wide[j] - 128 stands for."""
    zero, one, two, half = work(0), work(1), work(2), work(0.5)
    if sign_exact:
        for j in range(len(out)):
            q = work(np.int32(wide[j]) - 128)
            place = (two * abs(q) - one) * (_of(step, j) * half)
            place = zero if q == zero else place
            out[j] = _bits(-place if q < zero else place, out)
    else:
        for j in range(len(out)):
            out[j] = _bits((work(np.int32(wide[j]) - 128) + _of(offset, j)) * _of(step, j), out)


@compiled
def _level_dithered(
    wide: np.ndarray, step: np.ndarray, offset: np.ndarray, noise: np.ndarray, sign_exact: bool, out: np.ndarray
) -> None:
    """`_level_block` with dither."""
    work = step.dtype.type
    zero, one = work(0), work(1)
    for j in range(len(out)):
        q = work(np.int32(wide[j]) - 128)
        place = (abs(q) - one if sign_exact else q - (one if q > zero else zero) + offset[j]) - noise[j]
        place = abs(place * step[j]) if sign_exact else place * step[j]
        place = -place if sign_exact and q < zero else place
        out[j] = _bits(zero if q == zero else place, out)


@compiled
def _dequantize(
    codes: np.ndarray, start: int, step: np.ndarray, offset: np.ndarray, inner: int, sign_exact: bool, key: int,
    missed: np.ndarray, out: np.ndarray,
) -> int:  # fmt: skip
    """Fill out and missed (indices into out); the number of the latter, -1 where there is no room."""
    work = step.dtype.type
    steps, offsets = np.empty(_BLOCK, step.dtype), np.empty(_BLOCK, step.dtype)
    noise = np.empty(_BLOCK, step.dtype)
    wide = np.empty(_BLOCK, np.uint8)  # which no compiler takes for a part of out
    num_missed = 0
    for first in range(0, len(out), _BLOCK):
        values = out[first : first + _BLOCK]
        count = len(values)
        of_block = codes[first : first + count]
        smallest = np.uint8(255)
        for j in range(count):
            smallest = min(smallest, of_block[j])
            wide[j] = of_block[j]
        if smallest == 0:
            for j in range(count):
                if of_block[j] == 0:
                    if num_missed == len(missed):
                        return -1
                    missed[num_missed] = first + j
                    num_missed += 1
        channel = -1 if key >= 0 else _one_channel(start + first, count, inner, len(step))
        if channel >= 0:
            _level_block(wide, step[channel], offset[channel], sign_exact, work, values)
        else:
            _fill_block(step, start + first, count, inner, steps)
            _fill_block(offset, start + first, count, inner, offsets)
            if key >= 0:
                _fill_noise(key, start + first, noise)
                _level_dithered(wide, steps, offsets, noise, sign_exact, values)
            else:
                _level_block(wide, steps, offsets, sign_exact, work, values)
    return num_missed


@compiled
def quantize_groups(
    x: np.ndarray, start: int, group: int, step: np.ndarray, inverse: np.ndarray, offset: np.ndarray, limit: np.ndarray,
    inner: int, sign_exact: bool, key: int, codes: np.ndarray, missed: np.ndarray, num_missed: np.ndarray,
) -> None:  # fmt: skip
    """Quantise group after group of x; a row of missed values (indices into the group) for each, and their numbers.

    A number of -1 says that they are more than a quarter of the group.
    """
    for index in range(len(num_missed)):
        first = index * group
        values = x[first : first + group]
        num_missed[index] = _quantize(
            values, start + first, step, inverse, offset, limit, inner, sign_exact, key, codes[first : first + group],
            missed[index, : len(values) // 4],
        )  # fmt: skip


@compiled
def dequantize_groups(
    codes: np.ndarray, start: int, group: int, step: np.ndarray, offset: np.ndarray, inner: int, sign_exact: bool,
    key: int, num_missed: np.ndarray, missed: np.ndarray, out: np.ndarray,
) -> bool:  # fmt: skip
    """The inverse of quantize_groups, missed values of all groups in a row; False where their numbers are others.

    out lacks the missed values, of which `missed` (indices into the group) tells the places.
    """
    first_missed = 0
    for index in range(len(num_missed)):
        first = index * group
        found = _dequantize(
            codes[first : first + group], start + first, step, offset, inner, sign_exact, key,
            missed[first_missed : first_missed + num_missed[index]], out[first : first + group],
        )  # fmt: skip
        if found != num_missed[index]:
            return False
        first_missed += num_missed[index]
    return True


@compiled
def _quantize_runs(
    x: np.ndarray, starts: np.ndarray, step: np.ndarray, inverse: np.ndarray, offset: np.ndarray, limit: np.ndarray,
    inner: int, sign_exact: bool, key: int, codes: np.ndarray,
) -> None:  # fmt: skip
    length = codes.shape[1]
    missed = np.empty(length, np.int32)
    for run in range(len(starts)):
        start = starts[run]
        _quantize(
            x[start : start + length], start, step, inverse, offset, limit, inner, sign_exact, key, codes[run], missed
        )


def quantize_runs(x: Tensor, starts: np.ndarray, grid: Grid, codes: Tensor) -> None:
    """Twin of reference.quantize_runs."""
    entries = (entry.numpy() for entry in (grid.step, grid.inverse, grid.offset, grid.limit))
    _quantize_runs(array_of(x), starts, *entries, grid.inner, grid.sign_exact, key_of(grid), codes.numpy())


def key_of(grid: Grid) -> int:
    """The key of the dither as the kernels take it, -1 for none."""
    return -1 if grid.key is None else grid.key


def array_of(x: Tensor) -> np.ndarray:
    """The memory of a flat tensor of floats as the kernels take it."""
    return np.asarray(x.view(_NUMBA_DTYPES.get(x.dtype, x.dtype)).numpy())

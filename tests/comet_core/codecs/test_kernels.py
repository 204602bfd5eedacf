"""The compiled twins give the reference's bits; packed codes are what the golden files say."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.kernels import chunks, cpu, error_bounded_of, reference, twin_of
from comet_core.codecs.kernels.contexts import sample_starts, tables_of
from comet_core.codecs.kernels.reference import Grid, Windows
from comet_core.codecs.kernels.tables import SLOTS, Layout, Tables, layout_of

GOLDEN = Path(__file__).parent / "golden"
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
POOLING = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "input_size": (4, 4)}


def twin():
    found = twin_of(torch.zeros(1))
    if found is None:
        pytest.skip("missing tool: numba, pip install numba")
    return found


def inputs(dtype, count):
    generator = torch.Generator().manual_seed(count)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, -0.0, math.nan, math.inf, -math.inf, info.max, -info.max, info.tiny, -info.tiny / 8, 1e-3, 3.5, -3.75]
    )
    some = normal.clone()
    some[::17] = special.double()[torch.arange(len(some[::17])) % len(special)]
    halves = torch.randint(-40, 40, (count,), generator=generator).double() / 4  # ties and borders of cells
    yield from (tensor.to(dtype) for tensor in (normal, some, halves, normal * 100, normal.relu(), normal * 1e-30))


def grids(dtype):
    generator = torch.Generator().manual_seed(1)
    work = torch.promote_types(dtype, torch.float32)
    for num_channels, inner in ((1, 1 << 20), (5, 1), (300, 1), (7, 3), (3, 100), (2, 1000)):
        for scale in (0.5, 0.013, 1e-300 if dtype == torch.float64 else 1e-30):
            step = ((torch.rand(num_channels, generator=generator, dtype=torch.float64) + 0.5) * scale).to(work)
            offset = (torch.randint(-36, 36, (num_channels,), generator=generator) / 4).to(work)
            for limit in (step / 2, step * 0.3):  # the second one is missed by some values in the range of the codes
                yield Grid(step, 1 / step, offset, limit, inner, False)
                yield Grid(step, 1 / step, torch.zeros_like(offset), limit, inner, True)
                yield Grid(step, 1 / step, offset, limit, inner, False, 0xC0FFEE11)
                yield Grid(step, 1 / step, torch.zeros_like(offset), limit, inner, True, 7)


def flat_tables(low, num_symbols, predicts=False):
    """Tables for symbols of about the same cost, with a few contexts."""
    frequencies = np.full((3, num_symbols), SLOTS // num_symbols, np.uint16)
    frequencies[range(3), [0, num_symbols // 2, num_symbols - 1]] += SLOTS - frequencies.sum(1, dtype=np.uint16)
    levels = np.array([1, 9], np.uint8), np.array([100, 128, 140], np.uint8)
    return Tables(predicts, low, *levels, (np.arange(256) % 3).astype(np.uint8), frequencies)


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 255, 777])
def test_the_twin_makes_the_same_parts_and_values_as_the_reference(dtype, count):
    twin()
    layout = Layout(1, 5, 20, 15)  # 480 values a group
    for number, grid in enumerate(grids(dtype)):
        for x in inputs(dtype, count):
            for low, num_symbols in ((-127, 255), (-3, 8), (0, 5), (100, 2))[number % 2 :: 2]:
                tables = flat_tables(low, num_symbols, predicts=number % 3 == 0)
                found, expected = (
                    stages.encode_values(x, 480 * 7, grid, layout, tables)
                    for stages in (error_bounded_of(x), reference)
                )
                assert found == expected and len(found) == -(-count // 480)
                if None in found:
                    continue
                ys = [torch.empty_like(x), torch.empty_like(x)]
                for stages, y in zip((error_bounded_of(x), reference), ys, strict=True):
                    given = [(part, *numbers) for *numbers, part in found]
                    assert stages.decode_values(given, 480 * 7, grid, layout, tables, y)
                assert same(*ys)
                finite = x.isfinite()
                assert same(x[~finite], ys[0][~finite])
                work = grid.step.dtype
                _, _, _, limit = grid.of_values(480 * 7, count)
                assert bool(((x.to(work) - ys[0].to(work)).abs() <= limit)[finite].all())


def test_escapes_that_do_not_fit_their_codes_are_refused():
    x = torch.randn(480, generator=torch.Generator().manual_seed(0))
    one = torch.ones(1)
    grid = Grid(one / 4, one * 4, one * 0, one / 8, 1 << 20, False)
    layout, tables = Layout(1, 5, 20, 15), flat_tables(-7, 16)
    ((num_escapes, num_missed, part),) = error_bounded_of(x).encode_values(x, 0, grid, layout, tables)
    assert num_escapes > 2 and num_missed == 0
    for stages in (error_bounded_of(x), reference):
        for spoiled in (
            (part[1:], num_escapes - 1, 0),
            (part[:1] + part, num_escapes + 1, 0),
            (part[1:2] + part[1:], num_escapes, 1),
            (b"\0" + part[1:], num_escapes, 0),  # says of a value that it is kept beside the codes, where none is
            (part[:-2], num_escapes, 0),
            (part + part[-2:], num_escapes, 0),
            (part[:-1], num_escapes, 0),
            (part[: num_escapes + 3], num_escapes, 0),
        ):
            assert not stages.decode_values([spoiled], 0, grid, layout, tables, torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_sixteen_bit_float_is_widened_and_rounded_as_torch_does(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    one, layout = torch.ones(1), Layout(1, 256, 256, 1024)
    for scale in (1.0, 2.0**-20, 3e4):
        grid = Grid(one * scale, one / scale, one * 0, one * scale, 1 << 20, False)
        results = []
        for stages in (reference, error_bounded_of(x)):
            codes = torch.empty((2, len(x) // 2), dtype=torch.uint8)
            stages.quantize_runs(x, np.array([0, len(x) // 2]), grid, codes)
            results.append(codes)
        assert torch.equal(*results)
        # Values in a range that has codes, in whole groups, also come back alike.
        few = x[(x.abs() < 100 * scale) & x.isfinite()]
        found = reference.encode_values(few, 0, grid, layout, flat_tables(-127, 255))
        if None not in found:
            ys = [torch.empty_like(few), torch.empty_like(few)]
            for stages, y in zip((reference, error_bounded_of(x)), ys, strict=True):
                given = [(part, *numbers) for *numbers, part in found]
                assert stages.decode_values(given, 0, grid, layout, flat_tables(-127, 255), y)
            assert same(*ys)


def coded(count, seed, num_codes):
    """Codes that follow their left neighbour, and the tables for them."""
    random = np.random.default_rng(seed)
    steps = np.clip(random.standard_normal(count).cumsum() * 0.7, -40, 40)
    return (np.rint(steps) % (num_codes - 1)).astype(np.uint8) + 128


@pytest.mark.parametrize(
    "shape",
    [(1,), (33,), (5000,), (70, 90), (3, 5, 7, 7), (9, 4, 16, 16), (40, 16, 32, 32), (2, 3, 100, 130)],
    ids=str,
)
@pytest.mark.parametrize("num_codes", [2, 9, 60, 127])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_twin_codes_bands_as_the_reference_does(shape, num_codes, memory_format):
    twin()
    if memory_format == torch.channels_last and len(shape) != 4:
        return
    x = torch.empty(shape).to(memory_format=memory_format)
    layout = layout_of(x)
    wide = coded(x.numel(), 0, num_codes)
    starts, length = sample_starts(len(wide), layout)
    sample = np.stack([wide[start : start + length] for start in starts])
    tables = tables_of(sample, layout, len(wide))
    assert tables is not None
    again = Tables.unpack(tables.packed)
    fields = [field.name for field in dataclasses.fields(Tables)]
    assert all(np.array_equal(getattr(again, name), getattr(tables, name)) for name in fields)
    # The last two groups, one of which may be cut short: the reference takes its time.
    first = max((len(wide) - 1) // layout.group - 1, 0) * layout.group
    values = torch.from_numpy(wide[first:].astype(np.float32)) - 128
    one = torch.ones(1)
    grid = Grid(one, one, one * 0, one / 2, 1 << 40, False)
    stages = error_bounded_of(x)
    parts = stages.encode_values(values, first, grid, layout, tables)
    assert None not in parts and parts == reference.encode_values(values, first, grid, layout, tables)
    assert sum(len(part) - num_escapes for num_escapes, _, part in parts) <= 128 * len(parts) + len(values)
    found = torch.empty_like(values)
    given = [(part, *numbers) for *numbers, part in parts]
    for stages in (error_bounded_of(x), reference):
        assert stages.decode_values(given, first, grid, layout, again, found) and torch.equal(found, values)
        if stages is reference and len(values) > 10000:
            continue  # which takes its time
        for group, (part, num_escapes, num_missed) in enumerate(given):
            for damaged in (part[:-2], part + part[-2:], part[: num_escapes + 3], part[:-1]):
                spoiled = [*given[:group], (damaged, num_escapes, num_missed), *given[group + 1 :]]
                assert not stages.decode_values(spoiled, first, grid, layout, again, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_channels", "inner"), [(1, 10**6), (5, 1), (300, 1), (7, 3), (3, 100), (2, 1000)])
def test_the_twin_finds_the_same_ranges_as_the_reference(dtype, num_channels, inner):
    for x in inputs(dtype, 2500):
        ranges = []
        for kernels in (twin(), reference):
            low = torch.full((num_channels,), math.inf, dtype=torch.float64)
            high = -low
            for start in (0, 1300):
                kernels.finite_range(x[start : start + 1300], start, inner, low, high)
            ranges.append(torch.stack([low, high]))
        assert torch.equal(*ranges)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1001])
def test_the_twin_makes_the_same_bits_and_shuffled_bytes_as_the_reference(count):
    cpu = twin()
    for dtype in (torch.float32, torch.float64):
        for x in inputs(dtype, count):
            bits = reference.positive_bits(x)
            assert torch.equal(cpu.positive_bits(x), bits)
            value = torch.tensor(1.25, dtype=dtype)
            filled, expected = torch.empty_like(x), torch.empty_like(x)
            cpu.fill_positive(bits, value, filled)
            reference.fill_positive(bits, value, expected)
            assert torch.equal(filled, expected)
            data = x.view(torch.uint8)
            shuffled = reference.shuffle_bytes(data, x.itemsize)
            assert np.array_equal(cpu.shuffle_bytes(data, x.itemsize), shuffled.numpy())
            back, expected = torch.empty_like(data), torch.empty_like(data)
            cpu.unshuffle_bytes(np.frombuffer(shuffled.numpy().tobytes(), np.uint8), x.itemsize, back)
            reference.unshuffle_bytes(shuffled, x.itemsize, expected)
            assert torch.equal(back, data) and torch.equal(expected, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("sign_exact", [False, True])
def test_the_twin_rounds_groups_as_the_reference_does(dtype, bits, sign_exact):
    cpu = twin()
    for count in (1, 5, 255, 256, 257, 3001):
        for x in inputs(dtype, count):
            expected = reference.encode_groups(x, 5, bits, 3, sign_exact)
            found = cpu.encode_groups(x, 5, bits, 3, sign_exact)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            low, step, packed = expected
            y, y_expected = torch.empty_like(x), torch.empty_like(x)
            for most in (torch.finfo(dtype).max, 3.0):
                cpu.decode_groups(packed, low, step, bits, sign_exact, most, y)
                reference.decode_groups(packed, low, step, bits, sign_exact, most, y_expected)
                assert torch.equal(y.view(torch.uint8), y_expected.view(torch.uint8))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 5), (5, 17, 24)])
def test_the_block_transform_is_a_cosine_transform_and_comes_back(shape):
    maps = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 254 - 127
    ones = torch.ones(8, 8)
    codes = reference.encode_blocks(maps, ones * 8)
    assert codes.dtype == torch.int8 and len(codes) == math.prod(shape[:1]) * 64 * math.prod(
        math.ceil(size / 8) for size in shape[1:]
    )
    error = (reference.decode_blocks(codes, ones * 8, maps.shape) - maps).abs()
    assert float(error.square().mean().sqrt()) < 4.01  # half a step, which an orthonormal transform does not enlarge
    if shape[1:] == (8, 8):
        matrix = torch.tensor(
            [
                [math.cos((2 * i + 1) * u * math.pi / 16) * math.sqrt((1 + (u > 0)) / 8) for i in range(8)]
                for u in range(8)
            ]
        )
        expected = torch.round(matrix @ maps @ matrix.t() / 8).to(torch.int8)
        assert torch.equal(codes.view(64, 3), expected.view(3, 64).t())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_come_back_the_first_in_the_lowest_bits(bits):
    codes = (torch.arange(77) * 7 % (1 << bits)).to(torch.uint8)
    packed = reference.pack_bits(codes, bits)
    assert len(packed) == math.ceil(77 * bits / 8)
    assert torch.equal(reference.unpack_bits(packed, bits, 77), codes)
    assert int(packed[0]) == sum(int(code) << (bits * place) for place, code in enumerate(codes[: 8 // bits]))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (5, 3, 2, 1)]
)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_max_pool_indices_take_a_few_bits_and_come_back(kernel, stride, padding, dilation, format):
    x = torch.randn(3, 5, 20, 21, generator=torch.Generator().manual_seed(0)).to(memory_format=format)
    _, indices = F.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
    pairs = [(one, one) for one in (kernel, stride, padding, dilation)]
    names = ("kernel_size", "stride", "padding", "dilation")
    codec = get_codec("window_index", **dict(zip(names, pairs, strict=True)), input_size=(20, 21))
    encoded = codec.encode(indices)
    assert torch.equal(codec.decode(encoded), indices)
    bits = {2: 2, 3: 4, 5: 8}[kernel]
    assert len(encoded.parts[0]) == math.ceil(indices.numel() * bits / 8)
    for wrong in (-1, 20 * 21, int(indices[0, 0, 0, 0]) + stride * 21 * kernel):
        spoiled = indices.clone()
        spoiled[0, 0, 0, 0] = wrong
        assert torch.equal(codec.decode(codec.encode(spoiled)), spoiled)


def test_an_index_beside_its_window_has_no_code():
    windows = Windows((2, 2), (2, 2), (0, 0), (1, 1), (4, 4))
    codes = torch.empty(1, 2, 2, dtype=torch.uint8)
    inside = torch.tensor([[[0, 3], [13, 10]]])
    assert reference.window_codes(inside, windows, codes) and codes.flatten().tolist() == [0, 1, 3, 0]
    again = torch.empty_like(inside)
    reference.window_indices(codes, windows, again)
    assert torch.equal(again, inside)
    for wrong in (2, 8, -1, 16, 2**32, 2**32 + 1, -(2**63), 2**63 - 1):
        for kernels in (reference, cpu):
            assert not kernels.window_codes(torch.tensor([[[wrong, 3], [13, 10]]]), windows, codes)


@pytest.mark.parametrize("size", [(3, 4), (6, 5), (33, 40)])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 3), (5, 4)])
def test_window_codes_of_any_indices_are_the_references(kernel, size):
    """Also of indices that no pooling gives: what one takes for a code, the other does too, and it comes back."""
    generator = torch.Generator().manual_seed(math.prod(kernel) + size[0])
    windows = Windows(kernel, (2, 1), (kernel[0] // 2, kernel[1] // 2), (1, 2), size)
    num_taken = 0
    for number in range(300):
        corners = windows.corners(torch.Size((1, *size)), torch.device("cpu"))
        choices = windows.offsets(math.prod(kernel)) if number % 2 else torch.arange(-1, windows.row_distance + 3)
        indices = corners + choices[torch.randint(len(choices), (2, *size), generator=generator) * (number % 3 > 0)]
        mine, other = (torch.full(indices.shape, 99, dtype=torch.uint8) for _ in range(2))
        taken = reference.window_codes(indices, windows, mine)
        assert cpu.window_codes(indices, windows, other) == taken
        if taken:
            num_taken += 1
            assert torch.equal(mine, other) and int(mine.max()) < math.prod(kernel)
            for kernels in (reference, cpu):
                again = torch.empty_like(indices)
                kernels.window_indices(mine, windows, again)
                assert torch.equal(again, indices)
    assert 0 < num_taken < 300


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_are_the_references(bits):
    for count in (1, 3, 8, 77, 1024):
        codes = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
        packed = cpu.pack_bits(codes, bits)
        assert torch.equal(packed, reference.pack_bits(codes, bits))
        assert torch.equal(cpu.unpack_bits(packed, bits, count), codes)


def golden_input(name):
    if name == "window_index":
        return torch.tensor([[[0, 3], [13, 10]]])
    if name == "dct":
        return (torch.arange(140) * 37 % 23 - 11).float().cumsum(0).view(1, 2, 7, 10) / 4
    if name == "error_bounded":
        ramp = torch.arange(1024).view(1, 4, 16, 16)
        values = (ramp % 16 - 8).abs() / 8 + (ramp * 37 % 23 - 11) / 40
        values.flatten()[5:200:65] = torch.tensor([1000.0, math.nan, -0.0])
        return values.float()
    values = (torch.arange(64) * 37 % 23 - 11).float() / 4
    values[5], values[40], values[41] = 1000.0, math.nan, -0.0
    return values


@pytest.mark.parametrize("name", CODECS)
def test_records_match_the_golden_files(name, monkeypatch):
    """Compared before zstd, whose output differs between its versions."""
    monkeypatch.setattr(chunks, "zstandard", None)
    codec = get_codec(name, **(POOLING if name == "window_index" else {}))
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    arms = [("plain", codec, False), ("sign_exact", codec, True)]
    if name == "error_bounded":
        arms.append(("dithered", get_codec(name, dither=True, seed=5), True))
    for arm, made_by, sign_exact in arms:
        encoded = made_by.encode(golden_input(name), 0.25, sign_exact=sign_exact)
        parts = [part if isinstance(part, bytes) else part.numpy().tobytes() for part in encoded.parts]
        decoded = codec.decode(encoded).numpy().tobytes()
        found = {"parts": [part.hex() for part in parts], "decoded": decoded.hex()}
        assert found == golden[arm]

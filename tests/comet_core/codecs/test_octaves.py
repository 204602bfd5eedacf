"""Bounds relative to each value: any bits, layouts, channels, what is kept verbatim, and damaged records."""

import dataclasses
import math

import pytest
import torch

from comet_core.codecs import get_codec
from comet_core.codecs.base import DamagedRecord, ErrorBound
from comet_core.codecs.octaves import Octaves
from comet_core.codecs.two_planes import TwoPlanes

CODEC = get_codec("error_bounded")
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
VALUES = [0.0, 1e-12, 1e-3, 0.1, 1.0, 10.0, math.inf]
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(value, channel_dim=None):
    return ErrorBound("pw_rel", value, channel_dim)


def bits_per_value(encoded):
    return 8 * encoded.nbytes / math.prod(encoded.shape)


def normals(dtype, num_octaves, count=1 << 17):
    """Random mantissas, both signs, over some octaves around 1; many a little above or just below a power of two."""
    generator = torch.Generator().manual_seed(0)
    unit = round(1 / torch.finfo(dtype).eps)
    one = int(torch.ones((), dtype=dtype).view(WHOLE[dtype.itemsize]))
    low, high = one - num_octaves // 2 * unit, one + num_octaves // 2 * unit
    bits = torch.randint(low, high, (count,), generator=generator)
    bits[::2] = bits[::2] // unit * unit + bits[::2] % max(unit >> 11, 1)
    bits[1::8] = bits[1::8] // unit * unit + unit - 1
    x = bits.to(WHOLE[dtype.itemsize]).view(dtype)
    return torch.where(torch.rand(count, generator=generator) < 0.5, x, -x)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_pattern_of_16_bits_comes_back_within_the_bound(check_codec, dtype, value):
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    # Among others, since specials are too many for outliers where they are alone.
    order = torch.randperm(5 << 16, generator=torch.Generator().manual_seed(0))
    x = torch.cat([patterns, normal(1 << 18).to(dtype)])[order]
    encoded = check_codec(CODEC, x, relative(value))
    assert isinstance(encoded.meta, Octaves) or value < 0.1
    check_codec(CODEC, patterns.view(256, 256), relative(value), sign_exact=True)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_bits_come_back_within_the_bound(check_codec, dtype, value):
    whole, generator = WHOLE[dtype.itemsize], torch.Generator().manual_seed(1)
    info = torch.iinfo(whole)
    x = torch.randint(info.min, info.max, (4, 20_000), generator=generator, dtype=whole).view(dtype)
    check_codec(CODEC, x, relative(value))
    check_codec(CODEC, torch.cat([x[0], normal(1 << 18).to(dtype)]), relative(value))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_specials_survive_beside_coded_values(check_codec, dtype):
    info = torch.finfo(dtype)
    tiny, smallest = info.tiny, info.tiny * info.eps
    specials = [math.nan, -math.inf, math.inf, 0.0, -0.0, info.max, -info.max, smallest, -smallest, tiny, -tiny]
    specials += [tiny - smallest, tiny / 2, 1.0, 1 + info.eps, 1 - info.eps / 2]
    x = normal(1 << 15).to(dtype)
    x[100 : 100 + len(specials)] = torch.tensor(specials, dtype=torch.float64).to(dtype)
    for value in (1.0, 0.3):
        assert isinstance(check_codec(CODEC, x, relative(value)).meta, Octaves)
    for name, few in (("zeros", [0.0, -0.0]), ("NaN", [math.nan]), ("one", [3.0]), ("tiny", [smallest, -tiny / 2])):
        for value in VALUES:
            same = torch.tensor(few, dtype=torch.float64).to(dtype).repeat(20_000)
            encoded = check_codec(CODEC, same, relative(value))
            assert encoded.nbytes < same.nbytes / 4, name


@pytest.mark.parametrize("value", [1e-3, 0.004, 0.0117, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0, 7.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_normal_value_within_reach_is_an_outlier(check_codec, dtype, value):
    for num_octaves in (8, 28):
        encoded = check_codec(CODEC, normals(dtype, num_octaves), relative(value))
        assert encoded.meta.num_outliers == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_use_all_of_the_bound_that_the_dtype_can_show(dtype):
    x = normals(dtype, 8)
    eps = torch.finfo(dtype).eps
    of_bits = x.view(torch.int16).int()
    for value, units in ((0.9 * eps, 0), (eps, 1), (2.9 * eps, 2), (3 * eps, 3)):
        y = CODEC.decode(CODEC.encode(x, relative(value)))
        assert int((y.view(torch.int16).int() - of_bits).abs().max()) == units


def test_finer_bounds_take_more_bits_and_the_finest_are_lossless():
    x = normal(1 << 18)
    encoded = [CODEC.encode(x, relative(value)) for value in (math.inf, 0.5, 0.1, 0.01, 1e-3, 3e-4, 1e-5, 0.0)]
    bits = [bits_per_value(one) for one in encoded]
    assert bits == sorted(bits) and bits[2] < 6.1 and bits[4] < 13 and bits[5] < 16
    assert [type(one.meta) for one in encoded] == [Octaves] * 6 + [type(None)] * 2
    assert isinstance(encoded[4].meta.distances, TwoPlanes)
    for one in encoded[-2:]:
        assert torch.equal(CODEC.decode(one), x)


def test_zeros_of_a_relu_and_its_mask_stay():
    x = normal(1 << 16).relu()
    for dtype in FLOATS:
        encoded = CODEC.encode(x.to(dtype), relative(0.1))
        assert torch.equal(CODEC.decode(encoded) > 0, x.to(dtype) > 0) and bits_per_value(encoded) < 4


def test_many_values_as_large_as_the_largest_cost_nothing_more():
    x = normal(1 << 16)
    for value in (5e-4, 7e-4, 1e-3, 3e-3, 0.1):
        assert CODEC.encode(x.clamp(-1, 1), relative(value)).nbytes < CODEC.encode(x, relative(value)).nbytes


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_values_never_take_more_than_lossless_storage_does(dtype):
    for x in (normal(1 << 16).to(dtype), normal(1 << 16).relu().to(dtype)):
        lossless = get_codec("lossless").encode(x).nbytes
        for value in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-12):
            assert CODEC.encode(x, relative(value)).nbytes < 1.05 * lossless


def test_the_smallest_half_never_becomes_zero(check_codec):
    x = (normal(1 << 13).to(torch.float16) / 64).repeat(2)
    x[::2] = 2.0**-24
    for largest in torch.linspace(1, 2, 40).tolist():
        x[5] = largest
        assert isinstance(check_codec(CODEC, x, relative(10.0)).meta, Octaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_processor_that_flushes_subnormals_changes_none(dtype):
    x = normal(1 << 14).to(dtype)
    tiny = torch.finfo(dtype).tiny
    x = x.abs().clamp(max=2.0) * tiny * 2**12  # so that subnormals are within reach
    x[::100] = tiny * torch.linspace(0.001, 0.999, len(x[::100])).to(dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("missing tool: a processor that can flush subnormals, x86 or AArch64")
    try:
        encoded = CODEC.encode(x, relative(0.9))
        y = CODEC.decode(encoded)
    finally:
        torch.set_flush_denormal(False)
    assert isinstance(encoded.meta, Octaves) and bool((x[::100] != 0).all())
    assert torch.equal(y[::100], x[::100])


def test_a_few_values_far_below_the_others_cost_little():
    x = normal(1 << 16)
    plain = CODEC.encode(x, relative(0.01)).nbytes
    x[::2000] = 1e-30
    x[7] = 1e-40
    assert CODEC.encode(x, relative(0.01)).nbytes < plain * 1.1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_layout_and_channels_with_bounds_of_their_own(check_codec, dtype):
    x = (normal(6, 5, 40, 30) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 1.0]).view(-1, 1, 1)).to(dtype)
    x[:, 3], x[0, 4, 0, 0], x[1, 4, 0, 0] = 4.0, math.nan, math.inf
    values = torch.tensor([0.05, 0.2, 3.0, math.inf, 0.02])
    layouts = [x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[:, :, ::2], x[..., 1:]]
    check_codec(CODEC, x[:1].expand(4, 5, 40, 30), relative(0.1))
    for tensor in layouts:
        assert isinstance(check_codec(CODEC, tensor, relative(0.1)).meta, Octaves)
        for value in (values, values.double(), 0.05):
            for channel_dim in (1, -3):
                assert isinstance(check_codec(CODEC, tensor, relative(value, channel_dim)).meta, Octaves)
        check_codec(CODEC, tensor, relative(torch.tensor([0.0, 1e-12, 1.0, 0.1, 10.0]), 1))
    for other in (x[0, 0, 0, 0], x[:, :0], torch.ones(3).to(dtype), torch.arange(5), torch.ones(9, dtype=torch.bool)):
        check_codec(CODEC, other, relative(0.1))


def test_channels_that_do_not_fit_are_refused():
    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="has 3 channels"):
            CODEC.encode(x, relative(torch.tensor([0.1, 0.1]), 1))
        with pytest.raises(ValueError, match="allowed: -2 to 1"):
            CODEC.encode(x, relative(0.1, 2))


def test_numbers_and_nesting_that_do_not_fit_are_refused():
    x = normal(1 << 14)
    x[5] = math.nan
    encoded, in_two = CODEC.encode(x, relative(0.1)), CODEC.encode(x, relative(1e-3))
    meta = encoded.meta
    assert meta.num_outliers == 1 and isinstance(in_two.meta.distances, TwoPlanes)
    nested = dataclasses.replace(in_two.meta.distances, coarse=meta)
    for changed in (
        {"num_distance_parts": meta.num_distance_parts - 1},
        {"num_distance_parts": -1},
        {"num_outliers": 0},
        {"num_outliers": 10**6},
        {"num_outliers": 1.0},
        {"top": -1},
        {"top": 1 << 31},
        {"top": 0.5},
        {"distances": None},
        {"distances": 7},
        {"distances": meta},
        {"distances": nested},
    ):
        with pytest.raises(DamagedRecord):
            CODEC.decode(dataclasses.replace(encoded, meta=dataclasses.replace(meta, **changed)))
    with pytest.raises(DamagedRecord, match="octaves of its own"):
        CODEC.decode(dataclasses.replace(encoded, meta=nested))
    twice = dataclasses.replace(meta, distances=meta, num_distance_parts=len(encoded.parts), num_outliers=0)
    with pytest.raises(DamagedRecord, match="the numbers of its distances are a Octaves"):
        CODEC.decode(dataclasses.replace(encoded, meta=twice))
    with pytest.raises(DamagedRecord):
        CODEC.decode(dataclasses.replace(encoded, dtype=torch.int32))
    for top in (0, 1, (1 << 31) - 1):  # other values, but values
        y = CODEC.decode(dataclasses.replace(encoded, meta=dataclasses.replace(meta, top=top)))
        assert bool(y[6:].isfinite().all()) and torch.equal(y[6:].sign(), x[6:].sign())

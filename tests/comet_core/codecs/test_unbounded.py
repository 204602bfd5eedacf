"""What is particular to the codecs without a bound: averages over seeds, figures of error, signs, sizes."""

import math

import pytest
import torch

from comet_core.codecs import get_codec, kernels
from comet_core.codecs.base import Codec
from comet_core.codecs.cast import CastCodec
from comet_core.codecs.dct import DctCodec
from comet_core.codecs.group_quantized import GroupQuantizedCodec
from comet_core.codecs.kernels import chunks

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
UNBOUNDED = ["group_quantized", "dct", "cast"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def smooth(*shape):
    """Waves of 40 pixels and more, a phase of its own for each map."""
    row, column = torch.arange(float(shape[2]))[:, None], torch.arange(float(shape[3]))
    phase = torch.arange(float(shape[0] * shape[1])).view(*shape[:2], 1, 1)
    return torch.sin(row / 6.5 + phase) * torch.cos(column / 7 + phase / 2)


def there_and_back(name, x, sign_exact=False, **params):
    codec = get_codec(name, **params)
    return codec.decode(codec.encode(x, sign_exact=sign_exact))


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("sign_exact", [False, True])
def test_random_rounding_is_right_on_average_and_off_by_less_than_a_step(num_bits, sign_exact):
    x = normal(1000) + 3 * torch.tensor([1.0, -1.0]).repeat(500)
    num_seeds = 400
    decoded = torch.stack([
        there_and_back("group_quantized", x, sign_exact, num_bits=num_bits, seed=seed) for seed in range(num_seeds)
    ])  # fmt: skip
    sizes = x.abs() if sign_exact else x
    groups = torch.nn.functional.pad(sizes, (0, 24), value=math.nan).view(4, 256)
    spread = groups.nan_to_num(-math.inf).amax(1) - groups.nan_to_num(math.inf).amin(1)
    step = (spread / (2**num_bits - 1 - sign_exact)).repeat_interleave(256)[:1000] * (1 + 2**-7)
    error = decoded - x
    assert bool((error.abs() <= step + 1e-6).all())
    # The mean over seeds of an error with variance at most step**2 / 4: six of its standard deviations.
    assert bool((error.mean(0).abs() <= 6 * step / 2 / math.sqrt(num_seeds)).all())
    assert abs(float(error.mean())) < float(step.max()) / math.sqrt(num_seeds * 1000) * 3


def test_equal_tensors_give_equal_records_and_another_seed_another():
    x = normal(5000)
    one, again, other = (get_codec("group_quantized", seed=seed).encode(x) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parts, again.parts, strict=True))
    assert not torch.equal(one.parts[1], other.parts[1])


def test_errors_of_different_tensors_and_of_neighbours_are_not_correlated():
    first = normal(1 << 16)
    changed = first + 1e-3 * normal(1 << 16, seed=1)  # a layer's input one step later
    errors = [there_and_back("group_quantized", x) - x for x in (first, changed, normal(1 << 16, seed=2))]
    limit = 5 / math.sqrt(1 << 16)
    for one, other in ((0, 1), (0, 2)):
        found = torch.corrcoef(torch.stack([errors[one], errors[other]]))[0, 1]
        # What both share is where their values lie between levels, which rounds the same way when it is near one.
        assert abs(float(found)) < (limit if other == 2 else 0.05)
    for distance in (1, 2, 3, 4, 255, 256, 257, 512):
        pair = torch.stack([errors[0][distance:], errors[0][:-distance]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < limit


@pytest.mark.parametrize(("num_bits", "bits_per_value"), [(2, 2.19), (4, 4.19), (8, 8.19)])
def test_a_group_costs_six_bytes_beside_its_codes(num_bits, bits_per_value):
    x = normal(1 << 18)
    codec = get_codec("group_quantized", num_bits=num_bits)
    sizes = {
        (name, sign_exact): 8 * codec.encode(values, sign_exact=sign_exact).nbytes / x.numel()
        for name, values in (("normal", x), ("relu", x.relu()))
        for sign_exact in (False, True)
    }
    assert (
        sizes["normal", False] == sizes["relu", False] == sizes["relu", True] == pytest.approx(bits_per_value, abs=0.02)
    )
    assert sizes["normal", True] == pytest.approx(bits_per_value + 1, abs=0.02)


def test_groups_of_equal_values_and_zeros_behind_a_relu_are_exact():
    x = torch.full((3000,), 1000.3)
    assert torch.equal(there_and_back("group_quantized", x), x)
    x = normal(5000).relu()
    assert bool((there_and_back("group_quantized", x)[x == 0] == 0).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNBOUNDED)
def test_signs_of_huge_and_tiny_values_survive_in_maps(check_codec, name, dtype):
    info = torch.finfo(dtype)
    special = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.eps, 1.0], dtype=torch.float64)
    maps = normal(2, 3, 9, 10).to(dtype)
    maps[0, 0, 0, :8] = special.to(dtype)
    maps[1, 1] = 0
    tiny = (normal(2, 3, 9, 10, seed=1).double() * info.tiny * 4).to(dtype)
    for x in (maps, tiny, maps.relu(), maps.relu().to(memory_format=torch.channels_last)):
        for sign_exact in (False, True):
            check_codec(get_codec(name), x, sign_exact=sign_exact)
    maps[0, 2, 1, 1:4] = torch.tensor([math.nan, math.inf, -math.inf])
    check_codec(get_codec(name), maps, sign_exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*UNBOUNDED, "sparse"])
def test_tensors_of_several_chunks_come_back(check_codec, name, dtype):
    x = normal(3, 7, 201, 99).to(dtype)
    assert x.numel() > chunks.CHUNK_VALUES
    x[0, :, 5] = 0
    for values in (x, x.relu(), x.to(memory_format=torch.channels_last)):
        for sign_exact in (False, True):
            check_codec(get_codec(name), values, sign_exact=sign_exact)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sign_exact", [False, True])
def test_without_numba_groups_take_the_same_codes(check_codec, monkeypatch, dtype, sign_exact):
    x = normal(3, 4, 25000).to(dtype)
    x[0, 0, :4] = torch.tensor([math.nan, math.inf, 0.0, 1e4])
    with_numba = GroupQuantizedCodec().encode(x, sign_exact=sign_exact)
    monkeypatch.setattr(kernels, "_cpu", None)
    without = check_codec(GroupQuantizedCodec(), x, sign_exact=sign_exact)
    assert all(torch.equal(one, other) for one, other in zip(with_numba.parts, without.parts, strict=True))


def test_without_zstandard_coefficients_stay_bytes(check_codec, monkeypatch):
    x = smooth(4, 8, 32, 32)
    compressed = DctCodec().encode(x)
    monkeypatch.setattr(chunks, "zstandard", None)
    assert 4 > x.nbytes / check_codec(DctCodec(), x).nbytes > 3.9
    with pytest.raises(RuntimeError, match="pip install zstandard"):
        DctCodec().decode(compressed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNBOUNDED)
def test_the_mask_of_a_relu_can_be_read_from_a_sign_exact_record(name, dtype):
    x = torch.relu(normal(4, 8, 16, 16) * torch.tensor([1e-6, 1.0]).repeat(8)).to(dtype)
    assert torch.equal(there_and_back(name, x, sign_exact=True) > 0, x > 0)


def test_smooth_maps_lose_a_hundredth_and_shrink_forty_times():
    x = smooth(8, 32, 32, 32)
    encoded = DctCodec().encode(x)
    error = DctCodec().decode(encoded) - x
    assert float(error.square().mean().sqrt()) < 0.012
    assert x.nbytes > 40 * encoded.nbytes


def test_a_lower_quality_costs_less_and_loses_more():
    x = normal(4, 8, 24, 24)
    sizes, errors = [], []
    for quality in (100, 80, 50, 20, 1):
        encoded = get_codec("dct", quality=quality).encode(x)
        sizes.append(encoded.nbytes)
        errors.append(float((DctCodec().decode(encoded) - x).square().mean()))
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)


def test_a_channels_scale_is_its_own():
    x = smooth(4, 2, 16, 16) * torch.tensor([1e-6, 1e6]).view(1, 2, 1, 1)
    error = (there_and_back("dct", x) - x).abs().amax((0, 2, 3))
    assert float(error[0]) < 1e-7 and float(error[1]) < 1e5


@pytest.mark.parametrize("shape", [(6, 700), (5000,), (10, 20, 30), (64, 64, 3, 3), (2, 3, 4, 8, 8)])
def test_what_has_no_blocks_is_stored_exactly_by_dct(shape):
    x = normal(*shape)
    assert torch.equal(there_and_back("dct", x), x)


@pytest.mark.parametrize(("stored", "eps", "ratio"), [
    ("float16", 2**-10, 2), ("bfloat16", 2**-7, 2), ("float8_e4m3fn", 2**-3, 4), ("float8_e5m2", 2**-2, 4),
])  # fmt: skip
@pytest.mark.parametrize("scale", [1e-30, 1.0, 448.0, 1e6, 3e37])
def test_a_cast_keeps_the_formats_precision_at_any_scale(stored, eps, ratio, scale):
    x = normal(1 << 14).clamp(-4, 4) * scale
    codec = get_codec("cast", dtype=stored)
    encoded = codec.encode(x)
    y = codec.decode(encoded)
    large = x.abs() > x.abs().max() * 2**-12
    assert bool(((x - y).abs() <= x.abs() * eps / 2)[large].all())
    assert x.nbytes / encoded.nbytes == pytest.approx(ratio, rel=0.03)


def test_values_that_a_format_cannot_hold_come_back_all_the_same():
    x = torch.tensor([6e4, 1e5, math.inf, -math.inf, math.nan, 1e-12, -1e-12, 0.0, -0.0]).repeat(100)
    for stored in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        y = there_and_back("cast", x, dtype=stored)
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf())
        finite = x.isfinite()
        assert torch.equal(x[finite].sign(), y[finite].sign())
        assert float(y[finite].abs().max()) == pytest.approx(1e5, rel=0.07)


def test_sparse_costs_a_bit_a_value_and_the_values_that_are_not_zero():
    x = normal(1 << 18)
    x[normal(1 << 18, seed=1) > -1] = 0
    encoded = get_codec("sparse").encode(x)
    assert [part.nbytes for part in encoded.parts] == [1 << 15, 4 * int(torch.count_nonzero(x))]
    x[:3] = torch.tensor([-0.0, 0.0, math.nan])
    decoded = get_codec("sparse").decode(get_codec("sparse").encode(x))
    assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize(("name", "params", "sentence"), [
    ("group_quantized", {"num_bits": 3}, "num_bits is 3; allowed: 2, 4, 8"),
    ("group_quantized", {"seed": -1}, "seed is -1; allowed: a whole number from 0"),
    ("group_quantized", {"seed": 0.5}, r"seed is 0\.5; allowed: a whole number from 0"),
    ("dct", {"quality": 0}, "quality is 0; allowed: a whole number from 1 to 100"),
    ("dct", {"quality": 80.0}, r"quality is 80\.0; allowed"),
    ("cast", {"dtype": "float4"}, "dtype is 'float4'; allowed: float16, bfloat16"),
    ("cast", {"dtype": ["float16"]}, r"dtype is \['float16'\]; allowed"),
    ("cast", {"dtype": torch.float16}, r"dtype is torch\.float16; allowed"),
    ("dct", {"quality": True}, "quality is True; allowed"),
    ("group_quantized", {"num_bits": torch.ones(2)}, "num_bits is tensor"),
])  # fmt: skip
def test_parameters_that_make_no_sense_are_refused_with_a_sentence(name, params, sentence):
    with pytest.raises(ValueError, match=sentence):
        get_codec(name, **params)


# Deliberately bad codecs: each breaks one promise, and `check_codec` must say which.


class _LosesNan(GroupQuantizedCodec):
    def decode(self, encoded, device=None, *, out=None):
        return super().decode(encoded, device, out=out).nan_to_num(0.0)


class _RoundsTooFar(GroupQuantizedCodec):
    def decode(self, encoded, device=None, *, out=None):
        return super().decode(encoded, device, out=out) * 1.5


class _SharesSigns(GroupQuantizedCodec):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return super().encode(tensor, bound)


class _Overflows(CastCodec):
    def decode(self, encoded, device=None, *, out=None):
        y = super().decode(encoded, device, out=out)
        return torch.where(y > 1.9, math.inf, y)


class _CutsMantissa(CastCodec):
    def decode(self, encoded, device=None, *, out=None):
        return super().decode(encoded, device, out=out).mul(4).round().div(4)


class _CoarserTable(DctCodec):
    def decode(self, encoded, device=None, *, out=None):
        return super().decode(encoded, device, out=out).round()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (_LosesNan, "NaN or infinity changed"),
        (_RoundsTooFar, "further away than the codec says"),
        (_SharesSigns, "a sign changed"),
        (_Overflows, "became NaN or infinite"),
        (_CutsMantissa, "a sign changed|further away"),
        (_CoarserTable, "a sign changed|beyond what the table loses"),
    ],
)
def test_the_suite_catches_an_unbounded_codec_that_breaks_a_promise(check_codec, bad: type[Codec], complaint):
    x = (torch.linspace(-2, 2, 4000) * 0.999).view(4, 10, 10, 10).contiguous()
    if bad is not _CoarserTable:
        x[0, 0, 0, 0] = math.nan
    check_codec(bad.__mro__[1](), x, sign_exact=True)
    with pytest.raises(AssertionError, match=complaint):
        check_codec(bad(), x, sign_exact=True)

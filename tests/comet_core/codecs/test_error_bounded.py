"""What is particular to the error-bounded codec: its bounds, widths, channels, threads and missing libraries."""

import concurrent.futures
import dataclasses
import math
import os
import platform
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comet_core.codec_bench import codes_of, context_entropy, order0_entropy
from comet_core.codecs import get_codec, kernels
from comet_core.codecs.base import DamagedRecord, ErrorBound
from comet_core.codecs.error_bounded import ErrorBoundedCodec
from comet_core.codecs.kernels import chunks
from comet_core.codecs.two_planes import TwoPlanes

CODEC = get_codec("error_bounded")
DITHERED = get_codec("error_bounded", dither=True)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits_per_value(encoded):
    return 8 * encoded.nbytes / math.prod(encoded.shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("sign_exact", [False, True])
def test_channel_bounds_hold_in_each_channel(check_codec, dtype, memory_format, sign_exact):
    x = (normal(3, 5, 7, 9) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 1.0]).view(1, -1, 1, 1)).to(dtype)
    x = x.contiguous(memory_format=memory_format)
    x[:, 3] = 4.0
    x[0, 4, 0, 0], x[1, 4, 0, 0] = math.nan, math.inf
    values = torch.tensor([1e-4, 0.2, 3.0, 0.0, 1e-40])
    for kind in ("abs", "range_rel"):
        for value in (values, 0.05, 0.0, 1e-30, math.inf, values.double()):
            for channel_dim in (1, -3):
                check_codec(CODEC, x, ErrorBound(kind, value, channel_dim), sign_exact=sign_exact)
    check_codec(CODEC, x, ErrorBound("range_rel", 1 / 64), sign_exact=sign_exact)
    for channel_dim in (0, 2, 3):
        check_codec(CODEC, x[..., :8, 1:], ErrorBound("range_rel", 0.1, channel_dim), sign_exact=sign_exact)


def test_channel_bounds_hold_across_chunks(check_codec):
    x = normal(5, 3, 160, 161) + 100 * torch.arange(3).view(1, -1, 1, 1)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        bound = ErrorBound("abs", torch.tensor([0.5, 0.3, 0.7]), 1)
        encoded = check_codec(CODEC, x.contiguous(memory_format=memory_format), bound)
        assert bits_per_value(encoded) < 4


def test_a_large_mean_of_a_channel_costs_no_bits():
    x, shift = normal(8, 16, 32, 32), 1000 * torch.arange(16).view(1, -1, 1, 1)
    bound = ErrorBound("abs", 0.5, 1)
    centred, shifted = CODEC.encode(x, bound), CODEC.encode(x + shift, bound)
    assert shifted.nbytes < 1.05 * centred.nbytes < x.nbytes / 10


def test_a_relative_bound_is_exact_where_the_range_is_zero():
    x = torch.full((4, 3, 5), 0.1)
    for bound in (ErrorBound("range_rel", 0.5), ErrorBound("range_rel", math.inf, 1)):
        assert torch.equal(CODEC.decode(CODEC.encode(x, bound)), x)


@pytest.mark.parametrize("scale", [1e-280, 1e-300, 1e-304, 1e-306, 1e-307, 5e-324])
@pytest.mark.parametrize("channel_dim", [None, 1])
def test_the_smallest_float64_values_keep_their_bounds(check_codec, scale, channel_dim):
    x = normal(6, 5, 100).double() * scale
    for codec in (CODEC, DITHERED):
        for bound in (ErrorBound("range_rel", 0.1, channel_dim), ErrorBound("range_rel", 10.0, channel_dim)):
            check_codec(codec, x, bound)
            check_codec(codec, x, bound, sign_exact=True)


def test_an_infinite_bound_gives_values_of_the_tensors_own_size():
    x = torch.cat([normal(5000), torch.tensor([0.0])])
    for sign_exact in (False, True):
        encoded = CODEC.encode(x, math.inf, sign_exact=sign_exact)
        y = CODEC.decode(encoded)
        assert float(y.abs().max()) <= float(x.abs().max()) * (1 + 1e-5) and bits_per_value(encoded) < 4
        assert torch.equal(y.sign(), x.sign()) or not sign_exact


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_code_widths_follow_the_bound(dtype):
    x = normal(1 << 15).to(dtype)
    sizes = [bits_per_value(CODEC.encode(x, bound)) for bound in (1.0, 0.3, 0.05, 1e-9)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 2.2 and sizes[1] < 4.2 and sizes[2] < 8.2
    assert sizes[3] < 8 * dtype.itemsize + 0.2


def test_a_few_wild_values_do_not_widen_the_codes(check_codec):
    x = normal(1 << 15)
    x[::1000] = 1e6
    assert bits_per_value(check_codec(CODEC, x, 0.3)) < 4.5


def test_a_mask_of_relu_can_be_read_from_a_sign_exact_record():
    x = torch.relu(normal(1 << 15) * torch.tensor([1e-30, 1.0]).repeat(1 << 14))
    for dtype in FLOATS:
        y = CODEC.decode(CODEC.encode(x.to(dtype), 0.7, sign_exact=True))
        assert torch.equal(y > 0, x.to(dtype) > 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda x: CODEC.encode(x), "bound is None"),
        (lambda x: CODEC.encode(x, -1.0), r"is -1\.0; allowed: 0"),
        (lambda x: CODEC.encode(x, math.nan), "is nan; allowed: 0"),
        (lambda x: CODEC.encode(x, "fine"), "is 'fine'; allowed: a number"),  # type: ignore[arg-type]
        (lambda x: CODEC.encode(x, [0.1]), r"is \[0.1\]; allowed: a number"),  # type: ignore[arg-type]
        (lambda x: CODEC.encode(x, 10**400), "allowed: a number"),
        (lambda x: ErrorBound("rel", 0.1), "'rel'; allowed: 'abs', 'range_rel', 'pw_rel'"),  # type: ignore[arg-type]
        (lambda x: ErrorBound("abs", torch.tensor([0.1, -0.1]), 1), "negative or NaN entries"),
        (lambda x: ErrorBound("abs", torch.tensor([0.1, math.nan]), 1), "negative or NaN entries"),
        (lambda x: ErrorBound("abs", torch.tensor([0.1])), "channel_dim is None"),
        (lambda x: ErrorBound("abs", torch.tensor([[0.1]]), 1), "1-D float tensor"),
        (lambda x: ErrorBound("abs", torch.tensor([1]), 1), "1-D float tensor"),
        (lambda x: CODEC.encode(x, ErrorBound("abs", torch.tensor([0.1, 0.1]), 1)), "has 3 channels"),
        (lambda x: CODEC.encode(x, ErrorBound("abs", 0.1, 2)), "allowed: -2 to 1"),
        (lambda x: CODEC.encode(x[0, 0], ErrorBound("abs", 0.1, 0)), "no dimension"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(torch.ones(2, 3))


finite_or_not = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(finite_or_not, min_size=1, max_size=40),
    st.floats(min_value=0, allow_nan=False),
    st.sampled_from(["abs", "range_rel", "pw_rel"]),
    st.sampled_from(FLOATS),
    st.booleans(),
)
def test_any_values_stay_within_any_bound(check_codec, values, bound, kind, dtype, sign_exact):
    x = torch.tensor(values, dtype=torch.float64).repeat(7).to(dtype)
    check_codec(CODEC, x, ErrorBound(kind, bound), sign_exact=sign_exact)
    check_codec(CODEC, x.view(7, -1), ErrorBound(kind, bound, 1), sign_exact=sign_exact)


def test_threads_encode_and_decode_at_once_and_get_equal_values():
    tensors = [normal(300, 1000 + seed, seed=seed) for seed in range(6)]
    encoded = [CODEC.encode(x, 0.3) for x in tensors]
    expected = [CODEC.decode(one) for one in encoded]

    def work(index):
        again = CODEC.encode(tensors[index % 6], 0.3)
        assert torch.equal(CODEC.decode(again), expected[index % 6])
        return torch.equal(CODEC.decode(encoded[index % 6]), expected[index % 6])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_encodes_with_threads_of_its_own():
    x = normal(3 << 18)
    expected = CODEC.decode(CODEC.encode(x, 0.3)).numpy()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a thread that waits for the parent's would wait for ever
        # numpy compares: torch's own operations may hang in a forked process.
        found = CODEC.decode(CODEC.encode(x, 0.3)).numpy()
        os._exit(0 if np.array_equal(found, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sign_exact", [False, True])
@pytest.mark.parametrize("codec", [CODEC, DITHERED], ids=["plain", "dithered"])
def test_without_numba_the_reference_gives_the_same_record(check_codec, monkeypatch, dtype, sign_exact, codec):
    x = normal(3, 4, 5000).to(dtype)
    x[0, 0, :4] = torch.tensor([math.nan, math.inf, 0.0, 1e5])
    for bound in (ErrorBound("range_rel", 0.1, 1), ErrorBound("range_rel", 0.01), ErrorBound("abs", 0.0)):
        with_numba = codec.encode(x, bound, sign_exact=sign_exact)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_cpu", None)
            patch.setattr(kernels, "_error_bounded", kernels.reference)
            without = check_codec(codec, x, bound, sign_exact=sign_exact)
        assert all(
            torch.equal(one, other) if torch.is_tensor(one) else one == other
            for one, other in zip(with_numba.parts, without.parts, strict=True)
        )


def test_a_process_without_numba_works_and_gives_the_same_record():
    """All that is compiled runs as plain Python then, where warnings are errors."""
    x = normal(2, 3, 16, 16)
    script = """
import sys, warnings
warnings.simplefilter("error")
sys.meta_path.insert(0, type("NoNumba", (), {"find_spec": staticmethod(
    lambda name, path=None, target=None: (_ for _ in ()).throw(ModuleNotFoundError(name)) if name == "numba" else None
)}))
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "numba" else found(name, package)
import torch
from comet_core.codecs import get_codec, kernels
assert kernels._error_bounded is kernels.reference
x = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
for dither in (False, True):
    encoded = get_codec("error_bounded", dither=dither).encode(x, 0.1)
    print(encoded.parts[1].hex(), *(part.hex() for part in encoded.parts[2:]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for codec, line in zip((CODEC, DITHERED), done.stdout.splitlines(), strict=True):
        assert line.split() == [part.hex() for part in codec.encode(x, 0.1).parts[1:]]


def test_a_processor_without_instructions_for_float16_takes_the_reference(check_codec, monkeypatch):
    x = normal(3, 4, 2000)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_converts_halves", lambda: False)
        assert kernels.error_bounded_of(x.half()) is kernels.reference
        assert kernels.error_bounded_of(x) is kernels.error_bounded_of(x.bfloat16()) is not kernels.reference
        without = check_codec(CODEC, x.half(), 0.1)
    assert without.parts[2:] == CODEC.encode(x.half(), 0.1).parts[2:]


def test_a_processor_without_avx512_makes_the_same_record(tmp_path):
    """The kernels' instructions are chosen when they are compiled: here for a processor of 2013."""
    script = """
import torch
from comet_core.codecs import get_codec
x = torch.randn((2, 40, 16, 16), generator=torch.Generator().manual_seed(0))
for dtype in (torch.float32, torch.float16):
    encoded = get_codec("error_bounded", dither=True).encode(x.to(dtype).cumsum(-1), 0.1)
    print(*(part.hex() for part in encoded.parts[1:]))
"""
    if platform.machine() != "x86_64":
        pytest.skip("this processor is of another family")
    processor = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}  # else the features stay those of this one
    environment = {**os.environ, **processor, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    x = normal(2, 40, 16, 16)
    for dtype, line in zip((torch.float32, torch.float16), done.stdout.splitlines(), strict=True):
        assert line.split() == [part.hex() for part in DITHERED.encode(x.to(dtype).cumsum(-1), 0.1).parts[1:]]


def test_only_exact_storage_needs_zstandard(check_codec, monkeypatch):
    x = normal(3, 4, 5000).round()  # which shuffled bytes compress, too
    coded, exact = CODEC.encode(x, 0.5), CODEC.encode(x, 0.0)
    monkeypatch.setattr(chunks, "zstandard", None)
    for name in ("error_bounded", "lossless"):
        check_codec(get_codec(name), x, 0.5)
    assert CODEC.encode(x, 0.5).nbytes == coded.nbytes and torch.equal(CODEC.decode(coded), CODEC.decode(coded))
    with pytest.raises(RuntimeError, match="pip install zstandard"):
        CODEC.decode(exact)


def field(*shape, seed=0):
    """Smooth maps with noise, as activations are: each value has about as much of both."""
    x = normal(*shape, seed=seed)
    smooth = torch.nn.functional.avg_pool2d(normal(*shape, seed=seed + 1), 5, 1, 2) * 5
    return x + smooth


@pytest.mark.parametrize("step", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("sign_exact", [False, True])
def test_a_field_takes_no_more_bits_than_the_entropy_of_its_codes_given_their_neighbours(step, sign_exact):
    x = field(32, 16, 32, 32)
    x = x.relu() if sign_exact else x
    encoded = CODEC.encode(x, step / 2, sign_exact=sign_exact)
    codes = codes_of(x, torch.tensor(step / 2, dtype=torch.float64), sign_exact)
    conditional = context_entropy(codes)
    assert conditional < order0_entropy(codes)
    assert bits_per_value(encoded) < 1.08 * conditional


@pytest.mark.parametrize("shape", [(16, 8, 32, 32), (64, 64, 8, 8), (4, 64, 56, 56)])
def test_the_layout_in_memory_costs_few_bits(shape):
    x = field(*shape)
    contiguous = CODEC.encode(x, 1.0).nbytes
    assert CODEC.encode(x.to(memory_format=torch.channels_last), 1.0).nbytes < 1.1 * contiguous


def test_rare_large_values_cost_an_escape_and_not_the_group():
    x = field(8, 8, 32, 32)
    plain = CODEC.encode(x, 0.5).nbytes
    x.flatten()[::1000] = 60.0
    assert CODEC.encode(x, 0.5).nbytes < plain + 3 * x.numel() / 1000
    x.flatten()[::1000] = 1e6
    assert CODEC.encode(x, 0.5).nbytes < plain + 8 * x.numel() / 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign_exact", [False, True])
def test_a_fine_bound_takes_two_planes_of_codes(check_codec, dtype, sign_exact):
    x = field(8, 4, 32, 32).to(dtype)
    x[0, 0, 0, :4] = torch.tensor([math.nan, -math.inf, 0.0, 1e-9])
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=memory_format)
        for bound in (1e-3, ErrorBound("range_rel", 1e-4), ErrorBound("range_rel", 1e-4, -3)):
            encoded = check_codec(CODEC, x, bound, sign_exact=sign_exact)
            assert isinstance(encoded.meta, TwoPlanes) and bits_per_value(encoded) < 15


def test_bits_grow_with_the_logarithm_of_the_bound_until_lossless_storage_is_smaller(check_codec):
    x = torch.randn(1 << 18, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for value, dtype, most in ((1e-4, torch.float32, 0.25), (1e-5, torch.float32, 0.3), (1e-12, torch.float64, 0.6)):
        entropy = math.log2(math.sqrt(2 * math.pi * math.e) / (2 * value))
        encoded = check_codec(CODEC, x.to(dtype), value)
        assert isinstance(encoded.meta, TwoPlanes) and bits_per_value(encoded) < entropy + most
    lossless = CODEC.encode(x.float(), 0)
    for value in (1e-7, 1e-9, 1e-30):
        assert CODEC.encode(x.float(), value).nbytes == lossless.nbytes


@pytest.mark.parametrize("large", [100.0, 1e30, math.inf])
def test_few_large_values_do_not_widen_the_codes_of_all(check_codec, large):
    x = field(8, 8, 32, 32)
    plain = {bound: CODEC.encode(x, bound).nbytes for bound in (3e-3, 1e-4)}
    x.flatten()[::3000] = large
    for bound, nbytes in plain.items():
        assert check_codec(CODEC, x, bound).nbytes < nbytes + 40 * x.numel() / 3000 + 1000


@pytest.mark.parametrize("sign_exact", [False, True])
@pytest.mark.parametrize("channel_dim", [None, 1])
def test_choices_of_an_earlier_tensor_keep_every_promise_for_any_other(check_codec, sign_exact, channel_dim):
    class AsBefore(ErrorBoundedCodec):
        def encode(self, tensor, bound=None, *, sign_exact=False):
            return self.encode_as(tensor, bound, choices, sign_exact=sign_exact)

    x, bound = field(8, 4, 32, 32), ErrorBound("abs", 0.3, channel_dim)
    first = CODEC.encode(x, bound, sign_exact=sign_exact)
    choices = CODEC.choices_of(first)
    again = check_codec(AsBefore(), x, bound, sign_exact=sign_exact)
    assert again.meta == first.meta and again.parts[1:] == first.parts[1:]
    alike = check_codec(AsBefore(), x + 0.05 * field(4, 8, 32, 32).view(x.shape), bound, sign_exact=sign_exact)
    assert alike.nbytes < 1.05 * first.nbytes
    for other in (-3 * x, 100 * x, torch.full_like(x, math.nan), x.relu(), x[:3], x.half(), x[0, 0, 0, :7], x[:0]):
        check_codec(AsBefore(), other, ErrorBound("abs", 0.3), sign_exact=sign_exact)


def test_where_nothing_was_chosen_there_are_no_choices(check_codec):
    x = field(8, 4, 32, 32)
    for bound in (0.0, 1e-4, ErrorBound("pw_rel", 0.1)):
        assert CODEC.choices_of(CODEC.encode(x, bound)) is None
    dithered = ErrorBoundedCodec(dither=True)
    first = dithered.encode(x, 0.3)
    again = dithered.encode_as(x, 0.3, dithered.choices_of(first))
    assert again.meta == first.meta and again.parts[2:] == first.parts[2:]


def test_two_planes_refuse_counts_that_do_not_fit():
    encoded = CODEC.encode(field(8, 4, 32, 32), 1e-3)
    meta = nested = encoded.meta
    for _ in range(10_000):
        nested = dataclasses.replace(meta, coarse=nested)
    for changed in (
        {"num_coarse_parts": meta.num_coarse_parts - 1},
        {"num_rest_parts": -1},
        {"num_outliers": 10**6},
        {"coarse": meta},
        {"coarse": nested},
        {"rest": meta},
        {"rest": None},
    ):
        with pytest.raises(DamagedRecord):
            CODEC.decode(dataclasses.replace(encoded, meta=dataclasses.replace(meta, **changed)))
    with pytest.raises(DamagedRecord):  # before memory is taken
        CODEC.decode(dataclasses.replace(encoded, shape=torch.Size((1 << 40,)), stride=(1,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sign_exact", [False, True])
def test_a_gpu_makes_the_record_that_the_cpu_makes(dtype, sign_exact):
    x = field(16, 8, 32, 32).to(dtype)
    x[0, 0, 0, :4] = torch.tensor([math.nan, math.inf, 0.0, 60.0])
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=memory_format)
        for bound in (0.5, ErrorBound("abs", torch.linspace(0.1, 1, 8), 1), ErrorBound("pw_rel", 0.1)):
            on_cpu, on_gpu = (CODEC.encode(x.to(device), bound, sign_exact=sign_exact) for device in ("cpu", "cuda"))
            assert on_cpu.meta == on_gpu.meta
            for one, other in zip(on_cpu.parts, on_gpu.parts, strict=True):
                held = other.cpu().numpy().tobytes() if torch.is_tensor(other) else other
                assert held == (one.numpy().tobytes() if torch.is_tensor(one) else one)
            assert torch.equal(bits_of(CODEC.decode(on_cpu)), bits_of(CODEC.decode(on_gpu)))


@pytest.mark.gpu
def test_a_gpu_works_on_torchs_stream_and_in_torchs_memory():
    x = field(16, 64, 32, 32).cuda()
    expected = CODEC.decode(CODEC.encode(x, 0.5))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = CODEC.decode(CODEC.encode(x * 1.0, 0.5))
    stream.synchronize()
    assert torch.equal(y, expected)
    del y, expected
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    encoded = CODEC.encode(x, 0.5)
    assert 0 < torch.cuda.memory_allocated() - before < x.nbytes / 4
    assert free - torch.cuda.mem_get_info()[0] <= torch.cuda.memory_reserved()
    del encoded


def bits_of(x):
    return x.contiguous().view(-1).view(torch.uint8).cpu()


def test_dithered_errors_are_uniform_and_tell_nothing_about_the_values():
    """Also where all values are the same, or few: plain rounding then makes the same error again and again."""
    step = 0.25
    for x in (normal(200_000), torch.full((200_000,), 0.37), normal(400_000).round(), normal(200_000).sign() * 1e-3):
        error = (DITHERED.decode(DITHERED.encode(x, step / 2)) - x).double()
        assert not error[x == 0].any()
        error, values = error[x != 0], x[x != 0].double()
        count = len(error)
        share = torch.histc(error, 20, -step / 2, step / 2) / count
        assert float(share.min()) > 0.047 and float(share.max()) < 0.053, "not uniform"
        assert abs(float(error.mean())) < 4 * step / math.sqrt(12 * count)
        if len(values.unique()) > 1:
            correlation = torch.corrcoef(torch.stack([error, values]))[0, 1]
            assert abs(float(correlation)) < 4 / math.sqrt(count), "the error follows the value"
        neighbours = torch.corrcoef(torch.stack([error[1:], error[:-1]]))[0, 1]
        assert abs(float(neighbours)) < 4 / math.sqrt(count), "the error follows its neighbour"
    plain = (CODEC.decode(CODEC.encode(torch.full((5000,), 0.37), step / 2)) - 0.37).double()
    assert float(plain.std()) < 1e-6


def test_with_signs_dithered_errors_are_uniform_from_half_a_step_on():
    step, count = 0.25, 400_000
    x = normal(count).relu()
    y = DITHERED.decode(DITHERED.encode(x, step / 2, sign_exact=True))
    assert torch.equal(y > 0, x > 0)
    error = (y - x).double()[x > step / 2]
    share = torch.histc(error, 20, -step / 2, step / 2) / len(error)
    assert float(share.min()) > 0.045 and float(share.max()) < 0.055
    assert abs(float(torch.corrcoef(torch.stack([error, x[x > step / 2].double()]))[0, 1])) < 4 / math.sqrt(len(error))


def test_dither_is_a_function_of_the_seed_and_of_the_tensor():
    x = normal(4, 8, 32, 32)
    encoded = DITHERED.encode(x, 0.1)

    def errors(codec, x):
        return (codec.decode(codec.encode(x, 0.1)) - x).flatten()

    again = get_codec("error_bounded", dither=True).encode(x, 0.1)
    assert encoded.meta == again.meta and encoded.parts[1:] == again.parts[1:]
    for codec, other in ((get_codec("error_bounded", dither=True, seed=1), x), (DITHERED, x + 1)):
        pair = torch.stack([errors(DITHERED, x), errors(codec, other)])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(x.numel())
    # Any codec of this name decodes it: what the noise is hangs on the record alone.
    assert torch.equal(CODEC.decode(encoded), DITHERED.decode(encoded))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dither": "yes"}, "dither is 'yes'; allowed: False, True"),
        ({"dither": 2}, "dither is 2; allowed"),
        ({"dither": True, "seed": -1}, "seed is -1; allowed: a whole number from 0"),
        ({"seed": 2**32}, "seed is 4294967296; allowed"),
        ({"seed": 0.5}, "seed is 0.5; allowed"),
        ({"seed": True}, "seed is True; allowed: a whole number"),
        ({"seed": 10**5000}, "seed is a number of thousands of digits; allowed"),
        ({"seed": np.arange(2)}, "seed is array"),
        ({"dither": [True]}, r"dither is \[True\]; allowed"),
    ],
)
def test_wrong_parameters_of_the_dither_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        get_codec("error_bounded", **params)


@pytest.mark.parametrize("key", [-1, 1 << 32, 1.5, "0"])
def test_a_key_of_the_dither_that_is_none_is_refused(key):
    encoded = DITHERED.encode(normal(3, 4, 50), 0.1)
    damaged = dataclasses.replace(encoded, meta=dataclasses.replace(encoded.meta, key=key))
    with pytest.raises(DamagedRecord, match="key of the dither"):
        DITHERED.decode(damaged)

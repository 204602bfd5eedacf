"""One suite for every registered codec: what `comet_core/codecs/base.py` promises, by the kind of guarantee.

`check_codec` (conftest.py) is the suite; the deliberately bad codecs at the end prove that it sees what it looks for.
"""

import dataclasses
import inspect
import math
import weakref

import numpy as np
import pytest
import torch

from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.base import Codec
from comet_core.codecs.error_bounded import ErrorBoundedCodec
from comet_core.codecs.lossless import LosslessCodec
from comet_core.config import CODEC_PARAMS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
POOLING = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "input_size": (18, 14)}
PARAMS = {"window_index": POOLING}


def build(name):
    return get_codec(name, **PARAMS.get(name, {}))


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    return (values > 0) if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def of_layout(layout, dtype):
    x = random_tensor((4, 6, 8, 10), dtype)
    return {
        "contiguous": lambda: x,
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(0, 3),
        "sliced": lambda: x[:, 1::2, :, 2:7],
        "offset": lambda: x[1:3],
        "expanded": lambda: x[:1, :, :, :1].expand(3, 6, 8, 5),
        "0-d": lambda: x[0, 0, 0, 0],
        "empty": lambda: x[:, :0],
        "one element": lambda: x[:1, :1, :1, :1],
        "constant": lambda: torch.full((5, 7), 2, dtype=dtype),
        "odd count": lambda: x.flatten()[:333],
    }[layout]()


LAYOUTS = ["contiguous", "channels_last", "transposed", "sliced", "offset", "expanded"]
LAYOUTS += ["0-d", "empty", "one element", "constant", "odd count"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_keeps_its_promises_on_every_layout(check_codec, name, dtype, device):
    codec = build(name)
    for layout in LAYOUTS:
        x = of_layout(layout, dtype).to(device)
        if name in ("sign_mask", "interval_mask") and dtype.is_complex:
            with pytest.raises(ValueError, match="no order"):
                codec.encode(x)
            continue
        for sign_exact in (False, True):
            check_codec(codec, x, 0.25, sign_exact=sign_exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_keeps_its_promises_on_special_values(check_codec, name, dtype, device):
    info = torch.finfo(dtype)
    special = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, info.max, info.min, info.tiny, -info.tiny, info.eps]
    special += [info.smallest_normal / 2, -info.smallest_normal / 4, 0.5, -0.5, 0.25, -0.75, 1.0, 1e4, -1e4]
    x = torch.tensor(special, dtype=torch.float64).to(dtype).to(device)
    subnormal = torch.arange(-300, 300, device=device).to(torch.float64).mul(info.smallest_normal / 1024).to(dtype)
    mixed = random_tensor(4000, dtype).to(device)
    mixed[::40] = x.repeat(5)
    for sample in (
        x,
        subnormal,
        mixed,
        torch.full((9,), math.nan, dtype=dtype, device=device),
        mixed.view(40, 100).t(),
    ):
        for bound in (0.25, 0.0, 1e-300, info.tiny, 1e-9, 1e4, 1e300, math.inf):
            for sign_exact in (False, True):
                check_codec(build(name), sample, bound, sign_exact=sign_exact)


def test_nan_payloads_come_back_bit_for_bit():
    x = torch.tensor([0x7FC00001, 0x7F800123, -0x3FFFFF, 0x3F800000] * 100, dtype=torch.int32).view(torch.float32)
    for name in ("error_bounded", "lossless"):
        y = build(name).decode(build(name).encode(x, 0.1))
        assert torch.equal(x.view(torch.int32)[x.isnan()], y.view(torch.int32)[x.isnan()])


@pytest.mark.parametrize("name", CODECS)
def test_a_record_does_not_keep_the_input_alive(name):
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x, alive = torch.from_numpy(array), weakref.ref(array)
    encoded = build(name).encode(x, 1e-30)
    del x, array
    assert alive() is None
    assert encoded.nbytes > 0


@pytest.mark.parametrize("name", CODECS)
def test_tensors_in_a_graph_and_parameters_are_encoded_without_it(name):
    x = torch.nn.Parameter(random_tensor((4, 5), torch.float32))
    for source in (x, x * 2):
        assert not build(name).decode(build(name).encode(source, 0.1)).requires_grad


def test_lazily_conjugated_tensors_come_back_resolved():
    x = random_tensor((4, 5), torch.complex64)
    for lazy in (x.conj(), x.conj().imag):
        assert torch.equal(build("lossless").decode(build("lossless").encode(lazy)), lazy)


@pytest.mark.parametrize("name", CODECS)
def test_tensors_without_strides_are_refused(name):
    with pytest.raises(ValueError, match="strided"):
        build(name).encode(torch.eye(3).to_sparse(), 0.1)


@pytest.mark.parametrize("name", CODECS)
def test_a_record_of_another_codec_is_refused(name):
    encoded = dataclasses.replace(build("lossless").encode(torch.ones(3)), codec="another")
    with pytest.raises(ValueError, match="'another'"):
        build(name).decode(encoded)


def test_registry_names_match_and_unknown_names_and_parameters_are_refused():
    assert all(name == codec.name for name, codec in CODECS.items())
    for name, params in (("zip", {}), ("lossless", {"level": 3}), ("window_index", {"kernel_size": (2, 2)}),
                         (["lossless"], {}), ("interval_mask", {"low": "0"}), ("interval_mask", {"high": [6.0]}),
                         ("window_index", {**PARAMS["window_index"], "stride": 2}),
                         ("window_index", {**PARAMS["window_index"], "stride": (2.0, 2.0)})):  # fmt: skip
        with pytest.raises(ValueError, match="allowed"):
            get_codec(name, **params)


def test_the_menu_of_parameters_is_what_the_codecs_take():
    for name, params in CODEC_PARAMS.items():
        assert list(inspect.signature(CODECS[name]).parameters) == list(params)
        for key, allowed in params.items():
            for value in (allowed[0], allowed[-1]):
                codec = get_codec(name, **{key: value})
                assert torch.equal(codec.decode(codec.encode(torch.zeros(2, 3, 8, 8), 0.1)), torch.zeros(2, 3, 8, 8))


def test_numbers_of_numpy_and_torch_are_parameters_like_pythons_own():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    plain = get_codec("error_bounded", dither=True, seed=7).encode(x, 0.125)
    of_numpy, of_torch = (np.bool_(True), np.int64(7), np.float32(0.125)), (1, torch.tensor(7), np.array(0.125))
    for dither, seed, bound in (of_numpy, of_torch):
        other = get_codec("error_bounded", dither=dither, seed=seed).encode(x, bound)
        assert other.meta == plain.meta and other.parts[2:] == plain.parts[2:]


# Deliberately bad codecs: each breaks one promise, and `check_codec` must say which.


class _Bad(ErrorBoundedCodec):
    def spoil(self, y):
        raise NotImplementedError

    def decode(self, encoded, device=None, *, out=None):
        return self.spoil(super().decode(encoded, device, out=out))


class _BeyondTheBound(_Bad):
    def spoil(self, y):
        return y + 1e-6


class _ChangesNan(_Bad):
    def spoil(self, y):
        return torch.where(y.isnan(), torch.full_like(y, -math.nan), y)


class _LosesInfinity(_Bad):
    def spoil(self, y):
        return torch.nan_to_num(y, nan=math.nan)


class _LosesStrides(_Bad):
    def spoil(self, y):
        return y.contiguous()


class _LosesDtype(_Bad):
    def spoil(self, y):
        return y.double()


class _MovesZeros(_Bad):
    def spoil(self, y):
        return torch.where(y == 0, 1e-9, y)


class _LosesSigns(_Bad):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return super().encode(tensor, bound)

    def spoil(self, y):
        return y


class _TouchesInput(ErrorBoundedCodec):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        encoded = super().encode(tensor, bound, sign_exact=sign_exact)
        tensor.mul_(2)
        return encoded


class _KeepsInput(LosslessCodec):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return self.record(tensor, (tensor,))

    def decode(self, encoded, device=None, *, out=None):
        return encoded.parts[0].clone()


class _HandsOutItsOwnMemory(_KeepsInput):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return self.record(tensor, (tensor.clone(),))

    def decode(self, encoded, device=None, *, out=None):
        return encoded.parts[0]


class _HoldsMore(_HandsOutItsOwnMemory):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return self.record(tensor, (torch.cat([tensor.flatten()] * 9)[: tensor.numel()],))


class _Grows(_HandsOutItsOwnMemory):
    def encode(self, tensor, bound=None, *, sign_exact=False):
        return self.record(tensor, (tensor.double(),))


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (_BeyondTheBound, "beyond the bound"),
        (_ChangesNan, "NaN or infinity changed"),
        (_LosesInfinity, "NaN or infinity changed"),
        (_LosesStrides, "strides"),
        (_LosesDtype, "dtype"),
        (_MovesZeros, "zero"),
        (_LosesSigns, "sign"),
        (_TouchesInput, "touched"),
        (_KeepsInput, "storage"),
        (_HandsOutItsOwnMemory, "twice"),
        (_HoldsMore, "holds more"),
        (_Grows, "above raw"),
    ],
)
def test_the_suite_catches_a_codec_that_breaks_a_promise(check_codec, bad: type[Codec], complaint):
    x = torch.linspace(-2, 2, 4001).view(1, 1, 1, 4001).repeat(1, 2, 2, 1).to(memory_format=torch.channels_last)
    x[0, 0, 0, :3] = torch.tensor([math.nan, math.inf, 0.0])
    check_codec(ErrorBoundedCodec(), x, 0.25, sign_exact=True)
    with pytest.raises(AssertionError, match=complaint):
        check_codec(bad(), x, 0.25, sign_exact=True)

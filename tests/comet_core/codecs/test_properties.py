"""Every codec on tensors that hypothesis makes up: any bits, shape, layout and dtype, always the same examples."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.base import ErrorBound

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128]
POOLING = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "input_size": (18, 14)}
PARAMS = {"window_index": POOLING}

SETTINGS = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,  # the same examples each time, so that a failure is one of the change that shows it
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def tensors(draw, dtypes):
    """A tensor of up to 5 dimensions: few, many, special or random values, in any layout that torch can give it."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 9]), max_size=5).filter(lambda s: math.prod(s) < 5000))
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["bits", "normal", "relu", "few", "smooth", "tiny", "huge"]))
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    if kind == "bits":
        raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        flat = raw.view(dtype) if dtype != torch.bool else raw > 127
    else:
        info = torch.finfo(dtype if dtype.is_floating_point else torch.float32)
        few = draw(st.lists(st.floats(width=32), min_size=1, max_size=4))
        values = {
            "normal": values,
            "relu": values.relu(),
            "few": torch.tensor(few, dtype=torch.float64)[torch.arange(count) % len(few)],
            "smooth": torch.arange(count).double().div(7).sin(),
            "tiny": values * info.smallest_normal,
            "huge": values * info.max,
        }[kind]
        if dtype == torch.bool:
            flat = values > 0
        elif dtype.is_floating_point or dtype.is_complex:
            flat = values.to(dtype)
        else:
            flat = values.nan_to_num(0, 100, 100).clamp(0, 100).to(dtype)
    x = flat.view(shape)
    layout = draw(st.sampled_from(["contiguous", "permuted", "strided", "expanded", "channels_last", "offset"]))
    if layout == "permuted":
        x = x.permute(draw(st.permutations(range(x.ndim))))
    elif layout == "strided" and x.ndim:
        x = x[..., ::2]
    elif layout == "expanded":
        x = x[None].expand(3, *x.shape)
    elif layout == "channels_last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "offset" and x.ndim:
        x = x[1:]
    return x


bounds = st.one_of(
    st.floats(min_value=0, allow_nan=False),
    st.builds(ErrorBound, st.sampled_from(["abs", "range_rel", "pw_rel"]), st.floats(min_value=0, max_value=10)),
)


@pytest.mark.parametrize("name", [*CODECS, "error_bounded, dithered"])
@SETTINGS
@given(x=tensors(FLOATS), bound=bounds, sign_exact=st.booleans())
def test_any_floats_come_back_as_promised(check_codec, name, x, bound, sign_exact):
    name, dithered, _ = name.partition(", dithered")
    params = {"dither": True} if dithered else PARAMS.get(name, {})
    check_codec(get_codec(name, **params), x, bound, sign_exact=sign_exact)


@pytest.mark.parametrize("name", CODECS)
@SETTINGS
@given(x=tensors(OTHERS), sign_exact=st.booleans())
def test_any_other_values_come_back_as_promised(check_codec, name, x, sign_exact):
    if name in ("sign_mask", "interval_mask") and x.is_complex():
        return
    check_codec(get_codec(name, **PARAMS.get(name, {})), x, 0.1, sign_exact=sign_exact)


@SETTINGS
@given(
    pooling=st.tuples(*(st.tuples(st.integers(low, high), st.integers(low, high)) for low, high in (
        (1, 4), (1, 3), (0, 2), (1, 2)))),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_indices_of_any_pooling_come_back_in_few_bits(check_codec, pooling, size, seed):
    kernel, stride, padding, dilation = pooling
    padding = tuple(min(one, half // 2) for one, half in zip(padding, kernel, strict=True))
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))
    indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)[1]
    codec = get_codec("window_index", kernel_size=kernel, stride=stride, padding=padding, dilation=dilation,
                      input_size=size)  # fmt: skip
    encoded = check_codec(codec, indices)
    assert sum(part.nbytes for part in encoded.parts) <= indices.numel()


@pytest.mark.parametrize(("name", "choices"), [
    ("group_quantized", {"num_bits": [2, 4, 8], "seed": [0, 7, 2**32 - 1]}),
    ("cast", {"dtype": ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]}),
    ("dct", {"quality": [1, 50, 100]}),
])  # fmt: skip
@SETTINGS
@given(x=tensors(FLOATS), data=st.data())
def test_with_any_parameters_signs_and_what_is_not_finite_survive(name, choices, x, data):
    codec = get_codec(name, **{key: data.draw(st.sampled_from(values)) for key, values in choices.items()})
    y = codec.decode(codec.encode(x, sign_exact=True))
    finite = x.isfinite()
    assert torch.equal(x.nan_to_num(0.0, 0.0, 0.0).sign(), y.nan_to_num(0.0, 0.0, 0.0).sign())
    assert torch.equal(finite, y.isfinite()) and torch.equal(x.isnan(), y.isnan())

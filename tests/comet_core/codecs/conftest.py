"""`check_codec`: raises AssertionError where a codec breaks a promise of `comet_core/codecs/base.py` on a tensor.

Written without the codecs' own helpers, and every comparison of values in float64.
"""

import math

import pytest
import torch

from comet_core.codecs.base import HEADER_BYTES, PART_BYTES, as_error_bound


def bits_of(x):
    """The bytes of each element, in logical order: equal bits, not equal values."""
    # Not view(-1): one element, or none, may come with any stride and still count as contiguous.
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).cpu()


def is_dense(x):
    """Whether the elements fill one block of memory, each place once."""
    places = torch.zeros(max(x.numel(), 1), dtype=torch.int64)
    index = sum(
        (torch.arange(size) * stride).view([-1 if axis == here else 1 for here in range(x.ndim)])
        for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
    index = torch.as_tensor(index).expand(x.shape).reshape(-1)
    if x.numel() and int(index.max()) >= x.numel():
        return False
    return x.numel() == 0 or bool((places.index_add(0, index, torch.ones_like(index)) == 1).all())


def allowed_error(x, bound):
    """The largest |x - y| allowed for each element, float64, by the formulas of ErrorBound."""
    bound = as_error_bound(bound)
    value = torch.as_tensor(bound.value, dtype=torch.float64, device=x.device)
    dims = list(range(x.ndim))
    if bound.channel_dim is not None:
        dims.remove(bound.channel_dim % x.ndim)
        if value.ndim:
            value = value.view([-1 if axis not in dims else 1 for axis in range(x.ndim)])
    if bound.kind == "pw_rel":
        return (value * x.double().abs()).where(x != 0, 0)
    if bound.kind == "range_rel" and x.numel():
        finite = x.double().isfinite()
        high = x.double().where(finite, -math.inf)
        low = x.double().where(finite, math.inf)
        if dims:
            high, low = high.amax(dims, keepdim=True), low.amin(dims, keepdim=True)
        value = (value * (high - low).clamp(min=0)).nan_to_num(nan=0.0, posinf=math.inf)
    return value.expand(x.shape)


def group_quantized_error(x, sign_exact):
    """One step of the value's group at the default of two bits, and the rounding to the dtype; float64, as x."""
    dense = x if is_dense(x) else x.contiguous()
    order = torch.arange(x.numel(), device=x.device).as_strided(dense.shape, dense.stride())
    values = x.double().abs() if sign_exact else x.double()
    flat = torch.zeros(x.numel(), dtype=torch.float64, device=x.device).index_put((order,), values)
    known = (flat.abs() <= torch.finfo(torch.float32).max) & ((flat != 0) | (not sign_exact))
    pad = -x.numel() % 256
    flat, known = (torch.nn.functional.pad(one, (0, pad)).view(-1, 256) for one in (flat, known))
    spread = flat.where(known, -math.inf).amax(1) - flat.where(known, math.inf).amin(1)
    step = spread.clamp(min=0) / (2 if sign_exact else 3) * (1 + 2**-7) + 2.0**-126
    of_group = step.repeat_interleave(256)[: x.numel()][order]
    return of_group + (x.double().abs() + of_group) * torch.finfo(x.dtype).eps


def cast_error(x, sign_exact):
    """Of float8_e4m3fn: 2**-4 of the value, or below its normal range one step of the subnormal ones."""
    largest = x.double().where(x.isfinite(), 0).abs().max() if x.numel() else 0
    smallest = 2.0**-9 * (largest / 224 + (2.0**-1022 if x.dtype == torch.float64 else 2.0**-126))
    info = torch.finfo(x.dtype)
    return x.double().abs() * (2.0**-4 + info.eps) + smallest + info.smallest_normal * info.eps


def check_dct_error(x, y):
    """The root mean square error of each channel, by the table of quality 80; see DctCodec."""
    if x.ndim != 4 or not x.numel() or not bool(x.isfinite().all()):
        return
    blocks = math.ceil(x.shape[2] / 8) * math.ceil(x.shape[3] / 8)
    growth = math.sqrt(64 * blocks / (x.shape[2] * x.shape[3]))
    largest, info = x.double().abs().amax((0, 2, 3)), torch.finfo(x.dtype)
    unit = largest.clamp(min=info.smallest_normal)
    error = ((x.double() - y.double()) / unit.view(-1, 1, 1)).square().mean((0, 2, 3)).sqrt()
    # A sign that is set right may take the smallest normal number.
    allowed = 0.10617 * growth + info.eps + 1e-5 + info.smallest_normal / unit
    assert bool((error <= allowed).all()), "beyond what the table loses"


ALLOWED_ERRORS = {"group_quantized": group_quantized_error, "cast": cast_error}


def check_unbounded(codec, x, y, sign_exact):
    finite = x.isfinite()
    assert torch.equal(bits_of(x[~finite]), bits_of(y[~finite])), "NaN or infinity changed"
    assert bool(y[finite].isfinite().all()), "a finite value became NaN or infinite"
    if sign_exact:
        assert torch.equal(torch.sign(x[finite]), torch.sign(y[finite])), "a sign changed"
    if codec.name == "dct":
        check_dct_error(x, y)
    else:
        assert codec.name in ALLOWED_ERRORS, f"write into ALLOWED_ERRORS how far {codec.name} may be from a value"
        error = (x.double() - y.double()).abs()
        allowed = ALLOWED_ERRORS[codec.name](x, sign_exact)
        assert bool((error <= allowed)[finite].all()), "further away than the codec says"


def check_values(codec, x, y, bound, sign_exact):
    lossy = codec.guarantee in ("bounded", "unbounded")
    if codec.guarantee == "exact" or (lossy and not x.dtype.is_floating_point):
        assert torch.equal(bits_of(x), bits_of(y)), "bits differ"
    elif codec.guarantee == "unbounded":
        check_unbounded(codec, x, y, sign_exact)
    elif codec.guarantee == "bounded":
        finite = x.isfinite()
        assert torch.equal(bits_of(x[~finite]), bits_of(y[~finite])), "NaN or infinity changed"
        assert bool(y[finite].isfinite().all()), "a finite value became NaN or infinite"
        error = (x.double() - y.double()).abs()
        assert bool((error <= allowed_error(x, bound))[finite].all()), "beyond the bound"
        assert bool((y[x == 0] == 0).all()), "a zero did not stay zero"
        if sign_exact or as_error_bound(bound).kind == "pw_rel":
            assert torch.equal(torch.sign(x[finite]), torch.sign(y[finite])), "a sign changed"
    elif codec.name == "sign_mask":
        assert torch.equal(y > 0, ~(x <= 0)), "the mask differs"
        largest = x.max() if x.numel() else torch.ones((), dtype=x.dtype)
        largest = largest if bool(largest > 0) and math.isfinite(float(largest)) else torch.ones_like(largest)
        assert bool(((y == largest) | (y == 0)).all()), "values other than 0 and the largest"
    elif codec.name == "interval_mask":
        outside = [(values <= codec.low) | (values >= codec.high) for values in (x, y)]
        assert torch.equal(*outside), "the mask differs"
    else:
        assert torch.equal(bits_of(x), bits_of(y)), "bits differ"


def check_codec(codec, x, bound=None, *, sign_exact=False):
    """Raise AssertionError where the codec breaks a promise on x, which is left as it was."""
    before, strides = bits_of(x).clone(), x.stride()
    encoded = codec.encode(x, bound, sign_exact=sign_exact)
    assert torch.equal(bits_of(x), before) and x.stride() == strides, "the input was touched"
    raw_bytes = x.numel() * x.element_size()
    few_parts = 7 + raw_bytes // 2**15
    assert encoded.nbytes <= raw_bytes + HEADER_BYTES + PART_BYTES * few_parts, "above raw plus a small header"
    held = sum(part.untyped_storage().nbytes() if torch.is_tensor(part) else len(part) for part in encoded.parts)
    assert held <= encoded.nbytes, "holds more than it says"
    for part in encoded.parts:
        if torch.is_tensor(part) and part.numel():
            assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), "keeps the input's storage"
    y = codec.decode(encoded)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device), "shape, dtype or device differ"
    assert y.stride() == (x.stride() if is_dense(x) else x.contiguous().stride()), "strides differ"
    check_values(codec, x, y, bound, sign_exact)
    first = bits_of(y).clone()
    y.fill_(1)
    assert torch.equal(bits_of(codec.decode(encoded)), first), "decoded twice, different values"
    return encoded


@pytest.fixture(scope="session", name="check_codec")
def _check_codec():
    return check_codec

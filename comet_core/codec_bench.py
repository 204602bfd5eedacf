"""Ratio, error and throughput of any codec on any tensor: used by CLI, page and benchmarks.

Held bytes are compared with the entropy of the codes that a quantiser without prediction would make: order-0, and given
the left and the upper neighbour's codes (THEORY section 6). Both are computed here in plain float64, from the
definition and not with the codecs' kernels, so that they judge any codec. They count no model and no table, and on few
values or very fine bounds, where most codes occur once, they are below what any coder can reach. For `pw_rel` the codes
are those of a piecewise linear logarithm; with a true one they would take up to half a bit less.

Codecs take turns within each repetition, so that what else the machine does meets all of them alike; times are medians,
and gigabytes (10^9) are of original bytes. Errors are measured in float64 on the decoded tensor, whatever the codec
promises.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.base import Codec, ErrorBound
from comet_core.config import CODEC_PARAMS, parse_codec_params, shown

HISTOGRAM_BINS = 61
MOST_NEIGHBOUR = 3
"""Codes of neighbours are clipped to this on either side, which gives 49 contexts."""
_SLICE = 1 << 22  # values looked at together, so that float64 copies stay small
_MOST_CODE = 2.0**53  # codes beyond this are no whole numbers of their own in float64
_MOST_OCTAVES = 2200.0  # from the smallest float64 to the largest, with room
_MOST_SPREAD = 1 << 18  # of codes that a table counts; sorting them takes over beyond


class Stopped(Exception):
    """`should_stop` asked to end a measurement."""


@dataclass(frozen=True)
class Arm:
    """One way to store a tensor: what `timed` measures. Peers of the codecs are arms too."""

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    nbytes: Callable[[Any], int]


@dataclass
class Timed:
    """What `timed` found of one arm: its last record's bytes and values, and the seconds of each repetition."""

    held_bytes: int = 0
    decoded: Tensor = field(default_factory=lambda: torch.empty(0))
    encode_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)


def codec_of(text: str) -> Codec:
    """The codec that "name" or "name:key=value,key=value" says; values as `config.parse_codec_params` reads them.

    Raises ValueError for what does not exist, and for codecs that restore patterns instead of values.
    """
    name, _, params = text.partition(":")
    if name not in CODEC_PARAMS:
        why = ", which restores what one backward reads, not values" if name in CODECS else ""
        raise ValueError(f"codec is {shown(text)}{why}; allowed: {', '.join(CODEC_PARAMS)}.")
    return get_codec(name, **parse_codec_params(name, params))


def codec_arm(codec: Codec, bound: ErrorBound | None, sign_exact: bool) -> Arm:
    return Arm(lambda x: codec.encode(x, bound, sign_exact=sign_exact), codec.decode, lambda encoded: encoded.nbytes)


def absolute_bound(x: Tensor, bound: ErrorBound) -> Tensor:
    """The bound as float64 that broadcasts against `x`: |x - y| <= this is what `bound` allows. Never below 0.

    Raises ValueError where `channel_dim` is none of the tensor's dimensions.
    """
    dim = bound.channel_dim
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"channel_dim is {dim}, but the tensor has shape {tuple(x.shape)}; allowed: {-x.ndim} to {x.ndim - 1}."
            if x.ndim else f"channel_dim is {dim}, but the tensor has no dimension; leave it out."
        )  # fmt: skip
    value = torch.as_tensor(bound.value, dtype=torch.float64)
    if bound.kind == "pw_rel":
        size = x.double().abs()
        value = _along(value, x, dim) if dim is not None and value.ndim else value
        return torch.where(size.isfinite() & (size > 0), value * size, 0)
    if bound.kind == "range_rel":
        rows = x.flatten().unsqueeze(0) if dim is None else x.movedim(dim, 0).flatten(1)
        finite = rows.isfinite()
        high = torch.where(finite, rows, -torch.inf).amax(1).double()
        low = torch.where(finite, rows, torch.inf).amin(1).double()
        value = torch.where(high > low, value * (high - low), 0)  # an infinite share of no range is none
    return value.reshape(()) if dim is None else _along(value.expand(x.shape[dim]), x, dim)


def codes_of(x: Tensor, bound: Tensor, sign_exact: bool, channel_dim: int | None = None) -> Tensor:
    """The codes, int64 in the shape of `x`, that a step of twice the bound gives; values that are not finite get 0.

    rint(x / step), less the rounded mean of its channel where the bound is one a channel; with `sign_exact`
    sign(x) ceil(|x| / step), so that only zeros are zero. `bound` comes from `absolute_bound` and has to be above 0.
    """
    scaled = x.double() / (2 * bound)
    scaled = scaled.nan_to_num(0, 0, 0).clamp(-(2.0**62), 2.0**62)
    if sign_exact:
        return (scaled.sign() * scaled.abs().ceil()).long()
    codes = scaled.round()
    if channel_dim is not None:
        others = [dim for dim in range(x.ndim) if dim != channel_dim % x.ndim]
        codes -= (codes.mean(others, keepdim=True) if others else codes).round()
    return codes.long()


def codes_of_octaves(x: Tensor, bound: ErrorBound) -> Tensor:
    """The codes, int64 in the shape of `x`, that steps of twice a `pw_rel` bound above 0 give; zeros and others get 0.

    sign(x) (1 + floor((t - l) / step)), where l is log2 |x|, linear between powers of two, and t that of the largest.
    Steps are of 2 octaves at most.
    """
    finite = x.double().nan_to_num(0, 0, 0)
    mantissa, exponent = torch.frexp(finite.abs())
    octaves = exponent + 2 * mantissa
    value = torch.as_tensor(bound.value, dtype=torch.float64).clamp(max=1)
    value = _along(value, x, bound.channel_dim) if bound.channel_dim is not None and value.ndim else value
    top = octaves.where(finite != 0, -torch.inf).max()
    below = torch.where(finite != 0, top - octaves, 0)
    return (finite.sign() * (1 + (below / (2 * value)).floor())).long()


def order0_entropy(codes: Tensor) -> float:
    """Bits a code: what a coder that knows only how frequent each code is needs at least. int64 of any shape."""
    return _entropy(codes.flatten())


def context_entropy(codes: Tensor) -> float:
    """Bits a code, given the codes to the left (last dimension) and above (last but one), each clipped to -3..3.

    Zero stands in for neighbours beyond the border (THEORY section 6).
    """
    near = codes.clamp(-MOST_NEIGHBOUR, MOST_NEIGHBOUR)
    left, up = torch.zeros_like(near), torch.zeros_like(near)
    if codes.ndim >= 1:
        left[..., 1:] = near[..., :-1]
    if codes.ndim >= 2:
        up[..., 1:, :] = near[..., :-1, :]
    width = 2 * MOST_NEIGHBOUR + 1
    context = ((left + MOST_NEIGHBOUR) * width + up + MOST_NEIGHBOUR).flatten()
    ranks = _ranks(codes.flatten())
    return _entropy(ranks * width**2 + context) - _entropy(context)


def num_over_bound(x: Tensor, y: Tensor, bound: Tensor) -> int:
    """How many finite values of `x` are further than `bound` (from `absolute_bound`) from `y`, or lost in it."""
    return sum(
        int((~((b.double() - a.double()).abs() <= limit) | ~b.isfinite())[a.isfinite()].sum())
        for a, b, limit in _slices(x, y, bound)
    )


def error_statistics(x: Tensor, y: Tensor, bound: Tensor | None = None) -> dict[str, Any]:
    """How far `y` is from `x`, over the finite values of `x`, in float64.

    `num_over_bound` counts values beyond `bound` (from `absolute_bound`) and finite values that came back as something
    else; `num_nonfinite_changed` those that were not finite and came back with other bits. `histogram` counts errors
    y - x in HISTOGRAM_BINS equal parts of -1 to 1, in units of the bound where there is a finite one, else
    of `histogram_unit`, the largest error; it is None where every value is exact.

    Raises ValueError for another shape or dtype.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"what was decoded is {y.dtype} of shape {tuple(y.shape)}, the tensor {x.dtype} of shape {tuple(x.shape)}."
        )
    count = changed = 0
    total = squares = largest = signal = 0.0
    limits = torch.tensor(torch.inf, dtype=torch.float64) if bound is None else bound
    for a, b, _ in _slices(x, y, limits):
        finite = a.isfinite()
        changed += int((_bits(a) != _bits(b))[~finite].sum())
        error = (b.double() - a.double())[finite]
        error = error[error.isfinite()]
        count += error.numel()
        total, squares = total + float(error.sum()), squares + float(error.square().sum())
        signal += float(a[finite].double().square().sum())
        largest = max(largest, float(error.abs().max())) if error.numel() else largest
    unit = largest if bool(limits.isinf().all()) else None
    counts = torch.zeros(HISTOGRAM_BINS)
    for a, b, limit in _slices(x, y, limits) if largest > 0 else ():
        error = b.double() - a.double()
        share = error / (limit if unit is None else unit)
        share = share[a.isfinite() & error.isfinite() & (limit > 0)]
        counts += torch.histc(share.clamp(-1, 1).float(), HISTOGRAM_BINS, -1, 1)
    return {
        "max_error": largest,
        "rms_error": (squares / count) ** 0.5 if count else 0.0,
        "mean_error": total / count if count else 0.0,
        "relative_rms_error": (squares / signal) ** 0.5 if signal else 0.0,
        "num_over_bound": num_over_bound(x, y, limits),
        "num_nonfinite_changed": changed,
        "histogram": [int(entry) for entry in counts] if largest > 0 else None,
        "histogram_unit": unit or None,
    }


def timed(
    arms: Mapping[str, Arm],
    x: Mapping[str, Tensor] | Tensor,
    repetitions: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda arm: None,
) -> dict[str, Timed]:
    """Encode and decode with every arm in turn, `repetitions` times after one that does not count.

    What an arm decoded before is given back first, as training gives back a layer's tensor before it decodes the next
    one: else each result lies in memory that is touched for the first time, and page faults are what is measured.

    `x` is one tensor for all, or one for each arm. `progress` is told the arm after each turn. Raises Stopped between
    two turns where `should_stop` says so.
    """
    found = {name: Timed() for name in arms}
    for repetition in range(repetitions + 1):
        for name, arm in arms.items():
            if should_stop():
                raise Stopped
            given = x if isinstance(x, Tensor) else x[name]
            found[name].decoded = torch.empty(0)
            encode_seconds, encoded = _seconds(lambda arm=arm, given=given: arm.encode(given))  # type: ignore[misc]
            decode_seconds, decoded = _seconds(lambda arm=arm, encoded=encoded: arm.decode(encoded))  # type: ignore[misc]
            if repetition:
                found[name].encode_seconds.append(encode_seconds)
                found[name].decode_seconds.append(decode_seconds)
            found[name].held_bytes, found[name].decoded = arm.nbytes(encoded), decoded
            progress(name)
    return found


def result_of(x: Tensor, timed: Timed, bound: Tensor | None = None) -> dict[str, Any]:
    """One row of figures of an arm on `x`; `bound` (from `absolute_bound`) where it promised one."""
    seconds = {name: statistics.median(getattr(timed, name)) for name in ("encode_seconds", "decode_seconds")}
    return {
        "held_bytes": timed.held_bytes,
        "compression_ratio": x.nbytes / timed.held_bytes,
        "bits_per_value": 8 * timed.held_bytes / x.numel(),
        **seconds,
        "encode_gb_per_s": x.nbytes / 1e9 / seconds["encode_seconds"],
        "decode_gb_per_s": x.nbytes / 1e9 / seconds["decode_seconds"],
        **error_statistics(x, timed.decoded, bound),
    }


def entropies(x: Tensor, bound: ErrorBound, sign_exact: bool) -> dict[str, float | None]:
    """Both entropies in bits a code at this bound.

    None where there are no codes to count: at a bound of 0 or infinity, and where it is so fine that float64 cannot
    tell the codes apart.
    """
    pointwise = bound.kind == "pw_rel"
    steps = torch.as_tensor(bound.value, dtype=torch.float64) if pointwise else absolute_bound(x, bound)
    size = torch.tensor(_MOST_OCTAVES) if pointwise else x.nan_to_num(0, 0, 0).abs()
    if not bool(((steps > 0) & steps.isfinite()).all()) or bool((size / (2 * steps) >= _MOST_CODE).any()):
        return {"order0_bits": None, "context_bits": None}
    codes = codes_of_octaves(x, bound) if pointwise else codes_of(x, steps, sign_exact, bound.channel_dim)
    return {"order0_bits": order0_entropy(codes), "context_bits": context_entropy(codes)}


def measure(
    x: Tensor,
    codecs: Sequence[str],
    bounds: Mapping[float, ErrorBound],
    *,
    sign_exact: bool = False,
    repetitions: int = 3,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict[str, Any]:
    """Rate-distortion of `codecs` (see `codec_of`) on a float tensor of one value or more, over `bounds`.

    The keys of `bounds` are the numbers that they are known by. Codecs that read no bound are measured once, with
    `bound` None. The answer has `bounds` (bound, its mean absolute value, entropies), `results` (a row of figures for
    each codec and bound) and `stopped`; what was measured before a stop stays. Rows of codecs without a guarantee have
    `num_over_bounds` too: how many values are beyond each of `bounds`. `note` is a sentence where such a codec gave
    every value back. `progress` gets turns done, turns in all and what was done last. Raises ValueError for what
    `codec_of`, the codecs and `absolute_bound` refuse.
    """
    made = {text: codec_of(text) for text in codecs}
    bounded = {text: codec for text, codec in made.items() if codec.guarantee == "bounded"}
    rest = {text: codec for text, codec in made.items() if text not in bounded}
    groups: list[tuple[float | None, dict[str, Codec]]] = [(None, rest)] if rest else []
    groups += [(bound, bounded) for bound in bounds] if bounded else []
    total, done = (repetitions + 1) * sum(len(group) for _, group in groups), 0
    absolute = {number: absolute_bound(x, bound) for number, bound in bounds.items()}
    exactly = torch.zeros((), dtype=torch.float64)
    results: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []

    def told(text: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, text)

    try:
        for number, bound in bounds.items():
            if should_stop():
                raise Stopped
            progress(0, total, f"entropy of the codes at {number:g}")
            mean = float(absolute[number].mean())
            entries.append({"bound": number, "error_bound": mean, **entropies(x, bound, sign_exact)})
        for key, group in groups:
            arms = {
                text: codec_arm(codec, None if key is None else bounds[key], sign_exact)
                for text, codec in group.items()
            }
            found = timed(arms, x, repetitions, should_stop=should_stop, progress=told)
            for text, one in found.items():
                guarantee = group[text].guarantee
                limit = absolute[key] if key is not None else exactly if guarantee == "exact" else None
                row = {"codec": text, "guarantee": guarantee, "bound": key, "note": ""} | result_of(x, one, limit)
                if guarantee == "unbounded":
                    row["num_over_bounds"] = [num_over_bound(x, one.decoded, allowed) for allowed in absolute.values()]
                    if not row["max_error"] and not row["num_over_bound"]:
                        row["note"] = f"Every value came back exactly. It stores without loss {group[text].exact_for}."
                results.append(row)
    except Stopped:
        return {"bounds": entries, "results": results, "stopped": True}
    return {"bounds": entries, "results": results, "stopped": False}


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _slices(x: Tensor, y: Tensor, bound: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same places of both and of the bound that broadcasts against them, a slice at a time."""
    xs, ys = x.reshape(-1).split(_SLICE), y.reshape(-1).split(_SLICE)
    bounds = [bound] * len(xs) if bound.ndim == 0 else bound.expand(x.shape).reshape(-1).split(_SLICE)
    return zip(xs, ys, bounds, strict=True)


def _along(value: Tensor, x: Tensor, dim: int) -> Tensor:
    return value.reshape([-1 if other == dim % x.ndim else 1 for other in range(x.ndim)])


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def _ranks(codes: Tensor) -> Tensor:
    """The same codes renumbered from 0, close together."""
    if codes.numel() == 0:
        return codes
    low = codes.min()
    spread = int(codes.max()) - int(low)
    return codes - low if spread < _MOST_SPREAD else codes.unique(return_inverse=True)[1]


def _entropy(codes: Tensor) -> float:
    ranks = _ranks(codes)
    counts = torch.bincount(ranks)
    share = counts[counts > 0].double() / len(ranks)
    return abs(float((share * share.log2()).sum()))

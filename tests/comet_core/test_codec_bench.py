"""Figures of codecs: entropies against closed forms, errors against known ones, and codecs that cheat are seen."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_core import codec_bench
from comet_core.codec_bench import (
    Arm,
    absolute_bound,
    codes_of,
    codes_of_octaves,
    context_entropy,
    error_statistics,
    order0_entropy,
)
from comet_core.codecs.base import ErrorBound

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("num_codes", [1, 2, 8, 1000])
def test_codes_that_are_equally_frequent_take_the_logarithm_of_their_number(num_codes):
    codes = torch.arange(num_codes).repeat(50) - 3
    assert order0_entropy(codes) == pytest.approx(math.log2(num_codes))


def test_far_apart_codes_count_like_close_ones():
    codes = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    assert order0_entropy(codes * 10**17) == pytest.approx(order0_entropy(codes))
    assert context_entropy((codes * 10**17).reshape(1, -1)) < order0_entropy(codes)


def test_a_code_that_its_neighbour_decides_costs_nothing_in_context():
    rows = torch.tensor([0, 1, 2, 3]).repeat(200, 500)
    assert order0_entropy(rows) == pytest.approx(2)
    assert context_entropy(rows) < 0.01
    assert context_entropy(rows.T) < 0.01


def test_independent_codes_gain_nothing_in_context():
    codes = torch.randint(-2, 3, (500, 500), generator=torch.Generator().manual_seed(0))
    assert context_entropy(codes) == pytest.approx(math.log2(5), abs=0.01)


def naive_context_entropy(codes: np.ndarray) -> float:
    """The definition, value by value."""
    contexts: dict[tuple[int, int], dict[int, int]] = {}
    for place in np.ndindex(codes.shape):
        *rest, row, column = place
        left = codes[(*rest, row, column - 1)] if column else 0
        up = codes[(*rest, row - 1, column)] if row else 0
        seen = contexts.setdefault((max(-3, min(3, left)), max(-3, min(3, up))), {})
        seen[int(codes[place])] = seen.get(int(codes[place]), 0) + 1
    bits = 0.0
    for seen in contexts.values():
        bits -= sum(count * math.log2(count / sum(seen.values())) for count in seen.values())
    return bits / codes.size


@given(st.integers(0, 2**32), st.sampled_from([0.5, 2.0, 1e5]))
def test_context_entropy_is_that_of_its_definition(seed, spread):
    codes = np.rint(np.random.default_rng(seed).normal(0, spread, (2, 2, 4, 5))).astype(np.int64)
    assert context_entropy(torch.from_numpy(codes)) == pytest.approx(naive_context_entropy(codes), abs=1e-9)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3)])
def test_tensors_without_rows_have_entropies_too(shape):
    codes = torch.zeros(shape, dtype=torch.int64)
    assert order0_entropy(codes) == context_entropy(codes) == 0


def test_codes_are_the_nearest_steps_and_sign_exact_ones_keep_zeros_alone():
    x = torch.tensor([0.0, 0.3, -0.3, 1.1, -2.0, NAN, INF])
    bound = torch.tensor(0.5, dtype=torch.float64)
    assert codes_of(x, bound, sign_exact=False).tolist() == [0, 0, 0, 1, -2, 0, 0]
    assert codes_of(x, bound, sign_exact=True).tolist() == [0, 1, -1, 2, -2, 0, 0]


def test_codes_of_channels_are_counted_from_their_mean():
    x = torch.randn(50, 2, 8, 8, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 1000.0]).view(2, 1, 1)
    bound = ErrorBound("abs", torch.tensor([0.5, 0.5]), channel_dim=1)
    codes = codes_of(x, absolute_bound(x, bound), sign_exact=False, channel_dim=-3)
    assert codes[:, 0].float().mean().abs() < 1 and codes[:, 1].float().mean().abs() < 1


def test_a_share_of_the_range_is_of_the_finite_values_of_the_channel():
    x = torch.tensor([[0.0, 4.0, NAN], [1.0, 1.0, INF], [NAN, NAN, NAN]])
    assert absolute_bound(x, ErrorBound("range_rel", 0.5)).item() == 2
    assert absolute_bound(x, ErrorBound("range_rel", 0.5, channel_dim=0)).flatten().tolist() == [2, 0, 0]
    assert absolute_bound(x, ErrorBound("range_rel", INF, channel_dim=0)).flatten().tolist() == [INF, 0, 0]
    with pytest.raises(ValueError, match="channel_dim is 2, but the tensor has shape"):
        absolute_bound(x, ErrorBound("abs", 1.0, channel_dim=2))


def test_a_share_of_each_value_allows_nothing_where_it_is_zero_or_not_finite():
    x = torch.tensor([[0.0, -4.0, NAN], [1.0, 1e300, INF]], dtype=torch.float64)
    assert absolute_bound(x, ErrorBound("pw_rel", 0.5)).flatten().tolist() == [0, 2, 0, 0.5, 5e299, 0]
    of_rows = ErrorBound("pw_rel", torch.tensor([0.5, INF]), channel_dim=0)
    assert absolute_bound(x, of_rows).flatten().tolist() == [0, 2, 0, INF, INF, 0]


def test_codes_of_a_share_of_each_value_count_octaves_below_the_largest():
    x = torch.tensor([0.0, 8.0, -8.0, 6.0, -4.0, 3.0, 2.0, NAN, INF])
    assert codes_of_octaves(x, ErrorBound("pw_rel", 0.25)).tolist() == [0, 1, -1, 2, -3, 4, 5, 0, 0]
    of_rows = ErrorBound("pw_rel", torch.tensor([0.25, 0.5, 9.0]), channel_dim=0)
    assert codes_of_octaves(x[1:7].view(3, 2), of_rows).tolist() == [[1, -1], [1, -2], [1, 2]]
    assert codes_of_octaves(torch.zeros(3), ErrorBound("pw_rel", 0.25)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [0.3, 0.1, 0.03])
def test_a_share_of_each_value_takes_about_the_entropy_of_its_codes(value):
    x, bound = torch.randn(16, 16, 32, 32, generator=torch.Generator().manual_seed(0)), ErrorBound("pw_rel", value)
    found = codec_bench.measure(x, ["error_bounded"], {value: bound}, repetitions=1)
    row = found["results"][0]
    assert row["num_over_bound"] == 0 and max(row["histogram"]) < sum(row["histogram"])
    order0 = found["bounds"][0]["order0_bits"]
    assert order0 - 0.1 < row["bits_per_value"] < order0 + 1
    assert codec_bench.entropies(x, ErrorBound("pw_rel", 0.0), False)["order0_bits"] is None


def test_errors_are_what_was_added(monkeypatch):
    monkeypatch.setattr(codec_bench, "_SLICE", 4)
    x = torch.arange(10.0)
    y = x + torch.tensor([0.5, -0.5] * 5)
    found = error_statistics(x, y, torch.tensor(0.5, dtype=torch.float64))
    assert (found["max_error"], found["rms_error"], found["mean_error"]) == (0.5, 0.5, 0.0)
    assert found["num_over_bound"] == found["num_nonfinite_changed"] == 0
    assert found["histogram"][0] == found["histogram"][-1] == 5 and sum(found["histogram"]) == 10
    assert error_statistics(x, y, torch.tensor(0.499, dtype=torch.float64))["num_over_bound"] == 10
    assert error_statistics(x, y)["histogram_unit"] == 0.5
    assert error_statistics(x, x)["histogram"] is None


def test_bounds_of_channels_judge_each_channel_by_its_own():
    x = torch.zeros(2, 3)
    bound = torch.tensor([[1.0, 0.1, 0.0]], dtype=torch.float64)
    assert error_statistics(x, x + 0.5, bound)["num_over_bound"] == 4


@pytest.mark.parametrize("lost", [NAN, INF, -INF])
def test_finite_values_that_stop_being_so_and_changed_nans_are_counted(lost):
    x, y = torch.tensor([1.0, 2.0, NAN, INF]), torch.tensor([1.0, lost, 0.0, INF])
    for bound in (None, torch.tensor(1.0, dtype=torch.float64)):
        found = error_statistics(x, y, bound)
        assert found["num_over_bound"] == found["num_nonfinite_changed"] == 1
        assert found["max_error"] == 0


def test_another_shape_or_dtype_is_no_result():
    with pytest.raises(ValueError, match="decoded is"):
        error_statistics(torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="decoded is"):
        error_statistics(torch.zeros(4), torch.zeros(4).double())


def test_arms_take_turns_and_the_first_round_does_not_count():
    turns = []
    arms = {name: Arm(lambda x, name=name: turns.append(name), lambda _: torch.ones(2), lambda _: 4) for name in "ab"}
    found = codec_bench.timed(arms, torch.ones(2), 2)
    assert turns == list("ababab")
    assert len(found["a"].encode_seconds) == len(found["b"].decode_seconds) == 2


def test_codecs_with_a_bound_meet_each_and_the_others_are_measured_once():
    x = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0)).relu()
    bounds = {number: ErrorBound("abs", number) for number in (0.01, 0.3)}
    told = []
    found = codec_bench.measure(
        x, ["error_bounded", "lossless", "cast:dtype=float16"], bounds, sign_exact=True, repetitions=1,
        progress=lambda *entry: told.append(entry),
    )  # fmt: skip
    rows = {(row["codec"], row["bound"]): row for row in found["results"]}
    assert rows.keys() == {
        ("error_bounded", 0.01), ("error_bounded", 0.3), ("lossless", None), ("cast:dtype=float16", None),
    }  # fmt: skip
    assert 0.005 < rows["error_bounded", 0.01]["max_error"] <= 0.01
    assert all(row["num_over_bound"] == 0 for row in rows.values())
    assert rows["lossless", None]["max_error"] == 0 and rows["lossless", None]["histogram"] is None
    for row in rows.values():
        assert row["compression_ratio"] == pytest.approx(32 / row["bits_per_value"])
        assert row["encode_gb_per_s"] > 0 and row["decode_gb_per_s"] > 0
    fine, coarse = found["bounds"]
    assert fine["order0_bits"] > coarse["order0_bits"] > coarse["context_bits"] > 0
    assert told[-1][:2] == (8, 8) and not found["stopped"]


def test_an_exact_codec_that_is_not_is_caught(monkeypatch):
    monkeypatch.setattr(codec_bench.CODECS["lossless"], "decode", lambda self, encoded: torch.full((10,), 1.5))
    found = codec_bench.measure(torch.ones(10), ["lossless"], {}, repetitions=1)
    assert found["results"][0]["num_over_bound"] == 10


def test_what_was_measured_before_a_stop_stays():
    stop = threading.Event()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bounds = {number: ErrorBound("abs", number) for number in (0.1, 0.2)}

    def progress(done, total, text):
        if done == 2:
            stop.set()

    found = codec_bench.measure(x, ["error_bounded"], bounds, repetitions=1, should_stop=stop.is_set, progress=progress)
    assert found["stopped"] and len(found["bounds"]) == 2 and [row["bound"] for row in found["results"]] == [0.1]


def test_bounds_without_codes_that_can_be_counted_have_no_entropy():
    assert codec_bench.entropies(torch.ones(4), ErrorBound("range_rel", 0.1), False)["order0_bits"] is None
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for kind in ("abs", "range_rel", "pw_rel"):
        for value in (0.0, 1e-300, math.inf):
            assert set(codec_bench.entropies(x, ErrorBound(kind, value), False).values()) == {None}
    of_channels = ErrorBound("abs", torch.tensor([1e-300, 1.0]), channel_dim=0)
    assert codec_bench.entropies(x.view(2, 500), of_channels, False)["order0_bits"] is None
    coarse = codec_bench.entropies(x, ErrorBound("abs", 1e30), False)
    assert [f"{bits:.3f}" for bits in coarse.values()] == ["0.000", "0.000"]


@pytest.mark.parametrize("kind", ["abs", "range_rel", "pw_rel"])
def test_a_bound_of_zero_is_lossless_and_an_infinite_one_allows_anything_finite(kind):
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    bounds = {value: ErrorBound(kind, value) for value in (0.0, math.inf)}
    exact, free = codec_bench.measure(x, ["error_bounded"], bounds, repetitions=1)["results"]
    assert exact["max_error"] == exact["num_over_bound"] == free["num_over_bound"] == 0
    assert free["max_error"] > 0 and free["compression_ratio"] > 2 * exact["compression_ratio"]
    assert sum(free["histogram"]) == x.numel() and free["histogram_unit"] == free["max_error"]


def test_an_infinite_bound_does_not_allow_values_to_be_lost():
    x = torch.tensor([1.0, 2.0, 3.0])
    assert codec_bench.num_over_bound(x, torch.tensor([1.0, INF, NAN]), torch.tensor(INF)) == 2


def test_codecs_without_a_guarantee_are_held_against_every_bound():
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    bounds = {value: ErrorBound("abs", value) for value in (1e-6, 0.01, 10.0)}
    found = codec_bench.measure(x, ["cast", "sparse", "error_bounded"], bounds, repetitions=1)
    (cast,) = (row for row in found["results"] if "num_over_bounds" in row)
    codec = codec_bench.codec_of("cast")
    error = (codec.decode(codec.encode(x)) - x).abs()
    assert cast["codec"] == "cast" and cast["note"] == ""
    assert cast["num_over_bounds"] == [int((error > value).sum()) for value in bounds]
    assert cast["num_over_bounds"][0] > cast["num_over_bounds"][1] > cast["num_over_bounds"][2] == 0


def test_a_codec_that_became_lossless_says_when_it_does():
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = NAN
    (row,) = codec_bench.measure(x, ["dct"], {}, repetitions=1)["results"]
    assert row["max_error"] == 0 and "without loss what holds values that are not finite" in row["note"]


def test_parameters_of_a_codec_are_read_by_their_kind():
    for params in ("dither=True,seed=3", "dither=true, seed=3", "seed=3,dither=1"):
        codec = codec_bench.codec_of(f"error_bounded:{params}")
        assert (codec.dither, codec.seed) == (True, 3)
    assert codec_bench.codec_of("error_bounded:dither=False").dither is False


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("zip", r"codec is 'zip'; allowed: [^:]*, lossless\.$"),
        ("sign_mask", "restores what one backward reads, not values; allowed: error_bounded"),
        ("dct:quality", "'quality' has no value; write key=value,key=value"),
        ("dct:speed=1", "'speed' is no parameter of codec 'dct'; allowed: quality"),
        ("dct:quality=80,quality=90", "quality is given twice"),
        ("lossless:level=3", "allowed: none, it has none"),
        ("error_bounded:dither=maybe", "dither is 'maybe'; allowed: False, True"),
        ("error_bounded:seed=--5", "seed is '--5'; allowed: a whole number from 0"),
        ("error_bounded:seed=" + "9" * 5000, r"seed is '9+\.\.\.9+'; allowed"),
        ("zip" * 50, r"codec is 'zip.*\.\.\..*zip'; allowed"),
    ],
)
def test_a_codec_that_cannot_be_measured_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        codec_bench.codec_of(text)

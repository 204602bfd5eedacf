"""benchmarks/codec_sweep.py on a small random part of all bit patterns; all of them take minutes."""

import random
from collections import Counter

import pytest
import torch

from benchmarks import codec_sweep
from comet_core.codecs import get_codec
from comet_core.codecs.error_bounded import ErrorBoundedCodec

EDGES = [0x00000000, 0x007FF000, 0x3A800000, 0x7F7FF000, 0x80000000, 0x807FF000, 0xFF7FF000]  # zero, subnormal, largest


@pytest.mark.parametrize("sign_exact", [False, True])
@pytest.mark.parametrize("bound", [0.0, 1e-38, 1e-3, 0.37, 3e37])
def test_random_bit_patterns_keep_their_bound(bound, sign_exact):
    rng = random.Random(f"{bound} {sign_exact}")  # another part for each case, the same each time
    starts = EDGES + [rng.randrange(2**32 - 2**13) for _ in range(60)]
    found = sum(
        codec_sweep.sweep(get_codec("error_bounded"), bound, sign_exact, [(s, 2**13) for s in starts]), Counter()
    )
    assert found["num_patterns"] == len(starts) * 2**13
    assert {name: found[name] for name in codec_sweep.COUNTED} == dict.fromkeys(codec_sweep.COUNTED, 0)


class Careless(ErrorBoundedCodec):
    """Forgets the sign, and what is not finite, and moves each value by a little more than the bound."""

    def decode(self, encoded, device=None, *, out=None):
        return torch.nan_to_num(super().decode(encoded, device, out=out).abs(), 0, 0, 0) + 1.1


def test_what_breaks_a_promise_is_counted_by_kind():
    stretches = [(0xBF800000, 4), (0x7F800000, 2), (0x80000000, 1)]  # -1 and neighbours; infinity and a NaN; -0
    counts = list(codec_sweep.sweep(Careless(), 1.0, True, stretches))
    assert [entry["num_over_bound"] for entry in counts] == [4, 0, 1]
    assert [entry["num_nonfinite_changed"] for entry in counts] == [0, 2, 0]
    assert [entry["num_signs_changed"] for entry in counts] == [4, 0, 1]


def test_a_whole_sweep_visits_every_pattern_once_and_a_part_its_share():
    whole = codec_sweep.stretches(1.0, 0)
    assert [first for first, _ in whole] == list(range(0, 2**32, codec_sweep.SLICE_VALUES))
    part = codec_sweep.stretches(0.01, 0)
    assert sum(size for _, size in part) == pytest.approx(0.01 * 2**32, rel=0.01)
    assert part == codec_sweep.stretches(0.01, 0) != codec_sweep.stretches(0.01, 1)

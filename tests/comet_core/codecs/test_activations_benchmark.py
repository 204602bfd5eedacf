"""benchmarks/codec.py without its peers: what it compares, and that a broken bound ends it."""

import pytest
import torch

from benchmarks import codec as benchmark
from comet_core.codec_bench import Arm

CONV = {"name": "conv", "operator": "conv2d", "shape": [2, 3, 8, 8], "sign_exact": True, "bound": 0.1,
        "channel_dim": None}  # fmt: skip
NORM = {**CONV, "name": "bn", "operator": "batch_norm", "sign_exact": False, "bound": [0.1, 0.2, 0.3], "channel_dim": 1}


@pytest.fixture
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 8, 8, generator=generator) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) + 5


def peer(ratio: int):
    """Stores everything as it is and says that it took less."""
    return lambda bound: Arm(torch.clone, torch.clone, lambda encoded: encoded.nbytes // ratio)


def rows_of(x, entry, peers):
    rows = list(benchmark.measured(x, entry, peers, 1))
    return [{"model": "resnet20", "layer": entry["name"], "sign_exact": entry["sign_exact"], **row} for row in rows]


def test_peers_get_norm_inputs_standardised_with_one_bound(x):
    given, bound = benchmark.for_peers(x, NORM)
    assert bound == 0.1
    assert torch.allclose(given.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(given.std((0, 2, 3)), torch.ones(3), atol=1e-5)
    assert benchmark.for_peers(x, CONV)[0] is x
    assert benchmark.for_peers(torch.ones(2, 3, 8, 8), NORM)[0].eq(0).all()  # a channel without spread


def test_the_best_sz3_is_what_ours_is_measured_against(x):
    peers = {"SZ3 LORENZO_REG": peer(2), "SZ3 NOPRED": peer(8)}
    rows = rows_of(x.relu(), CONV, peers) + rows_of(x, NORM, peers)
    summary = benchmark.summary_of(rows)
    with_signs = "error_bounded, with signs"
    assert {(entry["arm"], entry["num_tensors"]) for entry in summary} == {
        ("error_bounded", 2), (with_signs, 1), ("error_bounded, dithered", 2), ("SZ3, best of three", 2)
    }  # fmt: skip
    (entry,) = [e for e in summary if (e["multiple"], e["arm"]) == (13, with_signs)]
    (row,) = [r for r in rows if (r["layer"], r["multiple"], r["arm"]) == ("conv", 13, with_signs)]
    assert entry["ratio_over_sz3"] == pytest.approx(row["compression_ratio"] / 8)
    assert entry["least_ratio_over_sz3"]["layer"] == "conv"
    # Of a norm's input a peer also needs mean and standard deviation of the three channels.
    (of_norm,) = {r["held_bytes"] for r in rows if (r["layer"], r["arm"]) == ("bn", "SZ3 NOPRED")}
    assert of_norm == x.nbytes // 8 + 3 * 8
    assert entry["bits_over_context_entropy"] == pytest.approx(row["bits_per_value"] / row["context_bits"])
    assert len(benchmark.table(summary).splitlines()) == 2 + len(summary)


def test_a_bound_that_ours_breaks_ends_the_benchmark_and_a_peers_is_counted(x, monkeypatch):
    careless = Arm(torch.clone, lambda encoded: encoded + 100, lambda encoded: encoded.nbytes)
    rows = rows_of(x, CONV, {"SZ3 NOPRED": lambda bound: careless})
    assert {row["num_over_bound"] for row in rows if row["arm"] == "SZ3 NOPRED"} == {x.numel()}
    monkeypatch.setattr(benchmark, "codec_arm", lambda *_: careless)
    with pytest.raises(AssertionError, match="error_bounded broke its bound on conv"):
        rows_of(x, CONV, {})

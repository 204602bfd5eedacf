"""Plans: lines through two small batches meet what a larger one takes, and the largest batch is the largest."""

import json

import pytest
import torch
from torch.nn import functional as F

import comet_core
from comet_core.__main__ import main
from comet_core.config import RunConfig
from comet_core.datasets import load_dataset
from comet_core.models import build_model
from comet_core.planner import MARGIN, _fit, plan

CONFIG = RunConfig(model="resnet20", dataset="digits", image_size=32, batch_size=64)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """With these set, the command does not start itself once more."""
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="module")
def planned():
    return plan(CONFIG, 64, 2**30)


def measured(policy, size=64):
    data = load_dataset(CONFIG)
    images, labels = next(iter(data.train_batches(1)))
    torch.manual_seed(0)
    model = build_model(CONFIG.model, data.num_classes, data.num_channels, data.image_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with comet_core.attach(model, optimizer, policy=policy, tune_allocator=False) as session:
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[:size]), labels[:size])
            by_operator = session.held_by_operator()
            loss.backward()
            optimizer.step()
            found = session.step()
    return by_operator, found


def test_saved_bytes_of_a_larger_batch_are_predicted_from_small_ones(planned):
    by_operator, found = measured("baseline")
    assert sum(by_operator.values()) == found.held_bytes == found.saved_bytes
    assert planned["saved_bytes"] == pytest.approx(found.saved_bytes, rel=0.01)
    assert {row["operator"] for row in planned["operators"]} == set(by_operator)
    for row in planned["operators"]:
        assert row["saved_bytes"] == pytest.approx(by_operator[row["operator"]], rel=0.01, abs=2000)


def test_held_bytes_of_a_larger_batch_are_predicted_to_a_quarter(planned):
    by_operator, found = measured("compress")
    assert sum(by_operator.values()) == found.held_bytes
    assert planned["arms"]["noise budget 5%"]["held_bytes"] == pytest.approx(found.held_bytes, rel=0.25)
    assert sum(row["held_bytes"] for row in planned["operators"]) == pytest.approx(
        planned["arms"]["noise budget 5%"]["held_bytes"], rel=0.01
    )


def test_larger_budgets_give_larger_ratios_and_lossless_the_least(planned):
    arms = planned["arms"]
    ratios = [arms[name]["compression_ratio"] for name in ("baseline", "lossless", *list(arms)[2:])]
    assert ratios == sorted(ratios) and ratios[0] == 1 and ratios[-1] > 5


@pytest.mark.parametrize("memory_bytes", [10**6, 10**9, 12_345_678_901])
@pytest.mark.parametrize(("fixed", "sample"), [(10**5, 33), (5 * 10**8, 1_234_567), (10**10, 7)])
def test_the_largest_batch_fits_and_one_more_does_not(memory_bytes, fixed, sample):
    def peak(size):
        return fixed + sample * size

    found, room = _fit(peak, memory_bytes), memory_bytes / (1 + MARGIN)
    size = found["largest_batch"]
    if size:
        assert peak(size) <= room < peak(size + 1) and found["short_bytes"] == 0
    else:
        assert peak(1) > room and found["short_bytes"] == pytest.approx(peak(1) * (1 + MARGIN) - memory_bytes)


def test_the_command_prints_a_table_and_writes_what_it_found(tmp_path, capsys):
    history = tmp_path / "out.json"
    assert main(["train", "--preset", "quick", "--set", "max_steps_per_epoch=8", "--set", "epochs=1",
                 "--json", str(history)]) == 0  # fmt: skip
    output = tmp_path / "plan.json"
    settings = json.loads(history.read_text())["config"]
    given = [part for name in ("dataset", "image_size") for part in ("--set", f"{name}={settings[name]}")]
    assert main(["plan", settings["model"], "--batch", "64", "--memory", "2GiB", "--history", str(history),
                 "--json", str(output), *given]) == 0  # fmt: skip
    said, found = capsys.readouterr().out, json.loads(output.read_text())
    assert found["memory_bytes"] == 2**31 and found["config"]["batch_size"] == 64
    for row in found["operators"]:
        assert row["operator"] in said
    assert f"{found['arms']['baseline']['largest_batch']:,}" in said
    past = found["past"][0]
    assert past["predicted_over_measured"] == pytest.approx(past["predicted_bytes"] / past["measured_bytes"])
    assert f"({past['predicted_over_measured']:.2f})" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonet"], "model"),
        (["resnet20", "--batch", "0"], "whole number"),
        (["resnet20", "--memory", "8 gigs"], "write it like 8GiB"),
        (["resnet20", "--memory", "0"], "write it like 8GiB"),
        (["resnet20", "--memory", "-1GiB"], "expected one argument"),
        (["resnet20", "--history", "/dev/null"], "`train --json` did not write"),
        (["resnet20", "--json", "/nowhere/x.json"], "no folder"),
        (["resnet20", "--set", "batch_size=4"], "takes 16 or more"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(arguments, words, capsys):
    try:
        code = main(["plan", *arguments])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and words in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 2**33), ("8GB", 8 * 10**9), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("77", 77)]
)
def test_sizes_have_units(text, nbytes):
    from comet_core.__main__ import _bytes

    assert _bytes(text) == nbytes

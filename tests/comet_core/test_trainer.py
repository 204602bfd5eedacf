"""Training: bit-identity of the baseline, schedules, what is recorded, how it ends."""

import math

import pytest
import torch
from torch.nn import functional as F

import comet_core
from comet_core.config import RunConfig
from comet_core.datasets import load_dataset
from comet_core.metrics import ListRecorder
from comet_core.models import build_model
from comet_core.trainer import learning_rate_schedule, train

QUICK = {"max_steps_per_epoch": 4, "batch_size": 32, "augment": True}


def trained(**values):
    recorder = ListRecorder()
    summary = train(RunConfig(**{**QUICK, **values}), recorder)
    return summary, recorder


def test_the_baseline_gives_the_losses_of_a_plain_loop_bit_for_bit():
    config = RunConfig(policy="baseline", epochs=2, **QUICK)
    _, recorder = trained(policy="baseline", epochs=2)
    data = load_dataset(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, data.num_classes, data.num_channels, data.image_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = learning_rate_schedule(config, optimizer, 8)
    losses = []
    for epoch in (1, 2):
        model.train()
        for images, labels in data.train_batches(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        model.eval()
    assert losses == [step.train_loss for step in recorder.steps]


def test_a_run_stores_with_the_parameters_of_its_codec():
    ratios = [
        trained(max_steps_per_epoch=1, codec="group_quantized", codec_params=text)[0]["conv_input_ratio"]
        for text in ("", "num_bits=8")
    ]
    assert ratios[0] > 2 * ratios[1] > 6


@pytest.mark.parametrize("changes", [
    {"optimizer": "adam", "learning_rate": 0.003}, {"momentum": 0.0}, {"momentum": 0.9, "learning_rate": 0.02},
    {"optimizer": "adam", "learning_rate": 0.003, "controller": "momentum"},
    {"momentum": 0.0, "controller": "momentum"},
])  # fmt: skip
def test_every_optimizer_trains_compressed_as_its_baseline_does(changes):
    losses = {}
    for policy in ("baseline", "compress"):
        _, recorder = trained(max_steps_per_epoch=25, policy=policy, collect_every=8, **changes)
        losses[policy] = [step.train_loss for step in recorder.steps]
    assert losses["compress"][0] == losses["baseline"][0]
    ends = {policy: sum(values[-5:]) / 5 for policy, values in losses.items()}
    assert ends["baseline"] < 0.9 * losses["baseline"][0]
    assert abs(ends["compress"] - ends["baseline"]) < 0.25
    assert any(layer.error_bound for layer in recorder.layers if layer.step == 24 and layer.operator == "conv2d")


def test_a_run_is_recorded_step_by_step_and_repeats_itself():
    summary, recorder = trained(epochs=2, collect_every=4)
    assert [(step.step, step.epoch, step.num_samples) for step in recorder.steps] == [
        (i, 1 + (i - 1) // 4, 32) for i in range(1, 9)
    ]
    assert [evaluation.step for evaluation in recorder.evals] == [4, 8]
    assert {row.step for row in recorder.layers} == {1, 2, 4, 8}
    assert summary["status"] == "finished" and summary["num_steps"] == 8
    assert summary["test_accuracy"] == recorder.evals[-1].test_accuracy
    last = [step for step in recorder.steps if step.epoch == 2]
    assert summary["compression_ratio"] == sum(s.saved_bytes for s in last) / sum(s.held_bytes for s in last)
    assert (
        summary["peak_rss_above_start_bytes"]
        == max(s.peak_rss_bytes for s in recorder.steps) - summary["start_rss_bytes"]
    )
    fullest = max(recorder.steps, key=lambda step: step.peak_bytes)
    assert summary["peak_step"] == fullest.step and sum(summary["peak_parts"].values()) == fullest.peak_bytes
    again = trained(epochs=2, collect_every=4)[1]
    assert [step.train_loss for step in again.steps] == [step.train_loss for step in recorder.steps]


def test_twins_start_from_the_same_weights_and_end_with_the_same_number_of_batches():
    (_, one), (_, other) = trained(), trained(policy="baseline")
    assert one.steps[0].train_loss == other.steps[0].train_loss
    assert one.steps[0].saved_bytes == other.steps[0].saved_bytes
    assert one.steps[0].held_bytes < 0.4 * other.steps[0].held_bytes


def test_a_run_starts_counting_once_the_engine_is_loaded_and_attached(monkeypatch):
    order = []
    attach = comet_core.attach
    monkeypatch.setattr(comet_core, "attach", lambda *a, **k: order.append("attach") or attach(*a, **k), raising=False)
    train(RunConfig(**QUICK), ListRecorder(), on_start=lambda facts: order.append("start"))
    assert order == ["attach", "start"]


def test_stopping_keeps_what_was_recorded_and_says_so():
    recorder = ListRecorder()
    summary = train(RunConfig(epochs=5, **QUICK), recorder, should_stop=lambda: len(recorder.steps) >= 6)
    assert summary["status"] == "stopped" and len(recorder.steps) == 6 and len(recorder.evals) == 1


def test_on_start_and_progress_tell_what_is_needed_to_follow_and_to_repeat():
    facts, seen = {}, []
    train(
        RunConfig(**QUICK),
        ListRecorder(),
        on_start=facts.update,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert facts["num_steps_total"] == 4 and facts["start_rss_bytes"] > 2**20
    assert {"torch", "numba", "python", "num_threads", "comet_core", "device"} <= set(facts["environment"])
    assert facts["environment"]["peak_rss_source"].startswith(("VmHWM", "ru_maxrss"))


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence_and_is_recorded():
    recorder = ListRecorder()
    with pytest.raises(RuntimeError, match=r"the loss became (nan|inf) at step \d+ of .* lower learning_rate"):
        # a decay of 1 at this rate multiplies the weights by -99 a step
        train(RunConfig(policy="baseline", learning_rate=100.0, weight_decay=1.0, momentum=0.0, schedule="constant",
                        batch_size=8, max_steps_per_epoch=40), recorder)  # fmt: skip
    assert not math.isfinite(recorder.steps[-1].train_loss)


def test_a_device_that_is_not_there_is_refused_in_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="sees no NVIDIA GPU"):
        train(RunConfig(device="cuda"), ListRecorder())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 1.0, 50: 1.0, 99: 1.0}),
        ("step", {0: 1.0, 49: 1.0, 50: 0.1, 74: 0.1, 75: 0.01}),
        ("cosine", {0: 1.0, 50: 0.5, 100: 0.0}),
        ("one_cycle", {0: 1 / 25, 30: 1.0, 65: 0.5, 100: 0.0}),
    ],
)
def test_a_schedule_passes_through_its_points(schedule, expected):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = learning_rate_schedule(RunConfig(schedule=schedule), optimizer, 100)
    rates = []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    for step, rate in expected.items():
        assert rates[step] == pytest.approx(rate, abs=1e-6), step


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_a_run_of_one_step_takes_the_full_learning_rate(schedule):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    learning_rate_schedule(RunConfig(schedule=schedule), optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 1.0

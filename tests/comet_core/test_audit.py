"""Audits say what a layer's stored input did to its gradient: held against plain autograd on the same batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comet_core
from comet_core import audit
from comet_core.metrics import AUDIT_BINS, ListRecorder

MAPS = (16, 8, 12, 12)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(16, 8, 1, 1))

    def forward(self, x):
        return x * (self.gate + 0)


class Behind(nn.Module):
    """The layer under audit behind a parameter, so that its input is no batch and has a gradient."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.base = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.layer(self.base + x)


# name -> layer, shape of its input, the parameter whose gradient is compared, is it the one upstream
LAYERS = {
    "conv": (lambda: nn.Conv2d(8, 12, 3, padding=1), MAPS, "layer.weight"),
    "strided": (lambda: nn.Conv2d(8, 12, 3, stride=2), MAPS, "layer.weight"),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), MAPS, "layer.weight"),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 4, stride=2), MAPS, "layer.weight"),
    "conv1d": (lambda: nn.Conv1d(8, 12, 5), (16, 8, 64), "layer.weight"),
    "linear": (lambda: nn.Linear(24, 12), (64, 20, 24), "layer.weight"),
    "batch norm": (lambda: nn.BatchNorm2d(8), MAPS, "layer.weight"),
    "layer norm": (lambda: nn.LayerNorm(24), (64, 20, 24), "layer.weight"),
    "group norm": (lambda: nn.GroupNorm(2, 8), MAPS, "layer.weight"),
    "rms norm": (lambda: nn.RMSNorm(24), (64, 20, 24), "layer.weight"),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), MAPS, "layer.weight"),
    "silu": (lambda: nn.SiLU(), MAPS, "base"),
    "silu in place": (lambda: nn.SiLU(inplace=True), MAPS, "base"),
    "elu in place": (lambda: nn.ELU(inplace=True), MAPS, "base"),
    "product": (Product, MAPS, "layer.gate"),
}


@pytest.fixture(autouse=True)
def _every_sample(monkeypatch):
    monkeypatch.setattr(audit, "SAMPLED", 1)


def backward(model, scale=1.0, parts=1):
    model.zero_grad()
    for part in range(parts):
        output = model(torch.zeros(()))
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(100 + part))
        (output * weights * scale).sum().backward()
    return {name: parameter.grad.double() / scale for name, parameter in model.named_parameters()}


def audited(model, *, steps=4, scale=1.0, parts=1, **options):
    """Gradients and audits of each iteration; nothing moves in between."""
    recorder = ListRecorder()
    options = {"controller": "fixed", "error_bound": 0.3, "collect_every": 1, **options}
    found = []
    with comet_core.attach(model, None, recorder=recorder, tune_allocator=False, **options) as session:
        for _ in range(steps):
            found.append(backward(model, scale, parts))
            session.step()
        return found, recorder, session


def rms(tensor):
    return float(tensor.square().mean().sqrt())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_an_audit_measures_what_plain_autograd_shows(name, parts):
    make, shape, parameter = LAYERS[name]
    torch.manual_seed(0)
    model = Behind(make(), shape)
    expected = backward(copy.deepcopy(model), parts=parts)
    found, recorder, _ = audited(model, parts=parts)
    last = recorder.audits[-1]
    error = found[last.step - 1][parameter] - expected[parameter]
    assert rms(error) > 0
    if parts == 1 or last.gradient != "upstream":  # upstream, an audit is of one call's gradient
        if name != "product":
            assert last.measured_sigma == pytest.approx(rms(error), rel=1e-3)
            assert last.gradient_rms == pytest.approx(rms(expected[parameter]), rel=1e-3)
        slope = float((error * expected[parameter]).sum() / expected[parameter].square().sum())
        assert last.slope == pytest.approx(slope, abs=2e-3)
    assert 0.4 < last.measured_sigma / last.predicted_sigma < 2.5
    counts = [int(count) for count in last.error_histogram.split(",")]
    assert len(counts) == AUDIT_BINS and sum(counts) == min(last.num_elements, audit.LARGEST_SAMPLE)
    assert last.extra_bytes >= parts * 4 * model.base.numel() or last.gradient == "upstream"
    if last.gradient == "norm" and name != "batch norm":
        base = found[last.step - 1]["base"] - expected["base"]
        assert last.passed_error == pytest.approx(rms(base) / rms(expected["base"]), rel=0.5 if parts == 2 else 1e-2)


def test_a_loss_scale_is_taken_out():
    class Scaler:
        def get_scale(self):
            return 1024.0

    torch.manual_seed(0)
    model = Behind(nn.Conv2d(8, 12, 3), MAPS)
    plain = audited(copy.deepcopy(model))[1].audits[-1]
    scaled = audited(model, scale=1024.0, grad_scaler=Scaler())[1].audits[-1]
    for name in ("measured_sigma", "predicted_sigma", "gradient_rms", "slope"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-4)


@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"product", "instance norm"}))
def test_a_share_of_the_samples_stands_for_all(name, monkeypatch):
    make, shape, _ = LAYERS[name]
    torch.manual_seed(0)
    model = Behind(make(), (64, *shape[1:]))
    whole = audited(copy.deepcopy(model))[1].audits[-1]
    monkeypatch.setattr(audit, "SAMPLED", 4)
    some = audited(model)[1].audits[-1]
    assert some.num_elements == whole.num_elements or whole.gradient == "upstream"
    norm = whole.gradient == "norm"  # 8 channels: the error of a standard deviation alone is a quarter
    assert some.measured_sigma == pytest.approx(whole.measured_sigma, rel=0.6 if norm else 0.1)
    assert some.predicted_sigma == pytest.approx(whole.predicted_sigma, rel=0.25)
    assert some.extra_bytes < 0.27 * whole.extra_bytes  # a bias is kept whole


def test_a_large_weight_is_audited_on_some_of_its_outputs(monkeypatch):
    torch.manual_seed(0)
    model = Behind(nn.Conv2d(8, 64, 3), MAPS)
    whole = audited(copy.deepcopy(model))[1].audits[-1]
    monkeypatch.setattr(audit, "LARGEST_WEIGHT", 16 * 8 * 9)
    some = audited(model)[1].audits[-1]
    assert (whole.num_elements, some.num_elements) == (64 * 72, 16 * 72)
    assert some.measured_sigma == pytest.approx(whole.measured_sigma, rel=0.1)
    assert some.predicted_sigma == pytest.approx(whole.predicted_sigma, rel=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
                         nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10))  # fmt: skip


def train(model, session=None, steps=24, skip=()):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(steps):
        x, y = torch.randn(32, 3, 12, 12), torch.randint(10, (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if i not in skip:
            loss.backward()
            optimizer.step()
        if session is not None:
            session.step(train_loss=loss)


def test_one_layer_an_iteration_and_each_has_its_turn_after_a_collection():
    model, recorder = network(), ListRecorder()
    with comet_core.attach(model, None, recorder=recorder, tune_allocator=False, collect_every=16) as session:
        train(model, session, steps=32)
    steps = [row.step for row in recorder.audits]
    assert len(steps) == len(set(steps))
    assert {row.name for row in recorder.audits} == {"1", "3", "4", "7"}
    assert steps[0] == 2 and [step for step in steps if step > 16] == [17, 18, 19, 20]  # the collection was at 16
    assert sorted(row.name for row in recorder.audits if row.step > 16) == ["1", "3", "4", "7"]


def test_audits_leave_training_as_it_is():
    """With an exact codec nothing differs from plain training, running statistics and random numbers included."""
    plain, watched = network(), network()
    train(plain)
    after = torch.rand(())
    with comet_core.attach(watched, None, tune_allocator=False, codec="lossless", collect_every=4) as session:
        train(watched, session)
    assert torch.equal(torch.rand(()), after)
    for one, other in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_forward_without_backward_costs_a_turn_and_nothing_else():
    model, recorder = network(), ListRecorder()
    with comet_core.attach(model, None, recorder=recorder, tune_allocator=False, collect_every=16) as session:
        train(model, session, steps=24, skip={17})
    assert [row.step for row in recorder.audits if row.step >= 17] == [17, 19, 20]


def test_the_controller_learns_what_was_measured():
    torch.manual_seed(0)
    model = Behind(nn.Conv2d(8, 12, 3, padding=1), MAPS)
    _, recorder, session = audited(model, steps=64, error_bound=1.5)
    first, last = recorder.audits[0], recorder.audits[-1]
    assert first.predicted_sigma < 0.8 * first.measured_sigma or first.predicted_sigma > 1.25 * first.measured_sigma
    assert last.measured_sigma == pytest.approx(last.predicted_sigma, rel=0.05)
    (layer,) = session.layers
    assert layer.measured_sigma == last.measured_sigma
    modelled = last.predicted_sigma / layer.audit_factor
    assert layer.audit_factor == pytest.approx(last.measured_sigma / modelled, rel=0.05)

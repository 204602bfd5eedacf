"""Controllers: numbers in, bounds out."""

import math

import pytest

from comet_core import error_models
from comet_core.controllers import (
    EXACT,
    FixedController,
    LayerStatistics,
    MemoryController,
    MomentumController,
    NoiseController,
    is_collection,
    samples_gradients,
)


def statistics(**changes):
    values = dict(name="conv", kind="weight", energy=12.0, out_channels=4, gradient_variance=1e-4,
                  momentum_magnitude=0.5, value_std=1e9, value_range=1e9)  # fmt: skip
    return LayerStatistics(**{**values, **changes})


def test_an_unknown_layer_gets_the_start_up_share_of_its_range():
    bound = NoiseController(noise_budget=0.05, norm_budget=0.2).bound_for("conv")
    assert (bound.kind, bound.value) == ("range", 1 / 64)


def test_the_noise_rule_spends_its_budget_of_the_gradients_variance():
    controller = NoiseController(noise_budget=0.05, norm_budget=0.2)
    controller.update(statistics(), 200)
    bound = controller.bound_for("conv")
    assert bound.target_sigma == pytest.approx(math.sqrt(0.05 * 1e-4))
    # sigma = 1.2 * bound / sqrt 3 * sqrt(energy / channels)
    assert bound.value == pytest.approx(bound.target_sigma / 1.2 * math.sqrt(3 * 4 / 12.0))
    assert bound.predicted_sigma == pytest.approx(bound.target_sigma)


def test_the_first_hundred_iterations_get_a_quarter_of_the_budget():
    early, late = (NoiseController(noise_budget=0.05, norm_budget=0.2) for _ in range(2))
    early.update(statistics(), 99)
    late.update(statistics(), 100)
    assert early.bound_for("conv").value == pytest.approx(late.bound_for("conv").value / 2)


def test_the_momentum_rule_takes_its_share_of_the_mean_momentum():
    controller = MomentumController(momentum_fraction=0.01)
    controller.update(statistics(), 5)
    assert controller.bound_for("conv").predicted_sigma == pytest.approx(0.005)


def test_norm_budgets_give_the_steps_of_the_theory():
    # THEORY section 2: steps of 0.77, 1.55 and 1.9 standard deviations are 5, 20 and 30 %
    for budget, step in ((0.05, 0.77), (0.2, 1.55), (0.3, 1.9)):
        assert 2 * error_models.norm_budget_in_std(budget) == pytest.approx(step, rel=0.01)
    controller = NoiseController(noise_budget=0.05, norm_budget=0.2)
    controller.update(statistics(kind="norm"), 1)
    assert controller.bound_for("conv").kind == "std"
    assert 2 * controller.bound_for("conv").value == pytest.approx(1.55, rel=0.01)


@pytest.mark.parametrize(("changes", "value"), [({"value_range": 8.0}, 1.0), ({"value_std": 0.25}, 0.25)])
def test_bounds_never_exceed_an_eighth_of_the_range_or_a_standard_deviation(changes, value):
    controller = NoiseController(noise_budget=10.0, norm_budget=10.0)
    controller.update(statistics(gradient_variance=1e6, **changes), 200)
    bound = controller.bound_for("conv")
    assert bound.value == value
    assert bound.predicted_sigma < bound.target_sigma
    controller.update(statistics(kind="norm"), 200)
    assert controller.bound_for("conv").value == 1.0


@pytest.mark.parametrize("controller", [
    NoiseController(noise_budget=0.05, norm_budget=0.2), MomentumController(momentum_fraction=0.01)])  # fmt: skip
def test_what_is_not_finite_or_zero_changes_nothing_and_a_layer_that_never_had_a_gradient_is_exact(controller):
    controller.update(statistics(), 200)
    before = controller.bound_for("conv")
    controller.update(statistics(energy=math.nan), 201)
    controller.update(statistics(energy=math.inf), 201)
    controller.update(statistics(gradient_variance=math.nan, momentum_magnitude=math.inf), 201)
    controller.update(statistics(gradient_variance=None, momentum_magnitude=None), 201)
    assert controller.bound_for("conv") == before
    controller.update(statistics(energy=0.0), 201)
    assert controller.bound_for("conv") == before
    controller.update(statistics(name="unused", energy=0.0), 201)
    assert controller.bound_for("unused").kind == "exact"
    controller.update(statistics(name="unused"), 202)
    assert controller.bound_for("unused").kind == "abs"


def test_fixed_is_one_bound_for_all_and_reports_what_it_does():
    controller = FixedController(error_bound=1e-3)
    assert (controller.bound_for("any").kind, controller.bound_for("any").value) == ("abs", 1e-3)
    controller.update(statistics(), 1)
    assert controller.bound_for("conv").value == 1e-3
    assert controller.bound_for("conv").predicted_sigma > 0


def test_collections_double_and_then_come_every_w_iterations():
    assert [i for i in range(1, 310) if is_collection(i, 100)] == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    assert [i for i in range(1, 8) if is_collection(i, 1)] == list(range(1, 8))


def test_gradients_are_sampled_in_the_five_iterations_up_to_a_collection():
    assert [i for i in range(80, 120) if samples_gradients(i, 100)] == [96, 97, 98, 99, 100]


@pytest.mark.parametrize(
    ("controller", "together"),
    [(NoiseController(noise_budget=0.05, norm_budget=0.2), 0.05), (MomentumController(momentum_fraction=0.01), 1e-4)],
)
def test_layers_that_pass_errors_upstream_share_one_budget_of_the_gradients_square(controller, together):
    for share in (0.25, 0.75):
        controller.update(statistics(kind="upstream", gradient_square=4.0, budget_share=share), 200)
        assert controller.bound_for("conv").target_sigma == pytest.approx(math.sqrt(share * together * 4.0))
    before = controller.bound_for("conv")
    controller.update(statistics(kind="upstream", gradient_square=None), 201)
    assert controller.bound_for("conv") == before


def noise(**options):
    return NoiseController(noise_budget=0.05, norm_budget=0.2, **options)


def kinds(controller):
    return [(event.kind, event.layer) for event in controller.take_events()]


def test_a_factor_that_audits_measured_takes_its_part_of_the_budget():
    controller = noise()
    for step in range(100, 3000, 100):
        controller.update(statistics(audit_ratio=3.0), step)
    assert controller.factor_of("conv", "weight") == pytest.approx(3.0, rel=1e-3)
    bound = controller.bound_for("conv")
    assert bound.predicted_sigma == pytest.approx(bound.target_sigma)
    assert bound.value == pytest.approx(bound.target_sigma / 3 * math.sqrt(3 * 4 / 12.0), rel=1e-3)
    assert ("factor", "conv") in kinds(controller)
    controller.update(statistics(), 3000)  # without an audit it stays
    controller.update(statistics(audit_ratio=math.nan), 3100)
    controller.update(statistics(audit_ratio=0.0), 3200)
    assert controller.factor_of("conv", "weight") == pytest.approx(3.0, rel=1e-3) and not kinds(controller)


def test_a_norms_factor_makes_its_bound_smaller():
    one, other = noise(), noise()
    for step in range(100, 3000, 100):
        one.update(statistics(kind="norm", audit_ratio=1.0), step)
        other.update(statistics(kind="norm", audit_ratio=2.0), step)
    assert one.bound_for("conv").value == pytest.approx(2 * other.bound_for("conv").value, rel=1e-3)


def test_an_event_says_why_a_bound_is_another_than_before_and_nothing_is_said_twice():
    controller = noise()
    controller.update(statistics(energy=0.0), 1)
    controller.update(statistics(energy=0.0), 2)
    assert kinds(controller) == [("exact", "conv")]
    controller.update(statistics(), 4)
    controller.update(statistics(), 8)
    assert kinds(controller) == [("budget", "conv")]
    controller.update(statistics(value_range=1e-9), 16)
    controller.update(statistics(energy=math.nan), 32)
    controller.update(statistics(), 100)
    assert kinds(controller) == [("clamped", "conv"), ("not finite", "conv"), ("warm-up", None), ("budget", "conv")]


@pytest.mark.parametrize("jump", [9.0, math.nan, math.inf])
def test_bounds_tighten_at_once_when_the_loss_jumps_and_recover_slowly(jump):
    controller = noise()
    controller.update(statistics(), 200)
    usual = controller.bound_for("conv").value
    for i in range(30):
        assert not controller.end_iteration(i, loss=1.0 + 0.01 * (i % 5), held_bytes=1)
    assert controller.end_iteration(30, loss=jump, held_bytes=1)
    assert controller.bound_for("conv").value == pytest.approx(usual / 4)
    assert controller.bound_for("conv").predicted_sigma == pytest.approx(controller.bound_for("conv").target_sigma / 4)
    shares = []
    for i in range(31, 91):
        controller.end_iteration(i, loss=1.0, held_bytes=1)
        shares.append(controller.bound_for("conv").value / usual)
    assert shares == sorted(shares) and shares[8] == pytest.approx(1 / 4) and shares[35] < 1 and shares[-1] == 1
    found = [kind for kind, _ in kinds(controller)]
    assert found.count("loss spike") == 1 and found.count("recovering") == 4


def test_a_loss_that_falls_or_rises_smoothly_is_no_jump():
    controller = noise()
    for i in range(300):
        assert not controller.end_iteration(i, loss=2.3 * 0.99**i + 0.05 * math.sin(i), held_bytes=1)
        assert not controller.end_iteration(i, loss=None, held_bytes=1)


def test_a_diverging_loss_never_takes_more_than_a_sixteenth():
    controller = noise()
    controller.update(statistics(), 200)
    usual = controller.bound_for("conv").value
    for i in range(60):
        controller.end_iteration(i, loss=1.0 if i < 30 else 10.0 ** (i - 28), held_bytes=1)
    assert controller.bound_for("conv").value == pytest.approx(usual / 16)


def test_bounds_given_by_pattern_take_the_rules_place():
    controller = noise(layer_bounds={"stem.*": 0.5, "stem.conv": 0.1, "head": None})
    assert controller.bound_for("stem.conv").value == 0.5  # the first that fits, from the first iteration on
    assert controller.bound_for("head") == EXACT and controller.bound_for("body").kind == "range"
    for name in ("stem.conv", "head", "body"):
        controller.update(statistics(name=name), 100)
    assert controller.bound_for("stem.conv").value == 0.5 and controller.bound_for("stem.conv").predicted_sigma > 0
    assert controller.bound_for("head").kind == "exact" and controller.bound_for("body").kind == "abs"
    assert kinds(controller)[:2] == [("override", "stem.conv"), ("override", "head")]
    assert controller.unmatched_patterns({"stem.conv", "body"}) == ["head"]


@pytest.mark.parametrize(("memory_bytes", "fits"), [(6e6, True), (2.5e6, True), (1e5, False)])
def test_the_memory_rule_finds_the_smallest_budget_that_fits(memory_bytes, fits):
    """Held bytes here: a million values, half a bit less a value for each doubling of the budget, and a megabyte."""
    controller = MemoryController(memory_bytes=int(memory_bytes))

    def held():
        return int(1e6 + 1e6 * max(4 - 0.5 * math.log2(controller.noise_budget / 0.05), 0.5))

    for i in range(1, 400):
        if is_collection(i, 50):
            controller.update(statistics(), i)
        controller.end_iteration(i, loss=None, held_bytes=held())
    spent = controller.noise_budget
    assert controller.norm_budget == pytest.approx(4 * spent)
    assert (held() <= memory_bytes) == fits
    found = [kind for kind, _ in kinds(controller)]
    assert "memory" in found
    if fits and spent > 2e-6:
        assert held() > 0.85 * memory_bytes
    if not fits:
        assert spent == 10.0 and found.count("memory") < 20
    bound = controller.bound_for("conv")
    assert bound.target_sigma == pytest.approx(math.sqrt(spent * 1e-4))

"""Controllers: numbers in, bounds out."""

import math

import pytest

from comet_core import error_models
from comet_core.controllers import (
    FixedController,
    LayerStatistics,
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
def test_a_layer_without_gradient_is_exact_and_what_is_not_finite_changes_nothing(controller):
    controller.update(statistics(), 200)
    before = controller.bound_for("conv")
    controller.update(statistics(energy=math.nan), 201)
    controller.update(statistics(energy=math.inf), 201)
    controller.update(statistics(gradient_variance=math.nan, momentum_magnitude=math.inf), 201)
    controller.update(statistics(gradient_variance=None, momentum_magnitude=None), 201)
    assert controller.bound_for("conv") == before
    controller.update(statistics(energy=0.0), 201)
    assert controller.bound_for("conv").kind == "exact"


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

"""From an error in a saved tensor to an error in a gradient, per operator (THEORY sections 1 and 2).

A stored value differs from the true one by at most `error_bound`, evenly spread: its root mean square e is the bound
over sqrt 3. `energy` is sum(sensitivity * d^2) over every backward call of the iteration, d the gradient at the
operator's output. Zeros are stored exactly and carry no error. Everything here is a number: no tensors.

Weights (convolutions of all kinds, linear, matmul and einsum with a weight, a factor for each channel). An error of x
stops at dW. Sensitivity is R, the share of non-zero inputs. Each element of the output meets K of W's elements, so one
of these collects energy * K / elements of W: `out_channels` is elements / K. For a convolution it is just that; for a
transposed one, of which an output meets kernel / stride taps a dimension, output channels * stride in each dimension.

Upstream: activations and products. The gradient passed on is g = d * h(x), and an error changes it by d * h'(x) * e. As
independent noise it adds e^2 * mean(h'^2) * sum d^2 to the square of g, so it costs kappa = e^2 * energy / sum g^2:
about e^2 * mean(h'^2) / mean(h^2). Sensitivity is the mean of ((h(x +- e) - h(x)) / e)^2 at the bound in use, so that
kinks (Hardswish at -3 and 3) count as what they do there; sum g^2 is measured in backward, with the d that there is.
For a product y = x * s, h is x where the error is and g is the other factor's gradient, summed over positions where
that factor is broadcast: sensitivity is R. `out_channels` is the number of elements of g, so that sigma is an element's
again. Measured / modelled: 0.85 to 1.15 for SiLU, GELU, Mish, Softplus, ELU, CELU, Hardswish
and products at bounds of 1 and 10 % of the input's deviation (SELU, whose kink at zero rounding favours: 1.4).

Such noise adds up on its way: layers share one budget, in proportion to their values, which for a given sum costs
the fewest bits (with bits = -log2(kappa) / 2 a value, d bits / d kappa is then equal for all). A weight's gradient sums
over positions and samples where its own sampling noise is correlated and the added noise is not: weights feel less.

Norms (THEORY section 2). Groups of layer, group, instance and RMS norm are a sample's own. e_hat is the error in units
of the group's deviation s, m the elements of a group: dx has a relative error of e_hat * sqrt(rho^2 + 1/m), the scale's
gradient one of e_hat * sqrt(sum d^2). With one bound for groups of different s, the square of dx's error is e^2 / m *
mean(1 / s^4) / mean(1 / s^2): that quotient takes the place of 1 / s^2. Measured / modelled for dx 0.5 to 2, for the
scale 0.6 to 1.4 (tests/comet_core/test_operators.py).

Rounding at coarse bounds follows the values, and so a little the gradient: measured / modelled has a median of 1.15 to
1.2 for weights (THEORY section 1). Audits (audit.py) measure it for each layer; the controller's factor starts from
that.
"""

import math

START_FACTORS = {"weight": 1.2, "norm": 1.0, "upstream": 1.0}
"""Measured over modelled standard deviation, by the gradient that an error changes, before a layer was audited."""


def modelled_sigma(bound: float, energy: float, channels: float) -> float:
    """Standard deviation of one gradient element's error, for a bound that is used in full and evenly.

    `bound` in the tensor's units, for a norm in the channel's standard deviations; `channels` share `energy` out (a
    norm's shift has no error).
    """
    return bound * math.sqrt(energy / (3 * channels))


def bound_at(sigma: float, energy: float, channels: float) -> float:
    """The bound at which `modelled_sigma` is `sigma`. `energy` must be positive."""
    return sigma / math.sqrt(energy / (3 * channels))


def norm_budget_in_std(norm_budget: float) -> float:
    """The bound, in channel standard deviations, that spends `norm_budget` of the scale's sampling noise.

    kappa = e_hat^2 = step^2 / (12 s^2) with step = 2 * bound (THEORY section 2).
    """
    return math.sqrt(3 * norm_budget)

"""From an error in a saved tensor to an error in a gradient, per operator (THEORY sections 1 and 2).

A stored value differs from the true one by at most `error_bound`, evenly spread: its root mean square is bound / sqrt
3. `energy` is sum(R * d^2) over every backward call of the iteration: d the gradient at the operator's output, R the
share of non-zero inputs, since zeros are stored exactly and carry no error. Everything here is a number: no tensors.
"""

import math

# Plain rounding at coarse bounds is not independent of the gradient: measured / predicted has a median of 1.15 to 1.2
# (THEORY section 1). Audits will replace it by a factor a layer.
ROUNDING_FACTOR = 1.2


def weight_sigma(error_bound: float, energy: float, out_channels: int) -> float:
    """Standard deviation of one weight-gradient element's error: convolution and linear inputs (THEORY section 1)."""
    return ROUNDING_FACTOR * error_bound * math.sqrt(energy / (3 * out_channels))


def weight_error_bound(sigma: float, energy: float, out_channels: int) -> float:
    """The bound at which `weight_sigma` is `sigma`. `energy` must be positive."""
    return sigma / (ROUNDING_FACTOR * math.sqrt(energy / (3 * out_channels)))


def norm_sigma(bound_in_std: float, energy: float, channels: int) -> float:
    """Standard deviation of the error of a norm's scale gradient, averaged over channels (THEORY section 2).

    `bound_in_std`: error bound in units of the channel's standard deviation. The gradient of the shift has no error.
    """
    return bound_in_std * math.sqrt(energy / (3 * channels))


def norm_bound_in_std(sigma: float, energy: float, channels: int) -> float:
    """The bound, in channel standard deviations, at which `norm_sigma` is `sigma`. `energy` must be positive."""
    return sigma / math.sqrt(energy / (3 * channels))


def norm_budget_in_std(norm_budget: float) -> float:
    """The bound, in channel standard deviations, that spends `norm_budget` of the scale's sampling noise.

    kappa = e_hat^2 = step^2 / (12 s^2) with step = 2 * bound (THEORY section 2).
    """
    return math.sqrt(3 * norm_budget)

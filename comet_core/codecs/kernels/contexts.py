"""The choice of tables for a tensor's codes: whether to predict, which contexts there are, frequencies for each.

A value's code is predicted from its left, upper and upper left neighbour by the median of left, up and left + up -
upper left, and what is coded is the difference from that. Its context is how much the neighbours differ among
themselves, and how large the prediction is, each by thresholds. Where neighbours tell little about a value, the
prediction is the middle, and left and upper neighbour are the context. Contexts with like statistics share a table:
merged greedily as long as a table of its own costs more bits than it saves, down to 16 at most. All of that comes from
a sample of some 65,536 values, so that choosing costs little beside coding.

Sources: the predictor is that of LOCO-I (Weinberger, Seroussi and Sapiro 2000), after Martucci (1990); contexts of
local activity, Wu and Memon, "Context-based, adaptive, lossless image coding" (1997); the merging is plain
agglomerative clustering by description length.
"""

from typing import Any

import numpy as np

from comet_core.codecs.kernels.compiled import compiled
from comet_core.codecs.kernels.tables import (
    ALONE,
    MIDDLE,
    MOST_PLANE,
    MOST_THRESHOLDS,
    NO_LEFT,
    NO_UP,
    SLOTS,
    Layout,
    Tables,
    occurring_contexts,
)

_SAMPLE = 1 << 16
_TRIAL_RUNS = 4
"""So many runs of the sample decide whether predicting pays."""
_RUN_VALUES, _RUN_ROWS, _LEAST_RUNS = 2048, 3, 8
_ESCAPE_BITS = 18
"""What an escape costs: a byte, and about as much for its rare code."""
_MOST_CONTEXTS = 16
_MOST_BINS = 24


def sample_starts(num_values: int, layout: Layout) -> tuple[np.ndarray, int]:
    """Flat indices where the sample's runs begin, and their length: whole planes or rows, spread over the tensor."""
    if layout.restart <= MOST_PLANE:
        length = max(round(_RUN_VALUES / layout.restart), 1) * layout.restart
    else:
        length = max(round(_RUN_VALUES / layout.up), _RUN_ROWS) * layout.up
    length = min(length, num_values)
    wanted = max(_SAMPLE // length, _LEAST_RUNS)
    num_runs = num_values // length
    if num_runs <= wanted:
        return np.arange(num_runs) * length, length
    # Multiples of the golden ratio: even, and in step with no number of channels.
    return np.sort((np.arange(1, wanted + 1) * 0.6180339887498949 % 1 * num_runs).astype(np.int64)) * length, length


def tables_of(sample: np.ndarray, layout: Layout, num_values: int) -> Tables | None:
    """Tables for a sample of codes, (runs, length) uint8; None where so many need an escape that codes do not pay."""
    shape = layout.left, layout.up, min(layout.restart, sample.shape[1])
    trial = np.ascontiguousarray(sample[:: max(len(sample) // _TRIAL_RUNS, 1)])
    tried = [_tried(trial, *shape, predicts, _X_LOG_X) for predicts in (False, True)]
    predicts = bool(tried[1][0] < tried[0][0])
    _, first_levels, second_levels = tried[predicts]
    low, pairs = _with_symbols(_counted(sample, *shape, predicts, first_levels, second_levels), sample.size)
    if not pairs.size:
        return None
    contexts, sums = _clustered(pairs, sample.size / num_values, _X_LOG_X)
    occurring = occurring_contexts(predicts, len(first_levels), len(second_levels))
    of_occurring = np.zeros(256, np.uint8)
    of_occurring[occurring] = contexts[occurring]
    return Tables(predicts, low, first_levels, second_levels, of_occurring, _frequencies(sums))


@compiled
def _tried(
    sample: np.ndarray, left: int, up: int, restart: int, predicts: bool, x_log_x: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Bits of all codes of a sample (runs, length) in their contexts, and the thresholds of first and second."""
    _, first, second, borders = _modelled(sample, left, up, restart, predicts)
    first_counts, second_counts = _histogram(first), _histogram(second)
    no_left, no_up = (borders == ALONE) | (borders == NO_LEFT), (borders == ALONE) | (borders == NO_UP)
    first_counts[0] -= (no_left | no_up).sum() if predicts else no_left.sum()  # which _modelled made 0
    second_counts[0] -= 0 if predicts else no_up.sum()
    first_levels = _thresholds(first_counts, MOST_THRESHOLDS + 1)
    second_levels = _thresholds(second_counts, MOST_THRESHOLDS + 1)
    pairs = _counted(sample, left, up, restart, predicts, first_levels, second_levels)
    bits = 0.0
    for context in range(256):
        of_context = pairs[context].sum()
        if of_context:
            bits += x_log_x[of_context]
            for difference in range(256):
                bits -= x_log_x[pairs[context, difference]]
    return bits, first_levels, second_levels


@compiled
def _counted(
    sample: np.ndarray, left: int, up: int, restart: int, predicts: bool, first_levels: np.ndarray,
    second_levels: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """(256, 256) int32: how often code - prediction + 128 modulo 256 has each context, without codes of 0."""
    predictions, first, second, borders = _modelled(sample, left, up, restart, predicts)
    codes = sample.ravel()
    first_of, second_of = _level_of(first_levels), _level_of(second_levels)
    places = np.empty(len(codes), np.uint16)
    for t in range(len(codes)):
        border: Any = np.int32(borders[t])
        of_first: Any = np.int32(first_of[first[t]])
        of_second: Any = np.int32(second_of[second[t]])
        if border != 0:
            has_no_left = border != NO_UP
            of_first = border if predicts else (ALONE if has_no_left else of_first)
            of_second = of_second if predicts or border == NO_LEFT else ALONE
        difference = (np.int32(codes[t]) - np.int32(predictions[t]) + MIDDLE) & 255
        places[t] = of_first << 12 | of_second << 8 | difference
    pairs = np.zeros(256 * 256, np.int32)
    for t in range(len(codes)):
        pairs[places[t]] += np.int32(codes[t] != 0)
    return pairs.reshape(256, 256)


@compiled
def _modelled(
    sample: np.ndarray, left: int, up: int, restart: int, predicts: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For all values of a sample (runs, length), uint8: predictions, what first and second are the levels of, borders.

    A border is NO_LEFT, NO_UP or ALONE; where the level is that, what it would be the level of is 0.
    """
    num_runs, length = sample.shape
    predictions, borders = np.full(sample.shape, MIDDLE, np.uint8), np.zeros(sample.shape, np.uint8)
    first, second = np.zeros(sample.shape, np.uint8), np.zeros(sample.shape, np.uint8)
    for run in range(num_runs):
        codes, of_run, of_border = sample[run], predictions[run], borders[run]
        of_first, of_second = first[run], second[run]
        inner = min(left + up, length)
        before, above, corner = codes[inner - left :], codes[inner - up :], codes[inner - left - up :]
        if predicts:
            # As if there were no borders: long loops become vector instructions.
            for j in range(length - inner):
                one, other, third = np.int32(before[j]), np.int32(above[j]), np.int32(corner[j])
                smaller, larger = min(one, other), max(one, other)
                of_run[inner + j] = min(max(one + other - third, smaller), larger)
                of_first[inner + j] = min(abs(one - third) + abs(other - third), 255)
        else:
            of_first[left:] = codes[: length - left]
            of_second[up:] = codes[: length - up]
        for row in range(0, length, up):
            end, second_column = min(row + up, length), min(row + left, length, row + up)
            has_up = row % restart >= up
            for t in range(row, second_column):
                of_border[t] = NO_LEFT if has_up else ALONE
                of_first[t] = 0
                if predicts:
                    of_run[t] = codes[t - up] if has_up else MIDDLE
            if not has_up:
                of_border[second_column:end] = NO_UP
                if predicts:
                    of_run[second_column:end] = codes[second_column - left : end - left]
                    of_first[second_column:end] = 0
                else:
                    of_second[row:end] = 0
        if predicts:
            of_second[:] = of_run
    return predictions.ravel(), first.ravel(), second.ravel(), borders.ravel()


@compiled
def _histogram(values: np.ndarray) -> np.ndarray:
    """(256,) int64: how often each value occurs."""
    # In four places, since neighbours are often alike and one place would be waited for.
    parts = np.zeros((4, 256), np.int64)
    whole = len(values) // 4 * 4
    for t in range(0, whole, 4):
        for place in range(4):
            parts[place, values[t + place]] += 1
    for t in range(whole, len(values)):
        parts[0, values[t]] += 1
    return parts.sum(0)


@compiled
def _thresholds(counts: np.ndarray, most: int) -> np.ndarray:
    """Ascending thresholds (uint8) between `most` levels at most of values that occur as counted in (256,).

    Levels are of like weight: the square root of the counts favours what is rare.
    """
    weight = np.sqrt(counts)
    whole, below, share_before = weight.sum(), 0.0, -1.0
    num_values = (counts > 0).sum()
    thresholds = np.empty(most, np.uint8)
    level = -1
    for value in range(256):
        if counts[value]:
            share = np.floor((below + weight[value] / 2) / whole * most)
            if level < 0 or num_values <= most or share > share_before:
                level += 1
                if level:
                    thresholds[level - 1] = value
            below += weight[value]
            share_before = share
    return thresholds[: max(level, 0)].copy()


@compiled
def _level_of(thresholds: np.ndarray) -> np.ndarray:
    """(256,) uint8: the number of thresholds that are no larger than each value."""
    level_of = np.zeros(256, np.uint8)
    for threshold in thresholds:
        level_of[threshold:] += np.uint8(1)
    return level_of


@compiled
def _with_symbols(pairs: np.ndarray, total: int) -> tuple[int, np.ndarray]:
    """The least difference that has a symbol, and the counts (256, A) of symbols in contexts, from `_counted`.

    (0, 0) counts where too many of `total` values would be escapes.
    """
    counts = np.zeros(256, np.int64)
    for context in range(256):
        counts += pairs[context]
    # A symbol takes at least one slot in each table, which is what it costs not to be an escape.
    begin, last = _most_gain(counts * _ESCAPE_BITS - total / (SLOTS * np.log(2)))
    last = min(last, begin + 254)
    if begin < 0 or total - counts[begin : last + 1].sum() > total // 16:
        return 0, np.zeros((0, 0), np.int64)
    of_symbols = np.zeros((256, last - begin + 2), np.int64)
    for context in range(256):
        of_symbols[context, 1:] = pairs[context, begin : last + 1]
        of_symbols[context, 0] = pairs[context].sum() - of_symbols[context, 1:].sum()
    return begin - MIDDLE, of_symbols


@compiled
def _clustered(pairs: np.ndarray, share: float, x_log_x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The table of each context (256,), and the counts of each table (K, A), for counts from a share of all values."""
    num_symbols = pairs.shape[1]
    of_context = pairs.sum(1)
    used = np.flatnonzero(of_context)
    # Comparing contexts takes no more detail than some neighbouring symbols together.
    padded = np.zeros(256, np.int64)
    for context in range(256):
        padded[:num_symbols] += pairs[context]
    bin_of = _level_of(_thresholds(padded, _MOST_BINS))
    binned = np.zeros((len(used), np.int64(bin_of.max()) + 1), np.int64)
    for place in range(len(used)):
        for symbol in range(num_symbols):
            binned[place, bin_of[symbol]] += pairs[used[place], symbol]
    table_of = _merge(binned, x_log_x, 16 * num_symbols * share, _MOST_CONTEXTS)
    contexts = np.full(256, table_of[of_context[used].argmax()], np.uint8)
    sums = np.zeros((np.int64(table_of.max()) + 1, num_symbols), np.int64)
    for place in range(len(used)):
        contexts[used[place]] = table_of[place]
        sums[table_of[place]] += pairs[used[place]]
    return contexts, sums


@compiled
def _frequencies(sums: np.ndarray) -> np.ndarray:
    """(K, A) uint16 of at least 1 that add up to SLOTS, close to the shares of the counts."""
    frequencies = np.empty(sums.shape, np.uint16)
    for row in range(len(sums)):
        total = max(sums[row].sum(), 1)
        excess: Any = -SLOTS  # numba's integers, which mypy takes for others
        for code in range(sums.shape[1]):
            frequency = max((2 * SLOTS * sums[row, code] + total) // (2 * total), 1)
            frequencies[row, code] = frequency
            excess += frequency
        while excess != 0:
            # The largest can spare most, and loses least.
            most = frequencies[row].argmax()
            spared = (np.int64(frequencies[row, most]) + 1) // 2
            change = excess if excess < spared else spared
            frequencies[row, most] -= change
            excess -= change
    return frequencies


@compiled
def _most_gain(gains: np.ndarray) -> tuple[int, int]:
    """First and last place of the run of neighbours with the largest sum, -1 where no gain is positive (Kadane)."""
    best, first, last = 0.0, -1, -1
    total, begin = 0.0, 0
    for place in range(len(gains)):
        if total <= 0:
            total, begin = 0.0, place
        total += gains[place]
        if total > best:
            best, first, last = total, begin, place
    return first, last


_X_LOG_X = np.arange(1 << 18) * np.log2(np.maximum(np.arange(1 << 18), 1))  # no sample has more values


@compiled
def _merge(counts: np.ndarray, x_log_x: np.ndarray, table_bits: float, most: int) -> np.ndarray:
    """(n,) the table of each of n contexts: the cheapest pair is merged until each table pays and there are few."""
    n, num_codes = counts.shape
    counts = counts.copy()
    table_of = np.arange(n)
    totals = counts.sum(1)
    bits = np.empty(n)
    for a in range(n):
        inside = 0.0
        for code in range(num_codes):
            inside += x_log_x[counts[a, code]]
        bits[a] = x_log_x[totals[a]] - inside
    costs = np.full((n, n), np.inf)
    nearest = np.zeros(n, np.int64)
    alive = np.ones(n, np.bool_)
    for a in range(n):
        for b in range(a):
            inside = 0.0
            for code in range(num_codes):
                inside += x_log_x[counts[a, code] + counts[b, code]]
            costs[a, b] = x_log_x[totals[a] + totals[b]] - inside - bits[a] - bits[b]
        if a:
            nearest[a] = costs[a, :a].argmin()
    left = n
    while left > 1:
        best = -1
        for a in range(1, n):
            if alive[a] and (best < 0 or costs[a, nearest[a]] < costs[best, nearest[best]]):
                best = a
        a, b = best, nearest[best]
        if a < 0 or (left <= most and costs[a, b] >= table_bits):
            break
        # b lives on with the counts of both.
        counts[b] += counts[a]
        totals[b] += totals[a]
        bits[b] += bits[a] + costs[a, b]
        alive[a] = False
        table_of[table_of == a] = b
        left -= 1
        for other in range(n):
            costs[max(a, other), min(a, other)] = np.inf
            if alive[other] and other != b:
                inside = 0.0
                for code in range(num_codes):
                    inside += x_log_x[counts[other, code] + counts[b, code]]
                cost = x_log_x[totals[other] + totals[b]] - inside - bits[other] - bits[b]
                costs[max(b, other), min(b, other)] = cost
        for other in range(1, n):
            if alive[other]:
                if other == b or nearest[other] == a or nearest[other] == b:
                    nearest[other] = costs[other, :other].argmin()
                elif b < other and costs[other, b] < costs[other, nearest[other]]:
                    nearest[other] = b
    number = -1
    numbers = np.full(n, -1)
    for a in range(n):
        if alive[a]:
            number += 1
            numbers[a] = number
    for a in range(n):
        table_of[a] = numbers[table_of[a]]
    return table_of

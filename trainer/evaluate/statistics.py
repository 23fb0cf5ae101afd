"""Means, perplexities and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clusterctl.wire.results import Figure


def mean(values: Sequence[float]) -> Figure:
    """Return the mean and its standard error."""
    count = len(values)
    average = math.fsum(values) / count
    if count < 2:
        return Figure(average)
    spread = math.fsum((value - average) ** 2 for value in values) / (count - 1)
    return Figure(average, math.sqrt(spread / count))


def perplexity(log_likelihoods: Sequence[float]) -> Figure:
    """Return exp(-mean), with a standard error by the delta method."""
    average = mean([-value for value in log_likelihoods])
    value = exp(average.value)
    return Figure(value, None if average.standard_error is None else value * average.standard_error)


def ratio_perplexity(log_likelihoods: Sequence[float], weights: Sequence[float]) -> Figure:
    """Return exp(-sum / sum of weights), such as perplexity per word, with a standard error by the delta method."""
    total = math.fsum(weights)
    value, count = exp(-math.fsum(log_likelihoods) / total), len(weights)
    if count < 2:
        return Figure(value)
    loss = math.log(value) if 0 < value < math.inf else 0.0
    residuals = [-ll - loss * weight for ll, weight in zip(log_likelihoods, weights, strict=True)]
    spread = math.fsum(residual**2 for residual in residuals) / (count - 1)
    return Figure(value, value * math.sqrt(spread * count) / total)


def exp(value: float) -> float:
    """Return e to the power of `value`; infinity if that is too large."""
    return math.exp(value) if value < 700 else math.inf

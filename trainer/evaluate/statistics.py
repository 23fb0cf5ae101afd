"""Means, perplexities and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value and its standard error; the error is None if the convention defines none."""

    value: float
    error: float | None = None


def mean(values: Sequence[float]) -> Metric:
    """Return the mean and its standard error."""
    count = len(values)
    average = math.fsum(values) / count
    if count < 2:
        return Metric(average)
    spread = math.fsum((value - average) ** 2 for value in values) / (count - 1)
    return Metric(average, math.sqrt(spread / count))


def perplexity(log_likelihoods: Sequence[float]) -> Metric:
    """Return exp(-mean), with a standard error by the delta method."""
    average = mean([-value for value in log_likelihoods])
    value = exp(average.value)
    return Metric(value, None if average.error is None else value * average.error)


def ratio_perplexity(log_likelihoods: Sequence[float], weights: Sequence[float]) -> Metric:
    """Return exp(-sum / sum of weights), such as perplexity per word, with a standard error by the delta method."""
    total = math.fsum(weights)
    value, count = exp(-math.fsum(log_likelihoods) / total), len(weights)
    if count < 2:
        return Metric(value)
    loss = math.log(value) if 0 < value < math.inf else 0.0
    residuals = [-ll - loss * weight for ll, weight in zip(log_likelihoods, weights, strict=True)]
    spread = math.fsum(residual**2 for residual in residuals) / (count - 1)
    return Metric(value, value * math.sqrt(spread * count) / total)


def exp(value: float) -> float:
    """Return e to the power of `value`; infinity if that is too large."""
    return math.exp(value) if value < 700 else math.inf

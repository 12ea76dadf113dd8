"""Zero mean and unit variance over a population that may lie on several ranks.

Each rank takes the moments of what it has, the moments are gathered and added in rank order, and each rank whitens its
own part with the sum: the result is that of one rank, for any split. Merging: Chan, Golub, LeVeque 1983.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Weight, sum and centred sum of squares of a population; `a + b` is that of both together."""

    count: float
    total: float
    centered_squares: float  # sum of weight * (x - mean)^2

    @property
    def mean(self) -> float:
        """total / count; 0 of an empty population."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Population variance (ddof 0), at least 1e-8."""
        return max(self.centered_squares / self.count if self.count else 0.0, VARIANCE_FLOOR)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        between = self.count * other.count / count * (self.mean - other.mean) ** 2 if count else 0.0
        return Moments(
            count=count,
            total=self.total + other.total,
            centered_squares=self.centered_squares + other.centered_squares + between,
        )


def moments(values: Tensor, weights: Tensor) -> Moments:
    """Take the moments of values, each counted `weights` times.

    Args:
        values: any shape.
        weights: the same shape, at least 0; a bool mask, or a number of tokens. Where it is 0 the value never matters.
    """
    weights = weights.double()
    values = torch.where(weights > 0, values.double(), 0.0)
    count, total = weights.sum().item(), (weights * values).sum().item()
    mean = total / count if count else 0.0
    return Moments(count=count, total=total, centered_squares=(weights * (values - mean).square()).sum().item())


def whiten(values: Tensor, population: Moments) -> Tensor:
    """Standardise values by a population.

        (x - mean) / sqrt(max(var, 1e-8))        ddof 0

    Returns:
        float64, of the shape of values.
    """
    return (values.double() - population.mean) / population.variance**0.5

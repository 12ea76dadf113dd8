"""Statistics of groups of rewards, shared by the outcome estimators.

Everything is float64 and taken after subtracting a reward of the same population, so that a constant group gives
exactly 0 (the mean of K equal float32 numbers is often not that number) and a nearly constant one keeps its true value.

Shapes: P prompts, K samples per prompt. `valid_PK` is bool; what lies at an invalid position, NaN included, never
matters.
"""

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4  # added to a standard deviation, in units of reward


def count_valid(valid_PK: Tensor) -> Tensor:
    """Count the valid samples of each group: (P, 1) float64."""
    return valid_PK.sum(dim=1, keepdim=True).double()


def center(rewards_PK: Tensor, valid_PK: Tensor) -> Tensor:
    """Subtract the group mean.

        c_i = R_i - mean_j R_j        over the valid samples j of the group of i

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.

    Returns:
        (P, K) float64. A constant group is exactly 0; so are invalid samples and groups with fewer than two valid ones.
    """
    offset_PK = _offset(rewards_PK.double(), valid_PK)
    mean_P1 = offset_PK.sum(dim=1, keepdim=True) / count_valid(valid_PK).clamp(min=1)
    return torch.where(valid_PK, offset_PK - mean_P1, 0.0)


def divide_by_std(advantages_PK: Tensor, population_PK: Tensor, valid_PK: Tensor, scale_rewards: Scale) -> Tensor:
    """Divide advantages by the standard deviation of a population, plus EPSILON.

        none:  a_i
        group: a_i / (std(x_j, j valid in the group of i) + 1e-4)
        batch: a_i / (std(x_j, j valid in the batch) + 1e-4)          std with ddof 1, two passes

    Args:
        advantages_PK: what to scale, (P, K) float64.
        population_PK: x, whose spread is measured, (P, K).
        valid_PK: which entries of the population count, (P, K) bool.
        scale_rewards: the population.

    Returns:
        (P, K) float64. A population of fewer than two has standard deviation 0.
    """
    if scale_rewards == "none":
        return advantages_PK
    rows = (population_PK, valid_PK)
    if scale_rewards == "batch":
        rows = (population_PK.reshape(1, -1), valid_PK.reshape(1, -1))
    return advantages_PK / (_std(*rows) + EPSILON)


def _std(population_PK: Tensor, valid_PK: Tensor) -> Tensor:
    squares_P1 = center(population_PK, valid_PK).square().sum(dim=1, keepdim=True)
    return (squares_P1 / (count_valid(valid_PK) - 1).clamp(min=1)).sqrt()


def _offset(rewards_PK: Tensor, valid_PK: Tensor) -> Tensor:
    first_P1 = valid_PK.int().argmax(dim=1, keepdim=True)  # the first True
    return torch.where(valid_PK, rewards_PK - rewards_PK.gather(1, first_P1), 0.0)

"""REINFORCE++ baseline: group mean as baseline, spread of the whole batch as scale.

Source: Hu et al. 2025, arXiv 2501.03262, section "REINFORCE++ w/ baseline"; the population of the standard deviation is
the samples of the batch (as in ms-swift) or their tokens (as in the paper's code).
"""

from typing import Literal

import torch
from torch import Tensor

from estimators.groups import Scale, center, divide_by_std
from estimators.whitening import moments, whiten


def reinforce_plus_plus(
    rewards_PK: Tensor,
    valid_PK: Tensor,
    num_tokens_PK: Tensor,
    *,
    scale_rewards: Scale = "batch",
    whiten_over: Literal["sequence", "token"] = "sequence",
) -> Tensor:
    """Subtract the group mean, then divide by the standard deviation of what is left.

        c_i = R_i - mean_g R
        batch, sequence: A_i = c_i / (std_N c + 1e-4)                                              ddof 1
        batch, token:    A_i = (c_i - mu) / sqrt(max(var, 1e-8))     mu, var over tokens, ddof 0
        group:           A_i = c_i / (std_g c + 1e-4)
        none:            A_i = c_i

    Unlike `grpo` with `batch`, differences between prompts do not enter the scale. Over `sequence` every group sums to
    0; over `token` it does not where lengths differ, for mu is weighted by length: a constant group gets -mu /
    sqrt(var).

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.
        num_tokens_PK: response tokens, (P, K); the weights of the token population.
        scale_rewards: group, batch or none.
        whiten_over: population of the `batch` standard deviation.

    Returns:
        Advantages, (P, K) float64: exactly 0 for invalid samples and, over sequences, constant groups and groups with
        fewer than two valid samples.
    """
    centered_PK = center(rewards_PK, valid_PK)
    if scale_rewards == "batch" and whiten_over == "token":
        weights_PK = torch.where(valid_PK, num_tokens_PK, 0)
        return torch.where(valid_PK, whiten(centered_PK, moments(centered_PK, weights_PK)), 0.0)
    return divide_by_std(centered_PK, centered_PK, valid_PK, scale_rewards)

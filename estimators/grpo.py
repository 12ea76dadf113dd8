"""GRPO: rewards standardised within the group; without the division, Dr.GRPO.

Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783.
"""

from torch import Tensor

from estimators.groups import Scale, center, divide_by_std


def grpo(rewards_PK: Tensor, valid_PK: Tensor, num_tokens_PK: Tensor, *, scale_rewards: Scale = "group") -> Tensor:
    """Subtract the group mean and divide by a standard deviation of the rewards.

        group: A_i = (R_i - mean_g R) / (std_g R + 1e-4)
        batch: A_i = (R_i - mean_g R) / (std_N R + 1e-4)
        none:  A_i =  R_i - mean_g R                          std with ddof 1

    `group` gives an easy or hard prompt (few samples differ) a larger step than a balanced one; `none` does not.

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.
        num_tokens_PK: response tokens, (P, K); not used.
        scale_rewards: group, batch or none.

    Returns:
        Advantages, (P, K) float64: exactly 0 for invalid samples, constant groups and groups with fewer than two valid
        ones.
    """
    return divide_by_std(center(rewards_PK, valid_PK), rewards_PK, valid_PK, scale_rewards)

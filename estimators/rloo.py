"""RLOO: the baseline of a sample is the mean reward of its siblings.

Source: Ahmadian et al. 2024, arXiv 2402.14740 (equation for REINFORCE Leave-One-Out); Kool et al. 2019.
"""

from torch import Tensor

from estimators.groups import Scale, center, count_valid, divide_by_std


def rloo(rewards_PK: Tensor, valid_PK: Tensor, num_tokens_PK: Tensor, *, scale_rewards: Scale = "none") -> Tensor:
    """Subtract the mean of the other valid samples of the group.

        A_i = R_i - 1/(n-1) * sum_{j != i} R_j  =  n/(n-1) * (R_i - mean_j R_j)        n valid samples in the group

    Unbiased: R_i does not enter its own baseline. Scaling (`group`, `batch`: divided by the standard deviation of the
    rewards, ddof 1, plus 1e-4) gives that up.

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.
        num_tokens_PK: response tokens, (P, K); not used.
        scale_rewards: group, batch or none.

    Returns:
        Advantages, (P, K) float64: exactly 0 for invalid samples, constant groups and groups with fewer than two valid
        ones.
    """
    num_valid_P1 = count_valid(valid_PK)
    advantages_PK = center(rewards_PK, valid_PK) * num_valid_P1 / (num_valid_P1 - 1).clamp(min=1)
    return divide_by_std(advantages_PK, rewards_PK, valid_PK, scale_rewards)

"""REINFORCE with the batch mean as baseline.

Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
"""

from torch import Tensor

from estimators.groups import center


def reinforce(rewards_PK: Tensor, valid_PK: Tensor, num_tokens_PK: Tensor) -> Tensor:
    """Subtract the mean of all valid rewards of the batch.

        A_i = R_i - mean_N R

    The baseline knows nothing of the prompt: a group whose rewards are all equal still learns (it is a hard or an easy
    one), and one valid sample in a group counts like any other.

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.
        num_tokens_PK: response tokens, (P, K); not used.

    Returns:
        Advantages, (P, K) float64: exactly 0 for invalid samples and where all rewards of the batch are equal.
    """
    return center(rewards_PK.reshape(1, -1), valid_PK.reshape(1, -1)).reshape(rewards_PK.shape)

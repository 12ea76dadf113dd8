"""What happens to rewards and masks before the estimator: clip, then the overlong penalty, then (elsewhere) KL.

Sources: soft overlong penalty and dynamic sampling, DAPO, Yu et al. 2025, arXiv 2503.14476, sections 3.2 and 3.4.
"""

import torch
from torch import Tensor

SIGNAL_TOLERANCE = 1e-6  # in units of reward


def clip_rewards(rewards_PK: Tensor, bound: float) -> Tensor:
    """Clip raw rewards to [-bound, bound]; before KL and baseline, so that it acts on what the reward function said."""
    return rewards_PK.clamp(-bound, bound)


def overlong_penalty(num_tokens: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Punish a response for entering the last `buffer` tokens of its allowance, in proportion.

        -penalty * clip(n - (max_new_tokens - buffer), 0, buffer) / buffer

    Args:
        num_tokens: response tokens n, any shape.
        max_new_tokens: allowance, tokens.
        buffer: width of the ramp, tokens, greater than 0.
        penalty: its greatest value, in units of reward; a longer response gets no more.

    Returns:
        What to add to the rewards, float64: from -penalty to 0.
    """
    over = (num_tokens - (max_new_tokens - buffer)).clamp(0, buffer)
    return -penalty * over.double() / buffer


def mask_truncated(mask_NT: Tensor, truncated_N: Tensor) -> Tensor:
    """Take responses cut at max_new_tokens out of loss, KL and denominators; their rewards stay in the baseline.

    Args:
        mask_NT: tokens that the policy chose, (N, T) bool.
        truncated_N: which responses were cut, (N,) bool.

    Returns:
        The mask to use instead, (N, T) bool. It goes wherever the mask went, sequence_kl included.
    """
    return mask_NT & ~truncated_N[:, None]


def has_signal(rewards_PK: Tensor, valid_PK: Tensor) -> Tensor:
    """Say which groups can teach: at least two valid rewards that differ by more than 1e-6.

    Args:
        rewards_PK: rewards, (P, K).
        valid_PK: which rewards count, (P, K) bool.

    Returns:
        (P,) bool.
    """
    rewards_PK = rewards_PK.double()
    highest_P = torch.where(valid_PK, rewards_PK, -torch.inf).amax(dim=1)
    lowest_P = torch.where(valid_PK, rewards_PK, torch.inf).amin(dim=1)
    return highest_P - lowest_P > SIGNAL_TOLERANCE  # -inf where nothing is valid

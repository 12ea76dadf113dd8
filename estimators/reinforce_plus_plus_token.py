"""REINFORCE++ without a group baseline: KL in the reward of each token, reward-to-go, whitened over the batch.

Source: Hu et al. 2025, arXiv 2501.03262 (the variant without group baseline).
"""

import torch
from torch import Tensor

from estimators.whitening import Moments, whiten


def reinforce_plus_plus_token(
    rewards_N: Tensor, valid_N: Tensor, kl_NT: Tensor, mask_NT: Tensor, *, beta: float, discount: float
) -> Tensor:
    """Sum what follows each token: the reward at the last token of the response, minus beta times k1 at every token.

        G_t = sum_{s >= t} discount^d(t, s) * ( R * [s is the last] - beta * k1_s )

    s runs over the tokens of the mask only and d(t, s) counts them, so observations (tools, environment) neither add KL
    nor discount. These are returns; `whiten_tokens` makes advantages of them.

    Args:
        rewards_N: reward of each response, (N,).
        valid_N: which rewards count, (N,) bool.
        kl_NT: old - ref log-probability of each token, nats, (N, T); zeros where beta is 0.
        mask_NT: tokens that the policy chose, (N, T) bool.
        beta: KL coefficient.
        discount: factor per token, in (0, 1].

    Returns:
        (N, T) float64, without gradient: exactly 0 outside the mask and in responses whose reward is invalid.
    """
    chosen_NT = mask_NT & valid_N[:, None]
    penalty_NT = torch.where(chosen_NT, beta * kl_NT.detach().double(), 0.0)
    to_go_N = torch.where(valid_N, rewards_N.double(), 0.0)
    started_N = torch.zeros_like(valid_N)  # whether the last token was met: the reward reaches it undiscounted
    returns_NT = torch.zeros_like(penalty_NT)
    for t in reversed(range(mask_NT.shape[1])):
        chosen_N = chosen_NT[:, t]
        discounted_N = torch.where(started_N, discount * to_go_N, to_go_N)
        to_go_N = torch.where(chosen_N, discounted_N - penalty_NT[:, t], to_go_N)
        returns_NT[:, t] = torch.where(chosen_N, to_go_N, 0.0)
        started_N = started_N | chosen_N
    return returns_NT


def whiten_tokens(returns_NT: Tensor, chosen_NT: Tensor, population: Moments) -> Tensor:
    """Standardise returns by the moments of all tokens of the step, on whichever rank they are.

        A_t = (G_t - mean) / sqrt(max(var, 1e-8))

    Args:
        returns_NT: from `reinforce_plus_plus_token`, (N, T).
        chosen_NT: tokens of the mask in responses with a valid reward, (N, T) bool.
        population: `moments(returns_NT, chosen_NT)`, added over ranks.

    Returns:
        Advantages, (N, T) float64: exactly 0 outside `chosen_NT`.
    """
    return torch.where(chosen_NT, whiten(returns_NT, population), 0.0)

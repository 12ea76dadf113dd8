"""KL divergence from the reference: per-token forms, in the reward or in the loss, and the adaptive coefficient.

With d = log pi - log ref of a sampled token, each form estimates KL(pi || ref) from samples of pi. As a loss the value
of a form says little; its gradient counts, and each docstring states it (the tests enumerate it). Masks select before
anything is computed, so padding may hold NaN or infinity.

Sources: Schulman 2020, "Approximating KL divergence" (k1, k2, k3); Ziegler et al. 2019, arXiv 1909.08593 (KL in the
reward, adaptive coefficient).
"""

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) is 4.9e8: beyond it a ratio says only "far"
K3_BOUND = 10.0  # nats per token


def k1(logprobs_NT: Tensor, ref_logprobs_NT: Tensor) -> Tensor:
    """Take the log-ratio: d. Unbiased, of either sign.

    Gradient: that of the log-probability itself, whose expectation is 0. Useless as a loss; this is the form for the
    reward.
    """
    return logprobs_NT - ref_logprobs_NT


def k2(logprobs_NT: Tensor, ref_logprobs_NT: Tensor) -> Tensor:
    """Take half its square: d^2 / 2. Biased, never negative.

    Gradient: d * grad log pi; for samples of pi its expectation is exactly grad KL(pi || ref).
    """
    return 0.5 * (logprobs_NT - ref_logprobs_NT).square()


def k3(logprobs_NT: Tensor, ref_logprobs_NT: Tensor) -> Tensor:
    """Take exp(-d) - 1 + d, with |d| bounded at 20 and the value at 10. Unbiased within the bounds, never negative.

    Gradient: (1 - exp(-d)) * grad log pi; for samples of pi its expectation is grad KL(ref || pi), the other direction,
    which equals grad KL(pi || ref) only to first order. 0 where the value exceeds 10.
    """
    gap_NT = (ref_logprobs_NT - logprobs_NT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (gap_NT.expm1() - gap_NT).clamp(max=K3_BOUND)  # expm1 keeps the value of small gaps, and its sign


def unbiased(logprobs_NT: Tensor, ref_logprobs_NT: Tensor, old_logprobs_NT: Tensor) -> Tensor:
    """Take w * k3 with w = exp(log pi - log old): unbiased in value and gradient, for samples of an older policy too.

    Gradient: w * d * grad log pi, which is that of w * k3 with w differentiated, written so that no bound cuts it; for
    samples of old its expectation is exactly grad KL(pi || ref). The ratio is the token's, whatever ratio the policy
    loss uses.
    """
    log_weight_NT = (logprobs_NT - old_logprobs_NT).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight_NT = log_weight_NT.exp()
    value_NT = weight_NT * k3(logprobs_NT.detach(), ref_logprobs_NT)
    slope_NT = weight_NT * (logprobs_NT - ref_logprobs_NT).detach()
    return value_NT + slope_NT * (logprobs_NT - logprobs_NT.detach())


def kl_penalty(
    kind: Literal["k1", "k2", "k3", "unbiased"],
    logprobs_NT: Tensor,
    ref_logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    mask_NT: Tensor,
) -> Tensor:
    """Compute the KL term of the loss, per token; `beta * aggregate(...)` of it joins the policy loss.

    Args:
        kind: the form.
        logprobs_NT: of the policy, with gradient, (N, T).
        ref_logprobs_NT: of the frozen reference, (N, T).
        old_logprobs_NT: of the policy at the start of the step, (N, T); `unbiased` alone reads it.
        mask_NT: tokens that the policy chose, (N, T) bool.

    Returns:
        (N, T), nats: exactly 0, without gradient, outside the mask.

    Raises:
        ValueError: for an unknown form.
    """
    logprobs, ref, old = (torch.where(mask_NT, x, 0.0) for x in (logprobs_NT, ref_logprobs_NT, old_logprobs_NT))
    match kind:
        case "k1":
            return k1(logprobs, ref)
        case "k2":
            return k2(logprobs, ref)
        case "k3":
            return k3(logprobs, ref)
        case "unbiased":
            return unbiased(logprobs, ref, old)
    raise ValueError(f"algorithm.kl_estimator must be k1, k2, k3 or unbiased, got {kind!r}. Choose one of them.")


def sequence_kl(old_logprobs_NT: Tensor, ref_logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Sum k1 over the response.

        KL_i = sum_t (old_it - ref_it)        over the mask

    Args:
        old_logprobs_NT: of the policy at the start of the step, (N, T).
        ref_logprobs_NT: of the frozen reference, (N, T).
        mask_NT: tokens that the policy chose, (N, T) bool.

    Returns:
        (N,) float64, nats, without gradient.
    """
    kl_NT = k1(old_logprobs_NT.detach().double(), ref_logprobs_NT.detach().double())
    return torch.where(mask_NT, kl_NT, 0.0).sum(dim=1)


def kl_in_reward(rewards_PK: Tensor, kl_PK: Tensor, beta: float) -> Tensor:
    """Subtract the KL of the whole response from its reward, before any baseline.

        R'_i = R_i - beta * KL_i

    Args:
        rewards_PK: rewards, (P, K).
        kl_PK: from `sequence_kl`, nats, (P, K).
        beta: KL coefficient.

    Returns:
        (P, K) float64, without gradient.
    """
    return rewards_PK.detach().double() - beta * kl_PK.detach().double()


def adapt_beta(beta: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """Move the KL coefficient towards the value that holds the KL at its target.

        beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Args:
        beta: the coefficient so far.
        kl: observed mean KL of a response, nats.
        target: wanted KL, nats, greater than 0.
        num_samples: samples behind the observation.
        horizon: samples over which the coefficient moves by a fifth at most, about.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return beta * (1.0 + error * num_samples / horizon)

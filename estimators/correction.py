"""Importance weights for samples that another distribution than the learner's made.

The engine's kernels, its precision and its older weights make the rollout logprobs differ from the learner's. The
weight is exp(old - rollout); it multiplies the policy loss of the token, never the KL term, and never enters a
denominator. All of it is undefined where top_p or top_k cut the sampled distribution; such configurations are refused.

Sources: truncation, Ionides 2008, and Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; masking and the geometric mean, Liu et al. 2025, "When speed kills stability"; off-policy mask, DeepSeek-V3.2
2025, arXiv 2512.02556.
"""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig

LOG_RATIO_BOUND = 20.0


def correction_weights(
    algorithm: AlgorithmConfig, old_logprobs_NT: Tensor, rollout_logprobs_NT: Tensor, mask_NT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weight of each token.

        w_t = exp(old_t - rollout_t)
        product:   W = exp(sum_t (old_t - rollout_t))        the importance ratio of the response
        geometric: W = exp(mean_t (old_t - rollout_t))       its mean per token

        none:              1
        token_truncate:    min(w_t, max)
        token_mask:        w_t where min <= w_t <= max, else 0
        sequence_truncate: min(W, max)
        sequence_mask:     W (product) or w_t (geometric) where min <= W <= max, else 0

    min and max are `correction_min` and `correction_max`; product or geometric is `correction_ratio`. The product is
    unbiased and its variance grows with length; the geometric mean compares responses of any length and is no
    importance ratio, so that behind its mask each token keeps its own.

    Args:
        algorithm: the options.
        old_logprobs_NT: of the learner at the start of the step, (N, T).
        rollout_logprobs_NT: of the engine, (N, T).
        mask_NT: tokens that the policy chose, (N, T) bool.

    Returns:
        weights_NT, constants, 0 outside the mask; and facts, (N, T): `rollout_ratio`, w_t (1 outside the mask), and
        `corrected`, bool, where a weight was capped or masked.

    Raises:
        ValueError: for an unknown correction.
    """
    log_ratio_NT = torch.where(mask_NT, old_logprobs_NT - rollout_logprobs_NT, 0.0).detach()
    token_NT = _bounded_exp(log_ratio_NT)
    low, high = algorithm.correction_min, algorithm.correction_max
    if algorithm.correction == "none":
        weights_NT, corrected_NT = torch.ones_like(token_NT), torch.zeros_like(mask_NT)
    else:
        geometric = algorithm.correction_ratio == "geometric"
        sequence_NT = _sequence_ratio(log_ratio_NT, mask_NT, geometric).expand_as(token_NT)
        match algorithm.correction:
            case "token_truncate":
                weights_NT, corrected_NT = token_NT.clamp(max=high), token_NT > high
            case "token_mask":
                corrected_NT = (token_NT < low) | (token_NT > high)
                weights_NT = torch.where(corrected_NT, 0.0, token_NT)
            case "sequence_truncate":
                weights_NT, corrected_NT = sequence_NT.clamp(max=high), sequence_NT > high
            case "sequence_mask":
                corrected_NT = (sequence_NT < low) | (sequence_NT > high)
                weights_NT = torch.where(corrected_NT, 0.0, token_NT if geometric else sequence_NT)
            case _:
                raise ValueError(
                    "algorithm.correction must be none, token_truncate, token_mask, sequence_truncate or "
                    f"sequence_mask, got {algorithm.correction!r}. Choose one of them."
                )
    facts = {"rollout_ratio": token_NT, "corrected": mask_NT & corrected_NT}
    return torch.where(mask_NT, weights_NT, 0.0), facts


def off_policy_mask(
    logprobs_NT: Tensor, rollout_logprobs_NT: Tensor, advantages: Tensor, mask_NT: Tensor, delta: float
) -> Tensor:
    """Say which losses to keep: a bad response that the policy has left behind teaches nothing.

        keep = not (A < 0 and mean_t (rollout_t - log pi_t) > delta)

    Select the losses with it (`torch.where`); the denominators stay.

    Args:
        logprobs_NT: of the policy, (N, T).
        rollout_logprobs_NT: of the engine, (N, T).
        advantages: (N, 1) or (N, T).
        mask_NT: tokens that the policy chose, (N, T) bool.
        delta: nats per token.

    Returns:
        bool, of the shape of advantages.
    """
    gap_NT = torch.where(mask_NT, rollout_logprobs_NT - logprobs_NT.detach(), 0.0)
    mean_N1 = gap_NT.sum(dim=1, keepdim=True) / mask_NT.sum(dim=1, keepdim=True).clamp(min=1)
    return ~((advantages < 0) & (mean_N1 > delta))


def _sequence_ratio(log_ratio_NT: Tensor, mask_NT: Tensor, geometric: bool) -> Tensor:
    total_N1 = log_ratio_NT.sum(dim=1, keepdim=True)
    return _bounded_exp(total_N1 / mask_NT.sum(dim=1, keepdim=True).clamp(min=1) if geometric else total_N1)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

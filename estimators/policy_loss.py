"""Policy losses, per token.

Every loss is written per token so that `aggregate` gives its value and its gradient. On-policy (ratio 1) all of them
have the gradient of plain REINFORCE under every aggregation: -A * weight at each token. They differ in what they do
off-policy.

Sources: ppo_clip, Schulman et al. 2017, arXiv 1707.06347, equation 7, two bounds as in DAPO, arXiv
2503.14476; dual clip, Ye et al. 2020, arXiv 1912.09729; gspo, Zheng et al. 2025, arXiv 2507.18071; rloo_sequence,
Ahmadian et al. 2024, arXiv 2402.14740 (the response is one action); cispo, MiniMax 2025, arXiv 2506.13585; reinforce,
Williams 1992.

Common arguments: `logprobs_NT` of the policy, with gradient; `old_logprobs_NT` of the policy at the start of the step;
`advantages` (N, 1) or (N, T), a constant; `mask_NT` bool, tokens that the policy chose. Masks select before exp, so
padding may hold NaN or infinity. Log-ratios are bounded at +-20; beyond, the ratio is constant.

Each returns (loss_NT, facts). loss_NT is exactly 0, without gradient, outside the mask. facts, all (N, T) and detached:
`ratio` (1 outside the mask), `clip_low` and `clip_high`, bool: the lower or upper bound decided the loss of this token.
"""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig

LOG_RATIO_BOUND = 20.0  # exp(20) is 4.9e8, far from overflow in float32

Loss = tuple[Tensor, dict[str, Tensor]]


def policy_loss(
    algorithm: AlgorithmConfig, logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages: Tensor, mask_NT: Tensor
) -> Loss:
    """Compute the loss that the configuration names.

    Raises:
        ValueError: for an unknown loss.
    """
    tensors = (logprobs_NT, old_logprobs_NT, advantages, mask_NT)
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.policy_loss:
        case "ppo_clip":
            return ppo_clip(*tensors, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case "gspo":
            return gspo(*tensors, clip_low=low, clip_high=high)
        case "rloo_sequence":
            return rloo_sequence(*tensors, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(*tensors, clip_high=high)
        case "reinforce":
            return reinforce(*tensors)
    raise ValueError(
        "algorithm.policy_loss must be ppo_clip, gspo, rloo_sequence, cispo or reinforce, "
        f"got {algorithm.policy_loss!r}. Choose one of them."
    )


def ppo_clip(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Loss:
    """Clip the ratio of each token.

        r = exp(log pi - log old)
        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    With a dual clip c, where A < 0, loss = min(loss, -c * A): a bound on what one token with a huge ratio can do.
    """
    ratio_NT = _bounded_exp(_log_ratio(logprobs_NT, old_logprobs_NT, mask_NT))
    advantages_NT = torch.where(mask_NT, advantages, 0.0)
    loss_NT, facts = _clipped(ratio_NT, advantages_NT, clip_low, clip_high)
    if dual_clip is not None:
        bound_NT = -dual_clip * advantages_NT
        loss_NT = torch.where(advantages_NT < 0, torch.minimum(loss_NT, bound_NT), loss_NT)
        facts["clip_high"] |= (advantages_NT < 0) & (facts["ratio"] > dual_clip)
    return loss_NT, facts


def gspo(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Clip the geometric mean ratio of each response.

        s_i = exp(mean_t (log pi - log old))
        loss_it = -min(s_i * A_i, clip(s_i, 1 - clip_low, 1 + clip_high) * A_i)        the same at every token of i

    GSPO's own objective is the mean over responses: aggregation sequence_mean_token_mean, gradient s_i * A_i / n_i per
    token. Bounds are of the order of 3e-4, for s_i is a mean.
    """
    log_ratio_NT = _log_ratio(logprobs_NT, old_logprobs_NT, mask_NT)
    ratio_N1 = _bounded_exp(log_ratio_NT.sum(dim=1, keepdim=True) / _num_tokens(mask_NT))
    ratio_NT = torch.where(mask_NT, ratio_N1, 1.0)
    return _clipped(ratio_NT, torch.where(mask_NT, advantages, 0.0), clip_low, clip_high)


def rloo_sequence(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Clip the product ratio of each response, which is one action.

        rho_i = exp(sum_t (log pi - log old))
        loss_it = -min(rho_i * A_i, clip(rho_i, 1 - clip_low, 1 + clip_high) * A_i) / n_i

    The loss of a response is spread over its n_i tokens, so that sequence_mean_token_sum is the mean over responses
    (RLOO's own objective), and token_mean and constant_length are that mean times a constant: no token counts less in a
    long response.
    """
    log_ratio_NT = _log_ratio(logprobs_NT, old_logprobs_NT, mask_NT)
    ratio_N1 = _bounded_exp(log_ratio_NT.sum(dim=1, keepdim=True))
    ratio_NT = torch.where(mask_NT, ratio_N1, 1.0)
    loss_NT, facts = _clipped(ratio_NT, torch.where(mask_NT, advantages, 0.0), clip_low, clip_high)
    return loss_NT / _num_tokens(mask_NT), facts


def cispo(
    logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages: Tensor, mask_NT: Tensor, *, clip_high: float
) -> Loss:
    """Weigh REINFORCE with a capped, constant ratio, so that no token loses its gradient.

        loss = -stop_gradient(min(r, 1 + clip_high)) * A * log pi

    There is no lower bound. Where r reaches the cap, `clip_high` is set; the gradient is smaller there, not zero.
    """
    ratio_NT = _bounded_exp(_log_ratio(logprobs_NT, old_logprobs_NT, mask_NT)).detach()
    cap = 1 + clip_high
    weights_NT = ratio_NT.clamp(max=cap) * torch.where(mask_NT, advantages, 0.0)
    facts = {"ratio": ratio_NT, "clip_low": torch.zeros_like(mask_NT), "clip_high": ratio_NT > cap}
    return -weights_NT * torch.where(mask_NT, logprobs_NT, 0.0), facts


def reinforce(logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages: Tensor, mask_NT: Tensor) -> Loss:
    """Weigh each log-probability with its advantage.

        loss = -A * log pi

    No ratio enters: with more than one update per step, or stale samples, the gradient is biased. `ratio` is reported.
    """
    ratio_NT = _bounded_exp(_log_ratio(logprobs_NT, old_logprobs_NT, mask_NT)).detach()
    facts = {"ratio": ratio_NT, "clip_low": torch.zeros_like(mask_NT), "clip_high": torch.zeros_like(mask_NT)}
    return -torch.where(mask_NT, advantages, 0.0) * torch.where(mask_NT, logprobs_NT, 0.0), facts


def _clipped(ratio_NT: Tensor, advantages_NT: Tensor, clip_low: float, clip_high: float) -> Loss:
    low, high = 1 - clip_low, 1 + clip_high
    loss_NT = -torch.minimum(ratio_NT * advantages_NT, ratio_NT.clamp(low, high) * advantages_NT)
    ratio_NT = ratio_NT.detach()
    facts = {
        "ratio": ratio_NT,
        "clip_low": (advantages_NT < 0) & (ratio_NT < low),
        "clip_high": (advantages_NT > 0) & (ratio_NT > high),
    }
    return loss_NT, facts


def _log_ratio(logprobs_NT: Tensor, old_logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    return torch.where(mask_NT, logprobs_NT - old_logprobs_NT.detach(), 0.0)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _num_tokens(mask_NT: Tensor) -> Tensor:
    return mask_NT.sum(dim=1, keepdim=True).clamp(min=1)

"""How the losses of tokens become one number: the same for policy, KL and entropy terms.

Denominators are counted over the whole optimizer step, on all ranks, before the first micro-batch: the sum of the parts
is the whole, for any micro-batch size, packing or number of ranks. Responses without a chosen token leave means over
sequences; they stay in constant_length, whose divisor depends on nothing that the policy does.

Sources: token_mean, DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.3; sequence_mean_token_mean, GRPO, Shao et al.
2024, arXiv 2402.03300, equation 3; constant_length, Dr.GRPO, Liu et al. 2025, arXiv 2503.20783.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """What one optimizer step trains on; `a + b` is that of both together."""

    num_tokens: int  # chosen tokens
    num_sequences: int  # responses with at least one chosen token
    num_samples: int  # responses with a valid reward, those that `mask_truncated` emptied included
    max_new_tokens: int  # the divisor of constant_length

    def __add__(self, other: "StepTotals") -> "StepTotals":
        if self.max_new_tokens != other.max_new_tokens:
            raise ValueError(
                f"max_new_tokens must be the same throughout a step, "
                f"got {self.max_new_tokens} and {other.max_new_tokens}. "
                "Count every part with the configured value, not with its padded width."
            )
        return StepTotals(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            num_samples=self.num_samples + other.num_samples,
            max_new_tokens=self.max_new_tokens,
        )


def count_totals(mask_NT: Tensor, max_new_tokens: int) -> StepTotals:
    """Count one part of a step.

    Args:
        mask_NT: tokens that enter the loss, (N, T) bool; a row per response with a valid reward.
        max_new_tokens: as configured, tokens.
    """
    num_tokens_N = mask_NT.sum(dim=1)
    return StepTotals(
        num_tokens=int(num_tokens_N.sum()),
        num_sequences=int((num_tokens_N > 0).sum()),
        num_samples=len(mask_NT),
        max_new_tokens=max_new_tokens,
    )


def token_weights(mode: Aggregation, mask_NT: Tensor, totals: StepTotals) -> Tensor:
    """Give the weight of each token in the loss of the step.

        token_mean:               1 / M                M chosen tokens of the step
        sequence_mean_token_mean: 1 / (S * n_i)        S non-empty responses of the step, n_i tokens of this one
        sequence_mean_token_sum:  1 / S
        constant_length:          1 / (B * max_new_tokens)        B responses of the step, empty ones too

    Only sequence_mean_token_mean weighs the tokens of a long response less than those of a short one.

    Args:
        mode: the aggregation.
        mask_NT: tokens that enter the loss, (N, T) bool.
        totals: of the whole step and all ranks.

    Returns:
        (N, T) float64: 0 outside the mask.

    Raises:
        ValueError: for an unknown aggregation.
    """
    num_tokens, num_sequences = max(totals.num_tokens, 1), max(totals.num_sequences, 1)
    num_tokens_N1 = mask_NT.sum(dim=1, keepdim=True).double()
    match mode:
        case "token_mean":
            divisor_N1 = torch.full_like(num_tokens_N1, num_tokens)
        case "sequence_mean_token_mean":
            divisor_N1 = num_sequences * num_tokens_N1.clamp(min=1)
        case "sequence_mean_token_sum":
            divisor_N1 = torch.full_like(num_tokens_N1, num_sequences)
        case "constant_length":
            divisor_N1 = torch.full_like(num_tokens_N1, max(totals.num_samples, 1) * totals.max_new_tokens)
        case _:
            raise ValueError(
                f"algorithm.aggregation must be token_mean, sequence_mean_token_mean, sequence_mean_token_sum or "
                f"constant_length, got {mode!r}. Choose one of them."
            )
    return torch.where(mask_NT, 1.0 / divisor_N1, 0.0)


def aggregate(loss_NT: Tensor, mask_NT: Tensor, mode: Aggregation, totals: StepTotals) -> Tensor:
    """Sum the weighted losses of the tokens at hand: this part's share of the loss of the step.

        sum_it where(mask_it, loss_it * weight_it, 0)

    Args:
        loss_NT: any per-token term, (N, T).
        mask_NT: tokens that enter the loss, (N, T) bool.
        mode: the aggregation.
        totals: of the whole step and all ranks. Add the shares; never average them.

    Returns:
        A scalar, float64.
    """
    selected_NT = torch.where(mask_NT, loss_NT, 0.0)
    return (selected_NT * token_weights(mode, mask_NT, totals)).sum()

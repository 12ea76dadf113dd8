"""From logprobs of a micro-batch to its share of the loss of the step.

    loss = aggregate(correction * policy_loss) + beta * aggregate(KL) - entropy_coef * aggregate(entropy)

All terms are per token, N samples by T tokens, and use one aggregation whose denominators count the whole update.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from estimators.aggregate import StepTotals, aggregate
from estimators.correction import correction_weights, off_policy_mask
from estimators.kl import kl_penalty
from estimators.policy_loss import policy_loss
from learner.packing import MicroBatch, SampleKey
from learner.tally import Tally
from orchestrator.types import Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A micro-batch, padded: (N, T) each; what lies outside `mask_NT` never matters."""

    logprobs_NT: Tensor  # of the policy, with gradient
    entropy_NT: Tensor
    old_NT: Tensor
    rollout_NT: Tensor
    reference_NT: Tensor  # zeros where there is none
    mask_NT: Tensor  # bool, tokens that the policy chose


def pad_tokens(
    batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    groups: Mapping[int, Group],
    old: Mapping[SampleKey, np.ndarray],
    reference: Mapping[SampleKey, np.ndarray],
) -> Tokens:
    """Lay out a micro-batch by sample; without `old`, the policy's own logprobs are old."""
    device = logprobs.device
    samples = [groups[g].samples[k] for g, k in batch.keys]
    there_NT = pad([np.ones(length, dtype=bool) for length in batch.lengths]).to(device)
    zeros_NT = torch.zeros(there_NT.shape, dtype=logprobs.dtype, device=device)
    logprobs_NT = zeros_NT.masked_scatter(there_NT, logprobs)
    return Tokens(
        logprobs_NT=logprobs_NT,
        entropy_NT=zeros_NT.masked_scatter(there_NT, entropy),
        old_NT=pad([old[key] for key in batch.keys]).to(device) if old else logprobs_NT.detach(),
        rollout_NT=pad([sample.logprobs for sample in samples]).to(device),
        reference_NT=pad([reference[key] for key in batch.keys]).to(device) if reference else zeros_NT,
        mask_NT=pad([sample.loss_mask for sample in samples]).to(device),
    )


def pad(arrays: list[np.ndarray]) -> Tensor:
    """Stack arrays (T_i,) into (N, T), zeros on the right."""
    rows = np.zeros((len(arrays), max(len(array) for array in arrays)), dtype=arrays[0].dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(rows)


def loss_of(
    tokens: Tokens, advantages: Tensor, algorithm: AlgorithmConfig, beta: float, totals: StepTotals, tally: Tally
) -> Tensor:
    """Compute this micro-batch's share of the loss of the update, and tally what it shows.

    Args:
        tokens: of the micro-batch.
        advantages: (N, 1) or (N, T), constants.
        algorithm: the options, resolved.
        beta: KL coefficient of the loss; 0 where KL is in the reward.
        totals: of the update, over all ranks.
        tally: receives loss parts and token statistics.

    Returns:
        A float64 scalar: add the shares, never average them.
    """
    t, mode = tokens, algorithm.aggregation
    loss_NT, facts = policy_loss(algorithm, t.logprobs_NT, t.old_NT, advantages, t.mask_NT)
    weights_NT, corrected = correction_weights(algorithm, t.old_NT, t.rollout_NT, t.mask_NT)
    loss_NT = loss_NT * weights_NT
    if algorithm.off_policy_mask_delta is not None:
        delta = algorithm.off_policy_mask_delta
        keep = off_policy_mask(t.logprobs_NT, t.rollout_NT, advantages, t.mask_NT, delta)
        loss_NT = torch.where(keep, loss_NT, 0.0)
    loss = aggregate(loss_NT, t.mask_NT, mode, totals)
    tally.add(loss__policy=loss.detach())
    if beta:
        kind = algorithm.kl_estimator
        assert kind is not None  # resolved
        kl_NT = kl_penalty(kind, t.logprobs_NT, t.reference_NT, t.old_NT, t.mask_NT)
        kl = beta * aggregate(kl_NT, t.mask_NT, mode, totals)
        tally.add(loss__kl=kl.detach())
        loss = loss + kl
    if algorithm.entropy_coef:
        bonus = algorithm.entropy_coef * aggregate(t.entropy_NT, t.mask_NT, mode, totals)
        tally.add(loss__entropy=-bonus.detach())
        loss = loss - bonus
    _tally_tokens(tokens, facts | corrected, algorithm.old_logprobs == "rollout", tally)
    return loss


def _tally_tokens(tokens: Tokens, facts: dict[str, Tensor], old_is_rollout: bool, tally: Tally) -> None:
    mask = tokens.mask_NT
    own = tokens.logprobs_NT.detach()
    learner = own if old_is_rollout else tokens.old_NT
    gap = torch.where(mask, learner - tokens.rollout_NT, 0.0).double()
    low, high = facts["clip_low"] & mask, facts["clip_high"] & mask
    tally.add(
        tokens=mask.sum(),
        kl__old=torch.where(mask, tokens.old_NT - own, 0.0).double().sum(),
        ratio__mean=torch.where(mask, facts["ratio"], 0.0).double().sum(),
        clip_frac=(low | high).sum(),
        clip_frac__low=low.sum(),
        clip_frac__high=high.sum(),
        entropy=torch.where(mask, tokens.entropy_NT.detach(), 0.0).double().sum(),
        mismatch__logprob_abs_diff=gap.abs().sum(),
        mismatch__kl=(gap.clamp(max=20.0).exp() - 1.0 - gap).sum(),
        mismatch__corrected_frac=facts["corrected"].sum(),
    )
    tally.raise_to("mismatch/logprob_abs_diff_max", float(gap.abs().max()))

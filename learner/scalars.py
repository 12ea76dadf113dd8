"""What every rank knows of a step before it fetches anything: the numbers in the receipts, P groups by K samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Config
from estimators.aggregate import StepTotals
from estimators.shaping import clip_rewards, overlong_penalty
from orchestrator.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scalars:
    """Rewards and counts of a step, identical on every rank."""

    rewards_PK: Tensor  # float64, after clip and length penalty, before KL
    valid_PK: Tensor  # bool, rewards that count in statistics
    counted_PK: Tensor  # bool, samples that enter loss, KL and denominators
    num_tokens_PK: Tensor  # int64, response tokens that the policy chose
    num_prompt_tokens: tuple[int, ...]  # (P,)
    max_new_tokens: int

    def rows(self, groups: Sequence[int]) -> "Scalars":
        """Return some groups alone."""
        at = list(groups)
        return Scalars(
            rewards_PK=self.rewards_PK[at],
            valid_PK=self.valid_PK[at],
            counted_PK=self.counted_PK[at],
            num_tokens_PK=self.num_tokens_PK[at],
            num_prompt_tokens=tuple(self.num_prompt_tokens[g] for g in at),
            max_new_tokens=self.max_new_tokens,
        )

    def totals(self, groups: Sequence[int]) -> StepTotals:
        """Count what one optimizer update trains on, over all ranks."""
        tokens = torch.where(self.counted_PK, self.num_tokens_PK, 0)[list(groups)]
        return StepTotals(
            num_tokens=int(tokens.sum()),
            num_sequences=int((tokens > 0).sum()),
            num_samples=int(self.valid_PK[list(groups)].sum()),
            max_new_tokens=self.max_new_tokens,
        )


def read_receipts(receipts: Sequence[ScoredGroup], config: Config) -> Scalars:
    """Shape the rewards and say which samples take part.

    An invalid reward leaves statistics and denominators. A response cut at max_new_tokens leaves the loss where
    `mask_truncated` says so; its reward stays in the baseline.
    """
    algorithm = config.algorithm
    rewards = torch.tensor([[r.value for r in receipt.rewards] for receipt in receipts], dtype=torch.float64)
    valid = torch.tensor([[r.valid for r in receipt.rewards] for receipt in receipts])
    truncated = torch.tensor([receipt.facts.truncated for receipt in receipts])
    num_tokens = torch.tensor([receipt.facts.num_tokens for receipt in receipts])
    if algorithm.reward_clip is not None:
        rewards = clip_rewards(rewards, algorithm.reward_clip)
    if algorithm.overlong_buffer_tokens:
        buffer, penalty = algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
        rewards = rewards + overlong_penalty(num_tokens, config.rollout.max_new_tokens, buffer, penalty)
    counted = valid & (num_tokens > 0)
    if algorithm.mask_truncated:
        counted &= ~truncated
    return Scalars(
        rewards_PK=rewards,
        valid_PK=valid,
        counted_PK=counted,
        num_tokens_PK=num_tokens,
        num_prompt_tokens=tuple(receipt.facts.num_prompt_tokens for receipt in receipts),
        max_new_tokens=config.rollout.max_new_tokens,
    )


def std_of(advantages_PK: Tensor, counted_PK: Tensor) -> float:
    """Return the standard deviation of the advantages that take part; 0 of fewer than two."""
    values = advantages_PK[counted_PK]
    return float(values.std()) if values.numel() > 1 else 0.0

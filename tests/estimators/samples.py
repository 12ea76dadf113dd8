"""Small batches of tokens for the estimator tests."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from estimators.aggregate import StepTotals, aggregate, count_totals
from estimators.correction import correction_weights, off_policy_mask
from estimators.policy_loss import policy_loss

MAX_NEW_TOKENS = 9
LOSSES = ("ppo_clip", "gspo", "rloo_sequence", "cispo", "reinforce")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """N responses of at most T tokens."""

    logprobs_NT: Tensor
    old_NT: Tensor
    rollout_NT: Tensor
    ref_NT: Tensor
    advantages_N1: Tensor
    mask_NT: Tensor

    def rows(self, rows: list[int] | slice) -> "Tokens":
        """Take some responses."""
        return Tokens(**{name: getattr(self, name)[rows] for name in self.__slots__})


def options(**changes: Any) -> AlgorithmConfig:
    """Give resolved options: those of the schema, no correction, and some changes."""
    return AlgorithmConfig(**{"correction": "none", **changes})


def draw(seed: int, lengths: tuple[int, ...] = (6, 1, 4, 2, 6), spread: float = 0.3, on_policy: bool = False) -> Tokens:
    """Draw a batch; old, rollout and ref logprobs differ from the policy's by `spread`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * spread

    logprobs_NT = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.05
    old_NT = logprobs_NT.clone() if on_policy else logprobs_NT + noise()
    return Tokens(
        logprobs_NT=logprobs_NT.requires_grad_(),
        old_NT=old_NT,
        rollout_NT=old_NT + noise(),
        ref_NT=logprobs_NT.detach() + noise(),
        advantages_N1=torch.randn((len(lengths), 1), generator=generator, dtype=torch.float64),
        mask_NT=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
    )


def spoil_padding(tokens: Tokens, value: float) -> Tokens:
    """Fill everything outside the mask with a value."""

    def spoil(tensor: Tensor) -> Tensor:
        return torch.where(tokens.mask_NT, tensor.detach(), value)

    return replace(
        tokens,
        logprobs_NT=spoil(tokens.logprobs_NT).requires_grad_(),
        old_NT=spoil(tokens.old_NT),
        rollout_NT=spoil(tokens.rollout_NT),
        ref_NT=spoil(tokens.ref_NT),
    )


def share_of_loss(algorithm: AlgorithmConfig, tokens: Tokens, totals: StepTotals) -> Tensor:
    """Compute the share of some responses in the policy loss of a step."""
    loss_NT, _ = policy_loss(algorithm, tokens.logprobs_NT, tokens.old_NT, tokens.advantages_N1, tokens.mask_NT)
    weights_NT, _ = correction_weights(algorithm, tokens.old_NT, tokens.rollout_NT, tokens.mask_NT)
    loss_NT = loss_NT * weights_NT
    delta = algorithm.off_policy_mask_delta
    if delta is not None:
        tensors = (tokens.logprobs_NT, tokens.rollout_NT, tokens.advantages_N1, tokens.mask_NT)
        loss_NT = torch.where(off_policy_mask(*tensors, delta), loss_NT, 0.0)
    return aggregate(loss_NT, tokens.mask_NT, algorithm.aggregation, totals)


def loss_and_gradient(algorithm: AlgorithmConfig, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Compute the policy loss of a step of one micro-batch, and its gradient for the logprobs."""
    loss = share_of_loss(algorithm, tokens, count_totals(tokens.mask_NT, MAX_NEW_TOKENS))
    return loss.detach(), torch.autograd.grad(loss, tokens.logprobs_NT)[0]


def close(got: Tensor, want: Tensor | float, tolerance: float = 1e-10) -> bool:
    """Say whether two tensors agree to tolerance * max(1, |want|), and neither holds a NaN."""
    return bool(
        torch.allclose(got.double(), torch.as_tensor(want, dtype=torch.float64), rtol=tolerance, atol=tolerance)
    )

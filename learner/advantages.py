"""Advantages of a step, from scalars known to every rank and what this rank's forward added to them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from estimators.kl import k1, kl_in_reward, sequence_kl
from estimators.registry import estimate_advantages
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.whitening import Moments, moments
from learner.loss import pad
from learner.packing import SampleKey
from learner.ranks import gather_over_ranks
from learner.scalars import Scalars
from orchestrator.types import Group

Arrays = Mapping[SampleKey, np.ndarray]


def outcome_advantages(algorithm: AlgorithmConfig, scalars: Scalars, kl_PK: Tensor, beta: float) -> Tensor:
    """Return advantages (P, K) float64: KL in the reward, then the estimator; 0 where a sample does not take part."""
    rewards_PK = kl_in_reward(scalars.rewards_PK, kl_PK, beta) if beta else scalars.rewards_PK
    advantages_PK = estimate_advantages(algorithm, rewards_PK, scalars.valid_PK, scalars.num_tokens_PK)
    return torch.where(scalars.counted_PK, advantages_PK, 0.0)


def sequence_kls(old: Arrays, reference: Arrays, groups: Mapping[int, Group], like_PK: Tensor) -> Tensor:
    """Return KL sums (P, K), nats, of this rank's samples; 0 elsewhere."""
    kl_PK = torch.zeros_like(like_PK)
    keys = list(old)
    if keys:
        mask_NT = pad([groups[g].samples[k].loss_mask for g, k in keys])
        kl_N = sequence_kl(pad([old[key] for key in keys]), pad([reference[key] for key in keys]), mask_NT)
        kl_PK[tuple(torch.tensor(keys).T)] = kl_N
    return kl_PK


def token_advantages(
    algorithm: AlgorithmConfig,
    scalars: Scalars,
    keys: list[SampleKey],
    groups: Mapping[int, Group],
    old: Arrays,
    reference: Arrays,
    beta: float,
    device: torch.device,
) -> dict[SampleKey, np.ndarray]:
    """Return REINFORCE++ advantages per token of this rank's samples, whitened over all ranks."""
    found: dict[SampleKey, np.ndarray] = {}
    population = Moments(count=0, total=0.0, centered_squares=0.0)
    if keys:
        mask_NT = pad([groups[g].samples[k].loss_mask for g, k in keys])
        kl_NT = torch.zeros(mask_NT.shape)
        if beta:
            kl_NT = k1(pad([old[key] for key in keys]), pad([reference[key] for key in keys]))
        at = tuple(torch.tensor(keys).T)
        valid_N = scalars.valid_PK[at]
        returns_NT = reinforce_plus_plus_token(
            scalars.rewards_PK[at], valid_N, kl_NT, mask_NT, beta=beta, discount=algorithm.discount
        )
        population = moments(returns_NT, mask_NT & valid_N[:, None])
    mine = torch.tensor([population.count, population.total, population.centered_squares], dtype=torch.float64)
    parts = [
        Moments(count=c, total=t, centered_squares=s)
        for c, t, s in (x.tolist() for x in gather_over_ranks(mine, device))
    ]
    for part in parts[1:]:
        parts[0] = parts[0] + part
    if keys:
        advantages_NT = whiten_tokens(returns_NT, mask_NT & valid_N[:, None], parts[0])
        for key, row in zip(keys, advantages_NT.numpy(), strict=True):
            found[key] = row[: len(groups[key[0]].samples[key[1]].loss_mask)]
    return found

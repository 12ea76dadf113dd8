"""Evaluation on named held-out datasets through the same engines and rewards; it never changes training.

pass@k is the unbiased closed form of Chen et al. 2021 (arXiv 2107.03374, equation 1); maj@n the vote of Wang et al. 2022 (arXiv
2203.11171) over final answers. Standard errors are over prompts: samples of one prompt are not independent.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence

from orchestrator.feed import Scoring
from orchestrator.ports import GroupFailed, Rewarder, Rollout
from orchestrator.types import Draw, Prompt, Reward, Sampling, ScoredGroup

SEED_OFFSET = 1 << 40  # evaluation samples share no seed with training


class Evaluator:
    """Held-out prompts and the ways to sample them."""

    def __init__(
        self,
        rollout: Rollout,
        rewarder: Rewarder,
        datasets: Mapping[str, Sequence[Prompt]],
        samplings: Mapping[str, Sampling],
        *,
        solved_at: float,
        max_samples: int,
    ) -> None:
        """Take the parts, the data and the bounds.

        Args:
            rollout: samples from the policy.
            rewarder: scores what was sampled.
            datasets: prompts by name; the name is "" where there is one without a name.
            samplings: ways to sample by name; their seeds are moved away from training's.
            solved_at: reward from which a response counts as right.
            max_samples: that are asked of the engines at one time.
        """
        self._datasets = {
            name: [Draw(number=number, prompt=prompt) for number, prompt in enumerate(prompts)] for name, prompts in datasets.items()
        }
        self._ways = {
            way: (
                Scoring(rollout, rewarder, None, Sampling(num_samples=s.num_samples, temperature=s.temperature, seed=s.seed + SEED_OFFSET)),
                s.num_samples,
            )
            for way, s in samplings.items()
        }
        self._solved_at, self._max_samples = solved_at, max_samples

    async def run(self) -> dict[str, float]:
        """Sample and score every prompt in every way; returns `eval/[NAME/]WAY/METRIC`.

        A prompt whose group cannot be had is counted in `failed` and left out; so is an invalid reward, in `invalid_frac`.
        """
        metrics: dict[str, float] = {}
        for way, (score, num_samples) in self._ways.items():
            room = asyncio.Semaphore(max(1, self._max_samples // num_samples))
            for name, draws in self._datasets.items():
                groups = await asyncio.gather(*(_one(score, draw, room) for draw in draws))
                place = f"eval/{name}/{way}" if name else f"eval/{way}"
                found = summary([g for g in groups if g is not None], num_samples, self._solved_at)
                metrics |= {f"{place}/{key}": value for key, value in found.items()}
                metrics |= {f"{place}/num_prompts": len(draws), f"{place}/failed": sum(g is None for g in groups)}
        return metrics


async def _one(
    score: Callable[[Draw], Coroutine[None, None, ScoredGroup]], draw: Draw, room: asyncio.Semaphore
) -> ScoredGroup | None:
    async with room:
        try:
            return await score(draw)
        except GroupFailed:
            return None


def summary(groups: Sequence[ScoredGroup], num_samples: int, solved_at: float) -> dict[str, float]:
    """Sum up one dataset sampled in one way; a mean over nothing is nan.

    Args:
        groups: one per prompt.
        num_samples: n, of each.
        solved_at: reward from which a response counts as right.
    """
    valid = [[reward for reward in group.rewards if reward.valid] for group in groups]
    rewards = [statistics.fmean(reward.value for reward in row) for row in valid if row]
    metrics = _mean("reward_mean", "reward_stderr", rewards)
    if num_samples > 1:
        right = [(len(row), sum(reward.value >= solved_at for reward in row)) for row in valid]
        for k in _powers_of_two(num_samples):
            metrics |= _mean(f"pass@{k}", f"pass@{k}_stderr", [pass_at_k(n, c, k) for n, c in right if n >= k])
        votes = [vote for row in valid if (vote := majority(row, solved_at)) is not None]
        if votes:
            metrics |= _mean(f"maj@{num_samples}", f"maj@{num_samples}_stderr", votes)
    facts = [group.facts for group in groups]
    return metrics | {
        "invalid_frac": _fmean([not reward.valid for group in groups for reward in group.rewards]),
        "response_length": _fmean([num for fact in facts for num in fact.num_tokens]),
        "truncated_frac": _fmean([cut for fact in facts for cut in fact.truncated]),
    }


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate the probability that one of k samples is right, without bias, from n >= k samples.

    pass@k = 1 - C(n - c, k) / C(n, k)
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(rewards: Sequence[Reward], solved_at: float) -> float | None:
    """Say how often the most frequent final answer is right, ties broken at random; None where there is no answer."""
    by_answer: dict[str, list[bool]] = {}
    for reward in rewards:
        if reward.answer:
            by_answer.setdefault(reward.answer, []).append(reward.value >= solved_at)
    if not by_answer:
        return None
    most = max(len(votes) for votes in by_answer.values())
    return statistics.fmean(statistics.fmean(votes) for votes in by_answer.values() if len(votes) == most)


def _powers_of_two(limit: int) -> list[int]:
    """List 1, 2, 4, ... and the limit itself."""
    return sorted({limit, *(1 << i for i in range(limit.bit_length()) if 1 << i <= limit)})


def _mean(mean: str, error: str, values: Sequence[float]) -> dict[str, float]:
    return {mean: _fmean(values), error: statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan}


def _fmean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan

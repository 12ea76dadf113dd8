"""Evaluation on held-out prompts through the same engines and rewards; it never changes training."""

import asyncio
import statistics
from collections.abc import Sequence

from orchestrator.ports import Rewarder, Rollout
from orchestrator.types import Draw, GroupFacts, Prompt, Reward, Sampling

SEED_OFFSET = 1 << 40  # evaluation samples share no seed with training


class Evaluator:
    """Held-out prompts and the ways to sample them."""

    def __init__(
        self, rollout: Rollout, rewarder: Rewarder, prompts: Sequence[Prompt], *, temperatures: dict[str, float], seed: int
    ) -> None:
        self._rollout, self._rewarder = rollout, rewarder
        self._draws = [Draw(number=number, prompt=prompt) for number, prompt in enumerate(prompts)]
        self._samplings = {
            name: Sampling(num_samples=1, temperature=temperature, seed=seed + SEED_OFFSET)
            for name, temperature in temperatures.items()
        }

    async def run(self) -> dict[str, float]:
        """Sample every prompt once per way of sampling; means over prompts, invalid rewards left out and counted."""
        metrics: dict[str, float] = {}
        for name, sampling in self._samplings.items():
            scored = await asyncio.gather(*(self._one(draw, sampling) for draw in self._draws))
            metrics |= {f"eval/{name}/{key}": value for key, value in _summary(scored).items()}
        return metrics

    async def _one(self, draw: Draw, sampling: Sampling) -> tuple[GroupFacts, Reward]:
        group_ref, facts = await self._rollout.generate(draw, sampling)
        (reward,) = await self._rewarder.score(draw, group_ref, 1)
        return facts, reward


def _summary(scored: Sequence[tuple[GroupFacts, Reward]]) -> dict[str, float]:
    if not scored:
        return {}
    valid = [reward.value for _, reward in scored if reward.valid]
    error = statistics.stdev(valid) / len(valid) ** 0.5 if len(valid) > 1 else float("nan")
    return {
        "reward_mean": statistics.fmean(valid) if valid else float("nan"),
        "reward_stderr": error,
        "num_prompts": len(scored),
        "invalid_frac": 1 - len(valid) / len(scored),
        "response_length": statistics.fmean(facts.num_tokens[0] for facts, _ in scored),
        "truncated_frac": statistics.fmean(facts.truncated[0] for facts, _ in scored),
    }

"""The reward worker: one group -> K rewards, by one or several functions that run in processes of their own.

Invalid is not zero: a response for which a function failed has no reward; a function that says None does not apply, and
the others count alone (TRL's rule).
"""

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from actors.rewards.interfaces import Batch
from actors.rewards.process import START_TIMEOUT_S, FunctionProcess, Scored
from configs.rules import reward_functions
from configs.schema import RewardConfig
from orchestrator.types import Group, Reward, Sample, label_of

RESTART_S = 5.0  # of a function's process, as a rule


def functions(config: RewardConfig) -> list[FunctionProcess]:
    """Make the processes of a configuration's functions; none is started."""
    return [
        FunctionProcess(
            name, config.arguments.get(name, {}), timeout_s=config.timeout_s, environment=config.environment
        )
        for name in reward_functions(config)
    ]


class RewardWorker:
    """Ray actor around the reward functions."""

    def __init__(self, config: RewardConfig, name: str) -> None:
        self._name, self._config = name, config
        self._functions = functions(config)
        self._weights = config.reward_weights or [1.0] * len(self._functions)
        self._threads = ThreadPoolExecutor(len(self._functions))
        list(self._threads.map(FunctionProcess.start, self._functions))

    def ready(self) -> str:
        """Return the worker's name once its functions are loaded."""
        return self._name

    def score(self, group: Group) -> tuple[Reward, ...]:
        """Score the responses of a group."""
        batch = batch_of(group, self._config.answer_column)
        columns = list(self._threads.map(lambda function: function.score(batch), self._functions))
        names = [short_name(function.name) for function in self._functions]
        rewards = [[as_reward(name, one) for one in column] for name, column in zip(names, columns, strict=True)]
        summed = [weighted_sum(self._weights, row) for row in zip(*rewards, strict=True)]
        return tuple(unless_broken(sample, reward) for sample, reward in zip(group.samples, summed, strict=True))

    def close(self) -> None:
        """End the processes."""
        for function in self._functions:
            function.stop()


def group_timeout_s(config: RewardConfig, num_samples: int) -> float:
    """Bound the time of one group: its functions' processes are killed and started again long before a worker is."""
    return (num_samples + 1) * (config.timeout_s + RESTART_S) + START_TIMEOUT_S


def batch_of(group: Group, answer_column: str) -> Batch:
    """Take from a group what reward functions may know."""
    prompt = group.draw.prompt
    return Batch(
        prompt=prompt.text,
        completions=[sample.text for sample in group.samples],
        completion_ids=[sample.token_ids.tolist() for sample in group.samples],
        columns=dict(prompt.columns),
        label=label_of(prompt.columns, answer_column),
        step=min((int(sample.versions.min()) for sample in group.samples if len(sample.versions)), default=0),
    )


def as_reward(name: str, scored: Scored) -> Reward:
    """Turn what one function says of one response into a reward."""
    parts = ({name: scored.value} if scored.cause == "ok" else {}) | dict(scored.extras)
    return Reward(value=scored.value, cause=scored.cause, parts=parts, detail=scored.detail, answer=scored.answer)


def weighted_sum(weights: Sequence[float], rewards: Sequence[Reward]) -> Reward:
    """Sum rewards of one response; one that does not apply leaves the others to count, a failed one makes the sum invalid."""
    parts = {name: value for reward in rewards for name, value in reward.parts.items()}
    answer = next((reward.answer for reward in rewards if reward.answer), "")
    failed = [reward for reward in rewards if reward.cause in ("error", "timeout")]
    counted = [weight * reward.value for weight, reward in zip(weights, rewards, strict=True) if reward.valid]
    if failed or not counted:
        worst = failed[0] if failed else rewards[0]
        return Reward(value=math.nan, cause=worst.cause, parts=parts, detail=worst.detail, answer=answer)
    return Reward(value=sum(counted), cause="ok", parts=parts, detail="", answer=answer)


def unless_broken(sample: Sample, reward: Reward) -> Reward:
    """Take the reward away from a sample whose environment broke off."""
    return dataclasses.replace(reward, value=math.nan, cause="error", detail=sample.error) if sample.error else reward


def short_name(function: str) -> str:
    """Name a function in metrics: `math`, `score` of `rewards.py:score`, the host of a URL."""
    if function.startswith(("http://", "https://")):
        return function.split("/")[2]
    return function.rpartition(":")[2]


def check_rewards(config: RewardConfig) -> None:
    """Load every function once, in its process, and end it: a user's code never runs in the driver.

    Raises:
        ConfigError: one cannot be loaded.
    """
    for function in functions(config):
        try:
            function.start()
        finally:
            function.stop()

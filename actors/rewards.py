"""Reward functions: built in and from a user's file, in worker processes of their own.

A user function has the signature of TRL: `f(prompts, completions, **columns) -> list[float | None]`, lists of one group's length.
None means "not applicable". A function that raises on the group is called again per sample, so that the fault costs
only the samples that have it. Invalid is not zero.
"""

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from configs.rules import ConfigError
from configs.schema import RewardConfig
from orchestrator.types import Group, Reward

RewardFunction = Callable[..., Any]


def exact_match(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> list[float]:
    """Give 1 where the stripped completion equals the stripped answer, else 0."""
    return [float(c.strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match}


def load_function(name: str) -> RewardFunction:
    """Find a reward function by name or `path.py:function`.

    Raises:
        ConfigError: no such name, file or function, or the file does not import.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not attribute:
        raise ConfigError(
            f"reward.function must be one of {', '.join(BUILT_IN)} or path.py:function, got {name}. Correct the name."
        )
    if not Path(path).is_file():
        raise ConfigError(f"reward.function must name an existing file, got {name}. Check the path.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file does at import
        raise ConfigError(
            f"reward.function must be importable, got {type(error).__name__}: {error} from {path}. Mend the file."
        ) from error
    function = vars(module).get(attribute)
    if not callable(function):
        raise ConfigError(f"reward.function must name a function of {path}, got {attribute}. Check the spelling.")
    return function


class RewardWorker:
    """Ray actor around one reward function."""

    def __init__(self, config: RewardConfig, name: str) -> None:
        self._name = name
        self._function = load_function(config.function)
        self._answer_column = config.answer_column if config.function in BUILT_IN else None

    def ready(self) -> str:
        """Return the worker's name once its function is loaded."""
        return self._name

    def score(self, group: Group) -> tuple[Reward, ...]:
        """Score the responses of a group."""
        prompt = group.draw.prompt
        completions = [sample.text for sample in group.samples]
        columns = dict(prompt.columns)
        if self._answer_column is not None:
            columns["answer"] = columns[self._answer_column]
        try:
            values = self._call(prompt.text, completions, columns)
        except Exception:  # noqa: BLE001 - a user's function may raise anything; each sample is tried alone
            return tuple(self._score_one(prompt.text, completion, columns) for completion in completions)
        return tuple(_reward(value) for value in values)

    def _score_one(self, prompt: str, completion: str, columns: dict[str, Any]) -> Reward:
        try:
            (value,) = self._call(prompt, [completion], columns)
        except Exception as error:  # noqa: BLE001 - as above
            return _invalid("error", f"{type(error).__name__}: {error}")
        return _reward(value)

    def _call(self, prompt: str, completions: list[str], columns: dict[str, Any]) -> list[Any]:
        num = len(completions)
        values = self._function(
            prompts=[prompt] * num,
            completions=completions,
            **{key: [value] * num for key, value in columns.items()},
        )
        if inspect.isawaitable(values):
            values = asyncio.run(_await(values))
        values = list(values)
        if len(values) != num:
            raise ValueError(f"a reward function must return one value per completion, got {len(values)} for {num}")
        return values


async def _await(values: Any) -> Any:
    return await values


def _reward(value: Any) -> Reward:
    if value is None:
        return _invalid("not_applicable", "")
    if isinstance(value, Real) or hasattr(value, "item"):  # a tensor of one element is a number too
        number = float(value)
        if math.isfinite(number):
            return Reward(value=number, cause="ok", parts={}, detail="")
    return _invalid("error", f"a reward must be a finite number or None, got {value!r}")


def _invalid(cause: Any, detail: str) -> Reward:
    return Reward(value=float("nan"), cause=cause, parts={}, detail=detail)


if __name__ == "__main__":  # the check before a run: import a user's file in a process of its own
    try:
        load_function(sys.argv[1])
    except ConfigError as refusal:
        sys.exit(str(refusal))

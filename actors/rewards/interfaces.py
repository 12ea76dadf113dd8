"""Reward functions as people wrote them, behind one call: Batch -> values and extras.

The interface is told by the parameters of the function:

    f(prompts, completions, **columns) -> list[float | None]                          TRL
    compute_score(data_source, solution_str, ground_truth, extra_info) -> float|dict  verl, one sample a call
    reward_func(queries, prompts, labels) -> {"rewards", "scores", "extra_logs"}      OpenRLHF
    class with __call__(completions, **columns) -> list[float | None]                 ms-swift (ORM)

Any of them may be async. This module runs in the child process and imports little: processes start often.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Extras = dict[str, list[Any]]  # K values each
Adapted = Callable[["Batch"], tuple[Any, Extras]]


class Refusal(ValueError):
    """A reward that cannot be had; its sentence becomes a ConfigError in the supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a reward function may know of K responses to one prompt."""

    prompt: str  # as tokenised
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any]  # of the row; "messages" where the prompt is a chat
    label: Any  # the row's right answer; None where it has none
    step: int  # weight version that sampled

    def only(self, index: int) -> "Batch":
        """Take one response of the batch."""
        return dataclasses.replace(
            self, completions=[self.completions[index]], completion_ids=[self.completion_ids[index]]
        )

    def __len__(self) -> int:
        return len(self.completions)


def adapt(function: Any, name: str, arguments: Mapping[str, Any]) -> Adapted:
    """Put a reward function behind the one call.

    Args:
        function: a callable, or a class whose instances are callable.
        name: for errors.
        arguments: further keyword arguments of the user's choice.

    Raises:
        Refusal: its parameters fit no known interface.
    """
    is_class = inspect.isclass(function)
    call: Any = function() if is_class else function
    parameters = inspect.signature(call).parameters
    if "solution_strs" in parameters:
        return lambda batch: _verl_batch(call, batch, arguments)
    if "solution_str" in parameters:
        return lambda batch: _verl(call, batch, arguments)
    if "queries" in parameters:
        return lambda batch: openrlhf_answer(_finish(call(**_fitting(call, _openrlhf(batch) | dict(arguments)))), len(batch))
    if "completions" in parameters:
        return lambda batch: _trl(call, batch, arguments, chat=not is_class)
    raise Refusal(
        f"reward.function must take the parameters of a known interface, got {name}({', '.join(parameters)}). Write "
        "f(prompts, completions, **columns), compute_score(data_source, solution_str, ground_truth, extra_info), "
        "reward_func(queries, prompts, labels) or a class with __call__(completions, **columns)."
    )


def _trl(call: Any, batch: Batch, arguments: Mapping[str, Any], *, chat: bool) -> tuple[Any, Extras]:
    """Call with lists of K; a chat's completions are messages too, as in TRL (ms-swift always hands out text)."""
    num, extras = len(batch), Extras()
    messages = batch.columns.get("messages") if chat else None
    given = {
        "prompts": [batch.prompt if messages is None else messages] * num,
        "completions": [text if messages is None else [{"role": "assistant", "content": text}] for text in batch.completions],
        "completion_ids": [list(ids) for ids in batch.completion_ids],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": lambda column, values: extras.__setitem__(column, list(values)),
        "log_metric": lambda column, value: extras.__setitem__(column, [value] * num),
    }
    columns = {key: [value] * num for key, value in batch.columns.items()}
    return _finish(call(**_fitting(call, columns | given | dict(arguments)))), extras


def _verl(call: Any, batch: Batch, arguments: Mapping[str, Any]) -> tuple[Any, Extras]:
    values: list[Any] = []
    for text in batch.completions:
        given = _verl_row(batch) | {"solution_str": text} | dict(arguments)
        try:
            values.append(_finish(call(**_fitting(call, given))))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the others are scored
            values.append(error)
    return _verl_scores(values)


def _verl_batch(call: Any, batch: Batch, arguments: Mapping[str, Any]) -> tuple[Any, Extras]:
    row = {f"{key}s": [value] * len(batch) for key, value in _verl_row(batch).items()}
    given = row | {"solution_strs": list(batch.completions)} | dict(arguments)
    return _verl_scores(list(_finish(call(**_fitting(call, given)))))


def _verl_row(batch: Batch) -> dict[str, Any]:
    columns = batch.columns
    return {
        "data_source": columns.get("data_source", ""),
        "ground_truth": batch.label,
        "extra_info": columns.get("extra_info"),
    }


def _verl_scores(values: list[Any]) -> tuple[Any, Extras]:
    names = {name for value in values if isinstance(value, Mapping) for name in value if name != "score"}
    extras = {name: [value.get(name) if isinstance(value, Mapping) else None for value in values] for name in names}
    return [value.get("score") if isinstance(value, Mapping) else value for value in values], extras


def _openrlhf(batch: Batch) -> dict[str, Any]:
    return {
        "queries": [batch.prompt + text for text in batch.completions],
        "prompts": [batch.prompt] * len(batch),
        "labels": [batch.label] * len(batch),
    }


def openrlhf_answer(answer: Any, num: int) -> tuple[Any, Extras]:
    """Read what reward_func or /get_reward gave: a dictionary, or the rewards alone."""
    if not isinstance(answer, Mapping):
        return answer, {}
    extras = {}
    for name, value in (answer.get("extra_logs") or {}).items():
        values = _flat(value)
        extras[name] = values * num if len(values) == 1 else values
    return answer["rewards"], extras


def _fitting(call: Any, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _finish(result: Any) -> Any:
    if inspect.isawaitable(result):
        import asyncio  # 70 ms of every start of a process

        return asyncio.run(_await(result))
    return result


async def _await(result: Any) -> Any:
    return await result


def _flat(value: Any) -> list[Any]:
    """Turn a scalar, list, array or tensor, nested or not, into a flat list of plain values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return [value]
    return [one for part in value for one in _flat(part)]


def plain_values(values: Any, num: int) -> list[Any]:
    """Make what a function returned K plain values: a number, None, or an exception that says why there is none.

    Raises:
        ValueError: not one value per response.
    """
    values = _flat(values)
    if len(values) != num:
        raise ValueError(f"a reward function must return one value per completion, got {len(values)} for {num}")
    return values

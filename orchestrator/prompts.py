"""Dataset rows become prompts; streams of them whose position is one number.

Row faults are listed with their numbers before anything starts. The n-th draw is a pure function of n and the seed, so that a run
resumes where it stood by remembering how many prompts it drew. Rows written for TRL, verl, SkyRL, slime, OpenRLHF and ms-swift are
taken as they are: the prompt is where PROMPT_PLACES says, the right answer where `label_of` looks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from configs.rules import ConfigError, reward_functions
from configs.schema import REWARDS_WITH_ANSWER, Config
from orchestrator.sources import listed, read_rows
from orchestrator.types import Draw, Prompt, label_of

PROMPT_PLACES = ("prompt", "messages", "input", "question", "query", "problem")  # the first that a source's first row has


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The prompts of one source."""

    source: str
    weight: float  # share of the draws, relative to the other sources'
    prompts: list[Prompt]
    num_overlong: int  # longer than data.max_prompt_tokens, left out


class Tokenizer(Protocol):
    """The two calls that prompts need of a Hugging Face tokenizer."""

    def __call__(self, text: Sequence[str], **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class PromptStream:
    """An endless sequence of draws over the prompts, reshuffled each epoch."""

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        self._epoch, self._order = -1, np.arange(len(prompts))

    def draw(self, number: int) -> Draw:
        """Return the draw of that number (from 0)."""
        epoch, place = divmod(number, len(self._prompts))
        if self._shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return Draw(number=number, prompt=self._prompts[self._order[place]])


class MixedStream:
    """Several streams, each with its share of the draws: the next draw is of the stream that is furthest behind its share."""

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float]) -> None:
        self._streams = streams
        self._shares = np.asarray(weights) / np.sum(weights)
        self._drawn = np.zeros(len(streams), dtype=np.int64)
        self._plan: list[tuple[int, int]] = []  # per draw: which stream, and its own draw number

    def draw(self, number: int) -> Draw:
        """Return the draw of that number (from 0)."""
        while len(self._plan) <= number:
            stream = int(np.argmax(self._shares * (len(self._plan) + 1) - self._drawn))
            self._plan.append((stream, int(self._drawn[stream])))
            self._drawn[stream] += 1
        stream, place = self._plan[number]
        return Draw(number=number, prompt=self._streams[stream].draw(place).prompt)


def read_prompts(sources: Mapping[str, float], key: str, config: Config, tokenizer: Tokenizer) -> list[Dataset]:
    """Read sources, render and tokenise their prompts; ids are distinct over all of them.

    Args:
        sources: sources (orchestrator/sources.py) and their weights.
        key: configuration key that names them, for errors (`data.train`, `eval.data`).

    Raises:
        ConfigError: a source is missing or empty, rows are faulty (they are named), or prompts are too long.
    """
    seen: dict[str, int] = {}
    return [_dataset(source, weight, key, config, tokenizer, seen) for source, weight in sources.items()]


def _dataset(
    source: str, weight: float, key: str, config: Config, tokenizer: Tokenizer, seen: dict[str, int]
) -> Dataset:
    found, data = read_rows(source, key), config.data
    rows = found.rows
    column = data.prompt_column or _prompt_place(rows[0][1])
    faults = [f"{found.unit} {number}: {fault}" for number, row in rows if (fault := _fault(row, column, config))]
    if faults:
        raise ConfigError(
            f"{key} must have a prompt and its columns in every row, got {len(faults)} faulty rows in {source} "
            f"({listed(faults)}). Mend the rows, or set data.prompt_column or reward.answer_column."
        )
    chats = [_chat(row[column], column, data.text_as_chat, data.system_prompt) for _, row in rows]
    if (data.system_prompt or data.chat_template or data.chat_template_kwargs) and not any(chats):
        raise ConfigError(
            f"data.system_prompt and data.chat_template must go with chat messages, got plain text in {source}. "
            "Set data.text_as_chat=true."
        )
    template = _template(data.chat_template)
    texts = [
        row[column] if chat is None else _render(chat, row, tokenizer, template, data.chat_template_kwargs)
        for chat, (_, row) in zip(chats, rows, strict=True)
    ]
    token_ids = _tokenize(texts, [chat is not None for chat in chats], tokenizer)
    limit = data.max_prompt_tokens
    long = [f"{found.unit} {n}: {len(ids)} tokens" for (n, _), ids in zip(rows, token_ids, strict=True) if len(ids) > limit]
    if long and (data.overlong == "refuse" or len(long) == len(rows)):
        raise ConfigError(
            f"{key} must have prompts of at most data.max_prompt_tokens ({limit}) tokens, got {len(long)} longer ones in {source} "
            f"({listed(long)}). Raise data.max_prompt_tokens (and rollout.max_model_len), or set data.overlong=filter."
        )
    prompts = [
        Prompt(
            id=_distinct(str(row.get("id") or f"{found.stem}:{number}"), seen),
            token_ids=tuple(ids),
            text=text,
            columns={name: value for name, value in row.items() if name != column} | ({} if chat is None else {"messages": chat}),
        )
        for (number, row), ids, text, chat in zip(rows, token_ids, texts, chats, strict=True)
        if len(ids) <= limit
    ]
    return Dataset(source=source, weight=weight, prompts=prompts, num_overlong=len(long))


def _prompt_place(row: Any) -> str:
    return next((name for name in PROMPT_PLACES if isinstance(row, dict) and name in row), PROMPT_PLACES[0])


def _fault(row: Any, column: str, config: Config) -> str:
    """Say what is wrong with a row; empty where nothing is."""
    if not isinstance(row, dict):
        return f"not an object but {type(row).__name__}"
    if column not in row:
        return f"no column {column!r} among {sorted(row)}"
    value = row[column]
    messages = isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    if not isinstance(value, str) and not messages:
        return f"{column!r} is neither a string nor a list of messages"
    if not value or (isinstance(value, str) and not value.strip()):
        return f"{column!r} is empty"
    if set(reward_functions(config.reward)) & set(REWARDS_WITH_ANSWER):
        answer = label_of(row, config.reward.answer_column)
        if answer is None or answer == "":
            return f"no column {config.reward.answer_column!r}" if answer is None else f"{config.reward.answer_column!r} is empty"
    return ""


def _distinct(name: str, seen: dict[str, int]) -> str:
    """Keep rows with equal ids apart: the second is `name#2`."""
    while True:
        seen[name] = seen.get(name, 0) + 1
        if seen[name] == 1:
            return name
        name = f"{name}#{seen[name]}"


def _chat(prompt: Any, column: str, text_as_chat: bool, system: str | None) -> list[dict[str, Any]] | None:
    """Make the messages of a row's prompt; None where it is plain text."""
    if isinstance(prompt, str):
        if not text_as_chat:
            return None
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:  # a table's columns fill what a message does not have with None
        messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
        if column == "messages" and len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # ms-swift: the answer of a supervised row
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _template(given: str | None) -> str | None:
    """Take a chat template as it is, or from a file."""
    if given is None or "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.chat_template must be a Jinja template or a file that holds one, got {given}. Check the path.")
    return path.read_text(encoding="utf-8")


def _render(
    chat: list[dict[str, Any]], row: Mapping[str, Any], tokenizer: Tokenizer, template: str | None, arguments: Mapping[str, Any]
) -> str:
    """Write a chat as text by the template; a last message of the assistant is one that the policy continues."""
    given = dict(arguments) | (row.get("chat_template_kwargs") or {})
    given |= {"tools": row["tools"]} if row.get("tools") else {}
    given |= {"chat_template": template} if template else {}
    continues = chat[-1]["role"] == "assistant"
    given |= {"continue_final_message": True} if continues else {}
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not continues, **given)


def _tokenize(texts: list[str], chat: list[bool], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenise; a chat template writes its own special tokens, raw text gets the tokenizer's."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [i for i, c in enumerate(chat) if c is not special]
        if chosen:
            rows = tokenizer([texts[i] for i in chosen], add_special_tokens=special)["input_ids"]
            for i, row in zip(chosen, rows, strict=True):
                ids[i] = row
    return ids

"""Dataset rows become prompts; a stream of them whose position is one number.

Row faults are listed with their line numbers before anything starts. The n-th draw is a pure function of n and the seed, so
that a run resumes where it stood by remembering how many prompts it drew.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from configs.rules import ConfigError, reward_functions
from configs.schema import REWARDS_WITH_ANSWER, Config
from orchestrator.types import Draw, Prompt, label_of

MAX_LISTED = 5  # faulty lines that an error names


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


def read_prompts(path: str, key: str, config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    """Read a jsonl file, render and tokenise its prompts.

    Args:
        path: jsonl file.
        key: configuration key that names it, for errors (`data.train`, `eval.data`).

    Raises:
        ConfigError: the file is missing or empty, or rows are faulty; faulty lines are named.
    """
    rows = _read_rows(path, key)
    column = config.data.prompt_column
    faults = [f"line {line}: {fault}" for line, row in rows if (fault := _fault(row, column))]
    if set(reward_functions(config.reward)) & set(REWARDS_WITH_ANSWER):
        answer = config.reward.answer_column
        faults += [f"line {n}: no column {answer!r}" for n, row in rows if isinstance(row, dict) and label_of(row, answer) is None]
    if faults:
        raise ConfigError(
            f"{key} must have a prompt and its columns in every row, got {len(faults)} faulty rows in {path} "
            f"({_listed(faults)}). Mend the rows, or set data.prompt_column or reward.answer_column."
        )
    texts = [_render(row[column], tokenizer) for _, row in rows]
    chat = [not isinstance(row[column], str) for _, row in rows]
    token_ids = _tokenize(texts, chat, tokenizer)
    limit = config.data.max_prompt_tokens
    long = [f"line {line}: {len(ids)} tokens" for (line, _), ids in zip(rows, token_ids, strict=True) if len(ids) > limit]
    if long:
        raise ConfigError(
            f"{key} must have prompts of at most data.max_prompt_tokens ({limit}) tokens, got {len(long)} longer ones in {path} "
            f"({_listed(long)}). Raise data.max_prompt_tokens (and rollout.max_model_len) or shorten them."
        )
    stem = Path(path).stem
    return [
        Prompt(
            id=str(row.get("id", f"{stem}:{line}")),
            token_ids=tuple(ids),
            text=text,
            columns={name: value for name, value in row.items() if name != column} | _messages(row[column]),
        )
        for (line, row), ids, text in zip(rows, token_ids, texts, strict=True)
    ]


def _read_rows(path: str, key: str) -> list[tuple[int, Any]]:
    if not Path(path).is_file():
        raise ConfigError(f"{key} must name an existing jsonl file, got {path}. Check the path.")
    rows, broken = [], []
    with open(path, encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                rows.append((line, json.loads(text)))
            except json.JSONDecodeError as error:
                broken.append(f"line {line}: {error.msg}")
    if broken:
        raise ConfigError(
            f"{key} must be one JSON object per line, got {len(broken)} broken lines in {path} ({_listed(broken)}). Mend them."
        )
    if not rows:
        raise ConfigError(f"{key} must have at least one row, got an empty file {path}. Give another file.")
    return rows


def _fault(row: Any, column: str) -> str:
    if not isinstance(row, dict):
        return f"not an object but {type(row).__name__}"
    if column not in row:
        return f"no column {column!r} among {sorted(row)}"
    value = row[column]
    messages = isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    if not isinstance(value, str) and not messages:
        return f"{column!r} is neither a string nor a list of messages"
    return "" if value else f"{column!r} is empty"


def _render(prompt: str | list[dict[str, str]], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def _messages(prompt: str | list[dict[str, str]]) -> dict[str, Any]:
    return {} if isinstance(prompt, str) else {"messages": prompt}


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


def _listed(faults: list[str]) -> str:
    more = f"; {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
    return "; ".join(faults[:MAX_LISTED]) + more

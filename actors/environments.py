"""Environments: what answers the policy between its turns. Tokens in, tokens out; nothing is ever tokenised again.

One environment object lives for one sample. After each turn of the policy it gives the tokens of its observation, which are put behind
what the policy wrote and masked out of the loss, or says that the episode is over. The response (turns and observations) holds at most
rollout.max_new_tokens tokens.
"""

import ast
import importlib.util
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from configs.rules import ConfigError
from configs.schema import RolloutConfig
from orchestrator.types import Prompt

MAX_EXPONENT = 64  # of the calculator


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy wrote since the last observation."""

    number: int  # from 0
    token_ids: tuple[int, ...]  # as sampled, the stop token included
    text: str  # without special tokens


class Environment(Protocol):
    """One episode; made as `Class(prompt, tokenizer, **rollout.environment_arguments)`."""

    async def step(self, turn: Turn, /) -> tuple[Sequence[int], bool]:
        """Return the token ids of the observation, and whether the episode is over (no observation follows then)."""
        ...


class GuessingGame:
    """The policy guesses the number in a column of the row and hears "higher" or "lower"."""

    def __init__(self, prompt: Prompt, tokenizer: Any, *, column: str = "answer", max_turns: int = 8) -> None:
        self._prompt, self._tokenizer, self._max_turns = prompt, tokenizer, max_turns
        self._secret = int(prompt.columns[column])

    async def step(self, turn: Turn, /) -> tuple[Sequence[int], bool]:
        """Compare the last number of the turn."""
        numbers = re.findall(r"-?\d+", turn.text)
        if turn.number + 1 == self._max_turns or (numbers and int(numbers[-1]) == self._secret):
            return (), True
        told = "a number" if not numbers else "higher" if int(numbers[-1]) < self._secret else "lower"
        return observation(self._prompt, self._tokenizer, "user", f"{told}\n"), False


class Calculator:
    """A tool in the Hermes format: `<tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>`.

    A turn without a call is the final answer.
    """

    CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

    def __init__(self, prompt: Prompt, tokenizer: Any, *, max_turns: int = 8) -> None:
        self._prompt, self._tokenizer, self._max_turns = prompt, tokenizer, max_turns

    async def step(self, turn: Turn, /) -> tuple[Sequence[int], bool]:
        """Answer the last call of the turn."""
        calls = self.CALL.findall(turn.text)
        if not calls or turn.number + 1 == self._max_turns:
            return (), True
        return observation(self._prompt, self._tokenizer, "tool", self._answer(calls[-1])), False

    def _answer(self, call: str) -> str:
        try:
            return calculate(json.loads(call)["arguments"]["expression"])
        except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            return f"error: {type(error).__name__}"


BUILT_IN: dict[str, Callable[..., Environment]] = {"calculator": Calculator, "guessing_game": GuessingGame}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def calculate(expression: str) -> str:
    """Evaluate arithmetic on numbers: + - * / // % ** and parentheses.

    Raises:
        ValueError, SyntaxError, ArithmeticError: it is anything else, or too large.
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return node.value
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Pow) and (abs(right) > MAX_EXPONENT or abs(left) > 1e6):
                raise OverflowError("too large")
            return OPERATORS[type(node.op)](left, right)
        raise ValueError("not arithmetic")

    found = value(ast.parse(expression[:500], mode="eval").body)
    if isinstance(found, complex) or not math.isfinite(found):
        raise ValueError("no finite number")
    return f"{round(found, 10):.12g}" if isinstance(found, float) else str(found)


def observation(prompt: Prompt, tokenizer: Any, role: str, text: str) -> list[int]:
    """Tokenise an observation alone: after a chat as a message with all that the template puts around it, else as it is."""
    if "messages" in prompt.columns:
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        before = tokenizer.apply_chat_template(talk, tokenize=False)
        whole = tokenizer.apply_chat_template([*talk, {"role": role, "content": text}], tokenize=False, add_generation_prompt=True)
        end = tokenizer.eos_token or ""  # the policy has written the end of its turn; what follows that is still to come
        place = before.rfind(end) + len(end) if end and end in before else len(os.path.commonprefix([before, whole]))
        text = whole[place:]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def load_environment(name: str) -> Callable[..., Environment]:
    """Find an environment's class: built in, or `path.py:Class`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, attribute = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def check_environment(rollout: RolloutConfig) -> None:
    """Refuse an environment that is not there; a user's file is read, not run.

    Raises:
        ConfigError: no such name, file or class, or an option without effect.
    """
    name = rollout.environment
    if name is None:
        unused: Mapping[str, Any] = {
            "environment_arguments": rollout.environment_arguments, "max_turn_tokens": rollout.max_turn_tokens
        }  # fmt: skip
        for key, value in unused.items():
            if value:
                raise ConfigError(
                    f"rollout.{key} must be left out where it has no effect, got {value} without rollout.environment. Remove it."
                )
        return
    path, _, attribute = name.rpartition(":")
    if name in BUILT_IN:
        return
    if not path.endswith(".py") or not Path(path).is_file():
        raise ConfigError(f"rollout.environment must be one of {', '.join(BUILT_IN)} or path.py:Class, got {name}. Check it.")
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise ConfigError(f"rollout.environment must be a Python file, got {path} (line {error.lineno}: {error.msg}). Mend it.") from None
    if attribute not in [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]:
        raise ConfigError(f"rollout.environment must name a class of {path}, got {attribute}. Check the spelling.")

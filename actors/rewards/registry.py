"""The built-in reward functions by name: each is `f(batch, **arguments) -> list of K numbers, None, or exceptions`."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from actors.rewards import answers, remote, shaping
from actors.rewards.interfaces import Adapted, Refusal
from configs.schema import REWARD_FUNCTIONS

BUILT_IN: dict[str, Callable[..., list[Any]]] = {
    function.__name__.rstrip("_"): function
    for function in (
        answers.exact_match, answers.numeric_match, answers.math, answers.gsm8k, answers.choice, answers.reasoning_gym,
        shaping.regex, shaping.tags, shaping.overlong, shaping.length, remote.judge,
    )
}  # fmt: skip
assert set(BUILT_IN) == set(REWARD_FUNCTIONS)


def built_in(name: str, arguments: Mapping[str, Any]) -> Adapted:
    """Put a built-in function and its arguments behind the one call.

    Raises:
        Refusal: an argument is missing or unknown, or its value is refused.
    """
    function = BUILT_IN[name]
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = [p.name for p in parameters]
    wrong = [given for given in arguments if given not in known]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in arguments]
    if wrong or missing:
        told = f"{wrong[0]}" if wrong else f"none for {missing[0]}"
        raise Refusal(
            f"reward.arguments.{name} must be among {', '.join(known) or 'nothing'}, got {told}. Correct the arguments."
        )
    if "pattern" in arguments:
        try:
            re.compile(arguments["pattern"])
        except re.error as error:
            raise Refusal(
                f"reward.arguments.{name}.pattern must be a regular expression, got {arguments['pattern']!r} ({error}). Correct it."
            ) from None
    return lambda batch: (function(batch, **arguments), {})

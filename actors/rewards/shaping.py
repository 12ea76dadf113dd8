"""Built-in rewards for form and length. Each gives one number per response."""

import re
from collections.abc import Sequence

from actors.rewards.interfaces import Batch


def regex(batch: Batch, *, pattern: str, full: bool = False) -> list[float]:
    """Give 1 where the pattern is found in the response (`full`: matches all of it), else 0; a dot matches a newline too."""
    compiled = re.compile(pattern, re.DOTALL)
    find = compiled.fullmatch if full else compiled.search
    return [float(find(text) is not None) for text in batch.completions]


def tags(batch: Batch, *, names: Sequence[str] = ("think", "answer")) -> list[float]:
    """Give 1 where the response is these tags in this order, each once, and nothing else; as DeepSeek-R1 (2501.12948) asks."""
    whole = re.compile(r"\s*" + r"\s*".join(rf"<{name}>(?:(?!</?{name}>).)*</{name}>" for name in names) + r"\s*", re.DOTALL)
    once = [f"<{name}>" for name in names]
    return [
        float(whole.fullmatch(text) is not None and all(text.count(tag) == 1 for tag in once)) for text in batch.completions
    ]


def overlong(batch: Batch, *, max_tokens: int, buffer_tokens: int) -> list[float]:
    """Give 0 up to max_tokens - buffer_tokens, then a linear fall to -1 at max_tokens (DAPO, 2503.14476, equation 13)."""
    free = max_tokens - buffer_tokens
    return [-min(1.0, max(0.0, (len(ids) - free) / buffer_tokens)) for ids in batch.completion_ids]


def length(batch: Batch, *, target_tokens: int) -> list[float]:
    """Give 1 at the target length, falling linearly to 0 at nothing and at twice the target."""
    return [max(0.0, 1 - abs(len(ids) - target_tokens) / target_tokens) for ids in batch.completion_ids]

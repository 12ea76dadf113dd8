"""Groups made of texts, and reward workers around a file's body: what the tests of rewards share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.rewards.worker import RewardWorker
from configs.schema import RewardConfig
from orchestrator.types import Draw, Group, Prompt, Sample


def group(*texts: str, **columns: Any) -> Group:
    """Make a group of the prompt "1+1=" whose responses are given, one token per character."""
    prompt = Prompt(id="p", token_ids=(1,), text="1+1=", columns=columns)
    samples = tuple(
        Sample(
            token_ids=np.arange(len(text), dtype=np.int32),
            logprobs=np.zeros(len(text), dtype=np.float32),
            loss_mask=np.ones(len(text), dtype=bool),
            versions=np.full(len(text), 3, dtype=np.int32),
            finish_reason="stop",
            text=text,
            error="",
        )
        for text in texts
    )
    return Group(draw=Draw(number=0, prompt=prompt), samples=samples)


def worker(folder: Path, body: str, *, name: str = "f", **config: Any) -> RewardWorker:
    """Start a reward worker around the function `name` of a file."""
    path = folder / "rewards_of_a_user.py"
    path.write_text(body)
    return RewardWorker(RewardConfig(function=f"{path}:{name}", **config), "reward-0")


def values(function: str, texts: Sequence[str], *, arguments: dict[str, Any] | None = None, **columns: Any) -> list[float]:
    """Score texts with a built-in function, without a process."""
    from actors.rewards.child import answer, load
    from actors.rewards.worker import batch_of

    batch = batch_of(group(*texts, **columns), "answer")
    said = answer(load(function, arguments or {}, 60.0), batch)
    return [number if cause == "ok" else detail for cause, number, detail in said["values"]]

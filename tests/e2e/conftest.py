"""A tiny model, its rows, and the overrides of a run of seconds."""

from pathlib import Path

import pytest

from tests.tiny import make_tiny_model, overrides, write_rows


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Overrides of a tiny run into a folder: tiny(folder, tied=True)."""
    shared = tmp_path_factory.mktemp("tiny")
    rows = write_rows(shared / "rows.jsonl")
    models = {tied: make_tiny_model(shared / f"tied-{tied}", tied=tied) for tied in (True, False)}
    rewards = shared / "rewards.py"
    rewards.write_text(
        "def signal(prompts, completions, **columns):\n    return [c.count('1') + len(c) / 8 for c in completions]\n"
        "def broken(prompts, completions, **columns):\n    raise ValueError('the judge fell asleep')\n"
    )

    def make(folder: Path, *, tied: bool = True) -> list[str]:
        return [*overrides(models[tied], rows, folder), f"reward.function={rewards}:signal"]

    return make

"""A multi-turn run: the policy learns the guessing game, which it cannot win above one half without reading the observations."""

import json

import pytest

from tests.e2e.cli import metrics, train
from tests.tiny import make_tiny_model, overrides

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def test_it_learns_the_guessing_game(tmp_path):
    rows = tmp_path / "rows.jsonl"  # the same prompt for both numbers: only "higher" and "lower" tell them apart
    rows.write_text("".join(json.dumps({"prompt": "guess ", "answer": answer}) + "\n" for answer in "27" * 8))
    code, output = train(
        *overrides(make_tiny_model(tmp_path / "model"), rows, tmp_path / "run"),
        "reward.function=numeric_match", "rollout.backend=hf", "rollout.environment=guessing_game", "rollout.max_turn_tokens=1",
        "rollout.environment_arguments={max_turns: 2}", "rollout.max_new_tokens=12", "rollout.num_generations=16",
        "rollout.max_concurrent_samples=128", "train.prompts_per_step=8", "train.num_steps=40", "data.shuffle=false", "learner.lr=3e-3",
    )  # fmt: skip
    assert code == 0, output
    steps = metrics(tmp_path / "run")
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[:2]) / 2 < 0.2 and sum(rewards[-5:]) / 5 > 0.8, rewards  # blind guessing wins 0.5 at most
    assert max(step.get("mismatch/logprob_abs_diff_max", 0) for step in steps) < 1e-4  # trained on what was sampled, at its place
    assert all(step["response_length/mean"] <= 2 for step in steps)  # turns of one token; observations do not count

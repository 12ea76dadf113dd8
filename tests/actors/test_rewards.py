"""Reward functions in their worker: invalid is not zero, and a fault costs only the samples that have it."""

import math
from pathlib import Path

import numpy as np
import pytest

from actors.rewards import RewardWorker, load_function
from configs.rules import ConfigError
from configs.schema import RewardConfig
from orchestrator.types import Draw, Group, Prompt, Sample


def group(*texts: str, **columns) -> Group:
    prompt = Prompt(id="p", token_ids=(1,), text="1+1=", columns=columns)
    none = np.zeros(0)
    samples = tuple(
        Sample(token_ids=none, logprobs=none, loss_mask=none, versions=none, finish_reason="stop", text=text)
        for text in texts
    )
    return Group(draw=Draw(number=0, prompt=prompt), samples=samples)


def worker(tmp_path: Path, body: str) -> RewardWorker:
    path = tmp_path / "rewards_of_a_user.py"
    path.write_text(body)
    return RewardWorker(RewardConfig(function=f"{path}:f"), "reward-0")


def test_exact_match_strips():
    rewards = RewardWorker(RewardConfig(answer_column="gold"), "r").score(group(" 2\n", "3", gold=2))
    assert [r.value for r in rewards] == [1.0, 0.0]


def test_a_user_function_gets_prompts_completions_and_columns(tmp_path):
    body = "def f(prompts, completions, level, **kw):\n    return [l + len(c) + len(p) for p, c, l in zip(prompts, completions, level)]"
    assert [r.value for r in worker(tmp_path, body).score(group("a", "bb", level=10))] == [15.0, 16.0]


def test_async_functions_and_numpy_values_are_fine(tmp_path):
    body = "import numpy as np\nasync def f(prompts, completions, **kw):\n    return np.array([1.5] * len(prompts))"
    assert [r.value for r in worker(tmp_path, body).score(group("a", "b"))] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("value", "cause"), [("None", "not_applicable"), ("float('nan')", "error"), ("'high'", "error"), ("1/0", "error")]
)
def test_one_bad_sample_costs_one_sample(tmp_path, value, cause):
    body = f"def f(prompts, completions, **kw):\n    return [{value} if c == 'bad' else 1.0 for c in completions]"
    rewards = worker(tmp_path, body).score(group("ok", "bad", "ok"))
    assert [r.cause for r in rewards] == ["ok", cause, "ok"]
    assert math.isnan(rewards[1].value) and [rewards[0].value, rewards[2].value] == [1.0, 1.0]


def test_too_few_values_make_the_rewards_invalid(tmp_path):
    rewards = worker(tmp_path, "def f(prompts, completions, **kw):\n    return []").score(group("a", "b"))
    assert [r.cause for r in rewards] == ["error", "error"] and "one value per completion" in rewards[0].detail


@pytest.mark.parametrize(
    ("name", "words"),
    [("exat_match", "one of exact_match"), ("missing.py:f", "existing file"), ("{folder}/bad.py:f", "SyntaxError"),
     ("{folder}/good.py:g", "a function of")],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_refused(tmp_path, name, words):
    (tmp_path / "bad.py").write_text("def f(:")
    (tmp_path / "good.py").write_text("f = 1")
    with pytest.raises(ConfigError, match=words):
        load_function(name.format(folder=tmp_path))

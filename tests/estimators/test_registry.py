"""Estimators by name and by file, and what importing them costs."""

import subprocess
import sys

import pytest
import torch

from estimators.registry import (
    OUTCOME_ESTIMATORS,
    EstimatorError,
    estimate_advantages,
    is_group_local,
    load_estimator,
)
from estimators.rloo import rloo
from tests.estimators.samples import options

REWARDS = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 3.0]])
VALID = torch.tensor([[True, True, True], [True, False, True]])
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])

USER_FILE = '''
import torch

def best_of_group(rewards_PK, valid_PK, num_tokens_PK):
    """1 for the best valid sample of a group, 0 for the others."""
    best_P1 = torch.where(valid_PK, rewards_PK, -torch.inf).amax(dim=1, keepdim=True)
    return (rewards_PK == best_P1).float()

def no_tensor(rewards_PK, valid_PK, num_tokens_PK):
    return rewards_PK.tolist()

def one_per_group(rewards_PK, valid_PK, num_tokens_PK):
    return rewards_PK.mean(dim=1)

def divides_by_spread(rewards_PK, valid_PK, num_tokens_PK):
    return rewards_PK / (rewards_PK - rewards_PK)

NUMBER = 3
'''


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


def estimate(name, scale: str | None = "none", **changes):
    chosen = options(advantage_estimator=name, scale_rewards=scale, **changes)
    return estimate_advantages(chosen, REWARDS, VALID, TOKENS)


def test_every_estimator_by_name():
    assert set(OUTCOME_ESTIMATORS) == {"rloo", "reinforce_plus_plus", "grpo", "reinforce"}
    assert load_estimator("rloo") is rloo
    for name, function in OUTCOME_ESTIMATORS.items():
        options = {} if name == "reinforce" else {"scale_rewards": "none"}
        assert torch.equal(estimate(name), function(REWARDS, VALID, TOKENS, **options))


def test_options_reach_the_estimator():
    results = [
        estimate("rloo"),
        estimate("rloo", "group"),
        estimate("rloo", "batch"),
        estimate("grpo", "group"),
        estimate("grpo", "batch"),
        estimate("reinforce_plus_plus", "batch"),
        estimate("reinforce_plus_plus", "batch", whiten_over="token"),
        estimate("reinforce"),
    ]
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert not torch.allclose(first, second)


def test_users_own_function(user_file):
    got = estimate(f"{user_file}:best_of_group")
    assert got.dtype == torch.float64
    assert got.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]


def test_invalid_sample_of_a_users_function_is_0(tmp_path):
    path = tmp_path / "raw.py"
    path.write_text("def raw(rewards_PK, valid_PK, num_tokens_PK):\n    return rewards_PK / valid_PK\n")
    assert estimate(f"{path}:raw").tolist() == [[0.0, 1.0, 5.0], [2.0, 0.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ppo", "advantage_estimator must be one of rloo, .* or path.py:function, got 'ppo'. Choose one of them."),
        ("mine.py", "advantage_estimator must be one of rloo, .* or path.py:function, got 'mine.py'."),
        ("nowhere/mine.py:f", "must name a file that exists, got 'nowhere/mine.py'. Give the path"),
        ("FILE:missing", "must name a function of .*mine.py, got 'missing'. Define it there."),
        ("FILE:NUMBER", "must name a function of .*mine.py, got 'NUMBER'."),
        ("FILE:no_tensor", r"must return a tensor of shape \(2, 3\), got list. Return one advantage per reward."),
        ("FILE:one_per_group", r"must return a tensor of shape \(2, 3\), got \(2,\)."),
        ("FILE:divides_by_spread", "must return finite advantages for valid rewards, got nan. Guard"),
    ],
)
def test_wrong_estimators_are_one_sentence(user_file, name, sentence):
    with pytest.raises(EstimatorError, match=sentence) as raised:
        estimate(name.replace("FILE", user_file))
    assert "\n" not in str(raised.value)


def test_scale_must_be_decided():
    with pytest.raises(EstimatorError, match="scale_rewards must be decided .* got None"):
        estimate("rloo", None)


def test_group_local_estimators_need_no_other_group(user_file):
    for name in (*OUTCOME_ESTIMATORS, f"{user_file}:best_of_group"):
        for scale in ("group", "batch", "none"):
            chosen = options(advantage_estimator=name, scale_rewards=scale)
            whole = estimate_advantages(chosen, REWARDS, VALID, TOKENS)
            rows = [estimate_advantages(chosen, REWARDS[[i]], VALID[[i]], TOKENS[[i]]) for i in (0, 1)]
            if is_group_local(chosen):
                assert torch.equal(torch.cat(rows), whole), (name, scale)
            elif name in OUTCOME_ESTIMATORS:
                assert not torch.allclose(torch.cat(rows), whole), (name, scale)


def test_importing_estimators_loads_nothing_heavy():
    program = (
        "import sys, estimators.registry, estimators.policy_loss, estimators.correction, estimators.shaping\n"
        "import estimators.aggregate, estimators.kl, estimators.reinforce_plus_plus_token\n"
        "heavy = ('ray', 'vllm', 'deepspeed', 'transformers', 'orchestrator', 'learner', 'actors')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"

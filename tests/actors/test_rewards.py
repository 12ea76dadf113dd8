"""Reward functions in their processes: invalid is not zero, and whatever one sample does costs that sample alone, in bounded time."""

import math
import os
import time
from pathlib import Path

import pytest

from actors.rewards.worker import check_rewards
from configs.load import load as load_config
from configs.rules import ConfigError
from configs.schema import RewardConfig
from orchestrator.metrics import group_metrics
from orchestrator.types import GroupFacts, ScoredGroup
from tests.actors.rewarding import group, worker

IMPORTS = "import os, re, signal, sys, time\n"
FAULTS = {  # what a function does for the sample "bad": (code, cause, words)
    "raises": ("1 / 0", "error", "ZeroDivisionError"),
    "nan": ("return float('nan')", "error", "finite"),
    "none": ("return None", "not_applicable", ""),
    "string": ("return 'high'", "error", "'high'"),
    "exits": ("sys.exit(0)", "error", "SystemExit"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "error", "SIGKILL"),
    "vanishes": ("os._exit(7)", "error", "exit code 7"),
    "hangs": ("time.sleep(1e6)", "timeout", "killed"),
    "regex": ("re.match('(a+)+$', 'a' * 64 + 'b')", "timeout", "killed"),  # never leaves C code
    "ignores": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)", "timeout", "killed"),
}


def faulty(code: str) -> str:
    return (
        f"{IMPORTS}def one(c):\n    if c == 'bad':\n        {code}\n    return float(len(c))\n"
        "def f(prompts, completions, **kw):\n    return [one(c) for c in completions]\n"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_sample_of_eight_costs_one_sample(tmp_path, fault):
    code, cause, words = FAULTS[fault]
    rewarder = worker(tmp_path, faulty(code), timeout_s=1.5)
    texts = ["x" * (i + 1) for i in range(8)]
    texts[5] = "bad"
    start = time.monotonic()
    rewards = rewarder.score(group(*texts))
    assert time.monotonic() - start < 30  # two deadlines of 1.5 s and restarts, on a busy machine
    assert [r.cause for r in rewards] == ["ok"] * 5 + [cause] + ["ok"] * 2
    assert [r.value for i, r in enumerate(rewards) if i != 5] == [float(len(t)) for i, t in enumerate(texts) if i != 5]
    assert math.isnan(rewards[5].value) and words in rewards[5].detail
    assert [r.value for r in rewarder.score(group("a", "bb"))] == [1.0, 2.0]  # and the worker goes on
    metrics = group_metrics([scored(rewards)], version=0)
    assert metrics[f"reward/{cause}"] == 1 and metrics["reward/invalid_frac"] == 1 / 8
    assert sum(metrics[f"reward/{name}"] for name in ("timeout", "error", "not_applicable")) == 1
    rewarder.close()


def scored(rewards) -> ScoredGroup:
    num = len(rewards)
    facts = GroupFacts(
        draw=0, num_prompt_tokens=1, num_tokens=(1,) * num, truncated=(False,) * num, started_version=0, newest_version=0,
        worker="w", generate_s=0.0,
    )  # fmt: skip
    return ScoredGroup(draw=group("a").draw, facts=facts, group_ref=None, reference_refs=(), rewards=tuple(rewards))


def test_too_few_values_cost_only_the_sample_that_lacks_one(tmp_path):
    body = "def f(prompts, completions, **kw):\n    return [1.0 for c in completions if c != 'bad']"
    rewards = worker(tmp_path, body).score(group("a", "bad", "c"))
    assert [r.cause for r in rewards] == ["ok", "error", "ok"] and "one value per completion" in rewards[1].detail


def test_a_killed_call_takes_its_own_children_along(tmp_path):
    body = (
        f"{IMPORTS}import subprocess\ndef f(prompts, completions, **kw):\n"
        f"    child = subprocess.Popen(['sleep', '1000'])\n    open(r'{tmp_path}/pid', 'w').write(str(child.pid))\n    time.sleep(1e6)"
    )
    worker(tmp_path, body, timeout_s=1.5).score(group("a"))
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_output_of_user_code_does_not_disturb_the_answers(tmp_path):
    body = "def f(prompts, completions, **kw):\n    print('x' * 100000)\n    return [1.0] * len(completions)"
    assert [r.value for r in worker(tmp_path, body).score(group("a", "b"))] == [1.0, 1.0]


def test_user_code_sees_no_secret_of_its_worker_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "named")
    body = (
        "import os\nassert 'WANDB_API_KEY' not in os.environ\n"
        "def f(prompts, completions, **kw):\n    return [len(os.environ.get('WANDB_API_KEY', '')) + 10 * len(os.environ['JUDGE_KEY'])]"
    )
    assert [r.value for r in worker(tmp_path, body, environment=["JUDGE_KEY"]).score(group("a"))] == [50.0]


def test_several_functions_are_weighted_and_logged(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, log_extra, log_metric, **kw):\n"
        "    log_extra('letters', [len(c) for c in completions]); log_metric('level', 2)\n"
        "    return [None if c == '?' else 1.0 for c in completions]\n"
        "def g(prompts, completions, **kw):\n    return [None if c == '?' else float(len(c)) for c in completions]\n"
        "def h(prompts, completions, **kw):\n    return [None if len(c) == 1 else 100.0 for c in completions]\n"
    )
    names = ",".join(f"{tmp_path}/r.py:{name}" for name in "fgh")
    config = RewardConfig(function=names, reward_weights=[1.0, 0.5, 0.01])
    from actors.rewards.worker import RewardWorker

    rewards = RewardWorker(config, "r").score(group("abcd", "a", "?"))
    assert [r.value for r in rewards[:2]] == [4.0, 1.5] and rewards[2].cause == "not_applicable"
    assert rewards[0].parts == {"f": 1.0, "g": 4.0, "h": 100.0, "letters": 4.0, "level": 2.0}
    metrics = group_metrics([scored(rewards)], version=0)
    assert (metrics["reward/g/mean"], metrics["reward/h/mean"], metrics["reward/letters/mean"]) == (2.5, 100.0, 2.0)


def test_a_worker_that_dies_takes_a_hanging_function_along(tmp_path):
    body = f"{IMPORTS}def f(prompts, completions, **kw):\n    re.match('(a+)+$', 'a' * 64 + 'b')"
    (tmp_path / "r.py").write_text(body)
    program = (
        "import sys, threading, time\nfrom actors.rewards.process import FunctionProcess\n"
        "from actors.rewards.worker import batch_of\nfrom tests.actors.rewarding import group\n"
        f"p = FunctionProcess(r'{tmp_path}/r.py:f', {{}}, timeout_s=600, environment=[])\np.start()\n"
        "threading.Thread(target=p.score, args=[batch_of(group('a'), 'answer')], daemon=True).start()\n"
        "time.sleep(1)\nprint(p._process.pid, flush=True)\nimport os; os.kill(os.getpid(), 9)"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    child = Path("/proc", done.stdout.strip())
    deadline = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.stdout.strip() and not child.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("exat_match", "one of exact_match"), ("missing.py:f", "existing file"), ("{folder}/bad.py:f", "SyntaxError"),
     ("{folder}/good.py:g", "a function of"), ("{folder}/good.py:odd", "known interface"), ("{folder}/exits.py:f", "SystemExit"),
     ("regex", "none for pattern"), ("tags", "got depth"), ("judge", "pattern must be a regular expression")],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_refused(tmp_path, name, words):
    arguments = {"tags": {"depth": 2}, "judge": {"url": "http://u/v1", "model": "m", "pattern": "("}}
    (tmp_path / "bad.py").write_text("def f(:")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "good.py").write_text("f = 1\ndef odd(x, y):\n    return 1")
    with pytest.raises(ConfigError, match=words):
        check_rewards(RewardConfig(function=name.format(folder=tmp_path), arguments=arguments))


@pytest.mark.parametrize(
    ("override", "words"),
    [("reward.reward_weights=[1,2]", "one weight per function"), ("reward.arguments={regex: {pattern: a}}", "must name functions")],
)
def test_options_without_a_function_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        load_config(["model.path=m", "data.train=d", override])


def test_the_check_runs_no_user_code_in_this_process(tmp_path):
    (tmp_path / "r.py").write_text(f"import os\nopen(r'{tmp_path}/pid', 'w').write(str(os.getpid()))\ndef f(completions):\n    pass")
    check_rewards(RewardConfig(function=f"{tmp_path}/r.py:f"))
    assert int((tmp_path / "pid").read_text()) != os.getpid()


def test_a_process_that_spoils_its_connection_costs_one_sample(tmp_path):
    body = (
        f"{IMPORTS}def f(prompts, completions, **kw):\n    if 'bad' in completions:\n"
        "        for fd in range(3, 64):\n            try:\n                os.write(fd, b'\\x00\\x00\\x00\\x02no')\n"
        "            except OSError:\n                pass\n    return [1.0] * len(completions)"
    )
    rewards = worker(tmp_path, body, timeout_s=5).score(group("a", "bad", "b"))
    assert [r.cause for r in rewards] == ["ok", "error", "ok"]

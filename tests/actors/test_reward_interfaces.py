"""One reward in every interface that people have gives the same numbers: TRL, verl, OpenRLHF (file and HTTP), ms-swift, sync and async."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from actors.rewards.worker import RewardWorker
from configs.schema import RewardConfig
from tests.actors.rewarding import group, worker

TEXTS = ("2", " 3", "five", "2222", "")
WANTED = [11.0, 2.0, 4.0, 14.0, 0.0]  # 10 where the first character is the answer, and the length
RULE = "def rule(text, answer):\n    return 10.0 * text.startswith(str(answer)) + len(text)\n"

FILES = {
    "trl": "def f(prompts, completions, answer, **kw):\n    return [rule(c, a) for c, a in zip(completions, answer)]",
    "trl_strict": "def f(completions, answer):\n    return [rule(c, a) for c, a in zip(completions, answer)]",
    "trl_ids": "def f(prompts, completions, completion_ids, answer, trainer_state, **kw):\n"
    "    assert trainer_state.global_step in (0, 3)\n"
    "    return [rule(c, a) - len(c) + len(i) for c, a, i in zip(completions, answer, completion_ids)]",
    "trl_async": "import asyncio\nasync def f(prompts, completions, answer, **kw):\n    await asyncio.sleep(0)\n"
    "    return [rule(c, a) for c, a in zip(completions, answer)]",
    "trl_numpy": "import numpy as np\ndef f(prompts, completions, answer, **kw):\n"
    "    return np.array([rule(c, a) for c, a in zip(completions, answer)], dtype=np.float32)",
    "verl": "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    assert data_source == 'sums' and extra_info == {'index': 7}\n"
    "    return rule(solution_str, ground_truth)",
    "verl_dict": "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
    "    return {'score': rule(solution_str, ground_truth), 'acc': solution_str == ground_truth}",
    "verl_batch": "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
    "    return [rule(s, g) for s, g in zip(solution_strs, ground_truths)]",
    "verl_async": "async def f(data_source, solution_str, ground_truth, extra_info=None):\n    return rule(solution_str, ground_truth)",
    "openrlhf": "def f(queries, prompts, labels):\n    scores = [rule(q[len(p):], l) for q, p, l in zip(queries, prompts, labels)]\n"
    "    return {'rewards': scores, 'scores': scores, 'extra_logs': {'twice': [2 * s for s in scores]}}",
    "openrlhf_tensor": "import torch\ndef f(queries, prompts, labels, **kwargs):\n"
    "    return {'rewards': torch.tensor([[rule(q[len(p):], l)] for q, p, l in zip(queries, prompts, labels)])}",
    "swift": "from swift.plugin import ORM, orms\nclass F(ORM):\n    def __call__(self, completions, answer, **kwargs):\n"
    "        return [rule(c, a) for c, a in zip(completions, answer)]\norms['f'] = F",
    "swift_async": "from swift.rewards import AsyncORM\nclass f(AsyncORM):\n    async def __call__(self, completions, answer, **kwargs):\n"
    "        return [rule(c, a) for c, a in zip(completions, answer)]",
}  # fmt: skip
ROW = {"answer": "2", "data_source": "sums", "extra_info": {"index": 7}}


@pytest.mark.parametrize("kind", FILES)
def test_one_file_of_each_kind_gives_the_same_numbers(tmp_path, kind):
    rewarder = worker(tmp_path, RULE + FILES[kind], answer_column="answer")
    rewards = rewarder.score(group(*TEXTS, **ROW))
    rewarder.close()
    assert [r.value for r in rewards] == WANTED, [r.detail for r in rewards]
    if kind == "verl_dict":
        assert [r.parts["acc"] for r in rewards] == [1.0, 0.0, 0.0, 0.0, 0.0]
    if kind == "openrlhf":
        assert [r.parts["twice"] for r in rewards] == [2 * value for value in WANTED]


@pytest.mark.parametrize("kind", ["trl", "verl", "openrlhf", "swift"])
def test_arguments_reach_a_users_function(tmp_path, kind):
    body = {
        "trl": "def f(completions, bonus, **kw):\n    return [bonus] * len(completions)",
        "verl": "def f(solution_str, bonus):\n    return bonus",
        "openrlhf": "def f(queries, prompts, labels, bonus):\n    return {'rewards': [bonus] * len(queries)}",
        "swift": "class f:\n    def __call__(self, completions, bonus, **kw):\n        return [bonus] * len(completions)",
    }[kind]
    name = f"{tmp_path}/rewards_of_a_user.py:f"
    rewarder = worker(tmp_path, body, arguments={name: {"bonus": 5}})
    assert [r.value for r in rewarder.score(group("a", "b"))] == [5.0, 5.0]
    rewarder.close()


@pytest.mark.parametrize(
    "row", [{"label": "2"}, {"solution": "2"}, {"ground_truth": "2"}, {"reward_model": {"style": "rule", "ground_truth": "2"}},
            {"reward_spec": {"method": "rule", "ground_truth": "2"}}, {"gold": "2"}],
)  # fmt: skip
def test_the_answer_is_found_where_the_layouts_keep_it(tmp_path, row):
    body = RULE + "def f(queries, prompts, labels):\n    return [rule(q[4:], l) for q, l in zip(queries, labels)]"
    rewarder = worker(tmp_path, body, answer_column="gold")
    assert [r.value for r in rewarder.score(group(*TEXTS, **row))] == WANTED
    rewarder.close()


def test_a_chat_row_gives_trl_messages_and_swift_text(tmp_path):
    messages = [{"role": "user", "content": "1+1="}]
    body = RULE + (
        "def f(prompts, completions, answer, **kw):\n    assert prompts[0][-1]['content'] == '1+1='\n"
        "    return [rule(c[0]['content'], a) for c, a in zip(completions, answer)]\n"
        "class G:\n    def __call__(self, completions, answer, **kw):\n        return [rule(c, a) for c, a in zip(completions, answer)]\n"
    )
    for name in ("f", "G"):
        rewarder = worker(tmp_path, body, name=name)
        assert [r.value for r in rewarder.score(group(*TEXTS, messages=messages, **ROW))] == WANTED
        rewarder.close()


def test_one_bad_sample_costs_one_in_a_per_sample_interface(tmp_path):
    body = "def f(data_source, solution_str, ground_truth):\n    return 1 / len(solution_str)"
    rewards = worker(tmp_path, body).score(group("a", "", "bb"))
    assert [r.cause for r in rewards] == ["ok", "error", "ok"] and "ZeroDivisionError" in rewards[1].detail


@contextmanager
def server(reply: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """Serve POST requests: reply(path, body) -> status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["authorization"] = self.headers.get("Authorization", "")
            status, answer = reply(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def openrlhf_reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    assert path == "/get_reward"
    texts = [query[len(prompt) :] for query, prompt in zip(body["query"], body["prompts"], strict=True)]
    rewards = [10.0 * text.startswith(label) + len(text) for text, label in zip(texts, body["labels"], strict=True)]
    return 200, {"rewards": rewards, "scores": rewards, "extra_logs": {"seen": len(texts)}}


def test_get_reward_gives_the_same_numbers():
    with server(openrlhf_reply) as url:
        rewards = RewardWorker(RewardConfig(function=f"{url}/get_reward"), "r").score(group(*TEXTS, **ROW))
    assert [r.value for r in rewards] == WANTED and rewards[0].parts["seen"] == len(TEXTS)


def test_get_reward_goes_round_its_replicas_and_past_a_dead_one():
    calls: Counter[str] = Counter()

    def flaky(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        calls["flaky"] += 1
        return (503, {}) if calls["flaky"] % 2 else openrlhf_reply(path, body)

    def steady(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        calls["steady"] += 1
        return openrlhf_reply(path, body)

    with server(flaky) as first, server(steady) as second:
        dead = "http://127.0.0.1:9/get_reward"
        rewarder = RewardWorker(RewardConfig(function=f"{first}/get_reward|{dead}|{second}/get_reward"), "r")
        for _ in range(6):
            assert [r.value for r in rewarder.score(group(*TEXTS, **ROW))] == WANTED
    assert calls["flaky"] >= 2 and calls["steady"] >= 2


def test_a_server_that_is_down_or_hangs_makes_rewards_invalid_in_bounded_time():
    def hang(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(3)
        return 200, {}

    with server(hang) as url:
        rewarder = RewardWorker(RewardConfig(function=f"{url}/get_reward", timeout_s=1.0), "r")
        start = time.monotonic()
        (reward,) = rewarder.score(group("a", **ROW))
    assert time.monotonic() - start < 10 and not reward.valid and reward.cause in ("error", "timeout")


def test_a_judge_grades_each_sample_and_one_bad_word_costs_one(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")

    def grade(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert path == "/v1/chat/completions" and body["authorization"] == "Bearer k" and body["model"] == "m"
        words = body["messages"][0]["content"]
        assert words.startswith("2:1+1=:")
        text = words.rpartition(":")[2]
        return 200, {"choices": [{"message": {"content": "no idea" if text == "bad" else f"Fine. Score: {len(text)}"}}]}

    with server(grade) as url:
        arguments = {"url": f"{url}/v1", "model": "m", "prompt": "{label}:{prompt}:{completion}", "api_key_env": "JUDGE_KEY"}
        config = RewardConfig(function="judge", arguments={"judge": arguments}, environment=["JUDGE_KEY"])
        rewards = RewardWorker(config, "r").score(group("12345", "bad", "{prompt}", answer="2"))
    assert [r.cause for r in rewards] == ["ok", "error", "ok"] and [rewards[0].value, rewards[2].value] == [0.5, 0.8]
    assert "no score" in rewards[1].detail

"""Turns and observations: tokens trained are tokens sampled, observations are masked, faults cost their own sample."""

import asyncio
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.environments import Calculator, GuessingGame, Turn, calculate, check_environment, observation
from actors.rewards.worker import unless_broken
from actors.rollout import RolloutWorker
from configs.load import load
from configs.rules import ConfigError
from configs.schema import RolloutConfig
from orchestrator.types import Draw, Prompt, Reward, Sampling
from tests.tiny import make_tiny_model, overrides

PROMPT = Prompt(id="p", token_ids=(3, 12, 4, 14), text="1+2=", columns={"answer": "7"})
BROKEN = """
class Broken:
    def __init__(self, prompt, tokenizer, fault):
        self.fault = fault
    async def step(self, turn):
        if turn.text.startswith(tuple('abcdefghijklm')):
            raise ValueError('the environment is out')
        return [2, 3] * 3, False
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def play(model, folder, *options: str, num_samples: int = 8):
    config = load([*overrides(model, folder, folder), "rollout.backend=hf", "rollout.max_new_tokens=24", *options])
    worker = RolloutWorker(config, "rollout-0")
    sampling = Sampling(num_samples=num_samples, temperature=1.0, seed=5)
    group, facts = asyncio.run(worker.generate(Draw(number=0, prompt=PROMPT), sampling))
    return group.samples, facts


def test_what_is_trained_is_what_was_sampled_and_observations_are_masked(tiny, tmp_path):
    game = ["rollout.environment=guessing_game", "rollout.max_turn_tokens=2", "rollout.environment_arguments={max_turns: 3}"]
    samples, facts = play(tiny, tmp_path, *game)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
    told = [tuple(tokenizer(f"{word}\n")["input_ids"]) for word in ("higher", "lower", "a number")]
    assert any(not s.loss_mask.all() for s in samples)
    for sample in samples:
        assert sample.loss_mask[0] and sample.loss_mask[-1] and len(sample.token_ids) <= 24 and not sample.error
        edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        runs = np.split(sample.token_ids, edges)
        assert all(len(run) <= 2 for run in runs[::2]) and all(tuple(run) in told for run in runs[1::2])
        ids = torch.tensor([[*PROMPT.token_ids, *sample.token_ids.tolist()]])  # the ids as they are, never text again
        with torch.no_grad():
            scores = model(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0].numpy()
        assert np.abs(scores - sample.logprobs)[sample.loss_mask].max() < 1e-4
        assert (sample.logprobs[~sample.loss_mask] == 0).all()
    assert facts.num_tokens == tuple(int(s.loss_mask.sum()) for s in samples)
    again, _ = play(tiny, tmp_path, *game)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(samples, again, strict=True))


def test_without_an_environment_a_sample_is_one_turn_with_the_same_tokens(tiny, tmp_path):
    alone, _ = play(tiny, tmp_path)
    turns, _ = play(tiny, tmp_path, "rollout.environment=guessing_game")
    for one, many in zip(alone, turns, strict=True):
        first = many.token_ids[: len(one.token_ids)]
        assert one.loss_mask.all() and (one.token_ids == first).all()


def test_a_response_and_its_observations_stay_within_the_budget(tiny, tmp_path):
    samples, facts = play(tiny, tmp_path, "rollout.environment=guessing_game", "rollout.max_turn_tokens=1", "rollout.max_new_tokens=9")
    assert all(len(s.token_ids) <= 9 for s in samples)
    cut = [s for s in samples if s.finish_reason == "length"]
    assert cut and all(s.loss_mask[-1] for s in cut) and facts.truncated == tuple(s.finish_reason == "length" for s in samples)


def test_a_fault_of_an_environment_costs_the_sample_that_has_it(tiny, tmp_path):
    (tmp_path / "user.py").write_text(BROKEN)
    options = (f"rollout.environment={tmp_path}/user.py:Broken", "rollout.environment_arguments={fault: 1}", "rollout.max_turn_tokens=1")
    samples, _ = play(tiny, tmp_path, *options, num_samples=16)
    broken = [s for s in samples if s.error]
    assert 0 < len(broken) < 16 and "ValueError: the environment is out" in broken[0].error
    good = Reward(value=1.0, cause="ok", parts={}, detail="", answer="1")
    rewards = [unless_broken(sample, good) for sample in samples]
    assert [reward.valid for reward in rewards] == [not sample.error for sample in samples]
    assert "broke off at turn 0" in next(r.detail for r in rewards if not r.valid)


def turn(text: str, number: int = 0) -> Turn:
    return Turn(number=number, token_ids=(), text=text)


def test_the_guessing_game_says_where_the_number_is(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    game = GuessingGame(PROMPT, tokenizer, max_turns=3)
    steps = [asyncio.run(game.step(turn(text))) for text in ("5", "9", "so 7", "x")]
    assert [tokenizer.decode(ids) for ids, _ in steps] == ["higher\n", "lower\n", "", "a number\n"]
    assert [done for _, done in steps] == [False, False, True, False]
    assert asyncio.run(game.step(turn("1", number=2)))[1]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*(4+5)", "27"), ("7/2", "3.5"), ("0.1+0.2", "0.3"), ("-2**3", "-8"), ("17 % 5", "2"), ("6/3", "2")],
)
def test_the_calculator_calculates(tiny, expression, value):
    assert calculate(expression) == value
    tool = Calculator(PROMPT, AutoTokenizer.from_pretrained(tiny))
    call = {"name": "calculator", "arguments": {"expression": expression}}
    assert tool._answer(json.dumps(call)) == value
    assert asyncio.run(tool.step(turn("the answer is 3"))) == ((), True)


NO_ARITHMETIC = ("__import__('os')", "9**9**9", "1/0", "(" * 300, "'a'*9", "(-8)**0.5", "1e999")
NO_CALLS = ["", "{}", "[]", "1", '{"arguments": {"expression": 3}}', *(json.dumps({"arguments": {"expression": e}}) for e in NO_ARITHMETIC)]


@pytest.mark.parametrize("call", NO_CALLS)
def test_what_is_no_arithmetic_is_an_error_that_the_policy_reads(tiny, call):
    assert Calculator(PROMPT, AutoTokenizer.from_pretrained(tiny))._answer(call).startswith("error: ")


def test_an_observation_in_a_chat_has_what_the_template_puts_around_it(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = Prompt(id="p", token_ids=(1,), text="", columns={"messages": []})
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}\n{% endfor %}a. "
    assert tokenizer.decode(observation(chat, tokenizer, "tool", "12")) == "tool. 12\na. "
    assert tokenizer.decode(observation(PROMPT, tokenizer, "tool", "12")) == "12"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
    )
    text = tokenizer.decode(observation(chat, tokenizer, "tool", "12"))
    assert text.startswith("\ntool. 12") and text.endswith("\na.")  # the policy has written the end of its own turn


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": "guesing"}, "must be one of calculator, guessing_game or path.py:Class, got guesing"),
        ({"environment": "{folder}/user.py:Other"}, "must name a class of"),
        ({"environment": "{folder}/bad.py:Broken"}, "line 1"),
        ({"max_turn_tokens": 3}, "rollout.max_turn_tokens must be left out"),
        ({"environment_arguments": {"a": 1}}, "rollout.environment_arguments must be left out"),
    ],
)
def test_an_environment_that_is_not_there_is_refused(tmp_path, options, words):
    (tmp_path / "user.py").write_text(BROKEN)
    (tmp_path / "bad.py").write_text("class (")
    options = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError) as caught:
        check_environment(RolloutConfig(**options))
    assert words in str(caught.value)

"""Evaluation: its estimates against enumeration, what it leaves out, and that training never feels it."""

import asyncio
import itertools
import statistics

import pytest

from orchestrator.evaluate import Evaluator, majority, pass_at_k, summary
from orchestrator.metrics import evaluation_line
from orchestrator.ports import DataLost, GroupFailed
from orchestrator.types import Draw, GroupFacts, Reward, Sampling, ScoredGroup
from tests.orchestrator.fakes import NUM_ARMS, FakeRewarder, FakeRollout, prompts
from tests.orchestrator.test_loop import lines, make, run


def reward(value: float, answer: str) -> Reward:
    return Reward(value=value, cause="ok", parts={}, detail="", answer=answer)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_sample(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(statistics.fmean(max(subset) for subset in subsets), abs=1e-12)


def test_the_majority_votes_and_ties_count_by_their_share():
    votes = [reward(1, "7"), reward(0, "8"), reward(1, "7"), reward(0, "9"), reward(0, "")]
    assert majority(votes, 1.0) == 1
    assert majority([*votes, reward(0, "8")], 1.0) == 0.5  # 7 and 8 twice each; whoever has no answer does not vote
    assert majority([reward(0, "")], 1.0) is None


def evaluate(rollout: FakeRollout, rewarder: FakeRewarder, num_samples: int = 4) -> dict[str, float]:
    """Evaluate uniform weights on two datasets."""
    import torch

    rollout.logits, rollout.version = torch.zeros(6, NUM_ARMS), 0
    ways = {"sampled": Sampling(num_samples=num_samples, temperature=1.0, seed=0), "greedy": Sampling(num_samples=1, temperature=0, seed=0)}
    evaluator = Evaluator(rollout, rewarder, {"small": prompts(3), "large": prompts(6)}, ways, solved_at=1.0, max_samples=8)
    return asyncio.run(evaluator.run())


def test_each_dataset_is_reported_by_its_name_with_errors_over_prompts():
    metrics = evaluate(FakeRollout(), FakeRewarder())
    assert {key.rpartition("/")[0] for key in metrics} == {f"eval/{n}/{w}" for n in ("small", "large") for w in ("sampled", "greedy")}
    at = {key.removeprefix("eval/large/sampled/"): value for key, value in metrics.items() if "large/sampled" in key}
    assert (at["num_prompts"], at["failed"], at["response_length"], at["truncated_frac"]) == (6, 0, 1, 0)
    assert at["pass@1"] == pytest.approx(at["reward_mean"]) and at["pass@1"] <= at["pass@2"] <= at["pass@4"]
    assert at["reward_stderr"] > 0 and at["pass@4_stderr"] > 0 and 0 <= at["maj@4"] <= 1
    assert not any("@" in key for key in metrics if "greedy" in key)
    line = evaluation_line(3, metrics)
    assert line.startswith("eval at step 3: large/greedy ") and "pass@4" in line and "over 6 held-out prompts)" in line


def test_a_prompt_that_cannot_be_had_is_counted_and_left_out():
    class Rollout(FakeRollout):
        lost = 0

        async def generate(self, draw, sampling):
            if draw.number == 1:
                raise GroupFailed("it killed two workers")
            if draw.number == 2 and self.lost < 2:
                self.lost += 1
                raise DataLost("gone with its node")
            return await super().generate(draw, sampling)

    metrics = evaluate(Rollout(), FakeRewarder(invalid=lambda draw, index: draw == 0))
    assert (metrics["eval/large/sampled/failed"], metrics["eval/large/sampled/num_prompts"]) == (1, 6)
    assert metrics["eval/large/sampled/invalid_frac"] == pytest.approx(1 / 5)
    assert "3 prompts failed" not in evaluation_line(0, metrics) and "4 prompts failed" in evaluation_line(0, metrics)


def test_no_more_samples_are_asked_for_at_a_time_than_the_bound():
    class Rollout(FakeRollout):
        now = most = 0

        async def generate(self, draw, sampling):
            self.now += sampling.num_samples
            self.most = max(self.most, self.now)
            made = await super().generate(draw, sampling)
            self.now -= sampling.num_samples
            return made

    rollout = Rollout()
    evaluate(rollout, FakeRewarder())
    assert rollout.most == 8


def test_invalid_rewards_leave_the_estimates():
    bad = Reward(value=float("nan"), cause="error", parts={}, detail="", answer="")
    facts = GroupFacts(draw=0, num_prompt_tokens=1, num_tokens=(2, 4), truncated=(False, True), started_version=0, newest_version=0,
                       worker="", generate_s=0.0)  # fmt: skip
    (draw, *_) = [Draw(number=0, prompt=prompt) for prompt in prompts(1)]
    groups = [
        ScoredGroup(draw=draw, facts=facts, group_ref=None, reference_refs=(), rewards=rewards)
        for rewards in ((reward(1, "a"), reward(0, "b")), (bad, reward(0, "b")), (bad, bad))
    ]
    found = summary(groups, 2, 1.0)
    assert (found["reward_mean"], found["pass@1"], found["invalid_frac"]) == (0.25, 0.25, 0.5)
    assert found["pass@2"] == 1.0  # only the first prompt has two valid samples
    assert (found["response_length"], found["truncated_frac"]) == (3, 0.5)


def test_evaluation_never_changes_training(tmp_path):
    def weights(name: str, *overrides: str):
        folder = tmp_path / name
        folder.mkdir()
        learner = asyncio.run(run(make(folder, "train.num_steps=5", *overrides), folder))[1]
        return learner.logits, sum("eval/sampled/reward_mean" in line for line in lines(folder))

    often, num_often = weights("often", "eval.every=1", "eval.num_samples=4")
    seldom, num_seldom = weights("seldom")
    assert (often == seldom).all() and (num_often, num_seldom) == (6, 2)

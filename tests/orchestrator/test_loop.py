"""The real loop over fakes: it learns, obeys the staleness bound, keeps its ledger, and lets no fault pass in silence."""

import asyncio
import contextlib
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from configs.load import flat, load
from configs.schema import Config
from orchestrator.evaluate import Evaluator
from orchestrator.feed import Feed, FeedError, Ledger, Scoring
from orchestrator.metrics import RunLog
from orchestrator.ports import DataLost, GroupsLost, Wait
from orchestrator.prompts import PromptStream
from orchestrator.resume import find
from orchestrator.saver import Saver
from orchestrator.status import Status
from orchestrator.stop import Stop
from orchestrator.train import Parts, train
from orchestrator.types import Draw, Reward, Sampling, ScoredGroup
from tests.orchestrator.fakes import FakeLearner, FakeRewarder, FakeRollout, prompts


class _Writer:
    def add_scalar(self, *args: object) -> None:
        pass

    def close(self) -> None:
        pass


ORIGIN = {"model": "bandit", "tokenizer": "none", "prompts": "six"}


def make(folder: Path, *overrides: str) -> Config:
    return load(
        ["model.path=x", "data.train=x", "algorithm.beta=0", f"train.output_dir={folder}", "eval.greedy=false",
         "train.prompts_per_step=4", "train.sample_table_every=0", *overrides]
    )  # fmt: skip


async def run(
    config: Config, folder: Path, *, rollout=None, rewarder=None, learner=None, stop=None, evaluator=None
) -> tuple[Parts, FakeLearner]:
    rollout, rewarder = rollout or FakeRollout(), rewarder or FakeRewarder()
    learner = learner or FakeLearner(config.algorithm)
    sampling = Sampling(num_samples=config.rollout.num_generations, temperature=1.0, seed=config.train.seed)
    feed = Feed(
        PromptStream(prompts(), shuffle=True, seed=0),
        Scoring(rollout, rewarder, None, sampling),
        num_groups=config.train.num_steps * config.train.prompts_per_step,
        prompts_per_step=config.train.prompts_per_step,
        max_staleness=config.train.max_staleness,
        max_refill=config.train.max_refill,
        has_signal=lambda group: len({r.value for r in group.rewards if r.valid}) > 1,
    )

    async def open_group(ref):
        return ref

    log = RunLog(
        folder,
        num_steps=config.train.num_steps,
        table_every=config.train.sample_table_every,
        open_group=open_group,
        writer=_Writer(),
        console=Console(quiet=True),
    )
    way = Sampling(num_samples=config.eval.num_samples, temperature=1.0, seed=0)
    built_in = Evaluator(rollout, rewarder, {"": prompts()}, {"sampled": way}, solved_at=1.0, max_samples=64)
    beside = {"config": flat(config), "origin": ORIGIN}
    start = find(folder, config.train.resume, config.train.resume_allow, **beside)
    told = []
    saver = Saver(folder, beside=beside, settings=config.checkpoint, begun=start.state.step, report=told.append)
    parts = Parts(
        rollout=rollout,
        learner=learner,
        feed=feed,
        evaluator=evaluator or built_in,
        log=log,
        status=Status(folder, {"feed": feed}, report=lambda sentence: None),
        saver=saver,
        start=start,
        stop=stop or Stop(),
        chaos=lambda step: None,
    )
    try:
        async with asyncio.timeout(60):
            await train(config, parts)
    finally:
        await feed.close()
        await saver.close()
        log.close()
    return parts, learner


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "grpo", "reinforce"])
def test_it_learns_with_every_estimator_at_every_staleness(tmp_path, estimator, staleness):
    config = make(
        tmp_path, f"algorithm.advantage_estimator={estimator}", f"train.max_staleness={staleness}",
        "algorithm.correction=none", "train.num_steps=40",
    )  # fmt: skip
    parts, learner = asyncio.run(run(config, tmp_path))
    evals = [row["eval/sampled/reward_mean"] for row in lines(tmp_path) if "eval/sampled/reward_mean" in row]
    assert evals[-1] > 0.8 > evals[0]
    assert max(stale for _, stale in learner.trained) == staleness  # generation is the faster side: the bound is reached
    assert parts.feed.ledger == Ledger(drawn=160, trained=160)
    assert learner.exported == tmp_path / "policy"


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_feed_never_draws_beyond_the_last_step(tmp_path, staleness):
    rollout = FakeRollout()
    config = make(tmp_path, "train.num_steps=3", f"train.max_staleness={staleness}", "algorithm.correction=none")
    asyncio.run(run(config, tmp_path, rollout=rollout))
    assert sorted(set(rollout.generated)) == list(range(12))


def test_timing_never_changes_the_result_at_staleness_0(tmp_path):
    def weights(seed: int):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        rollout = FakeRollout(delay=lambda draw: rng.random() * 0.003 if seed else 0.0)
        return asyncio.run(run(make(folder, "train.num_steps=6"), folder, rollout=rollout))[1].logits

    reference = weights(0)
    assert all((weights(seed) == reference).all() for seed in (1, 2, 3))


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_group_grows_too_old_whatever_the_timing(tmp_path, staleness, seed):
    rng = random.Random(seed)
    rollout = FakeRollout(delay=lambda draw: rng.choice([0.0, 0.0, 0.004, 0.01]))
    config = make(
        tmp_path, "train.num_steps=12", f"train.max_staleness={staleness}", "algorithm.correction=none", "train.max_refill=2"
    )
    parts, learner = asyncio.run(run(config, tmp_path, rollout=rollout))
    assert max(stale for _, stale in learner.trained) == staleness
    assert parts.feed.ledger.trained == 48 and parts.feed.in_flight == 0


def test_a_step_takes_nothing_while_too_many_would_be_left_for_the_steps_that_may_train_them():
    """With bound 2, the P oldest of 2 P groups of version 0 must go at version 1, however fast those of version 1 are."""
    async def scenario():
        finished = {number: asyncio.Event() for number in range(8)}

        async def score(draw: Draw) -> ScoredGroup:
            await finished[draw.number].wait()
            return receipt(draw)

        feed = Feed(PromptStream(prompts(), shuffle=False, seed=0), score, num_groups=8, prompts_per_step=2, max_staleness=2,
                    max_refill=0, has_signal=lambda group: True)  # fmt: skip
        feed.refill(0)  # 0 to 5 at version 0
        for number in (4, 5):
            finished[number].set()
        first = await feed.take()
        feed.commit(first)
        feed.refill(1)  # 6 and 7
        for number in (6, 7, 0):
            finished[number].set()
        taking = asyncio.create_task(feed.take())
        await asyncio.sleep(0.02)
        early = taking.done()
        finished[1].set()
        second = [group.draw.number for group in await taking]
        await feed.close()
        return [group.draw.number for group in first], early, second

    assert asyncio.run(scenario()) == ([4, 5], False, [0, 1])


def receipt(draw: Draw, values: tuple[float, ...] = (0.0, 1.0)) -> ScoredGroup:
    """A scored group of which the feed reads the rewards alone."""
    rewards = tuple(Reward(value=value, cause="ok", parts={}, detail="", answer="") for value in values)
    return ScoredGroup(draw=draw, facts=None, group_ref=None, reference_refs=(), rewards=rewards)  # pyright: ignore


def takes(signal: dict[int, bool], *, max_refill: int, delays: random.Random) -> tuple[list[int], Ledger]:
    """One step of 4 groups at staleness 0 over draws whose groups have signal or not; returns what is trained, and the ledger."""

    async def score(draw: Draw) -> ScoredGroup:
        await asyncio.sleep(delays.random() * 0.01)
        return receipt(draw, (0.0, 1.0) if signal.get(draw.number, True) else (1.0, 1.0))

    async def scenario():
        feed = Feed(PromptStream(prompts(), shuffle=False, seed=0), score, num_groups=4, prompts_per_step=4, max_staleness=0,
                    max_refill=max_refill, has_signal=lambda group: len({r.value for r in group.rewards}) > 1)  # fmt: skip
        feed.refill(0)
        groups = await feed.take()
        feed.commit(groups)
        return [group.draw.number for group in groups], feed.ledger

    return asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("dull", "max_refill", "trained", "filtered"),
    [
        ((), 3, [0, 1, 2, 3], 0),
        ((1,), 0, [0, 1, 2, 3], 0),  # off
        ((1,), 3, [0, 2, 3, 4], 1),
        ((1, 2, 4), 3, [0, 3, 5, 6], 3),
        ((0, 1, 2, 3, 4), 2, [0, 1, 2, 5], 2),  # the allowance is used up: groups without signal fill the places, earliest first
    ],
)
def test_groups_without_signal_are_replaced_up_to_the_allowance(dull, max_refill, trained, filtered, seed):
    numbers, ledger = takes(dict.fromkeys(dull, False), max_refill=max_refill, delays=random.Random(seed))
    assert numbers == trained
    assert ledger == Ledger(drawn=4 + filtered, trained=4, filtered=filtered)


def test_a_group_with_fewer_than_two_valid_rewards_is_dropped_and_replaced(tmp_path):
    rewarder = FakeRewarder(invalid=lambda draw, index: draw == 5 and index > 0)
    parts, learner = asyncio.run(run(make(tmp_path, "train.num_steps=3"), tmp_path, rewarder=rewarder))
    assert parts.feed.ledger == Ledger(drawn=13, trained=12, filtered=1)
    assert sorted(number for number, _ in learner.trained) == [n for n in range(13) if n != 5]


def test_invalid_rewards_of_one_sample_leave_the_statistics(tmp_path):
    rewarder = FakeRewarder(invalid=lambda draw, index: index == 0)
    asyncio.run(run(make(tmp_path, "train.num_steps=2"), tmp_path, rewarder=rewarder))
    assert [row["reward/invalid_frac"] for row in lines(tmp_path) if "reward/mean" in row] == [1 / 8, 1 / 8]


def test_a_reward_that_never_works_ends_the_run_with_its_cause(tmp_path):
    rewarder = FakeRewarder(invalid=lambda draw, index: True)
    with pytest.raises(FeedError, match="the judge is out"):
        asyncio.run(run(make(tmp_path), tmp_path, rewarder=rewarder))


class _Crash(FakeRollout):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    async def generate(self, draw, sampling):
        if self.part == "generate" and draw.number == 6:
            raise RuntimeError("generate broke")
        return await super().generate(draw, sampling)

    async def load(self, publication):
        if self.part == "load" and publication.steps == 2:
            raise RuntimeError("load broke")
        return await super().load(publication)


@pytest.mark.parametrize("part", ["generate", "load"])
def test_a_crash_of_the_rollout_propagates(tmp_path, part):
    with pytest.raises(RuntimeError, match=f"{part} broke"):
        asyncio.run(run(make(tmp_path), tmp_path, rollout=_Crash(part)))


def test_a_crash_of_the_learner_or_reward_propagates(tmp_path):
    class Learner(FakeLearner):
        async def step(self, groups):
            raise RuntimeError("learner broke")

    class Rewarder(FakeRewarder):
        async def score(self, draw, group, num_samples):
            if group.draw.number == 3 and num_samples > 1:
                raise RuntimeError("reward broke")
            return await super().score(draw, group, num_samples)

    config = make(tmp_path)
    with pytest.raises(RuntimeError, match="learner broke"):
        asyncio.run(run(config, tmp_path, learner=Learner(config.algorithm)))
    with pytest.raises(RuntimeError, match="reward broke"):
        asyncio.run(run(config, tmp_path, rewarder=Rewarder()))


def test_a_lost_group_is_noticed():
    with pytest.raises(FeedError, match="ledger|Ledger"):
        Ledger(drawn=3, trained=1).check(in_flight=1)


def test_time_parts_add_up(tmp_path):
    asyncio.run(run(make(tmp_path, "train.num_steps=2"), tmp_path))
    for row in lines(tmp_path):
        if "time/step_s" in row:
            parts = sum(row[f"time/{part}_s"] for part in ("rollout", "checkpoint", "learner", "weight_sync", "other"))
            assert parts == pytest.approx(row["time/step_s"])


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_lost_before_they_are_trained_are_drawn_again(tmp_path, max_staleness):
    class Learner(FakeLearner):
        losses = 0

        async def step(self, groups):
            if self.steps == 2 and self.losses < 2:  # twice in one step
                self.losses += 1
                raise GroupsLost([groups[self.losses].draw.number])
            return await super().step(groups)

    config = make(tmp_path, "train.num_steps=5", f"train.max_staleness={max_staleness}", "algorithm.correction=none")
    learner, rollout = Learner(config.algorithm), FakeRollout()
    parts, _ = asyncio.run(run(config, tmp_path, learner=learner, rollout=rollout))
    assert sorted(draw for draw, _ in learner.trained) == list(range(20))
    again = [n for n in set(rollout.generated) if rollout.generated.count(n) > 1 and n < 6]  # evaluation draws have numbers too
    assert learner.losses == 2 and again
    assert (parts.feed.ledger.drawn, parts.feed.ledger.trained, parts.feed.in_flight) == (20, 20, 0)
    assert max(staleness for _, staleness in learner.trained) <= max_staleness


def test_groups_that_are_lost_again_and_again_end_the_run(tmp_path):
    class Learner(FakeLearner):
        async def step(self, groups):
            raise GroupsLost([groups[0].draw.number])

    config = make(tmp_path)
    with pytest.raises(GroupsLost, match=r"got draws \[0\] lost"):
        asyncio.run(run(config, tmp_path, learner=Learner(config.algorithm)))


def test_a_group_lost_while_it_is_scored_is_generated_again(tmp_path):
    class Rewarder(FakeRewarder):
        lost = 0

        async def score(self, draw, group, num_samples):
            if draw.number == 3 and num_samples > 1 and self.lost < 2:
                self.lost += 1
                raise DataLost("gone")
            return await super().score(draw, group, num_samples)

    config, rewarder = make(tmp_path, "train.num_steps=2"), Rewarder()
    parts, learner = asyncio.run(run(config, tmp_path, rewarder=rewarder))
    assert sorted(draw for draw, _ in learner.trained) == list(range(8)) and rewarder.lost == 2


def test_status_says_what_each_wait_waits_for(tmp_path):
    class Slow:
        age = 5.0

        def status(self):
            return {"replaced": 2, "retried": 3}

        def waits(self):
            return [Wait(what="rollout-1 (node n, pid 7) to finish generate of draw 4", since_s=self.age, deadline_s=600)]

    told: list[str] = []
    status = Status(tmp_path, {"rollout": Slow(), "reward": Slow()}, told.append)

    async def wait_long(monkeypatch):
        monkeypatch.setattr("orchestrator.status.REFRESH_S", 0.01)
        monkeypatch.setattr("orchestrator.status.FIRST_WORD_S", 0.05)
        status.enter("rollout", 12)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(status.keep(), 0.4)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(wait_long(monkeypatch))
    state = json.loads((tmp_path / "status.json").read_text())
    assert (state["step"], state["phase"], state["waits"][0]["deadline_s"]) == (12, "rollout", 600)
    assert "rollout-1 (node n, pid 7) to finish generate of draw 4 (5 of 600 s)" in told[0]
    assert 2 <= len(told) <= 4  # after 0.05, 0.1, 0.2 s: not at every refresh
    assert status.metrics() == {"workers/replaced": 4, "workers/retried": 6, "workers/given_up": 0}
    status.end("failed: the cause")
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "failed: the cause"

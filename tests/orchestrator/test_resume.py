"""Kill a run anywhere, resume it, and nothing is lost or trained twice; at staleness 0 the weights are the same bit for bit."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from configs.rules import ConfigError
from configs.schema import CheckpointConfig
from orchestrator.checkpoint import RunState, chosen, fault_of, folder_of
from orchestrator.feed import FeedState
from orchestrator.ports import LearnerLost, WriteFailed
from orchestrator.resume import BEGINNING, Start, find
from orchestrator.saver import Saver
from orchestrator.stop import Stop, Stopped
from tests.orchestrator.fakes import FakeLearner, FakeRewarder, FakeRollout
from tests.orchestrator.test_loop import ORIGIN, lines, make, run


class Crash(RuntimeError):
    """The power went."""


def crashing_learner(config, *, at: int, during: str) -> FakeLearner:
    class Learner(FakeLearner):
        async def step(self, groups):
            if during == "step" and self.steps + 1 == at:
                raise Crash
            return await super().step(groups)

        async def save(self, folder):
            await super().save(folder)
            if during == "save" and self.steps == at:
                raise Crash

        def publish(self, steps):
            if during == "sync" and steps == at:
                raise Crash
            return super().publish(steps)

    return Learner(config.algorithm)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("during", ["step", "save", "sync"])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_resumed_run_trains_the_same_prompts(tmp_path, staleness, during, at):
    options = ["train.num_steps=6", f"train.max_staleness={staleness}", "algorithm.correction=none",
               "checkpoint.every=2", "train.resume=auto", "checkpoint.keep_last=1"]  # fmt: skip
    whole_folder, folder = tmp_path / "whole", tmp_path / "crashed"
    whole_folder.mkdir(), folder.mkdir()
    config = make(whole_folder, *options)
    _, undisturbed = asyncio.run(run(config, whole_folder))
    config = make(folder, *options)
    learner = crashing_learner(config, at=at, during=during)
    if not (during == "save" and at % 2):
        with pytest.raises(Crash):
            asyncio.run(run(config, folder, learner=learner))
    parts, resumed = asyncio.run(run(config, folder))
    assert parts.feed.ledger.trained == 24 == parts.feed.ledger.drawn
    survived = json.loads(json.dumps(learner.trained))[: 24 - len(resumed.trained)]
    assert sorted(n for n, _ in [*survived, *resumed.trained]) == list(range(24))
    assert [row["step"] for row in lines(folder) if "reward/mean" in row] == [1, 2, 3, 4, 5, 6]
    trained = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert sorted(number for row in trained for number in row["draws"]) == list(range(24))
    if staleness == 0:
        assert (resumed.logits == undisturbed.logits).all()
    assert len(list((folder / "checkpoints").iterdir())) == 1


def test_filtered_prompts_are_not_drawn_again_after_a_resume(tmp_path):
    rewarder = FakeRewarder(invalid=lambda draw, index: draw == 1)
    options = ["checkpoint.every=1", "train.resume=auto"]
    asyncio.run(run(make(tmp_path, *options, "train.num_steps=2"), tmp_path, rewarder=rewarder))
    parts, learner = asyncio.run(run(make(tmp_path, *options, "train.num_steps=3"), tmp_path, rewarder=rewarder))
    assert [n for n, _ in learner.trained] == [9, 10, 11, 12]
    assert parts.feed.ledger.drawn == 13 and parts.feed.ledger.filtered == 1


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("during", ["rollout", "learner", "sync", "evaluation"])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_stopped_run_saves_where_it_stands_and_goes_on_from_there(tmp_path, staleness, during, at):
    """No checkpoint.every: a stop saves all the same. What was generated is abandoned, what was learned is kept."""
    options = ["train.num_steps=6", f"train.max_staleness={staleness}", "algorithm.correction=none", "eval.every=2",
               "train.resume=auto"]  # fmt: skip
    whole_folder, folder = tmp_path / "whole", tmp_path / "stopped"
    whole_folder.mkdir(), folder.mkdir()
    _, undisturbed = asyncio.run(run(make(whole_folder, *options), whole_folder))
    config, stop = make(folder, *options), Stop()

    class Rollout(FakeRollout):
        async def generate(self, draw, sampling):
            evaluating = sampling.num_samples == 1
            begun = at if evaluating else max(at - 1 - staleness, 0)
            if during == ("evaluation" if evaluating else "rollout") and learner.steps == begun:
                stop.ask()
                await asyncio.sleep(60)
            return await super().generate(draw, sampling)

    class Learner(FakeLearner):
        async def step(self, groups):
            if during == "learner" and self.steps == at - 1:
                stop.ask()
                await asyncio.sleep(0.01)
            return await super().step(groups)

        def publish(self, steps):
            if during == "sync" and steps == at:
                stop.ask()
            return super().publish(steps)

    rollout, learner = Rollout(), Learner(config.algorithm)
    if not (during == "evaluation" and at == 1):  # there is none
        with pytest.raises(Stopped, match=f"stopped after step {r'[0-5]' if during == 'rollout' else at}"):
            asyncio.run(run(config, folder, rollout=rollout, learner=learner, stop=stop))
    parts, resumed = asyncio.run(run(config, folder))
    assert sorted(n for n, _ in [*learner.trained, *resumed.trained]) == list(range(24))  # no step was done twice
    assert parts.feed.ledger.trained == 24 == parts.feed.ledger.drawn
    evaluated = [row["step"] for row in lines(folder) if "eval/sampled/reward_mean" in row]
    assert evaluated == [0, 2, 4, 6]
    if staleness == 0:
        assert (resumed.logits == undisturbed.logits).all()


class Scripted:
    """An evaluator that reports what the script says."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    async def run(self) -> dict[str, float]:
        found = {"reward_mean": self.values.pop(0), "reward_stderr": 0.0, "num_prompts": 1.0, "failed": 0.0}
        return {f"eval/greedy/{name}": value for name, value in found.items()}


def test_the_best_checkpoint_is_kept_and_remembered_over_a_resume(tmp_path):
    options = ["checkpoint.keep_best=eval/greedy/reward_mean", "eval.data=x", "eval.every=1", "checkpoint.keep_last=1",
               "checkpoint.every=3", "train.resume=auto"]  # fmt: skip
    asyncio.run(run(make(tmp_path, *options, "train.num_steps=3"), tmp_path, evaluator=Scripted(0.1, 0.3, 0.9, 0.5)))
    assert names(tmp_path) == ["step-000002", "step-000003"]
    asyncio.run(run(make(tmp_path, *options, "train.num_steps=5"), tmp_path, evaluator=Scripted(0.8, 0.9)))
    assert names(tmp_path) == ["step-000002", "step-000005"]  # 0.8 and 0.9 are no better than what was remembered
    assert chosen(tmp_path, None, best=True) == folder_of(tmp_path, 2)
    asyncio.run(run(make(tmp_path, *options, "train.num_steps=7"), tmp_path, evaluator=Scripted(0.95, float("nan"))))
    assert names(tmp_path) == ["step-000006", "step-000007"]
    with pytest.raises(ConfigError, match="checkpoint.keep_best must be a metric of an evaluation, got eval/other. There are eval/greedy"):
        wrong = make(tmp_path / "b", *options, "checkpoint.keep_best=eval/other")
        (tmp_path / "b").mkdir()
        asyncio.run(run(wrong, tmp_path / "b", evaluator=Scripted(0.1)))
    with pytest.raises(ConfigError, match="with eval.data and eval.every set"):
        make(tmp_path, "checkpoint.keep_best=eval/greedy/reward_mean", "eval.data=x")


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("during", ["step", "save", "sync"])
@pytest.mark.parametrize(("at", "every"), [(1, 2), (4, 2), (6, 2), (3, 0)])
def test_a_learner_that_dies_goes_on_from_the_newest_checkpoint(tmp_path, staleness, during, at, every):
    options = ["train.num_steps=6", f"train.max_staleness={staleness}", "algorithm.correction=none", f"checkpoint.every={every}"]
    whole_folder, folder = tmp_path / "whole", tmp_path / "died"
    whole_folder.mkdir(), folder.mkdir()
    _, undisturbed = asyncio.run(run(make(whole_folder, *options), whole_folder))
    deaths = []

    class Learner(FakeLearner):
        def die(self, place: str, steps: int) -> None:
            if (place, steps) == (during, at) and not deaths:
                deaths.append(self.steps)
                self.logits = torch.full_like(self.logits, torch.nan)
                raise LearnerLost("rank 0 died.")

        async def step(self, groups):
            self.die("step", self.steps + 1)
            return await super().step(groups)

        async def save(self, folder):
            self.die("save", self.steps)
            await super().save(folder)

        def publish(self, steps):
            self.die("sync", steps)
            return super().publish(steps)

    learner = Learner(make(folder).algorithm)
    parts, _ = asyncio.run(run(make(folder, *options), folder, learner=learner))
    assert len(deaths) == (0 if during == "save" and (every == 0 or at % every) else 1)
    assert parts.feed.ledger.trained == 24 == parts.feed.ledger.drawn
    trained = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert sorted(number for row in trained for number in row["draws"]) == list(range(24))
    if staleness == 0:
        assert (learner.logits == undisturbed.logits).all()


def test_a_learner_that_dies_too_often_ends_the_run(tmp_path):
    class Learner(FakeLearner):
        async def step(self, groups):
            raise LearnerLost("rank 0 died.")

        async def restart(self):
            restarts.append(1)

    restarts = []
    with pytest.raises(LearnerLost):
        asyncio.run(run(make(tmp_path, "train.max_restarts=2"), tmp_path, learner=Learner(make(tmp_path).algorithm)))
    assert len(restarts) == 2


def test_a_step_waits_for_a_checkpoint_only_before_it_learns(tmp_path):
    """Groups of step 2 are generated while the checkpoint of step 1 is written; the learner has it to itself until it is whole."""
    order = []

    class Rollout(FakeRollout):
        async def generate(self, draw, sampling):
            if sampling.num_samples > 1 and draw.number == 4:
                order.append("generate")
            return await super().generate(draw, sampling)

    class Learner(FakeLearner):
        async def save(self, folder):
            await asyncio.sleep(0.2)
            order.append("saved")
            await super().save(folder)

        async def step(self, groups):
            if self.steps == 1:
                order.append("step")
            return await super().step(groups)

    config = make(tmp_path, "train.num_steps=2", "checkpoint.every=1")
    asyncio.run(run(config, tmp_path, rollout=Rollout(), learner=Learner(config.algorithm)))
    assert order == ["generate", "saved", "step", "saved"]
    assert lines(tmp_path)[2]["time/checkpoint_s"] > 0.1


def test_a_failed_write_is_told_and_the_run_goes_on_unless_it_was_the_last(tmp_path):
    class Full(FakeLearner):
        async def save(self, folder):
            if self.steps in full:
                raise WriteFailed("rank 0: No space left on device")
            await super().save(folder)

    full = [2]
    config = make(tmp_path, "train.num_steps=3", "checkpoint.every=1")
    parts, learner = asyncio.run(run(config, tmp_path, learner=Full(config.algorithm)))
    assert names(tmp_path) == ["step-000001", "step-000003"] and learner.exported
    full = [3]
    (tmp_path / "b").mkdir()
    with pytest.raises(WriteFailed, match="newest whole one is .*step-000002"):
        asyncio.run(run(make(tmp_path / "b", "train.num_steps=3", "checkpoint.every=1"), tmp_path / "b", learner=Full(config.algorithm)))


FEED = FeedState(drawn=4, trained=4, filtered=0, failed=0, in_flight=[])
CONFIG = {"learner.lr": 0.1, "learner.lr_schedule": "constant", "eval.every": 3, "train.num_steps": 6}


def save(folder, *steps: int, learner=None, keep_last: int = 9, config=CONFIG, origin=ORIGIN) -> None:
    learner = learner or FakeLearner(make(folder).algorithm)
    settings = CheckpointConfig(every=1, keep_last=keep_last)
    saver = Saver(folder, beside={"config": config, "origin": origin}, settings=settings, begun=0, report=lambda sentence: None)

    async def write_all() -> None:
        for step in steps:
            await saver.begin(RunState(step=step, digest="d", evaluated=True, best=(0, -math.inf), feed=FEED), learner)
        await saver.finish()

    asyncio.run(write_all())


def go_on(folder, resume: str = "auto", *, allow=(), config=CONFIG, origin=ORIGIN) -> Start:
    return find(folder, resume, allow, config=config, origin=origin)


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "half-written": (lambda c: (c / "COMPLETE").unlink(), "it was not finished"),
    "no-state": (lambda c: (c / "state.json").unlink(), "state.json is missing"),
    "truncated": (lambda c: truncate(c / "learner" / "bandit.pt"), "learner/bandit.pt has"),
    "one-bit": (lambda c: flip_a_bit(c / "learner" / "bandit.pt"), "learner/bandit.pt is not as it was written"),
    "one-bit-of-the-state": (lambda c: flip_a_bit(c / "state.json"), "state.json is not as it was written"),
    "marker-cut": (lambda c: truncate(c / "COMPLETE"), "its COMPLETE cannot be read"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over_or_refused(tmp_path, damage, words):
    save(tmp_path, 1, 2, 3)
    bad = folder_of(tmp_path, 3)
    damage(bad)
    start = go_on(tmp_path)
    assert start.folder == folder_of(tmp_path, 2) and start.state.step == 2
    (note,) = start.notes
    assert note.startswith(f"passed over the checkpoint {bad}: ") and words in note
    with pytest.raises(ConfigError, match="folder of a whole checkpoint") as caught:
        go_on(tmp_path, str(bad))
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="must be whole") as caught:
        chosen(tmp_path, 3)
    assert words in str(caught.value) and chosen(tmp_path, None) == folder_of(tmp_path, 2)


def test_a_damaged_checkpoint_is_replaced_once_its_step_is_reached_again(tmp_path):
    save(tmp_path, 1, 2, 3)
    flip_a_bit(folder_of(tmp_path, 3) / "state.json")
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-000002", "step-000003"]  # the damaged one counts for nothing
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step-000003"] and not fault_of(folder_of(tmp_path, 3))


def test_what_a_kill_left_half_written_or_half_removed_is_removed_in_time(tmp_path):
    save(tmp_path, 1, 2)
    (folder_of(tmp_path, 1) / "COMPLETE").unlink()
    (tmp_path / "checkpoints" / ".writing-000003" / "learner").mkdir(parents=True)
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_old_checkpoints_are_removed(tmp_path):
    save(tmp_path, 1, 2, 3, keep_last=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_a_failed_write_leaves_the_last_good_one(tmp_path):
    class Full(FakeLearner):
        async def save(self, folder):
            await super().save(folder)
            raise OSError(28, "No space left on device")

    save(tmp_path, 1)
    with pytest.raises(WriteFailed, match="could not be written: .*No space left on device; the newest whole one is .*step-000001"):
        save(tmp_path, 2, learner=Full(make(tmp_path).algorithm))
    assert names(tmp_path) == ["step-000001"] and not fault_of(folder_of(tmp_path, 1))


@pytest.mark.parametrize(
    ("part", "words"),
    [("model", "the same model, got others in model.path"), ("tokenizer", "the same tokenizer"), ("prompts", "got others in data.train")],
)
def test_another_origin_is_refused_unless_allowed(tmp_path, part, words):
    save(tmp_path, 1)
    other = ORIGIN | {part: "another"}
    with pytest.raises(ConfigError, match=words):
        go_on(tmp_path, origin=other)
    assert go_on(tmp_path, origin=other, allow=["data.train" if part == "prompts" else "model.path"]).state.step == 1


def test_what_changes_the_mathematics_is_refused_and_the_rest_is_shown(tmp_path):
    save(tmp_path, 1)
    assert go_on(tmp_path).notes == []
    assert go_on(tmp_path, config=CONFIG | {"eval.every": 5}).notes == ["changed since the checkpoint: eval.every: 3 -> 5"]
    changed = CONFIG | {"learner.lr": 0.2, "eval.every": 5}
    with pytest.raises(ConfigError, match=r"got learner.lr: 0.1 -> 0.2 against .* train.resume_allow=\[KEY\]"):
        go_on(tmp_path, config=changed)
    assert len(go_on(tmp_path, config=changed, allow=["learner.lr"]).notes) == 2
    longer = CONFIG | {"train.num_steps": 9}
    assert go_on(tmp_path, config=longer).state.step == 1
    with pytest.raises(ConfigError, match="train.num_steps: 6 -> 9"):  # it stretches the schedule
        go_on(tmp_path, config=longer | {"learner.lr_schedule": "linear"}, allow=["learner.lr_schedule"])


def test_checkpoints_of_two_runs_are_never_mixed_up(tmp_path):
    assert go_on(tmp_path, "never") == go_on(tmp_path) == Start(folder=None, state=BEGINNING, notes=[])
    save(tmp_path, 1, 2)
    with pytest.raises(ConfigError, match="run folder without checkpoints, got .*step-000002"):
        go_on(tmp_path, "never")
    with pytest.raises(ConfigError, match="newest whole checkpoint of train.output_dir, got .*step-000001 while step-000002 is there"):
        go_on(tmp_path, str(folder_of(tmp_path, 1)))
    branch = go_on(tmp_path / "branch", str(folder_of(tmp_path, 1)))
    assert branch.state.step == 1
    with pytest.raises(ConfigError, match="it is not there"):
        go_on(tmp_path, str(tmp_path / "nowhere"))

"""Kill a run anywhere, resume it, and nothing is lost or trained twice; at staleness 0 the weights are the same bit for bit."""

import asyncio
import json
import shutil

import pytest

from configs.rules import ConfigError
from orchestrator.checkpoint import Checkpoints
from orchestrator.feed import FeedState
from orchestrator.types import WeightVersion
from tests.orchestrator.fakes import FakeLearner, FakeRewarder
from tests.orchestrator.test_loop import lines, make, run


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


STATE = FeedState(drawn=4, trained=4, filtered=0, failed=0, in_flight=[])
VERSION = WeightVersion(steps=1, digest="d")


def checkpoints(folder, *, data: str = "rows", keep_last: int = 9, **config) -> Checkpoints:
    return Checkpoints(folder, config=config, data=data, every=1, keep_last=keep_last)


def saved(tmp_path, *steps: int, **config):
    learner = FakeLearner(make(tmp_path).algorithm)
    for step in steps:
        asyncio.run(checkpoints(tmp_path, **config).save(step, VERSION, learner, STATE))


def test_the_newest_complete_checkpoint_is_taken_and_half_written_ones_are_passed_over(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / "step-000003" / "COMPLETE").unlink()
    found = checkpoints(tmp_path)
    state = found.find("auto", [])
    assert state is not None and state.step == 2
    assert [p.name for p in found.incomplete()] == ["step-000003"]
    assert found.find("never", []) is None


def test_old_checkpoints_are_removed(tmp_path):
    learner = FakeLearner(make(tmp_path).algorithm)
    for step in (1, 2, 3):
        asyncio.run(checkpoints(tmp_path, keep_last=2).save(step, VERSION, learner, STATE))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def test_a_failed_write_leaves_the_last_good_one(tmp_path):
    class Full(FakeLearner):
        async def save(self, folder):
            raise OSError(28, "No space left on device")

    saved(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(checkpoints(tmp_path).save(2, VERSION, Full(make(tmp_path).algorithm), STATE))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path):
    saved(tmp_path, 1, **{"learner.lr": 0.1, "eval.every": 3})
    with pytest.raises(ConfigError, match="other ones in data.train"):
        checkpoints(tmp_path, data="others").find("auto", [])
    changed = checkpoints(tmp_path, **{"learner.lr": 0.2, "eval.every": 5})
    with pytest.raises(ConfigError, match=r"got learner.lr: 0.1 -> 0.2 against"):
        changed.find("auto", [])
    assert changed.find("auto", ["learner.lr"]) is not None
    with pytest.raises(ConfigError, match="folder of a complete checkpoint"):
        changed.find(str(tmp_path), [])
    shutil.rmtree(tmp_path / "checkpoints")
    assert changed.find("auto", []) is None

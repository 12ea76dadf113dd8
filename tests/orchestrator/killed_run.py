"""python -m tests.orchestrator.killed_run FOLDER STALENESS: the real loop over slow fakes in a process that can be killed."""

import asyncio
import random
import sys
from pathlib import Path

import torch

from tests.orchestrator.fakes import FakeLearner, FakeRollout
from tests.orchestrator.test_loop import make, run

STEPS = 12


class SlowLearner(FakeLearner):
    """Steps, publishes and saves long enough to be killed in the middle."""

    async def step(self, groups):
        await asyncio.sleep(0.01)
        return await super().step(groups)

    async def save(self, folder):
        folder.mkdir()
        for part in range(5):  # rank files, one after the other
            (folder / f"rank{part}.bin").write_bytes(bytes(1 << 16))
            await asyncio.sleep(0.005)
        torch.save((self.logits, self.steps), folder / "bandit.pt")


class SlowRollout(FakeRollout):
    """Loads weights long enough to be killed in the middle."""

    async def load(self, publication):
        await asyncio.sleep(0.01)
        return await super().load(publication)


def main(folder: Path, staleness: str) -> None:
    """Go on with the run until its end."""
    config = make(
        folder, f"train.num_steps={STEPS}", f"train.max_staleness={staleness}", "algorithm.correction=none", "checkpoint.every=2",
        "checkpoint.keep_last=1", "train.resume=auto",
    )  # fmt: skip
    rng = random.Random()
    learner = SlowLearner(config.algorithm)
    asyncio.run(run(config, folder, rollout=SlowRollout(lambda draw: rng.random() * 0.02), learner=learner))
    torch.save(learner.logits, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

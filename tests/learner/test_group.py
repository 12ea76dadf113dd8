"""The learner group over real Ray actors: the port, publications, and what a dead rank says."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from transformers import AutoModelForCausalLM

from configs.schema import Config
from learner.errors import LearnerError
from learner.group import LearnerGroup
from orchestrator.types import ScoredGroup
from tests.learner.tiny import config_of, llama, receipts, save_model

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config_for(folder: Path, ranks: int, stage: int) -> Config:
    path = save_model(folder / "model", llama())
    return config_of(path, folder, learner={"num_ranks": ranks, "zero_stage": stage, "num_cpus": 0.3, "lr": 0.1})


def stored(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """Put the groups into the object store, as rollout workers do."""
    from dataclasses import replace

    return [replace(g, group_ref=ray.put(g.group_ref), reference_refs=()) for g in groups]


async def digest_of(publication: object) -> tuple[int, str]:
    count = 0
    async for ref in publication.buckets():  # type: ignore[attr-defined]
        await ref
        count += 1
    return count, (await publication.published()).version.digest  # type: ignore[attr-defined]


def test_a_group_steps_publishes_and_exports(tmp_path: Path) -> None:
    """Two ZeRO-3 ranks: every call holds collectives on both."""
    config = config_for(tmp_path, 2, 3)

    async def use() -> None:
        group = LearnerGroup(config)
        try:
            ready = await group.start()
            assert [r.rank for r in ready] == [0, 1] and ready[0].pid != ready[1].pid
            first = group.publish(0)
            readers = await asyncio.gather(digest_of(first), digest_of(first))  # two engines at once
            assert readers[0] == readers[1] == await digest_of(first)  # and a replaced one later
            metrics = await group.step(stored(receipts()))
            assert metrics["optim/grad_norm"] > 0 and metrics["mismatch/logprob_abs_diff"] > 0
            assert (await digest_of(group.publish(1)))[1] != readers[0][1]
            await group.save(tmp_path / "checkpoint")
            await group.load(tmp_path / "checkpoint")
            await group.export(tmp_path / "policy")
        finally:
            group.close()

    asyncio.run(asyncio.wait_for(use(), 240))
    AutoModelForCausalLM.from_pretrained(str(tmp_path / "policy"))


def test_a_dead_rank_is_named_at_once(tmp_path: Path) -> None:
    """Rank 1 dies between two steps; rank 0 waits for it in a collective, the driver does not."""
    config = config_for(tmp_path, 2, 0)

    async def use() -> tuple[str, float]:
        group = LearnerGroup(config)
        try:
            ready = await group.start()
            await group.step(stored(receipts()))
            os.kill(ready[1].pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(LearnerError) as caught:
                await group.step(stored(receipts()))
            return str(caught.value), time.monotonic() - began
        finally:
            group.close()

    said, seconds = asyncio.run(asyncio.wait_for(use(), 240))
    assert said.startswith("Learner rank 1 (node") and "pid" in said and "got its death" in said
    assert seconds < 30


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = config_of(str(tmp_path / "missing"), tmp_path)

    async def use() -> None:
        group = LearnerGroup(config)
        try:
            await group.start()
        finally:
            group.close()

    with pytest.raises(LearnerError, match="Learner rank 0 must finish its start, got"):
        asyncio.run(asyncio.wait_for(use(), 240))

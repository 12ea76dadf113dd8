"""Who hangs or fails is named with node, process, cause and log, over the real roles and Ray actors."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import ray

from actors import process
from actors.pool import Pool
from actors.reference import ReferenceWorker
from actors.roles import ReferencePool, RolloutPool
from actors.worker import Role, WorkerError
from configs.load import load
from orchestrator.types import Draw, EngineReport, Group, Prompt, Published, Sample, WeightVersion
from tests.tiny import make_tiny_model, overrides, write_rows

PUBLISHED = Published(
    version=WeightVersion(steps=3, digest="d"), num_tensors=1, num_bytes=4, probe_token_ids=(0,), probe_logprobs=()
)


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"worker_process_setup_hook": process.enter},
    )  # fmt: skip
    yield
    ray.shutdown()


def pool_of(folder: Path, name: str, kind: type, *arguments: object, num_workers: int, reports: list[str]) -> Pool:
    role = Role(
        name=name, kind=kind, arguments=arguments, num_workers=num_workers, num_cpus=0.1, num_gpus=0, threads=1, max_calls=None,
        timeout_s=30, heartbeat_timeout_s=60, start_timeout_s=60, log_dir=folder,
    )  # fmt: skip
    return Pool(role, reports.append)


class Deaf:
    """An engine that never answers to a bucket: the named one, or every one."""

    def __init__(self, who: str, name: str) -> None:
        self.name, self.deaf = name, who in (name, "every")

    async def ready(self) -> str:
        return self.name

    async def begin_load(self) -> None:
        print("the last line of its log", flush=True)

    async def load_bucket(self, bucket: str) -> None:
        if self.deaf:
            await asyncio.sleep(600)

    async def finish_load(self, published: Published) -> EngineReport:
        return EngineReport(worker=self.name, version=published.version, num_tensors=1, probe_abs_diff=0.0, paused_s=0.0)


class OneBucket:
    async def buckets(self) -> AsyncIterator[str]:
        yield "bucket"

    async def published(self) -> Published:
        return PUBLISHED


async def sync(pool: Pool, timeout_s: float) -> list[EngineReport]:
    async with asyncio.timeout(120):
        rollout = RolloutPool(pool, dtype="float32", load_timeout_s=timeout_s)
        await rollout.start()
        return list(await rollout.load(OneBucket()))


def test_an_engine_that_never_answers_a_weight_sync_is_named_and_replaced(cluster, tmp_path):
    reports: list[str] = []
    pool = pool_of(tmp_path, "rollout", Deaf, "rollout-1", num_workers=2, reports=reports)

    async def scenario() -> list[EngineReport]:
        found = await sync(pool, 2.0)
        async with asyncio.timeout(60):
            while not pool.counters.replaced:
                await asyncio.sleep(0.05)
        return found

    try:
        assert [report.worker for report in asyncio.run(scenario())] == ["rollout-0"]
        assert sorted(worker.name for worker in pool.workers) == ["rollout-0", "rollout-2"]
    finally:
        pool.stop()
    (said,) = reports
    assert "rollout-1 (node " in said and ", pid " in said and "must answer load_bucket, got: no answer within 2 s" in said
    assert "the last line of its log" in said


@pytest.mark.soak
def test_a_sync_that_no_engine_ever_answers_ends_with_the_first_cause(cluster, tmp_path):
    pool = pool_of(tmp_path, "rollout", Deaf, "every", num_workers=1, reports=[])
    started = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"3 failures. Last: rollout-3 \(node .*, pid .*no answer within 1 s"):
            asyncio.run(sync(pool, 1.0))
    finally:
        pool.stop()
    assert time.monotonic() - started < 120


class Starved(ReferenceWorker):
    """A reference worker that may take a little more memory than it has."""

    def logprobs(self, group: Group):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), resource.RLIM_INFINITY))
        return super().logprobs(group)


def test_a_reference_worker_out_of_memory_is_named(cluster, tmp_path):
    model, rows = make_tiny_model(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl")
    config = load([*overrides(model, rows, tmp_path), "learner.max_tokens_per_micro_batch=1000000"])
    ones = np.ones(200, dtype=np.int32)
    sample = Sample(
        token_ids=ones, logprobs=ones.astype(np.float32), loss_mask=ones > 0, versions=ones, finish_reason="length", text="", error=""
    )
    draw = Draw(number=7, prompt=Prompt(id="rows.jsonl:8", token_ids=(2, 3), text="", columns={}))
    pool = pool_of(tmp_path / "logs", "reference", Starved, config, num_workers=1, reports=[])

    async def scenario() -> None:
        async with asyncio.timeout(120):
            reference = ReferencePool(pool)
            await reference.start()
            await reference.logprobs(draw, ray.put(Group(draw=draw, samples=(sample,) * 4096)))

    try:
        with pytest.raises(WorkerError) as caught:
            asyncio.run(scenario())
    finally:
        pool.stop()
    sentence = str(caught.value).splitlines()[0]
    assert "reference-0 (node " in sentence and ", pid " in sentence and "logprobs of draw 7 (rows.jsonl:8)" in sentence
    assert "memory" in sentence.lower()

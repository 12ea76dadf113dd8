"""The ports Rollout, Reference and Rewarder, each over a pool of supervised workers."""

import asyncio
from collections.abc import Sequence

from actors.pool import PoisonError, Pool
from actors.rewards.worker import weighted_sum
from actors.worker import Worker, WorkerError
from orchestrator.ports import Publication
from orchestrator.types import (
    Draw,
    EngineReport,
    GroupFacts,
    Published,
    Ref,
    Reward,
    Sampling,
)

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}  # nats; a random probe's greatest difference between engine and learner


def describe(draw: Draw) -> str:
    """Name a draw for people."""
    return f"draw {draw.number} ({draw.prompt.id})"


class RolloutPool:
    """Engines that sample from the policy."""

    def __init__(self, pool: Pool, *, dtype: str, load_timeout_s: float) -> None:
        self._pool = pool
        self._tolerance = PROBE_TOLERANCE[dtype]
        self._load_timeout_s = load_timeout_s
        self._publication: Publication | None = None  # stays referenced: a replacement loads it
        self._last_served: EngineReport  # of the newest replacement

    async def start(self) -> None:
        """Start the engines."""
        await self._pool.start(serve=self._serve)

    async def generate(self, draw: Draw, sampling: Sampling) -> tuple[Ref, GroupFacts]:
        """Sample one group on the least loaded engine."""
        (group_ref,), facts = await self._pool.call("generate", draw, sampling, about=describe(draw), num_returns=2)
        return group_ref, facts

    async def load(self, publication: Publication) -> Sequence[EngineReport]:
        """Load a weight version into every engine while the learner is still publishing it.

        An engine that dies meanwhile is replaced and loads the same version before it serves.

        Raises:
            WorkerError: no engine can be had any more, or one reports other weights than the learner's.
        """
        self._publication = publication
        results = await asyncio.gather(
            *(self._load_one(worker, publication) for worker in self._pool.workers), return_exceptions=True
        )
        published = await publication.published()
        reports = [result for result in results if isinstance(result, EngineReport)]
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, WorkerError):
                raise failure
        for report in reports:
            self._prove(report, published)
        if not reports:  # every engine died: go on with the first replacement, which loads and proves this version
            await self._pool.serving()
            reports = [self._last_served]
        return reports

    async def _load_one(self, worker: Worker, publication: Publication) -> EngineReport:
        await self._pool.on(worker, "begin_load", timeout_s=self._load_timeout_s)
        async for bucket in publication.buckets():
            await self._pool.on(worker, "load_bucket", bucket, timeout_s=self._load_timeout_s)
        published = await publication.published()
        return await self._pool.on(worker, "finish_load", published, timeout_s=self._load_timeout_s)

    async def _serve(self, worker: Worker) -> None:
        while self._publication is not None:  # again where a newer version was published meanwhile
            publication = self._publication
            report = await self._load_one(worker, publication)
            self._prove(report, await publication.published())
            self._last_served = report
            if publication is self._publication:
                return

    def _prove(self, report: EngineReport, published: Published) -> None:
        if report.version != published.version or not report.probe_abs_diff <= self._tolerance:
            raise WorkerError(
                f"{report.worker} must serve version {published.version.steps} (digest {published.version.digest}) and score the "
                f"probe as the learner does (within {self._tolerance:g}), got version {report.version.steps} "
                f"(digest {report.version.digest}), probe off by {report.probe_abs_diff:.3g}. "
                "The engine did not apply what it received; report this with the model's architecture."
            )


class ReferencePool:
    """The frozen model, several times."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def start(self) -> None:
        """Start the workers."""
        await self._pool.start()

    async def logprobs(self, draw: Draw, group_ref: Ref) -> Ref:
        """Score a group on the least loaded worker; the ref leads to its K arrays."""
        (arrays_ref,), _ = await self._pool.call("logprobs", group_ref, about=describe(draw), num_returns=2)
        return arrays_ref


class RewardPool:
    """Reward functions, or a reward model, in workers."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def start(self) -> None:
        """Start the workers."""
        await self._pool.start()

    async def score(self, draw: Draw, group_ref: Ref, num_samples: int) -> tuple[Reward, ...]:
        """Score a group; a function that takes its process down or never returns makes the group's rewards invalid."""
        try:
            _, rewards = await self._pool.call("score", group_ref, about=describe(draw))
            return rewards
        except PoisonError as error:
            return tuple(
                Reward(value=float("nan"), cause="timeout", parts={}, detail=str(error), answer="") for _ in range(num_samples)
            )


class RewardSum:
    """Reward functions and a reward model together, each with its weight."""

    def __init__(self, rewarders: Sequence[tuple[float, RewardPool]]) -> None:
        self._weights, self._rewarders = zip(*rewarders, strict=True)

    async def start(self) -> None:
        """Start the workers of all."""
        async with asyncio.TaskGroup() as starting:
            for rewarder in self._rewarders:
                starting.create_task(rewarder.start())

    async def score(self, draw: Draw, group_ref: Ref, num_samples: int) -> tuple[Reward, ...]:
        """Score a group by all at the same time."""
        columns = await asyncio.gather(*(rewarder.score(draw, group_ref, num_samples) for rewarder in self._rewarders))
        return tuple(weighted_sum(self._weights, row) for row in zip(*columns, strict=True))

"""The Learner port over one Ray actor per rank.

A dead or failing rank ends every call at once with a LearnerError that names it, while the other ranks still wait in a
collective for it. Ranks are not mended one by one: `restart` makes all of them anew, and the run goes on from a checkpoint.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from configs.schema import Config
from learner.errors import LESS_MEMORY, LearnerError, RankLost
from orchestrator.ports import GroupsLost, Wait, WriteFailed
from orchestrator.types import Published, Ref, ScoredGroup, StepMetrics, WeightBucket

if TYPE_CHECKING:  # it imports torch, transformers and deepspeed, which the driver does without
    from learner.worker import Ready

log = logging.getLogger(__name__)

# glibc keeps big buffers instead of mapping and faulting them anew every step
KEEP_BUFFERS = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
}
PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "DS_ACCELERATOR")
GRACE_S = 5.0  # after a rank failed, the others are given so long to say why: the first error is often a mere echo


class Rank:
    """Ray actor around one LearnerWorker that fetches from the object store; its heavy imports happen in its own process."""

    def __init__(self, config: Config, rank: int) -> None:
        from learner.worker import LearnerWorker

        timeout_s = config.learner.timeout_s
        self._worker = LearnerWorker(config, rank, lambda refs: fetch(refs, timeout_s))

    def listen(self) -> tuple[str, int]:
        """Open the port at which the ranks meet (rank 0)."""
        return self._worker.listen()

    def start(self, host: str, port: int) -> "Ready":
        """Meet the other ranks and load the model."""
        return self._worker.start(host, port)

    def step(self, receipts: Sequence[ScoredGroup]) -> StepMetrics | frozenset[int]:
        """Train on P groups; returns the draws of lost groups instead, the same on every rank, where some cannot be fetched."""
        try:
            return self._worker.step(receipts)
        except GroupsLost as error:
            return error.draws

    def publish(self, steps: int) -> Iterator[WeightBucket | Published]:
        """Yield the buckets, then the Published (rank 0)."""
        yield from self._worker.publish(steps)

    def assist(self) -> None:
        """Take part in the gathers of a publication (other ranks under ZeRO-3)."""
        self._worker.assist()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self._worker.export(folder)

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        self._worker.save(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self._worker.load(folder)


class Publication:
    """One weight version on its way out. Refs are kept: a replaced engine loads the last one again."""

    def __init__(self, stream: Any, num_buckets: int, assistants: Mapping[int, Ref], group: "LearnerGroup") -> None:
        loop = asyncio.get_running_loop()
        self._slots: list[asyncio.Future[Ref]] = [loop.create_future() for _ in range(num_buckets + 1)]
        self._pump = asyncio.ensure_future(self._drain(stream, assistants, group))

    async def buckets(self) -> AsyncIterator[Ref]:
        """Yield refs to WeightBucket as the learner makes them, in order."""
        for slot in self._slots[:-1]:
            yield await asyncio.shield(slot)

    async def published(self) -> Published:
        """Wait for the end of the publication; raises what broke it."""
        await asyncio.shield(self._pump)
        return await self._slots[-1].result()

    async def _drain(self, stream: Any, assistants: Mapping[int, Ref], group: "LearnerGroup") -> None:
        """Pass on refs as they come; the buckets behind them are not opened here."""
        last: Ref | None = None
        try:
            for slot in self._slots:
                try:
                    last = await group.within(0, "publish", anext(stream))
                except StopAsyncIteration:  # it ended early: what it yielded last holds the error
                    await group.within(0, "publish", last)
                    raise LearnerError("A publication must yield every bucket, got too few. This is a bug.") from None
                slot.set_result(last)
            await group.within(0, "publish", last)
            await group.gather("publish", assistants)
        except LearnerError as error:
            for slot in self._slots:
                if not slot.done():
                    slot.set_exception(error)
                    slot.exception()  # seen: nobody may be waiting for it
            raise


class LearnerGroup:
    """All ranks as one Learner."""

    def __init__(
        self,
        config: Config,
        *,
        runtime_env: Callable[[str], Mapping[str, Any]] = lambda name: {},
        strategies: Sequence[Any] = (),
    ) -> None:
        """Create the actors; `start` waits for them.

        Args:
            config: resolved.
            runtime_env: Ray runtime environment of the actor of a given name ("learner-0"); its variables win over ours.
            strategies: Ray scheduling strategy of each rank; empty: Ray's default.
        """
        self._config, self._runtime_env, self._strategies = config, runtime_env, strategies
        self._names = [f"learner-{rank}" for rank in range(config.learner.num_ranks)]
        self._waits: list[tuple[int, str, float, float]] = []  # rank, doing, monotonic start, deadline in seconds
        self._spawn()

    def _spawn(self) -> None:
        learner = self._config.learner
        self._ready: dict[int, Ready] = {}
        actor = ray.remote(Rank)
        self._actors = [
            actor.options(
                num_cpus=learner.num_cpus,
                num_gpus=learner.num_gpus,
                max_restarts=0,
                scheduling_strategy=self._strategies[rank] if self._strategies else None,
                runtime_env=_runtime_env(learner.threads, self._runtime_env(name)),
            ).remote(self._config, rank)
            for rank, name in enumerate(self._names)
        ]

    async def start(self) -> "list[Ready]":
        """Let the ranks meet and load the model.

        Raises:
            LearnerError: a rank could not start, or not within cluster.start_timeout_s.
        """
        timeout_s = self._config.cluster.start_timeout_s
        host, port = await self.within(0, "start", self._actors[0].listen.remote(), timeout_s)
        refs = {rank: actor.start.remote(host, port) for rank, actor in enumerate(self._actors)}
        self._ready = await self.gather("start", refs, timeout_s)
        return [self._ready[rank] for rank in sorted(self._ready)]

    async def step(self, groups: Sequence[ScoredGroup]) -> StepMetrics:
        """Train on P groups; returns metrics over all ranks.

        Raises:
            GroupsLost: some went with their node; nothing was learned.
        """
        receipts = ray.put(list(groups))  # once, however many ranks
        found = await self.gather("step", {r: a.step.remote(receipts) for r, a in enumerate(self._actors)})
        if isinstance(found[0], frozenset):
            raise GroupsLost(found[0])
        return found[0]

    def publish(self, steps: int) -> Publication:
        """Start publishing the present weights as version `steps`."""
        stream = self._actors[0].publish.options(num_returns="streaming").remote(steps)
        assistants = {}
        if self._config.learner.zero_stage == 3:
            assistants = {r: a.assist.remote() for r, a in enumerate(self._actors) if r > 0}
        return Publication(stream, self._ready[0].num_buckets, assistants, self)

    async def restart(self) -> None:
        """End what is left of the ranks, and start new ones from the model that training began with.

        Raises:
            LearnerError: they could not start.
        """
        self.close()
        self._spawn()
        await self.start()

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder that from_pretrained and vLLM load."""
        await self.gather("export", {r: a.export.remote(folder) for r, a in enumerate(self._actors)})

    async def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its part; making the folder atomic is the caller's.

        Raises:
            WriteFailed: the folder cannot be written.
        """
        await self.gather("save", {r: a.save.remote(folder) for r, a in enumerate(self._actors)})

    async def load(self, folder: Path) -> None:
        """Read a checkpoint, written by any number of ranks at any ZeRO stage."""
        await self.gather("load", {r: a.load.remote(folder) for r, a in enumerate(self._actors)})

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)  # pyright: ignore (an actor handle, whatever the stub calls it)

    def status(self) -> dict[str, Any]:
        """Say who learns."""
        return {"ranks": [{"rank": r.rank, "node": r.node, "pid": r.pid} for r in self._ready.values()]}

    def waits(self) -> list[Wait]:
        """Say which ranks are waited for."""
        now = time.monotonic()
        return [
            Wait(what=f"{self._who(rank)} to finish its {doing}", since_s=round(now - since, 1), deadline_s=timeout_s)
            for rank, doing, since, timeout_s in self._waits
        ]

    async def gather(self, doing: str, refs: Mapping[int, Ref], timeout_s: float | None = None) -> dict[int, Any]:
        """Wait for every rank, or for the first failure and the reason behind it."""
        tasks = {rank: asyncio.ensure_future(self.within(rank, doing, ref, timeout_s)) for rank, ref in refs.items()}
        if not tasks:
            return {}
        done, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            late, pending = await asyncio.wait(pending, timeout=GRACE_S)
            done |= late
        for task in pending:
            task.cancel()
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise max(errors, key=_telling)
        return {rank: task.result() for rank, task in tasks.items()}

    async def within(
        self, rank: int, doing: str, waited_for: Awaitable[Any] | None, timeout_s: float | None = None
    ) -> Any:
        """Wait for one rank, with a deadline and a diagnosis."""
        timeout_s = self._config.learner.timeout_s if timeout_s is None else timeout_s
        assert waited_for is not None
        wait = (rank, doing, time.monotonic(), timeout_s)
        self._waits.append(wait)
        try:
            return await asyncio.wait_for(_plain(waited_for), timeout_s)
        except TimeoutError:
            raise RankLost(
                f"{self._who(rank)} must finish its {doing} within {timeout_s:g} s, got no answer. "
                "Look at its log; raise learner.timeout_s or cluster.start_timeout_s if it only needs longer."
            ) from None
        except RayActorError as error:
            raise RankLost(
                f"{self._who(rank)} must live through its {doing}, got its death: {_last_words(error)} "
                f"If memory ran out: {LESS_MEMORY}"
            ) from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WriteFailed):
                raise cause from None
            said = str(cause) if isinstance(cause, LearnerError) else f"{type(cause).__name__}: {cause}"
            raise LearnerError(f"{self._who(rank)} must finish its {doing}, got {said}") from error
        except RayError as error:
            raise LearnerError(
                f"{self._who(rank)} must finish its {doing}, got {type(error).__name__}: {error}"
            ) from error
        finally:
            self._waits.remove(wait)

    def _who(self, rank: int) -> str:
        ready = self._ready.get(rank)
        place = f" (node {ready.node}, pid {ready.pid})" if ready else ""
        return f"Learner rank {rank}{place}"


def fetch(refs: Sequence[Ref], timeout_s: float) -> list[Any]:
    """Get objects from the store; None in the place of one that went with its node."""
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except ObjectLostError:
        if len(refs) == 1:
            return [None]
        return [found for ref in refs for found in fetch([ref], timeout_s)]


async def _plain(waited_for: Awaitable[Any]) -> Any:
    return await waited_for


def _telling(error: BaseException) -> int:
    """Rank errors by how much they explain: a death, then our own sentence, then whatever a collective saw of it."""
    cause = error.__cause__
    if isinstance(cause, RayActorError):
        return 2
    return 1 if isinstance(cause, RayTaskError) and isinstance(cause.cause, LearnerError) else 0


def _last_words(error: RayActorError) -> str:
    return " ".join(str(error).split())


def _runtime_env(threads: int, given: Mapping[str, Any]) -> dict[str, Any]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | KEEP_BUFFERS | passed_on
    return {**given, "env_vars": env | dict(given.get("env_vars", {}))}

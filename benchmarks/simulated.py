"""Simulated engines for benchmarks: many pool workers on a few async Ray actors, with given latencies and tokens but no model.

The pools, the feed and every call between them are the product's; only what a worker computes is replaced by waiting.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors import pool as supervision
from actors.pool import Pool
from actors.worker import HEARTBEAT, Role, Worker
from orchestrator.types import Draw, Group, GroupFacts, Reward, Sample, Sampling

ACTORS = 2


class SimulatedActor:
    """Several workers of every role in one process."""

    def __init__(self, latencies_s: Sequence[float], num_tokens: int, slots: int, score_s: float) -> None:
        """Take what it simulates.

        Args:
            latencies_s: seconds that the group of a draw takes, by draw number, over and over.
            num_tokens: response tokens of every sample.
            slots: groups that one engine works on at once; others wait.
            score_s: seconds of a reward or reference call.
        """
        self._latencies_s, self._num_tokens, self._slots, self._score_s = latencies_s, num_tokens, slots, score_s
        self._engines: dict[int, asyncio.Semaphore] = {}

    async def ready(self, place: int) -> None:
        """Open the engine's slots."""
        self._engines[place] = asyncio.Semaphore(self._slots)

    async def generate(self, place: int, draw: Draw, sampling: Sampling) -> tuple[Group, GroupFacts]:
        """Wait as long as the draw takes and return K samples."""
        async with self._engines[place]:
            latency_s = self._latencies_s[draw.number % len(self._latencies_s)]
            await asyncio.sleep(latency_s)
        num = self._num_tokens
        sample = Sample(
            token_ids=np.zeros(num, np.int32), logprobs=np.zeros(num, np.float32), loss_mask=np.ones(num, bool),
            versions=np.zeros(num, np.int32), finish_reason="stop", text="", error="",
        )  # fmt: skip
        facts = GroupFacts(
            draw=draw.number, num_prompt_tokens=len(draw.prompt.token_ids), num_tokens=(num,) * sampling.num_samples,
            truncated=(False,) * sampling.num_samples, started_version=0, newest_version=0, worker=f"simulated-{place}",
            generate_s=latency_s,
        )  # fmt: skip
        return Group(draw=draw, samples=(sample,) * sampling.num_samples), facts

    async def score(self, place: int, group: Group) -> tuple[Reward, ...]:
        """Wait and return rewards 0, 1, 0, 1, ..."""
        await asyncio.sleep(self._score_s)
        return tuple(Reward(value=float(i % 2), cause="ok", parts={}, detail="", answer="") for i, _ in enumerate(group.samples))

    async def logprobs(self, place: int, group: Group) -> tuple[tuple[np.ndarray, ...], int]:
        """Wait and return zeros."""
        await asyncio.sleep(self._score_s)
        return tuple(np.zeros(len(s.token_ids), np.float32) for s in group.samples), len(group.samples)


class Seat:
    """The handle of one simulated worker: calls go to its actor with the worker's place before the arguments."""

    def __init__(self, actor: Any, place: int) -> None:
        self._actor, self._place = actor, place

    def __getattr__(self, name: str) -> Any:
        """Find a method."""
        method = getattr(self._actor, name)
        return method if name == "__ray_call__" else _Method(method, self._place)


class _Method:
    def __init__(self, method: Any, place: int) -> None:
        self._method, self._place = method, place

    def options(self, **options: Any) -> "_Method":
        return _Method(self._method.options(**options), self._place)

    def remote(self, *args: Any) -> Any:
        return self._method.remote(self._place, *args)


def simulate(*, latencies_s: Sequence[float], num_tokens: int, slots: int, score_s: float) -> None:
    """Let every pool of this process have simulated workers from here on."""
    remote: Any = ray.remote(concurrency_groups={HEARTBEAT: 1})  # pyright: ignore (a group is not among options())
    actors = [
        remote(SimulatedActor).options(num_cpus=0, max_concurrency=4096).remote(latencies_s, num_tokens, slots, score_s)
        for _ in range(ACTORS)
    ]
    supervision.spawn = lambda role, number, place: Worker(
        name=f"{role.name}-{number}", handle=Seat(actors[place % ACTORS], place), place=place
    )


def simulated_pool(name: str, num_workers: int, max_calls: int | None) -> Pool:
    """Make a pool of simulated workers."""
    return Pool(
        Role(
            name=name, kind=SimulatedActor, arguments=(), num_workers=num_workers, num_cpus=0.0, num_gpus=0.0, threads=1,
            max_calls=max_calls, timeout_s=600.0, heartbeat_timeout_s=600.0, start_timeout_s=60.0, log_dir=Path("/nowhere"),
        )
    )  # fmt: skip

"""Faults on purpose, into workers that are at work: `debug.chaos=[kill_rollout@3,slow_reward@7]`."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.pool import Pool
from actors.worker import Worker, call_meanwhile

WAIT_S = 60.0  # for a worker to be at work
SLOW_S = 10.0


class Chaos:
    """Strikes the workers of a run at given steps."""

    def __init__(self, faults: Sequence[str], pools: Mapping[str, Pool], report: Callable[[str], None]) -> None:
        """Take the faults as `fault_role@step` (checked before), the pools by role, and where to tell people."""
        self._faults = [(fault, int(step)) for fault, step in (item.split("@") for item in faults)]
        self._pools, self._report = pools, report
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, step: int) -> None:
        """Let the faults of a step happen as soon as their role is at work."""
        for fault, due in self._faults:
            if due == step:
                task = asyncio.create_task(self._strike(fault))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _strike(self, fault: str) -> None:
        pool = self._pools["rollout" if fault == "drop_sync" else fault.split("_")[1]]
        if fault in ("drop_sync", "slow_reward"):
            worker = pool.workers[0]
        else:
            worker = await _at_work(pool)
        self._report(f"debug.chaos: {fault} strikes {worker}")
        match fault.split("_")[0]:
            case "kill":
                call_meanwhile(worker, _kill)
            case "hang":
                call_meanwhile(worker, _stop)
            case "slow":
                worker.handle.__ray_call__.remote(_sleep)  # in the group of its methods: those that follow wait
            case "drop":
                call_meanwhile(worker, _drop_bucket)


async def _at_work(pool: Pool) -> Worker:
    async with asyncio.timeout(WAIT_S):
        while True:
            for worker in pool.workers:
                if worker.calls:
                    return worker
            await asyncio.sleep(0.001)


def _kill(_actor: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_actor: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(_actor: Any) -> None:
    time.sleep(SLOW_S)


def _drop_bucket(actor: Any) -> None:
    """Let a rollout worker's engine miss the next bucket that it is given."""
    engine = actor._loop._engine
    load_bucket = engine.load_bucket

    def miss(bucket: Any) -> None:
        engine.load_bucket = load_bucket

    engine.load_bucket = miss

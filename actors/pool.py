"""Supervised Ray actors: calls go to the least loaded worker, each with a deadline; the dead are replaced, their work is redone.

A worker is dead when its process is gone, when its engine is (EngineError), or when a call outlasts its deadline. Its calls
are dispatched again elsewhere, at most `MAX_ATTEMPTS` times: work that kills workers again and again is given up by name.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OwnerDiedError,
    RayError,
    RayTaskError,
)

from actors.engine import EngineError
from actors.process import log_tail, runtime_env
from orchestrator.ports import GroupFailed

MAX_ATTEMPTS = 3  # dispatches of one call
MAX_START_FAILURES = 3  # consecutive workers of a role that do not come up
BACK_OFF_S = 0.5  # doubled per attempt

Serve = Callable[["Worker"], Awaitable[None]]


class WorkerError(RuntimeError):
    """A worker failed in a way that ends the run; the sentence names actor, node, process and cause."""


class PoisonError(GroupFailed):
    """One piece of work killed every worker it was given to."""


@dataclass(slots=True, eq=False)
class Worker:
    """One living actor and what it is doing."""

    name: str
    handle: Any
    node: str = "?"
    pid: int = 0
    load: int = 0
    dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What the workers of one pool are and what they hold."""

    name: str
    kind: type  # the actor's class
    arguments: tuple[Any, ...]  # of its constructor; the actor's name follows them
    num_workers: int
    num_cpus: float
    num_gpus: float
    threads: int
    timeout_s: float  # deadline of one call
    start_timeout_s: float
    log_dir: Path


@dataclass(slots=True)
class PoolCounters:
    """What supervision had to do."""

    replaced: int = 0
    retried: int = 0
    causes: list[str] = field(default_factory=list)


class Pool:
    """Workers of one role."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.counters = PoolCounters()
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self._changed = asyncio.Condition()
        self._serve: Serve | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._fatal: BaseException | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that serve now."""
        return [w for w in self._workers if not w.dead]

    async def start(self, serve: Serve | None = None) -> None:
        """Start every worker; return when all are ready.

        Args:
            serve: run on each replacement before it takes work (load the current weights).

        Raises:
            WorkerError: the first worker that did not come up, with its own error.
        """
        self._serve = serve
        spawned = [self._spawn() for _ in range(self.role.num_workers)]
        self._workers.extend(spawned)
        await asyncio.gather(*(self._wait_ready(worker) for worker in spawned))

    async def call(self, method: str, *args: Any, num_returns: int = 1) -> list[Any]:
        """Call a method on the least loaded worker; redo it elsewhere when that worker dies.

        Returns:
            `num_returns` object refs, owned by this process, of which the last one is known to be ready.

        Raises:
            PoisonError: the call killed `MAX_ATTEMPTS` workers.
            WorkerError: no worker can be had any more.
            Exception: what the method itself raised.
        """
        for attempt in range(MAX_ATTEMPTS):
            worker = await self._least_loaded()
            worker.load += 1
            refs = getattr(worker.handle, method).options(num_returns=num_returns).remote(*args)
            refs = refs if isinstance(refs, list) else [refs]
            try:
                await asyncio.wait_for(_settled(refs[-1]), self.role.timeout_s)
                return refs
            except (TimeoutError, RayError, EngineError) as error:
                if not is_death(error):
                    raise
                cause = self._explain(worker, method, error)
                self._bury(worker, cause)
                self.counters.retried += 1
            finally:
                worker.load -= 1
                await self._notify()
            await asyncio.sleep(BACK_OFF_S * 2**attempt)
        raise PoisonError(f"{self.role.name}.{method} must survive, got {MAX_ATTEMPTS} dead workers in a row. Last: {cause}")

    async def on(self, worker: Worker, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method on one given worker and return its value; a death is raised as WorkerError and the worker replaced."""
        try:
            return await asyncio.wait_for(
                _value(getattr(worker.handle, method).remote(*args)), timeout_s or self.role.timeout_s
            )
        except (TimeoutError, RayError, EngineError) as error:
            if not is_death(error):
                raise
            cause = self._explain(worker, method, error)
            self._bury(worker, cause)
            raise WorkerError(cause) from error

    async def serving(self) -> None:
        """Wait until a worker serves.

        Raises:
            WorkerError: none can be had any more.
        """
        await self._least_loaded()

    def stop(self) -> None:
        """Kill every worker and stop replacing."""
        for task in self._replacing:
            task.cancel()
        for worker in self._workers:
            worker.dead = True
            ray.kill(worker.handle)
        self._workers.clear()

    def _spawn(self) -> Worker:
        role, name = self.role, f"{self.role.name}-{next(self._numbers)}"
        actor = ray.remote(role.kind).options(
            num_cpus=role.num_cpus,
            num_gpus=role.num_gpus,
            max_restarts=0,
            runtime_env=runtime_env(name=name, log_dir=role.log_dir, threads=role.threads),
        )
        return Worker(name=name, handle=actor.remote(*role.arguments, name))

    async def _wait_ready(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self.role.start_timeout_s):
                context = await worker.handle.__ray_call__.remote(_where)
                worker.node, worker.pid = context
                await worker.handle.ready.remote()
        except (TimeoutError, RayError) as error:
            worker.dead = True
            ray.kill(worker.handle)
            raise WorkerError(self._explain(worker, "start", error)) from error

    async def _least_loaded(self) -> Worker:
        async with self._changed:
            while not self.workers:
                if self._fatal is not None:
                    raise self._fatal
                await self._changed.wait()
            return min(self.workers, key=lambda w: w.load)

    def _bury(self, worker: Worker, cause: str) -> None:
        if worker.dead:
            return
        worker.dead = True
        self.counters.causes.append(cause)
        ray.kill(worker.handle)
        self._workers.remove(worker)
        task = asyncio.create_task(self._replace())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        for attempt in range(MAX_START_FAILURES):
            worker = self._spawn()
            try:
                await self._wait_ready(worker)
                if self._serve is not None:
                    await self._serve(worker)
            except WorkerError as error:
                last = error
                await asyncio.sleep(BACK_OFF_S * 2**attempt)
                continue
            self._workers.append(worker)
            self.counters.replaced += 1
            await self._notify()
            return
        self._fatal = WorkerError(f"{self.role.name} workers must start, got {MAX_START_FAILURES} failures. Last: {last}")
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _explain(self, worker: Worker, method: str, error: BaseException) -> str:
        deadline = self.role.start_timeout_s if method == "start" else self.role.timeout_s
        if isinstance(error, TimeoutError):
            cause = f"no answer within {deadline:g} s"
            if worker.pid == 0:
                cause += f" (Ray has not placed it; it asks for {self.role.num_cpus:g} CPU, {self.role.num_gpus:g} GPU)"
        else:
            cause = last_line(error)
        tail = log_tail(worker.name, self.role.log_dir)
        where = f"{worker.name} (node {worker.node}, pid {worker.pid})"
        log = f"\nLast lines of {self.role.log_dir / (worker.name + '.log')}:\n{tail}" if tail else ""
        return f"{where} must answer {method}, got: {cause}.{log}"


def is_death(error: BaseException) -> bool:
    """Whether an error means that the worker is gone, rather than that the call was wrong."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineError)
    return isinstance(
        error, TimeoutError | ActorDiedError | ActorUnavailableError | OwnerDiedError | EngineError | RayError
    )


def last_line(error: BaseException) -> str:
    """Find the sentence that says what went wrong at the end of a worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [type(error).__name__])[-1].rstrip(".")


def _where(_actor: Any) -> tuple[str, int]:
    import os

    return ray.util.get_node_ip_address(), os.getpid()


async def _settled(ref: Any) -> None:
    await ref


async def _value(ref: Any) -> Any:
    return await ref



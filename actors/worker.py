"""One supervised Ray actor: what its pool knows of it, and how its faults are told apart and explained."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ray
from ray.exceptions import ObjectLostError, OwnerDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engine import EngineError
from actors.process import log_tail, runtime_env

HEARTBEAT = "heartbeat"  # Ray concurrency group: answers while a method runs
TAIL_TIMEOUT_S = 5.0  # to fetch the end of a log from another node


class WorkerError(RuntimeError):
    """A worker failed in a way that ends the run; the sentence names actor, node, process and cause."""


@runtime_checkable
class Watched(Protocol):
    """An actor that knows more of its health than that its process answers."""

    def stalled_s(self) -> float:
        """Return for how long what it works on has made no progress, in seconds."""
        ...


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
    max_calls: int | None  # that one worker is given at once; None: it bounds itself
    timeout_s: float  # deadline of one call, from its dispatch
    heartbeat_timeout_s: float
    start_timeout_s: float
    log_dir: Path
    strategies: tuple[Any, ...] = ()  # Ray scheduling strategy of each place; empty: Ray's default


@dataclass(slots=True, eq=False)
class Call:
    """One piece of work on its way through a pool."""

    method: str
    about: str  # what it works on, for people
    since: float  # monotonic seconds: when it was handed to its worker, or began to wait for one
    deaths: int = 0  # workers that died with it on board
    suspect: bool = False  # it runs alone from now on
    convicted: bool = False  # it took its workers down

    def __str__(self) -> str:
        return f"{self.method} of {self.about}" if self.about else self.method


@dataclass(slots=True, eq=False)
class Worker:
    """One living actor and what it is doing."""

    name: str
    handle: Any
    place: int = 0  # from 0 to num_workers - 1; a replacement takes that of the dead
    node: str = "?"  # address
    node_id: str = ""
    pid: int = 0
    calls: list[Call] = field(default_factory=list)
    reserved: Call | None = None  # a suspect that has it for itself
    dead: bool = False

    def __str__(self) -> str:
        return f"{self.name} (node {self.node}, pid {self.pid})"


def spawn(role: Role, number: int, place: int) -> Worker:
    """Ask Ray for one more actor of a role, at one of its places."""
    name = f"{role.name}-{number}"
    actor: Any = ray.remote(concurrency_groups={HEARTBEAT: 1})  # pyright: ignore (a group is not among options())
    actor = actor(role.kind).options(
        num_cpus=role.num_cpus,
        num_gpus=role.num_gpus,
        max_restarts=0,
        scheduling_strategy=role.strategies[place] if role.strategies else None,
        runtime_env=runtime_env(name=name, log_dir=role.log_dir, threads=role.threads),
    )
    return Worker(name=name, handle=actor.remote(*role.arguments, name), place=place)


def call_meanwhile(worker: Worker, function: Callable[[Any], Any]) -> Any:
    """Run `function(actor)` in a worker beside whatever it does; returns the ref of its value."""
    return worker.handle.__ray_call__.options(concurrency_group=HEARTBEAT).remote(function)


def where(_actor: Any) -> tuple[str, str, int]:
    """Say where an actor runs: the node's address and id, and the process."""
    import os

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid()


def pulse(actor: Any) -> float:
    """Ask an actor for how long it has made no progress, in seconds; 0 where it does not know."""
    return actor.stalled_s() if isinstance(actor, Watched) else 0.0


async def value(ref: Any) -> Any:
    """Await a ref as a coroutine, which `asyncio.wait_for` wants."""
    return await ref


def is_death(error: BaseException) -> bool:
    """Whether an error means that the worker is gone, rather than that the call was wrong."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineError)
    return True  # TimeoutError, EngineError, and Ray's own about actor and node


def is_lost(error: BaseException) -> bool:
    """Whether an error means that an argument of the call is gone with its node, which is nobody's fault."""
    found = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(found, ObjectLostError | OwnerDiedError)


def explain(role: Role, worker: Worker, what: str, error: BaseException, timeout_s: float) -> str:
    """Say which worker failed at what, and why."""
    if isinstance(error, TimeoutError):
        cause = f"no answer within {timeout_s:g} s"
        if worker.pid == 0:
            cause += f" (Ray has not placed it; it asks for {role.num_cpus:g} CPU, {role.num_gpus:g} GPU)"
    else:
        cause = last_line(error)
    return f"{worker} must answer {what}, got: {cause}."


def last_line(error: BaseException) -> str:
    """Find the sentence that says what went wrong at the end of a worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [type(error).__name__])[-1].rstrip(".")


async def with_log(role: Role, worker: Worker, sentence: str) -> str:
    """Add the last lines of a worker's log to a sentence, from whichever node they lie on."""
    tail = await asyncio.to_thread(log_tail, worker.name, role.log_dir)
    if not tail and worker.node_id and worker.node_id != ray.get_runtime_context().get_node_id():
        there = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
        ref = ray.remote(log_tail).options(num_cpus=0, scheduling_strategy=there).remote(worker.name, role.log_dir)
        try:
            tail = await asyncio.wait_for(value(ref), TAIL_TIMEOUT_S)
        except (TimeoutError, RayError):
            tail = ""  # the node is gone, and the log with it
    return f"{sentence}\nLast lines of {role.log_dir / (worker.name + '.log')}:\n{tail}" if tail else sentence

"""Supervised Ray actors: calls go to the least loaded worker, each with a deadline; the dead are replaced, their work is redone.

A worker is dead when its process is gone, when its engine is (EngineError), when a call outlasts its deadline, or when it
gives no heartbeat. Work that kills is given up by name, innocent work never: a call that was on board of two dead workers is
convicted if it is the only one of which that is true; otherwise it runs on a worker of its own, whose death convicts it.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.engine import EngineError
from actors.worker import (
    Call,
    Role,
    Worker,
    WorkerError,
    call_meanwhile,
    explain,
    is_death,
    is_lost,
    pulse,
    spawn,
    value,
    where,
    with_log,
)
from orchestrator.ports import DataLost, GroupFailed, Wait

MAX_DEATHS = 2  # workers that may die with one piece of work on board before it is a suspect
MAX_START_FAILURES = 3  # consecutive replacements that do not come up
BACK_OFF_S = 0.5  # doubled per attempt
HEARTBEATS = 4  # per heartbeat_timeout_s

Serve = Callable[[Worker], Awaitable[None]]


class PoisonError(GroupFailed):
    """One piece of work took down the workers that it was given to."""


@dataclass(slots=True)
class PoolCounters:
    """What supervision had to do."""

    replaced: int = 0
    retried: int = 0
    given_up: int = 0
    causes: deque[str] = field(default_factory=lambda: deque(maxlen=20))  # the newest


class Pool:
    """Workers of one role."""

    def __init__(self, role: Role, report: Callable[[str], None] = lambda sentence: None) -> None:
        """Take the role, and where to tell people what happened to its workers."""
        self.role = role
        self.counters = PoolCounters()
        self._report = report
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self._waiting: dict[Call, asyncio.Future[Worker]] = {}  # for a worker with room, oldest first
        self._suspects: dict[Call, asyncio.Future[Worker]] = {}  # for a worker of their own
        self._serve: Serve | None = None
        self._watching: asyncio.Task[None] | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._fruitless = 0  # deaths since a call succeeded
        self._fatal: WorkerError | None = None

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
        spawned = [spawn(self.role, next(self._numbers), place) for place in range(self.role.num_workers)]
        self._workers.extend(spawned)
        await asyncio.gather(*(self._wait_ready(worker) for worker in spawned))
        self._watching = asyncio.create_task(self._watch())

    async def call(self, method: str, *args: Any, about: str = "", num_returns: int = 1) -> tuple[list[Any], Any]:
        """Call a method on the least loaded worker; redo it elsewhere when that worker dies.

        Args:
            method: of the actor. Where it makes heavy objects, it should return a light one after them, for the last is opened here.
            args: its arguments, refs among them.
            about: what the call works on, for people.
            num_returns: objects that the method returns.

        Returns:
            Refs of all objects but the last, owned by this process, and the last one's value.

        Raises:
            PoisonError: the call took its workers down.
            DataLost: an argument is gone with the node that held it.
            WorkerError: no worker can be had any more, or the method raised: the worker, and its own error.
        """
        call = Call(method, about, time.monotonic())
        while True:
            worker = await self._acquire(call)
            try:
                refs = getattr(worker.handle, method).options(num_returns=num_returns).remote(*args)
                refs = refs if isinstance(refs, list) else [refs]
                async with asyncio.timeout(self.role.timeout_s):
                    last = await refs[-1]
                self._fruitless = 0
                return refs[:-1], last
            except (TimeoutError, RayError, EngineError) as error:
                if is_lost(error):
                    raise DataLost(f"{call} must find what it works on, got an object that was lost with its node") from error
                sentence = self._explain(worker, str(call), error)
                if not is_death(error):
                    raise WorkerError(await with_log(self.role, worker, sentence)) from error
                self._bury(worker, sentence, [call] if isinstance(error, TimeoutError) else worker.calls)
                if call.convicted:
                    self.counters.given_up += 1
                    raise PoisonError(f"{call} must leave its workers alive, got {call.deaths} dead. Last: {sentence}") from error
                self.counters.retried += 1
            finally:
                self._release(worker, call)
            await asyncio.sleep(BACK_OFF_S * 2 ** min(call.deaths, 4))

    async def on(self, worker: Worker, method: str, *args: Any, about: str = "", timeout_s: float | None = None) -> Any:
        """Call a method on one given worker and return its value; a death is raised as WorkerError and the worker replaced."""
        call = Call(method, about, time.monotonic())
        worker.calls.append(call)
        try:
            async with asyncio.timeout(timeout_s or self.role.timeout_s):
                return await getattr(worker.handle, method).remote(*args)
        except (TimeoutError, RayError, EngineError) as error:
            sentence = self._explain(worker, str(call), error, timeout_s)
            if is_death(error):
                self._bury(worker, sentence, () if isinstance(error, TimeoutError) else worker.calls)
            raise WorkerError(await with_log(self.role, worker, sentence)) from error
        finally:
            self._release(worker, call)

    async def serving(self) -> None:
        """Wait until a worker serves.

        Raises:
            WorkerError: none can be had any more.
        """
        call = Call("a sign that somebody serves", "", time.monotonic())
        self._release(await self._acquire(call), call)

    def status(self) -> dict[str, Any]:
        """Say who serves, and what supervision had to do."""
        counters = self.counters
        return {
            "workers": [
                {"name": w.name, "node": w.node, "pid": w.pid, "calls": [str(call) for call in w.calls]} for w in self.workers
            ],
            "replacing": len(self._replacing),
            "replaced": counters.replaced,
            "retried": counters.retried,
            "given_up": counters.given_up,
            "causes": list(counters.causes),
        }

    def waits(self) -> list[Wait]:
        """Say what is waited for: workers to finish their calls, and calls for a worker."""
        now, limit = time.monotonic(), self.role.timeout_s
        given = [(f"{worker} to finish {call}", call) for worker in self.workers for call in worker.calls]
        queued = [(f"a {self.role.name} worker with room for {call}", call) for call in (*self._suspects, *self._waiting)]
        return [Wait(what=what, since_s=round(now - call.since, 1), deadline_s=limit) for what, call in given + queued]

    def stop(self) -> None:
        """Kill every worker and stop replacing."""
        for task in (self._watching, *self._replacing):
            if task is not None:
                task.cancel()
        self._kill_all()

    async def _wait_ready(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self.role.start_timeout_s):
                worker.node, worker.node_id, worker.pid = await worker.handle.__ray_call__.remote(where)
                await worker.handle.ready.remote()
        except (TimeoutError, RayError) as error:
            worker.dead = True
            ray.kill(worker.handle)
            sentence = self._explain(worker, "start", error, self.role.start_timeout_s)
            raise WorkerError(await with_log(self.role, worker, sentence)) from error

    async def _acquire(self, call: Call) -> Worker:
        """Wait for a worker with room; a suspect waits until it has one for itself."""
        call.since = time.monotonic()
        if (worker := self._grant(call)) is not None:
            return worker
        if self._fatal is not None and not self.workers:
            raise self._fatal
        queue = self._suspects if call.suspect else self._waiting
        granted = queue[call] = asyncio.get_running_loop().create_future()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:  # granted in the same turn
                self._release(granted.result(), call)
            raise
        finally:
            queue.pop(call, None)
            for worker in self._workers:
                if worker.reserved is call and call not in worker.calls:  # cancelled
                    worker.reserved = None

    def _grant(self, call: Call) -> Worker | None:
        """Give a call the least loaded worker that has room for it."""
        limit = self.role.max_calls
        best: Worker | None = None
        for worker in self._workers:
            if worker.reserved is call:
                best = worker
                break
            if worker.dead or worker.reserved is not None or not (limit is None or call.suspect or len(worker.calls) < limit):
                continue
            if best is None or len(worker.calls) < len(best.calls):
                best = worker
        if best is None:
            return None
        if call.suspect:
            best.reserved = call
            if best.calls:  # it has this one for itself once they are done
                return None
        call.since = time.monotonic()
        best.calls.append(call)
        return best

    def _settle(self) -> None:
        """Serve who waits, oldest first, after something changed."""
        for call, granted in list(self._suspects.items()):
            if not granted.done() and (worker := self._grant(call)) is not None:
                granted.set_result(worker)
        while self._waiting:
            call, granted = next(iter(self._waiting.items()))
            if not granted.done():
                worker = self._grant(call)
                if worker is None:
                    return
                granted.set_result(worker)
            del self._waiting[call]

    def _release(self, worker: Worker, call: Call) -> None:
        worker.calls.remove(call)
        if worker.reserved is call:
            worker.reserved = None
        self._settle()

    def _bury(self, worker: Worker, sentence: str, on_board: Collection[Call]) -> None:
        """Kill a worker, judge what was on board, and replace it. Only the first to notice a death is heard."""
        if worker.dead:
            return
        worker.dead = True
        ray.kill(worker.handle)
        if worker not in self._workers:  # a replacement that never served: whoever started it tries again
            return
        self._workers.remove(worker)
        for call in on_board:
            call.deaths += 1
            call.suspect = call.deaths >= MAX_DEATHS
        suspects = [call for call in on_board if call.suspect]
        if len(suspects) == 1:
            suspects[0].convicted = True
        self.counters.causes.append(sentence)
        self._fruitless += 1
        if self._fruitless > 2 * self.role.num_workers + MAX_DEATHS:
            self._give_up(f"{self.role.name} workers must finish something, got {self._fruitless} deaths in a row. Last: {sentence}")
        else:
            task = asyncio.create_task(self._replace(worker, sentence))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, dead: Worker, sentence: str) -> None:
        self._report(f"{await with_log(self.role, dead, sentence)}\nIt is replaced and its work redone.")
        last = ""
        for attempt in range(MAX_START_FAILURES):
            worker = spawn(self.role, next(self._numbers), dead.place)
            try:
                await self._wait_ready(worker)
                if self._serve is not None:
                    await self._serve(worker)
            except RuntimeError as error:  # of the worker, or of the learner whose weights it loads
                last = str(error)
                worker.dead = True
                ray.kill(worker.handle)
                await asyncio.sleep(BACK_OFF_S * 2**attempt)
                continue
            self._workers.append(worker)
            self.counters.replaced += 1
            self._settle()
            return
        sentence = f"A {self.role.name} worker must be replaced, got {MAX_START_FAILURES} failures. Last: {last}"
        if self.workers:
            self._report(f"{sentence}\nThe run goes on with {len(self.workers)} of {self.role.num_workers}.")
        else:
            self._give_up(sentence)

    def _give_up(self, sentence: str) -> None:
        """Let everyone who needs a worker hear that there is none any more."""
        self._fatal = WorkerError(sentence)
        self._kill_all()
        for granted in (*self._suspects.values(), *self._waiting.values()):
            if not granted.done():
                granted.set_exception(self._fatal)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.dead = True
            ray.kill(worker.handle)
        self._workers.clear()

    async def _watch(self) -> None:
        """Ask every worker for a sign of life, for ever."""
        while True:
            await asyncio.sleep(self.role.heartbeat_timeout_s / HEARTBEATS)
            await asyncio.gather(*(self._listen(worker) for worker in self.workers))

    async def _listen(self, worker: Worker) -> None:
        limit = self.role.heartbeat_timeout_s
        try:
            stalled_s = await asyncio.wait_for(value(call_meanwhile(worker, pulse)), limit)
            if stalled_s > limit:
                raise EngineError(f"EngineError: no progress for {stalled_s:.0f} s in a process that lives")
        except (TimeoutError, RayError, EngineError) as error:
            self._bury(worker, self._explain(worker, "its heartbeat", error, limit), worker.calls)
            self._settle()

    def _explain(self, worker: Worker, what: str, error: BaseException, timeout_s: float | None = None) -> str:
        return explain(self.role, worker, what, error, timeout_s or self.role.timeout_s)

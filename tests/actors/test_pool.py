"""Supervision over real Ray actors: death is routine, a hang has a deadline, poison is given up by name."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from actors.engine import EngineError
from actors.pool import PoisonError, Pool
from actors.worker import Role, WorkerError


class Fragile:
    """A worker that dies as told."""

    def __init__(self, fault: str, name: str) -> None:
        if fault == "start":
            raise ValueError("the engine does not fit")
        self.name, self.served = name, False

    def ready(self) -> str:
        return self.name

    def serve(self) -> None:
        self.served = True

    def work(self, marker: str) -> tuple[str, bool]:
        """Die, hang or raise the first time that `marker` says so; a marker ending in `always` does so every time."""
        path = Path(marker)
        if not path.exists() or marker.endswith("always"):
            path.write_text(self.name)
            if "kill" in marker:
                os.kill(os.getpid(), signal.SIGKILL)
            if "hang" in marker:
                time.sleep(60)
            if "engine" in marker:
                raise EngineError("the engine is gone")
            if "raise" in marker:
                raise KeyError("a fault of the call")
        return self.name, self.served


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def pool_of(
    folder: Path,
    *,
    kind: type = Fragile,
    fault: str = "",
    num_workers: int = 2,
    timeout_s: float = 3.0,
    max_calls: int | None = None,
    heartbeat_timeout_s: float = 60.0,
) -> Pool:
    return Pool(
        Role(
            name="fragile",
            kind=kind,
            arguments=(fault,),
            num_workers=num_workers,
            num_cpus=0.1,
            num_gpus=0,
            threads=1,
            max_calls=max_calls,
            timeout_s=timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            start_timeout_s=60,
            log_dir=folder,
        )
    )


async def serve(pool: Pool, worker) -> None:
    await pool.on(worker, "serve")


def work(pool: Pool, *markers: str):
    async def run():
        async with asyncio.timeout(90):
            await pool.start(serve=lambda worker: serve(pool, worker))
            results = await asyncio.gather(*(pool.call("work", marker) for marker in markers), return_exceptions=True)
            values = [result if isinstance(result, BaseException) else result[1] for result in results]
            while pool._replacing:
                await asyncio.sleep(0.05)
            return values

    try:
        return asyncio.run(run())
    finally:
        pool.stop()


@pytest.mark.parametrize("fault", ["kill", "hang", "engine"])
def test_a_dead_worker_is_replaced_and_its_work_redone(cluster, tmp_path, fault):
    pool = pool_of(tmp_path)
    values = work(pool, *(str(tmp_path / name) for name in (fault, "a", "b")))
    assert all(isinstance(value, tuple) for value in values)
    assert pool.counters.replaced >= 1 and pool.counters.retried >= 1
    assert any("fragile-" in cause and "pid" in cause for cause in pool.counters.causes)


def test_a_replacement_is_served_before_it_takes_work(cluster, tmp_path):
    pool = pool_of(tmp_path, num_workers=1)
    ((name, served),) = work(pool, str(tmp_path / "kill"))
    assert (name, served) == ("fragile-1", True)


def test_poison_is_given_up_by_name(cluster, tmp_path):
    pool = pool_of(tmp_path)
    (error,) = work(pool, str(tmp_path / "kill.always"))
    assert isinstance(error, PoisonError) and "got 2 dead" in str(error) and pool.counters.given_up == 1


def test_a_fault_of_the_call_is_raised_and_kills_nobody(cluster, tmp_path):
    pool = pool_of(tmp_path)
    (error,) = work(pool, str(tmp_path / "raise"))
    assert isinstance(error, WorkerError) and not pool.counters.causes
    assert "fragile-0 (node" in str(error) and "KeyError: 'a fault of the call'" in str(error)


def test_a_worker_that_cannot_start_shows_its_own_error(cluster, tmp_path):
    with pytest.raises(WorkerError, match="the engine does not fit"):
        work(pool_of(tmp_path, fault="start"))


def test_more_than_the_cluster_holds_is_said_within_the_deadline(cluster, tmp_path):
    pool = pool_of(tmp_path)
    role = pool.role
    big = Role(**{f: getattr(role, f) for f in role.__slots__} | {"num_cpus": 16.0, "start_timeout_s": 2.0})
    with pytest.raises(WorkerError, match=r"Ray has not placed it; it asks for 16 CPU"):
        work(Pool(big))


class Shared:
    """An async worker with many calls on board; a poisonous one takes them all down."""

    def __init__(self, fault: str, name: str) -> None:
        self.name = name

    async def ready(self) -> str:
        return self.name

    async def work(self, poison: bool) -> str:
        await asyncio.sleep(0.5)
        if poison:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.2)
        return self.name


@pytest.mark.parametrize("num_workers", [1, 2])
def test_innocent_work_on_board_of_a_poisoned_worker_is_never_given_up(cluster, tmp_path, num_workers):
    pool = pool_of(tmp_path, kind=Shared, num_workers=num_workers, timeout_s=30)

    async def run():
        async with asyncio.timeout(120):
            await pool.start()
            return await asyncio.gather(*(pool.call("work", n == 2, about=f"item {n}") for n in range(6)), return_exceptions=True)

    try:
        results = asyncio.run(run())
    finally:
        pool.stop()
    assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [2]
    assert isinstance(results[2], PoisonError) and "work of item 2" in str(results[2])
    assert pool.counters.given_up == 1 and len(pool.counters.causes) <= 3


@pytest.mark.parametrize("kind", [Fragile, Shared])
def test_a_worker_that_stops_without_dying_is_found_by_its_heartbeat(cluster, tmp_path, kind):
    pool = pool_of(tmp_path, kind=kind, num_workers=1, timeout_s=600, heartbeat_timeout_s=2)

    async def run() -> int:
        async with asyncio.timeout(60):
            await pool.start()
            pid = pool.workers[0].pid
            os.kill(pid, signal.SIGSTOP)
            argument = False if kind is Shared else str(tmp_path / "a")
            await pool.call("work", argument)
            return pid

    try:
        pid = asyncio.run(run())
        assert "its heartbeat, got: no answer within 2 s" in pool.counters.causes[0] and str(pid) in pool.counters.causes[0]
        deadline = time.monotonic() + 15
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "the stopped process was left behind"
            time.sleep(0.2)
    finally:
        pool.stop()


def test_a_living_process_without_progress_is_replaced(cluster, tmp_path):
    class Stuck(Shared):
        def stalled_s(self) -> float:
            return 100.0 if self.name == "fragile-0" else 0.0

    pool = pool_of(tmp_path, kind=Stuck, num_workers=1, timeout_s=600, heartbeat_timeout_s=1)

    async def run() -> None:
        async with asyncio.timeout(60):
            await pool.start()
            while not pool.counters.replaced:
                await asyncio.sleep(0.1)

    try:
        asyncio.run(run())
    finally:
        pool.stop()
    assert "no progress for 100 s in a process that lives" in pool.counters.causes[0]


def test_calls_wait_for_room_and_their_deadline_starts_when_they_are_handed_out(cluster, tmp_path):
    class Slow(Fragile):
        def work(self, marker: str) -> tuple[str, bool]:
            time.sleep(0.8)
            return self.name, False

    pool = pool_of(tmp_path, kind=Slow, num_workers=1, timeout_s=2.0, max_calls=1)
    waits: list[str] = []

    async def run() -> None:
        async with asyncio.timeout(60):
            await pool.start()
            calls = [asyncio.create_task(pool.call("work", "x", about=f"item {n}")) for n in range(4)]  # 3.2 s in all
            await asyncio.sleep(0.3)
            waits.extend(wait.what for wait in pool.waits())
            await asyncio.gather(*calls)

    try:
        asyncio.run(run())
    finally:
        pool.stop()
    assert not pool.counters.causes
    assert waits[0].startswith("fragile-0 (node") and waits[0].endswith("to finish work of item 0")
    assert waits[1:] == [f"a fragile worker with room for work of item {n}" for n in (1, 2, 3)]


def test_a_pool_that_finishes_nothing_ends_with_the_cause(cluster, tmp_path):
    pool = pool_of(tmp_path, num_workers=1)
    markers = [str(tmp_path / f"kill{n}.always") for n in range(6)]

    async def run() -> list[BaseException]:
        async with asyncio.timeout(90):
            await pool.start()
            return await asyncio.gather(*(pool.call("work", m) for m in markers), return_exceptions=True)

    try:
        results = asyncio.run(run())
    finally:
        pool.stop()
    ends = [str(result) for result in results if isinstance(result, WorkerError)]
    assert ends and "must finish something, got 5 deaths in a row" in ends[0], results

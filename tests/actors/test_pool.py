"""Supervision over real Ray actors: death is routine, a hang has a deadline, poison is given up by name."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from actors.engine import EngineError
from actors.pool import PoisonError, Pool, Role, WorkerError


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


def pool_of(folder: Path, *, fault: str = "", num_workers: int = 2, timeout_s: float = 3.0) -> Pool:
    return Pool(
        Role(
            name="fragile",
            kind=Fragile,
            arguments=(fault,),
            num_workers=num_workers,
            num_cpus=0.1,
            num_gpus=0,
            threads=1,
            timeout_s=timeout_s,
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
            refs = await asyncio.gather(*(pool.call("work", marker) for marker in markers), return_exceptions=True)
            values = [ref if isinstance(ref, BaseException) else await ref[0] for ref in refs]
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
    (error,) = work(pool_of(tmp_path), str(tmp_path / "kill.always"))
    assert isinstance(error, PoisonError) and "3 dead workers in a row" in str(error)


def test_a_fault_of_the_call_is_raised_and_kills_nobody(cluster, tmp_path):
    pool = pool_of(tmp_path)
    (error,) = work(pool, str(tmp_path / "raise"))
    assert isinstance(error, KeyError) and pool.counters.replaced == 0


def test_a_worker_that_cannot_start_shows_its_own_error(cluster, tmp_path):
    with pytest.raises(WorkerError, match="the engine does not fit"):
        work(pool_of(tmp_path, fault="start"))


def test_more_than_the_cluster_holds_is_said_within_the_deadline(cluster, tmp_path):
    pool = pool_of(tmp_path)
    role = pool.role
    big = Role(**{f: getattr(role, f) for f in role.__slots__} | {"num_cpus": 16.0, "start_timeout_s": 2.0})
    with pytest.raises(WorkerError, match=r"Ray has not placed it; it asks for 16 CPU"):
        work(Pool(big))

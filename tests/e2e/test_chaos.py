"""Workers are killed, stopped and delayed under the real stack: nothing is lost, nothing changes, nothing is left behind."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.cli import metrics, processes_with, shared_memory_without_owner, start, train, wait_for, writers_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

STEPS = 8
OPTIONS = [f"train.num_steps={STEPS}", "algorithm.beta=0.05", "cluster.heartbeat_timeout_s=8", "rollout.num_workers=2"]


def trained(run: Path) -> list[int]:
    """Read the draws that a run trained, in order."""
    return [number for line in (run / "trained.jsonl").read_text().splitlines() for number in json.loads(line)["draws"]]


def assert_whole(run: Path, output: str, *, deaths: int) -> None:
    """Every step was done on the prompts of an undisturbed run, the ledger balances, and nothing is left of the run."""
    last, status = metrics(run)[-1], json.loads((run / "status.json").read_text())
    assert (last["step"], sorted(trained(run))) == (STEPS, list(range(4 * STEPS))), output
    assert [last[f"ledger/{name}"] for name in ("drawn", "trained", "filtered", "failed")] == [4 * STEPS, 4 * STEPS, 0, 0], output
    pools = [status[role] for role in ("rollout", "reward", "reference")]
    assert (sum(len(pool["causes"]) for pool in pools), sum(pool["given_up"] for pool in pools)) == (deaths, 0), output
    if last["staleness/max"] == 0:
        assert max(s["mismatch/logprob_abs_diff"] for s in metrics(run)) < 1e-4  # replacements serve the current weights
    wait_for(lambda: not processes_with(str(run)), 15, "the end of every worker process")


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """One rollout worker, left alone."""
    run = tmp_path_factory.mktemp("undisturbed")
    code, output = train(*tiny(run), *OPTIONS, "rollout.num_workers=1")
    assert code == 0, output
    assert_whole(run, output, deaths=0)
    return run


def assert_same_weights(run: Path, other: Path) -> None:
    """Compare two final policies bit for bit."""
    found, expected = (load_file(folder / "policy" / "model.safetensors") for folder in (run, other))
    assert found.keys() == expected.keys()
    assert [name for name in found if not (found[name] == expected[name]).all()] == []


@pytest.mark.soak
def test_two_workers_one_of_them_delayed_at_random_give_the_same_weights(tiny, tmp_path, undisturbed):
    process = start("train", *tiny(tmp_path), *OPTIONS, "cluster.heartbeat_timeout_s=120")
    done = threading.Event()

    def delay() -> None:
        rng = random.Random(0)
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), 200, "the start")
        (pid,) = writers_of(tmp_path / "logs" / "rollout-1.log")
        with contextlib.suppress(ProcessLookupError):  # the run is over
            while not done.wait(rng.random() * 0.3):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.random() * 0.5)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=delay)
    thread.start()
    output, _ = process.communicate(timeout=300)
    done.set()
    thread.join(10)
    assert process.returncode == 0, output
    assert_whole(tmp_path, output, deaths=0)
    assert_same_weights(tmp_path, undisturbed)


def test_whatever_dies_or_hangs_is_replaced_and_the_weights_are_the_same(tiny, tmp_path, undisturbed):
    before = shared_memory_without_owner()
    faults = "debug.chaos=[kill_rollout@2,kill_reward@3,kill_reference@4,hang_rollout@5,drop_sync@7]"
    code, output = train(*tiny(tmp_path), *OPTIONS, faults)
    assert code == 0, output
    assert_whole(tmp_path, output, deaths=5)
    assert_same_weights(tmp_path, undisturbed)
    for worker, cause in [("rollout", "died"), ("reward", "died"), ("reference", "died"), ("rollout", "no answer within 8 s")]:
        said = [line for line in output.splitlines() if line.startswith(f"{worker}-") and cause in line.replace("dead", "died")]
        assert said and all(" (node " in line and ", pid " in line for line in said), output
    assert not shared_memory_without_owner() - before


def test_deaths_at_staleness_1_lose_nothing(tiny, tmp_path):
    faults = "debug.chaos=[kill_reference@2,kill_rollout@3,kill_reward@4,slow_reward@5]"
    code, output = train(
        *tiny(tmp_path), *OPTIONS, "train.max_staleness=1", "algorithm.correction=token_truncate", "rollout.num_workers=1", faults
    )
    assert code == 0, output
    assert_whole(tmp_path, output, deaths=3)
    assert max(s["staleness/max"] for s in metrics(tmp_path)) == 1

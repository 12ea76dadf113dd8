"""kill -9 at random times, again and again: along the surviving checkpoints every prompt is trained exactly once."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import is_complete, listed
from tests.orchestrator.killed_run import STEPS

ROOT = Path(__file__).parents[2]


def start(folder: Path, staleness: int) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.orchestrator.killed_run", str(folder), str(staleness)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def kill_until_it_ends(folder: Path, staleness: int, rng: random.Random) -> int:
    """Kill the run at random times after it began to work, until it gets through; returns how often it was killed."""
    for kills in range(60):
        before = (folder / "metrics.jsonl").stat().st_mtime_ns if (folder / "metrics.jsonl").exists() else 0
        process = start(folder, staleness)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:  # imports take far longer than the run
            if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_mtime_ns != before:
                break
            time.sleep(0.005)
        try:
            _, errors = process.communicate(timeout=rng.uniform(0.0, 0.35) if kills < 4 else 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        assert process.returncode == 0, errors
        return kills
    raise AssertionError("the run never ended")


def check(tmp_path: Path, staleness: int, seed: int, kills: int) -> None:
    found = kill_until_it_ends(tmp_path / "killed", staleness, random.Random(seed))
    assert found >= kills
    trained = [json.loads(line) for line in (tmp_path / "killed" / "trained.jsonl").read_text().splitlines()]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert sorted(number for row in trained for number in row["draws"]) == list(range(4 * STEPS))
    last = json.loads((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()[-2])  # before the last evaluation
    assert (last["ledger/drawn"], last["ledger/trained"], last["ledger/in_flight"]) == (4 * STEPS, 4 * STEPS, 0)
    assert [is_complete(folder) for folder in listed(tmp_path / "killed")] == [True]
    if staleness == 0:
        whole = start(tmp_path / "whole", staleness)
        whole.communicate(timeout=60)
        assert torch.equal(torch.load(tmp_path / "killed" / "end.pt"), torch.load(tmp_path / "whole" / "end.pt"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_killed_again_and_again_trains_every_prompt_once(tmp_path, staleness):
    check(tmp_path, staleness, seed=staleness, kills=1)


@pytest.mark.soak
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_twenty_seeds(tmp_path, staleness, seed):
    check(tmp_path, staleness, seed, kills=0)

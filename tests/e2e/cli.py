"""Start the real command line in a process of its own, with a deadline, and see what it leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def environment() -> dict[str, str]:
    """An environment in which no test touches another's cluster."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return env | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def start(*arguments: str) -> subprocess.Popen:
    """Start `python -m orchestrator ...` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(*overrides: str) -> tuple[int, str]:
    """Train to the end; returns exit code and output."""
    process = start("train", *overrides)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise AssertionError(f"no end within {TIMEOUT_S} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


def metrics(run: Path) -> list[dict]:
    """Read the steps of a run (lines of evaluations left out)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def processes_with(text: str) -> list[int]:
    """Find living processes whose command line or environment holds `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        try:
            state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            known = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except (OSError, IndexError):
            continue
        if state != "Z" and text.encode() in known:
            found.append(int(path.name))
    return found


def wait_for(condition, timeout_s: float = 60.0, what: str = "the condition"):
    """Poll until `condition()` is truthy and return its value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what} did not come true within {timeout_s:g} s")


def writers_of(log: Path) -> list[int]:
    """Find the worker processes whose standard output is this file."""
    return [pid for pid, descriptor, target in _open_files() if (descriptor, target) == (1, str(log))]


def shared_memory_without_owner() -> set[str]:
    """Find what lies in shared memory and no living process has open or mapped."""
    held = {target for _, _, target in _open_files()}
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            held |= {line.split()[-1] for line in path.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue
    return {str(path) for path in Path("/dev/shm").iterdir()} - held


def _open_files() -> list[tuple[int, int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.append((int(path.parts[2]), int(path.name), os.readlink(path)))
        except OSError:
            continue
    return found

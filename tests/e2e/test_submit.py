"""A running cluster: `cluster.address=auto`, and `ray job submit` whose status is that of the run."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, environment, metrics

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

RAY = str(Path(sys.executable).parent / "ray")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head of our own, in a process group of its own; ended by that group, never by a host-wide stop."""
    temp = tmp_path_factory.mktemp("ray", numbered=True)
    port, dashboard = free_port(), free_port()
    token = os.urandom(16).hex()
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    log = (temp / "head.log").open("w")
    process = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2",
         f"--temp-dir={tempfile.gettempdir()}/rl-{os.getpid()}", "--include-dashboard=true", "--disable-usage-stats"],
        env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", env, temp / "head.log"
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)


def wait_until_up(dashboard: str, env: dict[str, str], log: Path) -> None:
    for _ in range(60):
        done = subprocess.run(
            [RAY, "job", "list", "--address", dashboard], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            return
    raise AssertionError(f"the head did not come up:\n{log.read_text()}\n{done.stdout}{done.stderr}")


def submit(dashboard: str, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Submit a training job from the checkout and follow it to its end."""
    runtime = '{"excludes": ["runs", "tests/golden"], "env_vars": {"HF_HUB_OFFLINE": "1"}}'
    entry = [sys.executable, "-m", "orchestrator", "train", *arguments]
    command = [RAY, "job", "submit", "--address", dashboard, "--working-dir", str(ROOT), "--runtime-env-json", runtime, "--", *entry]
    for _ in range(20):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
        if "No available agent" not in done.stderr:  # the head's job agent starts after its dashboard
            break
        time.sleep(3)
    return done


def test_submit_reports_the_status_of_the_run(head, tiny, tmp_path):
    _, dashboard, env, log = head
    wait_until_up(dashboard, env, log)
    done = submit(dashboard, env, *tiny(tmp_path / "good"), "cluster.address=auto")
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert len(metrics(tmp_path / "good")) == 3
    done = submit(dashboard, env, *tiny(tmp_path / "bad"), "algorithm.beat=1")
    assert done.returncode != 0 and "Did you mean algorithm.beta" in done.stdout, done.stdout + done.stderr


def test_a_running_cluster_is_used_and_survives_the_run(head, tiny, tmp_path):
    address, dashboard, env, log = head
    wait_until_up(dashboard, env, log)
    run = [sys.executable, "-m", "orchestrator", "train", *tiny(tmp_path), f"cluster.address={address}", "rollout.backend=hf"]
    done = subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until_up(dashboard, env, log)

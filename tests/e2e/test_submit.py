"""A running cluster: `ray job submit`, `cluster.address=auto`, and a job status that is that of the run."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, environment, metrics

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

RAY = str(Path(sys.executable).parent / "ray")
READY_S = 240  # a head on a busy machine, until its job agent answers


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head of our own that takes jobs, in a process group of its own; ended by that group, never by a host-wide stop.

    Its agent takes any port: at Ray's default one it gives up for good where another Ray of this machine sits there, and the
    head then answers every submission with "No available agent".
    """
    log = tmp_path_factory.mktemp("ray", numbered=True) / "head.log"
    port, dashboard, client = free_port(), free_port(), free_port()
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(16).hex()}
    process = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2",
         f"--temp-dir={tempfile.gettempdir()}/rl-{os.getpid()}", "--include-dashboard=true", "--disable-usage-stats",
         "--dashboard-agent-listen-port=0", f"--ray-client-server-port={client}"],
        env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{dashboard}"
        wait_until_it_takes_jobs(url, env["RAY_AUTH_TOKEN"], log, process)
        yield url, env
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def wait_until_it_takes_jobs(url: str, token: str, log: Path, process: subprocess.Popen) -> None:
    """Submit a job that does nothing until the head takes it: the dashboard answers before the agent that runs jobs is there."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/jobs/", json.dumps({"entrypoint": "true"}).encode(), headers)
    deadline, cause = time.monotonic() + READY_S, ""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=60):
                return
        except urllib.error.HTTPError as error:
            cause = f"{error}: {error.read().decode()}"
        except OSError as error:
            cause = str(error)
        time.sleep(0.5)
    raise AssertionError(f"the head took no job within {READY_S} s ({cause}):\n{log.read_text()}")


def submit(url: str, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Submit a training job from the checkout and follow it to its end."""
    runtime = '{"excludes": ["runs", "tests/golden"], "env_vars": {"HF_HUB_OFFLINE": "1"}}'
    entry = [sys.executable, "-m", "orchestrator", "train", *arguments]
    command = [RAY, "job", "submit", "--address", url, "--working-dir", str(ROOT), "--runtime-env-json", runtime, "--", *entry]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_submit_reports_the_status_of_the_run_and_leaves_the_cluster(head, tiny, tmp_path):
    run = ["cluster.address=auto", "rollout.backend=hf", "train.num_steps=1"]
    done = submit(*head, *tiny(tmp_path / "good"), *run)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert len(metrics(tmp_path / "good")) == 1
    done = submit(*head, *tiny(tmp_path / "bad"), "algorithm.beat=1")
    assert done.returncode != 0 and "Did you mean algorithm.beta" in done.stdout, done.stdout + done.stderr

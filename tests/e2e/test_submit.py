"""A running cluster: `rlooper submit`, a stop in the middle, a resume; the exit code is that of the run."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from orchestrator.__main__ import run_command
from tests.e2e.cli import ROOT, environment, metrics, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head of our own with its dashboard, in a process group of its own; ended by that group, never by a host-wide stop.

    Its agent takes any port: at Ray's default one it gives up for good where another Ray of this machine sits there, and the
    head then answers every submission with "No available agent".
    """
    log = tmp_path_factory.mktemp("ray", numbered=True) / "head.log"
    temp = Path(tempfile.mkdtemp(prefix="rl-"))  # short: Ray's socket paths lie below it
    bins = str(Path(sys.executable).parent)
    env = environment() | {"RAY_AUTH_TOKEN": os.urandom(16).hex(), "PATH": f"{bins}:{os.environ['PATH']}"}
    dashboard = free_port()
    process = subprocess.Popen(
        [f"{bins}/ray", "start", "--head", "--block", f"--port={free_port()}", f"--dashboard-port={dashboard}", "--num-cpus=2",
         f"--temp-dir={temp}", "--include-dashboard=true", "--disable-usage-stats",
         "--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}"],
        env=env | {"RAY_AUTH_MODE": "token"}, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: answers(dashboard) or process.poll() is not None, 120, "the dashboard")
        assert process.poll() is None, log.read_text()
        yield env | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        shutil.rmtree(temp, ignore_errors=True)


def submit(env: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Call `rlooper submit` to its end; returns exit code and output."""
    command = [sys.executable, "-m", "orchestrator", "submit", *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def rendered_entrypoint(arguments: list[str], folder: Path, capsys) -> str:
    """Render the run for KubeRay and return what it would start."""
    (folder / "nodes.yaml").write_text("nodes: [{cpus: 2}]")
    assert run_command(["render", "kuberay", "--image", "x", *arguments, f"cluster.describe={folder / 'nodes.yaml'}"]) == 0
    return yaml.safe_load(capsys.readouterr().out)["spec"]["entrypoint"]


def test_the_exit_code_is_that_of_the_job(head, tmp_path):
    code = f"from orchestrator.submission import Cluster; from pathlib import Path; c = Cluster({head['RAY_API_SERVER_ADDRESS']!r}); " + (
        f"exit(c.follow(c.submit(['sh', '-c', 'echo so; exit 7'], Path({str(tmp_path)!r}), [], {{}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=head, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 7 and "so\n" in done.stdout, done.stdout + done.stderr


def test_submit_stop_and_resume(head, tiny, tmp_path, capsys):
    run = [*tiny(tmp_path), "rollout.backend=hf"]
    code, output = submit(head, *run, "train.num_steps=1000", "--detach", "--env", "HF_HUB_OFFLINE")
    assert code == 0, output
    (job,) = re.findall(r"^job (\S+)$", output, re.MULTILINE)
    wait_for(lambda: (tmp_path / "metrics.jsonl").is_file() and metrics(tmp_path), 200, "a step")
    code, output = submit(head, "--stop", job)
    assert code == 0 and f"job {job} is asked to stop" in output, output
    code, output = submit(head, "--follow", job)
    assert code == 3 and "stopped after step" in output, output

    (done,) = (int(path.parent.name.removeprefix("step-")) for path in tmp_path.glob("checkpoints/step-*/COMPLETE"))
    again = [*run, f"train.num_steps={done + 1}", "train.resume=auto"]
    code, output = submit(head, *again)
    assert code == 0 and f"resumed after step {done}" in output, output
    assert f": {rendered_entrypoint(again, tmp_path, capsys)}\n" in output, output
    steps = metrics(tmp_path)
    assert [row["step"] for row in steps] == list(range(1, done + 2))
    assert all(row["ledger/drawn"] == row["ledger/trained"] + row["ledger/in_flight"] for row in steps)
    assert (tmp_path / "policy" / "config.json").is_file()


def test_a_cluster_asks_for_its_token(head, tiny, tmp_path):
    env = {key: value for key, value in head.items() if key != "RAY_AUTH_TOKEN"} | {"HOME": str(tmp_path)}
    code, output = submit(env, *tiny(tmp_path))
    assert code == 2 and "must be given its token, got none" in output and "RAY_AUTH_TOKEN" in output, output
    assert "Traceback" not in output

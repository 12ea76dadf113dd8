"""deploy/slurm.sh with a fake srun, a fake ray and a fake python: order, readiness, exit code, signal, and nothing left running."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cli import wait_for

ROOT = Path(__file__).parents[2]
FAKES = {
    "scontrol": 'printf "node1\\nnode2\\nnode3\\n"',
    # runs the command once per task, as srun would on its nodes
    "srun": """
tasks=1
while [[ $1 == --* ]]; do [[ $1 != --ntasks=* ]] || tasks=${1#--ntasks=}; shift; done
pids=()
trap 'kill "${pids[@]}"; wait; exit 143' TERM
for _ in $(seq "$tasks"); do "$@" & pids+=($!); done
wait""",
    "ray": """
echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >>"$LOG"
[[ -z ${BROKEN:-} || $* == *--head* ]] || exit 1
touch "$STATE/node.$$"
trap 'rm -f "$STATE/node.$$"; exit 0' TERM
while :; do sleep 0.1; done""",
    "python": """
if [[ $1 == -c ]]; then find "$STATE" -name 'node.*' | wc -l; exit; fi
echo "run with $(find "$STATE" -name 'node.*' | wc -l) nodes at $RAY_ADDRESS: $*" >>"$LOG"
trap 'echo saved >>"$LOG"; exit 3' TERM
touch "$STATE/running"
for _ in $(seq "${RUN_TENTHS:-1}"); do sleep 0.1; done
exit "${CODE:-0}\"""",
}


@pytest.fixture
def job(tmp_path):
    """Start deploy/slurm.sh in a fake Slurm job of three nodes; returns the process."""
    bins, state = tmp_path / "bin", tmp_path / "state"
    bins.mkdir()
    state.mkdir()
    for name, body in FAKES.items():
        (bins / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bins / name).chmod(0o755)
    script = tmp_path / "slurm.sh"
    shutil.copy(ROOT / "deploy" / "slurm.sh", script)
    started = []

    def start(*arguments: str, **more: str) -> subprocess.Popen:
        env = {"PATH": f"{bins}:/usr/bin:/bin", "STATE": str(state), "LOG": str(tmp_path / "log"), "SLURM_JOB_ID": "41234",
               "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_ON_NODE": "2", **more}  # fmt: skip
        started.append(
            subprocess.Popen(["bash", str(script), *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def said(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def no_node_is_left(tmp_path: Path) -> bool:
    return not list((tmp_path / "state").glob("node.*"))


def test_it_starts_the_head_then_the_nodes_then_the_run_and_returns_its_code(job, tmp_path):
    process = job("my recipe.yaml", "train.num_steps=3", CODE="2")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    lines = said(tmp_path)
    assert [line.split()[3] for line in lines[:3]] == ["--head", "--address=node1:21234", "--address=node1:21234"]
    assert all(line.startswith("token 32 start ") for line in lines[:3])  # a token of 16 bytes, on every node the same variable
    assert lines[3] == (
        "run with 3 nodes at node1:21234: -m orchestrator train my recipe.yaml train.num_steps=3 cluster.address=auto"
    )
    assert no_node_is_left(tmp_path)


def test_a_signal_reaches_the_run_which_saves(job, tmp_path):
    process = job("recipe.yaml", RUN_TENTHS="600")
    wait_for(lambda: (tmp_path / "state" / "running").exists(), 60, "the run")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and said(tmp_path)[-1] == "saved", output
    assert no_node_is_left(tmp_path)


def test_a_node_that_does_not_join_ends_the_job_in_time(job, tmp_path):
    process = job("recipe.yaml", BROKEN="1", RLOOPER_NODES_WAIT_S="3")
    started = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "3 nodes must join within 3 s, got 1 of node1 node2 node3" in output
    assert time.monotonic() - started < 30 and no_node_is_left(tmp_path)
    assert "token" not in output


def test_it_says_how_it_is_started():
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", str(ROOT / "deploy/slurm.sh")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Start it with sbatch" in done.stderr


@pytest.mark.soak
@pytest.mark.stack
@pytest.mark.timeout(600)
def test_it_runs_on_a_real_ray(tiny_run, tmp_path):
    bins = tmp_path / "bin"
    bins.mkdir()
    for name, body in (("scontrol", "hostname -I | cut -d' ' -f1"), ("srun", FAKES["srun"])):
        (bins / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bins / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"PATH": f"{bins}:{Path(sys.executable).parent}:/usr/bin:/bin", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "x",
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_ON_NODE": "2"}  # fmt: skip
    command = ["bash", "deploy/slurm.sh", *tiny_run]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "policy" / "config.json").is_file()


@pytest.fixture
def tiny_run(tmp_path, tiny_model):
    """Overrides of a run of one step with a built-in reward."""
    from tests.tiny import overrides, write_rows

    run = overrides(tiny_model, write_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    return [*run, "train.num_steps=1", "rollout.backend=hf", "reward.function=exact_match"]

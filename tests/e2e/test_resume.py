"""kill -9 of the driver, resume: the same weights bit for bit, the same metrics, no orphan; and what the checkpoints are good for."""

import os
import signal

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from orchestrator.__main__ import run_command
from tests.e2e.cli import metrics, processes_with, start, train, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

OPTIONS = ["train.num_steps=6", "checkpoint.every=2", "train.resume=auto", "algorithm.beta=0.05", "algorithm.kl_target=0.5",
           "learner.zero_stage=2", "rollout.backend=hf"]  # fmt: skip


def untimed(folder) -> list[dict]:
    """Leave out times, and `mismatch/`: an engine's logprobs differ in their last bits with what else was in its batch."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mismatch/"))} for row in metrics(folder)]


def rows_of(arguments: list[str]) -> str:
    """Find the training rows among overrides."""
    return next(a.partition("=")[2] for a in arguments if a.startswith("data.train="))


def test_kill_9_and_resume_equals_an_undisturbed_run(tiny, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, output = train(*tiny(whole), *OPTIONS)
    assert code == 0, output
    evaluation = [f"eval.data={{sums: {rows_of(tiny(killed))}}}", "eval.every=1", "eval.num_samples=2"]  # it never changes training
    process = start("train", *tiny(killed), *OPTIONS, *evaluation)
    wait_for(lambda: list(killed.glob("checkpoints/step-*/COMPLETE")), 200, "the first checkpoint")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not processes_with(str(killed)), 30, "the end of every worker process")
    code, output = train(*tiny(killed), *OPTIONS, *evaluation)
    assert code == 0 and "resumed after step" in output, output
    assert "eval at step 6: sums/greedy" in output and "pass@2" in output, output
    assert untimed(killed) == untimed(whole)
    weights = [load_file(folder / "policy" / "model.safetensors") for folder in (whole, killed)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert run_command(["export", str(killed), "--output", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == weights[0].keys() and all((exported[name] == weights[0][name]).all() for name in exported)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("1+1=") == AutoTokenizer.from_pretrained(whole / "policy")("1+1=")

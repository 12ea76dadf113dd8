"""kill -9 of the driver, resume: the same weights bit for bit, the same metrics, no orphan; and what the checkpoints are good for."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from orchestrator.__main__ import run_command
from tests.e2e.cli import metrics, processes_with, start, train, wait_for, writers_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

OPTIONS = ["train.num_steps=6", "checkpoint.every=2", "train.resume=auto", "algorithm.beta=0.05", "algorithm.kl_target=0.5",
           "learner.zero_stage=2", "learner.num_ranks=2", "rollout.backend=hf"]  # fmt: skip


def untimed(folder) -> list[dict]:
    """Leave out times and counters of supervision, and `mismatch/`: an engine's logprobs differ in their last bits with its batch."""
    left_out = ("time/", "mismatch/", "workers/")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in metrics(folder)]


def rows_of(arguments: list[str]) -> str:
    """Find the training rows among overrides."""
    return next(a.partition("=")[2] for a in arguments if a.startswith("data.train="))


def last_evaluation(run: Path) -> dict:
    """Read the evaluation after the last step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["step"] == 6 and "eval/sums/sampled/pass@2" in line]
    return {key: value for key, value in found.items() if key.startswith("eval/")}


def evaluated_alone(run: Path, output: Path) -> dict:
    """Evaluate the policy of a run by the command; the samples have the same seeds as in the run."""
    process = start("eval", str(run), f"train.output_dir={output.parent / 'alone'}", "--output", str(output))
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "sums/greedy" in said and "95 % interval" in said, said
    wait_for(lambda: not processes_with(str(output.parent / "alone")), 30, "the end of every worker process")
    return json.loads(output.read_text())["metrics"]


def assert_same(run: Path, other: Path) -> None:
    """Compare metrics, prompts and weights of two runs bit for bit."""
    assert untimed(run) == untimed(other)
    assert (run / "trained.jsonl").read_text() == (other / "trained.jsonl").read_text()
    found, expected = (load_file(folder / "policy" / "model.safetensors") for folder in (run, other))
    assert found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in found)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Run without a disturbance."""
    run = tmp_path_factory.mktemp("whole")
    code, output = train(*tiny(run), *OPTIONS)
    assert code == 0, output
    return run


def checkpointed(run: Path):
    return wait_for(lambda: list(run.glob("checkpoints/step-*/COMPLETE")), 200, "the first checkpoint")


def test_kill_9_and_resume_equals_an_undisturbed_run(tiny, tmp_path, whole):
    run = tmp_path / "killed"
    evaluation = [f"eval.data={{sums: {rows_of(tiny(run))}}}", "eval.every=3", "eval.num_samples=2"]  # it never changes training
    process = start("train", *tiny(run), *OPTIONS, *evaluation)
    checkpointed(run)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not processes_with(str(run)), 30, "the end of every worker process")
    code, output = train(*tiny(run), *OPTIONS, *evaluation)
    assert code == 0 and "resumed after step" in output, output
    assert "eval at step 6: sums/greedy" in output and "pass@2" in output, output
    assert_same(run, whole)
    assert run_command(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    exported, policy = (load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", run / "policy"))
    assert exported.keys() == policy.keys() and all((exported[name] == policy[name]).all() for name in exported)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("1+1=") == AutoTokenizer.from_pretrained(whole / "policy")("1+1=")
    assert evaluated_alone(run, tmp_path / "eval.json") == last_evaluation(run)


def test_a_killed_learner_rank_is_survived_with_the_same_weights(tiny, tmp_path, whole):
    process = start("train", *tiny(tmp_path), *OPTIONS)
    (rank,) = wait_for(lambda: writers_of(tmp_path / "logs" / "learner-1.log"), 200, "the start of rank 1")
    checkpointed(tmp_path)
    os.kill(rank, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "Traceback" not in output, output
    assert "Learner rank 1 (node" in output and "It is started again (1 of 3 times)." in output and "resumed after step" in output, output
    assert_same(tmp_path, whole)
    wait_for(lambda: not processes_with(str(tmp_path)), 15, "the end of every worker process")


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["hf", "vllm"])
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_every_kind_of_learner_resumes_to_the_bit(tiny, tmp_path, ranks, stage, lora, backend):
    """Adaptive KL, two epochs of the data, two mini-batches of two passes; killed once at a checkpoint, resumed."""
    options = [*OPTIONS, "train.prompts_per_step=8", "learner.num_mini_batches=2", "learner.num_epochs=2", f"learner.num_ranks={ranks}",
               f"learner.zero_stage={stage}", f"learner.lora.rank={lora}", f"rollout.backend={backend}"]  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "killed"
    code, output = train(*tiny(whole), *options)
    assert code == 0, output
    process = start("train", *tiny(run), *options)
    checkpointed(run)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not processes_with(str(run)), 30, "the end of every worker process")
    code, output = train(*tiny(run), *options)
    assert code == 0 and "resumed after step" in output, output
    assert_same(run, whole)


@pytest.mark.soak
@pytest.mark.parametrize("at_s", [0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
def test_a_learner_killed_at_any_moment_under_vllm_changes_no_weight(tiny, tmp_path, at_s):
    """In generation, in a step, in the middle of a weight sync: whatever the moment falls on."""
    options = [*OPTIONS, "rollout.backend=vllm", "checkpoint.every=1", "train.num_steps=30"]
    code, output = train(*tiny(tmp_path / "whole"), *options)
    assert code == 0, output
    run = tmp_path / "killed"
    process = start("train", *tiny(run), *options)
    (rank,) = wait_for(lambda: writers_of(run / "logs" / "learner-0.log"), 200, "the start of rank 0")
    checkpointed(run)
    time.sleep(at_s)
    os.kill(rank, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "It is started again (1 of 3 times)." in output, output
    assert_same(run, tmp_path / "whole")

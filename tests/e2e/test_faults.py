"""Faults of the real stack: each ends in one sentence with its cause, or is survived; never a hang, never an orphan."""

import os
import signal
import time

import pytest
import ray

from orchestrator.__main__ import run_command
from orchestrator.checkpoint import fault_of, folder_of
from tests.e2e.cli import metrics, processes_with, start, train, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.beat=1", ["algorithm.beta"]),
        ("learner.lr=fast", ["learner.lr", "Float"]),
        ("rollout.num_generations=1", ["rollout.num_generations", "at least 2", "got 1"]),
        ("algorithm.whiten_over=token", ["algorithm.whiten_over", "no effect"]),
        ("model.path=./nowhere", ["model.path", "./nowhere", "config.json"]),
        ("data.train=nowhere.jsonl", ["data.train", "nowhere.jsonl"]),
        ("data.train={empty}", ["data.train", "at least one row"]),
        ("data.prompt_column=question", ["no column 'question'", "line 1"]),
        ("data.max_prompt_tokens=3", ["data.max_prompt_tokens (3)", "line 1: 4 tokens"]),
        ("reward.function={broken}:f", ["reward.function", "SyntaxError"]),
        ("rollout.max_model_len=4096", ["rollout.max_model_len", "context (256)", "4096"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny, tmp_path, capsys, override, words):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.py").write_text("def f(:")
    override = override.format(empty=tmp_path / "empty.jsonl", broken=tmp_path / "broken.py")
    assert run_command(["train", *tiny(tmp_path / "run"), override]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("rlooper: ") and all(word in sentence for word in words), sentence
    assert not ray.is_initialized() and not (tmp_path / "run").exists()  # nothing was started


def test_more_than_the_cluster_has_is_refused_with_what_is_there_and_who_asks(tiny, tmp_path):
    code, output = train(*tiny(tmp_path / "run"), "rollout.num_cpus=7", "learner.num_gpus=0")
    assert code == 2, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("rlooper:")]
    assert all(word in sentence for word in ["7.4 CPU asked", "rollout 1 x 7", "of 2 there"]), sentence
    assert "Traceback" not in output and not (tmp_path / "run" / "logs").exists()


@pytest.mark.soak
def test_a_reward_that_always_raises_ends_with_its_own_error(tiny, tmp_path):
    arguments = [a.replace(":signal", ":broken") for a in tiny(tmp_path)]
    code, output = train(*arguments, "rollout.backend=hf")
    assert code == 1 and "ValueError: the judge fell asleep" in output, output


def test_an_engine_that_cannot_start_ends_with_its_own_error(tiny, tmp_path):
    code, output = train(*tiny(tmp_path), "rollout.engine_args.quantization=nonsense")
    assert code == 1 and "rollout-0" in output and "nonsense" in output, output


@pytest.mark.parametrize(
    ("send", "backend"),
    [
        (lambda pid: os.killpg(pid, signal.SIGINT), "vllm"),
        pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), "hf", marks=pytest.mark.soak),  # test_submit.py stops a job by it
    ],
    ids=["ctrl-c", "sigterm"],  # a terminal signals the whole group
)
def test_a_signal_ends_a_run_in_order_saved_and_without_a_process_left(tiny, tmp_path, send, backend):
    process = start("train", *tiny(tmp_path), "train.num_steps=100000", f"rollout.backend={backend}")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and metrics(tmp_path), 200, "the first step")
    started = time.monotonic()
    send(process.pid)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - started < 15
    assert process.returncode == 3 and "Traceback" not in output, output
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    step = metrics(tmp_path)[-1]["step"]
    assert checkpoint == folder_of(tmp_path, step) and not fault_of(checkpoint)
    last = output.splitlines()[-1]
    assert f"stopped after step {step}; resume with: rlooper train " in last and last.endswith(" train.resume=auto"), output
    wait_for(lambda: not processes_with(str(tmp_path)), 10, "the end of every worker process")

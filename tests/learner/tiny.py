"""Tiny models, made-up groups, and learner ranks in processes of their own, for the learner's tests."""

import dataclasses
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from configs.schema import AlgorithmConfig, Config, LearnerConfig, ModelConfig, RolloutConfig, TrainConfig
from orchestrator.types import Draw, Group, GroupFacts, Prompt, Reward, Sample, ScoredGroup

VOCAB = 512
RANKS_TIMEOUT_S = 120.0
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def llama(**changes: Any) -> LlamaConfig:
    """Return a tiny Llama."""
    return LlamaConfig(**(SHAPE | {"tie_word_embeddings": False} | changes))


def families() -> dict[str, PretrainedConfig]:
    """Return one tiny configuration per supported family; windows are shorter than the groups of `receipts`."""
    no_head_dim = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return {
        "llama": llama(),
        "llama-tied": llama(tie_word_embeddings=True),
        "qwen2": Qwen2Config(**no_head_dim),
        "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "gemma3": Gemma3TextConfig(
            **(SHAPE | {"num_hidden_layers": 3}),
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }


def model_of(config: PretrainedConfig, sharpness: float = 2.0) -> PreTrainedModel:
    """Make a random model whose distributions are far from flat."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(sharpness)
    return model


def save_model(folder: Path, config: PretrainedConfig) -> str:
    """Write a random model as a Hugging Face folder."""
    model_of(config).save_pretrained(str(folder))
    return str(folder)


def config_of(
    path: str, output_dir: Path | str, *, algorithm: Any = None, learner: Any = None, dtype: Any = "float32"
) -> Config:
    """Return a resolved configuration of a tiny run: float32, SGD of rate 1, no clipping, no KL."""
    return Config(
        model=ModelConfig(path=path, dtype=dtype),
        algorithm=AlgorithmConfig(
            **(
                {"beta": 0.0, "kl_in_reward": True, "scale_rewards": "none", "kl_estimator": "k1", "correction": "none"}
                | (algorithm or {})
            )
        ),
        rollout=RolloutConfig(num_generations=4, max_new_tokens=16, temperature=0.8),
        learner=LearnerConfig(
            **({"optimizer": "sgd", "lr": 1.0, "grad_clip": 0.0, "timeout_s": 60.0} | (learner or {}))
        ),
        train=TrainConfig(num_steps=4, prompts_per_step=5, output_dir=str(output_dir)),
    )


def receipts(num_groups: int = 5, seed: int = 0, reference: bool = False) -> list[ScoredGroup]:
    """Make up scored groups of 4 samples whose refs are the objects themselves.

    Lengths differ widely; responses share prefixes; one token is masked out; group 1 has equal rewards (advantage 0), group 2
    an invalid one.
    """
    rng = np.random.default_rng(seed)
    made = []
    for n in range(num_groups):
        prompt = Prompt(id=str(n), token_ids=tuple(rng.integers(0, VOCAB, 3 + 4 * n).tolist()), text="", columns={})
        opening = rng.integers(0, VOCAB, 2)
        samples = tuple(_sample(rng, opening, k) for k in range(4))
        group = Group(draw=Draw(number=n, prompt=prompt), samples=samples)
        values = [1.0] * 4 if n == 1 else rng.integers(0, 3, 4).astype(float).tolist()
        causes = ["error" if (n, k) == (2, 3) else "ok" for k in range(4)]
        refs = tuple(np.float32(-6.0) + rng.normal(0, 0.3, len(s.token_ids)).astype(np.float32) for s in samples)
        made.append(
            ScoredGroup(
                draw=group.draw,
                facts=GroupFacts(
                    draw=n,
                    num_prompt_tokens=len(prompt.token_ids),
                    num_tokens=tuple(int(s.loss_mask.sum()) for s in samples),
                    truncated=tuple(s.finish_reason == "length" for s in samples),
                    started_version=0,
                    newest_version=0,
                    worker="made-up",
                    generate_s=0.0,
                ),
                group_ref=group,
                reference_refs=(refs,) if reference else (),
                rewards=tuple(
                    Reward(value=v if c == "ok" else float("nan"), cause=c, parts={}, detail="", answer="")  # pyright: ignore
                    for v, c in zip(values, causes, strict=True)
                ),
            )
        )
    return made


def _sample(rng: np.random.Generator, opening: np.ndarray, k: int) -> Sample:
    length = int(rng.integers(1, 4)) if k % 2 else int(rng.integers(6, 15))
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    tokens[: min(2, length)] = opening[: min(2, length)]  # a shared beginning
    mask = np.ones(length, dtype=bool)
    mask[3:4] = False  # as if a tool had written it
    return Sample(
        token_ids=tokens,
        logprobs=np.float32(-6.0) + rng.normal(0, 0.3, length).astype(np.float32),
        loss_mask=mask,
        versions=np.zeros(length, np.int32),
        finish_reason="length" if length > 12 else "stop",
        text="",
        error="",
    )


def run_ranks(job: Callable[..., Any], config: Config, *args: Any) -> list[Any]:
    """Run `job(worker, *args)` on started LearnerWorkers, one process per rank; returns what each returned, by rank."""
    if torch.cuda.is_available() and config.learner.num_ranks > torch.cuda.device_count():
        pytest.skip(f"NCCL wants a GPU per rank: {config.learner.num_ranks} asked, {torch.cuda.device_count()} there")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.learner.tiny", "learner.worker", "deepspeed.runtime.zero.muon.muon_optimizer"]
    )
    pipes = [context.Pipe() for _ in range(config.learner.num_ranks)]
    processes = [
        context.Process(target=_rank, args=(job, config, rank, pipe[1], args), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        address = _receive(pipes[0][0])
        for ours, _ in pipes[1:]:
            ours.send(address)
        return [pickle.loads(_receive(ours)) for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _receive(pipe: Any) -> Any:
    if not pipe.poll(RANKS_TIMEOUT_S):
        raise TimeoutError(f"A rank must answer within {RANKS_TIMEOUT_S:g} s, got nothing. It hangs.")
    kind, value = pipe.recv()
    if kind == "error":
        raise RuntimeError(f"a rank failed:\n{value}")
    return value


def _rank(job: Callable[..., Any], config: Config, rank: int, pipe: Any, args: Sequence[Any]) -> None:
    import traceback

    from learner.worker import LearnerWorker

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as Ray does
    try:
        worker = LearnerWorker(config, rank, list)
        if rank == 0:
            host, port = worker.listen()
            pipe.send(("address", (host, port)))
        else:
            host, port = pipe.recv()
        worker.start(host, port)
        pipe.send(("result", pickle.dumps(job(worker, *args))))  # plain pickle: tensors by value
    except BaseException:  # whatever it is, the test must see it
        pipe.send(("error", traceback.format_exc()))
        raise


def changed(config: Config, **learner: Any) -> Config:
    """Return the configuration with other learner keys."""
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **learner))

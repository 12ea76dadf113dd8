"""One optimizer step of the real engine equals plain autograd, however the work is cut."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import Config
from learner.worker import LearnerWorker
from orchestrator.types import ScoredGroup
from tests.learner.tiny import changed, config_of, llama, receipts, run_ranks, save_model

pytestmark = pytest.mark.stack
Tensors = dict[str, torch.Tensor]
SMALL_BUCKETS = {
    "reduce_bucket_size": 5000,
    "allgather_bucket_size": 5000,
}  # below the embedding's size, as with real models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("invariance")
    return config_of(save_model(folder / "model", llama(tie_word_embeddings=True)), folder)


@pytest.fixture(scope="module")
def plain(tiny: Config) -> tuple[Tensors, Tensors]:
    """Gradients and parameters after p - 1 * grad, from a slow loop over samples."""
    model = AutoModelForCausalLM.from_pretrained(tiny.model.path, dtype=torch.float32)
    rloo_loss(model, receipts(), tiny.rollout.temperature).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return grads, {name: (p - p.grad).detach() for name, p in model.named_parameters()}


def rloo_loss(model: Any, groups: list[ScoredGroup], temperature: float) -> torch.Tensor:
    """-sum_i A_i sum_t logprob_it / M with the RLOO advantage, M chosen tokens of valid samples."""
    total, num_tokens = torch.zeros(()), 0
    for scored in groups:
        prompt = list(scored.draw.prompt.token_ids)
        for k, (sample, reward) in enumerate(zip(scored.group_ref.samples, scored.rewards, strict=True)):
            if not reward.valid:
                continue
            others = [r.value for j, r in enumerate(scored.rewards) if j != k and r.valid]
            advantage = reward.value - sum(others) / len(others)
            ids = torch.tensor([prompt + sample.token_ids.tolist()])
            log_p = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, -1)
            chosen = log_p.gather(-1, ids[0, len(prompt) :, None])[:, 0]
            total = total - advantage * chosen[torch.from_numpy(sample.loss_mask)].sum()
            num_tokens += int(sample.loss_mask.sum())
    return total / num_tokens


def one_step(
    worker: LearnerWorker, groups: list[ScoredGroup], trees: bool
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """Step once; return reduced gradients, parameters afterwards, metrics."""
    engine, grads = worker._engine, {}
    engine.module.family.tree &= trees
    update = engine.update

    def watched_update() -> Any:
        grads.update(engine.gradients())
        return update()

    engine.update = watched_update  # type: ignore[method-assign]
    metrics = worker.step(groups)
    engine.update = update  # type: ignore[method-assign]
    with engine.gathered(list(engine.module.model.parameters())):
        params = {name: p.detach().clone() for name, p in engine.module.model.named_parameters()}
    return grads, params, dict(metrics)


def assert_same(found: Tensors, want: Tensors, tolerance: float = 1e-5) -> None:
    """Compare with the greatest entry of all as the scale."""
    assert found.keys() == want.keys()
    scale = max(float(w.abs().max()) for w in want.values())
    gap = max(float((found[name] - w).abs().max()) for name, w in want.items())
    assert gap <= tolerance * scale, f"{gap:.2e} of {scale:.2e}"


# ranks, ZeRO stage, budget, shared prompt, trees, chunk, checkpointing
CASES = [
    (1, 0, 4096, True, True, 1024, False),
    (1, 0, 24, True, True, 3, True),
    (1, 0, 40, False, True, 7, False),
    (1, 0, 64, False, False, 1024, False),
    (1, 2, 48, True, True, 5, False),
    (2, 0, 48, True, True, 1024, False),
    (2, 1, 24, True, True, 3, False),
    (2, 3, 48, True, True, 5, True),
    (3, 2, 64, False, False, 1024, False),
    (3, 3, 32, True, True, 3, False),
]
ALL = list(
    itertools.product((1, 2, 3), (0, 1, 2, 3), (24, 4096), (True, False), (True, False), (3, 1024), (False, True))
)


def check(case: tuple[int, int, int, bool, bool, int, bool], tiny: Config, plain: tuple[Tensors, Tensors]) -> None:
    ranks, stage, budget, share, trees, chunk, checkpointing = case
    config = changed(
        tiny,
        num_ranks=ranks,
        zero_stage=stage,
        max_tokens_per_micro_batch=budget,
        shared_prompt=share,
        logprob_chunk_tokens=chunk,
        gradient_checkpointing=checkpointing,
        deepspeed={"zero_optimization": SMALL_BUCKETS} if chunk < 1024 else {},
    )
    for grads, params, metrics in run_ranks(one_step, config, receipts(), trees):
        assert_same(grads, plain[0])
        assert_same(params, plain[1])
        assert metrics["ratio/mean"] == 1.0
        assert metrics["learner/samples_skipped_frac"] > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_equals_plain_autograd(case: Any, tiny: Config, plain: tuple[Tensors, Tensors]) -> None:
    check(case, tiny, plain)


@pytest.mark.soak
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_step_equals_plain_autograd_everywhere(case: Any, tiny: Config, plain: tuple[Tensors, Tensors]) -> None:
    check(case, tiny, plain)


def test_deepspeed_keys_and_offloaded_parameters_change_nothing(tiny: Config, plain: tuple[Tensors, Tensors]) -> None:
    keys = {"zero_optimization": SMALL_BUCKETS | {"stage3_param_persistence_threshold": 0}}
    config = changed(tiny, num_ranks=2, zero_stage=3, offload_parameters=True, offload_optimizer=True, deepspeed=keys)
    for grads, params, _ in run_ranks(one_step, config, receipts(), True):
        assert_same(grads, plain[0])
        assert_same(params, plain[1])


def test_ranks_without_work_take_part(tiny: Config) -> None:
    """Three ranks, one live group: two of them have nothing to compute, at the stage where that could hang."""
    groups = receipts(2)
    want = run_ranks(one_step, tiny, groups, True)[0][0]
    for stage in (2, 3):
        for grads, _, _ in run_ranks(one_step, changed(tiny, num_ranks=3, zero_stage=stage), groups, True):
            assert_same(grads, want)


def test_sgd_without_signal_moves_nothing(tiny: Config) -> None:
    group = receipts(2)[1]
    before = AutoModelForCausalLM.from_pretrained(tiny.model.path, dtype=torch.float32)
    _, params, metrics = run_ranks(one_step, tiny, [group], True)[0]
    for name, param in before.named_parameters():
        np.testing.assert_array_equal(params[name].numpy(), param.detach().numpy())
    assert "optim/grad_norm" not in metrics

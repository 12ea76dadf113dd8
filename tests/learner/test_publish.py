"""What leaves the learner: published buckets, exported folders, checkpoints; whole models and adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from configs.schema import Config, LoraConfig
from learner.worker import LearnerWorker
from orchestrator.types import Published, WeightBucket
from tests.learner.test_invariance import Tensors, assert_same
from tests.learner.tiny import changed, config_of, families, llama, receipts, run_ranks, save_model

pytestmark = pytest.mark.stack
LORA = LoraConfig(rank=4, alpha=8.0)


def config_for(folder: Path, family: str = "llama-tied", **learner: Any) -> Config:
    model = folder / "model"
    path = str(model) if model.exists() else save_model(model, families()[family])
    return config_of(path, folder, learner={"optimizer": "adamw", "lr": 1e-2, "grad_clip": 1.0} | learner)


def tensors_of(buckets: list[WeightBucket]) -> Tensors:
    found = {}
    for bucket in buckets:
        for meta in bucket.tensors:
            dtype = getattr(torch, meta.dtype)
            size = int(np.prod(meta.shape)) * dtype.itemsize
            assert meta.offset % 64 == 0 and meta.name not in found
            found[meta.name] = (
                torch.from_numpy(bucket.data[meta.offset : meta.offset + size]).view(dtype).reshape(meta.shape)
            )
    return found


def publish(worker: LearnerWorker) -> tuple[Tensors, Published] | None:
    if worker._rank > 0:
        worker.assist() if worker._engine.stage == 3 else None
        return None
    *buckets, published = list(worker.publish(7))
    assert len(buckets) == worker._publisher.num_buckets
    hasher = xxhash.xxh3_128()
    for bucket in buckets:
        bucket.hash_into(hasher)
    assert published.version.digest == hasher.hexdigest() and published.version.steps == 7
    assert published.num_bytes == sum(len(bucket.data) for bucket in buckets)
    return tensors_of(buckets), published


def step_publish_export(worker: LearnerWorker, folder: str, with_reference: bool = False) -> Any:
    before = publish(worker)
    metrics = worker.step(receipts(reference=with_reference))
    after = publish(worker)
    again = publish(worker)
    worker.export(Path(folder))
    return before, after, again, dict(metrics)


@pytest.mark.parametrize(
    ("family", "ranks", "stage"),
    [("llama-tied", 1, 0), ("llama", 2, 1), ("qwen3", 2, 3), ("gemma3", 1, 0), ("qwen2", 1, 2)],
)
def test_published_and_exported_weights_are_the_learners(tmp_path: Path, family: str, ranks: int, stage: int) -> None:
    config = config_for(tmp_path, family, num_ranks=ranks, zero_stage=stage)
    before, after, again, metrics = run_ranks(step_publish_export, config, str(tmp_path / "policy"))[0]
    checkpoint = load_file(str(tmp_path / "model" / "model.safetensors"))
    assert after[0].keys() == checkpoint.keys()  # Hugging Face names; a tied head is not among them
    assert all(torch.equal(before[0][name], tensor) for name, tensor in checkpoint.items())
    assert before[1].version.digest != after[1].version.digest == again[1].version.digest
    assert after[1].num_tensors == len(checkpoint)
    assert metrics["sync/changed_frac"] > 0.5
    exported = load_file(str(tmp_path / "policy" / "model.safetensors"))
    assert exported.keys() == after[0].keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in after[0].items())
    assert_probe(tmp_path / "policy", after[1])


def assert_probe(folder: Path, published: Published) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = torch.tensor([published.probe_token_ids])
    log_p = torch.log_softmax(model(ids).logits[0, :-1].detach(), -1).gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(published.probe_logprobs, log_p.numpy(), atol=2e-4)


def test_bfloat16_is_published_and_computed(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", llama())
    config = config_of(path, tmp_path, dtype="bfloat16", learner={"optimizer": "adamw", "lr": 1e-6})
    before, after, _, metrics = run_ranks(step_publish_export, config, str(tmp_path / "policy"))[0]
    assert {tensor.dtype for tensor in after[0].values()} == {torch.bfloat16}
    assert metrics["sync/changed_frac"] < 0.2  # the update is too small for bf16: said, not hidden
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "policy"))
    assert model.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("ranks", "stage", "dora"), [
        (1, 0, False),
        (1, 0, True),
        (2, 3, False),
        *(pytest.param(2, stage, False, marks=pytest.mark.soak) for stage in (1, 2)),
    ],
)
def test_lora_publishes_the_merged_model(tmp_path: Path, ranks: int, stage: int, dora: bool) -> None:
    """KL comes from the disabled adapter: 0 at step 1, without a reference; merging leaves no trace."""
    lora = LoraConfig(rank=4, alpha=8.0, dora=dora)
    config = config_for(tmp_path, num_ranks=ranks, zero_stage=stage, lora=lora)
    config = config_of(
        config.model.path, tmp_path, algorithm={"beta": 0.5}, learner={
            "optimizer": "adamw", "lr": 1e-2, "num_ranks": ranks, "zero_stage": stage, "lora": lora,
        },
    )  # fmt: skip
    before, after, again, metrics = run_ranks(step_publish_export, config, str(tmp_path / "policy"))[0]
    checkpoint = load_file(str(tmp_path / "model" / "model.safetensors"))
    assert after[0].keys() == checkpoint.keys()
    assert_same(before[0], checkpoint)
    assert metrics["kl/ref"] == pytest.approx(0.0, abs=1e-5)
    assert after[1].version.digest == again[1].version.digest != before[1].version.digest
    exported = load_file(str(tmp_path / "policy" / "model.safetensors"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in after[0].items())
    assert_probe(tmp_path / "policy", after[1])
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "policy" / "adapter")).merge_and_unload()
    want = {name: p.detach() for name, p in adapted.named_parameters() if name in exported}
    assert_same({name: exported[name] for name in want}, want)


def halves(worker: LearnerWorker, folder: str, resumed: bool) -> Any:
    """Three steps; or one, whose checkpoint is loaded for the other two."""
    steps = [receipts(seed=seed, reference=True) for seed in (1, 2, 3)]
    if resumed:
        worker.load(Path(folder))
    else:
        worker.step(steps[0])
        worker.save(Path(folder))
    metrics = [dict(worker.step(groups)) for groups in steps[1:]]
    with worker._engine.gathered(list(worker._engine.module.model.parameters())):
        weights = {name: p.detach().clone() for name, p in worker._engine.module.model.named_parameters()}
    return weights, [{k: v for k, v in m.items() if not k.startswith("time/")} for m in metrics]


@pytest.mark.parametrize(
    ("ranks", "stage", "lora"), [
        (2, 3, False),
        (1, 0, True),
        *(pytest.param(ranks, stage, False, marks=pytest.mark.soak) for ranks, stage in ((1, 0), (2, 1), (2, 2))),
    ],
)
def test_a_checkpoint_continues_to_the_bit(tmp_path: Path, ranks: int, stage: int, lora: bool) -> None:
    path = save_model(tmp_path / "model", llama())
    config = config_of(
        path,
        tmp_path,
        algorithm={"beta": 0.1, "kl_target": 0.5, "kl_horizon": 100},
        learner={"optimizer": "adamw", "lr": 1e-2, "num_ranks": ranks, "zero_stage": stage, "lr_schedule": "cosine"}
        | ({"lora": LORA} if lora else {}),
    )
    straight = run_ranks(halves, config, str(tmp_path / "checkpoint"), False)
    resumed = run_ranks(halves, config, str(tmp_path / "checkpoint"), True)
    for (weights, metrics), (again, metrics_again) in zip(straight, resumed, strict=True):
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert metrics == metrics_again
        assert metrics[0]["algorithm/beta"] != metrics[1]["algorithm/beta"]


def test_lora_trains_and_optimizes_the_adapter_alone(tmp_path: Path) -> None:
    config = changed(config_for(tmp_path), lora=LORA)

    trained, total, optimizer = run_ranks(_sizes, config)[0]
    assert trained < 0.1 * total
    assert optimizer <= 8.1 * trained + 1024


def _sizes(worker: LearnerWorker) -> tuple[int, int, int]:
    worker.step(receipts())
    params = list(worker._engine.module.parameters())
    trained = sum(p.numel() for p in params if p.requires_grad)
    return trained, sum(p.numel() for p in params), worker._engine.optimizer_bytes()

"""A gradient that is not finite, too little memory: the cause and what to change, at every stage."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Config
from learner.worker import LearnerWorker
from orchestrator.types import ScoredGroup
from tests.learner.test_invariance import Tensors
from tests.learner.tiny import config_of, llama, receipts, run_ranks, save_model

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("failures") / "model", llama())


def kl_config(path: str, folder: Path, **learner: Any) -> Config:
    return config_of(
        path,
        folder,
        algorithm={"beta": 0.1, "kl_in_reward": False, "kl_estimator": "k2"},
        learner={"optimizer": "adamw", "lr": 1e-3, "max_skipped_updates": 2} | learner,
    )


def poisoned(seed: int) -> list[ScoredGroup]:
    groups = receipts(seed=seed, reference=True)
    groups[3].reference_refs[0][0][:] = np.nan
    return groups


def weights_of(worker: LearnerWorker) -> Tensors:
    engine = worker._engine
    with engine.gathered(list(engine.module.model.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.model.named_parameters()}


def good_bad_good_bad_bad(worker: LearnerWorker) -> tuple[list[Tensors], list[float], str]:
    seen, skipped = [], []
    for groups in (receipts(seed=1, reference=True), poisoned(2), receipts(seed=3, reference=True), poisoned(4)):
        skipped.append(worker.step(groups)["optim/skipped"])
        seen.append(weights_of(worker))
    try:
        worker.step(poisoned(5))
    except RuntimeError as error:
        return seen, skipped, str(error)
    return seen, skipped, ""


def good_good(worker: LearnerWorker) -> list[Tensors]:
    seen = []
    for seed in (1, 3):
        worker.step(receipts(seed=seed, reference=True))
        seen.append(weights_of(worker))
    return seen


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2), *(pytest.param(2, stage, marks=pytest.mark.soak) for stage in (0, 1, 3))])
def test_a_non_finite_update_moves_nothing(path: str, tmp_path: Path, ranks: int, stage: int) -> None:
    config = kl_config(path, tmp_path, num_ranks=ranks, zero_stage=stage)
    want = run_ranks(good_good, config)[0]
    for seen, skipped, error in run_ranks(good_bad_good_bad_bad, config):
        assert skipped == [0.0, 1.0, 0.0, 1.0]
        for after, expected in zip(seen, (want[0], want[0], want[1], want[1]), strict=True):
            for name in expected:
                assert torch.equal(after[name], expected[name]), name
        assert "2 updates in a row" in error and "learner.lr" in error
    kept = sorted((tmp_path / "skipped_updates").glob("*.pt"))
    assert len(kept) == 3 * ranks


def starve(worker: LearnerWorker) -> str:
    """Take almost all memory away, then step on long samples."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
    try:
        worker.step(receipts(40))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ""


def test_out_of_memory_says_what_to_change(path: str, tmp_path: Path) -> None:
    error = run_ranks(starve, config_of(path, tmp_path))[0]
    assert error.startswith("LearnerError") and "memory" in error and "learner.max_tokens_per_micro_batch" in error

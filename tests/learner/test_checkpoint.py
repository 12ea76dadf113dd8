"""A checkpoint holds every weight and moment once; any ranks at any stage read it, and the same ones go on exact to the bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import LoraConfig
from learner.worker import LearnerWorker
from tests.learner.tiny import config_of, llama, receipts, run_ranks, save_model

pytestmark = pytest.mark.stack

Split = tuple[int, int]  # ranks, ZeRO stage


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("checkpoint") / "model", llama())


def config_for(path: str, folder: Path, split: Split, **learner: Any):
    settings = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1, "num_ranks": split[0], "zero_stage": split[1]} | learner
    return config_of(path, folder, learner=settings)


def save_after_two(worker: LearnerWorker, folder: Path) -> None:
    worker.step(receipts(seed=1))
    worker.step(receipts(seed=2))
    worker.save(folder / "two")
    worker.step(receipts(seed=3))
    worker.save(folder / "three")


def load_and_step(worker: LearnerWorker, folder: Path) -> None:
    worker.load(folder / "two")
    worker.save(folder / "two_again")
    worker.step(receipts(seed=3))
    worker.save(folder / "three_again")


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Put the shards of a checkpoint together: each element must be there exactly once."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            kind, start, name = key.split("/", 2)
            pieces.setdefault(f"{kind}/{name}", []).append((int(start), tensor))
    found = {}
    for key, parts in pieces.items():
        position = 0
        for start, part in sorted(parts, key=lambda part: part[0]):
            assert start == position, key
            position += len(part)
        found[key] = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)


def check(path: str, folder: Path, saved: Split, loaded: Split, **learner: Any) -> None:
    run_ranks(save_after_two, config_for(path, folder, saved, **learner), folder)
    run_ranks(load_and_step, config_for(path, folder, loaded, **learner), folder)
    two, three = whole(folder / "two"), whole(folder / "three")
    assert {key.split("/")[0] for key in two} == {"weight", "exp_avg", "exp_avg_sq"}
    assert_equal(whole(folder / "two_again"), two, 0.0)
    assert_equal(whole(folder / "three_again"), three, 0.0 if saved == loaded else 1e-5)
    assert any(not torch.equal(two[key], three[key]) for key in two)


@pytest.mark.parametrize(
    ("saved", "loaded", "lora"),
    [pytest.param((1, 0), (2, 3), 0, marks=pytest.mark.soak), ((2, 3), (2, 3), 4), ((2, 2), (1, 1), 0)],
    ids=["1-rank-to-2-stage-3", "lora-stage-3-to-the-bit", "2-ranks-stage-2-to-1"],
)
def test_any_split_reads_what_any_split_wrote(path: str, tmp_path: Path, saved: Split, loaded: Split, lora: int) -> None:
    check(path, tmp_path, saved, loaded, lora=LoraConfig(rank=lora))


SPLITS = [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]


@pytest.mark.soak
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(SPLITS, SPLITS)))
def test_every_split_reads_what_every_split_wrote(path: str, tmp_path: Path, saved: Split, loaded: Split, lora: int) -> None:
    check(path, tmp_path, saved, loaded, lora=LoraConfig(rank=lora))

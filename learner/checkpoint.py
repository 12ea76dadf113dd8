"""Saves and loads everything that the next step of the learner depends on; exact to the bit with the same ranks and stage."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a rank knows beside the engine's masters, moments and update count."""

    beta: float
    skipped_in_a_row: int
    random: dict[str, Any]


def save(updater: Updater, folder: Path, rank: int) -> None:
    """Write this rank's part into a folder that all ranks share; making the whole atomic is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    updater.engine.save(folder)
    state = LearnerState(beta=updater.beta, skipped_in_a_row=updater.guard.skipped_in_a_row, random=_random_state())
    torch.save(asdict(state), folder / f"rank{rank}.pt")


def load(updater: Updater, folder: Path, rank: int) -> None:
    """Read what `save` wrote."""
    updater.engine.load(folder)
    state = LearnerState(**torch.load(folder / f"rank{rank}.pt", weights_only=False))
    updater.beta = state.beta
    updater.guard.skipped_in_a_row = state.skipped_in_a_row
    random.setstate(state.random["python"])
    np.random.set_state(state.random["numpy"])
    torch.set_rng_state(state.random["torch"])
    if state.random["cuda"] is not None:
        torch.cuda.set_rng_state(state.random["cuda"])


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }

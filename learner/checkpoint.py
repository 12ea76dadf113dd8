"""Saves and loads everything that the next step of the learner depends on.

    <folder>/rank0.safetensors, rank0.json, rank1.safetensors, ...

Each rank writes its own shards, under the key `kind/start/parameter`, and reads from all files what it needs: with the same ranks and stage
the run goes on exact to the bit, with others as any split of the work does. No file can run code when it is read.
"""

import base64
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from learner.shards import WEIGHT, Shard, own

if TYPE_CHECKING:  # an export needs no deepspeed
    from learner.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank knows beside weights and moments."""

    updates: int  # tried: what the schedule counts
    num_updates: float  # done: what the optimizer counts
    beta: float
    skipped_in_a_row: int
    random: dict[str, Any]


def save(updater: "Updater", folder: Path, rank: int, num_ranks: int) -> None:
    """Write this rank's part into a folder that all ranks share; making the whole atomic is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = updater.engine.shards()
    found = [own(shard, rank, num_ranks) for shard in (*shards.weights(), *shards.moments())]
    path = folder / f"rank{rank}.safetensors"
    save_file({f"{s.kind}/{s.start}/{s.name}": s.data.cpu() for s in found if len(s.data)}, path)
    state = RankState(
        updates=updater.engine.updates,
        num_updates=shards.num_updates(),
        beta=updater.beta,
        skipped_in_a_row=updater.guard.skipped_in_a_row,
        random=_random_state(),
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
    for written in (path, folder / f"rank{rank}.json"):
        with written.open("rb") as file:
            os.fsync(file.fileno())


def load(updater: "Updater", folder: Path, rank: int) -> None:
    """Read what any number of ranks saved; a rank that was not there then takes the first one's counters."""
    path = folder / f"rank{rank}.json"
    state = RankState(**json.loads((path if path.is_file() else folder / "rank0.json").read_text(encoding="utf-8")))
    stored, shards = Stored(folder), updater.engine.shards()
    shards.prepare([kind for kind in stored.kinds if kind != WEIGHT], state.num_updates)
    stored.read_into((*shards.masters(), *shards.moments()))
    shards.settle()
    updater.engine.updates = state.updates
    updater.beta = state.beta
    updater.guard.skipped_in_a_row = state.skipped_in_a_row
    if path.is_file():
        _set_random_state(state.random)


class Stored:
    """The shards of a checkpoint, whoever wrote them."""

    def __init__(self, folder: Path) -> None:
        """Open every rank's file; nothing is read but the lists of what they hold."""
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}  # kind, parameter -> start, end, slice
        for path in sorted(folder.glob("rank*.safetensors")):
            file: Any = safe_open(path, framework="pt")  # pyright: ignore (open as long as its slices are)
            for key in file.keys():
                kind, start, name = key.split("/", 2)
                piece = file.get_slice(key)
                self._pieces.setdefault((kind, name), []).append((int(start), int(start) + piece.get_shape()[0], piece))

    @property
    def kinds(self) -> list[str]:
        """List the kinds of tensors that are there."""
        return sorted({kind for kind, _ in self._pieces})

    def read_into(self, shards: Iterable[Shard]) -> None:
        """Fill shards from the pieces that cover them.

        Raises:
            KeyError: a part of a tensor is not there.
        """
        for shard in shards:
            end, filled = shard.start + len(shard.data), 0
            for first, last, piece in self._pieces.get((shard.kind, shard.name), []):
                low, high = max(first, shard.start), min(last, end)
                if low < high:
                    shard.data[low - shard.start : high - shard.start] = piece[low - first : high - first].to(shard.data.device)
                    filled += high - low
            if filled != len(shard.data):
                raise KeyError(
                    f"a checkpoint must hold every trained parameter, got {filled} of {len(shard.data)} elements of {shard.kind} of "
                    f"{shard.name}. It is of another model: set model.path and learner.lora as they were."
                )


def read_weights(folder: Path, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Read the trained weights of a checkpoint into whole parameters."""
    Stored(folder).read_into(
        Shard(kind=WEIGHT, name=name, start=0, data=param.data.view(-1), everywhere=True) for name, param in named
    )


def _random_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, [int(k) for k in keys], position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

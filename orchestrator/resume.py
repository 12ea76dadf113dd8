"""Where a run goes on: the checkpoint to resume from, and whether this configuration may; decided before anything starts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from configs.rules import ConfigError
from orchestrator.checkpoint import RunState, fault_of, listed, newest, read_state, step_of
from orchestrator.feed import EMPTY

# changing these does not change what is trained: they are shown; any other must be as it was, or be named in train.resume_allow
FREE = (
    "model.path", "data.train",  # their content is compared
    "train.num_steps", "train.output_dir", "train.resume", "train.sample_table_every", "train.max_restarts",
    "learner.num_ranks", "learner.zero_stage", "learner.offload_", "learner.gradient_checkpointing", "learner.shared_prompt",
    "learner.max_tokens_per_micro_batch", "learner.logprob_chunk_tokens",
    "eval.", "cluster.", "checkpoint.", "debug.",
)  # fmt: skip
FREE_ENDINGS = (".num_cpus", ".num_gpus", ".threads", ".timeout_s", ".kv_cache_mib", ".num_workers")
ORIGIN_KEYS = {"model": "model.path", "tokenizer": "model.path", "prompts": "data.train"}
ORIGIN_WORDS = {"model": "the same model", "tokenizer": "the same tokenizer", "prompts": "the same prompts"}


class ResumeError(RuntimeError):
    """What was read from a checkpoint is not what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins, and what people should know about it."""

    folder: Path | None  # of the checkpoint; None: from the beginning
    state: RunState
    notes: list[str]


BEGINNING = RunState(step=0, digest="", evaluated=False, best=(0, -math.inf), feed=EMPTY)


def find(run: Path, resume: str, allow: Sequence[str], *, config: Mapping[str, Any], origin: Mapping[str, str]) -> Start:
    """Find where a run begins.

    Args:
        run: its folder.
        resume: `never`, `auto` (the newest whole checkpoint of the folder, if any), or a checkpoint's folder.
        allow: keys that may differ from the checkpoint's configuration.
        config: flat configuration (dotted key -> value).
        origin: digests of what the run starts from.

    Raises:
        ConfigError: the named checkpoint is not whole; configuration or origin are others; or the folder's checkpoints would be mixed up.
    """
    folder, notes = _choose(run, resume)
    if folder is None:
        return Start(folder=None, state=BEGINNING, notes=notes)
    state, raw = read_state(folder)
    _compare_origin(folder, raw["origin"], origin, allow)
    notes += _compare_config(folder, raw["config"], json.loads(json.dumps(config)), allow)
    notes += _compare_packages(raw["packages"])
    return Start(folder=folder, state=state, notes=notes)


def find_again(run: Path, start: Start) -> Start:
    """Find where a run that is under way goes on: its newest whole checkpoint, or where it began."""
    folder, notes = newest(run)
    return Start(folder=folder, state=read_state(folder)[0], notes=notes) if folder else start


def _choose(run: Path, resume: str) -> tuple[Path | None, list[str]]:
    if resume == "auto":
        return newest(run)
    if resume == "never":
        there = [path for path in listed(run) if not fault_of(path)]
        if there:
            raise ConfigError(
                f"train.resume=never must go with a run folder without checkpoints, got {there[-1]}. "
                "Set train.resume=auto to go on from it, or another train.output_dir."
            )
        return None, []
    folder = Path(resume).absolute()
    fault = fault_of(folder) if folder.is_dir() else "it is not there"
    if fault:
        raise ConfigError(
            f"train.resume must be auto, never or the folder of a whole checkpoint, got {resume}: {fault}. "
            "Set train.resume=auto to take the newest whole one."
        )
    newer = [path for path in listed(run) if folder.parent == path.parent and step_of(path) > step_of(folder) and not fault_of(path)]
    if newer:
        raise ConfigError(
            f"train.resume must be the newest whole checkpoint of train.output_dir, got {folder} while {newer[-1].name} is there. "
            "Set another train.output_dir to branch off from it, or train.resume=auto."
        )
    return folder, []


def _compare_origin(folder: Path, then: Mapping[str, str], now: Mapping[str, str], allow: Sequence[str]) -> None:
    for part, key in ORIGIN_KEYS.items():
        if then[part] != now[part] and key not in allow:
            raise ConfigError(
                f"a resumed run must start from {ORIGIN_WORDS[part]}, got others in {key} than {folder} was trained with. "
                f"Give the same, start anew in another train.output_dir, or allow it by name: train.resume_allow=[{key}]."
            )


def _compare_config(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> list[str]:
    """List what changed; refuse what changes the mathematics and was not allowed."""
    changed = {key: f"{key}: {then.get(key)} -> {now.get(key)}" for key in sorted({*then, *now}) if then.get(key) != now.get(key)}
    scheduled = now.get("learner.lr_schedule") != "constant"  # then the rate depends on the number of steps
    refused = [
        words
        for key, words in changed.items()
        if key not in allow
        and (not (key.startswith(FREE) or key.endswith(FREE_ENDINGS)) or (key == "train.num_steps" and scheduled))
    ]
    if refused:
        raise ConfigError(
            f"a resumed run must keep what changes the mathematics, got {'; '.join(refused)} against {folder}. "
            "Undo it, or allow it by name: train.resume_allow=[KEY]."
        )
    silent = ("train.resume", "train.output_dir")
    return [f"changed since the checkpoint: {words}" for key, words in changed.items() if not key.startswith(silent)]


def _compare_packages(then: Mapping[str, str]) -> list[str]:
    """List packages whose version is another one: the last bits may differ."""
    found = []
    for name, was in then.items():
        try:
            now = version(name)
        except PackageNotFoundError:
            now = "none"
        if now != was:
            found.append(f"changed since the checkpoint: {name} {was} -> {now}; the last bits may differ")
    return found

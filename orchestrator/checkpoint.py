"""Checkpoints of a whole run: one folder per step, complete or not there; nothing lost, nothing trained twice.

    <run>/checkpoints/step-000010/{learner/..., state.json, config.yaml, COMPLETE}

Written under a temporary name, flushed to disk, renamed, and marked last. What was in flight is remembered by its draw numbers and
drawn again; at staleness 0 nothing is in flight between two steps, and a resumed run equals an undisturbed one bit for bit.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.rules import ConfigError
from orchestrator.feed import FeedState
from orchestrator.ports import Learner
from orchestrator.types import WeightVersion

MARKER = "COMPLETE"
# changing these does not change what is trained; every other key must be as it was, or be named in train.resume_allow
FREE = ("train.num_steps", "train.output_dir", "train.resume", "train.sample_table_every", "eval.", "cluster.", "checkpoint.")
FREE_ENDINGS = (".num_cpus", ".num_gpus", ".threads", ".timeout_s", ".start_timeout_s", ".kv_cache_mib", ".num_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands beside its learner's state."""

    folder: Path
    step: int
    digest: str  # of the published weights
    data: str  # fingerprint of the training prompts
    feed: FeedState


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run: Path, *, config: dict[str, object], data: str, every: int, keep_last: int) -> None:
        """Take the flat configuration (dotted key -> value) and the data's fingerprint, to compare on resume."""
        self._folder, self._config, self._data = run / "checkpoints", config, data
        self._every, self._keep_last = every, keep_last

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint follows this step: every so many, and after the last."""
        return self._every > 0 and (step % self._every == 0 or step == last)

    async def save(self, step: int, version: WeightVersion, learner: Learner, feed: FeedState) -> Path:
        """Write one checkpoint; a failure leaves the others as they are.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        final = self._folder / f"step-{step:06d}"
        scratch = self._folder / f".writing-{step:06d}"
        for old in (scratch, final):
            shutil.rmtree(old, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            await learner.save(scratch / "learner")
            state = {"step": step, "digest": version.digest, "data": self._data, "feed": asdict(feed), "config": self._config}
            (scratch / "state.json").write_text(json.dumps(state, indent=1))
            for path in [*scratch.rglob("*"), scratch]:
                _flush(path)
            scratch.rename(final)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        (final / MARKER).write_text(f"step {step}\n")
        for path in (final / MARKER, final, self._folder):
            _flush(path)
        for old in self._complete()[: -self._keep_last]:
            (old / MARKER).unlink()  # first: a half-removed checkpoint is not complete
            shutil.rmtree(old)
        return final

    def find(self, resume: str, allow: list[str]) -> RunState | None:
        """Find the checkpoint to resume from; None: start from the beginning.

        Args:
            resume: `never`, `auto` (the newest complete one, if any), or a checkpoint's folder.
            allow: keys that may differ from the checkpoint's configuration.

        Raises:
            ConfigError: the named checkpoint is not complete, or configuration or data are others.
        """
        if resume == "never":
            return None
        if resume == "auto":
            complete = self._complete()
            if not complete:
                return None
            folder = complete[-1]
        else:
            folder = Path(resume)
            if not (folder / MARKER).is_file():
                raise ConfigError(
                    f"train.resume must be auto, never or the folder of a complete checkpoint, got {resume}. "
                    "Set train.resume=auto to take the newest complete one."
                )
        state = json.loads((folder / "state.json").read_text())
        self._compare(state, folder, allow)
        return RunState(
            folder=folder,
            step=state["step"],
            digest=state["digest"],
            data=state["data"],
            feed=FeedState(**state["feed"]),
        )

    def incomplete(self) -> list[Path]:
        """List checkpoint folders that were not finished; they are passed over."""
        return sorted(p for p in self._folder.glob("*") if p.is_dir() and not (p / MARKER).is_file())

    def _complete(self) -> list[Path]:
        return sorted(p for p in self._folder.glob("step-*") if (p / MARKER).is_file())

    def _compare(self, state: dict, folder: Path, allow: list[str]) -> None:
        if state["data"] != self._data:
            raise ConfigError(
                f"a resumed run must train on the same prompts, got other ones in data.train than {folder} was trained on. "
                "Give the same file, or start anew with train.resume=never."
            )
        then, now = state["config"], json.loads(json.dumps(self._config))
        changed = [
            f"{key}: {then.get(key)} -> {now.get(key)}"
            for key in sorted({*then, *now})
            if then.get(key) != now.get(key)
            and key not in allow
            and not key.startswith(FREE)
            and not key.endswith(FREE_ENDINGS)
        ]
        if changed:
            raise ConfigError(
                f"a resumed run must keep what changes the mathematics, got {'; '.join(changed)} against {folder}. "
                "Undo it, or allow it by name: train.resume_allow=[KEY]."
            )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

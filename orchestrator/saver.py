"""When a run writes checkpoints, and which of them it keeps."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import CheckpointConfig
from orchestrator.checkpoint import (
    LEARNER,
    RunState,
    is_complete,
    listed,
    remove,
    scratch_of,
    step_of,
    write,
)
from orchestrator.ports import Learner


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, run: Path, *, beside: Mapping[str, Any], settings: CheckpointConfig, begun: int) -> None:
        """Take the run's folder, what is written into every checkpoint, and the step at which the run begins."""
        self.newest_step = begun  # later than it nothing is saved
        self._run, self._beside, self._settings = run, beside, settings

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint follows this step: every so many, and after the last."""
        return self._settings.every > 0 and (step % self._settings.every == 0 or step == last)

    async def save(self, state: RunState, learner: Learner) -> Path:
        """Write one checkpoint; a failure leaves the others as they are.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        scratch = scratch_of(self._run, state.step)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            await learner.save(scratch / LEARNER)
            folder = write(self._run, state, self._beside)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.newest_step = state.step
        self._tidy(state.step)
        return folder

    def _tidy(self, step: int) -> None:
        """Remove old checkpoints; what a later step left in the folder is not counted (it was passed over)."""
        complete = [folder for folder in listed(self._run) if is_complete(folder) and step_of(folder) <= step]
        for old in complete[: -self._settings.keep_last]:
            remove(old)

"""When a run writes checkpoints, and which of them it keeps."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

    def __init__(self, run: Path, *, beside: Mapping[str, Any], every: int, keep_last: int) -> None:
        """Take the run's folder, what is written into every checkpoint, and how many there are."""
        self._run, self._beside, self._every, self._keep_last = run, beside, every, keep_last

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint follows this step: every so many, and after the last."""
        return self._every > 0 and (step % self._every == 0 or step == last)

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
        self._tidy(state.step)
        return folder

    def _tidy(self, step: int) -> None:
        """Remove old checkpoints; what a later step left in the folder is not counted (it was passed over)."""
        complete = [folder for folder in listed(self._run) if is_complete(folder) and step_of(folder) <= step]
        for old in complete[: -self._keep_last]:
            remove(old)

"""When a run writes checkpoints, and which of them it keeps.

A checkpoint is written while the next groups are generated: weights stay as they are until the next learner step, which waits for it.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.rules import ConfigError
from configs.schema import CheckpointConfig
from orchestrator.checkpoint import (
    LEARNER,
    RunState,
    folder_of,
    is_complete,
    listed,
    remove,
    scratch_of,
    scratches,
    step_of,
    write,
)
from orchestrator.mirror import Mirror
from orchestrator.ports import Learner, WriteFailed


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(
        self, run: Path, *, beside: Mapping[str, Any], settings: CheckpointConfig, begun: int, report: Callable[[str], None]
    ) -> None:
        """Take the run's folder, what is written into every checkpoint, the step at which the run begins, and where to tell people."""
        self.newest_step = begun  # that is saved
        self._run, self._beside, self._settings, self._report = run, beside, settings, report
        self._mirror = Mirror(settings.mirror) if settings.mirror else None
        self._writing: asyncio.Task[None] | None = None
        self._failure = ""  # of the newest write

    def judge(self, state: RunState, metrics: Mapping[str, float]) -> RunState:
        """Remember the best evaluation; of equal ones the first.

        Raises:
            ConfigError: `checkpoint.keep_best` names no metric of an evaluation.
        """
        name = self._settings.keep_best
        if name is None:
            return state
        if name not in metrics:
            there = ", ".join(sorted(metrics))
            raise ConfigError(f"checkpoint.keep_best must be a metric of an evaluation, got {name}. There are {there}.")
        return replace(state, best=(state.step, metrics[name])) if metrics[name] > state.best[1] else state

    def due(self, state: RunState, last: int) -> bool:
        """Whether a checkpoint follows this step: every so many, after the last, and where an evaluation was the best so far."""
        every = self._settings.every
        return (every > 0 and (state.step % every == 0 or state.step == last)) or state.best[0] == state.step

    async def begin(self, state: RunState, learner: Learner) -> None:
        """Start writing a checkpoint; `settle` before the learner's next step."""
        await self.settle()
        self._writing = asyncio.create_task(self._write(state, learner))

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written; a failure is told, and leaves the others as they are.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self._failure = ""
        try:
            await writing
        except (OSError, WriteFailed) as error:
            complete = [folder for folder in listed(self._run) if is_complete(folder)]
            left = f"the newest whole one is {complete[-1]}" if complete else "there is none"
            self._failure = f"a checkpoint could not be written: {error}; {left}"
            self._report(f"{self._failure}. The run goes on; make room, or the next one fails too.")

    async def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            WriteFailed: it could not be written.
        """
        await self.settle()
        if self._failure:
            raise WriteFailed(self._failure)

    async def close(self) -> None:
        """Abandon what is being written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, state: RunState, learner: Learner) -> None:
        scratch = scratch_of(self._run, state.step)
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            await learner.save(scratch / LEARNER)
            folder = await asyncio.to_thread(write, self._run, state, self._beside)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.newest_step = state.step
        await asyncio.to_thread(self._tidy, state)
        if self._mirror is not None:
            await asyncio.to_thread(self._mirror.push, folder)
            await asyncio.to_thread(self._mirror.tidy, self._run, state.step)

    def _tidy(self, state: RunState) -> None:
        """Remove old checkpoints, and what a kill left half written or half removed; a later step's is not counted (it was passed over)."""
        until = [folder for folder in listed(self._run) if step_of(folder) <= state.step]
        complete = [folder for folder in until if is_complete(folder)]
        kept = {*complete[-self._settings.keep_last :], folder_of(self._run, state.best[0])}
        for folder in until:
            if folder not in kept or not is_complete(folder):
                remove(folder)
        for scratch in scratches(self._run):
            shutil.rmtree(scratch)

"""What a run is doing right now, in `status.json` of the run folder: every wait with its owner, its age and its deadline."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.ports import Source, Wait

REFRESH_S = 5.0
FIRST_WORD_S = 60.0  # a phase that lasts so long is explained on the console; again after twice the time, and so on
SHOWN_WAITS = 3


class Status:
    """Keeps status.json fresh, and speaks up when a phase takes long."""

    def __init__(self, folder: Path, sources: Mapping[str, Source], report: Callable[[str], None]) -> None:
        """Take the run folder, the parts to ask, and where to tell people."""
        self._path, self._sources, self._report = folder / "status.json", sources, report
        self._phase, self._step, self._since = "start", 0, time.monotonic()
        self._next_word_s = FIRST_WORD_S

    def enter(self, phase: str, step: int) -> None:
        """Say what the loop does from now on."""
        self._phase, self._step, self._since = phase, step, time.monotonic()
        self._next_word_s = FIRST_WORD_S

    def metrics(self) -> dict[str, float]:
        """Sum up what supervision had to do since the start of this process."""
        found = [source.status() for source in self._sources.values()]
        names = ("replaced", "retried", "given_up")
        return {f"workers/{name}": sum(status.get(name, 0) for status in found) for name in names}

    async def keep(self) -> None:
        """Refresh the file for ever."""
        while True:
            self.write()
            age = time.monotonic() - self._since
            if age >= self._next_word_s:
                self._next_word_s *= 2
                self._report(self._word(age))
            await asyncio.sleep(REFRESH_S)

    def end(self, how: str) -> None:
        """Write the last word."""
        self.enter(how, self._step)
        self.write()

    def write(self) -> None:
        """Replace the file by the present state."""
        state = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "driver_pid": os.getpid(),
            "step": self._step,
            "phase": self._phase,
            "phase_s": round(time.monotonic() - self._since, 1),
            "waits": [asdict(wait) for wait in self._waits()],
            **{name: source.status() for name, source in self._sources.items()},
        }
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(state, indent=1), encoding="utf-8")
        scratch.replace(self._path)

    def _waits(self) -> Sequence[Wait]:
        found = [wait for source in self._sources.values() for wait in source.waits()]
        return sorted(found, key=lambda wait: -wait.since_s)

    def _word(self, age: float) -> str:
        shown = "; ".join(f"{w.what} ({w.since_s:.0f} of {w.deadline_s:g} s)" for w in self._waits()[:SHOWN_WAITS])
        shown = shown or "nothing outside of the driver"
        return f"step {self._step}: {self._phase} for {age:.0f} s, waits for {shown} (all in {self._path})"

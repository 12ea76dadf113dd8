"""A request to end the run early: what can be abandoned is abandoned at once, what changes weights is finished first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TOO_EARLY = "stopped before there was anything new to save"  # unless whoever catches it knows better


class Stopped(Exception):
    """The run was asked to end, and did; nothing was lost."""


class Stop:
    """Whether somebody asked."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the run to end."""
        self._asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that may be abandoned.

        Raises:
            Stopped: somebody asked before it was done; it was cancelled.
        """
        if self.asked:
            work.close()
            raise Stopped(TOO_EARLY)
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped(TOO_EARLY)
            return task.result()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

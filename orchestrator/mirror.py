"""Copies of whole checkpoints in another place: any that fsspec reaches (s3://, gs://, file://, memory:// ...).

Files first, the marker last, as on the disk; what comes back is checked against the marker's digests like any other checkpoint.
"""

import posixpath
from pathlib import Path
from typing import Any

import fsspec

from configs.rules import ConfigError
from orchestrator.checkpoint import MARKER, fault_of, folder_of, is_complete, listed, newest, step_of


class Mirror:
    """The copies of one run's checkpoints."""

    def __init__(self, url: str) -> None:
        """Open the place.

        Raises:
            ConfigError: no file system is known for the URL.
        """
        try:
            fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"checkpoint.mirror must be a URL that fsspec reaches, got {url} ({error}). Install its package, or correct it."
            ) from None
        self._fs: Any = fs

    def steps(self) -> list[int]:
        """List the steps whose copies are complete, oldest first."""
        self._fs.invalidate_cache()
        markers = self._fs.glob(posixpath.join(self._root, "step-*", MARKER))
        return sorted(step_of(Path(posixpath.dirname(marker))) for marker in markers)

    def push(self, checkpoint: Path) -> None:
        """Copy a whole checkpoint; a copy of the same step is replaced.

        Raises:
            OSError: the place cannot be written; the other copies are as they were.
        """
        self.remove(step_of(checkpoint))
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER)
        for path in [*files, checkpoint / MARKER]:
            place = self._place(checkpoint.name, path.relative_to(checkpoint).as_posix())
            self._fs.makedirs(posixpath.dirname(place), exist_ok=True)
            self._fs.put_file(str(path), place)

    def remove(self, step: int) -> None:
        """Remove a copy; from its first moment on it is none any more."""
        folder = self._place(folder_of(Path(), step).name)
        if self._fs.exists(posixpath.join(folder, MARKER)):
            self._fs.rm_file(posixpath.join(folder, MARKER))
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def tidy(self, run: Path, step: int) -> None:
        """Remove copies up to a step whose checkpoints the run removed as well."""
        kept = {step_of(folder) for folder in listed(run) if is_complete(folder)}
        for old in self.steps():
            if old <= step and old not in kept:
                self.remove(old)

    def pull(self, run: Path) -> None:
        """Fetch the newest whole copy into a run folder that has nothing as new: the machine is another one than before."""
        here, _ = newest(run)
        for step in reversed(self.steps()):
            if here is not None and step_of(here) >= step:
                return
            self._fetch(folder_of(run, step))
            if not fault_of(folder_of(run, step)):
                return

    def _fetch(self, final: Path) -> None:
        source = self._place(final.name)
        names = [posixpath.relpath(name, source) for name in self._fs.find(source)]
        for name in sorted(names, key=lambda name: (name == MARKER, name)):
            (final / name).parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(posixpath.join(source, name), str(final / name))

    def _place(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)

"""Where rows come from: jsonl, json, csv and parquet files, Hugging Face datasets on disk or by name, reasoning-gym tasks.

A source is `PLACE[?option=value&...]`:

    rows.jsonl, rows.json, rows.csv, rows.parquet          files; every cell of a csv is text
    folder, owner/name[?split=test&subset=main]            through the datasets library; the split is train where none is given
    reasoning_gym:TASK[?size=1000&seed=0&...]              generated; further options are the task's own
"""

import csv
import difflib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from configs.rules import ConfigError

MAX_LISTED = 5  # faulty rows that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a source holds."""

    stem: str  # short name, for ids
    unit: str  # "line" or "row": what the numbers count, from 1
    rows: Sequence[tuple[int, Any]]  # number and content


def read_rows(source: str, key: str) -> Rows:
    """Read all rows of a source.

    Args:
        source: as in the module's docstring.
        key: configuration key that names it, for errors.

    Raises:
        ConfigError: it is not there, cannot be read, or holds nothing; broken lines are named.
    """
    place, _, query = source.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    path = Path(place).expanduser()
    stem, unit = path.stem, "row"
    if place.startswith("reasoning_gym:"):
        stem = place.partition(":")[2]
        rows = _generated(stem, options, key)
    elif path.suffix in FILES:
        if options or not path.is_file():
            raise ConfigError(f"{key} must name an existing file, got {source}. Check the path (a file takes no options).")
        unit = "line" if path.suffix in (".jsonl", ".csv") else "row"
        rows = _guarded(lambda: FILES[path.suffix](path, key), source, key)
    else:
        if unknown := sorted(set(options) - {"split", "subset"}):
            raise ConfigError(f"{key} must have the options split and subset, got {unknown[0]} in {source}. Correct it.")
        rows = _guarded(lambda: _hugging_face(path, place, options), source, key)
    if not rows:
        raise ConfigError(f"{key} must have at least one row, got none in {source}. Give another source.")
    return Rows(stem=stem, unit=unit, rows=rows)


def listed(faults: Sequence[str]) -> str:
    """Join the first few faults."""
    more = f"; {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
    return "; ".join(faults[:MAX_LISTED]) + more


def _guarded(read: Callable[[], list[tuple[int, Any]]], source: str, key: str) -> list[tuple[int, Any]]:
    try:
        return read()
    except ConfigError:
        raise
    except (OSError, ValueError, _dataset_errors()) as error:
        cause = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{key} must be a file, a dataset on disk or a dataset's name that can be reached, got {source} ({cause}). Check the name."
        ) from None


def _dataset_errors() -> type[Exception]:
    from datasets.exceptions import DatasetsError

    return DatasetsError


def _jsonl(path: Path, key: str) -> list[tuple[int, Any]]:
    rows, broken = [], []
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                rows.append((line, json.loads(text)))
            except json.JSONDecodeError as error:
                broken.append(f"line {line}: {error.msg}")
    if broken:
        raise ConfigError(
            f"{key} must be one JSON object per line, got {len(broken)} broken lines in {path} ({listed(broken)}). Mend them."
        )
    return rows


def _json(path: Path, key: str) -> list[tuple[int, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ConfigError(f"{key} must be a list of objects in {path}, got {type(found).__name__}. Write a list, or one object per line.")
    return list(enumerate(found, start=1))


def _csv(path: Path, key: str) -> list[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows: list[tuple[int, Any]] = [(reader.line_num, row) for row in reader]
    broken = [f"line {line}: not {len(reader.fieldnames or ())} cells" for line, row in rows if None in row or None in row.values()]
    if broken:
        raise ConfigError(f"{key} must have one cell per column in {path}, got {len(broken)} rows without ({listed(broken)}). Mend them.")
    return rows


def _parquet(path: Path, key: str) -> list[tuple[int, Any]]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    return _numbered(load_dataset("parquet", data_files=str(path), split="train"))


FILES: dict[str, Callable[[Path, str], list[tuple[int, Any]]]] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet
}  # fmt: skip


def _hugging_face(path: Path, name: str, options: Mapping[str, str]) -> list[tuple[int, Any]]:
    """Load what `save_to_disk` wrote, a folder of data files, or a dataset of the hub."""
    from datasets import DatasetDict, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    split = options.get("split", "train")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict) and split not in saved:
            raise ValueError(f"its splits are {', '.join(map(str, saved))}, not {split}")
        return _numbered(saved[split] if isinstance(saved, DatasetDict) else saved)
    return _numbered(load_dataset(str(path) if path.is_dir() else name, options.get("subset"), split=split))


def _numbered(dataset: Any) -> list[tuple[int, Any]]:
    return list(enumerate(dataset.to_list(), start=1))


def _generated(task: str, options: Mapping[str, str], key: str) -> list[tuple[int, Any]]:
    """Generate entries of a reasoning-gym task: question, answer, metadata, and the question as the prompt."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of what it imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        raise ConfigError(
            f"{key} must name a task of reasoning-gym, got {task}. {f'Did you mean {near[0]}?' if near else 'See its list of tasks.'}"
        )
    wanted = {"size": 1000, "seed": 0} | {name: yaml.safe_load(value) for name, value in options.items()}
    try:
        entries = list(reasoning_gym.create_dataset(task, **wanted))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{key} must give {task} options that it takes, got {wanted} ({error}). Correct them.") from None
    return [(number, {"prompt": entry["question"], **entry}) for number, entry in enumerate(entries, start=1)]

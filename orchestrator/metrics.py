"""What a run reports: metrics.jsonl, TensorBoard, one line per step, a table of samples, and trained.jsonl: what each step trained.

Names as in README, "The metrics".
"""

import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from orchestrator.types import (
    EngineReport,
    Group,
    Published,
    Ref,
    Reward,
    ScoredGroup,
    StepMetrics,
)

OpenGroup = Callable[[Ref], Awaitable[Group]]
SHOWN_SAMPLES = 4


class ScalarWriter(Protocol):
    """TensorBoard's writer, as far as it is used."""

    def add_scalar(self, tag: str, data: float, step: int) -> Any: ...

    def close(self) -> None: ...


class Clock:
    """Seconds of one step and of its parts."""

    def __init__(self, enter: Callable[[str], None]) -> None:
        """Start; `enter` hears of every part that begins."""
        self._start, self._enter = time.monotonic(), enter
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time one part; again where it is done twice."""
        self._enter(part)
        start = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """Report the parts, the whole step, and what lies outside of the parts."""
        step = time.monotonic() - self._start
        parts = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        return {**parts, "time/step_s": step, "time/other_s": step - sum(self._parts.values())}


class RunLog:
    """Writes what a run reports; `open_group` fetches a group for the table of samples."""

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int,
        table_every: int,
        open_group: OpenGroup,
        writer: ScalarWriter,
        console: Console,
    ) -> None:
        self._path, self._trained = folder / "metrics.jsonl", folder / "trained.jsonl"
        self._num_steps, self._table_every = num_steps, table_every
        self._open_group, self._writer, self._console = open_group, writer, console
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=num_steps)
        self._warned: set[str] = set()
        self._progress.start()

    def begin(self, done: int, notes: Sequence[str]) -> None:
        """Open the records after `done` steps; lines of steps that a crash undid are dropped."""
        for path in (self._path, self._trained):
            kept = []
            if done and path.is_file():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= done]
            scratch = path.with_suffix(".part")
            scratch.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            scratch.replace(path)
        self._progress.update(self._task, completed=done)
        if done:
            self._console.print(f"resumed after step {done}", highlight=False)
        for note in notes:
            self.note(note)

    def note(self, sentence: str) -> None:
        """Tell people something that is not a number."""
        self._console.print(sentence, style="yellow", highlight=False, markup=False)

    async def step(self, step: int, metrics: StepMetrics, groups: Sequence[ScoredGroup]) -> None:
        """Record one step and what it trained; every few steps show some samples."""
        self._write(step, metrics)
        trained = {"step": step, "draws": [g.draw.number for g in groups], "prompts": [g.draw.prompt.id for g in groups]}
        _append(self._trained, trained)
        self._warn_of_invalid(groups)
        self._console.print(step_line(step, self._num_steps, metrics), highlight=False)
        self._progress.update(self._task, completed=step)
        if self._table_every and (step == 1 or step % self._table_every == 0):
            self._console.print(await self._table(step, groups[0]))

    def evaluation(self, step: int, metrics: StepMetrics) -> None:
        """Record one evaluation."""
        if not metrics:
            return
        self._write(step, metrics)
        self._console.print(evaluation_line(step, metrics), highlight=False)

    def close(self) -> None:
        """Flush everything."""
        self._progress.stop()
        self._writer.close()

    def _write(self, step: int, metrics: StepMetrics) -> None:
        _append(self._path, {"step": step, **metrics})
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _warn_of_invalid(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            for reward in group.rewards:
                if not reward.valid and reward.detail and reward.detail not in self._warned and len(self._warned) < 10:
                    self._warned.add(reward.detail)
                    prompt = group.draw.prompt.id
                    self._console.print(f"[yellow]a reward is invalid ({reward.cause}) for {prompt}:[/] {reward.detail}")

    async def _table(self, step: int, scored: ScoredGroup) -> Table:
        group = await self._open_group(scored.group_ref)
        table = Table(title=f"samples at step {step}", title_justify="left")
        for column in ("prompt", "response", "reward"):
            table.add_column(column, overflow="fold")
        for sample, reward in list(zip(group.samples, scored.rewards, strict=True))[:SHOWN_SAMPLES]:
            table.add_row(repr(_tail(scored.draw.prompt.text)), repr(sample.text), f"{reward.value:.3g}")
        return table


def step_line(step: int, num_steps: int, metrics: StepMetrics) -> str:
    """Write one step as a plain line."""
    shown = [("reward", "reward/mean", ".3f"), ("kl", "kl/ref", ".4f"), ("len", "response_length/mean", ".1f"),
             ("grad", "optim/grad_norm", ".2f"), ("mismatch", "mismatch/logprob_abs_diff", ".1e"),
             ("rollout", "time/rollout_s", ".1fs"), ("learn", "time/learner_s", ".1fs"),
             ("sync", "time/weight_sync_s", ".2fs"), ("step", "time/step_s", ".1fs")]  # fmt: skip
    parts = [
        f"{label} {metrics[name]:{form.rstrip('s')}}{'s' if form.endswith('s') else ''}"
        for label, name, form in shown
        if name in metrics
    ]
    return f"step {step:>4}/{num_steps}  " + "  ".join(parts)


def evaluation_line(step: int, metrics: StepMetrics) -> str:
    """Write one evaluation as a plain line."""
    shown, prompts, failed = [], 0, 0.0
    for place in sorted({key.rpartition("/")[0] for key in metrics}):
        values = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.rpartition("/")[0] == place}
        rates = [f", {name} {value:.3f}" for name, value in values.items() if "@" in name and not name.endswith("_stderr")]
        shown.append(
            f"{place.removeprefix('eval/')} {values['reward_mean']:.3f} ± {values['reward_stderr']:.3f}{''.join(rates)}"
        )
        prompts, failed = max(prompts, int(values["num_prompts"])), failed + values["failed"]
    lost = f"; {failed:.0f} prompts failed" if failed else ""
    return f"eval at step {step}: {'; '.join(shown)} (mean reward over {prompts} held-out prompts{lost})"


def group_metrics(groups: Sequence[ScoredGroup], *, version: int) -> dict[str, float]:
    """Summarise what was sampled and scored for one step.

    Args:
        groups: P scored groups.
        version: weight version that is about to be trained.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    valid = [reward.value for reward in rewards if reward.valid]
    values = [[reward.value for reward in group.rewards if reward.valid] for group in groups]
    constant = [len(set(row)) == 1 for row in values]
    lengths = [num for group in groups for num in group.facts.num_tokens]
    truncated = [cut for group in groups for cut in group.facts.truncated]
    staleness = [version - group.facts.started_version for group in groups]
    return {
        "reward/mean": statistics.fmean(valid),
        "reward/std": statistics.pstdev(valid),
        "reward/min": min(valid),
        "reward/max": max(valid),
        "reward/invalid_frac": 1 - len(valid) / len(rewards),
        **{f"reward/{cause}": sum(reward.cause == cause for reward in rewards) for cause in ("timeout", "error", "not_applicable")},
        **_part_means(rewards),
        "group/zero_std_frac": statistics.fmean(constant),
        "group/solve_all_frac": statistics.fmean(c and row[0] == max(valid) for c, row in zip(constant, values, strict=True)),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "response/truncated_frac": statistics.fmean(truncated),
        "staleness/mean": statistics.fmean(staleness),
        "staleness/max": max(staleness),
        "rollout/version_span": max(group.facts.newest_version - group.facts.started_version for group in groups),
        "time/generate_s": max(group.facts.generate_s for group in groups),
    }


def _part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Average each reward function and logged extra over the samples that have it."""
    names = sorted({name for reward in rewards for name in reward.parts})
    return {f"reward/{name}/mean": statistics.fmean(r.parts[name] for r in rewards if name in r.parts) for name in names}


def sync_metrics(published: Published, reports: Sequence[EngineReport]) -> dict[str, float]:
    """Summarise one weight sync."""
    return {
        "sync/version": published.version.steps,
        "sync/mib": published.num_bytes / 2**20,
        "sync/engines": len(reports),
        "sync/probe_abs_diff": max(report.probe_abs_diff for report in reports),
        "time/weight_sync_paused_s": max(report.paused_s for report in reports),
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _tail(text: str, length: int = 60) -> str:
    return text if len(text) <= length else "…" + text[-length:]

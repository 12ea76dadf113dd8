"""THE loop. Synchronous and asynchronous training are the same lines: staleness is a number in the feed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from orchestrator.checkpoint import LEARNER, RunState
from orchestrator.evaluate import Evaluator
from orchestrator.feed import MAX_LOSSES, Feed
from orchestrator.metrics import Clock, RunLog, group_metrics, sync_metrics
from orchestrator.ports import GroupsLost, Learner, Rollout
from orchestrator.resume import ResumeError, Start
from orchestrator.saver import Saver
from orchestrator.status import Status
from orchestrator.types import ScoredGroup, StepMetrics, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What build.py puts together."""

    rollout: Rollout
    learner: Learner
    feed: Feed
    evaluator: Evaluator
    log: RunLog
    status: Status
    saver: Saver
    start: Start  # where the run begins
    chaos: Callable[[int], None]  # faults on purpose, by step


async def train(config: Config, parts: Parts) -> None:
    """Train for `train.num_steps` steps, evaluate before, during and after, and export the final policy."""
    feed, log, status = parts.feed, parts.log, parts.status
    done, evaluated = await restore(parts)
    version, _ = await sync_weights(parts, steps=done)
    check_resumed(config, parts.start, version)
    if not evaluated:
        await evaluate(config, parts, step=done)
    for step in range(done + 1, config.train.num_steps + 1):
        clock = Clock(lambda part, step=step: status.enter(part, step))
        feed.refill(version.steps)
        parts.chaos(step)
        groups, learned = await take_and_learn(parts, clock)
        feed.commit(groups)
        with clock("weight_sync"):
            version, synced = await sync_weights(parts, steps=step)
        sampled = group_metrics(groups, version=step - 1)
        counted = {**feed.metrics(), **status.metrics()}
        await log.step(step, {**sampled, **learned, **synced, **counted, **clock.metrics()}, groups)
        await evaluate(config, parts, step=step)
        if parts.saver.due(step, config.train.num_steps):
            status.enter("checkpoint", step)
            await parts.saver.save(RunState(step=step, digest=version.digest, evaluated=True, feed=feed.state()), parts.learner)
    status.enter("export", config.train.num_steps)
    await parts.learner.export(Path(config.train.output_dir) / "policy")


async def take_and_learn(parts: Parts, clock: Clock) -> tuple[list[ScoredGroup], StepMetrics]:
    """Take P groups and train on them; groups that went with a node are drawn again first."""
    losses = 0
    while True:
        with clock("rollout"):
            groups = await parts.feed.take()
        try:
            with clock("learner"):
                return groups, await parts.learner.step(groups)
        except GroupsLost as error:
            losses += 1
            if losses == MAX_LOSSES:
                raise
            parts.feed.redo(groups, error.draws)


async def restore(parts: Parts) -> tuple[int, bool]:
    """Go to where the run begins; returns the steps that are done, and whether the last one's evaluation is."""
    folder, state = parts.start.folder, parts.start.state
    parts.log.begin(state.step if state else 0, parts.start.notes)
    if folder is None or state is None:
        return 0, False
    parts.status.enter("resume", state.step)
    await parts.learner.load(folder / LEARNER)
    parts.feed.restore(state.feed)
    return state.step, state.evaluated


def check_resumed(config: Config, start: Start, version: WeightVersion) -> None:
    """Compare the weights that the engines serve now with those that were saved."""
    if start.state is not None and not config.train.resume_allow and version.digest != start.state.digest:
        raise ResumeError(
            f"a resumed run must go on with the weights that were saved, got digest {version.digest} instead of {start.state.digest} from "
            f"{start.folder}. Check that model.path and model.dtype are as they were."
        )


async def sync_weights(parts: Parts, *, steps: int) -> tuple[WeightVersion, StepMetrics]:
    """Publish the learner's weights as version `steps` while every engine loads them; return once all have proven it."""
    publication = parts.learner.publish(steps)
    reports = await parts.rollout.load(publication)
    published = await publication.published()
    return published.version, sync_metrics(published, reports)


async def evaluate(config: Config, parts: Parts, *, step: int) -> None:
    """Evaluate where the configuration asks for it."""
    last = config.train.num_steps
    if step in (0, last) or (config.eval.every and step % config.eval.every == 0):
        parts.status.enter("evaluation", step)
        parts.log.evaluation(step, await parts.evaluator.run())

"""THE loop. Synchronous and asynchronous training are the same lines: staleness is a number in the feed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from orchestrator.checkpoint import Checkpoints
from orchestrator.evaluate import Evaluator
from orchestrator.feed import MAX_LOSSES, Feed
from orchestrator.metrics import Clock, RunLog, group_metrics, sync_metrics
from orchestrator.ports import GroupsLost, Learner, Rollout
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
    checkpoints: Checkpoints
    chaos: Callable[[int], None]  # faults on purpose, by step


async def train(config: Config, parts: Parts) -> None:
    """Train for `train.num_steps` steps, evaluate before, during and after, and export the final policy."""
    feed, log, status = parts.feed, parts.log, parts.status
    done = await resume(config, parts)
    version, _ = await sync_weights(parts, steps=done)
    if done == 0:
        await evaluate(config, parts, step=0)
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
        if parts.checkpoints.due(step, config.train.num_steps):
            status.enter("checkpoint", step)
            await parts.checkpoints.save(step, version, parts.learner, feed.state())
        await evaluate(config, parts, step=step)
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


async def resume(config: Config, parts: Parts) -> int:
    """Go on from a checkpoint where the configuration asks for it; returns the steps that are done."""
    state = parts.checkpoints.find(config.train.resume, config.train.resume_allow)
    parts.log.begin(state.step if state else 0, parts.checkpoints.incomplete())
    if state is None:
        return 0
    parts.status.enter("resume", state.step)
    await parts.learner.load(state.folder / "learner")
    parts.feed.restore(state.feed)
    return state.step


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

"""THE loop. Synchronous and asynchronous training are the same lines: staleness is a number in the feed."""

from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from orchestrator.checkpoint import Checkpoints
from orchestrator.evaluate import Evaluator
from orchestrator.feed import Feed
from orchestrator.metrics import Clock, RunLog, group_metrics, sync_metrics
from orchestrator.ports import Learner, Rollout
from orchestrator.types import StepMetrics, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What build.py puts together."""

    rollout: Rollout
    learner: Learner
    feed: Feed
    evaluator: Evaluator
    log: RunLog
    checkpoints: Checkpoints


async def train(config: Config, parts: Parts) -> None:
    """Train for `train.num_steps` steps, evaluate before, during and after, and export the final policy."""
    feed, learner, log = parts.feed, parts.learner, parts.log
    done = await resume(config, parts)
    version, _ = await sync_weights(parts, steps=done)
    if done == 0:
        await evaluate(config, parts, step=0)
    for step in range(done + 1, config.train.num_steps + 1):
        clock = Clock()
        feed.refill(version.steps)
        with clock("rollout"):
            groups = await feed.take()
        with clock("learner"):
            learned = await learner.step(groups)
        feed.commit(groups)
        with clock("weight_sync"):
            version, synced = await sync_weights(parts, steps=step)
        sampled = group_metrics(groups, version=step - 1)
        await log.step(step, {**sampled, **learned, **synced, **feed.metrics(), **clock.metrics()}, groups)
        if parts.checkpoints.due(step, config.train.num_steps):
            await parts.checkpoints.save(step, version, learner, feed.state())
        await evaluate(config, parts, step=step)
    await learner.export(Path(config.train.output_dir) / "policy")


async def resume(config: Config, parts: Parts) -> int:
    """Go on from a checkpoint where the configuration asks for it; returns the steps that are done."""
    state = parts.checkpoints.find(config.train.resume, config.train.resume_allow)
    parts.log.begin(state.step if state else 0, parts.checkpoints.incomplete())
    if state is None:
        return 0
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
        parts.log.evaluation(step, await parts.evaluator.run())

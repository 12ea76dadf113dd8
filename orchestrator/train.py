"""THE loop. Synchronous and asynchronous training are the same lines: staleness is a number in the feed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from orchestrator.stop import Stop, Stopped
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
    stop: Stop
    chaos: Callable[[int], None]  # faults on purpose, by step


async def train(config: Config, parts: Parts) -> None:
    """Train for `train.num_steps` steps, evaluate before, during and after, and export the final policy.

    Raises:
        Stopped: somebody asked for it; where the run stood is saved.
    """
    here = await parts.stop.unless_asked(restore(config, parts))
    try:
        here = await evaluate(config, parts, here)
        while here.step < config.train.num_steps:
            here = await train_step(config, parts, here)
            here = await evaluate(config, parts, here)
            if parts.saver.due(here.step, config.train.num_steps):
                await save(parts, here)
    except Stopped:
        if here.step > parts.saver.newest_step:
            await save(parts, here)
        raise Stopped(f"stopped after step {here.step}") from None
    parts.status.enter("export", here.step)
    await parts.learner.export(Path(config.train.output_dir) / "policy")


async def train_step(config: Config, parts: Parts, here: RunState) -> RunState:
    """Do one step; returns where the run stands after it."""
    feed, step = parts.feed, here.step + 1
    clock = Clock(lambda part: parts.status.enter(part, step))
    feed.refill(here.step)
    parts.chaos(step)
    groups, learned = await take_and_learn(parts, clock)
    feed.commit(groups)
    with clock("weight_sync"):
        version, synced = await sync_weights(parts, steps=step)
    sampled = group_metrics(groups, version=here.step)
    counted = {**feed.metrics(), **parts.status.metrics()}
    await parts.log.step(step, {**sampled, **learned, **synced, **counted, **clock.metrics()}, groups)
    return RunState(step=step, digest=version.digest, evaluated=False, feed=feed.state())


async def take_and_learn(parts: Parts, clock: Clock) -> tuple[list[ScoredGroup], StepMetrics]:
    """Take P groups and train on them; groups that went with a node are drawn again first."""
    losses = 0
    while True:
        with clock("rollout"):
            groups = await parts.stop.unless_asked(parts.feed.take())
        try:
            with clock("learner"):
                return groups, await parts.learner.step(groups)
        except GroupsLost as error:
            losses += 1
            if losses == MAX_LOSSES:
                raise
            parts.feed.redo(groups, error.draws)


async def restore(config: Config, parts: Parts) -> RunState:
    """Go to where the run begins, with its weights in every engine."""
    folder, state = parts.start.folder, parts.start.state
    done = state.step if state else 0
    parts.log.begin(done, parts.start.notes)
    if folder is not None and state is not None:
        parts.status.enter("resume", done)
        await parts.learner.load(folder / LEARNER)
        parts.feed.restore(state.feed)
    version, _ = await sync_weights(parts, steps=done)
    check_resumed(config, parts.start, version)
    return state or RunState(step=0, digest=version.digest, evaluated=False, feed=parts.feed.state())


async def save(parts: Parts, here: RunState) -> None:
    """Write a checkpoint of where the run stands."""
    parts.status.enter("checkpoint", here.step)
    await parts.saver.save(replace(here, feed=parts.feed.state()), parts.learner)


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


async def evaluate(config: Config, parts: Parts, here: RunState) -> RunState:
    """Evaluate where the configuration asks for it, unless that is done already."""
    last, every = config.train.num_steps, config.eval.every
    if not here.evaluated and (here.step in (0, last) or (every and here.step % every == 0)):
        parts.status.enter("evaluation", here.step)
        parts.log.evaluation(here.step, await parts.stop.unless_asked(parts.evaluator.run()))
    return replace(here, evaluated=True)

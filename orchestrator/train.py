"""THE loop. Synchronous and asynchronous training are the same lines: staleness is a number in the feed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema import Config
from orchestrator.checkpoint import LEARNER, RunState
from orchestrator.evaluate import Evaluator
from orchestrator.feed import MAX_LOSSES, Feed
from orchestrator.metrics import Clock, RunLog, group_metrics, sync_metrics
from orchestrator.ports import GroupsLost, Learner, LearnerLost, Rollout
from orchestrator.resume import ResumeError, Start, find_again
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
    """Train for `train.num_steps` steps; a learner that dies is started again and goes on from the newest checkpoint.

    Raises:
        Stopped: somebody asked for it; where the run stood is saved.
        LearnerLost: it died once more than `train.max_restarts`.
    """
    start, restarts = parts.start, 0
    while True:
        try:
            return await train_from(config, parts, start)
        except LearnerLost as error:
            restarts += 1
            if restarts > config.train.max_restarts:
                raise
            start = await revive(config, parts, f"{error} It is started again ({restarts} of {config.train.max_restarts} times).")


async def train_from(config: Config, parts: Parts, start: Start) -> None:
    """Train from a checkpoint or the beginning, evaluate before, during and after, and export the final policy."""
    stop, saver = parts.stop, parts.saver
    here = await stop.unless_asked(restore(config, parts, start))
    try:
        here = await evaluate(config, parts, here)
        while here.step < config.train.num_steps:
            here = await train_step(config, parts, here)
            here = await evaluate(config, parts, here)
            if saver.due(here, config.train.num_steps):
                await saver.begin(replace(here, feed=parts.feed.state()), parts.learner)
    except Stopped:
        parts.status.enter("checkpoint", here.step)
        await saver.settle()
        if here.step > saver.newest_step:
            await saver.begin(replace(here, feed=parts.feed.state()), parts.learner)
        await saver.finish()
        raise Stopped(f"stopped after step {here.step}") from None
    parts.status.enter("export", here.step)
    await parts.learner.export(Path(config.train.output_dir) / "policy")
    await saver.finish()


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
    return replace(here, step=step, digest=version.digest, evaluated=False, feed=feed.state())


async def take_and_learn(parts: Parts, clock: Clock) -> tuple[list[ScoredGroup], StepMetrics]:
    """Take P groups and train on them; groups that went with a node are drawn again first."""
    losses = 0
    while True:
        with clock("rollout"):
            groups = await parts.stop.unless_asked(parts.feed.take())
        with clock("checkpoint"):
            await parts.saver.settle()
        try:
            with clock("learner"):
                return groups, await parts.learner.step(groups)
        except GroupsLost as error:
            losses += 1
            if losses == MAX_LOSSES:
                raise
            parts.feed.redo(groups, error.draws)


async def restore(config: Config, parts: Parts, start: Start) -> RunState:
    """Go to where the run begins, with its weights in every engine."""
    done = start.state.step
    parts.log.begin(done, start.notes)
    parts.status.enter("resume" if start.folder else "start", done)
    if start.folder is not None:
        await parts.learner.load(start.folder / LEARNER)
    await parts.feed.restore(start.state.feed)
    version, _ = await sync_weights(parts, steps=done)
    if start.folder is not None and not config.train.resume_allow:
        check_resumed(start, version)
    return replace(start.state, digest=version.digest)


async def revive(config: Config, parts: Parts, why: str) -> Start:
    """Start the learner again; returns where the run goes on."""
    parts.log.note(why)
    parts.status.enter("restart of the learner", parts.saver.newest_step)
    with suppress(LearnerLost):
        await parts.saver.settle()
    await parts.stop.unless_asked(parts.learner.restart())
    return find_again(Path(config.train.output_dir), parts.start)


def check_resumed(start: Start, version: WeightVersion) -> None:
    """Compare the weights that the engines serve now with those that were saved."""
    if version.digest != start.state.digest:
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
        metrics = await parts.stop.unless_asked(parts.evaluator.run())
        parts.log.evaluation(here.step, metrics)
        here = parts.saver.judge(here, metrics)
    return replace(here, evaluated=True)

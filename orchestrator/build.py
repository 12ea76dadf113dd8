"""Composition root: Config -> parts. The one file that knows the concrete classes of the other rooms."""

import asyncio
import functools
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from actors import process
from actors.chaos import Chaos
from actors.environments import check_environment
from actors.pool import Pool
from actors.reference import ReferenceWorker
from actors.reward_model import RewardModelWorker, check_reward_model
from actors.rewards.worker import RewardWorker, check_rewards, group_timeout_s
from actors.roles import ReferencePool, RewardPool, RewardSum, RolloutPool
from actors.rollout import RolloutWorker
from actors.worker import Role, last_line
from configs.load import flat, to_yaml
from configs.rules import ConfigError, held_out, reward_functions, training
from configs.schema import Config
from learner.group import LearnerGroup
from orchestrator.capacity import needs_reference
from orchestrator.cluster import Places, connect, reserve
from orchestrator.evaluate import Evaluator
from orchestrator.feed import Feed, Scoring
from orchestrator.metrics import RunLog
from orchestrator.mirror import Mirror
from orchestrator.origin import origin
from orchestrator.prompts import Dataset, MixedStream, PromptStream, read_prompts
from orchestrator.resume import Start, find
from orchestrator.saver import Saver
from orchestrator.status import Status
from orchestrator.stop import Stop, Stopped
from orchestrator.train import Parts, train
from orchestrator.types import Group, Ref, Sampling, ScoredGroup

RUN_ERRORS = (RuntimeError, OSError, RayError, ExceptionGroup)  # what can end a run that had started


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prompts of a run."""

    train: list[Dataset]
    held_out: dict[str, Dataset]  # by name
    origin: dict[str, str]  # digests of model, tokenizer and training prompts


def check(config: Config) -> Data:
    """Check everything that can be checked before an actor starts; returns the tokenised data.

    Raises:
        ConfigError: model, dataset or reward function cannot be used.
    """
    tokenizer = _check_parts(config)
    datasets = read_prompts(training(config), "data.train", config, tokenizer)
    prompts = [prompt for dataset in datasets for prompt in dataset.prompts]
    return Data(train=datasets, held_out=_held_out(config, tokenizer), origin=origin(config.model.path, tokenizer, prompts))


def _check_parts(config: Config) -> Any:
    """Check model and rewards; returns the tokenizer."""
    tokenizer = _load_tokenizer(config)
    _check_context(config)
    check_rewards(config.reward)
    check_environment(config.rollout)
    if config.reward_model.path is not None:
        check_reward_model(config)
    return tokenizer


def _held_out(config: Config, tokenizer: Any) -> dict[str, Dataset]:
    return {
        name: read_prompts({source: 1.0}, f"eval.data.{name}".rstrip("."), config, tokenizer)[0]
        for name, source in held_out(config).items()
    }


async def run(config: Config, console: Console) -> None:
    """Check, connect, start every part, train, and leave no process behind.

    Raises:
        ConfigError: before an actor starts.
        Stopped: a signal asked for it.
        WorkerError, LearnerError, FeedError: what ended the run.
    """
    data = check(config)
    folder = Path(config.train.output_dir).absolute()
    mirror = Mirror(config.checkpoint.mirror) if config.checkpoint.mirror else None
    if mirror is not None and config.train.resume == "auto":
        mirror.pull(folder)
    start = find(folder, config.train.resume, config.train.resume_allow, config=flat(config), origin=data.origin)
    _open_folder(folder, config)
    cloudpickle.register_pickle_by_value(process)  # workers call the hook before they can import our rooms
    connect(config, process.enter, functools.partial(console.print, highlight=False, markup=False))
    stop = Stop()
    _listen_to_signals(stop, console)
    console.print(f"run folder {folder}; worker logs in {folder / 'logs'}", highlight=False)
    try:
        async with AsyncExitStack() as stack:
            parts = await stop.unless_asked(_start(config, data, start, stop, console, stack))
            await train(config, parts)
    finally:
        ray.shutdown()
    console.print(f"policy written to {folder / 'policy'}", highlight=False)


def _open_folder(folder: Path, config: Config) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"train.output_dir must be a folder that can be written, got {folder} ({error.strerror}). Name another."
        ) from None


def _listen_to_signals(stop: Stop, console: Console) -> None:
    """End the run in order at the first SIGINT or SIGTERM, at once at the second; after Ray, which sets handlers of its own."""
    task = asyncio.current_task()
    assert task is not None

    def heard(name: str) -> None:
        if stop.asked:
            task.cancel()
            return
        console.print(f"{name}: the run ends and saves where it stands; once more ends it at once", highlight=False)
        stop.ask()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, heard, number.name)


async def _start(
    config: Config, data: Data, start: Start, stop: Stop, console: Console, stack: AsyncExitStack
) -> Parts:
    """Make every part, start those with workers together, and leave their end to the stack."""
    folder = Path(config.train.output_dir).absolute()
    log_dir = folder / "logs"
    report = functools.partial(console.print, highlight=False, markup=False)
    places = await reserve(config)
    stack.callback(places.free)
    pools, rollout, rewarder = _pools(config, _roles(config, log_dir, places), report, stack)
    reference = ReferencePool(pools["reference"]) if needs_reference(config) else None
    learner = LearnerGroup(
        config,
        runtime_env=lambda name: process.runtime_env(name=name, log_dir=log_dir, threads=config.learner.threads),
        strategies=places.learner,
    )
    stack.callback(learner.close)
    feed = _feed(config, data, Scoring(rollout, rewarder, reference, _sampling(config)))
    status = Status(folder, {**pools, "learner": learner, "feed": feed}, report)
    stack.push(lambda kind, error, trace: status.end(_how_it_ended(error)))
    keeping = asyncio.create_task(status.keep())
    stack.callback(keeping.cancel)
    async with asyncio.TaskGroup() as starting:
        for part in (learner, rollout, rewarder, *([reference] if reference else [])):
            starting.create_task(part.start())
    stack.push_async_callback(feed.close)
    beside = {"config": flat(config), "origin": data.origin}
    saver = Saver(folder, beside=beside, settings=config.checkpoint, begun=start.state.step, report=report)
    stack.push_async_callback(saver.close)
    log = _run_log(config, folder, console)
    stack.callback(log.close)
    return Parts(
        rollout=rollout,
        learner=learner,
        feed=feed,
        evaluator=_evaluator(config, rollout, rewarder, data.held_out),
        log=log,
        status=status,
        chaos=Chaos(config.debug.chaos, pools, report),
        saver=saver,
        start=start,
        stop=stop,
    )


async def evaluate(config: Config, console: Console) -> dict[str, float]:
    """Start engines on the weights of model.path and the rewards, evaluate, and leave no process behind.

    Raises:
        ConfigError: before an actor starts.
        WorkerError: what ended the evaluation.
    """
    datasets = _held_out(config, _check_parts(config))
    folder = Path(config.train.output_dir).absolute() / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    report = functools.partial(console.print, highlight=False, markup=False)
    cloudpickle.register_pickle_by_value(process)
    connect(config, process.enter, report)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)  # after Ray, which sets handlers of its own
    try:
        async with AsyncExitStack() as stack:
            _, rollout, rewarder = _pools(config, _roles(config, folder / "logs", Places()), report, stack)
            async with asyncio.TaskGroup() as starting:
                for part in (rollout, rewarder):
                    starting.create_task(part.start())
            return await _evaluator(config, rollout, rewarder, datasets).run()
    finally:
        ray.shutdown()


def _pools(
    config: Config, roles: list[Role], report: Callable[[str], None], stack: AsyncExitStack
) -> tuple[dict[str, Pool], RolloutPool, RewardSum]:
    """Make the pools of all roles, and the two ports that every run has; nothing is started."""
    pools = {role.name: Pool(role, report) for role in roles}
    for pool in pools.values():
        stack.callback(pool.stop)
    rollout = RolloutPool(pools["rollout"], dtype=config.model.dtype, load_timeout_s=config.rollout.timeout_s)
    weights = {"reward": 1.0, "reward_model": config.reward_model.weight}
    return pools, rollout, RewardSum([(weight, RewardPool(pools[name])) for name, weight in weights.items() if name in pools])


def export(config: Config, checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint's learner folder as a Hugging Face folder, in this process alone."""
    from learner.export import export_checkpoint

    export_checkpoint(config, checkpoint, folder)


def _feed(config: Config, data: Data, scoring: Scoring) -> Feed:
    return Feed(
        MixedStream(
            [PromptStream(d.prompts, shuffle=config.data.shuffle, seed=config.data.seed) for d in data.train],
            [d.weight for d in data.train],
        ),
        scoring,
        num_groups=config.train.num_steps * config.train.prompts_per_step,
        prompts_per_step=config.train.prompts_per_step,
        max_staleness=config.train.max_staleness,
        max_refill=config.train.max_refill,
        has_signal=_has_signal,
    )


def _roles(config: Config, log_dir: Path, places: Places) -> list[Role]:
    rollout, reward, reference = config.rollout, config.reward, config.reference
    cluster = config.cluster
    started = {
        "start_timeout_s": cluster.start_timeout_s, "heartbeat_timeout_s": cluster.heartbeat_timeout_s, "log_dir": log_dir,
    }  # fmt: skip
    roles = [
        Role(
            name="rollout", kind=RolloutWorker, arguments=(config,), num_workers=rollout.num_workers, num_cpus=rollout.num_cpus,
            num_gpus=rollout.num_gpus, threads=rollout.threads, max_calls=None, timeout_s=rollout.timeout_s,
            strategies=places.rollout, **started,
        ),
    ]  # fmt: skip
    if reward_functions(reward):
        roles.append(
            Role(
                name="reward", kind=RewardWorker, arguments=(reward,), num_workers=reward.num_workers, num_cpus=reward.num_cpus,
                num_gpus=0.0, threads=1, max_calls=1, timeout_s=group_timeout_s(reward, rollout.num_generations), **started,
            )
        )  # fmt: skip
    roles += [
        Role(
            name=name, kind=kind, arguments=(config,), num_workers=part.num_workers, num_cpus=part.num_cpus,
            num_gpus=part.num_gpus, threads=part.threads, max_calls=1, timeout_s=part.timeout_s, **started,
        )
        for name, kind, part, runs in (
            ("reward_model", RewardModelWorker, config.reward_model, config.reward_model.path is not None),
            ("reference", ReferenceWorker, reference, needs_reference(config)),
        )
        if runs
    ]  # fmt: skip
    return roles


def _sampling(config: Config) -> Sampling:
    return Sampling(
        num_samples=config.rollout.num_generations,
        temperature=config.rollout.temperature,
        seed=config.train.seed,
    )


def _has_signal(group: ScoredGroup) -> bool:
    from torch import tensor

    from estimators.shaping import has_signal

    rewards = group.rewards
    return bool(has_signal(tensor([[r.value for r in rewards]]), tensor([[r.valid for r in rewards]])))


def _evaluator(config: Config, rollout: RolloutPool, rewarder: RewardSum, datasets: dict[str, Dataset]) -> Evaluator:
    part, seed = config.eval, config.train.seed
    samplings = {}
    if part.sampled:
        samplings["sampled"] = Sampling(num_samples=part.num_samples, temperature=config.rollout.temperature, seed=seed)
    if part.greedy:
        samplings["greedy"] = Sampling(num_samples=1, temperature=0.0, seed=seed)
    room = 2 * config.rollout.num_workers * config.rollout.max_concurrent_samples  # engines never wait, and no group waits for long
    prompts = {name: dataset.prompts[: part.max_prompts] for name, dataset in datasets.items()}
    return Evaluator(rollout, rewarder, prompts, samplings, solved_at=part.solved_at, max_samples=room)


def _run_log(config: Config, folder: Path, console: Console) -> RunLog:
    from tensorboard.summary import Writer

    async def open_group(ref: Ref) -> Group:
        return await ref

    return RunLog(
        folder,
        num_steps=config.train.num_steps,
        table_every=config.train.sample_table_every,
        open_group=open_group,
        writer=Writer(str(folder / "tensorboard")),
        console=console,
    )


def _how_it_ended(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return str(error) if isinstance(error, Stopped) else f"failed: {first_cause(error)}"


def first_cause(error: BaseException) -> str:
    """Find the sentence that explains the end of a run: parts start together and may fail together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RayTaskError):
        return last_line(error)
    return str(error) or type(error).__name__


def _load_tokenizer(config: Config):
    from transformers import AutoTokenizer

    path = config.model.path
    if path.startswith(("/", ".", "~")) and not Path(path, "config.json").is_file():
        raise ConfigError(
            f"model.path must be a Hugging Face folder with a config.json, got {path}. "
            "Check the path (`make demo-model` prepares the demo's)."
        )
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path must be a Hugging Face folder or a hub name that can be reached, got {path} ({cause}). Check the name."
        ) from None


def _check_context(config: Config) -> None:
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)  # not every architecture has one
    if limit is not None and config.rollout.max_model_len > limit:
        raise ConfigError(
            f"rollout.max_model_len must be at most the model's context ({limit}), got {config.rollout.max_model_len}. "
            "Lower it, with data.max_prompt_tokens and rollout.max_new_tokens."
        )

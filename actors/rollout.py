"""Rollout worker: one engine, one thread that owns it, many groups in flight.

Groups join and leave the running batch continuously. A weight sync happens between two steps of the engine: what is in
flight goes on under the new weights, each token labelled with the version that sampled it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import xxhash

from actors.engine import Engine, EngineError, FinishedSample, SampleRequest
from actors.environments import Environment, load_environment
from actors.episodes import Rules, play
from configs.schema import Config
from orchestrator.types import (
    Draw,
    EngineReport,
    Group,
    GroupFacts,
    Prompt,
    Published,
    Sampling,
    WeightBucket,
    WeightVersion,
)


class RolloutWorker:
    """Ray actor around one engine; all methods are async and may overlap."""

    def __init__(self, config: Config, name: str) -> None:
        from transformers import (
            AutoTokenizer,  # heavy; the process has its log file by now
        )

        self._name = name
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        stop_token_ids = tuple(sorted({*config.rollout.stop_token_ids, *eos_token_ids(config)}))
        rollout = config.rollout
        self._make = load_environment(rollout.environment) if rollout.environment else None
        self._arguments = rollout.environment_arguments
        self._rules = Rules(max_tokens=rollout.max_new_tokens, max_turn_tokens=rollout.max_turn_tokens)
        self._loop = EngineThread(build_engine(config, stop_token_ids))
        self._version = WeightVersion(steps=0, digest="")
        self._hasher: Any = None
        self._num_tensors = 0
        self._load_started = 0.0
        self._num_calls = 0

    async def ready(self) -> str:
        """Return the worker's name once its engine stands."""
        return self._name

    def stalled_s(self) -> float:
        """Return for how long the engine has been busy with one command or step, in seconds."""
        return self._loop.stalled_s()

    async def generate(self, draw: Draw, sampling: Sampling) -> tuple[Group, GroupFacts]:
        """Sample one group."""
        started, version = time.monotonic(), self._version.steps
        self._num_calls += 1
        budget = self._rules.max_tokens
        requests = [
            SampleRequest(
                key=f"{self._num_calls}.{index}",
                prompt_token_ids=draw.prompt.token_ids,
                temperature=sampling.temperature,
                max_tokens=min(budget, self._rules.max_turn_tokens or budget),
                seed=sample_seed(sampling.seed, draw.number, index),
            )
            for index in range(sampling.num_samples)
        ]
        firsts = self._loop.sample(requests)
        samples = await asyncio.gather(
            *(
                play(asyncio.wrap_future(first), request, self._environment(draw.prompt), self._ask, self._tokenizer, self._rules)
                for first, request in zip(firsts, requests, strict=True)
            )
        )
        group = Group(draw=draw, samples=tuple(samples))
        facts = GroupFacts(
            draw=draw.number,
            num_prompt_tokens=len(draw.prompt.token_ids),
            num_tokens=tuple(int(s.loss_mask.sum()) for s in group.samples),
            truncated=tuple(s.finish_reason == "length" for s in group.samples),
            started_version=min(version, *(int(s.versions.min()) for s in group.samples)),
            newest_version=max(int(s.versions.max()) for s in group.samples),
            worker=self._name,
            generate_s=time.monotonic() - started,
        )
        return group, facts

    def _environment(self, prompt: Prompt) -> Environment | None:
        return self._make(prompt, self._tokenizer, **self._arguments) if self._make else None

    async def _ask(self, request: SampleRequest) -> FinishedSample:
        (future,) = self._loop.sample([request])
        return await asyncio.wrap_future(future)

    async def begin_load(self) -> None:
        """Stop between two steps and open a weight update."""
        self._hasher, self._num_tensors, self._load_started = xxhash.xxh3_128(), 0, time.monotonic()
        await self._loop.begin_load()

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take some tensors of the new version."""
        bucket.hash_into(self._hasher)
        self._num_tensors += len(bucket.tensors)
        await self._loop.call(lambda engine: engine.load_bucket(bucket))

    async def finish_load(self, published: Published) -> EngineReport:
        """Commit the new version, go on generating, and report what was received.

        Raises:
            EngineError: digest or number of tensors differ from the learner's, or a parameter was left as it was.
        """
        digest, version = self._hasher.hexdigest(), published.version
        if (digest, self._num_tensors) != (version.digest, published.num_tensors):
            raise EngineError(
                f"{self._name} must receive version {version.steps} as the learner sent it ({published.num_tensors} tensors, "
                f"digest {version.digest}), got {self._num_tensors} tensors, digest {digest}. The sync is repeated."
            )
        scores = await self._loop.finish_load(version, published.probe_token_ids)
        self._version = version
        return EngineReport(
            worker=self._name,
            version=version,
            num_tensors=self._num_tensors,
            probe_abs_diff=float(np.abs(scores - np.asarray(published.probe_logprobs, dtype=np.float32)).max()),
            paused_s=time.monotonic() - self._load_started,
        )


class EngineThread:
    """The only thread that touches the engine: it alternates between commands and steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[FinishedSample]] = {}
        self._loading = False
        self._broken: BaseException | None = None
        self._busy_since: float | None = None  # monotonic seconds: start of the command or step at work
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def stalled_s(self) -> float:
        """Return for how long it has been busy with one command or step, in seconds."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def sample(self, requests: Sequence[SampleRequest]) -> list["Future[FinishedSample]"]:
        """Queue samples; each future ends with its finished sample."""
        futures: list[Future[FinishedSample]] = [Future() for _ in requests]

        def add() -> None:
            for request, future in zip(requests, futures, strict=True):
                if self._broken is not None:
                    future.set_exception(self._broken)
                    continue
                try:
                    self._engine.add(request)
                except ValueError as error:  # the engine refuses this request and lives on
                    future.set_exception(error)
                else:
                    self._waiting[request.key] = future

        self._commands.put(add)
        return futures

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function on the engine's thread."""
        future: Future[Any] = Future()

        def run() -> None:
            if self._broken is not None:
                future.set_exception(self._broken)
                return
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)
                raise

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    async def begin_load(self) -> None:
        """Open a weight update and hold all steps.

        Raises:
            EngineError: the last one was not finished (its learner died): the weights are half of one version, half of another.
        """

        def begin(engine: Engine) -> None:
            if self._loading:
                raise EngineError("a weight update must be finished before the next begins, got one cut off. A new engine loads it.")
            engine.begin_load()
            self._loading = True

        await self.call(begin)

    async def finish_load(self, version: WeightVersion, probe: tuple[int, ...]) -> np.ndarray:
        """Commit a weight update, let the steps go on, and score the probe under the new weights."""

        def finish(engine: Engine) -> np.ndarray:
            engine.finish_load(version)
            self._loading = False
            return engine.score(probe)

        return await self.call(finish)

    def _run(self) -> None:
        while self._broken is None:
            try:
                self._turn()
            except BaseException as error:  # noqa: BLE001 - the engine is gone: everyone who waits must hear of it
                self._fail(error)
        while True:
            self._commands.get()()

    def _turn(self) -> None:
        idle = self._loading or not self._engine.busy()
        try:
            while True:
                self._busy_since = None
                command = self._commands.get(block=idle)
                self._busy_since = time.monotonic()
                command()
                idle = self._loading or not self._engine.busy()
        except queue.Empty:
            pass
        self._busy_since = time.monotonic()
        for sample in self._engine.step():
            self._waiting.pop(sample.key).set_result(sample)

    def _fail(self, error: BaseException) -> None:
        self._broken = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._broken.__cause__ = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._broken)
        self._waiting.clear()


def sample_seed(seed: int, draw: int, index: int) -> int:
    """Derive a sample's own seed from the run's seed, the draw number and its index in the group."""
    state = np.random.SeedSequence([seed, draw, index]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def eos_token_ids(config: Config) -> set[int]:
    """Collect every EOS of the model: its generation config's, else its config's."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    except OSError:  # the folder has no generation_config.json
        found = None
    if found is None:
        model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        found = model.get_text_config().eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def build_engine(config: Config, stop_token_ids: tuple[int, ...]) -> Engine:
    """Make the configured engine; the import of its library happens here."""
    if config.rollout.backend == "hf":
        from actors.hf_engine import HfEngine

        return HfEngine(config, stop_token_ids)
    from actors.vllm_engine import VllmEngine

    return VllmEngine(config, stop_token_ids)

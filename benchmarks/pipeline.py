"""What streaming, staleness and the driver are worth: `python -m benchmarks.pipeline [--json FILE] [--only PART]`.

overlap   simulated engines with latencies recorded from vLLM (results/latencies.json; `real` records them anew), through the real
          feed and pools: a barrier loop (all groups generated, then all scored, then learned), streaming, streaming at staleness 1.
          overlap_gain: barrier over staleness 1. overlap_bound: barrier over what neither can go below (../docs/scaling.md):
          the greatest of generation's work per slot with the pause of the sync, learner with sync, and the longest group halved.
driver    driver_ms_per_group: CPU milliseconds of the driver per group, by engines (2 to 256) and by tokens per sample (64 to 8192).
real      vLLM, DeepSpeed and a reference worker, one core for engines and one for the learner: the same three loops.
sync      SmolLM2-135M to two engines: sync_s, sync_vs_bare (over vLLM's own calls and the copies alone, alternating in the same run),
          sync_pause_s (in which generation stands still), share of a demo step. fp32 and bf16.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import ray
from rich.console import Console

from actors.roles import ReferencePool, RewardPool, RolloutPool
from benchmarks.simulated import simulate, simulated_pool
from configs.load import load
from configs.schema import Config
from orchestrator import build
from orchestrator.feed import Feed, Scoring
from orchestrator.prompts import PromptStream
from orchestrator.train import Parts, sync_weights, take_and_learn
from orchestrator.types import Draw, Prompt, Sampling, ScoredGroup

RESULTS = Path(__file__).parent / "results"
LATENCIES = RESULTS / "latencies.json"
STEPS = 12
WARM_UP = 3  # steps left out of the medians
REPEATS = 7  # syncs of each kind
ENGINES = (2, 16, 64, 256)
TOKENS = (64, 512, 8192)
# the workload of `real`: sentences of SmolLM2 up to their newline, a long tail of lengths
REAL = [
    "configs/demo_reward_model.yaml", "reward_model.path=null", "reward.function=regex", 'reward.arguments={regex:{pattern: " the "}}',
    "rollout.num_workers=1", "rollout.threads=1", "rollout.max_new_tokens=96", "rollout.max_model_len=160", "learner.threads=1",
    "reference.threads=1", "rollout.num_generations=4", "train.prompts_per_step=8", f"train.num_steps={STEPS}", "learner.lr=1e-6",
    "eval.data=null", "train.sample_table_every=0",
]  # fmt: skip


class Barrier:
    """Scoring of a loop without streaming: no group of a step is scored before all are generated."""

    def __init__(self, rollout: Any, rewarder: Any, reference: Any, sampling: Sampling) -> None:
        self._rollout, self._sampling = rollout, sampling
        self._generated: dict[int, asyncio.Event] = {}
        self._counts: dict[int, int] = {}
        self._scoring = Scoring(self, rewarder, reference, sampling)
        self.prompts_per_step = 0

    async def __call__(self, draw: Draw) -> ScoredGroup:
        """Score a draw."""
        return await self._scoring(draw)

    async def generate(self, draw: Draw, sampling: Sampling) -> Any:
        """Generate, and wait until the whole step is generated."""
        found = await self._rollout.generate(draw, sampling)
        step = draw.number // self.prompts_per_step
        event = self._generated.setdefault(step, asyncio.Event())
        self._counts[step] = self._counts.get(step, 0) + 1
        if self._counts[step] == self.prompts_per_step:
            event.set()
        await event.wait()
        return found


# simulated engines ----------------------------------------------------------------------------------------------------


async def simulated_steps(
    *, engines: int, scorers: int, groups: int, steps: int, staleness: int, learn_s: float, sync_s: float, barrier: bool
) -> tuple[list[float], float]:
    """Run the loop over simulated workers; returns seconds of each step, and CPU seconds of the driver in all."""
    pools = [
        simulated_pool("rollout", engines, None),
        simulated_pool("reward", scorers, 1),
        simulated_pool("reference", scorers, 1),
    ]
    for pool in pools:
        await pool.start()
    rollout = RolloutPool(pools[0], dtype="float32", load_timeout_s=60.0)
    sampling = Sampling(num_samples=8, temperature=1.0, seed=0)
    kind: Any = Barrier if barrier else Scoring
    scoring = kind(rollout, RewardPool(pools[1]), ReferencePool(pools[2]), sampling)
    if barrier:
        scoring.prompts_per_step = groups
    prompts = [Prompt(id=str(i), token_ids=(1,) * 32, text="", columns={}) for i in range(64)]
    feed = Feed(
        PromptStream(prompts, shuffle=False, seed=0), scoring, num_groups=groups * steps, prompts_per_step=groups,
        max_staleness=staleness, max_refill=0, has_signal=lambda group: True,
    )  # fmt: skip
    times, cpu = [], time.process_time()
    for step in range(steps):
        start = time.monotonic()
        feed.refill(step)
        taken = await feed.take()
        await asyncio.sleep(learn_s + sync_s)
        feed.commit(taken)
        times.append(time.monotonic() - start)
    cpu = time.process_time() - cpu
    for pool in pools:
        if pool._watching is not None:
            pool._watching.cancel()
    return times, cpu


def overlap() -> dict[str, Any]:
    """Compare the three loops on simulated engines."""
    recorded = np.array(json.loads(LATENCIES.read_text())["generate_s"])
    latencies_s = (recorded / recorded.mean() * 0.25).tolist()  # the shape is recorded, the scale is ours
    engines, slots, groups, score_s, sync_s = 8, 4, 64, 0.02, 0.05
    work_s = 0.25 * groups / (engines * slots)
    learn_s = work_s  # both sides busy: the hardest case for overlap
    times = {}
    for name, staleness, barrier in (("barrier", 0, True), ("streaming", 0, False), ("staleness_1", 1, False)):
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        simulate(latencies_s=latencies_s, num_tokens=64, slots=slots, score_s=score_s)
        found, _ = asyncio.run(
            simulated_steps(
                engines=engines,
                scorers=8,
                groups=groups,
                steps=STEPS,
                staleness=staleness,
                learn_s=learn_s,
                sync_s=sync_s,
                barrier=barrier,
            )
        )
        ray.shutdown()
        times[name] = statistics.median(found[WARM_UP:])
    tail_s = statistics.fmean(
        max(latencies_s[(n * groups + i) % len(latencies_s)] for i in range(groups)) for n in range(STEPS)
    )
    floor_s = max(work_s, learn_s + sync_s, tail_s / 2)
    return {
        "overlap_gain": times["barrier"] / times["staleness_1"],
        "streaming_gain": times["barrier"] / times["streaming"],
        "overlap_bound": times["barrier"] / floor_s,
        "overlap_share_of_bound": floor_s / times["staleness_1"],
        "overlap_step_s": times,
        "overlap_occupancy": float(np.mean(latencies_s) / tail_s),
    }


def driver() -> dict[str, Any]:
    """Measure the driver's CPU time per group."""

    def measure(engines: int, num_tokens: int) -> float:
        groups, steps = max(64, 4 * engines), 4
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        simulate(latencies_s=[0.01], num_tokens=num_tokens, slots=8, score_s=0.0)
        _, cpu_s = asyncio.run(
            simulated_steps(
                engines=engines,
                scorers=max(2, engines // 8),
                groups=groups,
                steps=steps,
                staleness=1,
                learn_s=0.0,
                sync_s=0.0,
                barrier=False,
            )
        )
        ray.shutdown()
        print(f"driver: {engines} engines, {num_tokens} tokens: {1e3 * cpu_s / (groups * steps):.2f} ms per group", flush=True)
        return 1e3 * cpu_s / (groups * steps)

    by_engines = {str(engines): measure(engines, 64) for engines in ENGINES}
    by_tokens = {str(tokens): measure(16, tokens) for tokens in TOKENS}
    return {
        "driver_ms_per_group": max(*by_engines.values(), *by_tokens.values()),
        "driver_ms_by_engines": by_engines,
        "driver_ms_by_tokens": by_tokens,
    }


# the real stack -------------------------------------------------------------------------------------------------------


async def with_parts(config: Config, measure: Callable[[Parts], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Start every part of a run, measure, and end them."""
    data = build.check(config)
    folder = Path(config.train.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    build.connect(config, build.process.enter)
    try:
        async with AsyncExitStack() as stack:
            return await measure(await build._start(config, data, folder, Console(quiet=True), stack))
    finally:
        ray.shutdown()


def real() -> dict[str, Any]:
    """Compare the three loops on vLLM and DeepSpeed, and record how long groups took."""
    found: dict[str, dict[str, Any]] = {}
    for name, staleness, kind in (("barrier", 0, Barrier), ("streaming", 0, Scoring), ("staleness_1", 1, Scoring)):
        with tempfile.TemporaryDirectory() as folder, patch.object(build, "Scoring", kind):
            config = load(
                [*REAL, f"train.max_staleness={staleness}", "algorithm.correction=none", f"train.output_dir={folder}"]
            )
            found[name] = asyncio.run(with_parts(config, lambda parts, config=config: _real_steps(config, parts)))
    if recorded := found["streaming"].pop("generate_s"):
        LATENCIES.write_text(
            json.dumps({"machine": machine(), "workload": REAL, "generate_s": [round(s, 3) for s in recorded]}) + "\n"
        )
    times = {name: statistics.median(run["step_s"][WARM_UP:]) for name, run in found.items()}
    parts = {key: statistics.median(found["barrier"][key][WARM_UP:]) for key in ("rollout_s", "learner_s", "sync_s")}
    floor_s = max(parts["rollout_s"], parts["learner_s"] + parts["sync_s"])
    return {
        "real_overlap_gain": times["barrier"] / times["staleness_1"],
        "real_streaming_gain": times["barrier"] / times["streaming"],
        "real_overlap_bound": times["barrier"] / floor_s,
        "real_step_s": times,
        "real_barrier_parts_s": parts,
    }


async def _real_steps(config: Config, parts: Parts) -> dict[str, Any]:
    if isinstance(score := parts.feed._score, Barrier):
        score.prompts_per_step = config.train.prompts_per_step
    rows: dict[str, list[float]] = {"step_s": [], "rollout_s": [], "learner_s": [], "sync_s": [], "generate_s": []}
    version, _ = await sync_weights(parts, steps=0)
    for step in range(1, config.train.num_steps + 1):
        start = time.monotonic()
        parts.feed.refill(version.steps)
        groups = await parts.feed.take()
        taken = time.monotonic()
        await parts.learner.step(groups)
        learned = time.monotonic()
        parts.feed.commit(groups)
        version, _ = await sync_weights(parts, steps=step)
        end = time.monotonic()
        rows["generate_s"] += [group.facts.generate_s for group in groups]
        for key, value in (
            ("step_s", end - start),
            ("rollout_s", taken - start),
            ("learner_s", learned - taken),
            ("sync_s", end - learned),
        ):
            rows[key].append(value)
    return rows


# weight sync ----------------------------------------------------------------------------------------------------------


def sync() -> dict[str, Any]:
    """Time the weight sync of the demo beside the bare calls."""
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            config = load(["configs/demo.yaml", f"model.dtype={dtype}", "eval.data=null", f"train.output_dir={folder}"])
            found = asyncio.run(with_parts(config, _syncs))
        results |= found if dtype == "float32" else {f"{key}_bf16": value for key, value in found.items()}
    return results


async def _syncs(parts: Parts) -> dict[str, Any]:
    from orchestrator.metrics import Clock

    learner, engines = parts.learner._actors[0], parts.rollout._pool.workers  # pyright: ignore
    ours, bare, paused, steps = [], [], [], []
    await sync_weights(parts, steps=0)
    for number in range(1, REPEATS + 1):
        start = time.monotonic()
        parts.feed.refill(number - 1)
        groups, _ = await take_and_learn(parts, Clock(lambda part: None))
        parts.feed.commit(groups)
        learned = time.monotonic()
        _, metrics = await sync_weights(parts, steps=number)
        ours.append(time.monotonic() - learned)
        steps.append(time.monotonic() - start)
        paused.append(metrics["time/weight_sync_paused_s"])
        begin = time.monotonic()
        refs = await learner.__ray_call__.options(num_returns=1).remote(_flatten)
        await asyncio.gather(*(worker.handle.__ray_call__.remote(_load_bare, refs) for worker in engines))
        bare.append(time.monotonic() - begin)
    sync_s, step_s = statistics.median(ours), statistics.median(steps)
    return {
        "sync_s": sync_s, "sync_bare_s": statistics.median(bare), "sync_vs_bare": statistics.median(a / b for a, b in zip(ours, bare)),
        "sync_pause_s": statistics.median(paused), "sync_share_of_demo_step": sync_s / step_s, "demo_step_s": step_s,
    }  # fmt: skip


def _flatten(rank: Any) -> Any:
    """In the learner: copy all weights into one flat array, as notes of other systems do it; nothing is hashed or proven."""
    import ray as its_ray
    import torch

    from orchestrator.types import TensorMeta, WeightBucket

    publisher = rank._worker._publisher
    metas, offset = [], 0
    for weight in publisher.weights:
        metas.append(
            TensorMeta(
                name=weight.name, dtype=str(publisher._dtype).removeprefix("torch."), shape=weight.shape, offset=offset
            )
        )
        offset += -(-weight.param.numel() * publisher._dtype.itemsize // 64) * 64
    flat = torch.empty(offset, dtype=torch.uint8)
    with torch.no_grad():
        for weight, meta in zip(publisher.weights, metas, strict=True):
            size = weight.param.numel() * publisher._dtype.itemsize
            flat[meta.offset : meta.offset + size].view(publisher._dtype).copy_(weight.param.reshape(-1))
    return [its_ray.put(WeightBucket(tensors=tuple(metas), data=flat.numpy()))]


def _load_bare(worker: Any, refs: Any) -> None:
    """In an engine's actor: vLLM's own start, update and finish, and its cache reset."""
    from concurrent.futures import Future

    import ray as its_ray

    bucket, done = its_ray.get(refs[0]), Future()

    def run() -> None:
        engine = worker._loop._engine
        llm = engine._llm
        llm.start_weight_update()
        llm.update_weights({"update_info": {"bucket": bucket}})
        llm.finish_weight_update(weight_version=llm.get_weight_version())
        done.set_result(engine._engine.reset_prefix_cache(reset_running_requests=True))

    worker._loop._commands.put(run)
    assert done.result(timeout=60)


def machine() -> str:
    """Name the machine."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


PARTS = {"real": real, "overlap": overlap, "driver": driver, "sync": sync}


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(PARTS))
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    for name, part in PARTS.items():
        if options.only in (None, name):
            results |= part()
            print(json.dumps(results, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

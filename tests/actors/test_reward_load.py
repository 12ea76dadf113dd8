"""64 groups through supervised Ray workers: a faulty sample in each costs that sample, and the reward model runs in replicas."""

import asyncio
import math
import time
from pathlib import Path

import pytest
import ray

from actors.pool import Pool
from actors.reward_model import RewardModelWorker
from actors.rewards.worker import RewardWorker
from actors.roles import RewardPool, RewardSum
from actors.worker import Role
from configs.schema import RewardConfig
from tests.actors.rewarding import group
from tests.actors.test_reward_model import classifier, config, outside
from tests.actors.test_rewards import FAULTS

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def role(folder: Path, name: str, kind: type, argument: object) -> Role:
    return Role(
        name=name, kind=kind, arguments=(argument,), num_workers=2, num_cpus=0.1, num_gpus=0.0, threads=1, max_calls=1,
        timeout_s=120.0, heartbeat_timeout_s=60.0, start_timeout_s=120.0, log_dir=folder,
    )  # fmt: skip


def test_64_groups_with_a_faulty_sample_each_and_a_reward_model_beside(cluster, tmp_path):
    cases = "".join(f"    if c == '{name}':\n        {code}\n" for name, (code, _, _) in FAULTS.items())
    (tmp_path / "r.py").write_text(
        f"import os, re, signal, sys, time\ndef one(c):\n{cases}    return float(len(c))\n"
        "def f(prompts, completions, **kw):\n    return [one(c) for c in completions]\n"
    )
    folder = classifier(tmp_path / "model", "bert")
    functions = Pool(role(tmp_path, "reward", RewardWorker, RewardConfig(function=f"{tmp_path}/r.py:f", timeout_s=1.0)))
    model = Pool(role(tmp_path, "reward_model", RewardModelWorker, config(folder)))
    rewarder = RewardSum([(1.0, RewardPool(functions)), (0.5, RewardPool(model))])
    costly = ["regex", "killed"]  # each takes two deadlines, or two processes
    names = costly + ["raises", "nan", "none", "string", "exits"] * 13
    groups = [group(*["x" * (i % 9 + j) for j in range(7)], names[i % len(names)]) for i in range(64)]

    async def score() -> list:
        await rewarder.start()
        return await asyncio.gather(*(rewarder.score(g.draw, ray.put(g), 8) for g in groups))

    try:
        start = time.monotonic()
        scored = asyncio.run(score())
        assert time.monotonic() - start < 150
        assert functions.counters.replaced == model.counters.replaced == 0  # the processes died, no worker did
    finally:
        functions.stop()
        model.stop()
    classified = outside(folder, [f"1+1={'x' * length}" for length in range(16)])[:, 0].tolist()
    for i, rewards in enumerate(scored):
        assert [r.cause for r in rewards] == ["ok"] * 7 + [FAULTS[names[i % len(names)]][1].replace("not_applicable", "ok")]
        wanted = [i % 9 + j + 0.5 * classified[i % 9 + j] for j in range(7)]
        assert [r.value for r in rewards[:7]] == pytest.approx(wanted, abs=1e-5)
        assert rewards[7].valid == (names[i % len(names)] == "none") or math.isnan(rewards[7].value)

"""What a cluster can hold is decided before an actor starts: recipes fit the machines they name, impossible requests are one sentence."""

import asyncio

import pytest
import ray
import yaml

from configs.load import load
from configs.rules import ConfigError
from orchestrator.__main__ import run_command
from orchestrator.capacity import Node, check_capacity
from orchestrator.cluster import reserve, wait_for_room

RECIPES = {
    "gpu_1_colocated": (1, 1), "gpu_1_lora": (1, 1), "gpu_8_colocated": (1, 8), "gpu_8_disaggregated": (1, 8), "gpu_4x8": (4, 8),
}  # fmt: skip
BASE = ["model.path=m", "data.train=d.jsonl"]


def describe(folder, *nodes) -> str:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"nodes": [{"count": c, "cpus": n, "gpus": g} for c, n, g in nodes]}))
    return f"cluster.describe={path}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_recipe_fits_the_machines_it_names_and_no_fewer(recipe, tmp_path, capsys):
    nodes, gpus = RECIPES[recipe]
    check = ["train", f"configs/{recipe}.yaml", "--check"]
    assert run_command([*check, describe(tmp_path, (nodes, 64, gpus))]) == 0
    assert "placement" in capsys.readouterr().out
    fewer = (nodes, 64, gpus - 1) if nodes == 1 else (nodes - 1, 64, gpus)
    assert run_command([*check, describe(tmp_path, fewer)]) == 2
    assert "GPU" in capsys.readouterr().err


TP = "+rollout.engine_args.tensor_parallel_size"
IMPOSSIBLE = [
    ([(1, 64, 8)], ["rollout.num_workers=9", "rollout.num_gpus=1"], ["9 GPU asked (rollout 9 x 1)", "of 8 there", "1 x 64 CPU + 8 GPU"]),
    ([(1, 4, 0)], ["rollout.num_cpus=5"], ["CPU asked", "rollout 1 x 5", "of 4 there"]),
    ([(1, 4, 0)], ["learner.num_gpus=1"], ["1 GPU asked (learner 1 x 1)", "of 0 there"]),
    ([(2, 64, 4)], [f"{TP}=8", "rollout.num_gpus=8"], ["must fit one node", "rollout with 1 CPU and 8 GPU", "2 x 64 CPU + 4 GPU"]),
    ([(4, 2, 0)], ["learner.num_cpus=3"], ["must fit one node", "learner with 3 CPU"]),
    ([(1, 64, 3)], ["rollout.num_gpus=0.6", "rollout.num_workers=4"], ["3 of 4 rollout workers placed", "GPU: rollout 4 x 0.6"]),
    ([(2, 64, 3)], [f"{TP}=2", "rollout.num_gpus=2", "rollout.num_workers=3"], ["2 of 3 rollout workers placed"]),
    ([(2, 64, 1)], [f"{TP}=2", "rollout.num_gpus=1"], ["tensor x pipeline parallel (2 x 1 = 2), got 1"]),
    ([(1, 64, 8)], ["rollout.num_gpus=2"], ["at most 1 for an engine without shards, got 2"]),
    ([(1, 64, 8)], ["rollout.num_gpus=1.5", f"{TP}=2"], ["rollout.num_gpus must be whole above 1, got 1.5"]),
    ([(1, 64, 8)], ["learner.num_gpus=4"], ["learner.num_gpus must be at most 1, got 4"]),
    ([(1, 64, 8)], ["cluster.placement=colocated", "rollout.num_workers=2"], ["must pair engines and learner ranks", "num_workers=2"]),
    ([(1, 64, 8)], ["cluster.placement=colocated", "rollout.num_gpus=1", "learner.num_gpus=1"], ["must share one GPU per pair"]),
    ([(1, 64, 8)], ["cluster.placement=colocated", "rollout.num_gpus=0.5", "learner.num_gpus=0.5"], ["must bound the engine's memory"]),
    ([(1, 64, 8)], ["cluster.network_interface=eth0"], ["must go with several learner ranks"]),
    ([(1, 64, 8)], ["cluster.wait_for_nodes_s=60"], ["must go with a running cluster"]),
    ([(0, 64, 8)], [], ["cluster.describe must be a YAML file", "no node"]),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "overrides", "words"), IMPOSSIBLE, ids=[words[0] for _, _, words in IMPOSSIBLE])
def test_an_impossible_request_is_refused_in_one_sentence(nodes, overrides, words, tmp_path, capsys):
    assert run_command(["train", *BASE, describe(tmp_path, *nodes), *overrides]) == 2  # without --check: nothing is started
    (sentence,) = capsys.readouterr().err.splitlines()
    assert all(word in sentence for word in words), sentence
    assert not ray.is_initialized()


def test_two_workers_share_a_gpu_and_the_whole_ones_are_kept():
    config = load([*BASE, "rollout.num_gpus=0.5", "rollout.num_workers=2", "learner.num_gpus=1"])
    check_capacity(config, [Node(num_cpus=8, num_gpus=2)])


@pytest.fixture
def nodes():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote
def node_of() -> str:
    return ray.get_runtime_context().get_node_id()


def test_pairs_share_a_node_ranks_of_a_node_are_neighbours_and_waits_end(nodes):
    config = load(
        [*BASE, "cluster.placement=colocated", "rollout.num_workers=4", "learner.num_ranks=4", "rollout.num_cpus=1",
         "learner.num_cpus=1", "cluster.start_timeout_s=20"],
    )  # fmt: skip
    places = asyncio.run(reserve(config))

    def where(strategies):
        return ray.get([node_of.options(num_cpus=1, scheduling_strategy=s).remote() for s in strategies])

    learner = where(places.learner)
    assert learner == where(places.rollout) == sorted(learner) and len(set(learner)) == 2
    late = load([*BASE, "learner.num_ranks=2", "learner.num_cpus=3", "cluster.start_timeout_s=2"])
    with pytest.raises(ConfigError, match="learner must find 2 x 3 CPU .* free within 2 s, got 1 CPU"):
        asyncio.run(reserve(late))
    wait = load([*BASE, "rollout.num_cpus=9", "cluster.address=auto", "cluster.wait_for_nodes_s=2"])
    said: list[str] = []
    with pytest.raises(ConfigError, match="12 CPU asked.* of 9 there.*waited 2 s for nodes"):
        wait_for_room(wait, said.append)
    assert said[0].startswith("waiting up to 2 s for nodes: the run must fit") and len(said) == 1
    nodes.add_node(num_cpus=9)  # the cluster has grown
    wait_for_room(load([*BASE, "rollout.num_cpus=9", "cluster.address=auto", "cluster.wait_for_nodes_s=30"]), said.append)
    places.free()
    assert asyncio.run(reserve(late)).learner

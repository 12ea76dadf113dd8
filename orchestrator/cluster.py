"""Ray: connect to a cluster or start a private one, refuse what it cannot hold, and reserve places for those who need them together."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.rules import ConfigError
from configs.schema import Config
from orchestrator.capacity import Node, check_capacity, units

POLL_S = 1.0  # between two looks at a cluster that grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where Ray shall put engines and learner ranks: one scheduling strategy each; empty: anywhere."""

    group: PlacementGroup | None = None
    rollout: tuple[Any, ...] = ()
    learner: tuple[Any, ...] = ()

    def free(self) -> None:
        """Give the places back."""
        if self.group is not None:
            remove_placement_group(self.group)


def connect(config: Config, worker_hook: Callable[[], None], report: Callable[[str], None] = lambda sentence: None) -> None:
    """Connect to `cluster.address`, or start a private Ray for `local`.

    Args:
        worker_hook: what every worker process of this run calls first; it travels by value.
        report: where to tell people that nodes are waited for.

    Raises:
        ConfigError: no cluster answers at the address, or it cannot hold the run.
    """
    cluster = config.cluster
    environment = {"worker_process_setup_hook": worker_hook}
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": environment}
    if cluster.network_interface is not None:  # workers inherit both: actors/process.py
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = cluster.network_interface
    if cluster.address == "local":
        ray.init(address="local", num_cpus=cluster.num_cpus, include_dashboard=False, **quiet)
    else:
        try:
            ray.init(address=cluster.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(
                f"cluster.address must be a running Ray cluster, got {cluster.address} ({cause}). "
                "Start one with `ray start --head`, or set cluster.address=local."
            ) from None
    wait_for_room(config, report)


def _nodes() -> list[Node]:
    """List what the living nodes have."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(num_cpus=has.get("CPU", 0.0), num_gpus=has.get("GPU", 0.0)) for has in found]


def wait_for_room(config: Config, report: Callable[[str], None]) -> None:
    """Refuse a run that the nodes cannot hold, at once or after cluster.wait_for_nodes_s in which more may come.

    Raises:
        ConfigError: the table of what is there and what is asked.
    """
    wait_s, started, told = config.cluster.wait_for_nodes_s, time.monotonic(), False
    while True:
        try:
            check_capacity(config, _nodes())
            break
        except ConfigError as error:
            if time.monotonic() - started >= wait_s:
                waited = f" (waited {wait_s:g} s for nodes: cluster.wait_for_nodes_s)" if wait_s else ""
                raise ConfigError(f"{error}{waited}") from None
            if not told:
                report(f"waiting up to {wait_s:g} s for nodes: {error}")
                request_resources(bundles=[_bundle(ask.num_cpus, ask.num_gpus) for ask in units(config) for _ in range(ask.num_workers)])
                told = True
            time.sleep(POLL_S)
    if told:
        request_resources(bundles=[])  # what the run's actors hold keeps the nodes from here on


async def reserve(config: Config) -> Places:
    """Reserve places: for pairs of engine and rank that share devices, or for learner ranks close together, ordered by node.

    Raises:
        ConfigError: the cluster's free resources do not hold them within cluster.start_timeout_s.
    """
    colocated, num = config.cluster.placement == "colocated", config.learner.num_ranks
    unit = units(config)[0 if colocated else -1]
    bundle = _bundle(unit.num_cpus, unit.num_gpus)
    if not bundle or (not colocated and num == 1):
        return Places()
    group = placement_group([bundle] * num, strategy="PACK")
    ready = await asyncio.to_thread(group.wait, config.cluster.start_timeout_s)
    if not ready:
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"{unit.role} must find {num} x {unit.num_cpus:g} CPU + {unit.num_gpus:g} GPU free within "
            f"{config.cluster.start_timeout_s:g} s, got {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU free. "
            "Wait for other jobs to end, add nodes, or raise cluster.start_timeout_s."
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(num), key=lambda index: (node_of[index], index))  # ranks of a node are neighbours: NCCL's rings
    strategies = tuple(
        PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index) for index in order
    )
    return Places(group=group, rollout=strategies if colocated else (), learner=strategies)


def _bundle(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: num for name, num in (("CPU", num_cpus), ("GPU", num_gpus)) if num > 0}

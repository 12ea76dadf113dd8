"""What a run asks of a cluster and whether the cluster can hold it. Ray-free: a described cluster is checked like a real one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.rules import ConfigError, reward_functions
from configs.schema import Config

EPSILON = 1e-6
RESOURCES = (("CPU", "num_cpus"), ("GPU", "num_gpus"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one role holds of the cluster."""

    role: str
    num_workers: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine has."""

    num_cpus: float
    num_gpus: float = 0.0
    memory_gib: float = 0.0  # 0: not told


@dataclass(slots=True)
class _Room:
    """What is left of a node; a worker's GPUs are whole devices, or a share of one."""

    cpus: float
    gpus: list[float] = field(default_factory=list)

    def take(self, num_cpus: float, num_gpus: float) -> bool:
        whole = [i for i, free in enumerate(self.gpus) if free > 1 - EPSILON]
        shared = sorted((free, i) for i, free in enumerate(self.gpus) if free >= num_gpus - EPSILON)
        devices = [i for _, i in shared[:1]] if 0 < num_gpus < 1 else whole[: int(num_gpus)]
        if self.cpus < num_cpus - EPSILON or len(devices) < num_gpus - EPSILON:
            return False
        self.cpus -= num_cpus
        for i in devices:
            self.gpus[i] -= min(num_gpus, 1.0)
        return True


def needs_reference(config: Config) -> bool:
    """Whether a reference worker runs: beta is above 0 and no adapter can be switched off instead."""
    return config.algorithm.beta > 0 and config.learner.lora.rank == 0


def asks(config: Config) -> list[Ask]:
    """List what each role of a run holds; the reference only where it runs."""
    roles: list[tuple[str, int, Any]] = [("rollout", config.rollout.num_workers, config.rollout)]
    if reward_functions(config.reward):
        roles.append(("reward", config.reward.num_workers, config.reward))
    if config.reward_model.path is not None:
        roles.append(("reward_model", config.reward_model.num_workers, config.reward_model))
    if needs_reference(config):
        roles.append(("reference", config.reference.num_workers, config.reference))
    roles.append(("learner", config.learner.num_ranks, config.learner))
    return [
        Ask(role=name, num_workers=num, num_cpus=part.num_cpus, num_gpus=0.0 if name == "reward" else part.num_gpus)
        for name, num, part in roles
    ]


def units(config: Config) -> list[Ask]:
    """List what must lie on one node: a worker, or an engine together with the learner rank that shares its devices."""
    listed = asks(config)
    if config.cluster.placement == "disaggregated":
        return listed
    rollout, learner = listed[0], listed[-1]
    pair = Ask(
        role="rollout with learner",
        num_workers=learner.num_workers,
        num_cpus=rollout.num_cpus + learner.num_cpus,
        num_gpus=rollout.num_gpus + learner.num_gpus,
    )
    return [pair, *listed[1:-1]]


def described(path: str) -> list[Node]:
    """Read a description of a cluster: `nodes: [{count: 4, cpus: 96, gpus: 8}]`.

    Raises:
        ConfigError: the file is not there or says something else.
    """
    try:
        found = yaml.safe_load(Path(path).expanduser().read_text())
        groups = found["nodes"]
        nodes = [
            Node(num_cpus=float(group["cpus"]), num_gpus=float(group.get("gpus", 0)), memory_gib=float(group.get("memory_gib", 0)))
            for group in groups
            for _ in range(int(group.get("count", 1)))
        ]
        unknown = sorted({key for group in groups for key in group} - {"count", "cpus", "gpus", "memory_gib"})
        if unknown or not nodes:
            raise ValueError(f"unknown {unknown[0]}" if unknown else "no node")
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"cluster.describe must be a YAML file like `nodes: [{{count: 4, cpus: 96, gpus: 8}}]`, got {path} ({cause}). Mend it."
        ) from None
    return nodes


def check_capacity(config: Config, nodes: Sequence[Node]) -> None:
    """Compare what the roles hold, together and each worker on one node, with what the nodes have.

    Raises:
        ConfigError: with the table of what is there and what is asked, by whom.
    """
    asked, there = units(config), _table_of_nodes(nodes)
    for resource, attribute in RESOURCES:
        total = sum(getattr(ask, attribute) * ask.num_workers for ask in asked)
        have = sum(getattr(node, attribute) for node in nodes)
        if total > have + EPSILON:
            smaller = "num_cpus of the roles (fractions are fine where they take turns)" if resource == "CPU" else "num_gpus"
            raise ConfigError(
                f"the run must fit the cluster, got {total:g} {resource} asked ({_table(asked, attribute)}) of {have:g} there "
                f"({there}). Add nodes, or lower num_workers or {smaller}."
            )
    rooms = [_Room(node.num_cpus, [1.0] * int(node.num_gpus)) for node in nodes]
    for ask in sorted(asked, key=lambda ask: (-ask.num_gpus, -ask.num_cpus)):
        if not any(_Room(n.num_cpus, [1.0] * int(n.num_gpus)).take(ask.num_cpus, ask.num_gpus) for n in nodes):
            raise ConfigError(
                f"a worker must fit one node, got {ask.role} with {ask.num_cpus:g} CPU and {ask.num_gpus:g} GPU on nodes of {there}. "
                "Lower its num_cpus or num_gpus, or use larger nodes."
            )
        placed = sum(any(room.take(ask.num_cpus, ask.num_gpus) for room in rooms) for _ in range(ask.num_workers))
        if placed < ask.num_workers:
            raise ConfigError(
                f"every worker must find a node with room, got {placed} of {ask.num_workers} {ask.role} workers placed on {there} "
                f"(CPU: {_table(asked, 'num_cpus')}; GPU: {_table(asked, 'num_gpus') or 'none'}). Add a node or lower num_workers."
            )


def _table(asked: Iterable[Ask], attribute: str) -> str:
    return ", ".join(f"{ask.role} {ask.num_workers} x {getattr(ask, attribute):g}" for ask in asked if getattr(ask, attribute))


def _table_of_nodes(nodes: Sequence[Node]) -> str:
    counted: Mapping[Node, int] = {node: nodes.count(node) for node in nodes}
    return ", ".join(f"{num} x {node.num_cpus:g} CPU + {node.num_gpus:g} GPU" for node, num in counted.items()) or "no node"

"""Ray: connect to a cluster or start a private one, and refuse what it cannot hold before an actor starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from configs.rules import ConfigError, reward_functions
from configs.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one role holds of the cluster."""

    role: str
    num_workers: int
    num_cpus: float
    num_gpus: float


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


def needs_reference(config: Config) -> bool:
    """Whether a reference worker runs: beta is above 0 and no adapter can be switched off instead."""
    return config.algorithm.beta > 0 and config.learner.lora.rank == 0


def connect(config: Config, worker_hook: Callable[[], None]) -> None:
    """Connect to `cluster.address`, or start a private Ray for `local`.

    Args:
        worker_hook: what every worker process of this run calls first; it travels by value.

    Raises:
        ConfigError: no cluster answers at the address, or it cannot hold the run.
    """
    cluster = config.cluster
    environment = {"worker_process_setup_hook": worker_hook}
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": environment}
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
    check_capacity(config, ray.cluster_resources())


def check_capacity(config: Config, there: Mapping[str, float]) -> None:
    """Compare what the roles hold together with what the cluster has.

    Raises:
        ConfigError: with the table of what is there and what is asked, by whom.
    """
    asked = asks(config)
    for resource, attribute in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        total = sum(getattr(ask, attribute) * ask.num_workers for ask in asked)
        have = there.get(resource, 0.0)
        if total > have + 1e-6:
            table = ", ".join(
                f"{ask.role} {ask.num_workers} x {getattr(ask, attribute):g}" for ask in asked if getattr(ask, attribute)
            )
            smaller = "num_cpus of the roles (fractions are fine where they take turns)" if resource == "CPU" else "num_gpus"
            raise ConfigError(
                f"the run must fit the cluster, got {total:g} {resource} asked ({table}) of {have:g} there. "
                f"Add nodes, or lower num_workers or {smaller}."
            )

"""A described cluster and a run as KubeRay's RayCluster and RayJob (API ray.io/v1, KubeRay 1.5.1 or newer for its token)."""

import importlib.metadata
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from orchestrator.capacity import Node
from orchestrator.submission import STOP_WAIT_S, entrypoint

API = "ray.io/v1"
HEAD = Node(num_cpus=4, memory_gib=16)  # the driver and Ray's own processes; it holds no worker
SHARED = "/shared"  # where the volume lies in every pod
RETRIES = 3  # a lost head ends the job; a new cluster goes on from the newest checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What every pod has in common. Secrets are names of Kubernetes objects, never values."""

    name: str
    image: str
    claim: str | None  # PersistentVolumeClaim mounted at SHARED
    secret: str | None  # Secret whose keys become environment variables (HF_TOKEN ...)


def ray_job(config: Config, arguments: Sequence[str], nodes: Sequence[Node], pods: Pods) -> dict[str, Any]:
    """Build a RayJob: a cluster for one run, removed after it.

    Args:
        config: what `arguments` resolve to.
        arguments: the command line of `rlooper train`.
        nodes: the machines of the workers.
    """
    return _object("RayJob", pods.name) | {
        "spec": {
            "entrypoint": shlex.join(entrypoint(arguments)),
            "runtimeEnvYAML": f'env_vars: {{RAY_JOB_STOP_WAIT_TIME_S: "{STOP_WAIT_S}"}}\n',
            "backoffLimit": RETRIES if config.train.resume == "auto" and config.checkpoint.every else 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": _cluster(nodes, pods),
        }
    }


def ray_cluster(nodes: Sequence[Node], pods: Pods) -> dict[str, Any]:
    """Build a RayCluster that stays, for `rlooper submit`."""
    return _object("RayCluster", pods.name) | {"spec": _cluster(nodes, pods)}


def _object(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "rlooper"}}}


def _cluster(nodes: Sequence[Node], pods: Pods) -> dict[str, Any]:
    return {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token"},  # the operator makes a Secret with the token and gives it to every pod
        "headGroupSpec": {
            "serviceType": "ClusterIP",  # reached by port-forward, never from outside
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod("head", HEAD, pods),
        },
        "workerGroupSpecs": [
            {
                "groupName": f"workers-{index}",
                "replicas": num,
                "minReplicas": num,
                "maxReplicas": num,
                "rayStartParams": {},
                "template": _pod("worker", node, pods),
            }
            for index, (node, num) in enumerate(Counter(nodes).items())
        ],
    }


def _pod(name: str, node: Node, pods: Pods) -> dict[str, Any]:
    amounts: dict[str, str] = {"cpu": f"{node.num_cpus:g}"}
    shared_memory: dict[str, Any] = {"medium": "Memory"}  # Ray's object store and the ranks' exchange lie there
    if node.memory_gib:
        amounts["memory"] = f"{node.memory_gib:g}Gi"
        shared_memory["sizeLimit"] = f"{node.memory_gib / 2:g}Gi"
    if node.num_gpus:
        amounts["nvidia.com/gpu"] = f"{node.num_gpus:g}"
    volumes: list[Mapping[str, Any]] = [{"name": "shm", "emptyDir": shared_memory}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "shared", "mountPath": SHARED})
    container: dict[str, Any] = {
        "name": f"ray-{name}",
        "image": pods.image,
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "runAsNonRoot": True},
    }
    if pods.secret:
        container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": STOP_WAIT_S}
    return {"spec": spec}

"""`rlooper render kuberay`: a run and its described cluster as a manifest for kubectl."""

import argparse
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import yaml

from configs.rules import ConfigError
from orchestrator.capacity import described
from orchestrator.kuberay import SHARED, Pods, ray_cluster, ray_job
from orchestrator.submission import check_submitted


def render(arguments: Sequence[str]) -> int:
    """Print a run's Kubernetes manifest: render kuberay RECIPE ...

    Raises:
        ConfigError: the run cannot work there.
    """
    parser = argparse.ArgumentParser(
        prog="rlooper render",
        usage="rlooper render kuberay --image IMAGE RECIPE.yaml ... cluster.describe=NODES.yaml [key=value ...]",
        description="The nodes of cluster.describe become worker groups; a head without work is added. Pipe it into `kubectl apply -f -`.",
        allow_abbrev=False,
    )
    parser.add_argument("target", choices=["kuberay"])
    parser.add_argument("--image", required=True, help="built from deploy/Dockerfile")
    parser.add_argument("--kind", choices=["RayJob", "RayCluster"], default="RayJob", help="one run, or a cluster to submit to")
    parser.add_argument("--name", default="rlooper", help="of the object (%(default)s)")
    parser.add_argument("--claim", help=f"PersistentVolumeClaim mounted at {SHARED} in every pod")
    parser.add_argument("--secret", help="Secret whose keys become environment variables of every pod, such as HF_TOKEN")
    options, rest = parser.parse_known_args(arguments)
    config = check_submitted(rest)
    if config.cluster.describe is None:
        raise ConfigError("cluster.describe must name the nodes to ask for, got none. Give cluster.describe=NODES.yaml (docs/deploy.md).")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", options.name):
        raise ConfigError(f"--name must be 1 to 40 lower-case letters, digits and dashes, got {options.name}. Choose such a name.")
    if options.claim and PurePosixPath(SHARED) not in PurePosixPath(config.train.output_dir).parents:
        raise ConfigError(
            f"train.output_dir must lie in {SHARED}, where --claim is mounted, got {config.train.output_dir}. "
            "Elsewhere it goes with the pod."
        )
    nodes = described(config.cluster.describe)
    sent = [argument for argument in rest if not argument.lstrip("+").startswith("cluster.describe=")]  # a file of this machine
    pods = Pods(name=options.name, image=options.image, claim=options.claim, secret=options.secret)
    manifest = ray_job(config, sent, nodes, pods) if options.kind == "RayJob" else ray_cluster(nodes, pods)
    print(yaml.safe_dump(manifest, sort_keys=False, width=1000), end="")
    return 0

"""`rlooper submit`: the same command line as `rlooper train`, run by a cluster."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.rules import ConfigError
from orchestrator.submission import Cluster, check_submitted, entrypoint, environment


def submit(arguments: Sequence[str]) -> int:
    """Train on a running cluster, as a Ray job.

    Raises:
        ConfigError: bad input, or the cluster does not take the job; nothing was started.
    """
    parser = argparse.ArgumentParser(
        prog="rlooper submit",
        usage="rlooper submit [--address URL] RECIPE.yaml ... [key=value ...] | --follow JOB | --stop JOB",
        description="Check the run here, upload the working directory, start `rlooper train` there and follow it. The exit code is that "
        "of the run; 3: it was stopped. Ctrl-C stops following, not the job.",
        allow_abbrev=False,
    )
    dashboard = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    parser.add_argument("--address", default=dashboard, help="dashboard of the cluster (RAY_API_SERVER_ADDRESS; %(default)s)")
    parser.add_argument("--working-dir", type=Path, default=Path(), help="uploaded, and where the run starts; recipes are relative to it")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="leave it out, beside .gitignore and .rayignore")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the run, never a secret")
    parser.add_argument("--detach", action="store_true", help="print the job's id and leave")
    parser.add_argument("--follow", metavar="JOB", help="follow a job that runs")
    parser.add_argument("--stop", metavar="JOB", help="stop a job; it writes a checkpoint first")
    options, rest = parser.parse_known_args(arguments)
    job = options.stop or options.follow
    if job and rest:
        raise ConfigError(f"--follow and --stop must stand alone with the job's id, got {rest[0]}. Leave it out.")
    if job:
        cluster = Cluster(options.address)
    else:
        if not options.working_dir.is_dir():
            raise ConfigError(f"--working-dir must be a folder, got {options.working_dir}. Name the one that holds the recipes.")
        env = environment(options.env)
        with contextlib.chdir(options.working_dir):
            check_submitted(rest)
        cluster = Cluster(options.address)
        job = cluster.submit(entrypoint(rest), options.working_dir, options.ignore, env)
        print(f"job {job}", flush=True)
    if options.stop:
        print(f"job {job} {'is asked to stop' if cluster.stop(job) else 'had ended'}")
        return 0
    return 0 if options.detach else _follow(cluster, job)


def _follow(cluster: Cluster, job: str) -> int:
    try:
        return cluster.follow(job)
    except KeyboardInterrupt:
        print(f"rlooper: {job} goes on; `rlooper submit --follow {job}` follows, `--stop {job}` stops it", file=sys.stderr)
        return 130

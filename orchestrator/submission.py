"""A run as a job of a Ray cluster: what travels, what is started there, and what its end means here."""

import asyncio
import os
import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.load import load
from configs.rules import ConfigError
from configs.schema import Config
from orchestrator.capacity import check_capacity, described

# patterns of .gitignore that never travel with the working directory; its .gitignore files and .rayignore count too
IGNORED = (".git", ".venv", "runs", "__pycache__", ".env", ".netrc", ".ssh", "*.pem", "*.key")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")  # a variable whose name ends so
STOP_WAIT_S = 600  # between SIGTERM and SIGKILL of a stopped job: it writes a checkpoint meanwhile
NO_AGENT, NO_AGENT_WAIT_S = "No available agent", 120.0  # a head that has started answers so until its job agent is there
STOPPED = 3  # exit code of a run that was asked to stop
POLL_S = 1.0


def entrypoint(arguments: Sequence[str]) -> list[str]:
    """Build the command that a cluster runs: the training command on the cluster that it finds around itself."""
    return ["python", "-m", "orchestrator", "train", *arguments, "cluster.address=auto"]


def check_submitted(arguments: Sequence[str]) -> Config:
    """Check a command line as the cluster will see it, and refuse what makes sense on this machine only.

    Raises:
        ConfigError: it cannot run, its run folder would vanish with the job, or it names another cluster.
    """
    addresses = [argument for argument in arguments if argument.lstrip("+").startswith("cluster.address=")]
    if addresses:
        raise ConfigError(f"cluster.address must be left out of a submitted run, got {addresses[0]}. It uses the cluster that runs it.")
    config = load([*arguments, "cluster.address=auto"])
    if not Path(config.train.output_dir).is_absolute():
        raise ConfigError(
            f"train.output_dir must be an absolute path in a submitted run, got {config.train.output_dir}. A relative one lies in the "
            "job's copy of the working directory, which Ray removes; name a folder that every node shares."
        )
    if config.cluster.describe is not None:
        check_capacity(config, described(config.cluster.describe))
    return config


def environment(given: Sequence[str]) -> dict[str, str]:
    """Read the job's variables: `NAME=VALUE`, or `NAME` for this shell's value.

    Raises:
        ConfigError: a name is unset here, or sounds like a secret.
    """
    found = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    for item in given:
        name, has_value, value = item.partition("=")
        if name.upper().endswith(SECRET):
            raise ConfigError(
                f"--env must not carry a secret, got {name}. Ray shows a job's environment on its dashboard; put it into the nodes' own "
                "environment (docs/deploy.md, Secrets) or name a file that only they can read."
            )
        if not has_value and name not in os.environ:
            raise ConfigError(f"--env {name} must name a variable of this shell, got none. Write --env {name}=VALUE.")
        found[name] = value if has_value else os.environ[name]
    return found


class Cluster:
    """Jobs of a cluster, over the HTTP address of its dashboard."""

    def __init__(self, address: str) -> None:
        """Connect; takes the token where `ray` finds it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

        Raises:
            ConfigError: nobody answers there, or the token is not the cluster's.
        """
        places = ("RAY_AUTH_TOKEN" in os.environ, "RAY_AUTH_TOKEN_PATH" in os.environ, Path("~/.ray/auth_token").expanduser().is_file())
        if any(places):
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported; without it Ray ignores the token
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        try:
            self._client = JobSubmissionClient(address)
            self._client.list_jobs()  # the version of a cluster is public, its jobs are not
        except AuthenticationError:
            what = "one that it does not know" if any(places) else "none"
            raise ConfigError(
                f"the cluster at {address} must be given its token, got {what}. Export RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) "
                "as it was set for `ray start`, or copy ~/.ray/auth_token of its head."
            ) from None
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(
                f"--address must be the dashboard of a running cluster, got {address} ({cause}). Start one with `ray start --head`, "
                "or forward the port 8265 of its head."
            ) from None

    def submit(self, command: Sequence[str], working_dir: Path, ignored: Sequence[str], env: Mapping[str, str]) -> str:
        """Upload the working directory, start the command there and return the job's id.

        Raises:
            ConfigError: the head refuses it, or has no job agent even after NO_AGENT_WAIT_S.
        """
        runtime_env: dict[str, Any] = {"working_dir": str(working_dir), "excludes": [*IGNORED, *ignored], "env_vars": dict(env)}
        job = f"rlooper-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"  # ours, so that a second try is not a second job
        deadline = time.monotonic() + NO_AGENT_WAIT_S
        while True:
            try:
                return self._client.submit_job(entrypoint=shlex.join(command), submission_id=job, runtime_env=runtime_env)
            except (RuntimeError, ValueError) as error:
                if NO_AGENT not in str(error) or time.monotonic() > deadline:
                    raise ConfigError(f"the cluster must take the job, got a refusal: {_last_line(error)}. See its dashboard.") from None
                time.sleep(POLL_S)

    def stop(self, job: str) -> bool:
        """Ask a job to stop; returns whether it ran. It has STOP_WAIT_S to write a checkpoint.

        Raises:
            ConfigError: there is no such job.
        """
        self._info(job)
        return self._client.stop_job(job)

    def follow(self, job: str) -> int:
        """Print what a job prints until it ends; returns its exit code, STOPPED for one that was stopped.

        Raises:
            ConfigError: there is no such job.
        """
        self._info(job)
        try:
            asyncio.run(self._tail(job))
        except RuntimeError as error:  # a proxy that cuts long connections
            print(f"rlooper: the log ended early ({_last_line(error)}); waiting for the job's end", file=sys.stderr)
        while not (info := self._info(job)).status.is_terminal():
            time.sleep(POLL_S)  # a job that is asked to stop closes its log first
        if info.status == "SUCCEEDED":
            return 0
        if info.status == "STOPPED":
            return STOPPED
        if info.driver_exit_code is None:  # it never came to run
            print(f"rlooper: {job} failed: {info.message}", file=sys.stderr)
        return info.driver_exit_code or 1

    def _info(self, job: str) -> Any:
        try:
            return self._client.get_job_info(job)
        except RuntimeError as error:
            raise ConfigError(f"the cluster must know the job, got {job} ({_last_line(error)}). `ray job list` lists its jobs.") from None

    async def _tail(self, job: str) -> None:
        async for lines in self._client.tail_job_logs(job):
            print(lines, end="", flush=True)


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].rstrip(".")

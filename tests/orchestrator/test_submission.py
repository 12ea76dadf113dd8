"""What `rlooper submit` refuses here, before anything travels, and what a job's end means."""

from types import SimpleNamespace

import pytest

from orchestrator import submission
from orchestrator.__main__ import run_command
from orchestrator.submission import STOPPED, Cluster

RECIPE = ["configs/demo.yaml"]


def refused(capsys, *arguments: str) -> str:
    assert run_command(["submit", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train.output_dir=runs/here"], "train.output_dir must be an absolute path"),
        (["train.output_dir=/shared/run", "cluster.address=10.0.0.1:6379"], "cluster.address must be left out"),
        (["train.output_dir=/shared/run", "algorithm.beat=1"], "Did you mean algorithm.beta"),
        (["train.output_dir=/shared/run", "--env", "HF_TOKEN=x"], "--env must not carry a secret, got HF_TOKEN."),
        (["train.output_dir=/shared/run", "--env", "RLOOPER_UNSET"], "must name a variable of this shell"),
        (["train.output_dir=/shared/run", "--working-dir", "no/where"], "--working-dir must be a folder"),
        (["--stop", "job-1"], "must stand alone"),
    ],
)
def test_what_cannot_work_there_is_refused_here(capsys, arguments, words):
    error = refused(capsys, *RECIPE, *arguments)
    assert words in error and len(error.splitlines()) == 1


def test_an_address_that_nobody_answers_is_named(capsys):
    error = refused(capsys, "--address", "http://127.0.0.1:9", "--stop", "job-1")
    assert "--address must be the dashboard of a running cluster, got http://127.0.0.1:9" in error


class Jobs:
    """Ray's job API of a head whose agent comes late."""

    def __init__(self, *, refusals: list[str], status: str = "SUCCEEDED", code: int | None = 0) -> None:
        self.refusals, self.submitted = refusals, []
        self.info = SimpleNamespace(status=SimpleStatus(status), driver_exit_code=code, message="no room")

    def submit_job(self, **job) -> str:
        self.submitted.append(job)
        if self.refusals:
            raise RuntimeError(self.refusals.pop(0))
        return job["submission_id"]

    def get_job_info(self, job):
        return self.info

    async def tail_job_logs(self, job):
        yield "step 1\n"


class SimpleStatus(str):
    def is_terminal(self) -> bool:
        return True


def cluster_of(jobs: Jobs) -> Cluster:
    cluster = object.__new__(Cluster)
    cluster._client = jobs
    return cluster


def test_submit_waits_for_a_late_agent_under_one_id(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "POLL_S", 0.0)
    jobs = Jobs(refusals=["Request failed with status code 500: No available agent to submit job, please try again later.."] * 3)
    job = cluster_of(jobs).submit(["python", "-m", "x", "a b"], tmp_path, ["big"], {"A": "1"})
    assert [one["submission_id"] for one in jobs.submitted] == [job] * 4
    last = jobs.submitted[-1]
    assert last["entrypoint"] == "python -m x 'a b'" and {"big", ".env", "*.pem"} <= set(last["runtime_env"]["excludes"])


def test_submit_passes_other_refusals_on_and_gives_up_in_time(tmp_path, monkeypatch):
    with pytest.raises(submission.ConfigError, match="got a refusal: disk full"):
        cluster_of(Jobs(refusals=["disk full"])).submit(["x"], tmp_path, [], {})
    monkeypatch.setattr(submission, "NO_AGENT_WAIT_S", -1.0)
    with pytest.raises(submission.ConfigError, match="No available agent"):
        cluster_of(Jobs(refusals=["No available agent"])).submit(["x"], tmp_path, [], {})


@pytest.mark.parametrize(
    "status, code, expected",
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", 137, 137), ("FAILED", None, 1), ("STOPPED", None, STOPPED)],
)
def test_the_exit_code_is_that_of_the_run(status, code, expected, capsys):
    assert cluster_of(Jobs(refusals=[], status=status, code=code)).follow("job") == expected
    assert "step 1" in capsys.readouterr().out

"""`rlooper render kuberay`: manifests that KubeRay's schema accepts, that hold the run, and that carry no secret."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from configs.load import load
from orchestrator.__main__ import run_command
from orchestrator.capacity import Node, check_capacity
from tests.deploy.kuberay_schema import schema

RECIPES = sorted(str(path) for path in Path("configs").glob("*.yaml"))
NODES = "nodes: [{count: 4, cpus: 96, gpus: 8, memory_gib: 1000}, {cpus: 16}]"
RUN = ["data.train=/shared/rows.jsonl", "train.output_dir=/shared/run"]


@pytest.fixture
def render(tmp_path, capsys):
    """Render with --image; returns exit code, output and error output."""
    (tmp_path / "nodes.yaml").write_text(NODES)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(["render", "kuberay", "--image", "rlooper:cuda", *arguments, f"cluster.describe={tmp_path / 'nodes.yaml'}"])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_renders_to_what_kuberay_accepts(render, recipe, kind):
    code, output, error = render("--kind", kind, "--claim", "runs", "--secret", "hub", recipe, *RUN)
    assert code == 0, error
    manifest = yaml.safe_load(output)
    jsonschema.validate(manifest, schema(kind))
    cluster = manifest["spec"]["rayClusterSpec"] if kind == "RayJob" else manifest["spec"]
    pods = [
        Node(num_cpus=float(limits["cpu"]), num_gpus=float(limits.get("nvidia.com/gpu", 0)))
        for group in cluster["workerGroupSpecs"]
        for limits in [group["template"]["spec"]["containers"][0]["resources"]["limits"]] * group["replicas"]
    ]
    assert len(pods) == 5
    check_capacity(load([recipe, *RUN]), pods)  # what is asked of Kubernetes holds the run
    if kind == "RayJob":
        words = shlex.split(manifest["spec"]["entrypoint"])
        assert words[:4] == ["python", "-m", "orchestrator", "train"] and words[-1] == "cluster.address=auto"
        assert load(words[4:]).cluster.address == "auto"  # it resolves without a file of this machine


def test_the_schema_refuses_what_kuberay_would(render):
    manifest = yaml.safe_load(render(RECIPES[0], *RUN)[1])
    for spoil in (
        lambda m: m["spec"].pop("rayClusterSpec") and m["spec"].update(rayClusterSpec={}),
        lambda m: m["spec"].update(entryPoint="x"),
        lambda m: m["spec"].update(backoffLimit="3"),
        lambda m: m["spec"]["rayClusterSpec"]["authOptions"].update(mode="basic"),
        lambda m: m["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(rayStartParams={"num-cpus": 1}),
    ):
        spoiled = json.loads(json.dumps(manifest))
        spoil(spoiled)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoiled, schema("RayJob"))


def test_a_run_that_resumes_is_tried_again_on_a_new_cluster(render):
    resumes = yaml.safe_load(render(RECIPES[0], *RUN, "train.resume=auto", "checkpoint.every=5")[1])
    assert resumes["spec"]["backoffLimit"] > 0
    assert yaml.safe_load(render(RECIPES[0], *RUN)[1])["spec"]["backoffLimit"] == 0


def test_secrets_are_named_not_written(render, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "raysecret")
    output = render("--secret", "hub", RECIPES[0], *RUN)[1]
    assert "secret" not in output.replace("secretRef", "")
    assert {"secretRef": {"name": "hub"}} in yaml.safe_load(output)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ][0]["envFrom"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--claim", "runs", "train.output_dir=/elsewhere/run"], "must lie in /shared"),
        (["--name", "No Name"], "--name must be 1 to 40 lower-case letters"),
        (["rollout.num_cpus=500"], "must fit the cluster"),
        (["train.output_dir=runs/x"], "must be an absolute path"),
    ],
)
def test_what_cannot_work_is_refused(render, arguments, words):
    code, _, error = render(RECIPES[0], *RUN, *arguments)
    assert code == 2 and words in error and len(error.splitlines()) == 1


def test_the_nodes_must_be_described(capsys):
    assert run_command(["render", "kuberay", "--image", "x", RECIPES[0], *RUN]) == 2
    assert "cluster.describe must name the nodes" in capsys.readouterr().err

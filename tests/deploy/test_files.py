"""deploy/: the cluster launcher's YAML by Ray's own schema, shell scripts by shellcheck, the Dockerfile by its steps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SCRIPTS = [*sorted((ROOT / "deploy").glob("*.sh")), ROOT / ".ci" / "run"]


def test_the_cluster_launcher_file_fits_rays_schema():
    found = yaml.safe_load((ROOT / "deploy" / "ray_cluster.yaml").read_text())
    validate_config(prepare_config(found))  # as `ray up` does
    assert "--dashboard-host=127.0.0.1" in found["head_start_ray_commands"][1]
    assert all("RAY_AUTH_MODE=token" in found[key][1] for key in ("head_start_ray_commands", "worker_start_ray_commands"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_sound(script):
    done = subprocess.run([str(Path(sys.executable).parent / "shellcheck"), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def steps(stage: str) -> list[tuple[str, str]]:
    """List the instructions of one stage of the Dockerfile."""
    body = re.search(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert body, stage
    return [tuple(line.split(" ", 1)) for line in body[1].splitlines() if line and not line.startswith("#")]  # type: ignore[misc]


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_image_holds_no_secret_and_runs_as_nobody_special(stage):
    words = {word for word, _ in steps(stage)}
    assert words <= {"ENV", "WORKDIR", "COPY", "RUN", "USER"}
    assert steps(stage)[-1] == ("USER", "1000")
    assert not re.search(r"TOKEN|SECRET|PASSWORD", DOCKERFILE)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".env", "*.pem", "*.key"} <= set(ignored)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_steps_of_the_cpu_image_run(tmp_path):
    """Run what the image runs, in a copy of what it copies: machine packages and users apart."""
    tree = tmp_path / "opt"
    ignored = shutil.ignore_patterns(*(ROOT / ".dockerignore").read_text().replace("**/", "").split())
    shutil.copytree(ROOT, tree, ignore=ignored)
    for word, rest in steps("cpu"):
        if word == "RUN" and not rest.startswith("useradd"):
            subprocess.run(["bash", "-euc", rest], cwd=tree, env={"PATH": "/usr/bin:/bin", "PLATFORM": "cpu", **machine()}, check=True)
    done = subprocess.run([tree / ".venv/bin/rlooper", "--help"], capture_output=True, text=True, check=True)
    assert "submit" in done.stdout


def machine() -> dict[str, str]:

    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "UV_", "HOME"))}
    return kept | {"PYTHON": sys.executable}

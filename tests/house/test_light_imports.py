"""Vocabulary, configuration and estimators load without the heavy libraries, so that `--check` takes a second."""

import json
import subprocess
import sys
from pathlib import Path

from tests.house.rules import ROOT

HEAVY = {"ray", "vllm", "deepspeed", "transformers"}
LIGHT = [
    "orchestrator",
    "orchestrator.types",
    "orchestrator.ports",
    "orchestrator.__main__",
    "deploy.prepare_demo",
    *(f"{room}.{path.stem}" for room in ("configs", "estimators") for path in sorted((ROOT / room).glob("[!_]*.py"))),
]


def heavy_after(modules: list[str], root: Path) -> dict[str, list[str]]:
    """Import modules one by one in a fresh interpreter; return which heavy libraries each brought in."""
    program = (
        "import importlib, json, sys\nloaded = {}\n"
        f"for name in {modules!r}:\n"
        "    before = set(sys.modules)\n    importlib.import_module(name)\n"
        f"    loaded[name] = sorted((set(sys.modules) - before) & {HEAVY!r})\n"
        "print(json.dumps(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_light_modules_stay_light() -> None:
    assert {name: heavy for name, heavy in heavy_after(LIGHT, ROOT).items() if heavy} == {}


def test_a_heavy_module_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "fat.py").write_text("import ray\n")
    assert heavy_after(["fat"], tmp_path) == {"fat": ["ray"]}


def test_the_vocabulary_needs_no_torch() -> None:
    program = "import sys, orchestrator.ports, configs.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0

"""The built wheel holds the rooms and the recipes, and its console script runs outside of the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.rules import ROOMS, ROOT, files_of


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tree and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in files_of(ROOT):
        if name.split("/")[0] in (*ROOMS, "tests", "deploy", "benchmarks") or "/" not in name:
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("rlooper-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_wheel_holds_the_rooms_and_nothing_else(unpacked: Path) -> None:
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == set(ROOMS)


def test_wheel_holds_every_source_and_recipe(unpacked: Path) -> None:
    expected = {n for n in files_of(ROOT) if n.split("/")[0] in ROOMS and n.endswith((".py", ".yaml"))}
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.suffix in (".py", ".yaml")}
    assert found == expected


def test_console_script_runs_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    (points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "rlooper = orchestrator.__main__:main" in points.read_text()
    program = "import sys, orchestrator.__main__ as cli; print(cli.__file__); sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(unpacked)) and "train" in done.stdout

"""Every recipe loads, alone where it names a model and data, else on top of the demo's."""

from pathlib import Path

import pytest

from configs.load import load
from tests.house.rules import ROOT

RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_loads(recipe: Path) -> None:
    is_whole = "train:" in recipe.read_text() and "path:" in recipe.read_text()
    base = [] if is_whole else [str(ROOT / "configs" / "demo.yaml")]
    load([*base, str(recipe)])


def test_there_are_recipes() -> None:
    assert ROOT / "configs" / "demo.yaml" in RECIPES

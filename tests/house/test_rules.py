"""Our tree keeps every rule, and every rule finds the fault in a small bad tree."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import rules

RULES = (
    rules.forbidden_imports,
    rules.bypassed_doors,
    rules.vague_modules,
    rules.blind_excepts,
    rules.config_probes,
    rules.oversized,
    rules.uncommented_keys,
    rules.undocumented,
    rules.machine_paths,
    rules.index_hosts,
)
SWALLOW = "try:\n    f()\nexcept {}:\n    pass\n"
PASS_ON = "try:\n    f()\nexcept BaseException as e:\n    {}\n"
INDEX = "https://" + "py" + "pi" + ".org/simple"
TORCH_INDEX = "https://download.py" + "torch" + ".org/whl/cpu"
SECTION = "class ModelConfig:\n    {}\n"

BAD = [
    (rules.forbidden_imports, "configs/load.py", "import orchestrator.types"),
    (rules.forbidden_imports, "estimators/rloo.py", "from configs.load import load"),
    (rules.forbidden_imports, "estimators/rloo.py", "from orchestrator.types import Group"),
    (rules.forbidden_imports, "actors/pool.py", "from learner.packing import plan"),
    (rules.forbidden_imports, "actors/pool.py", "from orchestrator import train"),
    (rules.forbidden_imports, "actors/reference.py", "from learner.worker import LearnerWorker"),
    (rules.forbidden_imports, "learner/worker.py", "def f():\n    from actors.pool import Pool"),
    (rules.forbidden_imports, "learner/worker.py", "from ..actors import pool"),
    (rules.forbidden_imports, "orchestrator/feed.py", "import importlib\nimportlib.import_module('learner.group')"),
    (rules.forbidden_imports, "orchestrator/feed.py", "from tests.tiny import make_tiny_model"),
    (rules.forbidden_imports, "orchestrator/train.py", "import ray"),
    (rules.bypassed_doors, "actors/rollout.py", "from vllm import LLM"),
    (rules.bypassed_doors, "learner/worker.py", "def f():\n    import deepspeed.comm"),
    (rules.vague_modules, "learner/utils.py", ""),
    (rules.vague_modules, "learner/common/tensors.py", ""),
    (rules.blind_excepts, "actors/rollout.py", SWALLOW.format("Exception")),
    (rules.blind_excepts, "actors/rollout.py", SWALLOW.format("(ValueError, Exception)")),
    (rules.blind_excepts, "actors/rollout.py", SWALLOW.format("BaseException")),
    (rules.blind_excepts, "actors/rollout.py", SWALLOW.format("")),
    (rules.blind_excepts, "actors/rollout.py", PASS_ON.format("print(e)")),
    (rules.config_probes, "learner/worker.py", "getattr(self.config.learner, 'lr', 0.1)"),
    (rules.config_probes, "learner/worker.py", "def f(config):\n    return hasattr(config, 'lr')"),
    (rules.oversized, "learner/worker.py", "x = 1\n" * 401),
    (rules.oversized, "learner/worker.py", "def f():\n" + "    x = 1\n" * 60),
    (rules.uncommented_keys, "configs/schema.py", SECTION.format("path: str = ''")),
    (rules.undocumented, "estimators/rloo.py", "def rloo(): ..."),
    (rules.undocumented, "orchestrator/ports.py", "class Learner:\n    '''It learns.'''\n    async def step(self): ..."),
    (rules.machine_paths, "README.md", "see /" + "work/main/README.md"),
    (rules.machine_paths, "learner/worker.py", "LOG = '/" + "tmp/log'"),
    (rules.index_hosts, "requirements/cpu.txt", f"--index-url {INDEX}"),
    (rules.index_hosts, "Makefile", f"INDEX := {TORCH_INDEX}"),
    (rules.index_hosts, "deploy/setup.sh", f"index={INDEX}"),
]
GOOD = [
    (rules.forbidden_imports, "orchestrator/build.py", "from learner.group import Group\nimport actors.roles"),
    (rules.forbidden_imports, "actors/reference.py", "from learner.logprobs import score_groups"),
    (rules.forbidden_imports, "learner/worker.py", "import torch\nfrom estimators.kl import k1\nfrom learner import update"),
    (rules.bypassed_doors, "actors/vllm_weights.py", "import vllm"),
    (rules.blind_excepts, "actors/pool.py", SWALLOW.format("Exception")),
    (rules.blind_excepts, "actors/rollout.py", PASS_ON.format("future.set_exception(e)")),
    (rules.blind_excepts, "actors/rollout.py", PASS_ON.format("raise")),
    (rules.config_probes, "learner/worker.py", "def f(model):\n    config = model.config\n    return getattr(config, 'head_dim', 0)"),
    (rules.oversized, "learner/worker.py", "def f():\n" + "    x = 1\n" * 59),
    (rules.uncommented_keys, "configs/schema.py", SECTION.format("path: str = ''  # a folder\n    sub: SubConfig = SubConfig()")),
    (rules.undocumented, "estimators/rloo.py", "def _sum(): ..."),
    (rules.machine_paths, "README.md", "a/" + "work/b, $HOME/" + "tmp/x and /" + "workspace"),
    (rules.index_hosts, "deploy/setup.sh", f"index={TORCH_INDEX}"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_tree_keeps(rule: Callable[[Path], list[str]]) -> None:
    found = rule(rules.ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_a_bad_tree_is_found(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    found = rule(_plant(tmp_path, name, text))
    assert found and all(sentence.startswith(name) for sentence in found)


@pytest.mark.parametrize(("rule", "name", "text"), GOOD)
def test_a_good_tree_is_left_alone(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    assert rule(_plant(tmp_path, name, text)) == []


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_the_checker_reads_our_files() -> None:
    files = rules.files_of(rules.ROOT)
    assert {"Makefile", "orchestrator/types.py", "configs/schema.py", "requirements/cpu.txt"} <= set(files)


def _plant(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root

"""The rules of the house as functions: each takes the root of a tree and returns its violations, one sentence each.

They read sources and run nothing, so that the tests can show each of them a small bad tree as well as our own.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "estimators", "actors", "learner", "orchestrator")
VOCABULARY = {"orchestrator.types", "orchestrator.ports"}

# room -> what of ours it may import (a package name stands for everything in it)
MAY_IMPORT = {
    "configs": {"configs"},
    "estimators": {"estimators", "configs.schema"},
    "actors": {"actors", "configs.schema", *VOCABULARY},
    "learner": {"learner", "estimators", "configs.schema", *VOCABULARY},
    "orchestrator": {"orchestrator", "estimators", "configs"},
}
# file -> what it may import besides
MAY_ALSO_IMPORT = {
    "orchestrator/build.py": {"actors", "learner"},  # the composition root
    "actors/reference.py": {"learner.packing", "learner.logprobs"},  # reference and learner score by the same code
    "actors/hf_engine.py": {"learner.packing", "learner.logprobs"},
    **dict.fromkeys(  # a reward that cannot be had is a wrong configuration
        ("actors/environments.py", "actors/reward_model.py", *(f"actors/rewards/{name}.py" for name in ("process", "worker"))),
        {"configs.rules"},
    ),
}
DOORS = {"vllm": re.compile(r"actors/vllm_\w+\.py"), "deepspeed": re.compile(r"learner/deepspeed_engine\.py")}
THE_LOOP, LOOP_MUST_NOT_IMPORT = "orchestrator/train.py", {"ray", "vllm", "deepspeed", "torch", "transformers"}

VAGUE_NAMES = {"util", "utils", "common", "misc", "helper", "helpers", "base", "manager"}
# file -> may catch everything: the supervised retry, and the boundary to functions that users write
MAY_CATCH_ALL = {"actors/pool.py", "actors/rewards/child.py", "actors/rewards/interfaces.py", "actors/episodes.py"}
OUR_CONFIG = re.compile(r"(self\.)?_?(config|cfg)(\.(model|data|algorithm|rollout|reference|reward|learner|train|eval|cluster))?")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
DOCUMENTED = re.compile(r"estimators/\w+\.py|orchestrator/(types|ports)\.py")

MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|tmp)(?![\w-])")
# package indexes and registries, put together here so that this file does not name them either
INDEX_HOST = re.compile(
    r"\b(?:" + "|".join(["py" + "pi", "python" + "hosted", "npm" + "js", "deb" + "ian", "download.py" + "torch"]) + r")\.(?:org|com|net)"
)
MAY_NAME_TORCH_INDEX = "deploy/setup.sh"


def files_of(root: Path) -> list[str]:
    """List the files of a tree as git sees them (tracked, and new ones not ignored); all of them where git has none."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() if (root / ".git").exists() else [str(p.relative_to(root)) for p in root.rglob("*")]
    return sorted(name for name in names if (root / name).is_file())


def _sources(root: Path, rooms: tuple[str, ...] = ROOMS) -> Iterator[tuple[str, ast.Module]]:
    for name in files_of(root):
        if name.endswith(".py") and name.split("/")[0] in rooms:
            yield name, ast.parse((root / name).read_text(), name)


def _imports(root: Path, name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted module of every import of a file, at any depth, importlib's included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.removesuffix(".py").split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                is_module = (root / (inner.replace(".", "/") + ".py")).exists()
                yield node.lineno, inner if is_module else module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def _covers(allowed: set[str], module: str) -> bool:
    return any(module == one or module.startswith(one + ".") for one in allowed)


def forbidden_imports(root: Path) -> list[str]:
    """DESIGN section 2: who may import whom."""
    found = []
    for name, tree in _sources(root):
        room = name.split("/")[0]
        allowed = MAY_IMPORT[room] | MAY_ALSO_IMPORT.get(name, set())
        for line, module in _imports(root, name, tree):
            top = module.split(".")[0]
            if top in (*ROOMS, "tests", "benchmarks", "deploy") and not _covers(allowed, module):
                found.append(f"{name}:{line} imports {module}; {room} may import {', '.join(sorted(allowed))}")
            if name == THE_LOOP and top in LOOP_MUST_NOT_IMPORT:
                found.append(f"{name}:{line} imports {module}; the loop knows no engine")
    return found


def bypassed_doors(root: Path) -> list[str]:
    """One heavy library, one door."""
    found = []
    for name, tree in _sources(root, (*ROOMS, "deploy")):
        for line, module in _imports(root, name, tree):
            door = DOORS.get(module.split(".")[0])
            if door and not door.fullmatch(name):
                found.append(f"{name}:{line} imports {module}; its door is {door.pattern}")
    return found


def vague_modules(root: Path) -> list[str]:
    """No module is called utils, common, misc, helpers, base or manager."""
    parts = {name: {Path(name).stem, *Path(name).parent.parts} for name in files_of(root) if name.endswith(".py")}
    return [f"{name} has a vague name; name what it holds" for name, words in parts.items() if words & VAGUE_NAMES]


def blind_excepts(root: Path) -> list[str]:
    """Only MAY_CATCH_ALL swallows everything; elsewhere BaseException is passed on: `raise`, `set_exception(error)`."""
    found = []
    for name, tree in _sources(root, (*ROOMS, "deploy", "benchmarks")):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler) or name in MAY_CATCH_ALL:
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            caught = {"everything" if kind is None else ast.unparse(kind) for kind in kinds}
            if "Exception" in caught or (caught & {"everything", "BaseException"} and not _passes_on(node)):
                found.append(f"{name}:{node.lineno} catches {', '.join(caught)}; name the errors that it can handle")
    return found


def _passes_on(handler: ast.ExceptHandler) -> bool:
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    hands_over = any(
        call.func.attr in ("set_exception", "_fail") and [ast.unparse(argument) for argument in call.args] == [handler.name]
        for call in calls
    )
    return hands_over or any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def config_probes(root: Path) -> list[str]:
    """No getattr(config, "name", default): the schema has every key. A model's own config is another thing."""
    found = []
    for name, tree in _sources(root):
        foreign = _probes(tree, of_models=True)
        found += [
            f"{name}:{node.lineno} probes {ast.unparse(node.args[0])}; read the key, the schema has it"
            for node in _probes(tree, of_models=False)
            if node not in foreign
        ]
    return found


def _probes(tree: ast.AST, *, of_models: bool) -> list[ast.Call]:
    """Find getattr and hasattr on a config; `of_models`: only in functions that take `config` from a model."""
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] if of_models else [tree]
    return [
        node
        for scope in scopes
        if not of_models or re.search(r"\bconfig = model\.|config: PretrainedConfig", ast.unparse(scope))
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr")
        and node.args
        and OUR_CONFIG.fullmatch(ast.unparse(node.args[0]))
    ]


def oversized(root: Path) -> list[str]:
    """No file over 400 lines, no function over 60."""
    found = []
    for name, tree in _sources(root, (*ROOMS, "deploy", "benchmarks")):
        lines = len((root / name).read_text().splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{name} must have at most {MAX_FILE_LINES} lines, got {lines}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno} {node.name} must have at most {MAX_FUNCTION_LINES} lines, got {lines}")
    return found


def uncommented_keys(root: Path) -> list[str]:
    """Every key of the schema says what it does, in a comment beside it or right above; sections speak for themselves."""
    path = root / "configs" / "schema.py"
    text = path.read_text()
    lines = text.splitlines()
    found = []
    for section in ast.parse(text).body:
        for key in section.body if isinstance(section, ast.ClassDef) else []:
            if not isinstance(key, ast.AnnAssign) or ast.unparse(key.annotation).endswith("Config"):
                continue
            beside = any("  # " in line for line in lines[key.lineno - 1 : key.end_lineno])
            above = lines[key.lineno - 2].lstrip().startswith("# ")
            if not (beside or above):
                found.append(f"configs/schema.py:{key.lineno} {section.name}.{ast.unparse(key.target)} has no comment")
    return found


def undocumented(root: Path) -> list[str]:
    """Public functions, methods and classes of the estimators and the vocabulary have docstrings."""
    found = []
    for name, tree in _sources(root):
        if DOCUMENTED.fullmatch(name):
            scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
            for node in (node for scope in scopes for node in scope.body):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    if not ast.get_docstring(node):
                        found.append(f"{name}:{node.lineno} {node.name} has no docstring")
    return found


def _lines(root: Path) -> Iterator[tuple[str, int, str]]:
    for name in files_of(root):
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue  # a picture
        yield from ((name, number, line) for number, line in enumerate(text.splitlines(), 1))


def machine_paths(root: Path) -> list[str]:
    """No file of the product names a folder of the machine that it was written on."""
    return [
        f"{name}:{number} names a path of a machine: {line.strip()[:100]}"
        for name, number, line in _lines(root)
        if not name.startswith("tests/") and MACHINE_PATH.search(line.removeprefix("#!"))
    ]


def index_hosts(root: Path) -> list[str]:
    """No file names a package index, but for torch's CPU index in the set-up."""
    return [
        f"{name}:{number} names a package index: {line.strip()[:100]}"
        for name, number, line in _lines(root)
        for host in INDEX_HOST.findall(line)
        if not (name == MAY_NAME_TORCH_INDEX and "torch" in host)
    ]

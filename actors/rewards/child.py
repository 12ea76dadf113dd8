"""The process in which one reward function runs: `python -m actors.rewards.child FD`, started by process.py.

It is told what to load, says whether it could, and then answers one batch after the other. What it sends is JSON: the supervisor
unpickles nothing that passed through a user's code. Output of that code goes to the worker's log.
"""

import ctypes
import importlib.util
import json
import math
import os
import signal
import sys
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any

from actors.rewards.answers import vote
from actors.rewards.interfaces import Adapted, Batch, Refusal, adapt, plain_values

PR_SET_PDEATHSIG = 1


def main(descriptor: int, supervisor: int) -> None:
    """Serve until the supervisor hangs up or dies."""
    if sys.platform == "linux":  # also inside a C loop that never returns
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        return
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    connection = Connection(descriptor)
    try:
        function = load(**connection.recv())
    except Refusal as refusal:
        _send(connection, {"refused": str(refusal)})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        _send(connection, answer(function, batch))


def answer(function: Adapted, batch: Batch) -> dict[str, Any]:
    """Score a batch.

    Returns:
        {"values": K of [cause, number, detail], "extras": {name: K numbers or null}, "answers": K texts}, or {"error": why}.
    """
    try:
        values, extras = function(batch)
        scored = [_judge(value) for value in plain_values(values, len(batch))]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    logged = {str(name): [_number(value) for value in column] for name, column in extras.items() if len(column) == len(batch)}
    return {"values": scored, "extras": logged, "answers": [vote(text) for text in batch.completions]}


def load(name: str, arguments: Mapping[str, Any], timeout_s: float) -> Adapted:
    """Find a reward function: built in, `path.py:function`, or `http://.../get_reward` (replicas joined by |).

    Args:
        name: as in reward.function.
        arguments: its own in reward.arguments.
        timeout_s: after which the supervisor kills a call.

    Raises:
        Refusal: no such name, file or function, the file does not import, or the arguments do not fit.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py") and attribute:
        return adapt(_from_file(Path(path), attribute, name), attribute, arguments)
    from actors.rewards import registry, remote  # these import what a user's file may not need

    if name.startswith(("http://", "https://")):
        return remote.get_reward(name.split("|"), timeout_s=timeout_s, **arguments)
    if name in registry.BUILT_IN:
        return registry.built_in(name, arguments)
    raise Refusal(
        f"reward.function must be one of {', '.join(registry.BUILT_IN)}, path.py:function or a URL, got {name}. Correct the name."
    )


def _from_file(path: Path, attribute: str, name: str) -> Any:
    if not path.is_file():
        raise Refusal(f"reward.function must name an existing file, got {name}. Check the path.")
    registered = _stand_in_for_swift()
    sys.path.insert(0, str(path.parent.absolute()))  # its own neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file does at import
        raise Refusal(
            f"reward.function must be importable, got {type(error).__name__}: {error} from {path}. Mend the file."
        ) from error
    function = vars(module).get(attribute, registered.get(attribute))
    if not callable(function):
        raise Refusal(f"reward.function must name a function of {path}, got {attribute}. Check the spelling.")
    return function


def _stand_in_for_swift() -> dict[str, Any]:
    """Let `from swift.plugin import ORM, orms` work where ms-swift is not installed; returns what files register in orms."""
    if importlib.util.find_spec("swift") is not None:
        return {}
    orm = type("ORM", (), {"__init__": lambda self, *args, **kwargs: None})
    orms: dict[str, Any] = {}
    for name in ("swift", "swift.plugin", "swift.plugin.orm", "swift.rewards"):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(ORM=orm, AsyncORM=orm, orms=orms, __path__=[])
    return orms


def _judge(value: Any) -> tuple[str, float | None, str]:
    if value is None:
        return "not_applicable", None, ""
    if isinstance(value, Exception):
        return "error", None, f"{type(value).__name__}: {value}"
    number = _number(value)
    if number is None:
        return "error", None, f"a reward must be a finite number or None, got {value!r:.80}"
    return "ok", number, ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""One reward function's process as its supervisor sees it: started, given batches, killed at the deadline, started again."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from actors.rewards.interfaces import Batch
from configs.rules import ConfigError

START_TIMEOUT_S = 120.0  # to import a user's file
# what a process of user code gets of its worker's environment; no secret is among these, and reward.environment adds to them
PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_starter = ThreadPoolExecutor(1)  # a child dies with the thread that started it, so this one never ends

Cause = Literal["ok", "timeout", "error", "not_applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one function says of one response."""

    cause: Cause
    value: float  # nan where cause is not "ok"
    extras: Mapping[str, float]
    detail: str
    answer: str  # the response's final answer; empty where it has none, or the call failed


class FunctionProcess:
    """A reward function in a process of its own."""

    def __init__(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, environment: Sequence[str]) -> None:
        """Take what to run; nothing starts yet.

        Args:
            name: as in reward.function.
            arguments: its own in reward.arguments.
            timeout_s: of one call.
            environment: names of further environment variables that its process gets.
        """
        self._loads = {"name": name, "arguments": dict(arguments), "timeout_s": timeout_s}
        self.name, self._timeout_s, self._environment = name, timeout_s, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._watched = -1  # pidfd

    def start(self) -> None:
        """Start the process and wait until its function is loaded.

        Raises:
            ConfigError: it cannot be loaded.
        """
        self._connection, theirs = Pipe()
        places = [str(Path(__file__).parents[2]), *(place for place in sys.path if place)]
        env = {key: os.environ[key] for key in (*PASSED_ON, *self._environment) if key in os.environ}
        with theirs:
            command = [sys.executable, "-m", "actors.rewards.child", str(theirs.fileno()), str(os.getpid())]
            self._process = _starter.submit(
                subprocess.Popen, command, env=env | {"PYTHONPATH": os.pathsep.join(places)}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            ).result()  # fmt: skip
        self._watched = os.pidfd_open(self._process.pid)
        with contextlib.suppress(OSError):  # it has died already, as the answer will say
            self._connection.send(self._loads)
        answer = self._receive(START_TIMEOUT_S)
        if "ready" not in answer:
            self.stop()
            raise ConfigError(
                answer.get("refused")
                or f"reward.function must load within {START_TIMEOUT_S:g} s, got {answer['error']} from {self.name}. Mend the file."
            )

    def score(self, batch: Batch) -> list[Scored]:
        """Score K responses in at most about (K + 1) * timeout_s.

        A call that fails as a whole (raises, hangs, takes its process down, too few values) is repeated for each response alone, so
        that the fault costs only the responses that have it.
        """
        scored = self._attempt(batch)
        if isinstance(scored, list):
            return scored
        if len(batch) == 1:
            return [scored]
        alone = [self._attempt(batch.only(index)) for index in range(len(batch))]
        return [one[0] if isinstance(one, list) else one for one in alone]

    def stop(self) -> None:
        """Kill the process and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(self._watched)
            self._connection.close()

    def _attempt(self, batch: Batch) -> list[Scored] | Scored:
        try:
            if self._process is None:
                self.start()
            self._connection.send(batch)
        except (ConfigError, OSError) as error:
            self.stop()
            return _invalid("error", str(error))
        answer = self._receive(self._timeout_s)
        if "values" not in answer:
            return _invalid(answer.get("cause", "error"), answer["error"])
        extras = answer["extras"]
        return [
            Scored(
                cause=cause,
                value=math.nan if value is None else value,
                extras={name: column[i] for name, column in extras.items() if column[i] is not None},
                detail=detail,
                answer=answer["answers"][i],
            )
            for i, (cause, value, detail) in enumerate(answer["values"])
        ]

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for an answer; a process that gives none in time or ends is killed and reaped."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        try:
            ready = wait([self._connection, self._watched], timeout_s)
            if self._connection in ready or self._connection.poll():
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError):  # ValueError: user code wrote into the connection
            ready = [self._watched]
        if not ready:
            self.stop()
            return {"cause": "timeout", "error": f"{self.name} gave no answer within {timeout_s:g} s and was killed"}
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, min(1.0, deadline - time.monotonic())))
        code = process.returncode
        self.stop()
        end = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return {"error": f"{self.name} took its process down ({end})"}


def _invalid(cause: Cause, detail: str) -> Scored:
    return Scored(cause=cause, value=math.nan, extras={}, detail=detail, answer="")

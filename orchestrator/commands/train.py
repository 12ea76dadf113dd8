"""`rlooper train`: check, then run."""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import load, to_yaml
from configs.schema import Config
from orchestrator.capacity import check_capacity, described
from orchestrator.checkpoint import listed
from orchestrator.stop import Stopped


def train(arguments: Sequence[str]) -> int:
    """Train a policy.

    Raises:
        ConfigError: bad input; nothing was started.
    """
    parser = argparse.ArgumentParser(
        prog="rlooper train",
        usage="rlooper train RECIPE.yaml ... [key=value ...] [--check]",
        description="Recipes and overrides apply from left to right; configs/schema.py documents every key.",
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="print the resolved configuration and exit")
    options, rest = parser.parse_known_args(arguments)
    config = load(rest)
    if config.cluster.describe is not None:
        check_capacity(config, described(config.cluster.describe))
    if options.check:
        print(to_yaml(config), end="")
        return 0
    return _run(config, rest)


def _run(config: Config, arguments: Sequence[str]) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # a redone call leaves refs behind whose error was handled
    from rich.console import Console

    from orchestrator import build

    console = Console(soft_wrap=True)
    try:
        asyncio.run(build.run(config, console))
    except Stopped as stopped:
        again = [*arguments, "train.resume=auto"] if listed(Path(config.train.output_dir)) else arguments
        print(f"rlooper: {stopped}; resume with: rlooper train {shlex.join(again)}", file=sys.stderr)
        return 3
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("rlooper: interrupted; every worker was stopped", file=sys.stderr)
        return 130
    except build.RUN_ERRORS as error:
        print(f"rlooper: {build.first_cause(error)}", file=sys.stderr)
        return 1
    return 0

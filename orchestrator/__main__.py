"""python -m orchestrator train RECIPE.yaml ... [key=value ...] [--check]

Exit codes: 0 the run did what was asked; 1 it failed; 2 bad input, nothing was started; 130 interrupted.
"""

import argparse
import asyncio
import os
import sys

from configs.load import load, to_yaml
from configs.rules import ConfigError
from orchestrator.capacity import check_capacity, described


def main() -> None:
    """Run a command and exit with its code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="rlooper", description="Critic-free reinforcement learning for language models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train a policy",
        usage="rlooper train RECIPE.yaml ... [key=value ...] [--check]",
        description="Recipes and overrides apply from left to right; configs/schema.py documents every key.",
    )
    train.add_argument("--check", action="store_true", help="print the resolved configuration and exit")
    options, rest = parser.parse_known_args(arguments)
    try:
        config = load(rest)
        if config.cluster.describe is not None:
            check_capacity(config, described(config.cluster.describe))
        if options.check:
            print(to_yaml(config), end="")
            return 0
        return _train(config)
    except ConfigError as error:
        print(f"rlooper: {error}", file=sys.stderr)
        return 2


def _train(config) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # a redone call leaves refs behind whose error was handled
    from rich.console import Console

    from orchestrator import build

    console = Console(soft_wrap=True)
    try:
        asyncio.run(build.run(config, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("rlooper: interrupted; every worker was stopped", file=sys.stderr)
        return 130
    except build.RUN_ERRORS as error:
        print(f"rlooper: {build.first_cause(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()

"""python -m orchestrator COMMAND ...: `rlooper --help` lists the commands, `rlooper COMMAND --help` explains one.

Exit codes: 0 the command did what was asked; 1 it failed; 2 bad input, nothing was started; 3 stopped by a
signal, saved, can be resumed; 130 stopped at once by a second signal.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from configs.rules import ConfigError
from orchestrator.commands.evaluate import evaluate
from orchestrator.commands.export import export
from orchestrator.commands.render import render
from orchestrator.commands.submit import submit
from orchestrator.commands.train import train

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "submit": submit,
    "render": render,
    "eval": evaluate,
    "export": export,
}


def main() -> None:
    """Run a command and exit with its code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    listed = "\n".join(f"  {name:<10} {(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rlooper",
        usage="rlooper COMMAND ...",
        description=f"Critic-free reinforcement learning for language models.\n\ncommands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, help="`rlooper COMMAND --help` explains one")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command](options.arguments)
    except ConfigError as error:
        print(f"rlooper: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()

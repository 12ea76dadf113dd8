"""`rlooper export`: a Hugging Face folder from any checkpoint of a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.load import from_flat
from configs.rules import ConfigError
from orchestrator.checkpoint import LEARNER, chosen, read_state


def export(arguments: Sequence[str]) -> int:
    """Write a Hugging Face folder from a checkpoint.

    Raises:
        ConfigError: no such checkpoint, or the output folder is not empty; nothing was written.
    """
    parser = argparse.ArgumentParser(
        prog="rlooper export",
        description="Write the policy of a checkpoint as a folder that from_pretrained and vLLM load.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder (train.output_dir)")
    parser.add_argument("--step", type=int, help="step of the checkpoint; left out: the newest whole one")
    parser.add_argument("--best", action="store_true", help="the checkpoint that checkpoint.keep_best kept")
    parser.add_argument("--output", type=Path, metavar="DIR", help="new or empty folder; left out: RUN/policy-step-N")
    options = parser.parse_args(arguments)
    checkpoint = chosen(options.run, options.step, best=options.best)
    state, beside = read_state(checkpoint)
    output: Path = options.output or options.run / f"policy-step-{state.step}"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output must be a new or empty folder, got {output}, which is not. Choose another.")
    from orchestrator import build

    build.export(from_flat(beside["config"]), checkpoint / LEARNER, output)
    print(f"policy of step {state.step} written to {output}")
    return 0

"""`rlooper eval`: what a model scores on held-out data, without training."""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.load import load
from configs.rules import ConfigError, held_out
from configs.schema import Config


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a model on held-out data.

    Raises:
        ConfigError: bad input; nothing was started.
    """
    parser = argparse.ArgumentParser(
        prog="rlooper eval",
        usage="rlooper eval MODEL [RECIPE.yaml ...] [key=value ...] [--output FILE]",
        description="Sample a model on eval.data and score it by the recipe's rewards; docs/evaluation.md has the metrics.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder or hub name, or the folder of a run (with its recipe)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON result; left out: eval/results.json in train.output_dir")
    options, rest = parser.parse_known_args(arguments)
    model, recipe = _policy(options.model)
    config = _alone(load(["data.train=none", *recipe, *rest, f"model.path={json.dumps(model)}"]))
    if not held_out(config) or not (config.eval.sampled or config.eval.greedy):
        raise ConfigError("eval.data must name held-out rows, with eval.sampled or eval.greedy, got none. Set eval.data=FILE.")
    return _run(config, options.output or Path(config.train.output_dir) / "eval" / "results.json")


def _policy(name: str) -> tuple[str, list[str]]:
    """Find the model that MODEL means, and the recipe that comes with it: a run has both."""
    run = Path(name).expanduser()
    if not (run / "config.yaml").is_file():
        return name, []
    policy = run / "policy"
    if not (policy / "config.json").is_file():
        raise ConfigError(
            f"MODEL must be a model or a run that came to its end, got {name} without a policy. Make one: rlooper export {name}"
        )
    return str(policy), [str(run / "config.yaml")]


def _alone(config: Config) -> Config:
    """Ask nothing for learner and reference, which do not run."""
    return replace(
        config,
        algorithm=replace(config.algorithm, beta=0.0),
        learner=replace(config.learner, num_ranks=1, num_cpus=0.0, num_gpus=0.0),
        cluster=replace(config.cluster, placement="disaggregated"),
    )


def _run(config: Config, output: Path) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    from rich.console import Console

    from orchestrator import build

    console = Console(soft_wrap=True)
    try:
        metrics = asyncio.run(build.evaluate(config, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("rlooper: interrupted; every worker was stopped", file=sys.stderr)
        return 130
    except build.RUN_ERRORS as error:
        print(f"rlooper: {build.first_cause(error)}", file=sys.stderr)
        return 1
    result = {
        "model": config.model.path,
        "data": held_out(config),
        "seed": config.train.seed,
        "metrics": {name: None if math.isnan(value) else value for name, value in metrics.items()},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(output.name + ".part")
    scratch.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    scratch.replace(output)
    _print_table(console, metrics)
    console.print(f"written to {output}", highlight=False)
    return 0


def _print_table(console, metrics: Mapping[str, float]) -> None:
    """Print one row per dataset and way; rates and rewards with their 95 % intervals."""
    from rich.table import Table

    table = Table("dataset", "metric", "value", "95 % interval", title_justify="left")
    previous = ""
    for name, value in metrics.items():
        place, _, metric = name.removeprefix("eval/").rpartition("/")
        if metric.endswith("_stderr"):
            continue
        error = metrics.get(f"eval/{place}/{metric.removesuffix('_mean')}_stderr")
        interval = "" if error is None else f"{value - 1.96 * error:.3f} to {value + 1.96 * error:.3f}"
        table.add_row("" if place == previous else place, metric, f"{value:.4g}", interval)
        previous = place
    console.print(table)

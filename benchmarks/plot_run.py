"""Draw the reward curve of a run from its own metrics: python -m benchmarks.plot_run RUN_FOLDER [OUTPUT.png]

A line of metrics.jsonl is a flat object of "step" and metrics. Drawn are the training reward of every step with its mean
over the last five, and the accuracy on held-out prompts, sampled and greedy, wherever it was measured.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TRAIN = "reward/mean"
HELD_OUT = {"eval/sampled/reward_mean": "held-out, sampled", "eval/greedy/reward_mean": "held-out, greedy"}
SMOOTHED_STEPS = 5


def read_series(metrics: Path, name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one metric, in order of steps; of a step logged twice (after a resume) the last counts."""
    points = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if name in row:
            points[row["step"]] = row[name]
    return sorted(points), [points[step] for step in sorted(points)]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each value and up to width - 1 values before it."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))]


def draw(metrics: Path, output: Path, title: str) -> None:
    """Write the reward curve of a run as a PNG.

    Raises:
        ValueError: the file holds no training reward.
    """
    steps, rewards = read_series(metrics, TRAIN)
    if not steps:
        raise ValueError(f"{metrics} must hold {TRAIN}, got no such line. Name the folder of a run that trained a step")
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1)
    axes.plot(steps, smooth(rewards, SMOOTHED_STEPS), color="tab:blue", linewidth=2, label="training reward, mean of 5 steps")
    for (name, label), color, marker in zip(HELD_OUT.items(), ("tab:orange", "tab:green"), "os", strict=True):
        at, values = read_series(metrics, name)
        if at:
            axes.plot(at, values, color=color, marker=marker, markersize=5, linewidth=1.5, label=label)
    axes.set(xlabel="step", ylabel="mean reward, accuracy", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def main() -> None:
    """Draw the curve of the run folder on the command line."""
    parser = argparse.ArgumentParser(prog="plot_run", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder that holds metrics.jsonl")
    parser.add_argument("output", type=Path, nargs="?", help="PNG to write (default: reward.png in the folder)")
    parser.add_argument("--title", help="default: the folder's name")
    options = parser.parse_args()
    output = options.output or options.run / "reward.png"
    try:
        draw(options.run / "metrics.jsonl", output, options.title or options.run.resolve().name)
    except (OSError, ValueError) as error:
        parser.exit(1, f"plot_run: {error}\n")
    print(output)


if __name__ == "__main__":
    main()

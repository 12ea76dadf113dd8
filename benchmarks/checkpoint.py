"""What checkpoints cost on the demo: `python -m benchmarks.checkpoint [--json FILE] [key=value ...]`.

A short demo run writes a checkpoint after every other step, so that steps with one to wait for alternate with steps without.

wait_s             a step's wait for the checkpoint before it learns (median)
extra_s            how much longer generation and wait take beside a checkpoint than without one (difference of medians)
share_every_10     extra_s over the time of ten steps (target: at most 0.02)
bytes_over_state   size on disk over the state's bytes: 12 per trained parameter under AdamW in float32 (target: at most 1.02)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from orchestrator.checkpoint import listed

STEPS = 12
TARGETS = {"share_every_10": 0.02, "bytes_over_state": 1.02}


def main() -> None:
    """Run, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "orchestrator", "train", "configs/demo.yaml", f"train.num_steps={STEPS}", "checkpoint.every=2",
            "eval.data=null", "train.sample_table_every=0", f"train.output_dir={folder}", *overrides,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found = measure(Path(folder))
    for name, value in found.items():
        print(f"{name:<18} {value:.4g}" + (f"  (target: at most {TARGETS[name]:g})" if name in TARGETS else ""))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(run: Path) -> dict[str, float]:
    """Read a run's metrics and its newest checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if "time/step_s" in row and row["step"] > 1}  # the first one warms up
    beside = [row for step, row in steps.items() if step % 2]
    alone = [row for step, row in steps.items() if not step % 2]
    touched = [statistics.median(r["time/rollout_s"] + r["time/checkpoint_s"] for r in part) for part in (beside, alone)]
    extra_s = touched[0] - touched[1]
    step_s = statistics.median(r["time/step_s"] for r in alone)
    checkpoint = listed(run)[-1]
    num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    state_bytes = 0
    for path in checkpoint.rglob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for key in file.keys():
                state_bytes += 4 * file.get_slice(key).get_shape()[0]
    return {
        "step_s": step_s,
        "generation_s": touched[1],
        "wait_s": statistics.median(r["time/checkpoint_s"] for r in beside),
        "extra_s": extra_s,
        "share_every_10": extra_s / (10 * step_s),
        "state_bytes": state_bytes,
        "bytes_over_state": num_bytes / state_bytes,
        "num_checkpoints": len(beside),
    }


if __name__ == "__main__":
    main()

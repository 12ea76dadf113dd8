"""What the learner costs beside the bare arithmetic: `python -m benchmarks.learner [--json FILE] [--model PATH] [--only KEY]`.

Everything compared runs side by side in one process, alternating, on the same tokens; figures are medians.

step_vs_bare             tokens/s of a full step (forward, backward, optimizer and all) over bare loss.backward() on packed rows
packed_vs_padded         time of padded micro-batches over ours: response lengths skewed, at most 512 tokens, median 96
shared_prompt_gain       time without the shared prompt over time with it: 29 + 8 tokens, K = 8
logprob_memory_vs_naive  peak memory of the logprob pass over the naive one, forward and backward, 4096 tokens
peak_flops_share         FLOP/s of the step's forward and backward over those of a plain matrix product
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
KEEP_BUFFERS = {  # as in a run (learner/group.py); glibc reads them when the process starts
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

import numpy as np  # noqa: E402
import torch  # noqa: E402

from configs.schema import AlgorithmConfig, Config, LearnerConfig, ModelConfig, RolloutConfig, TrainConfig  # noqa: E402
from learner.logprobs import TokenLogprobs, load_model  # noqa: E402
from learner.worker import LearnerWorker  # noqa: E402
from orchestrator.types import Draw, Group, GroupFacts, Prompt, Reward, Sample, ScoredGroup  # noqa: E402

DEMO_MODEL = Path.home() / ".cache/rlooper/models/SmolLM2-135M-Instruct"
REPEATS = 5
TARGETS = {
    "step_vs_bare": 0.85,
    "packed_vs_padded": 2.0,
    "shared_prompt_gain": 2.5,
    "logprob_memory_vs_naive": 0.25,
    "peak_flops_share": 0.75,
}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", choices=[*TARGETS, "memory-child"])
    parser.add_argument(
        "--layout", choices=["naive", "chunked"], help="of memory-child, which the benchmark starts itself"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only == "memory-child":
        print(logprob_peak_bytes(options.layout))
        return
    if "MALLOC_TOP_PAD_" not in os.environ and sys.platform == "linux":
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.learner", *sys.argv[1:]], os.environ | KEEP_BUFFERS
        )
    results: dict[str, Any] = {"model": options.model, "threads": options.threads, "dtype": options.dtype}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        for key, measure in bench.measures().items():
            if options.only in (None, key):
                results |= measure()
                print(f"{key:26s} {results[key]:.3f}   (target {TARGETS[key]})", flush=True)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


class Bench:
    """One learner rank and the measures on it."""

    def __init__(self, options: Any, folder: str) -> None:
        self._options = options
        self._config = Config(
            model=ModelConfig(path=options.model, dtype=options.dtype),
            algorithm=AlgorithmConfig(
                beta=0.0, kl_in_reward=True, scale_rewards="none", kl_estimator="k1", correction="none"
            ),
            rollout=RolloutConfig(max_new_tokens=512),
            learner=LearnerConfig(lr=1e-6, threads=options.threads),
            train=TrainConfig(output_dir=folder),
        )
        self._worker = LearnerWorker(self._config, 0, list)
        self._worker.start(*self._worker.listen())
        self._engine = self._worker._engine
        self._module: TokenLogprobs = self._engine.module
        self._rng = np.random.default_rng(0)

    def measures(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Name the measures."""
        return {
            "step_vs_bare": self.step_vs_bare,
            "packed_vs_padded": self.packed_vs_padded,
            "shared_prompt_gain": self.shared_prompt_gain,
            "logprob_memory_vs_naive": self.logprob_memory_vs_naive,
            "peak_flops_share": self.peak_flops_share,
        }

    def step_vs_bare(self) -> dict[str, Any]:
        """A step on K = 1-like groups (prompt of one token, nothing shared), so that both compute the same packed tokens."""
        receipts = [self._receipt(1, [64] * 8) for _ in range(2)]
        rows = torch.from_numpy(self._rng.integers(0, 40000, (16, 64)))
        bare = load_model(self._options.model, dtype=torch.float32)

        def run_bare() -> None:
            with self._module.autocast():
                bare(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            bare.zero_grad()

        ours, theirs = alternate(lambda: self._worker.step(receipts), run_bare)
        return {"step_vs_bare": theirs / ours, "step_s": ours, "bare_s": theirs, "tokens": rows.numel()}

    def packed_vs_padded(self) -> dict[str, Any]:
        lengths = np.minimum(512, np.exp(self._rng.normal(np.log(96), 1.0, 12))).astype(int).clip(2)
        lengths[0] = 512
        groups = {g: self._receipt(1, [int(n)] * 1).group_ref for g, n in enumerate(lengths)}

        def packed() -> None:
            self._run(self._module.plan(groups, {g: [0] for g in groups}, max_tokens=4096, share=True))

        def padded() -> None:
            size = 4  # samples of a padded micro-batch
            batches = [list(groups)[i : i + size] for i in range(0, len(groups), size)]  # in draw order, as they come
            for batch in batches:
                chosen = {g: [0] for g in batch}
                width = size * max(int(lengths[g]) for g in batch)
                tree, self._module.family.tree = self._module.family.tree, False
                self._run(self._module.plan(groups, chosen, max_tokens=width, share=False))
                self._module.family.tree = tree

        ours, theirs = alternate(packed, padded)
        return {"packed_vs_padded": theirs / ours, "packed_s": ours, "padded_s": theirs, "lengths": lengths.tolist()}

    def shared_prompt_gain(self) -> dict[str, Any]:
        groups = {g: self._receipt(29, [8] * 8).group_ref for g in range(8)}
        chosen = {g: range(8) for g in groups}

        def run(share: bool) -> None:
            self._run(self._module.plan(groups, chosen, max_tokens=4096, share=share))

        ours, theirs = alternate(lambda: run(True), lambda: run(False))
        return {"shared_prompt_gain": theirs / ours, "shared_s": ours, "apart_s": theirs}

    def logprob_memory_vs_naive(self) -> dict[str, Any]:
        peaks = {layout: self._peak(layout) for layout in ("chunked", "naive")}
        ratio = peaks["chunked"] / peaks["naive"]
        return {"logprob_memory_vs_naive": ratio, **{f"{name}_peak_mib": peak / 2**20 for name, peak in peaks.items()}}

    def peak_flops_share(self) -> dict[str, Any]:
        """2 FLOP per weight and token forward, twice that backward; the head only where a token is predicted."""
        groups = {g: self._receipt(29, [8] * 8).group_ref for g in range(8)}
        batches = self._module.plan(groups, {g: range(8) for g in groups}, max_tokens=4096, share=True)
        tokens, predicted = sum(b.num_tokens for b in batches), sum(len(b.nodes) for b in batches)
        head = self._module.head.weight.numel()
        body = sum(p.numel() for p in self._module.causal_lm.base_model.parameters() if p.ndim > 1) - head
        flop = 6.0 * (tokens * body + predicted * head)
        dtype = getattr(torch, self._options.dtype)
        a, b = torch.randn(1024, 1536, dtype=dtype), torch.randn(1536, 1536, dtype=dtype)

        def product() -> None:
            for _ in range(40):
                torch.mm(a, b)

        ours, theirs = alternate(lambda: self._run(batches), product)
        reached, peak = flop / ours, 40 * 2.0 * 1024 * 1536 * 1536 / theirs
        return {"peak_flops_share": reached / peak, "step_gflops": reached / 1e9, "product_gflops": peak / 1e9}

    def _run(self, batches: list[Any]) -> None:
        """Forward and backward through the engine; the gradient is thrown away."""
        with self._engine.accumulate():
            for batch in batches:
                logprobs, _ = self._engine(batch)
                self._engine.backward(logprobs.mean())
        self._engine.discard()

    def _peak(self, layout: str) -> int:
        command = [sys.executable, "-m", "benchmarks.learner", "--only", "memory-child", "--layout", layout]
        env = {key: value for key, value in os.environ.items() if key not in KEEP_BUFFERS}  # kept buffers are not peak
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=env)
        return int(found.stdout.split()[-1])

    def _receipt(self, num_prompt_tokens: int, lengths: list[int]) -> ScoredGroup:
        """Random tokens; alternating rewards, so that every sample has an advantage."""
        prompt = Prompt(id="0", token_ids=tuple(self._tokens(num_prompt_tokens).tolist()), text="", columns={})
        samples = tuple(
            Sample(
                token_ids=self._tokens(n).astype(np.int32),
                logprobs=np.full(n, -9.0, np.float32),
                loss_mask=np.ones(n, bool),
                versions=np.zeros(n, np.int32),
                finish_reason="stop",
                text="",
                error="",
            )
            for n in lengths
        )
        draw = Draw(number=0, prompt=prompt)
        facts = GroupFacts(
            draw=0,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=tuple(lengths),
            truncated=(False,) * len(lengths),
            started_version=0,
            newest_version=0,
            worker="benchmark",
            generate_s=0.0,
        )
        rewards = tuple(Reward(value=float(k % 2), cause="ok", parts={}, detail="", answer="") for k in range(len(lengths)))
        group: Any = Group(draw=draw, samples=samples)
        return ScoredGroup(draw=draw, facts=facts, group_ref=group, reference_refs=(), rewards=rewards)

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, 40000, count)


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Time both in turns after a first round that does not count; returns the medians, seconds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats + 1):
        for run, times in zip((ours, theirs), seconds, strict=True):
            gc.collect()
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i:
                times.append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def logprob_peak_bytes(layout: str) -> int:
    """Measure in a process of its own what 4096 logprobs over V = 49152 add to its memory at the most."""
    from learner.logprobs import ChunkedHead

    class Headed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(576, 49152, bias=False)
            self.config: Any = self

        def get_text_config(self) -> Any:
            return self

        def get_output_embeddings(self) -> torch.nn.Linear:
            return self.lm_head

    model: Any = Headed()
    head = ChunkedHead(model, chunk_tokens=LearnerConfig().logprob_chunk_tokens)
    hidden, tokens = torch.randn(4096, 576, requires_grad=True), torch.randint(0, 49152, (4096,))
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    small = hidden[:8].detach().requires_grad_()  # warm up the kernels
    head(small, torch.arange(8), tokens[:8], 1.0, False)[0].sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # from here on a new peak
    before = memory_bytes("VmRSS")
    if layout == "chunked":
        logprobs = head(hidden, torch.arange(4096), tokens, 1.0, False)[0]
    else:
        logprobs = torch.log_softmax(model.lm_head(hidden).float(), -1).gather(-1, tokens[:, None])
    logprobs.sum().backward()
    return memory_bytes("VmHWM") - before


def memory_bytes(key: str) -> int:
    """Read a size from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()

"""Sums behind the metrics of one step, kept on each rank and reduced once."""

import torch

from learner.ranks import max_over_ranks, sum_over_ranks

# metric -> the count that divides its sum; ranks must reduce the same names in the same order
MEANS = {
    "kl/old": "tokens",
    "ratio/mean": "tokens",
    "clip_frac": "tokens",
    "clip_frac/low": "tokens",
    "clip_frac/high": "tokens",
    "entropy": "tokens",
    "mismatch/logprob_abs_diff": "tokens",
    "mismatch/kl": "tokens",
    "mismatch/corrected_frac": "tokens",
    "kl/ref": "kl_samples",
    "sync/changed_frac": "watched",
}
SUMS = ("loss/policy", "loss/kl", "loss/entropy", "learner/tokens", "samples_computed")
GREATEST = (
    "mismatch/logprob_abs_diff_max",
    "learner/optimizer_mib",
    "time/fetch_s",
    "time/logprob_s",
    "time/forward_backward_s",
    "time/optimizer_s",
)
COUNTS = tuple(dict.fromkeys(MEANS.values()))
_ADDED = (*MEANS, *SUMS, *COUNTS)


class Tally:
    """Adds up; `reduced` gives the metrics over all ranks, leaving out means of nothing."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(_ADDED, 0.0)
        self._greatest: dict[str, float] = dict.fromkeys(GREATEST, 0.0)

    def add(self, **sums: float | torch.Tensor) -> None:
        """Add to sums and counts; a slash in a name is written as two underscores."""
        for name, value in sums.items():
            self._sums[name.replace("__", "/")] += float(value)

    def raise_to(self, name: str, value: float) -> None:
        """Keep the greatest value."""
        self._greatest[name] = max(self._greatest[name], value)

    def spend(self, name: str, seconds: float) -> None:
        """Add time; over ranks the slowest counts."""
        self._greatest[name] += seconds

    def reduced(self, device: torch.device) -> dict[str, float]:
        """Reduce over ranks: means, sums, and the greatest of times and maxima."""
        added = sum_over_ranks(torch.tensor(list(self._sums.values()), dtype=torch.float64), device).tolist()
        sums = dict(zip(_ADDED, added, strict=True))
        top = max_over_ranks(torch.tensor(list(self._greatest.values()), dtype=torch.float64), device).tolist()
        means = {name: sums[name] / sums[count] for name, count in MEANS.items() if sums[count]}
        return means | {name: sums[name] for name in SUMS} | dict(zip(GREATEST, top, strict=True))

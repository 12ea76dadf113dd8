"""How many parameters an update visibly changes once they are published: bf16 swallows small updates (98 % of them at 1e-5)."""

import logging

import torch

from learner.deepspeed_engine import Engine

log = logging.getLogger(__name__)

WATCHED = 1 << 20  # parameters looked at, spread evenly over all
FEW = 0.1  # share of visible changes below which bf16 deserves a warning


class Watch:
    """Compares a sample of the parameters, in published precision, before and after an update.

    With LoRA it watches nothing: what is published there is the merged weight, which no update holds.
    """

    def __init__(self, engine: Engine, dtype: str, enabled: bool) -> None:
        self._engine = engine
        self._dtype = getattr(torch, dtype)
        self._params = [p for p in engine.module.parameters() if p.requires_grad and enabled]
        total = sum(engine.local(p).numel() for p in self._params)
        self._stride = max(1, total // WATCHED)
        self._warned = False

    def look(self) -> torch.Tensor:
        """Take the watched parameters as they would be published."""
        parts = [self._engine.local(p)[:: self._stride].to(self._dtype) for p in self._params]
        return torch.cat(parts) if parts else torch.empty(0)

    def compare(self, before: torch.Tensor) -> tuple[int, int]:
        """Count (changed, watched) parameters."""
        return int((self.look() != before).sum()), before.numel()

    def warn(self, metrics: dict[str, float]) -> None:
        """Say once where the published precision swallows updates."""
        changed = metrics.get("sync/changed_frac")
        if self._dtype is torch.bfloat16 and changed is not None and changed < FEW and not self._warned:
            self._warned = True
            log.warning(
                "only %.1f %% of the parameters changed visibly in bfloat16: engines see little of this update. "
                "Set model.dtype=float32 or raise learner.lr. (Said once; see sync/changed_frac.)",
                100 * changed,
            )

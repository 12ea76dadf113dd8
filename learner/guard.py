"""What happens when a gradient is not finite: the update is skipped, its samples are kept, and a run of them ends the run."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import Config
from learner.deepspeed_engine import Update
from learner.errors import LearnerError
from orchestrator.types import Group

log = logging.getLogger(__name__)


class Guard:
    """Counts skipped updates in a row."""

    def __init__(self, config: Config, rank: int) -> None:
        self.skipped_in_a_row = 0
        self._limit = config.learner.max_skipped_updates
        self._folder = Path(config.train.output_dir) / "skipped_updates"
        self._rank = rank
        self._number = 0

    def check(self, update: Update, groups: Mapping[int, Group], advantages_PK: Tensor) -> None:
        """Note an update.

        Raises:
            LearnerError: `learner.max_skipped_updates` of them were skipped in a row.
        """
        self._number += 1
        if not update.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"update{self._number:06d}-rank{self._rank}.pt"
        torch.save({"groups": dict(groups), "advantages_PK": advantages_PK}, path)
        log.warning("update skipped: its gradient is not finite (norm %s); samples kept in %s", update.grad_norm, path)
        if self.skipped_in_a_row >= self._limit:
            raise LearnerError(
                f"The gradient must be finite, got {self.skipped_in_a_row} updates in a row that are not "
                f"(learner.max_skipped_updates). Look at the samples in {self._folder}; lower learner.lr, or set "
                "learner.grad_clip and algorithm.reward_clip."
            )

"""Reference worker: the frozen model scores groups straight from the object store."""

from typing import Any

import numpy as np

from configs.schema import Config
from orchestrator.types import Group


class ReferenceWorker:
    """Ray actor around the frozen policy; logprobs come from the learner's own code, so that KL is exactly 0 at the start."""

    def __init__(self, config: Config, name: str) -> None:
        import torch  # heavy; the process has its log file by now

        from learner.logprobs import TokenLogprobs, load_model

        self._name, self._learner = name, config.learner
        model: Any = load_model(
            config.model.path,
            dtype=torch.float32,  # as the learner's masters: in bfloat16 too the KL is exactly 0 before the first update
            trust_remote_code=config.model.trust_remote_code,
        )
        device = "cuda" if config.reference.num_gpus > 0 else "cpu"
        self._model = TokenLogprobs(
            model.to(device).requires_grad_(False),
            temperature=config.rollout.temperature,
            chunk_tokens=config.learner.logprob_chunk_tokens,
            compute_dtype=getattr(torch, config.model.dtype),
        )

    def ready(self) -> str:
        """Return the worker's name once its model is loaded."""
        return self._name

    def logprobs(self, group: Group) -> tuple[tuple[np.ndarray, ...], int]:
        """Score the K responses of a group: K float32 arrays (T,), temperature applied, and how many tokens that were."""
        from learner.logprobs import score_groups

        scored = score_groups(
            self._model,
            [group],
            max_tokens_per_micro_batch=self._learner.max_tokens_per_micro_batch,
            shared_prompt=self._learner.shared_prompt,
        )[0]
        return scored, sum(len(logprobs) for logprobs in scored)

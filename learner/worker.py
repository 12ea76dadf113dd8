"""One learner rank: a plain class that `group.py` runs as a Ray actor.

Methods named alike run on all ranks at the same time: they hold collectives. A rank fetches its groups from the object
store itself, so that no token passes through the driver.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from configs.schema import Config
from learner import checkpoint
from learner.deepspeed_engine import Engine, form_group, join
from learner.errors import LESS_MEMORY, LearnerError, is_out_of_memory
from learner.export import export
from learner.logprobs import TokenLogprobs
from learner.policy import load_policy
from learner.update import Updater
from learner.weights import Publisher
from orchestrator.ports import WriteFailed
from orchestrator.types import Published, ScoredGroup, StepMetrics, WeightBucket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a rank says of itself once it can learn."""

    rank: int
    node: str
    pid: int
    num_buckets: int  # of a publication
    num_parameters: int
    num_trained: int
    layout: str  # how samples are cut into micro-batches


class LearnerWorker:
    """A rank: joins the others, loads the model, then steps, publishes, exports, saves."""

    def __init__(self, config: Config, rank: int, fetch: Callable[[Sequence[Any]], list[Any]]) -> None:
        """Keep the configuration; `fetch` gets objects from the store (ray.get), given their refs."""
        torch.set_num_threads(config.learner.threads)
        self._config, self._rank, self._fetch = config, rank, fetch
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)

    def listen(self) -> tuple[str, int]:
        """On rank 0: open the port on which the ranks meet; returns its address."""
        learner = self._config.learner
        host = _own_address() if learner.num_ranks > 1 else "127.0.0.1"
        return host, join(0, learner.num_ranks, host, 0, learner.timeout_s)

    def start(self, host: str, port: int) -> Ready:
        """Meet the other ranks and build the engine."""
        config, learner = self._config, self._config.learner
        with self._explained("start"):
            if self._rank > 0:
                join(self._rank, learner.num_ranks, host, port, learner.timeout_s)
            device = form_group(self._rank, learner.num_ranks, learner.timeout_s)
            torch.manual_seed(config.train.seed)  # an adapter starts alike on every rank
            policy = load_policy(config)
            if learner.zero_stage < 3:  # at stage 3 the engine moves shards only
                policy.to(device)
            module = TokenLogprobs(
                policy,
                temperature=config.rollout.temperature,
                chunk_tokens=learner.logprob_chunk_tokens,
                compute_dtype=self._dtype,
            )
            num_parameters = sum(p.numel() for p in module.parameters())
            self._engine = Engine(module, config, device)
            self._updater = Updater(self._engine, config, self._rank, learner.num_ranks)
            self._publisher = Publisher(self._engine, self._dtype)
        return Ready(
            rank=self._rank,
            node=socket.gethostname(),
            pid=os.getpid(),
            num_buckets=self._publisher.num_buckets,
            num_parameters=num_parameters,
            num_trained=self._engine.num_trained,
            layout="prefix trees" if module.family.tree else "padded",
        )

    def step(self, receipts: Sequence[ScoredGroup]) -> StepMetrics:
        """Train on P groups."""
        with self._explained("step"):
            return self._updater.step(receipts, self._fetch)

    def publish(self, steps: int) -> Iterator[WeightBucket | Published]:
        """On rank 0: yield the present weights as version `steps`, bucket by bucket."""
        with self._explained("publication"):
            yield from self._publisher.publish(steps)

    def assist(self) -> None:
        """On the other ranks: take part in a publication."""
        self._publisher.assist()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; rank 0 writes."""
        with self._explained("export"):
            export(self._engine.module.model, self._config, folder, gathered=self._engine.gathered, writes=self._rank == 0)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its part."""
        with self._explained("checkpoint"):
            try:
                checkpoint.save(self._updater, folder, self._rank, self._config.learner.num_ranks)
            except (OSError, SafetensorError) as error:
                raise WriteFailed(f"rank {self._rank} on {socket.gethostname()}: {error}") from None

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        checkpoint.load(self._updater, folder, self._rank)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn running out of memory into an error that says what to change."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            what = str(error).strip().splitlines()[0]
            raise LearnerError(
                f"The learner's {doing} must fit into the memory of rank {self._rank} on {socket.gethostname()}, "
                f"got: {what} {LESS_MEMORY}"
            ) from error


def _own_address() -> str:
    """Return this node's address as the other nodes see it."""
    import ray

    return ray.util.get_node_ip_address()

"""What the loop needs of the other rooms. Actors and learner implement these; only build.py knows the classes."""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.types import (
    Draw,
    EngineReport,
    GroupFacts,
    Published,
    Ref,
    Reward,
    Sampling,
    ScoredGroup,
    StepMetrics,
)


class GroupFailed(RuntimeError):
    """One group cannot be had (it killed every worker it was given to); the run goes on without it."""


class DataLost(RuntimeError):
    """Objects went with the node that held them; what made them must be done again."""


class GroupsLost(RuntimeError):
    """Groups that were to be trained went with the node that held them; nothing was learned from any."""

    def __init__(self, draws: Collection[int]) -> None:
        """Take the draw numbers of the lost groups."""
        super().__init__(f"Groups must be there when they are trained, got draws {sorted(draws)} lost with their node.")
        self.draws = frozenset(draws)


class LearnerLost(RuntimeError):
    """A rank of the learner is gone, and what it knew with it; the learner can be started again and go on from a checkpoint."""


class WriteFailed(RuntimeError):
    """A checkpoint could not be written; the ones before it are as they were."""


class Publication(Protocol):
    """One weight version on its way out. It can be iterated again: a replaced engine loads the last one."""

    def buckets(self) -> AsyncIterator[Ref]:
        """Yield refs to WeightBucket as the learner makes them, in order."""
        ...

    async def published(self) -> Published:
        """Wait for the end of the publication; raises what broke it."""
        ...


class Rollout(Protocol):
    """Engines that sample from the policy."""

    async def generate(self, draw: Draw, sampling: Sampling) -> tuple[Ref, GroupFacts]:
        """Sample one group; the ref leads to a Group."""
        ...

    async def load(self, publication: Publication) -> Sequence[EngineReport]:
        """Load a weight version into every engine, drop caches made under the old one, prove it."""
        ...


class Reference(Protocol):
    """The frozen model."""

    async def logprobs(self, draw: Draw, group_ref: Ref) -> Ref:
        """Score the K responses of a group; the ref leads to a tuple of K float32 arrays (T,)."""
        ...


class Rewarder(Protocol):
    """Whatever turns a group into K rewards."""

    async def score(self, draw: Draw, group_ref: Ref, num_samples: int) -> tuple[Reward, ...]:
        """Score the responses of a group; a reward that cannot be had comes back invalid."""
        ...


class Learner(Protocol):
    """The only part that changes weights."""

    async def step(self, groups: Sequence[ScoredGroup]) -> StepMetrics:
        """Train on P groups: logprobs where needed -> advantages -> update.

        Raises:
            GroupsLost: some of them cannot be fetched; nothing has changed.
        """
        ...

    def publish(self, steps: int) -> Publication:
        """Start publishing the present weights as version `steps`."""
        ...

    async def restart(self) -> None:
        """Start again from the model that training began with, whatever is left of the ranks."""
        ...

    async def save(self, folder: Path) -> None:
        """Write all that the next step depends on.

        Raises:
            WriteFailed: the folder cannot be written.
        """
        ...

    async def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder that from_pretrained and vLLM load."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One thing that somebody waits for."""

    what: str  # "rollout-1 (node 10.0.0.2, pid 17) to finish generate of draw 12 (rows:7)"
    since_s: float
    deadline_s: float  # after which it ends with an error


class Source(Protocol):
    """A part of the run that can say what it is doing; everything in it fits into JSON."""

    def status(self) -> dict[str, Any]:
        """Say what it is and has."""
        ...

    def waits(self) -> list[Wait]:
        """Say what is waited for there."""
        ...

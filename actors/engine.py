"""What a generation backend must do. vllm_engine.py and hf_engine.py implement it; tests/actors holds the contract test.

An engine is synchronous and belongs to one thread. Samples join (`add`) and leave (`step`) continuously; weights change
between two steps, after which every sample in flight goes on under the new weights with its cache recomputed.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from orchestrator.types import WeightBucket, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One response to sample."""

    key: str
    prompt_token_ids: tuple[int, ...]
    temperature: float  # 0: greedy
    max_tokens: int  # of this response
    seed: int  # this sample's own; equal seeds give equal tokens whatever else is in the batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedSample:
    """What the engine knows of a finished response; arrays of shape (T,) over its tokens, the stop token included."""

    key: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, of the sampling distribution after temperature
    versions: np.ndarray  # int32, weight version that sampled each token
    finish_reason: Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine cannot go on, or refused what it was given."""


class Engine(Protocol):
    """A generation backend."""

    def add(self, request: SampleRequest) -> None:
        """Queue one sample; it joins the running batch at the next step."""
        ...

    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        ...

    def step(self) -> list[FinishedSample]:
        """Advance every running sample by one token; return those that finished."""
        ...

    def score(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return float32 (T-1,) logprobs of tokens 1.. given those before, temperature 1."""
        ...

    def begin_load(self) -> None:
        """Open a weight update; no step until finish_load."""
        ...

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Take some tensors, named as in the Hugging Face checkpoint."""
        ...

    def finish_load(self, version: WeightVersion) -> None:
        """Commit the update and drop every cache made under the old weights.

        Raises:
            EngineError: a parameter of the engine received no new value.
        """
        ...

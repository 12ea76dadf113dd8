"""The nouns that travel between rooms. A stage adds a type; it never fills in a None.

    Prompt -> Draw -> Group (+ GroupFacts) -> ScoredGroup -> StepMetrics
    learner -> WeightBucket... -> Published -> EngineReport

Shape letters, one legend for the repository: P prompts, K samples per prompt, N = P * K, T tokens, V vocabulary.
Importing this module loads numpy and nothing heavier.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

Ref = Any  # a handle to an object in the store (ray.ObjectRef); the driver passes it on and never opens it

StepMetrics = Mapping[str, float]  # already reduced over ranks; names as in README, "Metrics"

# slime and OpenRLHF; ms-swift; TRL; verl; SkyRL
LABEL_PLACES = (("label",), ("solution",), ("ground_truth",), ("reward_model", "ground_truth"), ("reward_spec", "ground_truth"))


class Hasher(Protocol):
    """What a digest needs (xxhash and hashlib objects fit)."""

    def update(self, data: Any, /) -> None:
        """Take more bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a dataset, tokenised."""

    id: str  # stable across runs: "<file stem>:<line>" or the row's own id
    token_ids: tuple[int, ...]
    text: str  # as tokenised (after the chat template)
    columns: Mapping[str, Any]  # the row's other columns, handed to the reward; "messages" where the prompt is a chat


def label_of(columns: Mapping[str, Any], column: str) -> Any:
    """Find a row's right answer: in `column`, or where the known layouts keep it; None where it has none."""
    for path in ((column,), *LABEL_PLACES):
        value: Any = columns
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The n-th prompt taken from the stream; (train.seed, number, sample index) seeds each of its samples."""

    number: int
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a group is sampled."""

    num_samples: int
    temperature: float  # 0: greedy
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One response: T tokens, each with what the engine knew when it sampled it."""

    token_ids: np.ndarray  # (T,) int32, the EOS or stop token included
    logprobs: np.ndarray  # (T,) float32, of the sampling distribution (after temperature)
    loss_mask: np.ndarray  # (T,) bool, False where the policy did not choose the token (tools, environment)
    versions: np.ndarray  # (T,) int32, weight version that sampled each token
    finish_reason: Literal["stop", "length"]
    text: str  # the response without special tokens, observations included
    error: str  # why its environment broke off, so that it has no reward; empty where it did not


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One prompt and its K samples: never ragged, never split across ranks."""

    draw: Draw
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What the driver may know of a group; its size does not grow with sequence length."""

    draw: int
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]  # (K,) response tokens that the policy chose
    truncated: tuple[bool, ...]  # (K,) cut at max_new_tokens
    started_version: int  # weight version of the oldest token, at least the one the group was dispatched at
    newest_version: int
    worker: str  # actor that made it
    generate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward, or why there is none. Invalid is not zero."""

    value: float  # nan where cause is not "ok"
    cause: Literal["ok", "timeout", "error", "not_applicable"]
    parts: Mapping[str, float]  # per reward function and logged extra
    detail: str  # the error's last line; empty where ok
    answer: str  # the response's final answer, for votes: equal answers are equal texts; empty where there is none

    @property
    def valid(self) -> bool:
        """Whether the value counts."""
        return self.cause == "ok"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """A receipt: where the group and its reference logprobs lie, and the scalars that the estimators need."""

    draw: Draw
    facts: GroupFacts
    group_ref: Ref  # -> Group
    reference_refs: tuple[Ref, ...]  # one ref -> tuple of K float32 arrays (T,); empty where no reference runs
    rewards: tuple[Reward, ...]  # (K,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Where one tensor lies in a bucket."""

    name: str  # Hugging Face parameter name
    dtype: str  # torch's name without "torch.": float32, bfloat16
    shape: tuple[int, ...]
    offset: int  # bytes, a multiple of 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightBucket:
    """Some tensors of one weight version, flat: a single zero-copy array in the object store."""

    tensors: tuple[TensorMeta, ...]
    data: np.ndarray  # (bytes,) uint8

    def hash_into(self, hasher: Hasher) -> None:
        """Feed names, layout and bytes to a digest; learner and engines call it on every bucket in order."""
        hasher.update(repr([(t.name, t.dtype, t.shape, t.offset) for t in self.tensors]).encode())
        hasher.update(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Which weights: passes of the loop behind them, and the digest of their published bytes."""

    steps: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What ends a publication: the version, what it held, and a probe that proves it was applied."""

    version: WeightVersion
    num_tensors: int
    num_bytes: int
    probe_token_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]  # learner's logprob of probe tokens 1.. given those before; temperature 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one engine says after a weight sync; it must equal the learner's word."""

    worker: str
    version: WeightVersion
    num_tensors: int
    probe_abs_diff: float  # greatest |engine - learner| over the probe
    paused_s: float  # seconds in which the engine stood still

"""Publishes a weight version: buckets of flat bytes under Hugging Face names, a digest, and a probe that proves them.

Names are those of the checkpoint on the hub: without peft's prefixes, a tied head left out (the engines tie it again).
With LoRA the merged weights are published: engines then serve the very model whose logprobs the learner computes.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import nn

from learner.packing import MicroBatch, build_tree, micro_batch
from orchestrator.types import Published, TensorMeta, WeightBucket, WeightVersion

if TYPE_CHECKING:  # an export needs no deepspeed
    from learner.deepspeed_engine import Engine

BUCKET_BYTES = 96 << 20
ALIGNMENT = 64
PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor to publish."""

    name: str
    param: nn.Parameter
    layer: Any | None  # peft's layer around it, where it has an adapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, also where this rank holds a shard."""
        return tuple(self.param.ds_shape if hasattr(self.param, "ds_shape") else self.param.shape)  # pyright: ignore

    @property
    def needed(self) -> list[nn.Parameter]:
        """What must be whole to compute it."""
        return [self.param] if self.layer is None else list(self.layer.parameters())


class Publisher:
    """Cuts the weights into buckets, the same ones at every publication and on every rank."""

    def __init__(self, engine: "Engine", dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._engine = engine
        self._dtype = dtype
        self.weights = list_weights(engine.module.model)
        self.plan = _cut(self.weights, dtype, bucket_bytes)
        self._probe = _probe_batch(engine.module.causal_lm.config.get_text_config().vocab_size)

    @property
    def num_buckets(self) -> int:
        """Buckets of one publication."""
        return len(self.plan)

    def publish(self, steps: int) -> Iterator[WeightBucket | Published]:
        """Yield the buckets and then the Published; under ZeRO-3 every other rank runs `assist` meanwhile."""
        hasher, num_bytes = xxhash.xxh3_128(), 0
        for weights, metas in self.plan:
            bucket = self._fill(weights, metas)
            bucket.hash_into(hasher)
            num_bytes += len(bucket.data)
            yield bucket
        ids, logprobs = self._score_probe()
        yield Published(
            version=WeightVersion(steps=steps, digest=hasher.hexdigest()),
            num_tensors=len(self.weights),
            num_bytes=num_bytes,
            probe_token_ids=ids,
            probe_logprobs=logprobs,
        )

    def assist(self) -> None:
        """Take part in the gathers of a publication."""
        for weights, _ in self.plan:
            with self._engine.gathered([p for w in weights for p in w.needed]):
                pass
        self._score_probe()

    @torch.no_grad()
    def _fill(self, weights: list[Weight], metas: list[TensorMeta]) -> WeightBucket:
        last = metas[-1]
        data = torch.empty(last.offset + _num_bytes(last.shape, self._dtype), dtype=torch.uint8)
        with self._engine.gathered([p for w in weights for p in w.needed]):
            for weight, meta in zip(weights, metas, strict=True):
                place = data[meta.offset : meta.offset + _num_bytes(meta.shape, self._dtype)]
                with merged(weight) as tensor:
                    place.view(self._dtype).copy_(tensor.detach().reshape(-1))
        _zero_gaps(data, metas, self._dtype)
        return WeightBucket(tensors=tuple(metas), data=data.numpy())

    @torch.no_grad()
    def _score_probe(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        logprobs, _ = self._engine(self._probe, temperature=1.0)
        tree = self._probe.rows[0][0]
        ids = (*tree.tokens.tolist(), int(tree.targets[0][-1]))
        return ids, tuple(logprobs.tolist())


def list_weights(model: nn.Module) -> list[Weight]:
    """Name every tensor of the checkpoint that engines load."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_A")]  # peft's
    adapted = {id(layer.base_layer.weight): layer for layer in layers}
    found = []
    for name, param in model.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        found.append(Weight(plain, param, adapted.get(id(param))))
    return found


@contextmanager
def merged(weight: Weight) -> Iterator[torch.Tensor]:
    """Hold the tensor with its adapter merged; afterwards the model is as before, to the bit."""
    if weight.layer is None:
        yield weight.param
        return
    before = weight.param.data
    with ExitStack() as stack:
        stack.callback(_unmerge, weight, before)
        weight.layer.merge(safe_merge=True)  # into a copy, so that taking it back needs no subtraction
        yield weight.param


def _unmerge(weight: Weight, before: torch.Tensor) -> None:
    weight.param.data = before
    weight.layer.merged_adapters.clear()  # pyright: ignore


def _cut(weights: list[Weight], dtype: torch.dtype, bucket_bytes: int) -> list[tuple[list[Weight], list[TensorMeta]]]:
    plan: list[tuple[list[Weight], list[TensorMeta]]] = []
    room = 0
    offset = 0
    for weight in weights:
        size = _num_bytes(weight.shape, dtype)
        if not plan or size > room:
            plan.append(([], []))
            room, offset = bucket_bytes, 0
        plan[-1][0].append(weight)
        plan[-1][1].append(
            TensorMeta(name=weight.name, dtype=str(dtype).removeprefix("torch."), shape=weight.shape, offset=offset)
        )
        step = -(-size // ALIGNMENT) * ALIGNMENT
        offset += step
        room -= step
    return plan


def _zero_gaps(data: torch.Tensor, metas: list[TensorMeta], dtype: torch.dtype) -> None:
    for meta, following in itertools.pairwise(metas):
        data[meta.offset + _num_bytes(meta.shape, dtype) : following.offset] = 0  # the digest covers them


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _probe_batch(vocab_size: int) -> MicroBatch:
    ids = np.random.default_rng(20240214).integers(0, vocab_size, PROBE_TOKENS)
    return micro_batch([[build_tree(ids[:1], [ids[1:]], [(0, 0)])]])

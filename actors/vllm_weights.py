"""vLLM's weight transfer API with a backend for arrays that lie in Ray's object store.

Imported in every process that holds a vLLM worker (as `worker_extension_cls`), which registers the backend.
On a CPU vLLM repacks linear weights, so an update must run inside its layerwise reload; a tied lm_head is left out by that
and keeps a repacked copy of the OLD embedding, hence `_repack_tied_head`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from orchestrator.types import WeightBucket

BACKEND = "rlooper_object_store"


@dataclass
class ObjectStoreInit(WeightTransferInitInfo):
    """Nothing to set up: Ray carries the bytes."""


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """One bucket."""

    bucket: Any  # WeightBucket


class ObjectStoreEngine(WeightTransferEngine):
    """Load buckets of named tensors between two steps, and refuse an update that leaves a parameter as it was."""

    init_info_cls = ObjectStoreInit
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: ObjectStoreInit) -> None:
        """Do nothing; there is no connection."""

    def start_weight_update(self) -> None:
        """Open the layerwise reload."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        """Load one bucket."""
        self.model.load_weights(tensors_of(update_info.bucket))  # pyright: ignore (every vLLM model has it)

    def finish_weight_update(self) -> None:
        """Close the reload.

        Raises:
            RuntimeError: naming the parameters that received no new value, or only part of one.
        """
        stale = self._stale_parameters()
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()
        if stale:
            raise RuntimeError(
                f"a weight update must reach every parameter, got {len(stale)} without a full new value: "
                f"{', '.join(stale[:4])}. Check that the learner's names are those of the checkpoint."
            )

    def shutdown(self) -> None:
        """Release nothing."""

    def _stale_parameters(self) -> list[str]:
        tied = self.model.lm_head if self._tied() else None
        stale = []
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            names = [name for name, _ in layer.named_parameters(recurse=False)]
            if not names or layer is tied or is_deferred_attention_layer(layer) or not info.can_load():
                continue
            received: dict[str, int] = {}
            for name, bound in info.loaded_weights:
                tensor = bound.arguments.get("loaded_weight")
                received[name] = received.get(name, 0) + (tensor.numel() if tensor is not None else 0)
            expected = {name: _numel_in_checkpoint(layer, p) for name, p in layer.named_parameters(recurse=False)}
            stale += [f"{path}.{name}" for name in names if received.get(name, 0) < expected[name]]
        return stale

    def _tied(self) -> bool:
        return bool(self.model_config.hf_text_config.tie_word_embeddings) and hasattr(self.model, "lm_head")

    def _repack_tied_head(self) -> None:
        if self._tied() and self.device.type == "cpu":
            head: Any = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)


def _numel_in_checkpoint(layer: torch.nn.Module, parameter: torch.nn.Parameter) -> int:
    """Count the elements that a checkpoint holds: vLLM pads vocabularies with rows that never arrive."""
    if isinstance(layer, VocabParallelEmbedding):
        rows = min(parameter.shape[0], layer.org_vocab_size)
        return rows * (parameter.numel() // parameter.shape[0])
    return parameter.numel()


def tensors_of(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """View the tensors of a bucket without copying."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the store's pages are read-only; nothing writes to them
        flat = torch.from_numpy(bucket.data)
    for meta in bucket.tensors:
        dtype = getattr(torch, meta.dtype)
        num_bytes = dtype.itemsize * torch.Size(meta.shape).numel()
        yield meta.name, flat[meta.offset : meta.offset + num_bytes].view(dtype).view(meta.shape)


class WorkerExtension:
    """Mixed into vLLM's worker; its import is what registers the backend there."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreEngine)

"""What each model family wants to be told about a micro-batch, and the proof that it listens.

transformers takes a ready boolean mask (B, 1, C, C) as it is, for every layer alike; a family with sliding windows then
silently loses them (seen with Gemma3). Families that know layer types take one mask per type; those with one window for
all layers (Mistral) get it built into the mask. `prove` runs a small tree through the model and compares it with the
plain padded forward, past the window: whatever a family does that we did not foresee is found before training.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from learner.packing import MicroBatch, build_tree, micro_batch

if TYPE_CHECKING:
    from learner.logprobs import TokenLogprobs

log = logging.getLogger(__name__)

Mask = torch.Tensor | Mapping[str, torch.Tensor]
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class Family:
    """How one model takes masks: `tree` is False where it can only be given padded rows of one sample."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        self.by_layer = layer_types is not None
        self.layer_types = tuple(sorted(set(layer_types or ["full_attention"])))
        uses_window = "sliding_attention" in self.layer_types or not self.by_layer
        self.window: int | None = getattr(config, "sliding_window", None) if uses_window else None
        self.tree = bool(
            model._supports_sdpa
            and model.config._attn_implementation in ("sdpa", "eager")
            and set(self.layer_types) <= _KNOWN_LAYERS
        )

    def masks(self, batch: MicroBatch, device: torch.device) -> Mask:
        """Build the attention mask of a micro-batch as this family takes it; True where a token sees another."""
        if not self.tree:
            return torch.from_numpy(_filled(batch)).to(device)
        full = torch.from_numpy(_block_masks(batch)).to(device)
        if not self.by_layer:
            return full if self.window is None else self._windowed(full, batch)
        of_type = {"full_attention": lambda: full, "sliding_attention": lambda: self._windowed(full, batch)}
        return {layer_type: of_type[layer_type]() for layer_type in self.layer_types}

    def _windowed(self, full: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        depths = torch.from_numpy(position_ids(batch)).to(full.device)
        distance = depths[:, None, :, None] - depths[:, None, None, :]
        assert self.window is not None  # asked for by a family that has one
        return full & (distance < self.window)


def attention_cost(model: PreTrainedModel) -> float:
    """Return the cost of one attended token beside all the rest that a token costs in a forward."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    matrices = sum(p.numel() for p in model.base_model.parameters() if p.ndim > 1)
    matrices -= sum(p.numel() for p in model.get_input_embeddings().parameters())  # looked up, not multiplied
    return 2.0 * config.num_attention_heads * head_dim * config.num_hidden_layers / max(matrices, 1)


def input_ids(batch: MicroBatch) -> np.ndarray:
    """Return (B, C) int64; padding is token 0, which nothing sees."""
    return _laid_out(batch, [[tree.tokens for tree in row] for row in batch.rows])


def position_ids(batch: MicroBatch) -> np.ndarray:
    """Return (B, C) int64: the depth of each token in its own tree."""
    return _laid_out(batch, [[tree.depths for tree in row] for row in batch.rows])


@torch.no_grad()
def prove(module: "TokenLogprobs", tolerance: float) -> None:
    """Compare a small tree with the model's own padded forward; give up trees for this model if they differ.

    Raises:
        ValueError: the model's logits are not those of its last hidden state and head, so that no path here fits it.
    """
    from learner.logprobs import logprobs_of

    family, model = module.family, module.causal_lm
    rng = np.random.default_rng(0)
    length = 12 if family.window is None else min(family.window, 1024) + 12
    vocab = model.config.get_text_config().vocab_size
    prompt = rng.integers(0, vocab, length)
    responses = [rng.integers(0, vocab, 3), rng.integers(0, vocab, 4)]
    responses[1][0] = responses[0][0]
    want = []
    for response in responses:
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None].to(module.device)
        with module.autocast():
            logits = model(input_ids=ids, use_cache=False).logits[0, length - 1 : -1].float() / module.temperature
        want.append(torch.log_softmax(logits, -1).gather(-1, ids[0, length:, None])[:, 0])
    apart = [build_tree(prompt, [response], [(0, k)]) for k, response in enumerate(responses)]
    tree = build_tree(prompt, responses, [(0, 0), (0, 1)])

    def difference(rows: list) -> float:
        got = logprobs_of(module, micro_batch(rows))
        return max(float((got[(0, k)] - w.cpu()).abs().max()) for k, w in enumerate(want))

    name = type(model).__name__
    if family.tree:
        try:
            gap = difference([[tree], [apart[0]]])
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # a family that wants masks of another shape
            gap, why = np.inf, f"it fails on a mask of ours ({error})"
        else:
            why = f"a shared prompt changes its logprobs by {gap:.1e}"
        if gap <= tolerance:
            return
        family.tree = False
        log.warning("%s: %s; samples are padded, prompts are not shared", name, why)
    else:
        log.warning("%s takes no mask of ours; samples are padded, prompts are not shared", name)
    gap = difference([[tree] for tree in apart])
    if gap > tolerance:
        raise ValueError(
            f"The logits of {name} must be its head on its last hidden state, got a difference of {gap:.1e}. "
            "This family is not supported by the learner."
        )


def _block_masks(batch: MicroBatch) -> np.ndarray:
    masks = np.zeros((len(batch.rows), 1, batch.width, batch.width), dtype=bool)
    masks[:, :, np.arange(batch.width), np.arange(batch.width)] = True  # padding sees itself: no empty softmax
    for r, row in enumerate(batch.rows):
        offset = 0
        for tree in row:
            masks[r, 0, offset : offset + tree.size, offset : offset + tree.size] = tree.mask()
            offset += tree.size
    return masks


def _filled(batch: MicroBatch) -> np.ndarray:
    sizes = np.asarray([sum(tree.size for tree in row) for row in batch.rows])
    return (np.arange(batch.width)[None, :] < sizes[:, None]).astype(np.int64)


def _laid_out(batch: MicroBatch, parts: list[list[np.ndarray]]) -> np.ndarray:
    rows = np.zeros((len(parts), batch.width), dtype=np.int64)
    for r, row in enumerate(parts):
        flat = np.concatenate(row)
        rows[r, : len(flat)] = flat
    return rows

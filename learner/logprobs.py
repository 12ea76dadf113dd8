"""Log-probabilities of given tokens under a Hugging Face causal language model, in bounded memory.

    logprob(t) = log_softmax(head(hidden) / temperature)[t]

The temperature is the rollout's, so that these equal vLLM's processed logprobs. The head runs only where a token is
predicted, once per place, and logits exist for `chunk_tokens` places at one time, forward and backward. The learner and the
reference worker both use this module: where their weights are equal, so are their logprobs, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.families import Family, attention_cost, input_ids, position_ids, prove
from learner.packing import MicroBatch, SampleKey, plan
from orchestrator.types import Group

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}  # nats; a lost mask differs by far more on a trained model


class TokenLogprobs(nn.Module):
    """A causal language model whose forward gives logprobs (M,) and entropies (M,) of a micro-batch's pairs."""

    def __init__(
        self, model: nn.Module, *, temperature: float, chunk_tokens: int, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Wrap `model`, a PreTrainedModel or a PeftModel around one; `compute_dtype` below its own means autocast."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.device = next(model.parameters()).device  # of the computation, also where shards are kept elsewhere
        own = next(model.parameters()).dtype
        self.compute_dtype = compute_dtype or own
        self.casts = self.compute_dtype is not own
        self.head = ChunkedHead(self.causal_lm, chunk_tokens)
        self.family = Family(self.causal_lm)
        self.attention_cost = attention_cost(self.causal_lm)
        self.eval()  # no dropout: old and new logprobs must be of one policy
        prove(self, _TOLERANCE[self.compute_dtype])

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The Hugging Face model itself; peft's adapters, if any, live inside of its layers."""
        model = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()  # pyright: ignore

    def autocast(self) -> AbstractContextManager:
        """Compute in `compute_dtype` over parameters of a wider one."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.casts)

    def forward(
        self, batch: MicroBatch, with_entropy: bool = False, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies (zeros unless asked for), float32, (M,) each, in the order of the pairs."""
        device = self.device
        tokens, positions, nodes, pair_nodes, pair_tokens = (
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (input_ids(batch), position_ids(batch), batch.nodes, batch.pair_nodes, batch.pair_tokens)
        )
        with self.autocast():
            hidden = self.causal_lm.base_model(
                input_ids=tokens,
                attention_mask=self.family.masks(batch, device),
                position_ids=positions,
                use_cache=False,
            ).last_hidden_state
            hidden = hidden.flatten(0, 1)[nodes]
            return self.head(hidden, pair_nodes, pair_tokens, temperature or self.temperature, with_entropy)

    def plan(
        self,
        groups: Mapping[int, Group],
        chosen: Mapping[int, Sequence[int]],
        *,
        max_tokens: int,
        share: bool,
        whole_groups: bool = False,
    ) -> list[MicroBatch]:
        """Cut samples into micro-batches that this model can take; see `packing.plan`."""
        return plan(
            groups,
            chosen,
            max_tokens=max_tokens,
            share=share and self.family.tree,
            attention_cost=self.attention_cost,
            whole_groups=whole_groups,
            one_tree_per_row=not self.family.tree,
        )


class ChunkedHead(nn.Module):
    """The language-model head over chunks of places.

    It holds the head's parameters itself and calls no submodule, so that ZeRO-3 gathers them once per forward and per
    backward, however many chunks a rank has. (DeepSpeed's leaf modules do that too, and lose the gradient of a tied weight:
    they reduce it when the head is done, before the embedding has added its part.)
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ValueError(
                f"The head of {type(model).__name__} must be a plain linear layer, got {type(head).__name__}. "
                "Leave lm_head out of learner.lora.targets, or use another model."
            )
        config = model.config.get_text_config()
        self.weight, self.bias = head.weight, head.bias
        self.softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        hidden: torch.Tensor,
        pair_nodes: torch.Tensor,
        pair_tokens: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score `pair_tokens` (M,) at the places `pair_nodes` (M,) of `hidden` (U, H)."""
        settings = (1.0 / temperature, self.softcap, self.chunk_tokens, with_entropy)
        return _ChunkedLogprob.apply(hidden, self.weight, self.bias, pair_nodes, pair_tokens, settings)  # pyright: ignore


class _ChunkedLogprob(torch.autograd.Function):
    """log_softmax of the pairs, with logits recomputed in backward unless they fit in one chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair_nodes, pair_tokens, settings):
        scale, softcap, chunk, with_entropy = settings
        device_type = hidden.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
        order = torch.argsort(pair_nodes, stable=True)
        logprobs = torch.empty(len(pair_nodes), dtype=torch.float32, device=hidden.device)
        entropy_nodes = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        kept = None
        with torch.autocast(device_type, enabled=False):
            head = weight.to(dtype)
            for start, stop, pairs in _chunks(len(hidden), chunk, pair_nodes, order):
                log_p = _log_p(hidden[start:stop].to(dtype), head, bias, scale, softcap)
                logprobs[pairs] = log_p[pair_nodes[pairs] - start, pair_tokens[pairs]]
                if with_entropy:
                    entropy_nodes[start:stop] = -torch.linalg.vecdot(log_p.exp(), log_p)
                if len(hidden) <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
                    kept = log_p
        ctx.save_for_backward(hidden, weight, bias, pair_nodes, pair_tokens, order, entropy_nodes)
        ctx.settings, ctx.dtype, ctx.kept = settings, dtype, kept
        ctx.set_materialize_grads(False)  # entropy as a metric alone costs nothing in backward
        return logprobs, entropy_nodes[pair_nodes]

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # pyright: ignore
        hidden, weight, bias, pair_nodes, pair_tokens, order, entropy_nodes = ctx.saved_tensors
        scale, softcap, chunk, _ = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(pair_nodes), device=hidden.device)
        at_node = torch.zeros_like(entropy_nodes).index_add_(0, pair_nodes, grad_logprobs)
        entropy_at_node = None
        if grad_entropy is not None:
            entropy_at_node = torch.zeros_like(entropy_nodes).index_add_(0, pair_nodes, grad_entropy)
        head = weight.to(ctx.dtype)
        for start, stop, pairs in _chunks(len(hidden), chunk, pair_nodes, order):
            part = hidden[start:stop].to(ctx.dtype)
            log_p = _log_p(part, head, bias, scale, softcap) if ctx.kept is None else ctx.kept
            ctx.kept = (
                None  # it becomes the gradient, in place: one (chunk, V) array at a time, two with entropy or a cap
            )
            bend = 1.0 - (_logits(part, head, bias, scale, softcap) / (softcap * scale)) ** 2 if softcap else None
            if entropy_at_node is None:
                grad = log_p.exp_().mul_(-at_node[start:stop, None])
            else:
                slope = log_p + entropy_nodes[start:stop, None]
                slope.mul_(entropy_at_node[start:stop, None]).add_(at_node[start:stop, None])
                grad = log_p.exp_().mul_(slope.neg_())
            grad.index_put_((pair_nodes[pairs] - start, pair_tokens[pairs]), grad_logprobs[pairs], accumulate=True)
            if bend is not None:
                grad *= bend
            grad = grad.mul_(scale).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[start:stop] = (grad @ head).to(hidden.dtype)
            if grad_weight is not None:
                _add_outer(grad_weight, grad, part)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def score_groups(
    module: TokenLogprobs, groups: Sequence[Group], *, max_tokens_per_micro_batch: int, shared_prompt: bool
) -> list[tuple[np.ndarray, ...]]:
    """Score the K responses of each group, without gradient.

    Returns:
        Per group, K float32 arrays (T,).
    """
    chosen = {g: range(len(group.samples)) for g, group in enumerate(groups)}
    found: dict[SampleKey, torch.Tensor] = {}
    for batch in module.plan(
        dict(enumerate(groups)), chosen, max_tokens=max_tokens_per_micro_batch, share=shared_prompt
    ):
        found |= logprobs_of(module, batch)
    return [tuple(found[g, k].numpy() for k in range(len(group.samples))) for g, group in enumerate(groups)]


@torch.no_grad()
def logprobs_of(
    module: Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]], batch: MicroBatch
) -> dict[SampleKey, torch.Tensor]:
    """Return each sample's logprobs (T,), float32 on the CPU; `module` is a TokenLogprobs or an engine around one."""
    logprobs, _ = module(batch)
    return dict(zip(batch.keys, logprobs.cpu().split(batch.lengths.tolist()), strict=True))


def load_model(path: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model with attention that takes any mask."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
    )


def _chunks(count: int, chunk: int, pair_nodes: torch.Tensor, order: torch.Tensor):
    """Yield (start, stop, indices of the pairs at these places)."""
    starts = list(range(0, count, chunk))
    edges = torch.searchsorted(pair_nodes[order], torch.tensor([*starts, count], device=order.device)).tolist()
    for i, start in enumerate(starts):
        yield start, min(start + chunk, count), order[edges[i] : edges[i + 1]]


def _log_p(
    part: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    return torch.log_softmax(_logits(part, head, bias, scale, softcap), -1)


def _logits(
    part: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    logits = (part @ head.T).float()
    if bias is not None:
        logits += bias.float()
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if scale == 1.0 else logits.mul_(scale)


def _add_outer(total: torch.Tensor, grad: torch.Tensor, part: torch.Tensor) -> None:
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, part)
    else:
        total += grad.T @ part  # a product in compute precision, the sum in the parameter's

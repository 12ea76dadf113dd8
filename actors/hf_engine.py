"""A generation engine on transformers alone, for machines where vLLM cannot run; slower, same contract."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache

from actors.engine import EngineError, FinishedSample, SampleRequest
from configs.schema import Config
from orchestrator.types import WeightBucket, WeightVersion


@dataclass(slots=True, eq=False)
class _Row:
    request: SampleRequest
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class HfEngine:
    """Continuous batching by re-prefilling: the cache of the batch is rebuilt whenever a sample joins or the weights change."""

    def __init__(self, config: Config, stop_token_ids: tuple[int, ...]) -> None:
        rollout = config.rollout
        self._device = torch.device("cuda" if rollout.num_gpus > 0 else "cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._rollout, self._stop = rollout, frozenset(stop_token_ids)
        self._warpers: list[Any] = [TopKLogitsWarper(rollout.top_k)] if rollout.top_k > 0 else []
        self._warpers += [TopPLogitsWarper(rollout.top_p)] if rollout.top_p < 1 else []
        self._queue: list[SampleRequest] = []
        self._rows: list[_Row] = []
        self._cache: DynamicCache | None = None
        self._pads = torch.zeros(0, dtype=torch.long)
        self._version = 0
        self._received: set[str] = set()

    def add(self, request: SampleRequest) -> None:
        """Queue one sample."""
        self._queue.append(request)

    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        return bool(self._rows or self._queue)

    @torch.no_grad()
    def step(self) -> list[FinishedSample]:
        """Advance every running sample by one token; return those that finished."""
        self._admit()
        if not self._rows:
            return []
        logits = self._next_logits().float()
        for row, row_logits in zip(self._rows, logits, strict=True):
            self._sample(row, row_logits)
        finished = [self._finish(row) for row in self._rows if self._done(row)]
        keep = [i for i, row in enumerate(self._rows) if not self._done(row)]
        if len(keep) < len(self._rows):
            self._rows = [self._rows[i] for i in keep]
            self._pads = self._pads[keep]
            if self._cache is not None:
                self._cache.batch_select_indices(torch.tensor(keep, dtype=torch.long, device=self._device))
        return finished

    @torch.no_grad()
    def score(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return float32 (T-1,) logprobs of tokens 1.. given those before, temperature 1."""
        ids = torch.tensor([token_ids], device=self._device)
        logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def begin_load(self) -> None:
        """Open a weight update."""
        self._received = set()

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Copy some tensors into the model."""
        parameters = dict(self._model.named_parameters())
        for meta in bucket.tensors:
            if meta.name not in parameters:
                raise EngineError(f"a published tensor must exist in the model, got {meta.name}. Check the architecture.")
            dtype = getattr(torch, meta.dtype)
            num_bytes = dtype.itemsize * torch.Size(meta.shape).numel()
            flat = torch.from_numpy(bucket.data[meta.offset : meta.offset + num_bytes].copy())
            parameters[meta.name].copy_(flat.view(dtype).view(meta.shape))
            self._received.add(meta.name)

    def finish_load(self, version: WeightVersion) -> None:
        """Commit the update and drop the cache."""
        stale = {name for name, _ in self._model.named_parameters()} - self._received
        if stale:
            raise EngineError(
                f"a weight update must reach every parameter, got {len(stale)} without a new value: "
                f"{', '.join(sorted(stale)[:4])}. Check that the learner's names are those of the checkpoint."
            )
        self._cache, self._version = None, version.steps

    def _admit(self) -> None:
        room = self._rollout.max_concurrent_samples - len(self._rows)
        for request in self._queue[:room]:
            generator = torch.Generator().manual_seed(request.seed)
            self._rows.append(_Row(request=request, generator=generator))
            self._cache = None
        del self._queue[:room]

    def _next_logits(self) -> torch.Tensor:
        """Return logits (rows, V) of the next token: one token per row over the cache, or all of them to rebuild it."""
        if self._cache is None:
            texts = [[*row.request.prompt_token_ids, *row.tokens] for row in self._rows]
            width = max(len(text) for text in texts)
            self._pads = torch.tensor([width - len(text) for text in texts])
            ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
            self._cache = DynamicCache(config=self._model.config)
            start = 0
        else:
            ids = torch.tensor([[row.tokens[-1]] for row in self._rows])
            start = self._cache.get_seq_length()
        places = torch.arange(start + ids.shape[1])
        mask = places[None] >= self._pads[:, None]
        positions = (places[None] - self._pads[:, None]).clamp(min=0)[:, start:]
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.long().to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _sample(self, row: _Row, logits: torch.Tensor) -> None:
        logits = logits.cpu()
        if row.request.temperature == 0:
            logprobs = logits.log_softmax(-1)
            token = int(logits.argmax())
        else:
            logits = (logits / row.request.temperature)[None]
            for warper in self._warpers:
                logits = warper(torch.empty(0), logits)
            logprobs = logits[0].log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=row.generator))
        row.tokens.append(token)
        row.logprobs.append(float(logprobs[token]))
        row.versions.append(self._version)

    def _done(self, row: _Row) -> bool:
        return row.tokens[-1] in self._stop or len(row.tokens) >= row.request.max_tokens

    def _finish(self, row: _Row) -> FinishedSample:
        return FinishedSample(
            key=row.request.key,
            token_ids=np.asarray(row.tokens, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            versions=np.asarray(row.versions, dtype=np.int32),
            finish_reason="stop" if row.tokens[-1] in self._stop else "length",
        )

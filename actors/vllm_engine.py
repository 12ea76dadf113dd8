"""The door to vLLM: an in-process engine on token ids whose weights change between two steps."""

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in the actor's own process

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.sampling_params import RequestOutputKind

from actors.engine import EngineError, FinishedSample, SampleRequest
from actors.vllm_weights import BACKEND
from configs.schema import Config
from orchestrator.types import WeightBucket, WeightVersion

CPU_KV_CACHE_MIB = 512
CPU_BATCHED_TOKENS = 4096  # tokens of one scheduler step
CPU_BLOCK_TOKENS = 32  # prompts longer than a block share their prefix even within one scheduler step


class VllmEngine:
    """One vLLM engine; see actors.engine.Engine for the contract."""

    def __init__(self, config: Config, stop_token_ids: tuple[int, ...]) -> None:
        rollout, cpu = config.rollout, not torch.cuda.is_available()
        arguments = {}
        if cpu:
            # a prompt cut into chunks makes vLLM rewind the sample's generator, which CPU generators cannot do
            arguments = {
                "block_size": CPU_BLOCK_TOKENS,
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, rollout.max_model_len),
            }
        cache_mib = rollout.kv_cache_mib or (CPU_KV_CACHE_MIB if cpu else None)
        if cache_mib is not None:
            arguments["kv_cache_memory_bytes"] = cache_mib << 20
        self._llm = LLM(
            model=config.model.path,
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_concurrent_samples,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from, temperature applied
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls="actors.vllm_weights.WorkerExtension",
            disable_log_stats=True,
            **(arguments | rollout.engine_args),
        )
        self._engine = self._llm.llm_engine
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._llm.update_weight_version("0")
        self._rollout = rollout
        self._stop_token_ids = list(stop_token_ids)
        self._backlog: list[FinishedSample] = []

    def add(self, request: SampleRequest) -> None:
        """Queue one sample."""
        greedy = request.temperature == 0
        parameters = SamplingParams(
            temperature=request.temperature,
            top_p=1.0 if greedy else self._rollout.top_p,
            top_k=0 if greedy else self._rollout.top_k,
            seed=None if greedy else request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request.key, {"prompt_token_ids": list(request.prompt_token_ids)}, parameters)

    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        return bool(self._backlog) or self._engine.has_unfinished_requests()

    def step(self) -> list[FinishedSample]:
        """Advance every running sample by one token; return those that finished."""
        if self._backlog:
            finished, self._backlog = self._backlog, []
            return finished
        return [_finished(output) for output in self._engine.step() if output.finished]

    def score(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return float32 (T-1,) logprobs of tokens 1.., temperature 1; samples that finish meanwhile wait for the next step."""
        key = "score"
        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._engine.add_request(key, {"prompt_token_ids": list(token_ids)}, parameters)
        while True:
            for output in self._engine.step():
                if output.request_id == key and output.finished:
                    rows: Any = output.prompt_logprobs  # pyright: ignore (of a RequestOutput)
                    return np.array([rows[t][token_ids[t]].logprob for t in range(1, len(token_ids))], dtype=np.float32)
                if output.finished:
                    self._backlog.append(_finished(output))

    def begin_load(self) -> None:
        """Open a weight update."""
        self._llm.start_weight_update()

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Load some tensors."""
        self._llm.update_weights({"update_info": {"bucket": bucket}})

    def finish_load(self, version: WeightVersion) -> None:
        """Commit the update, label what is sampled from here on, and recompute every cache."""
        self._llm.finish_weight_update(weight_version=str(version.steps))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(
                "vLLM must drop its KV cache after a weight update, got a refusal. Report this with the engine's log."
            )


def _finished(output) -> FinishedSample:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"a sample must end by stop or length, got {completion.finish_reason} for {output.request_id}. See the engine's log."
        )
    versions = np.empty(len(completion.token_ids), dtype=np.int32)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return FinishedSample(
        key=output.request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        versions=versions,
        finish_reason=completion.finish_reason,
    )

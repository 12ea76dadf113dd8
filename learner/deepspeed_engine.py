"""The door to deepspeed: one optimizer step whose gradient does not depend on how the work was cut.

    update = optimizer(sum over ranks and micro-batches of d loss / d parameters)

DeepSpeed averages gradients over ranks, so each loss is multiplied by the number of ranks; denominators are the caller's and
count the whole step. How many micro-batches a rank runs is free at stages 0 to 2: gradients stay local until `reduce`.
Stage 3 gathers parameters in every forward, so there the caller runs equally many on every rank (`uneven_hangs`).

Masters are float32 and so are gradients; bfloat16 is autocast inside of the module (DeepSpeed's own bf16 mode accumulates in
bf16). Stage 0 neither records a norm nor skips non-finite gradients: done here, alike for every stage.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import Config, LearnerConfig
from learner.logprobs import TokenLogprobs
from learner.packing import MicroBatch
from learner.shards import Shards

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
import deepspeed
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_grad

# an op for inference on CPUs, which DeepSpeed would compile at start (20 s, needs g++ and ninja) and which we never call
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
BUCKET_ELEMENTS = 20_000_000  # larger ones only cost memory (measured on two cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update did."""

    grad_norm: float  # before clipping, over all ranks; not finite where skipped
    lr: float
    skipped: bool  # the gradient was not finite: weights and moments are as before


def join(rank: int, num_ranks: int, address: str, port: int, timeout_s: float) -> int:
    """Join the ranks' process group: gloo on CPUs, NCCL on GPUs.

    Rank 0 listens first (port 0: any free one, held from that moment on) and the others connect.

    Returns:
        The port on which rank 0 listens.
    """
    store = dist.TCPStore(address, port, num_ranks, rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False)
    _STORES.append(store)
    return store.port


def form_group(rank: int, num_ranks: int, timeout_s: float) -> torch.device:
    """Wait for the other ranks; return this rank's device."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, store=_STORES[-1], rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return device


_STORES: list[dist.TCPStore] = []  # rank 0's store serves the group as long as the process lives


class Engine:
    """A TokenLogprobs module under DeepSpeed."""

    def __init__(self, module: TokenLogprobs, config: Config, device: torch.device) -> None:
        """Shard, build the optimizer, wrap. The module's parameters are the float32 masters (or their shards)."""
        learner = config.learner
        self.module = module
        self.stage: int = learner.zero_stage
        self.num_ranks = dist.get_world_size()
        self.updates = 0  # optimizer updates tried so far: what the schedule counts
        self._total_updates = config.train.num_steps * learner.num_mini_batches * learner.num_epochs
        self._learner = learner
        settings = _deepspeed_config(learner)
        trained = [p for p in module.parameters() if p.requires_grad]
        self.num_trained = sum(p.numel() for p in trained)
        optimizer = _optimizer(trained, learner)
        if self.stage == 3:
            _shard(module, settings, device)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
        module.eval()
        if learner.gradient_checkpointing:
            _checkpoint_layers(module)
        self._engine: Any = engine

    @property
    def uneven_hangs(self) -> bool:
        """Whether every rank must run the same number of forwards and backwards."""
        return self.stage == 3 and self.num_ranks > 1

    def __call__(self, batch: MicroBatch, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the module's forward."""
        return self._engine(batch, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Collect the gradients of any number of `backward` calls; on exit they are summed over ranks."""
        engine = self._engine
        with ExitStack() as stack:
            if self.stage == 0:
                stack.enter_context(engine.no_sync())
            elif self.stage < 3:
                stack.enter_context(engine.coalesce_grad_reduction())
            else:
                engine.set_gradient_accumulation_boundary(
                    True
                )  # reduced after each backward, added to this rank's shard
            yield
            if self.stage < 3:
                for param in self.module.parameters():
                    if param.requires_grad and param.grad is None:  # ranks must reduce the same parameters
                        param.grad = torch.zeros_like(param)
        if self.stage == 0 and self.num_ranks > 1:
            engine.set_gradient_accumulation_boundary(True)
            engine.allreduce_gradients(bucket_size=BUCKET_ELEMENTS)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the step's loss."""
        self._engine.backward(loss * self.num_ranks, scale_wrt_gas=False)

    def update(self) -> Update:
        """Clip, and move the weights by what was accumulated; a non-finite gradient moves nothing, at any stage."""
        lr = self._learner.lr * lr_factor(self._learner, self.updates, self._total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self.updates += 1
        if self.stage == 0:
            norm = self._stage_0_norm()
            if not math.isfinite(norm):
                self.discard()
                return Update(grad_norm=norm, lr=lr, skipped=True)
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.step()
            return Update(grad_norm=norm, lr=lr, skipped=False)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return Update(grad_norm=norm, lr=lr, skipped=bool(self._engine.optimizer.overflow))

    def pass_by(self) -> None:
        """Count an update that had nothing to learn from, so that the schedule ends with the run."""
        self.updates += 1

    def discard(self) -> None:
        """Forget what was accumulated."""
        if self.stage == 0:
            self._engine.zero_grad()
            return
        optimizer = self._engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.stage == 3:
            optimizer.averaged_gradients = {}
            return
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole reduced gradients by parameter name, on every rank; for tests, between accumulate and update."""
        found = {}
        for name, param in self.module.model.named_parameters():
            if param.requires_grad:
                grad = param.grad if self.stage == 0 else safe_get_full_grad(param)
                found[name] = torch.zeros_like(param) if grad is None else grad.detach().clone()
        return found

    @contextmanager
    def gathered(self, params: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Hold these parameters whole; under ZeRO-3 every rank must enter with the same ones."""
        with GatheredParameters(list(params), enabled=self.stage == 3):
            yield

    def local(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return what this rank holds of a parameter, flat: all of it, or its shard under ZeRO-3."""
        return (param.ds_tensor if self.stage == 3 else param).detach().view(-1)  # pyright: ignore

    def optimizer_bytes(self) -> int:
        """Return the size of the moments this rank holds."""
        optimizer = self._engine.optimizer if self.stage == 0 else self._engine.optimizer.optimizer
        tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def shards(self) -> Shards:
        """Return what this rank holds of what training changes."""
        named = [(name, p) for name, p in self.module.model.named_parameters() if p.requires_grad]
        return Shards(named, self._engine.optimizer, self.stage, dist.get_rank())

    def _stage_0_norm(self) -> float:
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))


def lr_factor(learner: LearnerConfig, update: int, total_updates: int) -> float:
    """Return the share of `lr` at an update: linear warm-up, then constant, linear or cosine down to 0 after the last."""
    if update < learner.warmup_steps:
        return (update + 1) / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return 1.0
    progress = (update - learner.warmup_steps) / max(1, total_updates - learner.warmup_steps)
    progress = min(1.0, progress)
    return 1.0 - progress if learner.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def _optimizer(trained: list[torch.nn.Parameter], learner: LearnerConfig) -> torch.optim.Optimizer:
    decayed = [p for p in trained if p.ndim >= 2]
    rest = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}] if learner.weight_decay and rest else trained
    if learner.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=learner.lr, weight_decay=learner.weight_decay)
    return torch.optim.AdamW(
        groups, lr=learner.lr, betas=learner.adam_betas, weight_decay=learner.weight_decay, fused=True
    )


def _deepspeed_config(learner: LearnerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    theirs = dict(learner.deepspeed)
    zero |= dict(theirs.pop("zero_optimization", {})) | {"stage": learner.zero_stage}
    if (
        torch.cuda.is_available()
    ):  # on a CPU all of it lies there already, and DeepSpeed's offloading fails (no streams)
        if learner.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if learner.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return theirs | {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed counts with it; our micro-batches are counted in tokens
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU as well
    }


def _shard(module: TokenLogprobs, settings: dict[str, Any], device: torch.device) -> None:
    """Move the parameters from host memory to their shards one by one: a GPU never holds the whole model."""
    module.device = device
    deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=torch.float32)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, buffer.to(device), persistent=name not in part._non_persistent_buffers_set)


def _checkpoint_layers(module: TokenLogprobs) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # the layer alone, not what is in it: no dropout, see TokenLogprobs

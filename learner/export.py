"""Writes the policy as a Hugging Face folder that from_pretrained and vLLM load without conversion."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from configs.schema import Config
from learner.checkpoint import read_weights
from learner.policy import load_policy
from learner.weights import list_weights, merged

ADAPTER = "adapter"  # subfolder of the exported model that holds peft's own adapter


Gathered = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]  # holds parameters whole; under ZeRO-3 on every rank


def export(policy: nn.Module, config: Config, folder: Path, *, gathered: Gathered, writes: bool) -> None:
    """Write the (merged) model, its configuration and its tokenizer; with LoRA also the adapter alone.

    Every rank calls it: under ZeRO-3 they gather together. One of them writes, beside the folder first, then in its place,
    so that the folder is never half written.

    Args:
        policy: holds the masters.
        config: resolved; tokenizer and generation settings are those of `model.path`, weights are written in `model.dtype`.
        folder: where to write; replaced if it exists.
        gathered: holds some of the policy's parameters whole.
        writes: whether this rank writes.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    state: dict[str, torch.Tensor] = {}
    for weight in list_weights(policy):
        with gathered(weight.needed), torch.no_grad(), merged(weight) as tensor:
            if writes:
                state[weight.name] = tensor.detach().to("cpu", dtype, copy=True)
    adapter = _adapter_state(policy, gathered)
    if not writes:
        return
    folder = folder.absolute()
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    model = policy if isinstance(policy, PreTrainedModel) else policy.get_base_model()  # pyright: ignore (peft's)
    _write_model(model, state, beside, dtype)
    _copy_tokenizer(config.model.path, beside)
    if adapter:
        policy.save_pretrained(str(beside / ADAPTER), state_dict=adapter)  # pyright: ignore (peft's)
    _put_in_place(beside, folder)


def export_checkpoint(config: Config, checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint's learner folder, in this process alone."""
    policy = load_policy(config)
    read_weights(checkpoint, [(name, param) for name, param in policy.named_parameters() if param.requires_grad])
    export(policy, config, folder, gathered=lambda params: nullcontext(), writes=True)


def _write_model(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Save without touching the live model: an empty twin takes the tensors."""
    with torch.device("meta"):
        twin = type(model)(model.config)
    strangers = state.keys() - dict(twin.named_parameters()).keys()
    if strangers:
        raise KeyError(
            f"Every exported tensor must belong to {type(model).__name__}, got {min(strangers)}. This is a bug."
        )
    twin.load_state_dict(state, strict=False, assign=True)
    twin.tie_weights()
    left = [name for name, tensor in twin.named_parameters() if tensor.is_meta]
    if left:
        raise KeyError(
            f"Every parameter of {type(model).__name__} must be exported, got none for {left[0]}. This is a bug."
        )
    twin.config.dtype = dtype
    twin.generation_config = model.generation_config  # pyright: ignore (declared narrower than it is)
    twin.save_pretrained(str(folder))


def _adapter_state(policy: nn.Module, gathered: Gathered) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in policy.named_parameters():
        if ".lora_" in name:
            with gathered([param]):
                found[name] = param.detach().to("cpu", copy=True)
    return found


def _copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer as it is; a folder without one (tests) exports without one."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(str(folder))
        return
    patterns = (
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "chat_template*",
        "*.tiktoken",
    )
    for pattern in patterns:
        for path in Path(source).glob(pattern):
            if path.is_file():
                shutil.copy(path, folder / path.name)


def _put_in_place(beside: Path, folder: Path) -> None:
    for path in beside.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old)
    else:
        beside.rename(folder)

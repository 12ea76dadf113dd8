"""A tiny random model with a tokenizer of its own, made on the fly: what every test of the real stack runs on."""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= abcdefghijklmnopqrstuvwxyz.,?\n"
VOCAB = 64
EOS = "</s>"


def make_tiny_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Write a 2-layer Llama (hidden 64, head_dim 32) with a character tokenizer as a Hugging Face folder."""
    tokens = {EOS: 0, "<unk>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token="<unk>", pad_token=EOS)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}a: "
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # larger than the usual initialisation: logits far from uniform, so that a stale tensor shows
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, num_rows: int = 32) -> Path:
    """Write one-digit sums as jsonl rows."""
    rows = [{"prompt": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10 + i // 10 % 10)} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(model: Path, rows: Path, output_dir: Path) -> list[str]:
    """Configure a run of seconds on the tiny model: 4 prompts x 4 samples a step, fp32, every role on fractions of two CPUs."""
    return [
        f"model.path={model}", "model.dtype=float32", f"data.train={rows}", "data.max_prompt_tokens=32",
        f"train.output_dir={output_dir}", "train.num_steps=3", "train.prompts_per_step=4", "train.sample_table_every=0",
        "algorithm.beta=0", "rollout.num_generations=4", "rollout.max_new_tokens=8", "rollout.max_model_len=64",
        "rollout.max_concurrent_samples=32", "rollout.kv_cache_mib=64", "rollout.num_cpus=0.3", "reward.num_cpus=0.1",
        "reference.num_cpus=0.3", "learner.num_cpus=0.3", "learner.lr=1e-3", "cluster.num_cpus=2",
    ]  # fmt: skip

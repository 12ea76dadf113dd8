"""Reward model worker: a sequence classifier scores responses, batched by token budget.

Any `AutoModelForSequenceClassification`: one output (Bradley-Terry, regression), or one chosen label of several; its logit or its
probability. It has its own tokenizer and template. A score does not depend on the batch: padding is masked, and where the
model looks for its last token by a padding id that it does not have, one that the batch does not hold is taken.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from actors.rewards.worker import unless_broken
from configs.rules import ConfigError
from configs.schema import Config, RewardModelConfig
from orchestrator.types import Group, Reward


def check_reward_model(config: Config) -> None:
    """Refuse what a classifier's own configuration shows, without loading it.

    Raises:
        ConfigError: there is no such model, or the label is not one of its.
    """
    from transformers import AutoConfig

    part = config.reward_model
    try:
        model = AutoConfig.from_pretrained(str(part.path), trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"reward_model.path must be a Hugging Face folder or a hub name that can be reached, got {part.path} ({cause}). Check it."
        ) from None
    if not any("SequenceClassification" in name for name in model.architectures or []):
        raise ConfigError(
            f"reward_model.path must be a sequence classifier, got {model.architectures} in {part.path}. "
            "Give a model with a trained classification head."
        )
    label_index(part, model.num_labels, model.id2label)


def label_index(part: RewardModelConfig, num_labels: Any, names: Any) -> int:
    """Find the output that is the reward.

    Raises:
        ConfigError: reward_model.label does not name one of several.
    """
    if num_labels == 1 and part.label is None:
        return 0
    known = {name: index for index, name in names.items()} | {str(index): index for index in range(num_labels)}
    if part.label not in known:
        raise ConfigError(
            f"reward_model.label must be one of {', '.join(names.values())} for {part.path}, got {part.label}. Choose one."
        )
    return known[part.label]


class RewardModelWorker:
    """Ray actor around one classifier."""

    def __init__(self, config: Config, name: str) -> None:
        import torch  # heavy; the process has its log file by now
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        part = config.reward_model
        trust, dtype = config.model.trust_remote_code, getattr(torch, part.dtype)
        self._name, self._part = name, part
        self._device = "cuda" if part.num_gpus > 0 else "cpu"
        loaded = AutoModelForSequenceClassification.from_pretrained(str(part.path), dtype=dtype, trust_remote_code=trust)
        self._model: Any = loaded.to(self._device).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(part.path), trust_remote_code=trust)
        text = self._model.config.get_text_config()
        self._pad = text.pad_token_id
        self._index = label_index(part, self._model.config.num_labels, self._model.config.id2label)
        positions = getattr(text, "max_position_embeddings", None)  # not every architecture has one
        self._limit = min(self._tokenizer.model_max_length, positions or self._tokenizer.model_max_length)

    def ready(self) -> str:
        """Return the worker's name once its model is loaded."""
        return self._name

    def score(self, group: Group) -> tuple[Reward, ...]:
        """Score the responses of a group; one that is longer than the classifier's context has no reward."""
        rows = [self._encode(group, sample.text) for sample in group.samples]
        fitting = [i for i, ids in enumerate(rows) if 0 < len(ids) <= self._limit]
        scores = dict(zip(fitting, self.scores([rows[i] for i in fitting]), strict=True))
        rewards = [self._reward(scores.get(i), len(ids)) for i, ids in enumerate(rows)]
        return tuple(unless_broken(sample, reward) for sample, reward in zip(group.samples, rewards, strict=True))

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Score tokenised rows, in batches of at most max_tokens_per_batch padded tokens."""
        scores = [math.nan] * len(rows)
        for chosen in batches([len(row) for row in rows], self._part.max_tokens_per_batch):
            for index, score in zip(chosen, self._forward([rows[i] for i in chosen]), strict=True):
                scores[index] = score
        return scores

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        pad = self._pad
        if pad is None:
            used = {token for row in rows for token in row}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self._model.config.get_text_config().pad_token_id = pad
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        if self._part.output == "probability":
            alone = logits.shape[-1] == 1 or self._model.config.problem_type == "multi_label_classification"
            logits = logits.sigmoid() if alone else logits.softmax(-1)
        return logits[:, self._index].tolist()

    def _encode(self, group: Group, response: str) -> list[int]:
        prompt, template = group.draw.prompt, self._part.template
        if template is None and self._tokenizer.chat_template:
            messages = prompt.columns.get("messages") or [{"role": "user", "content": prompt.text}]
            chat = [*messages, {"role": "assistant", "content": response}]
            text = self._tokenizer.apply_chat_template(chat, tokenize=False)
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        fields = {"{prompt}": prompt.text, "{response}": response}
        parts = (template or "{prompt}{response}").replace("{prompt}", "\0{prompt}\0").replace("{response}", "\0{response}\0")
        return self._tokenizer("".join(fields.get(part, part) for part in parts.split("\0")))["input_ids"]

    def _reward(self, score: float | None, num_tokens: int) -> Reward:
        if score is not None and math.isfinite(score):
            return Reward(value=score, cause="ok", parts={"model": score}, detail="", answer="")
        detail = f"the reward model gave {score}" if score is not None else (
            f"the reward model takes 1 to {self._limit} tokens, got {num_tokens}"
        )  # fmt: skip
        return Reward(value=math.nan, cause="error", parts={}, detail=detail, answer="")


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split rows into batches of similar length: (longest x rows) stays within max_tokens wherever a batch has more than one row."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

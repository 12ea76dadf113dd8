"""The reward model's score is the classifier's own, whatever the batch, and reaches the loop through replicas."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from actors.reward_model import RewardModelWorker, batches, check_reward_model
from configs.rules import ConfigError, check_rules
from configs.schema import Config, RewardConfig, RewardModelConfig
from tests.actors.rewarding import group
from tests.tiny import CHARACTERS

TEXTS = ["2", "a long answer that goes on and on", "two", "no.", "3 4 5 6 7 8 9", "yes yes", "", "maybe it is 12"]


def classifier(folder: Path, kind: str, *, num_labels: int = 1, pad: int | None = 1, chat: bool = False) -> Path:
    """Write a tiny random classifier with a character tokenizer."""
    vocab = {"</s>": 0, "<pad>": 1, "<unk>": 2, "[CLS]": 3, "[SEP]": 4} | {c: i + 5 for i, c in enumerate(CHARACTERS + "<>|:=")}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=64
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}" if chat else None
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 64, "num_labels": num_labels, "pad_token_id": pad, "initializer_range": 0.2}  # fmt: skip
    torch.manual_seed(0)
    if kind == "bert":
        model = BertForSequenceClassification(BertConfig(**shape))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**shape, num_key_value_heads=1, head_dim=16, eos_token_id=0))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def config(folder: Path, **part) -> Config:
    return Config(reward=RewardConfig(function="none"), reward_model=RewardModelConfig(path=str(folder), **part))


def outside(folder: Path, texts: list[str], *, special: bool = True) -> torch.Tensor:
    """Score texts one by one, without padding, with transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        rows = [tokenizer(text, return_tensors="pt", add_special_tokens=special) for text in texts]
        return torch.cat([model(input_ids=r["input_ids"], attention_mask=r["attention_mask"]).logits for r in rows])


@pytest.mark.parametrize(("kind", "pad"), [("bert", 1), ("llama", 1), ("llama", None)])  # BERT cannot do without a padding id
@pytest.mark.parametrize("budget", [1, 40, 8192])
def test_the_score_is_the_classifiers_own_whatever_the_batch(tmp_path, kind, pad, budget):
    folder = classifier(tmp_path, kind, pad=pad)
    worker = RewardModelWorker(config(folder, max_tokens_per_batch=budget), "r")
    wanted = outside(folder, ["1+1=" + text for text in TEXTS])[:, 0].tolist()
    given = [r.value for r in worker.score(group(*TEXTS))]
    assert max(abs(a - b) for a, b in zip(given, wanted, strict=True)) < 1e-5
    assert len({round(value, 4) for value in given}) == len(TEXTS)  # it does depend on the text


def test_labels_outputs_and_templates(tmp_path):
    folder = classifier(tmp_path, "bert", num_labels=3)
    logits = outside(folder, [f"q: 1+1= a: {text}" for text in TEXTS])
    template = "q: {prompt} a: {response}"
    for output, wanted in (("logit", logits), ("probability", logits.softmax(-1))):
        worker = RewardModelWorker(config(folder, label="LABEL_1", output=output, template=template), "r")
        assert [r.value for r in worker.score(group(*TEXTS))] == pytest.approx(wanted[:, 1].tolist(), abs=1e-5)


def test_one_output_as_a_probability_is_its_sigmoid(tmp_path):
    folder = classifier(tmp_path, "llama")
    wanted = outside(folder, ["1+1=" + text for text in TEXTS]).sigmoid()[:, 0].tolist()
    worker = RewardModelWorker(config(folder, output="probability"), "r")
    assert [r.value for r in worker.score(group(*TEXTS))] == pytest.approx(wanted, abs=1e-5)


def test_the_classifiers_own_chat_template_is_used(tmp_path):
    folder = classifier(tmp_path, "llama", chat=True)
    worker = RewardModelWorker(config(folder), "r")
    plain = outside(folder, ["user:1+1=|assistant:2|"], special=False)[0, 0].item()
    chat = outside(folder, ["system:be kind|user:hi|assistant:2|"], special=False)[0, 0].item()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert worker.score(group("2"))[0].value == pytest.approx(plain, abs=1e-5)
    assert worker.score(group("2", messages=messages))[0].value == pytest.approx(chat, abs=1e-5)


def test_a_response_beyond_the_context_has_no_reward(tmp_path):
    rewards = RewardModelWorker(config(classifier(tmp_path, "bert")), "r").score(group("1", "x" * 61, "x" * 60))
    assert [r.cause for r in rewards] == ["ok", "error", "ok"] and math.isnan(rewards[1].value) and "64 tokens, got 65" in rewards[1].detail


def test_batches_hold_the_budget_and_every_row_once():
    lengths = [5, 100, 7, 3, 60, 60, 2]
    made = list(batches(lengths, 64))
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 64 for batch in made) and len(made) < len(lengths)


@pytest.mark.parametrize(
    ("part", "words"),
    [({"label": "joy"}, "one of LABEL_0, LABEL_1"), ({}, "one of LABEL_0, LABEL_1"), ({"path": "nowhere-to-be-found"}, "can be reached")],
)
def test_a_classifier_that_cannot_be_used_is_refused(tmp_path, part, words):
    folder = classifier(tmp_path, "bert", num_labels=2)
    with pytest.raises(ConfigError, match=words):
        check_reward_model(Config(reward_model=RewardModelConfig(**{"path": str(folder)} | part)))


def test_a_language_model_is_no_classifier(tmp_path):
    from tests.tiny import make_tiny_model

    with pytest.raises(ConfigError, match="sequence classifier"):
        check_reward_model(config(make_tiny_model(tmp_path)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [({"reward": RewardConfig(function="none")}, "must name a function"), ({"reward_model": RewardModelConfig(weight=2.0)}, "no effect")],
)
def test_options_without_effect_are_refused(parts, words):
    with pytest.raises(ConfigError, match=words):
        check_rules(Config(**parts))


def test_functions_and_model_are_summed_and_one_failure_makes_the_sum_invalid():
    from actors.rewards.worker import weighted_sum
    from orchestrator.types import Reward

    good = Reward(value=2.0, cause="ok", parts={"f": 2.0}, detail="", answer="")
    model = Reward(value=3.0, cause="ok", parts={"model": 3.0}, detail="", answer="")
    bad = Reward(value=math.nan, cause="timeout", parts={}, detail="late", answer="")
    none = Reward(value=math.nan, cause="not_applicable", parts={}, detail="", answer="")
    both = weighted_sum([1.0, 0.5], [good, model])
    assert both.value == 3.5 and both.parts == {"f": 2.0, "model": 3.0}
    assert weighted_sum([1.0, 0.5], [none, model]).value == 1.5
    assert (failed := weighted_sum([1.0, 0.5], [bad, model])).cause == "timeout" and failed.detail == "late" and math.isnan(failed.value)
    assert weighted_sum([1.0, 0.5], [none, none]).cause == "not_applicable"


def test_a_run_has_the_workers_that_its_rewards_need(tmp_path):
    from orchestrator.build import _roles
    from orchestrator.capacity import asks
    from orchestrator.cluster import Places

    model = RewardModelConfig(path="somewhere", num_workers=3, num_gpus=0.5)
    for reward, part, wanted in (
        (RewardConfig(), RewardModelConfig(), {"reward": 1}),
        (RewardConfig(function="none"), model, {"reward_model": 3}),
        (RewardConfig(num_workers=2), model, {"reward": 2, "reward_model": 3}),
    ):
        made = Config(reward=reward, reward_model=part)
        roles = {role.name: role.num_workers for role in _roles(made, tmp_path, Places())}
        assert roles == {"rollout": 1, "reference": 1} | wanted
        assert {ask.role: ask.num_workers for ask in asks(made)} == roles | {"learner": 1}
        assert {ask.num_gpus for ask in asks(made) if ask.role == "reward_model"} <= {0.5}

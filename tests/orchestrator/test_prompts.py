"""Datasets: rows become prompts, faults are named by line, and the n-th draw is a function of n alone."""

import json

import pytest

from configs.load import load
from configs.rules import ConfigError
from orchestrator.prompts import PromptStream, read_prompts
from tests.orchestrator.fakes import prompts


class CharTokenizer:
    """One token per character; special tokens cost one more."""

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[0] * add_special_tokens + [ord(c) for c in t] for t in text]}

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        return "".join(f"{m['role']}:{m['content']}\n" for m in conversation) + "a:"


def read(tmp_path, content: str, *overrides: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    config = load(["model.path=m", f"data.train={path}", "data.max_prompt_tokens=20", *overrides])
    return read_prompts(str(path), "data.train", config, CharTokenizer())


def test_rows_keep_their_columns_and_lines(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2", "level": 3}, {"id": "x", "prompt": "2+2=", "answer": "4"}]
    read_rows = read(tmp_path, "\n".join(map(json.dumps, rows)) + "\n")
    assert [p.id for p in read_rows] == ["rows:1", "x"]
    assert read_rows[0].columns == {"answer": "2", "level": 3}
    assert read_rows[0].token_ids == (0, *map(ord, "1+1="))  # raw text takes the tokenizer's special tokens


def test_chat_messages_go_through_the_template_without_second_special_tokens(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}
    (prompt,) = read(tmp_path, json.dumps(row))
    assert prompt.text == "user:hi\na:" and prompt.token_ids == tuple(map(ord, prompt.text))


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        ("", [], "at least one row"),
        ('{"prompt": "a", "answer": 1}\n{"prompt"', [], "line 2"),
        ('{"question": "a", "answer": 1}', [], "no column 'prompt' among ['answer', 'question']"),
        ('{"prompt": "a"}', [], "no column 'answer'"),
        ('{"prompt": "", "answer": 1}', [], "is empty"),
        ('{"prompt": null, "answer": 1}', [], "neither a string nor a list"),
        ('[1]', [], "not an object but list"),
        (json.dumps({"prompt": "a" * 30, "answer": 1}), [], "line 1: 31 tokens"),
    ],
)
def test_faulty_rows_are_named_by_line(tmp_path, content, overrides, words):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, *overrides)
    assert words in str(caught.value)


def test_each_epoch_is_a_new_permutation_and_a_draw_depends_on_its_number_alone():
    stream = PromptStream(prompts(6), shuffle=True, seed=1)
    epochs = [[stream.draw(e * 6 + i).prompt.id for i in range(6)] for e in range(3)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(6)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = PromptStream(prompts(6), shuffle=True, seed=1)
    assert [again.draw(n).prompt.id for n in (13, 2, 7)] == [stream.draw(n).prompt.id for n in (13, 2, 7)]

"""Datasets: rows become prompts, faults are named by line, and the n-th draw is a function of n alone."""

import json

import pytest
from datasets import Dataset as HfDataset
from datasets import DatasetDict

from configs.load import load
from configs.rules import ConfigError, training
from orchestrator.origin import write_data
from orchestrator.prompts import MixedStream, PromptStream, read_prompts
from orchestrator.sources import read_rows
from tests.orchestrator.fakes import prompts


class CharTokenizer:
    """One token per character; special tokens cost one more."""

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[0] * add_special_tokens + [ord(c) for c in t] for t in text]}

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, **arguments):
        told = "".join(f"[{name}={value}]" for name, value in arguments.items())
        return told + "".join(f"{m['role']}:{m['content']}\n" for m in conversation) + "a:" * add_generation_prompt


def read(tmp_path, content: str, *overrides: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    config = load(["model.path=m", f"data.train={path}", "data.max_prompt_tokens=20", *overrides])
    (dataset,) = read_prompts(training(config), "data.train", config, CharTokenizer())
    return dataset.prompts


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
        ('{"prompt": "a", "answer": ""}', [], "line 1: 'answer' is empty"),
        ('{"prompt": "a", "answer": null}', [], "line 1: no column 'answer'"),
        ('\n{"prompt": " ", "answer": 1}', [], "line 2: 'prompt' is empty"),
        ('{"prompt": ["a"], "answer": 1}', [], "neither a string nor a list"),
        ('{"prompt": "a", "answer": 1}', ["data.system_prompt=be brief"], "Set data.text_as_chat=true"),
        ('{"prompt": "a", "answer": 1}', ["data.text_as_chat=true", "data.chat_template=no.jinja"], "got no.jinja"),
        (json.dumps({"prompt": "a" * 30, "answer": 1}), ["data.overlong=filter"], "line 1: 31 tokens"),  # nothing would be left
        ('{"prompt": "a", "answer": 1}\n{"prompt"', [], "line 2"),
        ('{"text": "a", "answer": 1}', [], "no column 'prompt' among ['answer', 'text']"),
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


@pytest.mark.parametrize(
    ("row", "overrides", "text"),
    [
        ({"prompt": "hi"}, [], "hi"),
        ({"prompt": "hi"}, ["data.text_as_chat=true"], "user:hi\na:"),
        ({"question": "hi"}, ["data.text_as_chat=true", "data.system_prompt=S"], "system:S\nuser:hi\na:"),
        ({"messages": [{"role": "system", "content": "T"}, {"role": "user", "content": "hi"}]}, ["data.system_prompt=S"],
         "system:T\nuser:hi\na:"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, [], "user:hi\na:"),
        ({"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, [],
         "[continue_final_message=True]user:hi\nassistant:ho\n"),
        ({"prompt": [{"role": "user", "content": "hi"}]},
         ["data.chat_template_kwargs={enable_thinking: false}", "data.chat_template='{x}'"],
         "[enable_thinking=False][chat_template={x}]user:hi\na:"),
        ({"prompt": [{"role": "user", "content": "hi"}], "tools": [1], "chat_template_kwargs": {"a": 2}}, [],
         "[a=2][tools=[1]]user:hi\na:"),
    ],
)  # fmt: skip
def test_what_the_template_is_given(tmp_path, row, overrides, text):
    options = ["data.max_prompt_tokens=200", *overrides]
    (prompt,) = read(tmp_path, json.dumps(row | {"answer": 1}), *options)
    assert prompt.text == text and prompt.columns["answer"] == 1


def test_rows_with_the_same_id_are_kept_apart_over_all_sources(tmp_path):
    (tmp_path / "a").mkdir()
    for place in (tmp_path / "rows.jsonl", tmp_path / "a" / "rows.jsonl"):
        place.write_text('{"prompt": "1", "answer": 1}\n{"id": "x", "prompt": "1", "answer": 1}\n{"id": "x", "prompt": "1", "answer": 1}\n')
    config = load(["model.path=m", f"data.train={{{tmp_path}/rows.jsonl: 1, {tmp_path}/a/rows.jsonl: 3}}"])
    datasets = read_prompts(training(config), "data.train", config, CharTokenizer())
    assert [[p.id for p in d.prompts] for d in datasets] == [["rows:1", "x", "x#2"], ["rows:1#2", "x#3", "x#4"]]
    assert [d.weight for d in datasets] == [1, 3]


def test_longer_prompts_are_left_out_and_counted_where_that_is_chosen(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * length, "answer": 1}) + "\n" for length in (3, 30, 4, 40)))
    config = load(["model.path=m", f"data.train={path}", "data.max_prompt_tokens=20", "data.overlong=filter"])
    (dataset,) = read_prompts(training(config), "data.train", config, CharTokenizer())
    assert ([p.id for p in dataset.prompts], dataset.num_overlong) == (["rows:1", "rows:3"], 2)
    write_data(tmp_path / "data.json", [dataset], {"test": dataset})
    told = json.loads((tmp_path / "data.json").read_text())
    assert told["eval"]["test"] == told["train"][0]
    assert (told["train"][0]["num_prompts"], told["train"][0]["num_overlong"], len(told["train"][0]["fingerprint"])) == (2, 2, 64)


def test_a_csv_is_text_and_a_split_of_a_dataset_on_disk_is_chosen(tmp_path):
    (tmp_path / "rows.csv").write_text('question,answer\n"1, or 2?",007\n')
    assert read_rows(str(tmp_path / "rows.csv"), "data.train").rows == [(2, {"question": "1, or 2?", "answer": "007"})]
    split = HfDataset.from_list([{"prompt": "a"}])
    DatasetDict(test=split).save_to_disk(tmp_path / "saved")
    assert read_rows(f"{tmp_path}/saved?split=test", "data.train").rows == [(1, {"prompt": "a"})]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{folder}/saved", "its splits are test, not train"),
        ("{folder}/saved?spilt=test", "options split and subset, got spilt"),
        ("{folder}/ragged.csv", "(line 3: not 2 cells)"),
        ("{folder}/rows.csv?split=test", "a file takes no options"),
        ("{folder}/none.parquet", "must name an existing file"),
        ("nobody/nothing", "Check the name"),
        ("{folder}/object.json", "must be a list of objects"),
        ("{folder}/broken.json", "broken.json"),
        ("reasoning_gym:gsm_symbolik", "Did you mean gsm_symbolic"),
        ("reasoning_gym:leg_counting?legs=3", "must give leg_counting options that it takes"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_sentence(tmp_path, source, words):
    DatasetDict(test=HfDataset.from_list([{"prompt": "a"}])).save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        read_rows(source.format(folder=tmp_path), "data.train")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", ["{a.jsonl: 0}", "{a.jsonl: x}", "[a.jsonl]", "{}", "{a.jsonl: .inf}"])
def test_weights_must_be_numbers_above_0(data):
    with pytest.raises(ConfigError, match="data.train must be a source, or sources with weights above 0"):
        load(["model.path=m", f"data.train={data}"])


def test_each_source_gets_its_share_of_the_draws_and_goes_through_its_own_epochs():
    few, many = prompts(3), prompts(50)[10:]
    mixed = MixedStream([PromptStream(few, shuffle=True, seed=1), PromptStream(many, shuffle=True, seed=1)], [1, 3])
    drawn = [mixed.draw(number) for number in range(400)]
    assert [draw.number for draw in drawn] == list(range(400))
    own = [draw.prompt.id for draw in drawn if draw.prompt in few]
    assert len(own) == 100
    assert all(sorted(own[i : i + 3]) == ["p0", "p1", "p2"] for i in range(0, 99, 3))
    for length in range(1, 400):  # never further from its share than one draw
        assert abs(sum(draw.prompt in few for draw in drawn[:length]) - length / 4) <= 1
    again = MixedStream([PromptStream(few, shuffle=True, seed=1), PromptStream(many, shuffle=True, seed=1)], [1, 3])
    assert [again.draw(n).prompt.id for n in (313, 7)] == [drawn[n].prompt.id for n in (313, 7)]


def test_a_reasoning_gym_task_is_a_source_and_its_verifier_a_reward(tmp_path):
    from actors.rewards.child import answer
    from actors.rewards.child import load as load_reward
    from actors.rewards.interfaces import Batch

    source = "reasoning_gym:leg_counting?size=4&seed=7&max_animals=3"
    config = load(["model.path=m", f"data.train={source}", "reward.function=reasoning_gym", "data.text_as_chat=true"])
    (dataset,) = read_prompts(training(config), "data.train", config, CharTokenizer())
    assert [p.id for p in dataset.prompts] == [f"leg_counting:{n}" for n in range(1, 5)]
    assert read_prompts(training(config), "data.train", config, CharTokenizer())[0].prompts == dataset.prompts  # by its seed
    for prompt in dataset.prompts:
        assert prompt.text == f"user:{prompt.columns['question']}\na:" and prompt.columns["metadata"]["source_dataset"] == "leg_counting"
        gold = prompt.columns["answer"]
        batch = Batch(prompt=prompt.text, completions=[f"<answer>{gold}</answer>", "no"], completion_ids=[[], []], columns=prompt.columns,
                      label=gold, step=0)  # fmt: skip
        (right, wrong) = answer(load_reward("reasoning_gym", {}, 9.0), batch)["values"]
        assert right[1] == 1.0 and wrong[1] < 1.0

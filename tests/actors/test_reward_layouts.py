"""The same rows in the layouts of five systems give the same prompts and rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset as HfDataset

from actors.rewards.child import answer, load
from actors.rewards.worker import batch_of
from configs.load import load as load_config
from orchestrator.prompts import read_prompts
from orchestrator.types import Group
from tests.actors.rewarding import group
from tests.orchestrator.test_prompts import CharTokenizer

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
GENERATED = [(f"What is {a} + {b}?", str(a + b)) for a, b in ((1, 2), (20, 22), (700, 800))]


def rows(layout: str, question: str, gold: str) -> dict[str, Any]:
    """Write a question and its answer as a system's users do."""
    chat = [{"role": "user", "content": question}]
    return {
        "trl": {"prompt": chat, "answer": gold},
        "verl": {"data_source": "sums", "prompt": chat, "ability": "math", "extra_info": {"index": 0},
                 "reward_model": {"style": "rule", "ground_truth": gold}},
        "skyrl": {"data_source": "sums", "prompt": chat, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": gold}},
        "slime": {"prompt": chat, "label": gold, "metadata": {}},
        "openrlhf": {"input": chat, "label": gold},
        "swift": {"messages": chat, "solution": gold},
    }[layout]  # fmt: skip


def written(place: Path, kind: str, content: list[dict[str, Any]]) -> str:
    """Write rows as a source of that kind."""
    if kind == "jsonl":
        place.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    elif kind == "json":
        place.with_suffix(".json").write_text(json.dumps(content))
    elif kind == "parquet":
        HfDataset.from_list(content).to_parquet(place.with_suffix(".parquet"))
    else:
        HfDataset.from_list(content).save_to_disk(place)
        return str(place)
    return str(place.with_suffix("." + kind))


def read_and_score(folder: Path, layout: str, questions: list[tuple[str, str]], kind: str = "jsonl") -> list[tuple[str, list[Any]]]:
    """Return each row's prompt as text, and the rewards of a right and a wrong response."""
    path = written(folder / layout, kind, [rows(layout, *pair) for pair in questions])
    config = load_config(["model.path=m", f"data.train={path}", "data.max_prompt_tokens=4000", "rollout.max_model_len=8000",
                          "reward.function=math"])  # fmt: skip
    (dataset,) = read_prompts({path: 1.0}, "data.train", config, CharTokenizer())
    read = dataset.prompts
    scored = []
    for prompt, (_, gold) in zip(read, questions, strict=True):
        number = gold.rpartition("####")[2].strip()
        asked = group(rf"\boxed{{{number}}}", f"The answer is {number}1.")
        draw = type(asked.draw)(number=0, prompt=prompt)
        batch = batch_of(Group(draw=draw, samples=asked.samples), config.reward.answer_column)
        assert batch.columns["messages"][0]["role"] == "user"
        scored.append((prompt.text, [number for _, number, _ in answer(load("math", {}, 9.0), batch)["values"]]))
    return scored


@pytest.mark.parametrize("kind", ["json", "parquet", "disk"])
@pytest.mark.parametrize("layout", ["verl", "swift"])
def test_the_kind_of_file_changes_nothing(tmp_path, layout, kind):
    assert read_and_score(tmp_path, layout, GENERATED, kind) == read_and_score(tmp_path, "trl", GENERATED)


@pytest.mark.parametrize("layout", ["verl", "skyrl", "slime", "openrlhf", "swift"])
@pytest.mark.parametrize("source", ["generated", "gsm8k"])
def test_the_layouts_give_the_same_prompts_and_rewards(tmp_path, layout, source):
    questions = GENERATED
    if source == "gsm8k":
        if not GSM8K.is_file():
            pytest.skip("the folder ../shared with GSM8K is absent")
        lines = [json.loads(line) for line in GSM8K.read_text().splitlines()[:50]]
        questions = [(row["question"], row["answer"]) for row in lines]
    wanted = read_and_score(tmp_path, "trl", questions)
    assert read_and_score(tmp_path, layout, questions) == wanted
    assert [rewards for _, rewards in wanted] == [[1.0, 0.0]] * len(questions)

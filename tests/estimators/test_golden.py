"""The golden file through the runner, and the runner itself."""

import json
from pathlib import Path

import pytest
import torch

from tests.golden.__main__ import main
from tests.golden.cases import NotClaimed, mismatches, run

FILE = Path(__file__).parents[1] / "golden" / "golden_public.json"
CASES = json.loads(FILE.read_text())["cases"]
EXACT = [case for case in CASES if case["inputs_exact_in_float32"]]


def test_public_file_is_claimed_and_passes(capsys):
    assert main([str(FILE)]) == 0
    words = capsys.readouterr().out.splitlines()[-1].replace(",", "").split()
    counts = dict(
        zip(("claimed", "passed", "failed", "not claimed"), (int(w) for w in words if w.isdigit()), strict=True)
    )
    assert counts["claimed"] >= 110
    assert counts["passed"] == counts["claimed"]
    assert sum(counts[name] for name in ("claimed", "not claimed")) == len(CASES)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case["id"])
def test_float32_inputs_give_the_same(case):
    try:
        quantities = run(case, torch.float32)
    except NotClaimed:
        pytest.skip("not claimed")
    assert mismatches(case, quantities, tolerance=2e-4) == []


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_plus_plus", "grpo"])
def test_no_claimed_sharding_case_uses_statistics_of_one_rank(algorithm):
    (case,) = [c for c in CASES if c["family"] == "sharding" and c["algorithm"] == algorithm]
    got = run(case)["value"]
    wrong = torch.tensor(case["wrong_if_local_statistics"], dtype=torch.float64)
    assert (got - wrong).abs().max() > 1e-3


def test_a_wrong_number_fails_the_file(tmp_path, capsys):
    good, bad = json.loads(json.dumps(CASES[0])), json.loads(json.dumps(CASES[0]))
    bad["id"] = "off.by.2e-6"
    bad["expected"]["value"][0] += 2.1e-6
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [good, bad]}))
    assert main([str(path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("off.by.2e-6: advantages is off by 2.1e-06")
    assert last == "claimed 2, passed 1, failed 1, not claimed 0"


def test_unknown_family_and_parameter_are_not_claimed(tmp_path, capsys):
    stranger = {**CASES[0], "family": "other"}
    parameter = {**CASES[0], "params": {**CASES[0]["params"], "temperature": 2}}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [stranger, parameter]}))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "claimed 0, passed 0, failed 0, not claimed 2\n"


def test_missing_file_is_one_sentence(capsys):
    assert main(["nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().out

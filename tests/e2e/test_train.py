"""The real stack on a CPU: vLLM in Ray actors, DeepSpeed, weight sync, evaluation, export."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.cli import metrics, train

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.soak), False], ids=["tied", "untied"])
def test_engine_and_learner_agree_at_every_step(tiny, tmp_path, tied):
    """At lr 1e-3 every tensor moves visibly at every step: one stale tensor would show at once."""
    code, output = train(
        *tiny(tmp_path, tied=tied), "train.num_steps=10", "rollout.num_workers=2", "algorithm.beta=0.05",
    )  # fmt: skip
    assert code == 0, output
    steps = metrics(tmp_path)
    assert len(steps) == 10
    assert max(s["mismatch/logprob_abs_diff"] for s in steps) < 1e-4
    assert steps[0]["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert abs(steps[0]["kl/ref"]) < 1e-5 < max(abs(s["kl/ref"]) for s in steps)
    assert [s["sync/version"] for s in steps] == list(range(1, 11))
    assert all(s["sync/engines"] == 2 and s["sync/probe_abs_diff"] < 1e-3 for s in steps)
    assert all(s["staleness/max"] == 0 for s in steps)
    assert steps[-1]["ledger/trained"] == 40 == steps[-1]["ledger/drawn"]


GRPO = ["algorithm.advantage_estimator=grpo", "algorithm.beta=0.04", "learner.num_ranks=2", "learner.zero_stage=2"]
STALE = [
    "algorithm.advantage_estimator=reinforce_plus_plus", "algorithm.beta=0.02", "train.max_staleness=3", "train.num_steps=5",
    "algorithm.correction=token_truncate",
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [GRPO, pytest.param(STALE, marks=pytest.mark.soak)],
    ids=["grpo-2-ranks", "reinforce_plus_plus-staleness-3"],
)
def test_other_estimators_run_and_the_policy_loads(tiny, tmp_path, options):
    code, output = train(*tiny(tmp_path), *options)
    assert code == 0, output
    stale = "train.max_staleness=3" in options
    assert len(metrics(tmp_path)) == (5 if stale else 3)
    assert max(s["staleness/max"] for s in metrics(tmp_path)) == (3 if stale else 0)
    policy = tmp_path / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert torch.isfinite(model(**tokenizer("1+1=", return_tensors="pt")).logits).all()
    assert (tmp_path / "config.yaml").exists() and list((tmp_path / "tensorboard").iterdir())
    assert {p.stem for p in (tmp_path / "logs").iterdir()} >= {"rollout-0", "learner-0", "reward-0"}

"""What an environment wrote carries no gradient, whatever the loss: its logprobs, entropies and ratios never matter."""

import pytest
import torch

from configs.load import load
from estimators.aggregate import StepTotals
from learner.loss import Tokens, loss_of
from learner.tally import Tally

OPTIONS = [
    *([f"algorithm.policy_loss={name}"] for name in ("ppo_clip", "gspo", "rloo_sequence", "cispo", "reinforce")),
    *([f"algorithm.aggregation={name}"] for name in ("sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length")),
    *([f"algorithm.correction={name}", "train.max_staleness=1"] for name in ("token_truncate", "token_mask", "sequence_mask")),
    ["algorithm.entropy_coef=0.1"],
    *(["algorithm.beta=0.1", "algorithm.kl_in_reward=false", f"algorithm.kl_estimator={kind}"] for kind in ("k2", "k3", "unbiased")),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[-1])
def test_observations_carry_no_gradient(options):
    beta = [] if any("beta" in option for option in options) else ["algorithm.beta=0"]
    config = load(["model.path=m", "data.train=d", *beta, *options])
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0]], dtype=torch.bool)  # turn, observation, turn; padding
    advantages = torch.tensor([[1.0], [-0.5]])
    totals = StepTotals(num_tokens=int(mask.sum()), num_sequences=2, num_samples=2, max_new_tokens=6)

    def gradients(noise: float) -> tuple[torch.Tensor, ...]:
        """Disturb everything outside the mask by `noise`."""
        torch.manual_seed(1)
        logprobs, entropy = (torch.randn(2, 6) * 0.1 - 2 for _ in range(2))
        there = torch.where(mask, 0.0, noise)
        leaves = [(logprobs + there).requires_grad_(), (entropy + there).requires_grad_()]
        others = [torch.randn(2, 6) * 0.1 - 2 + there for _ in range(3)]
        old, rollout, reference = others
        tokens = Tokens(
            logprobs_NT=leaves[0], entropy_NT=leaves[1], old_NT=old, rollout_NT=rollout, reference_NT=reference, mask_NT=mask
        )
        loss_of(tokens, advantages, config.algorithm, config.algorithm.beta, totals, Tally()).backward()
        return tuple(torch.zeros(2, 6) if leaf.grad is None else leaf.grad for leaf in leaves)

    quiet, loud = gradients(0.0), gradients(-7.0)
    assert quiet[0][mask].abs().min() > 0
    for one, other in zip(quiet, loud, strict=True):
        assert (one[~mask] == 0).all() and (other[~mask] == 0).all()
        assert torch.equal(one[mask], other[mask])

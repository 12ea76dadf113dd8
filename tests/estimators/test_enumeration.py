"""Exact expectations: every group, weighted with its probability, against the gradient of the true objective."""

import itertools

import pytest
import torch
from torch import Tensor

from estimators.aggregate import StepTotals, aggregate
from estimators.correction import correction_weights
from estimators.grpo import grpo
from estimators.kl import k1, k2, k3, kl_in_reward, sequence_kl, unbiased
from estimators.policy_loss import policy_loss
from estimators.rloo import rloo
from tests.estimators.samples import LOSSES, close, options

# A policy over two tokens, 0 and 1: token 1 ends the response, two tokens end it too. Responses: 1, 00, 01.
RESPONSES = ((1,), (0, 0), (0, 1))
LENGTHS = torch.tensor([1, 2, 2])
REWARDS = torch.tensor([0.3, 1.0, -0.7], dtype=torch.float64)
MASK = torch.arange(2) < LENGTHS[:, None]


def parameters(seed: int) -> Tensor:
    """Logits of the next token after nothing and after 0."""
    return torch.randn((2, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities of the tokens of each response, (3, 2); the padding of the first holds no number."""
    table = logits.log_softmax(dim=1)
    rows = [[table[t, token] for t, token in enumerate(response)] for response in RESPONSES]
    rows[0].append(torch.tensor(torch.nan, dtype=torch.float64))
    return torch.stack([torch.stack(row) for row in rows])


def response_logprobs(logits: Tensor) -> Tensor:
    return torch.where(MASK, token_logprobs(logits), 0.0).sum(dim=1)


def true_gradient(logits: Tensor, ref: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Gradient of E[R] - beta * KL(pi || ref)."""
    logits = logits.detach().requires_grad_()
    logprobs = response_logprobs(logits)
    gain = REWARDS if ref is None else REWARDS - beta * (logprobs - response_logprobs(ref))
    return torch.autograd.grad((logprobs.exp() * gain).sum(), logits)[0]


def expected_gradient(logits, behaviour, samples, algorithm, *, ref=None, beta=0.0, estimator=rloo):
    """Minus the expected gradient of the loss of one group, over all groups that `behaviour` can sample.

    All groups are rows of one (G, K) batch; each is a step of its own.
    """
    logits = logits.detach().requires_grad_()
    groups = torch.tensor(list(itertools.product(range(3), repeat=samples)))  # (G, K)
    probabilities = response_logprobs(behaviour).detach()[groups].sum(dim=1).exp()
    assert probabilities.sum().item() == pytest.approx(1.0)
    logprobs, sampled = token_logprobs(logits), token_logprobs(behaviour).detach()
    rewards = REWARDS[groups]
    if ref is not None:
        kl = sequence_kl(sampled, token_logprobs(ref), MASK)
        rewards = kl_in_reward(rewards, kl[groups], beta)
    advantages = estimator(rewards, torch.ones_like(groups, dtype=torch.bool), LENGTHS[groups])
    rows = groups.flatten()
    loss_NT, _ = policy_loss(algorithm, logprobs[rows], sampled[rows], advantages.flatten()[:, None], MASK[rows])
    if algorithm.correction != "none":  # the learner is on-policy with itself; the engine sampled from `behaviour`
        own = logprobs.detach()[rows]
        loss_NT, _ = policy_loss(algorithm, logprobs[rows], own, advantages.flatten()[:, None], MASK[rows])
        loss_NT = loss_NT * correction_weights(algorithm, own, sampled[rows], MASK[rows])[0]
    one_step = StepTotals(num_tokens=1, num_sequences=samples, num_samples=samples, max_new_tokens=2)
    weighted_NT = loss_NT * probabilities.repeat_interleave(samples)[:, None]
    loss = aggregate(weighted_NT, MASK[rows], algorithm.aggregation, one_step)
    return -torch.autograd.grad(loss, logits)[0]


def responses(policy_loss="ppo_clip", **changes):
    """Options whose loss is a mean over responses."""
    return options(
        policy_loss=policy_loss, aggregation=changes.pop("aggregation", "sequence_mean_token_sum"), **changes
    )


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_rloo_is_the_true_policy_gradient(samples, loss):
    logits = parameters(0)
    got = expected_gradient(logits, logits, samples, responses(loss))
    assert close(got, true_gradient(logits), 1e-12)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_rloo_with_kl_in_reward_is_the_gradient_of_the_regularised_objective(samples):
    logits, ref = parameters(1), parameters(2)
    got = expected_gradient(logits, logits, samples, responses(), ref=ref, beta=0.3)
    assert close(got, true_gradient(logits, ref, 0.3), 1e-12)
    assert not close(got, true_gradient(logits), 1e-2)


@pytest.mark.parametrize("samples", [2, 3])
def test_grpo_without_scale_is_the_policy_gradient_shrunk(samples):
    def centered(rewards, valid, tokens):
        return grpo(rewards, valid, tokens, scale_rewards="none")

    logits = parameters(3)
    got = expected_gradient(logits, logits, samples, responses(), estimator=centered)
    assert close(got, true_gradient(logits) * (samples - 1) / samples, 1e-12)


def test_one_over_length_is_another_direction():
    """Why rloo never divides by the length of a response by default (D18 of the notes)."""
    logits = parameters(0)
    got = expected_gradient(logits, logits, 3, responses(aggregation="sequence_mean_token_mean"))
    true = true_gradient(logits)
    cosine = (got * true).sum() / (got.norm() * true.norm())
    assert cosine < 0.999


@pytest.mark.parametrize("samples", [2, 3])
def test_product_ratio_is_unbiased_off_policy_and_the_others_are_not(samples):
    logits, behaviour = parameters(4), parameters(5)
    true = true_gradient(logits)
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    got = {loss: expected_gradient(logits, behaviour, samples, responses(loss, **wide)) for loss in LOSSES}
    assert close(got["rloo_sequence"], true, 1e-12)
    for loss in ("ppo_clip", "gspo", "cispo", "reinforce"):
        assert not close(got[loss], true, 1e-3), loss


@pytest.mark.parametrize("samples", [2, 3])
def test_product_correction_is_unbiased_and_the_others_are_not(samples):
    logits, behaviour = parameters(6), parameters(7)
    true = true_gradient(logits)

    def corrected(correction, ratio):
        chosen = responses(correction=correction, correction_ratio=ratio, correction_max=1e6)
        return expected_gradient(logits, behaviour, samples, chosen)

    assert close(corrected("sequence_truncate", "product"), true, 1e-12)
    assert close(corrected("sequence_mask", "product"), true, 1e-12)
    assert not close(corrected("sequence_truncate", "geometric"), true, 1e-3)
    assert not close(corrected("token_truncate", "product"), true, 1e-3)


# The gradient that each docstring of estimators/kl.py claims, on a softmax over five tokens. verl #2953, OpenRLHF PRs
# 1101 and 1309, NeMo-RL PR 2506, TRL #3025, #4967: the pathwise gradient of k1 and k3 is not that of the reverse KL.
PI, REF, OLD = (torch.randn(5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (8, 9, 10))


def kl_expectation(form, behaviour):
    """Value and gradient of E_{y ~ behaviour}[form(y)], the sampling not differentiated."""
    logits = PI.clone().requires_grad_()
    values = form(logits.log_softmax(0), REF.log_softmax(0))
    mean = (behaviour.softmax(0) * values).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


def exact_kl(reverse=True):
    """KL(pi || ref), or KL(ref || pi), and its gradient."""
    logits = PI.clone().requires_grad_()
    p, q = logits.log_softmax(0), REF.log_softmax(0)
    kl = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


def test_k1_has_the_value_and_a_gradient_of_zero_mean():
    value, gradient = kl_expectation(k1, PI)
    assert close(value, exact_kl()[0], 1e-12)
    assert close(gradient, torch.zeros(5), 1e-12)


def test_k2_has_the_gradient_on_policy_and_not_the_value():
    value, gradient = kl_expectation(k2, PI)
    assert close(gradient, exact_kl()[1], 1e-12)
    assert not close(value, exact_kl()[0], 1e-3)
    assert not close(kl_expectation(k2, OLD)[1], exact_kl()[1], 1e-3)


def test_k3_has_the_value_and_the_gradient_of_the_other_direction():
    value, gradient = kl_expectation(k3, PI)
    assert close(value, exact_kl()[0], 1e-12)
    assert close(gradient, exact_kl(reverse=False)[1], 1e-12)
    assert not close(gradient, exact_kl()[1], 1e-2)


@pytest.mark.parametrize("behaviour", [PI, OLD], ids=["on-policy", "off-policy"])
def test_unbiased_has_value_and_gradient_on_and_off_policy(behaviour):
    value, gradient = kl_expectation(lambda p, q: unbiased(p, q, behaviour.log_softmax(0)), behaviour)
    assert close(value, exact_kl()[0], 1e-12)
    assert close(gradient, exact_kl()[1], 1e-12)

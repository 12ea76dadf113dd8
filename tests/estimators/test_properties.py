"""Identities that hold for every input, and invariances: permutation, shift, padding, micro-batches."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.aggregate import count_totals, token_weights
from estimators.correction import correction_weights
from estimators.grpo import grpo
from estimators.kl import k1, k2, k3, kl_in_reward, kl_penalty, sequence_kl
from estimators.policy_loss import policy_loss
from estimators.reinforce import reinforce
from estimators.reinforce_plus_plus import reinforce_plus_plus
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.rloo import rloo
from estimators.whitening import Moments, moments
from tests.estimators.samples import (
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    MAX_NEW_TOKENS,
    close,
    draw,
    loss_and_gradient,
    options,
    share_of_loss,
    spoil_padding,
)

settings.register_profile("estimators", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("estimators")

NUMBERS = st.floats(-20, 20, width=32).map(lambda x: round(x, 3))
GROUP_BASELINES = {
    "rloo none": lambda *a: rloo(*a),
    "rloo batch": lambda *a: rloo(*a, scale_rewards="batch"),
    "rloo group": lambda *a: rloo(*a, scale_rewards="group"),
    "grpo none": lambda *a: grpo(*a, scale_rewards="none"),
    "grpo batch": lambda *a: grpo(*a, scale_rewards="batch"),
    "grpo group": lambda *a: grpo(*a),
    "r++ sequence": lambda *a: reinforce_plus_plus(*a),
    "r++ group": lambda *a: reinforce_plus_plus(*a, scale_rewards="group"),
    "r++ none": lambda *a: reinforce_plus_plus(*a, scale_rewards="none"),
}
ALL = GROUP_BASELINES | {
    "r++ token": lambda *a: reinforce_plus_plus(*a, whiten_over="token"),
    "reinforce": reinforce,
}


@st.composite
def batches(draw, invalid=True, min_samples=2, max_samples=6):
    """Rewards, valid, tokens: (P, K) each; an invalid reward is NaN, infinite or any number."""
    groups, samples = draw(st.integers(1, 4)), draw(st.integers(min_samples, max_samples))
    size = groups * samples
    rewards = torch.tensor(draw(st.lists(NUMBERS, min_size=size, max_size=size)), dtype=torch.float64)
    flags = st.lists(st.booleans() if invalid else st.just(True), min_size=size, max_size=size)
    valid = torch.tensor(draw(flags))
    junk = torch.tensor(draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30])), dtype=torch.float64)
    tokens = torch.tensor(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)))
    return tuple(x.reshape(groups, samples) for x in (torch.where(valid, rewards, junk), valid, tokens))


def full(rewards):
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    return rewards, torch.ones_like(rewards, dtype=torch.bool), torch.ones_like(rewards, dtype=torch.int64)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches())
def test_finite_float64_and_invalid_is_exactly_0(name, batch):
    got = ALL[name](*batch)
    assert got.dtype == torch.float64 and got.shape == batch[0].shape
    assert bool(got.isfinite().all())
    assert bool((got[~batch[1]] == 0).all())


@pytest.mark.parametrize("name", GROUP_BASELINES)
@given(batch=batches())
def test_groups_sum_to_0_and_lone_samples_are_exactly_0(name, batch):
    got = GROUP_BASELINES[name](*batch)
    assert close(got.sum(dim=1), torch.zeros(len(got)), 1e-8 * max(1.0, float(got.abs().max())))
    assert bool((got[batch[1].sum(dim=1) < 2] == 0).all())


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), junk=st.sampled_from([math.nan, -math.inf, 3.0]))
def test_what_an_invalid_position_holds_never_matters(name, batch, junk):
    rewards, valid, tokens = batch
    other = torch.where(valid, rewards, junk)
    assert torch.equal(ALL[name](rewards, valid, tokens), ALL[name](other, valid, tokens))


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), columns=st.permutations(range(6)), rows=st.permutations(range(4)))
def test_permuting_samples_and_groups_permutes_advantages(name, batch, columns, rows):
    columns = [k for k in columns if k < batch[0].shape[1]]
    rows = [p for p in rows if p < batch[0].shape[0]]
    shuffled = tuple(x[rows][:, columns] for x in batch)
    assert close(ALL[name](*shuffled), ALL[name](*batch)[rows][:, columns], 1e-8)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), shift=NUMBERS)
def test_shift_of_all_rewards_changes_nothing(name, batch, shift):
    rewards, valid, tokens = batch
    assert close(ALL[name](rewards + shift, valid, tokens), ALL[name](rewards, valid, tokens), 1e-7)


@pytest.mark.parametrize("name", [n for n in GROUP_BASELINES if n != "rloo batch" and n != "grpo batch"])
@given(batch=batches(), shifts=st.lists(NUMBERS, min_size=4, max_size=4))
def test_shift_of_each_group_changes_nothing(name, batch, shifts):
    rewards, valid, tokens = batch
    shifted = rewards + torch.tensor(shifts[: len(rewards)], dtype=torch.float64)[:, None]
    got, want = (GROUP_BASELINES[name](r, valid, tokens) for r in (shifted, rewards))
    assert close(got, want, 1e-7)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches())
def test_invalid_samples_could_as_well_be_absent(name, batch):
    """Each group packed to the left and the rest cut off gives the same numbers."""
    rewards, valid, tokens = batch
    order = (~valid).int().argsort(dim=1, stable=True)
    packed = tuple(x.gather(1, order)[:, : max(1, int(valid.sum(dim=1).max()))] for x in batch)
    got = ALL[name](*packed)
    want = ALL[name](*batch).gather(1, order)[:, : got.shape[1]]
    assert close(got, want, 1e-8)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("r++ token", "reinforce")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_are_exactly_0(name, dtype):
    constants = torch.linspace(-1.0, 1.0, 41, dtype=dtype)[:, None] * 0.95 + 0.0123
    for samples in range(2, 65):
        rewards = constants.expand(-1, samples)
        valid, tokens = torch.ones_like(rewards, dtype=torch.bool), torch.ones_like(rewards)
        assert bool((ALL[name](rewards, valid, tokens) == 0).all()), samples


@given(batch=batches())
def test_rloo_is_grpo_none_times_n_over_n_minus_1(batch):
    n = batch[1].sum(dim=1, keepdim=True).double()
    factor = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    assert close(rloo(*batch), grpo(*batch, scale_rewards="none") * factor)


@given(first=NUMBERS, second=NUMBERS)
def test_rloo_of_two_is_their_difference(first, second):
    got = rloo(*full([[first, second]]))
    assert close(got, torch.tensor([[first - second, second - first]], dtype=torch.float64), 1e-12)


@given(batch=batches(invalid=False), factor=NUMBERS)
def test_rloo_and_grpo_none_are_linear(batch, factor):
    rewards, valid, tokens = batch
    other = rewards.flip(1).sin()
    for estimator in (rloo, lambda *a: grpo(*a, scale_rewards="none")):
        parts = estimator(rewards, valid, tokens) * factor + estimator(other, valid, tokens)
        assert close(estimator(rewards * factor + other, valid, tokens), parts, 1e-8)


@given(batch=batches(invalid=False), factor=st.floats(0.5, 20), shift=NUMBERS)
def test_grpo_group_ignores_scale_and_shift_but_for_epsilon(batch, factor, shift):
    rewards, valid, tokens = batch
    deviation = rewards.std(dim=1, keepdim=True)
    got = grpo(rewards * factor + shift, valid, tokens) * (factor * deviation + 1e-4)
    assert close(got, grpo(rewards, valid, tokens) * (deviation + 1e-4) * factor, 1e-7)


@given(samples=st.integers(2, 16), data=st.data())
def test_rloo_of_binary_rewards(samples, data):
    successes = data.draw(st.integers(0, samples))
    rewards = [1.0] * successes + [0.0] * (samples - successes)
    want = [(samples - successes) / (samples - 1)] * successes
    want += [-successes / (samples - 1)] * (samples - successes)
    assert close(rloo(*full([rewards])), torch.tensor([want], dtype=torch.float64))


@given(batch=batches(invalid=False))
def test_reinforce_plus_plus_has_the_spread_it_claims(batch):
    rest = batch[0] - batch[0].mean(dim=1, keepdim=True)
    deviation = rest.flatten().std()
    assert close(reinforce_plus_plus(*batch).flatten().std(), deviation / (deviation + 1e-4), 1e-7)


@given(batch=batches(invalid=False))
def test_reinforce_plus_plus_of_one_group_is_grpo_group(batch):
    one = tuple(x[:1] for x in batch)
    assert close(reinforce_plus_plus(*one), grpo(*one, scale_rewards="group"))


@given(batch=batches(invalid=False))
def test_reinforce_plus_plus_of_groups_with_equal_means_is_grpo_batch(batch):
    rewards, valid, tokens = batch
    rewards = rewards - rewards.mean(dim=1, keepdim=True) + 3.0
    got = reinforce_plus_plus(rewards, valid, tokens)
    assert close(got, grpo(rewards, valid, tokens, scale_rewards="batch"), 1e-7)


@given(batch=batches(invalid=False))
def test_populations_of_samples_and_tokens_agree_at_equal_lengths_but_for_ddof_and_epsilon(batch):
    rewards, valid, tokens = batch
    rest = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    if float(rest.std()) < 1e-3:
        return
    over_tokens = reinforce_plus_plus(rewards, valid, torch.full_like(tokens, 7), whiten_over="token")
    over_samples = reinforce_plus_plus(rewards, valid, tokens)
    scale = (rest.std() + 1e-4) / rest.std(correction=0)
    assert close(over_tokens, over_samples * scale, 1e-7)


@given(batch=batches(invalid=False), beta=st.floats(0, 1))
def test_no_beta_or_no_divergence_is_no_op(batch, beta):
    rewards = batch[0]
    assert torch.equal(kl_in_reward(rewards, rewards.cos() * 9, 0.0), rewards)
    tokens = draw(1)
    kl = sequence_kl(tokens.old_NT, tokens.old_NT, tokens.mask_NT)
    assert bool((kl == 0).all())
    assert torch.equal(kl_in_reward(rewards, torch.zeros_like(rewards), beta), rewards)


@given(batch=batches(invalid=False), beta=st.floats(0, 1), shift=NUMBERS)
def test_constant_gap_of_equal_lengths_leaves_rloo_unchanged(batch, beta, shift):
    rewards, valid, tokens = batch
    kl = rewards.cos()
    before = rloo(kl_in_reward(rewards, kl, beta), valid, tokens)
    after = rloo(kl_in_reward(rewards, kl + 5 * shift, beta), valid, tokens)
    assert close(after, before, 1e-8)


@given(lp=st.floats(-15, 0), gap=st.floats(-19, 19))
def test_signs_and_bounds(lp, gap):
    pair = torch.tensor([[lp]], dtype=torch.float64), torch.tensor([[lp + gap]], dtype=torch.float64)
    assert k2(*pair).item() >= 0
    assert 0 <= k3(*pair).item() <= 10
    assert k1(*pair).item() == pytest.approx(-gap, abs=1e-12)


@given(gap=st.floats(-0.01, 0.01))
def test_k3_is_k2_near_0(gap):
    pair = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[gap]], dtype=torch.float64)
    assert abs(k3(*pair).item() - k2(*pair).item()) <= abs(gap) ** 3 + 1e-15 * abs(gap)


def test_gradient_of_k2_is_k1():
    tokens = draw(2)
    value = k2(tokens.logprobs_NT, tokens.ref_NT)
    (gradient,) = torch.autograd.grad(value.sum(), tokens.logprobs_NT)
    assert close(gradient, k1(tokens.logprobs_NT, tokens.ref_NT).detach(), 1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e10])
def test_padding_never_matters_to_kl(kind, junk):
    def value_and_gradient(tokens):
        value = kl_penalty(kind, tokens.logprobs_NT, tokens.ref_NT, tokens.old_NT, tokens.mask_NT)
        return value.detach(), torch.autograd.grad(value.sum(), tokens.logprobs_NT)[0]

    clean = draw(3)
    for got, want in zip(value_and_gradient(spoil_padding(clean, junk)), value_and_gradient(clean), strict=True):
        assert torch.equal(got, want)
        assert bool((got[~clean.mask_NT] == 0).all())


@pytest.mark.parametrize(("loss", "mode"), list(itertools.product(LOSSES, AGGREGATIONS)))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss, mode):
    tokens = draw(4, on_policy=True)
    weights = token_weights(mode, tokens.mask_NT, count_totals(tokens.mask_NT, MAX_NEW_TOKENS))
    chosen = options(policy_loss=loss, aggregation=mode)
    _, gradient = loss_and_gradient(chosen, tokens)
    assert close(gradient, -tokens.advantages_N1 * weights, 1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_on_policy_the_value_is_minus_the_weighted_mean_advantage(mode):
    tokens = draw(4, on_policy=True)
    weights = token_weights(mode, tokens.mask_NT, count_totals(tokens.mask_NT, MAX_NEW_TOKENS))
    for loss in ("ppo_clip", "gspo"):
        value, _ = loss_and_gradient(options(policy_loss=loss, aggregation=mode), tokens)
        assert close(value, -(tokens.advantages_N1 * weights).sum(), 1e-12)


def test_zero_sum_group_of_equal_lengths_has_loss_0_and_a_gradient():
    tokens = draw(5, lengths=(3, 3, 3), on_policy=True)
    tokens = replace(tokens, advantages_N1=torch.tensor([[1.0], [0.5], [-1.5]], dtype=torch.float64))
    value, gradient = loss_and_gradient(options(), tokens)
    assert close(value, 0.0, 1e-12)
    assert gradient.abs().min() > 0.01


def test_equal_token_weights_have_one_direction_and_one_over_length_another():
    tokens = draw(6)
    gradients = {mode: loss_and_gradient(options(aggregation=mode), tokens)[1] for mode in AGGREGATIONS}
    mean_length = tokens.mask_NT.sum().double() / len(tokens.mask_NT)
    assert close(gradients["sequence_mean_token_sum"], gradients["token_mean"] * mean_length, 1e-12)
    assert close(gradients["sequence_mean_token_sum"], gradients["constant_length"] * MAX_NEW_TOKENS, 1e-12)
    a, b = gradients["token_mean"].flatten(), gradients["sequence_mean_token_mean"].flatten()
    assert torch.cosine_similarity(a, b, dim=0) < 0.99


@pytest.mark.parametrize("loss", ["gspo", "rloo_sequence"])
def test_sequence_losses_of_single_tokens_are_ppo_clip(loss):
    tokens = draw(7, lengths=(1, 1, 1, 1, 1, 1), spread=0.5)
    for got, want in zip(
        loss_and_gradient(options(policy_loss=loss), tokens),
        loss_and_gradient(options(), tokens),
        strict=True,
    ):
        assert close(got, want, 1e-12)


def test_dual_clip_is_a_cap_on_the_unclipped_branch():
    """Identity 8: with c = delta it is min(min(r, delta) * A, clip(r) * A)."""
    tokens = draw(8, spread=1.0)
    chosen = options(clip_high=0.28, dual_clip=2.0)
    got, _ = policy_loss(chosen, tokens.logprobs_NT, tokens.old_NT, tokens.advantages_N1, tokens.mask_NT)
    ratio = (tokens.logprobs_NT - tokens.old_NT).exp()
    a = tokens.advantages_N1
    want = -torch.minimum(ratio.clamp(max=2.0) * a, ratio.clamp(0.8, 1.28) * a)
    assert bool((ratio[tokens.mask_NT] > 2.0).any())
    assert close(got, torch.where(tokens.mask_NT, want, 0.0), 1e-12)


@pytest.mark.parametrize(("loss", "mode"), list(itertools.product(LOSSES, AGGREGATIONS)))
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=8)
def test_micro_batches_add_up_to_the_step(loss, mode, seed, cuts):
    tokens = draw(seed)
    chosen = options(policy_loss=loss, aggregation=mode, correction="token_truncate")
    want, want_gradient = loss_and_gradient(chosen, tokens)
    bounds = [0, *sorted(set(cuts)), len(tokens.mask_NT)]
    slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    counted = [count_totals(tokens.mask_NT[part], MAX_NEW_TOKENS) for part in slices]
    totals = counted[0]
    for other in counted[1:]:
        totals = totals + other
    got = torch.stack([share_of_loss(chosen, tokens.rows(part), totals) for part in slices]).sum()
    (gradient,) = torch.autograd.grad(got, tokens.logprobs_NT)
    assert close(got, want, 1e-12)
    assert close(gradient, want_gradient, 1e-12)


@pytest.mark.parametrize(("loss", "correction"), list(itertools.product(LOSSES, CORRECTIONS)))
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e10])
def test_padding_never_matters_to_a_loss(loss, correction, junk):
    clean = draw(9)
    for mode in AGGREGATIONS:
        chosen = options(
            policy_loss=loss, aggregation=mode, correction=correction, dual_clip=3.0, off_policy_mask_delta=0.05
        )
        value, gradient = loss_and_gradient(chosen, spoil_padding(clean, junk))
        want, want_gradient = loss_and_gradient(chosen, clean)
        assert torch.equal(value, want)
        assert torch.equal(gradient, want_gradient)
        assert bool((gradient[~clean.mask_NT] == 0).all())


@pytest.mark.parametrize("loss", LOSSES)
def test_far_off_policy_stays_finite_in_float32(loss):
    tokens = draw(10)
    far = replace(
        tokens,
        logprobs_NT=tokens.logprobs_NT.detach().float().requires_grad_(),
        old_NT=(tokens.old_NT - 300).float(),
    )
    value, gradient = loss_and_gradient(options(policy_loss=loss), far)
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_are_constants(correction):
    tokens = draw(11)
    old = tokens.old_NT.clone().requires_grad_()
    weights, _ = correction_weights(options(correction=correction), old, tokens.rollout_NT, tokens.mask_NT)
    assert not weights.requires_grad


@given(values=st.lists(NUMBERS, min_size=1, max_size=20), cut=st.integers(0, 20), weight=st.integers(0, 4))
def test_moments_of_parts_add_up(values, cut, weight):
    x = torch.tensor(values, dtype=torch.float64)
    weights = (torch.arange(len(values)) % 3) * weight
    whole, parts = moments(x, weights), moments(x[:cut], weights[:cut]) + moments(x[cut:], weights[cut:])
    assert parts.count == whole.count
    assert parts.total == pytest.approx(whole.total, abs=1e-9)
    assert parts.centered_squares == pytest.approx(whole.centered_squares, abs=1e-8)


def test_empty_population():
    empty = moments(torch.zeros(3), torch.zeros(3))
    assert empty == Moments(count=0.0, total=0.0, centered_squares=0.0)
    assert empty + empty == empty
    assert (empty.mean, empty.variance) == (0.0, 1e-8)


@given(seed=st.integers(0, 10**6), discount=st.floats(0.5, 1.0))
@settings(max_examples=15)
def test_observations_could_as_well_be_absent(seed, discount):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((3, 8), generator=generator) < 0.5
    kl = torch.where(mask, torch.randn((3, 8), generator=generator, dtype=torch.float64), math.nan)
    rewards, valid = torch.randn(3, generator=generator), torch.ones(3, dtype=torch.bool)
    order = (~mask).int().argsort(dim=1, stable=True)
    packed = reinforce_plus_plus_token(
        rewards, valid, kl.gather(1, order), mask.gather(1, order), beta=0.2, discount=discount
    )
    got = reinforce_plus_plus_token(rewards, valid, kl, mask, beta=0.2, discount=discount)
    assert close(got.gather(1, order), packed, 1e-12)
    population = moments(got, mask)
    white = whiten_tokens(got, mask, population)
    assert close(white.gather(1, order), whiten_tokens(packed, mask.gather(1, order), population), 1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_old_logprobs_are_constants(loss):
    """The policy's own logprobs, not detached, may serve as old: the ratio is 1 and its gradient is whole."""
    tokens = draw(12)
    own = replace(tokens, old_NT=tokens.logprobs_NT)
    weights = token_weights("token_mean", tokens.mask_NT, count_totals(tokens.mask_NT, MAX_NEW_TOKENS))
    assert close(loss_and_gradient(options(policy_loss=loss), own)[1], -tokens.advantages_N1 * weights, 1e-12)

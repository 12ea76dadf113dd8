"""One test per fault reported in other systems that could have been ours; the docstring names the report.

Faults with a test elsewhere: gradients of the KL forms (test_enumeration); statistics, KL sums and sequence
ratios over ranks (test_ranks). Faults of the logprobs themselves (temperature, a shift by one token) are the learner's
and the engines'. What does not apply: TRL PR 5026 (there are no mean-normalised advantages).
"""

import math
from dataclasses import replace

import pytest
import torch

from configs.load import load
from configs.rules import ConfigError
from estimators.aggregate import aggregate, count_totals
from estimators.correction import correction_weights, off_policy_mask
from estimators.grpo import grpo
from estimators.kl import k3, kl_in_reward, kl_penalty, sequence_kl
from estimators.policy_loss import policy_loss
from estimators.registry import estimate_advantages
from estimators.reinforce_plus_plus import reinforce_plus_plus
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.rloo import rloo
from estimators.shaping import clip_rewards, mask_truncated, overlong_penalty
from estimators.whitening import moments
from tests.estimators.samples import (
    AGGREGATIONS,
    LOSSES,
    MAX_NEW_TOKENS,
    close,
    draw,
    loss_and_gradient,
    options,
    share_of_loss,
    spoil_padding,
)

NAN = math.nan
SCALES = {"rloo": "none", "grpo": "group", "reinforce_plus_plus": "batch", "reinforce": "none"}
RECIPE = ("model.path=m", "data.train=d.jsonl")


def advantages(name, rewards, valid=None, scale=None, tokens=None):
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    valid = ~rewards.isnan() if valid is None else torch.as_tensor(valid)
    tokens = torch.ones_like(rewards) if tokens is None else torch.as_tensor(tokens)
    chosen = options(advantage_estimator=name, scale_rewards=scale or SCALES[name])
    return estimate_advantages(chosen, rewards, valid, tokens)


each_estimator = pytest.mark.parametrize("name", SCALES)
each_loss = pytest.mark.parametrize("loss", LOSSES)


@each_estimator
def test_sample_without_a_reward_became_0_and_shifted_its_siblings(name):
    """TRL PR 5902, PR 6426, #5775; ms-swift 4.6.0 `compute_advantages`."""
    got = advantages(name, [[-3.0, NAN, -1.0, -2.5], [-1.0, -1.5, -1.0, NAN]])
    without = advantages(name, [[-3.0, -1.0, -2.5], [-1.0, -1.5, -1.0]])
    assert got[0, 1] == 0 and got[1, 3] == 0
    assert close(got[0, [0, 2, 3]], without[0], 1e-12)
    assert close(got[1, :3], without[1], 1e-12)


@each_estimator
def test_one_nan_made_every_advantage_nan(name):
    """ms-swift #8123."""
    got = advantages(name, [[NAN, 1.0, 2.0], [0.0, 1.0, 5.0]])
    assert bool(got.isfinite().all()) and bool((got != 0).any())


@each_estimator
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_standard_deviation_of_one_was_nan(name, scale):
    """ms-swift PR 9580."""
    assert advantages(name, [[1.5]], scale=scale).tolist() == [[0.0]]


@each_estimator
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_singleton_groups_depended_on_the_code_path(name, size):
    """verl #7793, PR 7794: the same group gave its raw reward or 0, as a list or as a padded matrix."""
    rewards = [0.7, -1.0, 2.0, 0.1][:size]
    matrix = advantages(name, [rewards + [NAN] * (4 - size)])[:, :size]
    alone = advantages(name, [rewards])
    assert torch.equal(matrix, alone)
    assert bool((alone == 0).all()) == (size == 1)


def test_one_sample_per_prompt_trained_on_nothing():
    """rllm #916, PR 917."""
    with pytest.raises(ConfigError, match="num_generations must be at least 2, got 1"):
        load([*RECIPE, "rollout.num_generations=1"])


def test_rloo_of_mixed_group_sizes():
    """SkyRL PR 137."""
    got = advantages("rloo", [[1.0, NAN, NAN], [1.0, 3.0, NAN], [1.0, 3.0, 8.0]])
    assert got.tolist() == [[0.0, 0.0, 0.0], [-2.0, 2.0, 0.0], [1 - 5.5, 3 - 4.5, 8 - 2.0]]


@pytest.mark.parametrize("rewards", [[0.0] + [0.95] * 7, [0.35] * 7 + [1.0]])
@each_estimator
def test_deviation_from_mean_of_squares_exploded(name, rewards):
    """NeMo-RL #1518, PR 1519, PR 4158, PR 4161."""
    for scale in ("group", "batch", "none"):
        assert advantages(name, torch.tensor([rewards]), scale=scale).abs().max() < 10


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_plus_plus"])
def test_constant_group_got_large_advantages(name):
    """OpenRLHF 0.11.2 `group_norm` (59.6), molt `grpo` (0.92): K=8 rewards of 0.3 in float32, epsilon 1e-9."""
    rewards = torch.tensor([[0.3] * 8, [0.1] * 8, [0.7] * 8], dtype=torch.float32)
    for scale in ("group", "batch", "none"):
        assert bool((advantages(name, rewards, scale=scale) == 0).all())


def test_statistics_in_float32_lost_large_rewards():
    """verl `grpo_vectorized`: error 391 on rewards near 1e4."""
    assert advantages("grpo", [[10000.1] * 8]).tolist() == [[0.0] * 8]
    got = advantages("grpo", [[10000.1, 10000.3, 10000.2]])
    assert close(got, torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64) * 0.1 / (0.1 + 1e-4), 1e-6)


def test_whitening_took_its_mean_over_padding():
    """SkyRL #1305, PR 1782."""
    values = torch.tensor([[2.0, 2.0, 2.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    narrow = whiten_tokens(values, mask, moments(values, mask))
    wide_values = torch.cat([torch.where(mask, values, 7.0), torch.full((2, 9), NAN)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros((2, 9), dtype=torch.bool)], dim=1)
    wide = whiten_tokens(wide_values, wide_mask, moments(wide_values, wide_mask))
    assert torch.equal(wide[:, :3], narrow)
    assert close(narrow[mask].mean(), 0.0)


def test_whitening_was_another_affine_map_on_each_rank():
    """slime PR 2235: reduced over some ranks only. (Over gloo: test_ranks.)"""
    values, weights = torch.arange(12.0).reshape(4, 3).square(), torch.ones(4, 3)
    parts = [moments(values[i : i + 1], weights[i : i + 1]) for i in range(4)]
    whole = moments(values, weights)
    summed = parts[0] + parts[1] + (parts[2] + parts[3])
    got = torch.cat([whiten_tokens(values[i : i + 1], weights[i : i + 1] > 0, summed) for i in range(4)])
    assert close(got, whiten_tokens(values, weights > 0, whole), 1e-12)
    assert not close(got[:1], whiten_tokens(values[:1], weights[:1] > 0, parts[0]), 1e-2)


@pytest.mark.parametrize(("name", "scale", "local"), [("grpo", "group", True), ("grpo", "batch", False)])
def test_scope_of_normalisation(name, scale, local):
    """OpenRLHF #843, #830: users could not tell whether a group or the batch was normalised."""
    alone = advantages(name, [[0.0, 1.0]], scale=scale)
    together = advantages(name, [[0.0, 1.0], [0.0, 50.0]], scale=scale)[:1]
    assert torch.equal(alone, together) == local


def test_grpo_was_whitened_a_second_time_over_the_batch():
    """reskill PR 12."""
    alone = advantages("grpo", [[0.0, 1.0, 1.0]])
    assert torch.equal(advantages("grpo", [[0.0, 1.0, 1.0], [9.0, 1.0, -40.0]])[:1], alone)


@pytest.mark.parametrize("word", ["false", "'false'", "no"])
def test_scale_rewards_false_still_divided(word):
    """axolotl PR 3731: the string "false" was true. Here only the names are accepted."""
    with pytest.raises(ConfigError, match="scale_rewards"):
        load([*RECIPE, f"algorithm.scale_rewards={word}"])
    none = load([*RECIPE, "algorithm.advantage_estimator=grpo", "algorithm.scale_rewards=none"]).algorithm
    rewards = torch.tensor([[0.0, 4.0]])
    valid = torch.ones_like(rewards, dtype=torch.bool)
    assert estimate_advantages(none, rewards, valid, rewards).tolist() == [[-2.0, 2.0]]


def test_reinforce_plus_plus_was_grpo():
    """axolotl #3693."""
    rewards = [[0.0, 1.0], [0.0, 9.0]]
    got = advantages("reinforce_plus_plus", rewards)
    assert not close(got, advantages("grpo", rewards), 0.1)
    assert close(got[1], got[0] * 9, 1e-9)


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_plus_plus"])
def test_statistics_of_the_first_sample_only(name):
    """PipelineRL PR 54."""
    got = advantages(name, [[1.0, 5.0, -2.0], [0.5, 0.25, 3.0]])
    assert close(got.sum(dim=1), torch.zeros(2), 1e-12)


@each_loss
@pytest.mark.parametrize("junk", [NAN, 1e9])
def test_padding_entered_the_advantage_of_a_sequence(loss, junk):
    """AReaL PR 1346, TRL #7024: per-token advantages hold anything outside the mask."""
    tokens = draw(20)
    chosen = options(policy_loss=loss)
    clean = torch.where(tokens.mask_NT, tokens.advantages_N1, 0.0)
    spoiled = torch.where(tokens.mask_NT, tokens.advantages_N1, junk)
    want = loss_and_gradient(chosen, replace(tokens, advantages_N1=clean))
    got = loss_and_gradient(chosen, replace(tokens, advantages_N1=spoiled))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def token_returns(mask, rewards, kl, beta, discount):
    mask = torch.tensor([mask]).bool()
    valid = torch.tensor([True])
    kl = torch.tensor([kl], dtype=torch.float64)
    rewards = torch.tensor([rewards], dtype=torch.float64)
    return reinforce_plus_plus_token(rewards, valid, kl, mask, beta=beta, discount=discount)[0].tolist()


def test_return_was_reset_at_observation_tokens():
    """verl #7278, PR 7300, PR 6376, PR 7280; SkyRL 0.3.0."""
    assert token_returns([1, 1, 0, 0, 1, 1], 1.0, [0.0] * 6, 0.0, 1.0) == [1, 1, 0, 0, 1, 1]


def test_observations_discounted():
    """verl PR 6376."""
    assert token_returns([1, 0, 1], 1.0, [0.0] * 3, 0.0, 0.5) == [0.5, 0.0, 1.0]


def test_kl_of_observations_leaked_into_returns():
    """slime #1370, PR 1372; miles PR 559, PR 1383."""
    assert token_returns([1, 0, 0, 1], 0.0, [1.0] * 4, 1.0, 0.9)[0] == pytest.approx(-1.9)


def test_sequence_kl_was_not_the_sum_over_tokens():
    """TRL #2581, #2562, PR 2575."""
    tokens = draw(21)
    kl = sequence_kl(tokens.old_NT, tokens.ref_NT, tokens.mask_NT)
    for i, (row, mask) in enumerate(zip(tokens.old_NT - tokens.ref_NT, tokens.mask_NT, strict=True)):
        total = sum(float(x) for x, m in zip(row, mask, strict=True) if m)
        got = kl_in_reward(torch.tensor([[1.0]]), kl[i].reshape(1, 1), 0.1)
        assert got.item() == pytest.approx(1.0 - 0.1 * total)


@pytest.mark.parametrize("name", SCALES)
def test_kl_was_subtracted_after_the_baseline(name):
    """OpenRLHF PR 515, PR 553: a KL that all samples share must vanish in the baseline."""
    rewards = torch.tensor([[0.0, 1.0, 3.0], [2.0, 1.0, 3.0]])
    with_kl = kl_in_reward(rewards, torch.full((2, 3), 7.0), 0.5)
    assert close(advantages(name, with_kl), advantages(name, rewards), 1e-12)


def test_nan_outside_the_mask_survived_in_the_reward():
    """verl PR 6361."""
    tokens = spoil_padding(draw(22), NAN)
    assert torch.equal(
        sequence_kl(tokens.old_NT, tokens.ref_NT, tokens.mask_NT),
        sequence_kl(draw(22).old_NT, draw(22).ref_NT, tokens.mask_NT),
    )


@pytest.mark.parametrize("name", SCALES)
def test_kl_coefficient_had_no_effect(name):
    """molt 0.2.1, for rloo, grpo and reinforce_baseline."""
    rewards, kl = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    small, large = (advantages(name, kl_in_reward(rewards, kl, beta)) for beta in (0.01, 0.5))
    assert not close(small, large, 1e-2)


def test_reward_clip_acted_on_the_centred_reward():
    """OpenRLHF 0.11.2."""
    rewards = torch.tensor([[1e4, 1e4 + 1, 3.0]])
    assert close(advantages("grpo", clip_rewards(rewards, 10.0), scale="none"), torch.tensor([[7, 7, -14]]) / 3, 1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3", "unbiased"])
def test_kl_gradient_followed_the_ratio_of_the_policy_loss(kind):
    """TRL PR 6594, PR 7188, #6586: a sequence-level ratio put a spurious term into the KL gradient.

    The gradient at a token must not depend on the logprob of another.
    """
    tokens = draw(23)
    other = tokens.logprobs_NT.detach().clone()
    other[:, 1:] -= 1.0

    def first_gradient(logprobs):
        logprobs = logprobs.detach().requires_grad_()
        value = kl_penalty(kind, logprobs, tokens.ref_NT, tokens.old_NT, tokens.mask_NT)
        return torch.autograd.grad(value.sum(), logprobs)[0][:, 0]

    assert torch.equal(first_gradient(tokens.logprobs_NT), first_gradient(other))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_k3_overflowed(kind, gap):
    """TRL #3015, PR 6550, PR 6637."""
    logprobs = torch.tensor([[-201.0]], dtype=torch.float32, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    value = kl_penalty(kind, logprobs, logprobs.detach() + gap, logprobs.detach() - gap, mask)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())


def test_bound_of_k3_keeps_the_gradient_below_it():
    """D22 of the notes: the value is bounded at 10; below it the gradient is whole."""
    logprobs = torch.tensor([[-2.4, 0.0]], dtype=torch.float64, requires_grad=True)  # k3 is 7.6, and over 10
    value = k3(logprobs, torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value[0, 1].item() == 10
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(2.4), 0.0])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_loss_depended_on_accumulation(mode, parts):
    """TRL PR 6024, #5619; ms-swift #10117, PR 10116; verl PR 906, #7321, #7200; SkyRL #1504; open-instruct PR 1137.

    Also open-instruct PR 1161, twinkle PR 292, NeMo-RL PR 266: a token mean per micro-batch, then a mean of means.
    """
    tokens, chosen = draw(30, lengths=(6, 1, 1, 1, 5)), options(aggregation=mode)
    totals = count_totals(tokens.mask_NT, MAX_NEW_TOKENS)
    rows = [list(range(i, 5, parts)) for i in range(parts)]
    loss = torch.stack([share_of_loss(chosen, tokens.rows(part), totals) for part in rows]).sum()
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_NT)
    want, want_gradient = loss_and_gradient(chosen, tokens)
    assert close(loss, want, 1e-12) and close(gradient, want_gradient, 1e-12)


def test_constant_length_was_the_padded_width():
    """verl #3741, which also forgot to divide by the number of sequences."""
    tokens, chosen = draw(31), options(aggregation="constant_length")
    wide = {
        name: torch.cat([getattr(tokens, name).detach(), torch.zeros(5, 8)], dim=1)
        for name in ("logprobs_NT", "old_NT", "rollout_NT", "ref_NT")
    }
    mask = torch.cat([tokens.mask_NT, torch.zeros(5, 8, dtype=torch.bool)], dim=1)
    wide["logprobs_NT"].requires_grad_()
    padded = replace(tokens, **wide, mask_NT=mask)
    want, _ = loss_and_gradient(chosen, tokens)
    assert close(loss_and_gradient(chosen, padded)[0], want, 1e-12)
    twice = {name: torch.cat([getattr(tokens, name).detach()] * 2) for name in tokens.__slots__}
    twice["logprobs_NT"].requires_grad_()
    assert close(loss_and_gradient(chosen, replace(tokens, **twice))[0], want, 1e-12)


def test_which_tokens_train_depended_on_the_micro_batch():
    """verl #7829, #7818; AReaL PR 1546."""
    tokens = draw(32, spread=0.6)
    chosen = options(policy_loss="gspo", correction="sequence_mask", correction_ratio="geometric")
    chosen = replace(chosen, correction_min=0.8, correction_max=1.2)

    def decisions(t):
        _, facts = policy_loss(chosen, t.logprobs_NT, t.old_NT, t.advantages_N1, t.mask_NT)
        weights, _ = correction_weights(chosen, t.old_NT, t.rollout_NT, t.mask_NT)
        keep = off_policy_mask(t.logprobs_NT, t.rollout_NT, t.advantages_N1, t.mask_NT, 0.05)
        return facts["clip_low"], facts["clip_high"], weights, keep

    for whole, parts in zip(
        decisions(tokens), zip(*(decisions(tokens.rows([i])) for i in range(5)), strict=True), strict=True
    ):
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_truncated_responses_left_the_numerator_only(mode):
    """TRL #6369, PR 6439; miles PR 2796."""
    tokens = draw(33)
    truncated = torch.tensor([False, False, True, False, True])
    masked = replace(tokens, mask_NT=mask_truncated(tokens.mask_NT, truncated))
    rest = tokens.rows([0, 1, 3])
    want, _ = loss_and_gradient(options(aggregation=mode), rest)
    assert close(loss_and_gradient(options(aggregation=mode), masked)[0], want, 1e-12)


@each_loss
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_entered_the_sum(loss, mode):
    """TRL PR 6654 (luspo); Soup #723 (GSPO leaked masked tokens and was not per sequence)."""
    tokens, chosen = draw(34), options(policy_loss=loss, aggregation=mode)
    want, got = loss_and_gradient(chosen, tokens), loss_and_gradient(chosen, spoil_padding(tokens, -0.7))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_gspo_was_not_per_sequence():
    """Soup #723: every token of a response has one ratio, that of its own tokens."""
    tokens = draw(35)
    _, facts = policy_loss(
        options(policy_loss="gspo"), tokens.logprobs_NT, tokens.old_NT, tokens.advantages_N1, tokens.mask_NT
    )
    for ratio, lp, old, mask in zip(
        facts["ratio"], tokens.logprobs_NT.detach(), tokens.old_NT, tokens.mask_NT, strict=True
    ):
        assert close(ratio[mask], (lp - old)[mask].mean().exp().expand(int(mask.sum())), 1e-12)


@each_loss
def test_dropped_sequences_still_trained(loss):
    """TRL PR 6095."""
    tokens = draw(36)
    tokens = replace(tokens, advantages_N1=-tokens.advantages_N1.abs())
    keep = off_policy_mask(tokens.logprobs_NT, tokens.rollout_NT, tokens.advantages_N1, tokens.mask_NT, 0.05)
    assert 0 < int(keep.sum()) < 5
    chosen = options(policy_loss=loss, off_policy_mask_delta=0.05, clip_low=0.9, clip_high=9.0)
    gradient = loss_and_gradient(chosen, tokens)[1]
    trained = (gradient.abs().sum(dim=1) > 0)[:, None]
    assert torch.equal(trained, keep)


def test_sequence_weight_was_not_the_product():
    """TRL PR 6078; Liger PR 1088; unsloth-zoo PR 870: the weight was lost, or ratios were summed."""
    tokens = draw(37)
    chosen = options(correction="sequence_truncate", correction_max=1e9)
    weights, _ = correction_weights(chosen, tokens.old_NT, tokens.rollout_NT, tokens.mask_NT)
    gap = torch.where(tokens.mask_NT, tokens.old_NT - tokens.rollout_NT, 0.0).sum(dim=1, keepdim=True)
    assert close(weights, torch.where(tokens.mask_NT, gap.exp(), 0.0), 1e-12)
    token = options(correction="token_truncate")
    assert not close(loss_and_gradient(token, tokens)[0], loss_and_gradient(options(), tokens)[0], 1e-3)


@pytest.mark.parametrize("correction", ["sequence_truncate", "sequence_mask"])
def test_product_ratio_collapsed_without_another_mode(correction):
    """TRL #5814, PR 5815; NeMo-RL PR 2269: both ratios have a name; they agree for one token and part for many."""
    product, geometric = (options(correction=correction, correction_ratio=r) for r in ("product", "geometric"))

    def weights(chosen, tokens):
        return correction_weights(chosen, tokens.old_NT, tokens.rollout_NT, tokens.mask_NT)[0]

    one, long = draw(38, lengths=(1, 1, 1, 1)), draw(38, lengths=(6, 6, 6, 6))
    assert torch.equal(weights(product, one), weights(geometric, one))
    assert not close(weights(product, long), weights(geometric, long), 1e-2)


@pytest.mark.parametrize("cut", ["rollout.top_p=0.9", "rollout.top_k=50"])
def test_cut_distribution_biased_the_ratio(cut):
    """TRL #6789, PR 7269."""
    with pytest.raises(ConfigError, match="correction must be none while rollout.top_p or top_k"):
        load([*RECIPE, "algorithm.correction=token_truncate", cut])


@each_loss
def test_infinity_times_mask_poisoned_the_weights(loss):
    """prime-rl PR 2084; SkyRL #1633, PR 1635; NeMo-RL PR 876, PR 4120; ms-swift PR 9767; Paddle PR 10596."""
    for junk in (math.inf, -math.inf, NAN, -1e10):
        tokens = spoil_padding(draw(39), junk)
        value, gradient = loss_and_gradient(options(policy_loss=loss, correction="sequence_mask"), tokens)
        assert bool(value.isfinite()) and bool(gradient.isfinite().all())


@each_loss
def test_clip_metric_counted_masked_tokens(loss):
    """prime-rl PR 1329."""
    tokens = draw(40)
    far = replace(tokens, old_NT=torch.where(tokens.mask_NT, tokens.old_NT, tokens.old_NT - 9))
    inputs = (far.logprobs_NT, far.old_NT, far.advantages_N1, far.mask_NT)
    _, facts = policy_loss(options(policy_loss=loss), *inputs)
    assert not bool((facts["clip_low"] | facts["clip_high"])[~far.mask_NT].any())
    assert bool((facts["ratio"][~far.mask_NT] == 1).all())
    _, facts = correction_weights(
        options(correction="token_mask", correction_min=0.99, correction_max=1.01),
        far.old_NT,
        far.ref_NT,
        far.mask_NT,
    )
    assert not bool(facts["corrected"][~far.mask_NT].any())


@pytest.mark.parametrize("name", SCALES)
def test_overlong_penalty_was_skipped(name):
    """verl #4268, #5858, PR 6709: it must be visible in the rewards that reach the advantages."""
    rewards, num_tokens = torch.ones(1, 3), torch.tensor([[2, 6, 8]])
    shaped = rewards + overlong_penalty(num_tokens, max_new_tokens=8, buffer=4, penalty=1.0)
    assert shaped.tolist() == [[1.0, 0.5, 0.0]]
    got = advantages(name, shaped, tokens=num_tokens)
    assert got[0, 0] > got[0, 1] > got[0, 2]


def test_token_mean_was_per_prompt_or_per_batch():
    """TRL #5375: token_mean is over all tokens of the step; a long response of any prompt weighs by its length."""
    tokens = draw(41, lengths=(6, 2), on_policy=True)
    totals = count_totals(tokens.mask_NT, MAX_NEW_TOKENS)
    assert aggregate(torch.tensor([[1.0] * 6, [3.0] * 6]), tokens.mask_NT, "token_mean", totals).item() == 12 / 8


def test_population_of_reinforce_plus_plus_and_baseline_of_grpo_differ_only_where_documented():
    """D1, D2 of the notes: equal lengths and equal group means make the two batch scales the same."""
    rewards = torch.tensor([[0.0, 2.0], [-1.0, 3.0]])
    valid, tokens = torch.ones_like(rewards, dtype=torch.bool), torch.ones_like(rewards)
    assert close(
        reinforce_plus_plus(rewards, valid, tokens), grpo(rewards, valid, tokens, scale_rewards="batch"), 1e-12
    )
    assert not close(reinforce_plus_plus(rewards, valid, tokens), rloo(rewards, valid, tokens), 1e-2)

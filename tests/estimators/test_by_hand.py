"""Numbers worked out on paper, and slow loops shaped like the equations."""

import math
import statistics

import pytest
import torch

from configs.schema import AlgorithmConfig
from estimators.aggregate import StepTotals, aggregate, count_totals, token_weights
from estimators.correction import correction_weights, off_policy_mask
from estimators.grpo import grpo
from estimators.kl import adapt_beta, k1, k2, k3, kl_in_reward, kl_penalty, sequence_kl, unbiased
from estimators.policy_loss import policy_loss
from estimators.reinforce import reinforce
from estimators.reinforce_plus_plus import reinforce_plus_plus
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.rloo import rloo
from estimators.shaping import clip_rewards, has_signal, mask_truncated, overlong_penalty
from estimators.whitening import moments
from tests.estimators.samples import AGGREGATIONS, CORRECTIONS, MAX_NEW_TOKENS, close, draw, options

NAN, INF = math.nan, math.inf


def rewards_and_masks(seed=0, groups=5, samples=6, valid_fraction=0.8):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn((groups, samples), generator=generator, dtype=torch.float64)
    valid = torch.rand((groups, samples), generator=generator) < valid_fraction
    tokens = torch.randint(1, 9, (groups, samples), generator=generator)
    return torch.where(valid, rewards, NAN), valid, tokens


def looped(rewards, valid, tokens, advantage):
    """Apply advantage(i, group, batch) to each valid sample; group and batch are lists of (reward, tokens)."""
    batch = [(r, n) for rr, vv, nn in zip(rewards, valid, tokens) for r, v, n in zip(rr, vv, nn) if v]
    out = torch.zeros_like(rewards)
    for g, (row, there, counts) in enumerate(zip(rewards, valid, tokens)):
        group = [(r, n) for r, v, n in zip(row, there, counts) if v]
        columns = [k for k, v in enumerate(there) if v]
        for i, k in enumerate(columns):
            out[g, k] = advantage(i, group, batch)
    return out


def mean(pairs):
    return sum(float(r) for r, _ in pairs) / len(pairs)


def deviation(pairs):
    return statistics.stdev([float(r) for r, _ in pairs]) if len(pairs) > 1 else 0.0


def centered(rewards, valid):
    """Group-centred rewards with the invalid left NaN."""
    rows = [statistics.fmean(float(r) for r, v in zip(rr, vv) if v) for rr, vv in zip(rewards, valid)]
    return rewards - torch.tensor(rows, dtype=torch.float64)[:, None]


def test_rloo_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    got = rloo(rewards, torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3))
    assert got.tolist() == [[1 - 4.0, 2 - 3.5, 6 - 1.5]]


def test_rloo_is_its_loop():
    rewards, valid, tokens = rewards_and_masks()

    def others(i, group, batch):
        rest = group[:i] + group[i + 1 :]
        return float(group[i][0]) - mean(rest) if rest else 0.0

    assert close(rloo(rewards, valid, tokens), looped(rewards, valid, tokens, others))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_is_its_loop(scale):
    rewards, valid, tokens = rewards_and_masks(1)

    def loop(i, group, batch):
        divisor = {"group": deviation(group) + 1e-4, "batch": deviation(batch) + 1e-4, "none": 1.0}[scale]
        return (float(group[i][0]) - mean(group)) / divisor

    assert close(grpo(rewards, valid, tokens, scale_rewards=scale), looped(rewards, valid, tokens, loop))


def test_reinforce_is_its_loop():
    rewards, valid, tokens = rewards_and_masks(2)
    want = looped(rewards, valid, tokens, lambda i, group, batch: float(group[i][0]) - mean(batch))
    assert close(reinforce(rewards, valid, tokens), want)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_reinforce_plus_plus_is_its_loop(scale):
    rewards, valid, tokens = rewards_and_masks(3)
    rest = centered(rewards, valid)

    def loop(i, group, batch):
        divisor = {"group": deviation(group) + 1e-4, "batch": deviation(batch) + 1e-4, "none": 1.0}[scale]
        return float(group[i][0]) / divisor

    got = reinforce_plus_plus(rewards, valid, tokens, scale_rewards=scale)
    assert close(got, looped(rest, valid, tokens, loop))


def test_reinforce_plus_plus_over_tokens_is_its_loop():
    rewards, valid, tokens = rewards_and_masks(4)
    rest = centered(rewards, valid)

    def loop(i, group, batch):
        every_token = [float(r) for r, n in batch for _ in range(int(n))]
        return (float(group[i][0]) - statistics.fmean(every_token)) / statistics.pstdev(every_token)

    got = reinforce_plus_plus(rewards, valid, tokens, whiten_over="token")
    assert close(got, looped(rest, valid, tokens, loop))


def test_tokens_of_invalid_samples_leave_the_token_population():
    rewards, valid, tokens = rewards_and_masks(4)
    more = torch.where(valid, tokens, 1000)
    over_tokens = reinforce_plus_plus(rewards, valid, tokens, whiten_over="token")
    assert torch.equal(over_tokens, reinforce_plus_plus(rewards, valid, more, whiten_over="token"))


@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_token_returns_are_their_loop(discount):
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand((6, 7), generator=generator) < 0.6
    mask[:, 0] = True
    kl = torch.randn((6, 7), generator=generator, dtype=torch.float64)
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    want = torch.zeros_like(kl)
    for i in range(6):
        at = [t for t in range(7) if mask[i, t]]
        for a, t in enumerate(at):
            for b, s in enumerate(at[a:]):
                gain = (float(rewards[i]) if s == at[-1] else 0.0) - 0.3 * float(kl[i, s])
                want[i, t] += discount**b * gain
    kl = torch.where(mask, kl, NAN)
    valid = torch.ones(6, dtype=torch.bool)
    got = reinforce_plus_plus_token(rewards, valid, kl, mask, beta=0.3, discount=discount)
    assert close(got, want)


def test_whitened_tokens_have_mean_0_and_variance_1():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0], [6.0, NAN, INF]], dtype=torch.float64)
    got = whiten_tokens(returns, mask, moments(returns, mask))
    assert close(got[mask].mean(), 0.0)
    assert close(got[mask].std(correction=0), 1.0)
    assert got[1, 1:].tolist() == [0.0, 0.0]


def test_invalid_reward_leaves_the_tokens_of_its_response():
    mask = torch.ones(2, 2, dtype=torch.bool)
    valid = torch.tensor([True, False])
    rewards = torch.tensor([1.0, NAN])
    got = reinforce_plus_plus_token(rewards, valid, torch.ones(2, 2), mask, beta=0.25, discount=1.0)
    assert got.tolist() == [[0.5, 0.75], [0.0, 0.0]]


def test_kl_forms_by_hand():
    lp, ref, old = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.2]])
    assert k1(lp, ref).item() == 0.5
    assert k2(lp, ref).item() == 0.125
    assert k3(lp, ref).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert unbiased(lp, ref, old).item() == pytest.approx(math.exp(0.2) * (math.exp(-0.5) + 0.5 - 1))


def test_sequence_kl_and_reward_by_hand():
    old = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.75, INF]])
    kl = sequence_kl(old, ref, torch.tensor([[True, True, False]]))
    assert kl.dtype == torch.float64 and not kl.requires_grad
    assert kl.tolist() == [0.25]
    assert kl_in_reward(torch.tensor([[2.0]]), kl[None], 0.4).tolist() == [[2.0 - 0.4 * 0.25]]


def test_adaptive_beta_by_hand():
    assert adapt_beta(0.1, kl=6.6, target=6.0, num_samples=50, horizon=100) == pytest.approx(0.1 * 1.05)
    assert adapt_beta(0.1, kl=60.0, target=6.0, num_samples=50, horizon=100) == pytest.approx(0.1 * 1.1)
    assert adapt_beta(0.1, kl=-1.0, target=6.0, num_samples=50, horizon=100) == pytest.approx(0.1 * 0.9)


def test_unknown_kinds_are_named():
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    totals = count_totals(mask, 1)
    with pytest.raises(ValueError, match="kl_estimator must be .* got 'k4'"):
        kl_penalty("k4", one, one, one, mask)  # pyright: ignore
    with pytest.raises(ValueError, match="aggregation must be .* got 'mean'"):
        token_weights("mean", mask, totals)  # pyright: ignore
    with pytest.raises(ValueError, match="policy_loss must be .* got 'trpo'"):
        policy_loss(AlgorithmConfig(policy_loss="trpo"), one, one, one, mask)  # pyright: ignore
    with pytest.raises(ValueError, match="correction must be .* got 'clip'"):
        correction_weights(AlgorithmConfig(correction="clip"), one, one, mask)  # pyright: ignore


def test_aggregations_by_hand():
    loss = torch.tensor([[1.0, 2.0, 4.0], [8.0, NAN, NAN], [INF, INF, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    totals = count_totals(mask, max_new_tokens=10)
    assert totals == StepTotals(num_tokens=4, num_sequences=2, num_samples=3, max_new_tokens=10)
    want = dict(zip(AGGREGATIONS, (15 / 4, (7 / 3 + 8) / 2, 15 / 2, 15 / 30), strict=True))
    got = {mode: aggregate(loss, mask, mode, totals).item() for mode in AGGREGATIONS}
    assert got == pytest.approx(want)


def test_totals_of_different_lengths_do_not_add():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="max_new_tokens must be the same throughout a step, got 4 and 5"):
        _ = count_totals(mask, 4) + count_totals(mask, 5)


def test_a_step_without_tokens_has_loss_0():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = torch.full((2, 3), NAN)
    assert all(aggregate(loss, mask, mode, count_totals(mask, 4)).item() == 0 for mode in AGGREGATIONS)


def test_losses_are_their_loops():
    tokens = draw(0, spread=0.6)
    low, high, dual = 0.2, 0.3, 1.5

    def clip(surrogate_ratio, a):
        bounded = min(max(surrogate_ratio, 1 - low), 1 + high)
        return -min(surrogate_ratio * a, bounded * a)

    rows = []
    for lp, old, a, mask in zip(tokens.logprobs_NT.detach(), tokens.old_NT, tokens.advantages_N1, tokens.mask_NT):
        n, a = int(mask.sum()), float(a)
        logs = [float(x - y) for x, y in zip(lp[:n], old[:n])]
        token = [clip(math.exp(x), a) for x in logs]
        rows.append(
            {
                "ppo_clip": token,
                "dual": [min(x, -dual * a) if a < 0 else x for x in token],
                "gspo": [clip(math.exp(sum(logs) / n), a)] * n,
                "rloo_sequence": [clip(math.exp(sum(logs)), a) / n] * n,
                "cispo": [-min(math.exp(x), 1 + high) * a * float(y) for x, y in zip(logs, lp[:n])],
                "reinforce": [-a * float(y) for y in lp[:n]],
            }
        )
    for name in rows[0]:
        options = AlgorithmConfig(
            policy_loss="ppo_clip" if name == "dual" else name,  # pyright: ignore
            clip_low=low,
            clip_high=high,
            dual_clip=dual if name == "dual" else None,
        )
        loss, _ = policy_loss(options, tokens.logprobs_NT, tokens.old_NT, tokens.advantages_N1, tokens.mask_NT)
        want = torch.zeros_like(loss)
        for i, row in enumerate(rows):
            want[i, : len(row[name])] = torch.tensor(row[name], dtype=torch.float64)
        assert close(loss, want), name


def test_clip_facts_by_hand():
    ratios = torch.tensor([[0.5, 1.0, 2.0, 2.0], [0.5, 1.0, 2.0, 4.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 3] = False
    options = AlgorithmConfig(dual_clip=3.0)
    _, facts = policy_loss(options, ratios.log(), torch.zeros(2, 4), advantages, mask)
    assert facts["clip_low"].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert facts["clip_high"].int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert close(facts["ratio"], torch.where(mask, ratios, 1.0))
    _, facts = policy_loss(AlgorithmConfig(policy_loss="cispo"), ratios.log(), torch.zeros(2, 4), advantages, mask)
    assert facts["clip_high"].int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]


def test_corrections_by_hand():
    w = torch.tensor([[0.5, 3.0, 1.0], [0.1, 1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])

    def weights(correction, ratio="product"):
        chosen = options(correction=correction, correction_ratio=ratio, correction_min=0.4, correction_max=1.4)
        got, facts = correction_weights(chosen, w.log(), torch.zeros(2, 3), mask)
        return got.numpy().round(9).tolist(), facts["corrected"].int().tolist()

    geometric = [1.5**0.5, 0.1 ** (1 / 3)]
    assert weights("none") == ([[1, 1, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]])
    assert weights("token_truncate") == ([[0.5, 1.4, 0], [0.1, 1, 1]], [[0, 1, 0], [0, 0, 0]])
    assert weights("token_mask") == ([[0.5, 0, 0], [0, 1, 1]], [[0, 1, 0], [1, 0, 0]])
    assert weights("sequence_truncate") == ([[1.4, 1.4, 0], [0.1, 0.1, 0.1]], [[1, 1, 0], [0, 0, 0]])
    assert weights("sequence_mask") == ([[0, 0, 0], [0, 0, 0]], [[1, 1, 0], [1, 1, 1]])
    assert weights("sequence_truncate", "geometric")[0] == [
        [round(geometric[0], 9)] * 2 + [0],
        [round(geometric[1], 9)] * 3,
    ]
    assert weights("sequence_mask", "geometric") == ([[0.5, 3, 0], [0.1, 1, 1]], [[0, 0, 0], [0, 0, 0]])


def test_off_policy_mask_by_hand():
    rollout = torch.tensor([[0.0, 0.2], [0.0, 0.2], [0.0, -0.2], [0.0, 9.0]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]])
    keep = off_policy_mask(torch.zeros(4, 2), rollout, advantages, mask, 0.05)
    assert keep.tolist() == [[False], [True], [True], [True]]


def test_shaping_by_hand():
    assert clip_rewards(torch.tensor([-9.0, 0.5, 9.0]), 2.0).tolist() == [-2.0, 0.5, 2.0]
    penalty = overlong_penalty(torch.tensor([4, 6, 7, 8, 99]), max_new_tokens=8, buffer=2, penalty=0.5)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -0.5]
    masked = mask_truncated(torch.tensor([[True, False], [True, True]]), torch.tensor([False, True]))
    assert masked.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("rewards", "valid", "signal"),
    [
        ([1.0, 1.0, 1.0], [True, True, True], False),
        ([1.0, 0.0, 1.0], [True, True, True], True),
        ([1.0, 0.0, 1.0], [True, False, True], False),
        ([1.0, 5.0, 1.0], [True, False, True], False),
        ([1.0, NAN, 0.0], [True, False, True], True),
        ([1.0, 0.0, 0.0], [True, False, False], False),
        ([NAN, NAN, NAN], [False, False, False], False),
        ([1.0, 1.0 + 5e-7, 1.0], [True, True, True], False),
    ],
)
def test_signal_by_hand(rewards, valid, signal):
    got = has_signal(torch.tensor([rewards], dtype=torch.float64), torch.tensor([valid]))
    assert got.tolist() == [signal]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("ratio", ["product", "geometric"])
def test_corrections_of_far_tokens_stay_finite_in_float32(correction, ratio):
    gaps = torch.tensor([[300.0, -300.0], [300.0, 300.0], [-300.0, -300.0]], dtype=torch.float32)
    chosen = options(correction=correction, correction_ratio=ratio)
    weights, facts = correction_weights(chosen, gaps, torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
    assert bool(weights.isfinite().all()) and bool(facts["rollout_ratio"].isfinite().all())


def test_max_new_tokens_is_longer_than_the_batch():
    """The batches of these tests are narrower than constant_length's divisor, so that the two cannot be mixed up."""
    assert draw(0).mask_NT.shape[1] < MAX_NEW_TOKENS

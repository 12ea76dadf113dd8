"""From a golden case to the quantities that the product computes for it.

Each family reads inputs and params of a case, calls the product, and returns its quantities under the names that
`expected` has; "value" is the main one. What the product has no option for is NotClaimed, as is a case with a parameter
unknown here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from estimators.aggregate import Aggregation, StepTotals, count_totals
from estimators.correction import correction_weights, off_policy_mask
from estimators.groups import Scale
from estimators.kl import adapt_beta, k1, kl_in_reward, kl_penalty, sequence_kl
from estimators.registry import estimate_advantages
from estimators.reinforce_plus_plus_token import reinforce_plus_plus_token, whiten_tokens
from estimators.shaping import SIGNAL_TOLERANCE, clip_rewards, has_signal, mask_truncated, overlong_penalty
from estimators.whitening import moments
from learner.loss import Tokens, loss_of
from learner.tally import Tally

Case = dict[str, Any]
Quantities = dict[str, Any]

ESTIMATORS: dict[str, tuple[str, Scale]] = {  # their name -> ours, our default of scale_rewards
    "rloo": ("rloo", "none"),
    "grpo": ("grpo", "group"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "batch"),
    "flash_reinforce": ("reinforce", "none"),
    "reinforce": ("reinforce", "none"),
}
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "dr_grpo": "constant_length",
}
Loss = Literal["ppo_clip", "gspo", "rloo_sequence", "cispo", "reinforce"]
LOSSES: dict[str, tuple[Loss, Aggregation]] = {  # their name -> ours, and the aggregation that their definition implies
    "ppo_clip": ("ppo_clip", "token_mean"),
    "on_policy": ("ppo_clip", "token_mean"),
    "ppo_clip_plus_kl": ("ppo_clip", "token_mean"),
    "ppo_clip_tis": ("ppo_clip", "token_mean"),
    "ppo_clip_tis_kl": ("ppo_clip", "token_mean"),
    "two_sided_delta": ("ppo_clip", "token_mean"),
    "off_policy_mask_loss": ("ppo_clip", "token_mean"),
    "micro_batch": ("ppo_clip", "token_mean"),
    "gspo": ("gspo", "sequence_mean_token_mean"),
    "rloo_sequence": ("rloo_sequence", "sequence_mean_token_sum"),
    "cispo": ("cispo", "token_mean"),
    "reinforce": ("reinforce", "token_mean"),
}


class NotClaimed(Exception):
    """The product has no option for this case."""


def run(case: Case, dtype: torch.dtype = torch.float64) -> Quantities:
    """Compute the quantities of a case from inputs of a dtype.

    Raises:
        NotClaimed: the product has no option for it.
    """
    family = FAMILIES.get(case["family"])
    if family is None:
        raise NotClaimed(case["family"])
    inputs = {name: _decode(values, dtype) for name, values in case["inputs"].items()}
    return family(case["algorithm"], case["params"], inputs)


def mismatches(case: Case, quantities: Quantities, tolerance: float = 1e-6) -> list[str]:
    """Compare with what is expected: a phrase per quantity off by more than tolerance * max(1, max |expected|)."""
    wrong = []
    for name, got in quantities.items():
        if name != "value" and name not in case["expected"]:
            continue
        want = _decode(case["expected"][name], torch.float64)
        got = torch.as_tensor(got, dtype=torch.float64).detach()
        label = case["expected"]["quantity"] if name == "value" else name
        if got.shape != want.shape:
            wrong.append(f"{label} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
            continue
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        error = float((got - want).abs().max()) if want.numel() else 0.0
        if not error <= tolerance * scale:  # a NaN is wrong too
            wrong.append(f"{label} is off by {error:.3g}, allowed {tolerance * scale:.3g}")
    return wrong


def _advantage(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "num_generations", "group_sizes", "scale_rewards", "reward_clip_range", normalize_advantages=False)
    rewards_N, valid_N = _one_reward(inputs)
    if params.get("reward_clip_range") is not None:
        low, high = params["reward_clip_range"]
        if low != -high:
            raise NotClaimed("bounds of the reward clip that are not symmetric")
        rewards_N = clip_rewards(rewards_N, high)
    return _advantages_of(algorithm, params, inputs["group_ids"], rewards_N, valid_N, inputs["response_lengths"])


def _sharding(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    """Gather scalars over ranks in rank order, as the learner does; each rank then computes the same."""
    allow(params, "num_generations", "scale_rewards", "shards")
    shards = [slice(*bounds) for bounds in params["shards"]]
    gathered = {name: torch.cat([values[shard] for shard in shards]) for name, values in inputs.items()}
    rewards_N = gathered["rewards"]
    return _advantages_of(
        algorithm,
        params,
        gathered["group_ids"],
        rewards_N,
        torch.ones_like(rewards_N, dtype=torch.bool),
        gathered["response_lengths"],
    )


def _advantages_of(
    algorithm: str, params: Case, group_ids_N: Tensor, rewards_N: Tensor, valid_N: Tensor, num_tokens_N: Tensor
) -> Quantities:
    if algorithm not in ESTIMATORS:
        raise NotClaimed(algorithm)
    name, scale = ESTIMATORS[algorithm]
    scale = params.get("scale_rewards") or scale
    at, shape = _layout(group_ids_N)
    rewards_PK = _spread(rewards_N, at, shape, torch.nan)
    valid_PK, num_tokens_PK = _spread(valid_N, at, shape, False), _spread(num_tokens_N, at, shape, 0)

    def estimate(whiten_over: Literal["sequence", "token"]) -> Tensor:
        options = AlgorithmConfig(advantage_estimator=name, scale_rewards=scale, whiten_over=whiten_over)
        return estimate_advantages(options, rewards_PK, valid_PK, num_tokens_PK)[at]

    quantities = {"value": estimate("sequence")}
    if name == "reinforce_plus_plus" and scale == "batch":
        over_tokens_N = estimate("token")
        quantities |= {"paper_token_population_ddof0_floor1e8": over_tokens_N, "paper_token_population": over_tokens_N}
    return quantities


def _advantage_token(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    mask_NT = inputs["mask"].bool()
    if algorithm == "batch_whiten":
        allow(params)
        values_NT = torch.where(mask_NT, inputs["advantages"][:, None].double(), 0.0)
        return {"value": whiten_tokens(values_NT, mask_NT, moments(values_NT, mask_NT))}
    if algorithm != "reinforce_plus_plus_token":
        raise NotClaimed(algorithm)
    allow(params, "gamma", "beta")
    valid_N = torch.ones(len(mask_NT), dtype=torch.bool)
    kl_NT = k1(inputs["old_logprobs"], inputs["ref_logprobs"])
    returns_NT = reinforce_plus_plus_token(
        inputs["rewards"], valid_N, kl_NT, mask_NT, beta=params["beta"], discount=params["gamma"]
    )
    return {
        "value": whiten_tokens(returns_NT, mask_NT, moments(returns_NT, mask_NT)),
        "returns_masked": returns_NT,
    }


def _kl_estimator(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "estimator")
    kind = "unbiased" if algorithm == "k3_unbiased_gradient" else algorithm
    if kind not in ("k1", "k2", "k3", "unbiased"):
        raise NotClaimed(algorithm)
    logprobs_NT, ref_NT = inputs["logprobs"].requires_grad_(), inputs["ref_logprobs"]
    old_NT = inputs.get("old_logprobs", logprobs_NT.detach())
    value_NT = kl_penalty(cast(Any, kind), logprobs_NT, ref_NT, old_NT, inputs["mask"].bool())
    (gradient_NT,) = torch.autograd.grad(value_NT.sum(), logprobs_NT)
    if kind != "unbiased":
        return {"value": value_NT, "grad_of_masked_sum": gradient_NT}
    on_policy = bool(torch.equal(old_NT, logprobs_NT.detach()))  # off-policy, forward_value is k3 without its weight
    return {"value": gradient_NT} | ({"forward_value": value_NT} if on_policy else {})


def _kl_in_reward(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "beta", "num_generations", "scale_rewards", kl_in_reward=True)
    mask_NT = inputs["mask"].bool()
    kl_N = sequence_kl(inputs["old_logprobs"], inputs["ref_logprobs"], mask_NT)
    rewards_N = kl_in_reward(inputs["rewards"], kl_N, params["beta"])
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool)
    advantages = _advantages_of(algorithm, params, inputs["group_ids"], rewards_N, valid_N, mask_NT.sum(dim=1))
    return {"value": rewards_N, "kl_sequence_sum": kl_N, "advantages": advantages["value"]}


def _kl_controller(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "init", "target", "horizon")
    if algorithm != "adaptive":
        raise NotClaimed(algorithm)
    beta, values = params["init"], []
    for kl, num_samples in zip(inputs["observed_kl"].tolist(), inputs["n_steps"].tolist(), strict=True):
        beta = adapt_beta(beta, kl, params["target"], int(num_samples), params["horizon"])
        values.append(beta)
    return {"value": values}


def _policy_loss(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(
        params,
        *("aggregation", "eps_low", "eps_high", "dual_clip", "delta", "ceiling", "max_completion_length"),
        *("beta", "tis_cap", "threshold", "micro_batches", "loss_type", "ratio"),
    )
    if algorithm not in LOSSES or params.get("loss_type") not in (None, "bnpo"):
        raise NotClaimed(algorithm)
    name, aggregation = LOSSES[algorithm]
    if params.get("aggregation") is not None:
        aggregation = AGGREGATIONS.get(params["aggregation"]) or _not_claimed(params["aggregation"])
    capped = params.get("tis_cap") is not None
    options = AlgorithmConfig(
        policy_loss=name,
        aggregation=aggregation,
        clip_low=params.get("eps_low", 0.2),
        clip_high=params["ceiling"] - 1 if "ceiling" in params else params.get("eps_high", 0.2),
        dual_clip=params.get("delta", params.get("dual_clip")),
        beta=params.get("beta") or 0.0,
        kl_estimator="k3",
        correction="token_truncate" if capped else "none",
        correction_max=params["tis_cap"] if capped else 2.0,
        off_policy_mask_delta=params.get("threshold"),
    )
    max_new_tokens = params.get("max_completion_length") or inputs["mask"].shape[1]
    return _step_loss(options, params.get("micro_batches") or [[0, len(inputs["mask"])]], max_new_tokens, inputs)


def _step_loss(
    options: AlgorithmConfig, micro_batches: Sequence[Sequence[int]], max_new_tokens: int, inputs: dict[str, Tensor]
) -> Quantities:
    """Count the step, then add the shares of its micro-batches, as the learner does."""
    logprobs_NT = inputs["logprobs"].requires_grad_()
    parts = [{name: tensor[slice(*bounds)] for name, tensor in inputs.items()} for bounds in micro_batches]
    totals = StepTotals(num_tokens=0, num_sequences=0, num_samples=0, max_new_tokens=max_new_tokens)
    for part in parts:
        totals = totals + count_totals(part["mask"].bool(), max_new_tokens)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        loss = loss + _share(options, totals, part)
    (gradient_NT,) = torch.autograd.grad(loss, logprobs_NT)
    return {"value": loss, "grad_logprobs": gradient_NT}


def _share(options: AlgorithmConfig, totals: StepTotals, part: dict[str, Tensor]) -> Tensor:
    logprobs_NT, old_NT = part["logprobs"], part["old_logprobs"]
    tokens = Tokens(
        logprobs_NT=logprobs_NT,
        entropy_NT=torch.zeros_like(old_NT),
        old_NT=old_NT,
        rollout_NT=part.get("rollout_logprobs", old_NT),
        reference_NT=part.get("ref_logprobs", old_NT),
        mask_NT=part["mask"].bool(),
    )
    return loss_of(tokens, part["advantages"][:, None], options, options.beta, totals, Tally())


def _rollout_correction(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    mask_NT = inputs["mask"].bool()
    if algorithm == "off_policy_sequence_mask":
        allow(params, "threshold")
        tensors = (inputs["logprobs"], inputs["rollout_logprobs"], inputs["advantages"][:, None], mask_NT)
        return {"value": off_policy_mask(*tensors, params["threshold"])[:, 0].double()}
    allow(params, "level", "mode", "low", "high")
    corrections = {
        ("token", "truncate"): ("token_truncate", "product"),
        ("token", "mask"): ("token_mask", "product"),
        ("sequence", "truncate"): ("sequence_truncate", "product"),
        ("sequence", "mask_seqweight"): ("sequence_mask", "product"),
        ("geometric", "truncate"): ("sequence_truncate", "geometric"),
        ("geometric", "mask_tokweight"): ("sequence_mask", "geometric"),
    }
    level_and_mode = (params.get("level", ""), params.get("mode", ""))
    if level_and_mode not in corrections or (params["mode"] == "truncate" and params.get("low") is not None):
        raise NotClaimed(algorithm)
    correction, ratio = corrections[level_and_mode]
    options = AlgorithmConfig(
        correction=cast(Any, correction),
        correction_ratio=cast(Any, ratio),
        correction_min=params["low"] if params.get("low") is not None else 0.0,
        correction_max=params["high"] if params.get("high") is not None else float("inf"),
    )
    weights_NT, _ = correction_weights(options, inputs["old_logprobs"], inputs["rollout_logprobs"], mask_NT)
    return {"value": weights_NT}


def _truncation(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "num_generations", "beta", "scale_rewards", mask_truncated_completions=True)
    if algorithm != "mask_truncated":
        raise NotClaimed(algorithm)
    num_tokens_N = inputs["response_lengths"]
    whole_NT = torch.arange(inputs["old_logprobs"].shape[1]) < num_tokens_N[:, None]
    mask_NT = mask_truncated(whole_NT, inputs["truncated"].bool())
    kl_N = sequence_kl(inputs["old_logprobs"], inputs["ref_logprobs"], mask_NT)
    rewards_N = kl_in_reward(inputs["rewards"], kl_N, params["beta"])
    valid_N = torch.ones_like(rewards_N, dtype=torch.bool)
    advantages = _advantages_of("rloo", params, inputs["group_ids"], rewards_N, valid_N, num_tokens_N)
    totals = count_totals(mask_NT, whole_NT.shape[1])
    return {"value": advantages["value"], "active_tokens": float(totals.num_tokens)}


def _length_penalty(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    if algorithm != "dapo_soft_overlong":
        raise NotClaimed(algorithm)
    allow(params, "max_length", "cache", "factor")
    penalty_N = overlong_penalty(inputs["response_lengths"], params["max_length"], params["cache"], params["factor"])
    return {"value": inputs["rewards"] + penalty_N, "penalty": penalty_N}


def _dynamic_sampling(algorithm: str, params: Case, inputs: dict[str, Tensor]) -> Quantities:
    allow(params, "num_generations", tol=SIGNAL_TOLERANCE)
    if algorithm != "zero_variance_filter":
        raise NotClaimed(algorithm)
    at, shape = _layout(inputs["group_ids"])
    rewards_PK = _spread(inputs["rewards"], at, shape, torch.nan)
    valid_PK = _spread(torch.ones_like(inputs["rewards"], dtype=torch.bool), at, shape, False)
    return {"value": has_signal(rewards_PK, valid_PK)[at[0]].double()}


FAMILIES: dict[str, Callable[[str, Case, dict[str, Tensor]], Quantities]] = {
    "advantage": _advantage,
    "advantage_token": _advantage_token,
    "kl_estimator": _kl_estimator,
    "kl_in_reward": _kl_in_reward,
    "kl_controller": _kl_controller,
    "policy_loss": _policy_loss,
    "loss_invariance": _policy_loss,
    "rollout_correction": _rollout_correction,
    "sharding": _sharding,
    "truncation": _truncation,
    "length_penalty": _length_penalty,
    "dynamic_sampling": _dynamic_sampling,
}


def allow(params: Case, *names: str, **fixed: Any) -> None:
    """Claim a case only if every parameter it sets is known here, and those named with a value have it.

    Raises:
        NotClaimed: naming the parameter.
    """
    for name, value in params.items():
        if value is not None and name not in names and (name not in fixed or value != fixed[name]):
            raise NotClaimed(name)


def _not_claimed(what: str) -> Any:
    raise NotClaimed(what)


def _one_reward(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Fold several reward functions into one number, as a user's reward function would; invalid where none gave one."""
    if "rewards" in inputs:
        return inputs["rewards"], ~inputs["rewards"].isnan()
    per_function_NF = inputs["rewards_per_func"]
    return (per_function_NF * inputs["reward_weights"]).nansum(dim=1), ~per_function_NF.isnan().all(dim=1)


def _layout(group_ids_N: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Give each sample its place in (P, K), where K is the size of the largest group."""
    seen: dict[float, int] = {}
    rows, columns, sizes = [], [], []
    for group_id in group_ids_N.tolist():
        row = seen.setdefault(group_id, len(seen))
        sizes += [0] if row == len(sizes) else []
        rows.append(row)
        columns.append(sizes[row])
        sizes[row] += 1
    return (torch.tensor(rows), torch.tensor(columns)), (len(sizes), max(sizes))


def _spread(values_N: Tensor, at: tuple[Tensor, Tensor], shape: tuple[int, int], fill: float) -> Tensor:
    spread_PK = torch.full(shape, fill, dtype=values_N.dtype)
    spread_PK[at] = values_N
    return spread_PK


def _decode(values: Any, dtype: torch.dtype) -> Tensor:
    """Read nested lists; NaN and infinities are strings."""

    def number(value: Any) -> Any:
        return [number(item) for item in value] if isinstance(value, list) else float(value)

    return torch.tensor(number(values), dtype=dtype)

"""What a configuration must satisfy: defaults that the estimator decides, ranges, and options that would have no effect."""

import dataclasses
from collections.abc import Callable
from typing import Any

from configs.schema import (
    DEEPSPEED_OWNED_KEYS,
    FAULTS,
    AlgorithmConfig,
    Config,
    EvalConfig,
    RewardConfig,
    RewardModelConfig,
)

# estimator -> (scale_rewards, kl_in_reward, KL form in the loss); source: the seeds and docs/algorithms.md
ESTIMATOR_DEFAULTS = {
    "rloo": ("none", True, "k3"),
    "reinforce_plus_plus": ("batch", True, "k2"),
    "reinforce_plus_plus_token": ("none", True, "k2"),
    "grpo": ("group", False, "k3"),
    "reinforce": ("none", True, "k3"),
}
USER_FUNCTION_DEFAULTS = ("none", True, "k3")
ALIASES = {
    "group_norm": "grpo",
    "reinforce_baseline": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus_token",
}
ENGINE_OWNED = frozenset(
    (
        "model", "tokenizer", "dtype", "max_model_len", "max_num_seqs", "logprobs_mode", "weight_transfer_config",
        "worker_extension_cls", "kv_cache_memory_bytes", "seed", "trust_remote_code", "skip_tokenizer_init",
    )
)  # fmt: skip


class ConfigError(ValueError):
    """A configuration that cannot run; its one sentence says what, the rule, the value and the fix."""


def resolve(config: Config) -> Config:
    """Fill in what the estimator decides; what is still None is off.

    Raises:
        ConfigError: for an unknown estimator name.
    """
    algorithm = config.algorithm
    name = ALIASES.get(algorithm.advantage_estimator, algorithm.advantage_estimator)
    if name not in ESTIMATOR_DEFAULTS and ".py:" not in name:
        known = ", ".join(ESTIMATOR_DEFAULTS)
        raise ConfigError(
            f"algorithm.advantage_estimator must be one of {known} or path.py:function, got {name!r}. Choose one of them."
        )
    scale, in_reward, loss_form = ESTIMATOR_DEFAULTS.get(name, USER_FUNCTION_DEFAULTS)
    in_reward = in_reward if algorithm.kl_in_reward is None else algorithm.kl_in_reward
    kl = algorithm.beta > 0  # without KL its options stay undecided
    _refuse_without_effect(config, name)
    correction = algorithm.correction
    if correction is None:
        if config.train.max_staleness > 0:
            raise ConfigError(
                "algorithm.correction must be chosen when train.max_staleness is above 0, got none. "
                "Set algorithm.correction=token_truncate (or =none to go without, by name)."
            )
        correction = "none"
    decided = dataclasses.replace(
        algorithm,
        advantage_estimator=name,
        scale_rewards=algorithm.scale_rewards or scale,
        kl_in_reward=in_reward if kl else None,
        kl_estimator=(algorithm.kl_estimator or ("k1" if in_reward else loss_form)) if kl else None,
        correction=correction,
    )
    return dataclasses.replace(config, algorithm=decided)


def check_rules(config: Config) -> None:
    """Refuse impossible values and combinations.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    for key, holds, rule, fix in RANGES:
        value = _get(config, key)
        if value is not None and not holds(value):
            raise ConfigError(f"{key} must {rule}, got {value}. {fix}")
    _check_algorithm(config)
    _check_learner(config)
    _check_rollout(config)
    _check_reward(config)
    _check_data(config)
    _check_keep_best(config)
    _check_chaos(config)
    _check_devices(config)


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _at_least(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value >= low), f"be at least {low:g}"


def _above(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value > low), f"be greater than {low:g}"


RANGES: list[tuple[str, Callable[[Any], bool], str, str]] = [
    ("rollout.num_generations", *_at_least(2), "A group baseline needs at least two samples per prompt."),
    *((key, *_at_least(1), "Give a positive number.") for key in (
        "train.num_steps", "train.prompts_per_step", "rollout.num_workers", "rollout.max_new_tokens", "rollout.max_model_len",
        "rollout.threads", "rollout.max_concurrent_samples", "rollout.kv_cache_mib", "reference.num_workers", "reference.threads",
        "reward.num_workers", "reward_model.num_workers", "reward_model.threads", "reward_model.max_tokens_per_batch",
        "learner.num_ranks", "learner.threads", "learner.num_mini_batches", "learner.num_epochs",
        "learner.max_tokens_per_micro_batch", "learner.logprob_chunk_tokens", "data.max_prompt_tokens", "eval.max_prompts",
        "eval.num_samples", "rollout.max_turn_tokens",
        "algorithm.kl_horizon", "learner.max_skipped_updates", "cluster.num_cpus", "checkpoint.keep_last",
    )),
    *((key, *_above(0), "Give a positive number.") for key in (
        "rollout.temperature", "learner.lr", "rollout.timeout_s", "reference.timeout_s", "reward.timeout_s", "learner.timeout_s",
        "reward_model.timeout_s",
        "cluster.start_timeout_s", "algorithm.reward_clip", "algorithm.correction_max", "algorithm.kl_target",
        "cluster.heartbeat_timeout_s",
    )),
    *((key, *_at_least(0), "Give 0 to turn it off.") for key in (
        "algorithm.beta", "algorithm.clip_low", "algorithm.clip_high", "algorithm.entropy_coef", "algorithm.overlong_buffer_tokens",
        "algorithm.correction_min", "learner.grad_clip", "learner.weight_decay", "learner.warmup_steps", "learner.lora.rank",
        "train.max_staleness", "train.max_refill", "train.sample_table_every", "train.max_restarts", "eval.every", "checkpoint.every",
        "rollout.top_k", "rollout.num_gpus", "rollout.num_cpus",
        "learner.num_cpus", "learner.num_gpus", "reference.num_cpus", "reference.num_gpus", "reward.num_cpus",
        "reward_model.num_cpus", "reward_model.num_gpus", "cluster.wait_for_nodes_s",
    )),
    ("rollout.top_p", lambda value: 0 < value <= 1, "lie in (0, 1]", "Give 1 to sample from the full distribution."),
    ("algorithm.discount", lambda value: 0 < value <= 1, "lie in (0, 1]", "Give 1 for no discount."),
    ("algorithm.dual_clip", *_above(1), "Give a bound such as 3, or null to turn it off."),
]  # fmt: skip


def _refuse_without_effect(config: Config, estimator: str) -> None:
    """Refuse a key that was set but could change nothing."""
    a, default = config.algorithm, AlgorithmConfig()
    no_beta = "algorithm.beta is 0"
    silent = [  # key, whether it would be ignored, because
        ("kl_in_reward", a.beta == 0, no_beta),
        ("kl_estimator", a.beta == 0, no_beta),
        ("kl_target", a.beta == 0, no_beta),
        ("kl_horizon", a.kl_target is None, "algorithm.kl_target is not set"),
        ("whiten_over", estimator != "reinforce_plus_plus", f"the estimator is {estimator}"),
        ("discount", estimator != "reinforce_plus_plus_token", f"the estimator is {estimator}"),
        ("overlong_penalty", a.overlong_buffer_tokens == 0, "algorithm.overlong_buffer_tokens is 0"),
        ("clip_low", a.policy_loss in ("reinforce", "cispo"), f"algorithm.policy_loss is {a.policy_loss}"),
        ("clip_high", a.policy_loss == "reinforce", "algorithm.policy_loss is reinforce"),
        ("dual_clip", a.policy_loss != "ppo_clip", f"algorithm.policy_loss is {a.policy_loss}"),
        ("correction_ratio", not (a.correction or "").startswith("sequence"), f"algorithm.correction is {a.correction}"),
        ("correction_min", not (a.correction or "").endswith("mask"), f"algorithm.correction is {a.correction}"),
        ("correction_max", a.correction in (None, "none"), f"algorithm.correction is {a.correction}"),
    ]
    for key, ignored, because in silent:
        value = getattr(a, key)
        if ignored and value != getattr(default, key):
            raise ConfigError(f"algorithm.{key} must be left out where it has no effect, got {value} while {because}. Remove it.")
    fixed_scale = {"reinforce": "none", "reinforce_plus_plus_token": "none"}
    if estimator in fixed_scale and a.scale_rewards not in (None, fixed_scale[estimator]):
        raise ConfigError(
            f"algorithm.scale_rewards must be left out for {estimator}, got {a.scale_rewards}. "
            "Remove it, or choose grpo or reinforce_plus_plus."
        )


def _check_algorithm(config: Config) -> None:
    a, r = config.algorithm, config.rollout
    if a.beta > 0 and a.kl_in_reward and a.kl_estimator != "k1":
        raise ConfigError(
            f"algorithm.kl_estimator must be k1 where KL is in the reward, got {a.kl_estimator}. "
            "Remove it, or set algorithm.kl_in_reward=false."
        )
    if a.beta > 0 and not a.kl_in_reward and a.kl_estimator == "k1":
        raise ConfigError(
            "algorithm.kl_estimator must be k2, k3 or unbiased in the loss, got k1 (its gradient has zero mean). "
            "Set algorithm.kl_estimator=k2 or algorithm.kl_in_reward=true."
        )
    if a.advantage_estimator == "reinforce_plus_plus_token" and a.beta > 0 and not a.kl_in_reward:
        raise ConfigError(
            "algorithm.kl_in_reward must be true for reinforce_plus_plus_token, got false. "
            "Remove it, or choose reinforce_plus_plus for KL in the loss."
        )
    whole = a.policy_loss in ("gspo", "rloo_sequence")
    if whole and a.advantage_estimator == "reinforce_plus_plus_token":
        raise ConfigError(
            f"algorithm.policy_loss must be per token for reinforce_plus_plus_token, got {a.policy_loss} (one ratio per response "
            "needs one advantage per response). Set algorithm.policy_loss=ppo_clip."
        )
    if a.policy_loss == "rloo_sequence" and (a.correction or "").startswith("token"):
        raise ConfigError(
            f"algorithm.correction must be per sequence for rloo_sequence, got {a.correction} (token weights would undo its "
            "product ratio). Set algorithm.correction=sequence_truncate."
        )
    truncated = r.top_p < 1 or r.top_k > 0
    if truncated and (a.correction != "none" or a.off_policy_mask_delta is not None):
        raise ConfigError(
            f"algorithm.correction must be none while rollout.top_p or top_k cut the distribution, got {a.correction} with "
            f"top_p {r.top_p}, top_k {r.top_k}. Set rollout.top_p=1 rollout.top_k=0."
        )
    if a.old_logprobs == "rollout" and (truncated or a.correction != "none"):
        why = f"top_p {r.top_p}, top_k {r.top_k}" if truncated else f"correction {a.correction}, which would weigh nothing"
        raise ConfigError(
            f"algorithm.old_logprobs must be recompute here, got rollout with {why}. Set algorithm.old_logprobs=recompute."
        )
    if a.overlong_buffer_tokens > r.max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens must be at most rollout.max_new_tokens ({r.max_new_tokens}), "
            f"got {a.overlong_buffer_tokens}. Make it smaller."
        )
    if a.correction_min >= a.correction_max and a.correction != "none":
        raise ConfigError(
            f"algorithm.correction_min must be below correction_max ({a.correction_max}), got {a.correction_min}. Lower it."
        )


def _check_learner(config: Config) -> None:
    learner = config.learner
    owned = [key for key in DEEPSPEED_OWNED_KEYS if _holds(learner.deepspeed, key)]
    if owned:
        raise ConfigError(f"learner.deepspeed must not set what rlooper owns, got {owned[0]}. See the keys of learner.* instead.")
    if learner.offload_optimizer and learner.zero_stage == 0:
        raise ConfigError("learner.offload_optimizer must go with zero_stage 1 to 3, got 0. Set learner.zero_stage=2.")
    if learner.offload_parameters and learner.zero_stage != 3:
        raise ConfigError(
            f"learner.offload_parameters must go with zero_stage 3, got {learner.zero_stage}. Set learner.zero_stage=3."
        )
    if learner.num_mini_batches > config.train.prompts_per_step:
        raise ConfigError(
            f"learner.num_mini_batches must be at most train.prompts_per_step ({config.train.prompts_per_step}), "
            f"got {learner.num_mini_batches}. A group is never split."
        )


def _holds(tree: Any, key: str) -> bool:
    """Whether nested dictionaries hold a dotted key."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _check_reward(config: Config) -> None:
    names, reward = reward_functions(config.reward), config.reward
    if reward.reward_weights and len(reward.reward_weights) != len(names):
        raise ConfigError(
            f"reward.reward_weights must have one weight per function ({', '.join(names)}), got {reward.reward_weights}. Correct it."
        )
    if not names and config.reward_model.path is None:
        raise ConfigError("reward.function must name a function where reward_model.path is not set, got none. Set one of them.")
    for key in dataclasses.fields(RewardModelConfig) if config.reward_model.path is None else ():
        value = getattr(config.reward_model, key.name)
        if value != key.default:
            raise ConfigError(
                f"reward_model.{key.name} must be left out where it has no effect, got {value} without reward_model.path. Remove it."
            )
    strange = [name for name in reward.arguments if name not in names]
    if strange:
        raise ConfigError(f"reward.arguments must name functions of reward.function ({', '.join(names)}), got {strange[0]}. Correct it.")


def reward_functions(reward: RewardConfig) -> list[str]:
    """List the reward functions that a configuration names."""
    return [name.strip() for name in reward.function.split(",") if name.strip() not in ("", "none")]


def held_out(config: Config) -> dict[str, str]:
    """List the held-out datasets by name; one without a name is called ""."""
    data = config.eval.data
    return {} if data is None else dict(data) if isinstance(data, dict) else {"": data}


def _check_keep_best(config: Config) -> None:
    best = config.checkpoint.keep_best
    if best is not None and not (best.startswith("eval/") and config.eval.data and config.eval.every):
        raise ConfigError(
            f"checkpoint.keep_best must be a metric of an evaluation, with eval.data and eval.every set, got {best}. "
            "Write eval/greedy/reward_mean, or eval/NAME/greedy/reward_mean for a named dataset."
        )


def training(config: Config) -> dict[str, float]:
    """List the sources of training rows with their weights."""
    data = config.data.train
    return {source: float(weight) for source, weight in data.items()} if isinstance(data, dict) else {data: 1.0}


def _check_data(config: Config) -> None:
    data = config.data.train
    if not (isinstance(data, str) or (isinstance(data, dict) and data and all(_is_weight(weight) for weight in data.values()))):
        raise ConfigError(
            f"data.train must be a source, or sources with weights above 0 ({{a.jsonl: 2, b.jsonl: 1}}), got {data}. Correct it."
        )
    strange = [(name, source) for name, source in held_out(config).items() if not isinstance(source, str) or "/" in str(name)]
    if strange:
        name, source = strange[0]
        raise ConfigError(f"eval.data must be a source, or sources by names without a slash, got {name}: {source!r}. Correct it.")
    e, default = config.eval, EvalConfig()
    for key, because in (("num_samples", not e.sampled), ("solved_at", e.num_samples == 1)):
        if because and getattr(e, key) != getattr(default, key):
            raise ConfigError(
                f"eval.{key} must be left out where it has no effect, got {getattr(e, key)} with eval.sampled={str(e.sampled).lower()} "
                f"and eval.num_samples={e.num_samples}. Remove it."
            )


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _check_chaos(config: Config) -> None:
    for item in config.debug.chaos:
        fault, at, step = item.partition("@")
        if fault not in FAULTS or not at or not step.isdigit() or not 1 <= int(step) <= config.train.num_steps:
            raise ConfigError(
                f"debug.chaos must hold fault@step with a step from 1 to train.num_steps ({config.train.num_steps}), got {item}. "
                f"The faults are {', '.join(FAULTS)}."
            )
        if fault.endswith("reward") and not reward_functions(config.reward):
            raise ConfigError(f"debug.chaos must strike a role that runs, got {item} without a reward function. Remove it.")
        if fault.endswith("reference") and (config.algorithm.beta == 0 or config.learner.lora.rank > 0):
            raise ConfigError(f"debug.chaos must strike a role that runs, got {item} without a reference worker. Remove it.")


def _check_devices(config: Config) -> None:
    r, learner, cluster = config.rollout, config.learner, config.cluster
    for name, gpus in (("rollout", r), ("learner", learner), ("reference", config.reference), ("reward_model", config.reward_model)):
        if gpus.num_gpus > 1 and gpus.num_gpus % 1:
            raise ConfigError(f"{name}.num_gpus must be whole above 1, got {gpus.num_gpus:g}. A worker shares one GPU at most.")
    if learner.num_gpus > 1:
        raise ConfigError(f"learner.num_gpus must be at most 1, got {learner.num_gpus:g}. Raise learner.num_ranks instead.")
    parallel = [int(r.engine_args.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline")]
    shards = parallel[0] * parallel[1]
    if shards > 1 and r.num_gpus != shards:
        raise ConfigError(
            f"rollout.num_gpus must be tensor x pipeline parallel ({parallel[0]} x {parallel[1]} = {shards}), got {r.num_gpus:g}. "
            "Set it so; a CPU engine takes no shards."
        )
    if shards == 1 and r.num_gpus > 1:
        raise ConfigError(
            f"rollout.num_gpus must be at most 1 for an engine without shards, got {r.num_gpus:g}. Set "
            f"+rollout.engine_args.tensor_parallel_size={r.num_gpus:g}."
        )
    if cluster.network_interface is not None and learner.num_ranks == 1:
        raise ConfigError(
            f"cluster.network_interface must go with several learner ranks, got {cluster.network_interface} with one. Remove it."
        )
    if cluster.wait_for_nodes_s > 0 and cluster.address == "local":
        raise ConfigError(
            f"cluster.wait_for_nodes_s must go with a running cluster, got {cluster.wait_for_nodes_s:g} with a private Ray. Set it to 0."
        )
    if cluster.placement == "colocated":
        _check_colocated(config)


def _check_colocated(config: Config) -> None:
    r, learner = config.rollout, config.learner
    if r.num_workers != learner.num_ranks:
        raise ConfigError(
            f"cluster.placement=colocated must pair engines and learner ranks, got rollout.num_workers={r.num_workers} and "
            f"learner.num_ranks={learner.num_ranks}. Make them equal."
        )
    shared = r.num_gpus + learner.num_gpus
    if shared > 1 or (r.num_gpus > 0) != (learner.num_gpus > 0):
        raise ConfigError(
            f"cluster.placement=colocated must share one GPU per pair, got rollout.num_gpus={r.num_gpus:g} and "
            f"learner.num_gpus={learner.num_gpus:g}. Give each 0.5."
        )
    if shared and r.kv_cache_mib is None and "gpu_memory_utilization" not in r.engine_args:
        raise ConfigError(
            "cluster.placement=colocated must bound the engine's memory, got vLLM's choice, which leaves none to the learner. "
            "Set rollout.kv_cache_mib."
        )


def _check_rollout(config: Config) -> None:
    r = config.rollout
    owned = sorted(ENGINE_OWNED & set(r.engine_args))
    if owned:
        raise ConfigError(f"rollout.engine_args must not set what rlooper owns, got {owned[0]}. See the keys of rollout.* instead.")
    if r.backend == "hf" and r.engine_args:
        raise ConfigError(f"rollout.engine_args must go with rollout.backend=vllm, got {sorted(r.engine_args)} with hf. Remove them.")
    if config.data.max_prompt_tokens + r.max_new_tokens > r.max_model_len:
        raise ConfigError(
            f"rollout.max_model_len must hold data.max_prompt_tokens + rollout.max_new_tokens "
            f"({config.data.max_prompt_tokens} + {r.max_new_tokens}), got {r.max_model_len}. Raise it or lower them."
        )

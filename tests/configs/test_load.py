"""Recipes and overrides: what is merged, what is resolved, and that every refusal is one sentence with the fix."""

import dataclasses
from pathlib import Path

import pytest

from configs.load import known_keys, load, to_yaml
from configs.rules import ConfigError

BASE = ["model.path=m", "data.train=t"]
RECIPES = sorted(Path("configs").rglob("*.yaml"))


def test_arguments_apply_from_left_to_right(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train:\n  num_steps: 7\n  seed: 3\n")
    config = load([*BASE, "train.num_steps=5", str(recipe), "train.seed=4", "rollout.engine_args.swap_space=2"])
    assert (config.train.num_steps, config.train.seed) == (7, 4)
    assert config.rollout.engine_args == {"swap_space": 2}


def test_hydra_prefixes():
    config = load([*BASE, "++train.seed=4", "+rollout.engine_args.a=1", "~train.seed", "+rollout.engine_args.b=2",
                   "~rollout.engine_args.a"])  # fmt: skip
    assert config.train.seed == 0 and config.rollout.engine_args == {"b": 2}


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(BASE).train.seed = 1  # pyright: ignore


@pytest.mark.parametrize(
    ("overrides", "resolved"),
    [
        ([], ("rloo", "none", True, "k1")),
        (["algorithm.advantage_estimator=reinforce_plus_plus"], ("reinforce_plus_plus", "batch", True, "k1")),
        (["algorithm.advantage_estimator=grpo"], ("grpo", "group", False, "k3")),
        (["algorithm.advantage_estimator=reinforce_baseline", "algorithm.kl_in_reward=false"],
         ("reinforce_plus_plus", "batch", False, "k2")),
        (["algorithm.advantage_estimator=group_norm", "algorithm.beta=0"], ("grpo", "group", None, None)),
    ],
)  # fmt: skip
def test_what_the_estimator_decides_is_resolved(overrides, resolved, tmp_path):
    config = load([*BASE, *overrides])
    a = config.algorithm
    assert (a.advantage_estimator, a.scale_rewards, a.kl_in_reward, a.kl_estimator) == resolved
    written = tmp_path / "resolved.yaml"
    written.write_text(to_yaml(config))
    assert load([str(written)]) == config


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_recipe_loads(recipe):
    base = [] if "model:" in recipe.read_text() else BASE
    load([*base, str(recipe)])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.beat=1", "Did you mean algorithm.beta"),
        ("num_generations=4", "Did you mean rollout.num_generations"),
        ("learner.lr=fast", "learner.lr must have the type"),
        ("learner.zero_stage=4", "expected one of [0, 1, 2, 3]"),
        ("rollout.num_generations=1", "rollout.num_generations must be at least 2, got 1"),
        ("rollout.temperature=0", "rollout.temperature must be greater than 0"),
        ("rollout.top_p=1.5", "rollout.top_p must lie in (0, 1]"),
        ("learner=3", "learner must be a section"),
        ("algorithm.advantage_estimator=rlo", "must be one of rloo"),
        ("algorithm.whiten_over=token", "has no effect"),
        ("algorithm.discount=0.9", "has no effect"),
        ("algorithm.beta=0 algorithm.kl_in_reward=true", "algorithm.beta is 0"),
        ("algorithm.beta=0 algorithm.kl_target=0.1", "algorithm.beta is 0"),
        ("algorithm.kl_estimator=k3", "must be k1 where KL is in the reward"),
        ("algorithm.kl_in_reward=false algorithm.kl_estimator=k1", "its gradient has zero mean"),
        ("algorithm.policy_loss=reinforce algorithm.clip_low=0.1", "has no effect"),
        ("algorithm.policy_loss=gspo algorithm.dual_clip=3", "has no effect"),
        ("algorithm.overlong_penalty=2", "has no effect"),
        ("algorithm.correction_max=3", "has no effect"),
        ("algorithm.correction=token_mask rollout.top_p=0.9", "cut the distribution"),
        ("train.max_staleness=1", "algorithm.correction must be chosen"),
        ("learner.offload_optimizer=true", "must go with zero_stage 1 to 3"),
        ("learner.num_mini_batches=99", "must be at most train.prompts_per_step"),
        ("rollout.engine_args.seed=1", "must not set what rlooper owns"),
        ("rollout.backend=hf rollout.engine_args.a=1", "must go with rollout.backend=vllm"),
        ("rollout.max_model_len=64", "must hold data.max_prompt_tokens + rollout.max_new_tokens"),
        ("algorithm.policy_loss=gspo algorithm.advantage_estimator=reinforce_plus_plus_token", "must be per token"),
        ("algorithm.policy_loss=rloo_sequence algorithm.correction=token_mask", "must be per sequence"),
        ("learner.deepspeed.train_batch_size=8", "must not set what rlooper owns"),
        ("learner.deepspeed.zero_optimization.stage=3", "got zero_optimization.stage"),
        ("algorithm.old_logprobs=rollout rollout.top_p=0.9", "must be recompute"),
        ("algorithm.old_logprobs=rollout algorithm.correction=token_mask", "would weigh nothing"),
        ("-m", "got -m"),
        ("train.num_steps", "Write train.num_steps=VALUE"),
        ("missing.yaml", "recipe must be an existing file"),
        ("+train.seed=1", "must name a key that is not set yet"),
        ("~rollout.engine_args.a", "must name an entry that is set"),
        ("train.seed=[1", "must be valid YAML"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_fix(override, words):
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *override.split()])
    message = str(caught.value)
    assert words in message
    assert "\n" not in message and message.endswith((".", "?"))


def test_a_missing_value_names_its_key():
    with pytest.raises(ConfigError, match="data.train must be set"):
        load(["model.path=m"])


def test_a_recipe_with_a_slip_suggests_the_right_name(tmp_path):
    (tmp_path / "demo.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="Did you mean .*demo.yaml"):
        load([str(tmp_path / "dmo.yaml")])


def test_keys_stay_few():
    assert len(known_keys()) <= 142  # 140 and the two of environments: they and data are what users bring from elsewhere

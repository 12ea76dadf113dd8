"""Recipes and Hydra-style overrides become one frozen, checked Config; anything wrong is one sentence.

Arguments apply from left to right: `recipe.yaml` merges a file, `key=value` sets, `+key=value` adds a key that is not there yet,
`++key=value` adds or sets, `~key` goes back to the default. What the estimator decides (`None` in the schema) is resolved here,
so that the printed configuration says what will run.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from configs.rules import ConfigError, check_rules, resolve
from configs.schema import Config

FREE_KEYS = (  # what lies below them is free
    "data.train", "data.chat_template_kwargs", "eval.data", "reward.arguments", "rollout.engine_args", "rollout.environment_arguments",
    "learner.deepspeed",
)  # fmt: skip
PATH_KEYS = ("model.path", "data.train", "eval.data", "train.output_dir", "reward_model.path")


def load(arguments: Sequence[str]) -> Config:
    """Merge recipes and overrides from left to right, resolve, check, freeze.

    Args:
        arguments: recipe files (`*.yaml`) and overrides (`key=value`, `+key=value`, `++key=value`, `~key`).

    Raises:
        ConfigError: one sentence that names the key, the rule, the value and the fix.
    """
    tree = OmegaConf.structured(Config)
    OmegaConf.set_readonly(tree, False)
    for argument in arguments:
        tree = _apply(tree, argument)
    try:
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise ConfigError(f"{missing[0]} must be set, got nothing. Give {missing[0]}=VALUE or a recipe that sets it.")
        resolved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(tree, resolve=True))
        assert isinstance(resolved, DictConfig)
        config = OmegaConf.to_object(_expand_home(resolved))
    except OmegaConfBaseException as error:
        raise _sentence(error) from None
    assert isinstance(config, Config)
    config = resolve(config)
    check_rules(config)
    for key in config.train.resume_allow:
        _check_key(key, "train.resume_allow")
    return config


def to_yaml(config: Config) -> str:
    """Write a configuration as YAML that `load` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def flat(config: Config) -> dict[str, Any]:
    """List a configuration as dotted keys and values; an engine's own arguments stay one value."""
    return dict(_leaves(dataclasses.asdict(config)))


def from_flat(values: Mapping[str, Any]) -> Config:
    """Read back what `flat` listed.

    Raises:
        ConfigError: it is of another version of the schema.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), nested))
    except OmegaConfBaseException as error:
        raise _sentence(error) from None
    assert isinstance(config, Config)
    return config


def known_keys() -> tuple[str, ...]:
    """List every dotted key of the schema; keys below a dictionary of an engine's own arguments are free."""
    return tuple(flat(Config()))


def _apply(tree: DictConfig, argument: str) -> DictConfig:
    if argument.endswith((".yaml", ".yml")) and "=" not in argument:
        return _merge(tree, _read_recipe(argument), argument)
    if argument.startswith("~"):
        return _reset(tree, argument[1:])
    if argument.startswith("-"):
        raise ConfigError(
            f"arguments must be RECIPE.yaml or key=value, got {argument}. Sweeps and flags are not supported: call once per run."
        )
    if "=" not in argument:
        raise ConfigError(f"arguments must be RECIPE.yaml or key=value, got {argument!r}. Write {argument}=VALUE or name a .yaml file.")
    plus = len(argument) - len(argument.lstrip("+"))
    key = argument[plus:].split("=", 1)[0].strip()
    try:
        update = OmegaConf.from_dotlist([argument[plus:]])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key} must be valid YAML, got {argument!r} ({str(error).splitlines()[0]}). Quote the value.") from None
    if plus == 1 and OmegaConf.select(tree, key, default=None) is not None:
        raise ConfigError(f"+{key} must name a key that is not set yet, got one that is. Write {key}=VALUE or ++{key}=VALUE.")
    return _merge(tree, update, argument)


def _read_recipe(name: str) -> DictConfig:
    path = Path(name).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"Did you mean {path.parent / near[0]}?" if near else "Check the path."
        raise ConfigError(f"recipe must be an existing file, got {name}. {hint}")
    try:
        recipe = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{name} must be valid YAML, got an error: {' '.join(str(error).split())}. Mend the file.") from None
    if not isinstance(recipe, DictConfig):
        raise ConfigError(f"{name} must be a mapping of sections, got {type(recipe).__name__}. See configs/demo.yaml.")
    return recipe


def _merge(tree: DictConfig, update: DictConfig, source: str) -> DictConfig:
    for key, _ in _leaves(OmegaConf.to_container(update, resolve=False)):
        _check_key(key, source)
    try:
        merged = OmegaConf.merge(tree, update)
    except OmegaConfBaseException as error:
        raise _sentence(error) from None
    assert isinstance(merged, DictConfig)
    return merged


def _reset(tree: DictConfig, key: str) -> DictConfig:
    free = _free_parent(key)
    if free and free != key:
        entry = key.removeprefix(free + ".")
        section = OmegaConf.select(tree, free)
        if entry not in section:
            raise ConfigError(f"~{key} must name an entry that is set, got none. Remove the override.")
        with read_write(section):
            del section[entry]
        return tree
    _check_key(key, f"~{key}")
    defaults = OmegaConf.select(OmegaConf.structured(Config), key.rsplit(".", 1)[0])
    return _set(tree, key, "???" if OmegaConf.is_missing(defaults, key.rsplit(".", 1)[1]) else defaults[key.rsplit(".", 1)[1]])


def _set(tree: DictConfig, key: str, value: Any) -> DictConfig:
    for part in reversed(key.split(".")):
        value = {part: value}
    merged = OmegaConf.merge(tree, value)
    assert isinstance(merged, DictConfig)
    return merged


def _check_key(key: str, source: str) -> None:
    known = known_keys()
    if key in known or _free_parent(key):
        return
    sections = {k.rsplit(".", 1)[0] for k in known}
    if key in sections:
        raise ConfigError(f"{key} must be a section of keys, got one value in {source}. Set {key}.KEY=VALUE.")
    near = difflib.get_close_matches(key, known, n=1) or [
        k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
    ]
    near = near or difflib.get_close_matches(key.rsplit(".", 1)[-1], [k.rsplit(".", 1)[-1] for k in known], n=1)
    hint = f"Did you mean {near[0]}?" if near else "See configs/schema.py for every key."
    raise ConfigError(f"keys must exist in configs/schema.py, got {key} in {source}. {hint}")


def _free_parent(key: str) -> str:
    for free in FREE_KEYS:
        if key == free or key.startswith(free + "."):
            return free
    return ""


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and not _free_parent(key):
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _expand_home(tree: DictConfig) -> DictConfig:
    for key in PATH_KEYS:
        value = OmegaConf.select(tree, key)
        if isinstance(value, str) and value.startswith("~"):
            tree = _set(tree, key, str(Path(value).expanduser()))
    return tree


def _sentence(error: OmegaConfBaseException) -> ConfigError:
    key = error.full_key or "the configuration"
    words = str(error.msg or error).splitlines()[0].rstrip(".")
    return ConfigError(f"{key} must have the type that configs/schema.py gives, got an error: {words}. Correct the value.")

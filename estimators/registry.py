"""From the configuration to an estimator; users add their own with `algorithm.advantage_estimator=path.py:function`."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from estimators.grpo import grpo
from estimators.reinforce import reinforce
from estimators.reinforce_plus_plus import reinforce_plus_plus
from estimators.rloo import rloo

OUTCOME_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "grpo": grpo,
    "reinforce": reinforce,
}


class EstimatorError(ValueError):
    """An advantage estimator that cannot be used; its one sentence says what, the rule, the value and the fix."""


@cache
def load_estimator(name_or_path: str) -> Callable[..., Tensor]:
    """Find an outcome estimator by name, or a user's function by `path.py:function`.

    A user's function takes (rewards_PK, valid_PK, num_tokens_PK) and returns advantages_PK.

    Raises:
        EstimatorError: for an unknown name, a file that is missing or fails, or a function it does not have.
    """
    if name_or_path in OUTCOME_ESTIMATORS:
        return OUTCOME_ESTIMATORS[name_or_path]
    path, colon, function_name = name_or_path.rpartition(":")
    if not colon or not path.endswith(".py"):
        known = ", ".join(OUTCOME_ESTIMATORS)
        raise EstimatorError(
            f"algorithm.advantage_estimator must be one of {known} or path.py:function, got {name_or_path!r}. "
            "Choose one of them."
        )
    function: Callable[..., Tensor] | None = getattr(_import_file(path), function_name, None)
    if not callable(function):
        raise EstimatorError(
            f"algorithm.advantage_estimator must name a function of {path}, got {function_name!r}. Define it there."
        )
    return function


def estimate_advantages(
    algorithm: AlgorithmConfig, rewards_PK: Tensor, valid_PK: Tensor, num_tokens_PK: Tensor
) -> Tensor:
    """Compute the advantages of whole responses with the configured estimator.

    Args:
        algorithm: resolved options (`scale_rewards` decided).
        rewards_PK: rewards after clip, length penalty and KL, (P, K).
        valid_PK: which rewards count, (P, K) bool.
        num_tokens_PK: response tokens, (P, K).

    Returns:
        (P, K) float64: exactly 0 for invalid samples.

    Raises:
        EstimatorError: for an estimator that cannot be loaded, or a user's function that returns another shape or a
            value that is not finite.
    """
    function = load_estimator(algorithm.advantage_estimator)
    advantages_PK = function(rewards_PK, valid_PK, num_tokens_PK, **_options(algorithm))
    if algorithm.advantage_estimator in OUTCOME_ESTIMATORS:
        return advantages_PK
    return _checked(algorithm.advantage_estimator, advantages_PK, valid_PK)


def is_group_local(algorithm: AlgorithmConfig) -> bool:
    """Say whether the advantages of a group depend on that group alone, so that no other rank's rewards are needed."""
    has_group_baseline = algorithm.advantage_estimator in ("rloo", "grpo", "reinforce_plus_plus")
    return has_group_baseline and algorithm.scale_rewards != "batch"


def _options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    name, scale = algorithm.advantage_estimator, algorithm.scale_rewards
    if name not in ("rloo", "grpo", "reinforce_plus_plus"):
        return {}
    if scale is None:
        raise EstimatorError(
            "algorithm.scale_rewards must be decided before advantages are estimated, got None. "
            "Resolve the configuration first (configs.load)."
        )
    token = {"whiten_over": algorithm.whiten_over} if name == "reinforce_plus_plus" else {}
    return {"scale_rewards": scale, **token}


def _import_file(path: str) -> Any:
    if not Path(path).is_file():
        raise EstimatorError(
            f"algorithm.advantage_estimator must name a file that exists, got {path!r}. "
            "Give the path relative to the working directory, or an absolute one."
        )
    spec = importlib.util.spec_from_file_location(f"user_estimator_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # what it raises is the user's own traceback
    return module


def _checked(name: str, advantages_PK: Any, valid_PK: Tensor) -> Tensor:
    if not isinstance(advantages_PK, Tensor) or advantages_PK.shape != valid_PK.shape:
        got = tuple(advantages_PK.shape) if isinstance(advantages_PK, Tensor) else type(advantages_PK).__name__
        raise EstimatorError(
            f"{name} must return a tensor of shape {tuple(valid_PK.shape)}, got {got}. Return one advantage per reward."
        )
    selected_PK = torch.where(valid_PK, advantages_PK.detach().double(), 0.0)
    if not bool(selected_PK.isfinite().all()):
        bad = selected_PK[~selected_PK.isfinite()][0].item()
        raise EstimatorError(
            f"{name} must return finite advantages for valid rewards, got {bad}. "
            "Guard divisions by the spread of a constant group."
        )
    return selected_PK

"""One sample from its first token to its last: a single turn, or turns and observations until the environment ends the episode."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from actors.engine import FinishedSample, SampleRequest
from actors.environments import Environment, Turn
from orchestrator.types import Sample

STEP_TIMEOUT_S = 60.0  # of one step of an environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What bounds an episode."""

    max_tokens: int  # of the response, observations included
    max_turn_tokens: int | None  # of one turn; None: what is left


async def play(
    first: Awaitable[FinishedSample],
    request: SampleRequest,
    environment: Environment | None,
    ask: Callable[[SampleRequest], Awaitable[FinishedSample]],
    tokenizer: Any,
    rules: Rules,
) -> Sample:
    """Play one episode; tokens are appended as sampled and as observed, and the context of each turn is exactly these.

    An environment that raises, answers with something else than tokens, or not in time, ends the episode; the sample says why.

    Args:
        first: the first turn, already asked for.
        request: of the first turn.
        environment: None: one turn and no more.
        ask: samples a further turn.
        tokenizer: decodes.
        rules: bounds.
    """
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]] = []  # tokens, logprobs, versions, whether the policy's
    left, number, error = rules.max_tokens, 0, ""
    reason: Literal["stop", "length"] = "stop"
    finished = await first
    while True:
        parts.append((finished.token_ids, finished.logprobs, finished.versions, True))
        left -= len(finished.token_ids)
        if environment is None or (finished.finish_reason == "length" and left < 1):
            reason = finished.finish_reason
            break
        ids = tuple(finished.token_ids.tolist())
        turn = Turn(number=number, token_ids=ids, text=tokenizer.decode(ids, skip_special_tokens=True))
        seen, done, error = await _observe(environment, turn)
        if done or error:
            break
        left -= len(seen)
        if left < 1:
            reason = "length"
            break
        parts.append((seen, np.zeros(len(seen), np.float32), np.full(len(seen), finished.versions[-1], np.int32), False))
        number += 1
        context = (*request.prompt_token_ids, *(token for part in parts for token in part[0].tolist()))
        finished = await ask(
            replace(
                request, key=f"{request.key}.{number}", prompt_token_ids=context, seed=turn_seed(request.seed, number),
                max_tokens=min(left, rules.max_turn_tokens or left),
            )
        )  # fmt: skip
    tokens, logprobs, versions = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return Sample(
        token_ids=tokens,
        logprobs=logprobs,
        loss_mask=np.concatenate([np.full(len(part[0]), part[3]) for part in parts]),
        versions=versions,
        finish_reason=reason,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        error=error,
    )


async def _observe(environment: Environment, turn: Turn) -> tuple[np.ndarray, bool, str]:
    """Let the environment answer; returns tokens, whether the episode is over, and what went wrong."""
    try:
        observed, done = await asyncio.wait_for(environment.step(turn), STEP_TIMEOUT_S)
        return np.asarray(list(observed), dtype=np.int32), bool(done), ""
    except Exception as failure:  # noqa: BLE001 - a user's environment may raise anything
        return np.zeros(0, np.int32), True, f"the environment broke off at turn {turn.number}: {type(failure).__name__}: {failure}"


def turn_seed(seed: int, number: int) -> int:
    """Derive the seed of a further turn from the sample's."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))

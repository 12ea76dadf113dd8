"""Rewards behind a URL: OpenRLHF's /get_reward protocol, and a generative judge over an OpenAI-compatible API."""

import itertools
import os
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from actors.rewards.interfaces import Adapted, Batch, openrlhf_answer

BACK_OFF_S = 0.2  # doubled per try
JUDGE_PROMPT = (
    "Rate the response to the prompt from 0 (useless) to 10 (excellent). End with one line `Score: N`.\n\n"
    "[prompt]\n{prompt}\n\n[response]\n{completion}"
)


def get_reward(urls: Sequence[str], *, timeout_s: float, tries: int = 5) -> Adapted:
    """Ask a server of OpenRLHF's protocol: POST {"query", "prompts", "labels"} -> {"rewards", "scores", "extra_logs"}.

    Calls go to the replicas in turn, and after a failure to the next one.

    Args:
        urls: replicas of the server.
        timeout_s: of one call with all its tries; a try gets its share of it.
        tries: requests until the call fails.
    """
    order = itertools.cycle(random.sample(list(urls), len(urls)))

    def call(batch: Batch) -> tuple[Any, dict[str, list[Any]]]:
        body = {
            "query": [batch.prompt + text for text in batch.completions],
            "prompts": [batch.prompt] * len(batch),
            "labels": [batch.label] * len(batch),
        }
        return openrlhf_answer(_post(order, body, {}, tries=tries, timeout_s=timeout_s / tries), len(batch))

    return call


def judge(
    batch: Batch,
    *,
    url: str,
    model: str,
    prompt: str = JUDGE_PROMPT,
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)",
    scale: float = 10.0,
    max_tokens: int = 512,
    api_key_env: str = "",
    tries: int = 3,
    timeout_s: float = 15.0,
) -> list[Any]:
    """Let a language model grade each response.

    Args:
        batch: the responses; all are asked about at once.
        url: of an OpenAI-compatible API, up to /v1.
        model: its name there.
        prompt: with {prompt}, {completion} and {label}.
        pattern: its last match in the judge's words holds the score.
        scale: the score is divided by it.
        max_tokens: of the judge's words.
        api_key_env: environment variable of the key, named in reward.environment too; empty: no key.
        tries: requests until a response has no reward.
        timeout_s: of one request; all tries should fit into reward.timeout_s.
    """
    headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
    target = url.rstrip("/") + "/chat/completions"

    def grade(completion: str) -> Any:
        fields = {"{prompt}": batch.prompt, "{completion}": completion, "{label}": str(batch.label)}
        asked = re.sub(r"\{(?:prompt|completion|label)\}", lambda field: fields[field.group()], prompt)
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "max_tokens": max_tokens, "temperature": 0}
        try:
            answer = _post(itertools.cycle([target]), body, headers, tries=tries, timeout_s=timeout_s)
            words = answer["choices"][0]["message"]["content"]
            return float(re.findall(pattern, words)[-1]) / scale
        except (OSError, ValueError, LookupError, TypeError) as error:
            return ValueError(f"the judge gave no score ({type(error).__name__}: {error})")

    with ThreadPoolExecutor(min(16, len(batch))) as threads:
        return list(threads.map(grade, batch.completions))


def _post(urls: "itertools.cycle[str]", body: dict[str, Any], headers: dict[str, str], *, tries: int, timeout_s: float) -> Any:
    """Send JSON, get JSON; after a failure that another try can mend, to the next URL."""
    for attempt in range(tries):
        url = next(urls)
        try:
            response = requests.post(url, json=body, headers=headers, timeout=timeout_s)
            if response.status_code < 500 and response.status_code != 429:
                response.raise_for_status()
                return response.json()
            cause = f"status {response.status_code}"
        except (requests.ConnectionError, requests.Timeout) as error:
            cause = f"{type(error).__name__}"
        if attempt + 1 < tries:
            time.sleep(min(BACK_OFF_S * 2**attempt, timeout_s / 4))
    raise OSError(f"{url} must answer within {tries} tries, got {cause}")

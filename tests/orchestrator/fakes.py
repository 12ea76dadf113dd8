"""Fakes that implement the ports: a softmax bandit as the policy, so that the real loop really learns, in milliseconds."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import torch

from configs.schema import AlgorithmConfig
from estimators.registry import estimate_advantages
from orchestrator.types import (
    Draw,
    EngineReport,
    Group,
    GroupFacts,
    Prompt,
    Published,
    Reward,
    Sample,
    Sampling,
    ScoredGroup,
    WeightVersion,
)

NUM_ARMS = 4


def prompts(count: int = 6) -> list[Prompt]:
    """Prompts whose answer is an arm."""
    return [
        Prompt(id=f"p{i}", token_ids=(i,), text=f"prompt {i}", columns={"answer": i % NUM_ARMS}) for i in range(count)
    ]


class FakePublication:
    """A snapshot of the bandit."""

    def __init__(self, logits: torch.Tensor, steps: int) -> None:
        self.logits, self.steps = logits.clone(), steps

    async def buckets(self) -> AsyncIterator[torch.Tensor]:
        yield self.logits

    async def published(self) -> Published:
        version = WeightVersion(steps=self.steps, digest=str(float(self.logits.sum())))
        return Published(version=version, num_tensors=1, num_bytes=4, probe_token_ids=(0,), probe_logprobs=())


class FakeRollout:
    """Samples arms; `delay(draw, version)` seconds per group."""

    def __init__(self, delay=lambda draw: 0.0) -> None:
        self.logits, self.version, self.delay = torch.zeros(0), -1, delay
        self.generated: list[int] = []

    async def generate(self, draw: Draw, sampling: Sampling) -> tuple[Group, GroupFacts]:
        logits, version = self.logits, self.version
        await asyncio.sleep(self.delay(draw))
        logprobs = (logits[draw.prompt.token_ids[0]]).log_softmax(-1)
        rng = np.random.default_rng([sampling.seed, draw.number])
        arms = rng.choice(NUM_ARMS, size=sampling.num_samples, p=logprobs.exp().numpy() / logprobs.exp().numpy().sum())
        samples = tuple(
            Sample(
                token_ids=np.array([arm], dtype=np.int32),
                logprobs=np.array([logprobs[arm]], dtype=np.float32),
                loss_mask=np.ones(1, dtype=bool),
                versions=np.array([version], dtype=np.int32),
                finish_reason="stop",
                text=str(arm),
                error="",
            )
            for arm in arms
        )
        self.generated.append(draw.number)
        facts = GroupFacts(
            draw=draw.number,
            num_prompt_tokens=1,
            num_tokens=(1,) * len(samples),
            truncated=(False,) * len(samples),
            started_version=version,
            newest_version=version,
            worker="fake",
            generate_s=0.0,
        )
        return Group(draw=draw, samples=samples), facts

    async def load(self, publication: FakePublication) -> Sequence[EngineReport]:
        published = await publication.published()
        self.logits, self.version = publication.logits, publication.steps
        return [
            EngineReport(worker="fake", version=published.version, num_tensors=1, probe_abs_diff=0.0, paused_s=0.0)
        ]


class FakeRewarder:
    """1 for the right arm; `invalid(draw, index)` says which rewards cannot be had."""

    def __init__(self, invalid=lambda draw, index: False) -> None:
        self.invalid = invalid

    async def score(self, draw: Draw, group: Group, num_samples: int) -> tuple[Reward, ...]:
        answer, number = str(group.draw.prompt.columns["answer"]), group.draw.number
        return tuple(
            Reward(value=float("nan"), cause="error", parts={}, detail="the judge is out", answer="")
            if self.invalid(number, i)
            else Reward(value=float(sample.text == answer), cause="ok", parts={}, detail="", answer=sample.text)
            for i, sample in enumerate(group.samples)
        )


class FakeLearner:
    """Policy gradient on the bandit's logits with the product's own advantages."""

    def __init__(self, algorithm: AlgorithmConfig, num_prompts: int = 6, lr: float = 2.0) -> None:
        self.algorithm, self.lr = algorithm, lr
        self.logits = torch.zeros(num_prompts, NUM_ARMS)
        self.trained: list[tuple[int, int]] = []  # (draw, staleness)
        self.exported: Path | None = None
        self.steps = 0

    async def step(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        rewards = torch.tensor([[r.value for r in g.rewards] for g in groups])
        valid = torch.tensor([[r.valid for r in g.rewards] for g in groups])
        lengths = torch.ones_like(rewards)
        advantages = estimate_advantages(self.algorithm, rewards, valid, lengths)
        logits = self.logits.clone().requires_grad_()
        for row, group in zip(advantages, groups, strict=True):
            logprobs = logits[group.draw.prompt.token_ids[0]].log_softmax(-1)
            for advantage, sample in zip(row, group.group_ref.samples, strict=True):
                (-advantage * logprobs[int(sample.token_ids[0])] / advantages.numel()).backward(retain_graph=True)
            self.trained.append((group.draw.number, self.steps - group.facts.started_version))
        if logits.grad is not None:
            self.logits -= self.lr * logits.grad
        self.steps += 1
        return {}

    def publish(self, steps: int) -> FakePublication:
        return FakePublication(self.logits, steps)

    async def restart(self) -> None:
        self.logits, self.steps = torch.zeros_like(self.logits), 0

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        torch.save((self.logits, self.steps), folder / "bandit.pt")

    async def load(self, folder: Path) -> None:
        self.logits, self.steps = torch.load(folder / "bandit.pt")

    async def export(self, folder: Path) -> None:
        self.exported = folder

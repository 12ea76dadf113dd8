"""One step of learning: logprobs where needed -> KL in reward -> advantages -> loss -> optimizer update.

Every rank runs `Updater.step` on the same receipts. Scalars (rewards, counts, KL sums) are known everywhere, so advantages and
denominators are identical on every rank; tokens are fetched only by the rank that computes them, and a group lies on one rank.

What is not computed:
- old logprobs, where a step is one update: pi_old is the policy itself, ratio 1, so they are the update's own, detached;
- the same for the KL in reward of a group-local estimator: a group's KL, then its advantages, come from its own forward;
- samples whose advantage is exactly 0, where no other term gives them a gradient. Denominators count them all the same.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from estimators.kl import adapt_beta, sequence_kl
from estimators.registry import is_group_local
from learner.advantages import outcome_advantages, sequence_kls, token_advantages
from learner.deepspeed_engine import Engine, Update
from learner.guard import Guard
from learner.logprobs import logprobs_of
from learner.loss import Tokens, loss_of, pad, pad_tokens
from learner.packing import MicroBatch, SampleKey, build_tree, deal, micro_batch
from learner.ranks import max_over_ranks, sum_over_ranks
from learner.scalars import Scalars, read_receipts, std_of
from learner.tally import Tally
from learner.watch import Watch
from orchestrator.ports import GroupsLost
from orchestrator.types import Group, ScoredGroup, StepMetrics

Fetch = Callable[[Sequence[Any]], list[Any]]  # objects from the store, given their refs; None for one that is lost
Arrays = dict[SampleKey, np.ndarray]  # per sample, (T,)


@dataclass(slots=True, kw_only=True)
class Step:
    """A step in work on this rank; keys are (index of the group in the step, index of the sample)."""

    scalars: Scalars
    groups: dict[int, Group]  # this rank's
    parts: list[list[int]]  # per mini-batch, this rank's groups
    wholes: list[list[int]]  # per mini-batch, all ranks' groups
    live_PK: Tensor  # bool, samples to compute
    kl_PK: Tensor  # float64, KL sums of this rank's samples, 0 elsewhere
    advantages_PK: Tensor  # float64, of all ranks; of this rank's alone while they are found on the fly
    tally: Tally
    reference: Arrays = field(default_factory=dict)  # empty where beta is 0
    old: Arrays = field(default_factory=dict)  # empty where the update's own forward gives them
    token_advantages: Arrays = field(default_factory=dict)  # reinforce_plus_plus_token alone
    on_the_fly: bool = False  # KL and advantages of a group come from its own forward in the update


class Updater:
    """Turns receipts into weight updates. State between steps: beta, the guard's count, and the engine's."""

    def __init__(self, engine: Engine, config: Config, rank: int, num_ranks: int) -> None:
        algorithm, learner = config.algorithm, config.learner
        self.engine = engine
        self.beta = algorithm.beta
        self.guard = Guard(config, rank)
        self._config, self._algorithm, self._learner = config, algorithm, learner
        self._rank, self._num_ranks = rank, num_ranks
        self._device = engine.module.device
        self._watch = Watch(engine, config.model.dtype, enabled=learner.lora.rank == 0)
        self._uses_kl = algorithm.beta > 0
        self._kl_in_reward = self._uses_kl and bool(algorithm.kl_in_reward)
        self._per_token = algorithm.advantage_estimator == "reinforce_plus_plus_token"
        self._one_update = learner.num_mini_batches * learner.num_epochs == 1
        self._every_token_counts = (self._uses_kl and not self._kl_in_reward) or algorithm.entropy_coef > 0
        one = np.zeros(1, dtype=np.int64)
        self._filler = micro_batch([[build_tree(one, [one], [(-1, -1)])]])

    def step(self, receipts: Sequence[ScoredGroup], fetch: Fetch) -> StepMetrics:
        """Train on P groups.

        Args:
            receipts: of the step, the same on every rank.
            fetch: gets objects from the store, given their refs; None for one that is lost.

        Returns:
            Metrics over all ranks, the same on every rank.

        Raises:
            GroupsLost: on every rank, where any rank cannot fetch; nothing has changed.
            LearnerError: too many non-finite updates in a row.
        """
        step = self._open(receipts, fetch)
        with _timed(step.tally, "time/logprob_s"):
            self._score_reference(step)
            self._score_old(step)
        if self._per_token:
            self._find_token_advantages(step)
        elif self._kl_in_reward and not step.on_the_fly:
            kl_PK = sum_over_ranks(step.kl_PK, self._device)
            step.advantages_PK = outcome_advantages(self._algorithm, step.scalars, kl_PK, self.beta)
            step.live_PK = self._live(step.scalars, step.advantages_PK)
        updates = [
            self._update(step, own, whole, first=epoch == 0)
            for epoch in range(self._learner.num_epochs)
            for own, whole in zip(step.parts, step.wholes, strict=True)
        ]
        return self._close(step, updates)

    def _open(self, receipts: Sequence[ScoredGroup], fetch: Fetch) -> Step:
        """Read the scalars, deal the groups to ranks, fetch this rank's."""
        scalars, tally = read_receipts(receipts, self._config), Tally()
        zeros_PK = torch.zeros_like(scalars.rewards_PK)
        advantages_PK, live_PK = zeros_PK, scalars.counted_PK
        if not self._kl_in_reward and not self._per_token:
            advantages_PK = outcome_advantages(self._algorithm, scalars, zeros_PK, 0.0)
            live_PK = self._live(scalars, advantages_PK)
        wholes = [part.tolist() for part in np.array_split(np.arange(len(receipts)), self._learner.num_mini_batches)]
        parts = [self._deal(scalars, live_PK, whole) for whole in wholes]
        own = sorted(g for part in parts for g in part)
        with _timed(tally, "time/fetch_s"):
            groups = dict(zip(own, fetch([receipts[g].group_ref for g in own]), strict=True))
            referred = [g for g in own if receipts[g].reference_refs]
            found = fetch([receipts[g].reference_refs[0] for g in referred])
            self._agree_on_lost(receipts, [*zip(own, groups.values(), strict=True), *zip(referred, found, strict=True)])
        reference = {(g, k): array for g, arrays in zip(referred, found, strict=True) for k, array in enumerate(arrays)}
        return Step(
            scalars=scalars,
            groups=groups,
            parts=parts,
            wholes=wholes,
            live_PK=live_PK,
            kl_PK=zeros_PK.clone(),
            advantages_PK=advantages_PK,
            tally=tally,
            reference=reference,
        )

    def _agree_on_lost(self, receipts: Sequence[ScoredGroup], fetched: Sequence[tuple[int, Any]]) -> None:
        """Raise on every rank where one of them lacks a group, before a collective of the step can wait for it."""
        lost_P = torch.zeros(len(receipts), dtype=torch.float64)
        lost_P[[g for g, found in fetched if found is None]] = 1.0
        lost = sum_over_ranks(lost_P, self._device).nonzero().flatten().tolist()
        if lost:
            raise GroupsLost([receipts[g].draw.number for g in lost])

    def _live(self, scalars: Scalars, advantages_PK: Tensor) -> Tensor:
        """Say which samples have a gradient."""
        return scalars.counted_PK if self._every_token_counts else scalars.counted_PK & (advantages_PK != 0)

    def _deal(self, scalars: Scalars, live_PK: Tensor, whole: list[int]) -> list[int]:
        """Choose this rank's groups of a mini-batch, balanced by tokens; groups without a live sample go nowhere."""
        live = [g for g in whole if bool(live_PK[g].any())]
        tokens = torch.where(live_PK, scalars.num_tokens_PK, 0).sum(dim=1).tolist()
        costs = [float(scalars.num_prompt_tokens[g] + tokens[g]) for g in live]
        return [live[i] for i in deal(costs, self._num_ranks)[self._rank]]

    def _score_reference(self, step: Step) -> None:
        """With an adapter, the reference is the model without it."""
        if self._uses_kl and self._learner.lora.rank > 0:
            with self.engine.module.model.disable_adapter():  # pyright: ignore
                step.reference = self._score(step)

    def _score_old(self, step: Step) -> None:
        """Find pi_old where the update's own forward cannot give it in time, and with it the KL of each sample."""
        needs_kl = self._kl_in_reward or (self._per_token and self._uses_kl)
        if self._algorithm.old_logprobs == "rollout":
            step.old = {(g, k): step.groups[g].samples[k].logprobs for g, k in self._own_live(step)}
        elif needs_kl and self._one_update and is_group_local(self._algorithm) and self._groups_fit(step):
            step.on_the_fly = True
        elif needs_kl or not self._one_update:
            step.old = self._score(step)
        if needs_kl and not step.on_the_fly:
            step.kl_PK = sequence_kls(step.old, step.reference, step.groups, step.kl_PK)

    def _groups_fit(self, step: Step) -> bool:
        """Say whether on every rank each group fits into one micro-batch."""
        batches = self._plan(step, sorted(step.groups), whole_groups=True)
        largest = max((batch.num_tokens for batch in batches), default=0)
        budget = self._learner.max_tokens_per_micro_batch
        return bool(max_over_ranks(torch.tensor([float(largest)]), self._device)[0] <= budget)

    def _find_token_advantages(self, step: Step) -> None:
        step.token_advantages = token_advantages(
            self._algorithm,
            step.scalars,
            self._own_live(step),
            step.groups,
            step.old,
            step.reference,
            self.beta,
            self._device,
        )

    def _update(self, step: Step, own: list[int], whole: list[int], first: bool) -> Update | None:
        """Make one optimizer update; None where nothing in it has a gradient: then the weights stand still."""
        totals = step.scalars.totals(whole)
        signal = int(step.live_PK[whole].sum())
        with _timed(step.tally, "time/forward_backward_s"):
            if signal and not step.on_the_fly:
                self._accumulate(step, own, totals, first)
            elif signal:
                found = self._accumulate(step, own, totals, first)
                signal = int(sum_over_ranks(torch.tensor([float(found)]), self._device)[0])
                if not signal:
                    self.engine.discard()
        if not signal:
            self.engine.pass_by()
            return None
        with _timed(step.tally, "time/optimizer_s"):
            before = self._watch.look()
            update = self.engine.update()
            changed, watched = self._watch.compare(before)
            step.tally.add(sync__changed_frac=changed, watched=watched)
        self.guard.check(update, {g: step.groups[g] for g in own}, step.advantages_PK)
        return update

    def _accumulate(self, step: Step, own: list[int], totals: Any, first: bool) -> int:
        """Run this rank's micro-batches forward and backward; return how many samples had a gradient."""
        batches: list[MicroBatch | None] = list(self._plan(step, own, whole_groups=step.on_the_fly))
        batches += [None] * (self._most(len(batches)) - len(batches))
        found = 0
        with self.engine.accumulate():
            for batch in batches:
                if batch is None:
                    logprobs, _ = self.engine(self._filler)
                    self.engine.backward(logprobs.sum() * 0.0)
                    continue
                logprobs, entropy = self.engine(batch, with_entropy=True)
                tokens = self._tokens(step, batch, logprobs, entropy, first)
                advantages = self._advantages(step, batch, tokens)
                beta = self.beta if self._uses_kl and not self._kl_in_reward else 0.0
                loss = loss_of(tokens, advantages, self._algorithm, beta, totals, step.tally)
                signal = len(batch.keys) if self._every_token_counts else int((advantages != 0).any(dim=1).sum())
                found += signal
                if signal or self.engine.uneven_hangs:
                    self.engine.backward(loss)
                step.tally.add(learner__tokens=batch.num_tokens, samples_computed=len(batch.keys) if first else 0)
        return found

    def _tokens(self, step: Step, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, first: bool) -> Tokens:
        """Lay out a micro-batch, and note the KL of its samples where nothing did before."""
        own_is_old = self._one_update and self._algorithm.old_logprobs == "recompute"
        tokens = pad_tokens(batch, logprobs, entropy, step.groups, {} if own_is_old else step.old, step.reference)
        if first and self._uses_kl and (step.on_the_fly or not self._kl_in_reward):
            kl_N = sequence_kl(tokens.old_NT, tokens.reference_NT, tokens.mask_NT)
            step.kl_PK[tuple(torch.tensor(batch.keys).T)] = kl_N.cpu()
        return tokens

    def _advantages(self, step: Step, batch: MicroBatch, tokens: Tokens) -> Tensor:
        """Return the advantages of a micro-batch, (N, 1) or (N, T); on the fly, of its whole groups."""
        device = tokens.mask_NT.device
        if self._per_token:
            return pad([step.token_advantages[key] for key in batch.keys]).to(device)
        if step.on_the_fly:
            groups = sorted({g for g, _ in batch.keys})
            part = step.scalars.rows(groups)
            step.advantages_PK[groups] = outcome_advantages(self._algorithm, part, step.kl_PK[groups], self.beta)
        return step.advantages_PK[tuple(torch.tensor(batch.keys).T)][:, None].to(device)

    def _close(self, step: Step, updates: Sequence[Update | None]) -> StepMetrics:
        """Adapt beta and make the metrics of the step."""
        counted_PK, tally = step.scalars.counted_PK, step.tally
        samples = int(counted_PK.sum())
        if self._uses_kl and self._rank == 0:
            tally.add(kl_samples=samples)
        tally.add(kl__ref=step.kl_PK.sum())
        tally.raise_to("learner/optimizer_mib", self.engine.optimizer_bytes() / 2**20)
        metrics = tally.reduced(self._device)
        if not self._per_token:
            advantages_PK = step.advantages_PK
            if step.on_the_fly:
                advantages_PK = sum_over_ranks(advantages_PK, self._device)
            metrics["advantage/std"] = std_of(advantages_PK, counted_PK)
        metrics["learner/samples_skipped_frac"] = 1.0 - metrics.pop("samples_computed") / counted_PK.numel()
        metrics["learner/trained_parameters"] = float(self.engine.num_trained)
        made = [update for update in updates if update is not None]
        metrics["optim/skipped"] = float(sum(update.skipped for update in made))
        if made:
            metrics["optim/grad_norm"] = made[-1].grad_norm
            metrics["optim/lr"] = made[-1].lr
        for name in ("loss/policy", "loss/kl", "loss/entropy"):
            metrics[name] /= len(updates)
        if self._uses_kl:
            metrics["algorithm/beta"] = self.beta
            target = self._algorithm.kl_target
            if target is not None and samples:
                horizon = self._algorithm.kl_horizon
                self.beta = adapt_beta(self.beta, metrics["kl/ref"], target, samples, horizon)
        self._watch.warn(metrics)
        return metrics

    def _score(self, step: Step) -> Arrays:
        """Compute logprobs of this rank's live samples without gradient."""
        batches: list[MicroBatch] = self._plan(step, sorted(step.groups))
        found: Arrays = {}
        for batch in batches:
            found |= {key: part.numpy() for key, part in logprobs_of(self.engine, batch).items()}
        for _ in range(self._most(len(batches)) - len(batches)):
            logprobs_of(self.engine, self._filler)
        return found

    def _plan(self, step: Step, own: Sequence[int], whole_groups: bool = False) -> list[MicroBatch]:
        chosen = {g: torch.nonzero(step.live_PK[g])[:, 0].tolist() for g in own}
        return self.engine.module.plan(
            step.groups,
            chosen,
            max_tokens=self._learner.max_tokens_per_micro_batch,
            share=self._learner.shared_prompt,
            whole_groups=whole_groups,
        )

    def _own_live(self, step: Step) -> list[SampleKey]:
        return [(g, k) for g in sorted(step.groups) for k in torch.nonzero(step.live_PK[g])[:, 0].tolist()]

    def _most(self, count: int) -> int:
        """Return how many micro-batches every rank must run."""
        if not self.engine.uneven_hangs:
            return count
        return int(max_over_ranks(torch.tensor([float(count)]), self._device)[0])


@contextmanager
def _timed(tally: Tally, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    tally.spend(name, time.perf_counter() - began)

"""Groups in flight: drawn, generated, scored, handed out in draw order, and every one accounted for.

Staleness is a number. `refill` keeps (max_staleness + 1) * P groups in flight; `take` first waits for every group that the next
step would make too old, then fills up with whatever finished, so that at 0 timing never changes the result.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass

from orchestrator.ports import GroupFailed, Reference, Rewarder, Rollout
from orchestrator.prompts import PromptStream
from orchestrator.types import Draw, Sampling, ScoredGroup

MIN_VALID = 2  # rewards without which a group has no baseline


class FeedError(RuntimeError):
    """The feed cannot deliver groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedState:
    """Where a feed stands between two steps; with it a resumed run trains the same prompts."""

    drawn: int
    trained: int
    filtered: int
    failed: int
    in_flight: list[int]  # draw numbers, to be drawn again


@dataclass(slots=True)
class Ledger:
    """Where every prompt is: drawn = trained + filtered + failed + in flight."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0

    def check(self, in_flight: int) -> None:
        """Raise FeedError when a group is lost or counted twice."""
        if self.drawn != self.trained + self.filtered + self.failed + in_flight:
            raise FeedError(
                f"every drawn prompt must be trained, filtered, failed or in flight, got {self} with {in_flight} in flight. "
                "This is a fault of rlooper; please report it with the run folder."
            )


class Scoring:
    """One draw to one scored group: generation, then reward and reference at the same time."""

    def __init__(
        self, rollout: Rollout, rewarder: Rewarder, reference: Reference | None, sampling: Sampling
    ) -> None:
        self._rollout, self._rewarder, self._reference, self._sampling = rollout, rewarder, reference, sampling

    async def __call__(self, draw: Draw) -> ScoredGroup:
        """Generate and score one group."""
        group_ref, facts = await self._rollout.generate(draw, self._sampling)
        rewards = self._rewarder.score(group_ref, self._sampling.num_samples)
        if self._reference is None:
            return ScoredGroup(
                draw=draw, facts=facts, group_ref=group_ref, reference_refs=(), rewards=await rewards
            )
        scored, reference_ref = await asyncio.gather(rewards, self._reference.logprobs(group_ref))
        return ScoredGroup(
            draw=draw, facts=facts, group_ref=group_ref, reference_refs=(reference_ref,), rewards=scored
        )


@dataclass(slots=True, eq=False)
class _Flight:
    started_version: int
    task: "asyncio.Task[ScoredGroup]"


class Feed:
    """Bounded work in flight between the prompt stream and the learner."""

    def __init__(
        self,
        stream: PromptStream,
        score: Callable[[Draw], Coroutine[None, None, ScoredGroup]],
        *,
        num_groups: int,
        prompts_per_step: int,
        max_staleness: int,
    ) -> None:
        self.ledger = Ledger()
        self._stream, self._score = stream, score
        self._remaining = num_groups  # groups that the run still wants to start
        self._num, self._staleness = prompts_per_step, max_staleness
        self._version = 0
        self._next = 0  # number of the next new draw
        self._redraw: list[int] = []  # draws of a resumed run that were in flight
        self._flights: dict[int, _Flight] = {}  # by draw number
        self._taken: set[int] = set()
        self._last_cause = ""

    @property
    def in_flight(self) -> int:
        """Groups drawn and not yet trained, filtered or failed."""
        return len(self._flights) + len(self._taken)

    def refill(self, version: int) -> None:
        """Start groups until (max_staleness + 1) * P are in flight, never beyond what the last step needs."""
        self._version = version
        room = (self._staleness + 1) * self._num - len(self._flights)
        for _ in range(min(room, self._remaining)):
            self._remaining -= 1
            self._start()

    def state(self) -> FeedState:
        """Say where the feed stands (between two steps)."""
        return FeedState(**asdict(self.ledger), in_flight=sorted(self._flights))

    def restore(self, state: FeedState) -> None:
        """Go on where a feed stood; what was in flight is drawn again at the next refill."""
        self.ledger = Ledger(
            drawn=state.drawn - len(state.in_flight), trained=state.trained, filtered=state.filtered, failed=state.failed
        )
        self._remaining -= state.trained
        self._next = state.drawn
        self._redraw = list(state.in_flight)

    async def take(self) -> list[ScoredGroup]:
        """Wait for P scored groups; returned in draw order.

        A group that killed its workers, or has fewer than two valid rewards, is dropped, counted and replaced.

        Raises:
            FeedError: as many groups were dropped as a step wants.
        """
        dropped = 0
        while True:
            ready = [number for number, flight in self._flights.items() if flight.task.done()]
            for number in ready:
                dropped += self._drop_invalid(number)
            if dropped >= max(self._num, 4):
                raise FeedError(
                    f"groups must be generated and have at least {MIN_VALID} valid rewards, got {dropped} dropped in one step. "
                    f"Last cause: {self._last_cause}"
                )
            chosen = self._choose()
            if chosen is not None:
                return [self._hand_out(number) for number in chosen]
            waiting = [flight.task for flight in self._flights.values() if not flight.task.done()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def commit(self, groups: list[ScoredGroup]) -> None:
        """Count groups as trained, and check the ledger."""
        for group in groups:
            self._taken.remove(group.draw.number)
        self.ledger.trained += len(groups)
        self.ledger.check(self.in_flight)

    def metrics(self) -> dict[str, float]:
        """Report the ledger."""
        ledger = self.ledger
        return {
            "ledger/drawn": ledger.drawn,
            "ledger/trained": ledger.trained,
            "ledger/filtered": ledger.filtered,
            "ledger/failed": ledger.failed,
            "ledger/in_flight": self.in_flight,
        }

    async def close(self) -> None:
        """Cancel what is in flight."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        if self._redraw:
            number = self._redraw.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        draw = self._stream.draw(number)
        self.ledger.drawn += 1
        self._flights[draw.number] = _Flight(self._version, asyncio.create_task(self._score(draw)))

    def _choose(self) -> list[int] | None:
        """Pick P finished groups: those that may not grow older, then the earliest; None while one of them is unfinished."""
        due = [n for n, f in self._flights.items() if f.started_version <= self._version - self._staleness]
        rest = [n for n, f in self._flights.items() if n not in due and f.task.done()]
        chosen = sorted((due + rest)[: max(self._num, len(due))])
        if len(chosen) < self._num or not all(self._flights[n].task.done() for n in chosen):
            return None
        return chosen[: self._num]

    def _drop_invalid(self, number: int) -> int:
        try:
            group = self._flights[number].task.result()  # raises what broke the run
        except GroupFailed as error:
            self._last_cause = str(error)
            self.ledger.failed += 1
        else:
            if sum(reward.valid for reward in group.rewards) >= MIN_VALID:
                return 0
            details = [r.detail for r in group.rewards if r.detail]
            self._last_cause = (details or [group.rewards[0].cause])[-1]
            self.ledger.filtered += 1
        del self._flights[number]
        self._start()
        return 1

    def _hand_out(self, number: int) -> ScoredGroup:
        self._taken.add(number)
        return self._flights.pop(number).task.result()

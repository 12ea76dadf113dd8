"""Groups in flight: drawn, generated, scored, handed out in draw order, and every one accounted for.

Staleness is a number. `refill` keeps (max_staleness + 1) * P groups in flight; `take` first waits for every group that the next
step would make too old, then fills up with whatever finished, so that at 0 timing never changes the result.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2): a group whose rewards are all equal teaches nothing, so up to
`max_refill` more groups are started per step to take the places of such groups. Whether one is needed depends on the rewards of
the draws before it alone, so this too is independent of timing at staleness 0.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict, dataclass

from orchestrator.ports import DataLost, GroupFailed, Reference, Rewarder, Rollout, Wait
from orchestrator.prompts import MixedStream, PromptStream
from orchestrator.types import Draw, Sampling, ScoredGroup

MAX_LOSSES = 3  # times that a group may be lost with a node before it is given up
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


EMPTY = FeedState(drawn=0, trained=0, filtered=0, failed=0, in_flight=[])


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
        """Generate and score one group; again from the start where it is lost with a node meanwhile.

        Raises:
            GroupFailed: it cannot be had.
        """
        for _ in range(MAX_LOSSES):
            try:
                return await self._attempt(draw)
            except DataLost as error:
                cause = error
        raise GroupFailed(f"draw {draw.number} must reach its scores, got lost {MAX_LOSSES} times. Last: {cause}")

    async def _attempt(self, draw: Draw) -> ScoredGroup:
        group_ref, facts = await self._rollout.generate(draw, self._sampling)
        rewards = self._rewarder.score(draw, group_ref, self._sampling.num_samples)
        if self._reference is None:
            return ScoredGroup(
                draw=draw, facts=facts, group_ref=group_ref, reference_refs=(), rewards=await rewards
            )
        scored, reference_ref = await asyncio.gather(rewards, self._reference.logprobs(draw, group_ref))
        return ScoredGroup(
            draw=draw, facts=facts, group_ref=group_ref, reference_refs=(reference_ref,), rewards=scored
        )


@dataclass(slots=True, eq=False)
class _Flight:
    started_version: int
    task: "asyncio.Future[ScoredGroup]"
    prompt: str  # its id
    started: float  # monotonic seconds
    dull: bool = False  # it teaches nothing: all its rewards are equal


class Feed:
    """Bounded work in flight between the prompt stream and the learner."""

    def __init__(
        self,
        stream: PromptStream | MixedStream,
        score: Callable[[Draw], Coroutine[None, None, ScoredGroup]],
        *,
        num_groups: int,
        prompts_per_step: int,
        max_staleness: int,
        max_refill: int,
        has_signal: Callable[[ScoredGroup], bool],
    ) -> None:
        """Take the parts and the bounds.

        Args:
            stream: the prompts, by draw number.
            score: makes a scored group of a draw.
            num_groups: groups that the whole run trains.
            prompts_per_step: P.
            max_staleness: versions that may lie between a group's start and its training.
            max_refill: groups that a step may start in the place of groups without signal.
            has_signal: whether a group's rewards can teach anything.
        """
        self.ledger = Ledger()
        self._stream, self._score, self._has_signal, self._max_refill = stream, score, has_signal, max_refill
        self._num_groups, self._num, self._staleness = num_groups, prompts_per_step, max_staleness
        self._remaining = num_groups  # groups that the run still wants to start
        self._version = 0
        self._next = 0  # number of the next new draw
        self._redraw: list[int] = []  # draws of a resumed run that were in flight
        self._flights: dict[int, _Flight] = {}  # by draw number
        self._taken: set[int] = set()
        self._last_cause = ""
        self._arrived: list[int] = []  # flights that landed since take() looked
        self._landing = asyncio.Event()

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
        return FeedState(**asdict(self.ledger), in_flight=sorted({*self._flights, *self._taken}))

    async def restore(self, state: FeedState) -> None:
        """Go to where a feed stood, whatever this one has in flight; what was in flight there is drawn again at the next refill."""
        await self.close()
        self._flights, self._taken = {}, set()
        self.ledger = Ledger(
            drawn=state.drawn - len(state.in_flight), trained=state.trained, filtered=state.filtered, failed=state.failed
        )
        self._remaining = self._num_groups - state.trained
        self._next = state.drawn
        self._redraw = list(state.in_flight)

    async def take(self) -> list[ScoredGroup]:
        """Wait for P scored groups; returned in draw order.

        A group that killed its workers, or has fewer than two valid rewards, is dropped, counted and replaced. One without signal is
        replaced as long as max_refill allows, and trained only where it must fill a place.

        Raises:
            FeedError: as many groups were dropped as a step wants.
        """
        dropped, refilled, landed = 0, 0, set[int]()
        arrived = list(self._flights)
        while True:
            self._arrived.clear()
            self._landing.clear()
            for number in arrived:
                flight = self._flights.get(number)
                if flight is None or not flight.task.done() or number in landed:
                    continue
                if self._drop_invalid(number):
                    dropped += 1
                    continue
                landed.add(number)
                if self._max_refill and not self._has_signal(flight.task.result()):
                    flight.dull = True
                    if refilled < self._max_refill:
                        refilled += 1
                        self._start()
            if dropped >= max(self._num, 4):
                raise FeedError(
                    f"groups must be generated and have at least {MIN_VALID} valid rewards, got {dropped} dropped in one step. "
                    f"Last cause: {self._last_cause}"
                )
            chosen, filtered = self._choose(refilled) if len(landed) >= self._num else ([], [])
            if len(chosen) == self._num:
                for number in filtered:
                    del self._flights[number]
                self.ledger.filtered += len(filtered)
                return [self._hand_out(number) for number in chosen]
            await self._landing.wait()
            arrived = list(self._arrived)

    def commit(self, groups: list[ScoredGroup]) -> None:
        """Count groups as trained, and check the ledger."""
        for group in groups:
            self._taken.remove(group.draw.number)
        self.ledger.trained += len(groups)
        self.ledger.check(self.in_flight)

    def redo(self, groups: list[ScoredGroup], lost: Collection[int]) -> None:
        """Take groups back that were handed out and not trained; the lost ones are drawn again under the present weights."""
        for group in groups:
            number = group.draw.number
            self._taken.remove(number)
            if number in lost:
                self._launch(group.draw)
            else:
                self._flights[number] = _Flight(group.facts.started_version, _finished(group), group.draw.prompt.id, time.monotonic())
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

    def status(self) -> dict[str, object]:
        """Say what is in flight and for how long, oldest draw first."""
        now = time.monotonic()
        flights = [
            {"draw": number, "prompt": f.prompt, "done": f.task.done(), "since_s": round(now - f.started, 1)}
            for number, f in sorted(self._flights.items())
        ]
        return {"ledger": asdict(self.ledger), "version": self._version, "in_flight": flights}

    def waits(self) -> list[Wait]:
        """Say nothing: whatever a group waits for has its owner in a pool."""
        return []

    def _start(self) -> None:
        if self._redraw:
            number = self._redraw.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        self.ledger.drawn += 1
        self._launch(self._stream.draw(number))

    def _launch(self, draw: Draw) -> None:
        task = asyncio.create_task(self._score(draw))
        task.add_done_callback(lambda _, number=draw.number: self._land(number))
        self._flights[draw.number] = _Flight(self._version, task, draw.prompt.id, time.monotonic())

    def _land(self, number: int) -> None:
        self._arrived.append(number)
        self._landing.set()

    def _choose(self, refilled: int) -> tuple[list[int], list[int]]:
        """Pick P finished groups in draw order, and the groups without signal whose places were taken.

        The oldest go first, those with signal before the others. Nothing is picked while that would let another group grow too old.
        """
        if any(f.started_version + self._staleness <= self._version for f in self._flights.values() if not f.task.done()):
            return [], []
        done = sorted((f.started_version, n) for n, f in self._flights.items() if f.task.done())
        bright = [n for _, n in done if not self._flights[n].dull]
        dull = [n for _, n in done if self._flights[n].dull]
        num_dull = min(max(self._num - len(bright), 0), len(dull) - refilled)
        chosen, filtered = bright[: self._num] + dull[:num_dull], dull[num_dull : num_dull + refilled]
        left = [f.started_version for n, f in self._flights.items() if n not in chosen and n not in filtered]
        for version in {*left}:  # what started at it or before must fit into the steps that may still train it
            steps = version + self._staleness - self._version
            if sum(started <= version for started in left) > self._num * steps:
                return [], []
        return sorted(chosen), filtered

    def _drop_invalid(self, number: int) -> bool:
        """Drop and replace a finished group that cannot be trained."""
        try:
            group = self._flights[number].task.result()  # raises what broke the run
        except GroupFailed as error:
            self._last_cause = str(error)
            self.ledger.failed += 1
        else:
            if sum(reward.valid for reward in group.rewards) >= MIN_VALID:
                return False
            details = [r.detail for r in group.rewards if r.detail]
            self._last_cause = (details or [group.rewards[0].cause])[-1]
            self.ledger.filtered += 1
        del self._flights[number]
        self._start()
        return True

    def _hand_out(self, number: int) -> ScoredGroup:
        self._taken.add(number)
        return self._flights.pop(number).task.result()


def _finished(group: ScoredGroup) -> "asyncio.Future[ScoredGroup]":
    future = asyncio.get_running_loop().create_future()
    future.set_result(group)
    return future

"""A fleet without engines: answers, failures, crashes, versions and the order of completion are the test's to script.

No threads and no real time: it runs under any event loop, a virtual clock's too, and does the same every time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio
import numpy as np

from asyncrl.core.failures import EngineCrashError
from asyncrl.core.ports import (
    Accepted,
    ApplyReport,
    EngineCrashed,
    GenerateRequest,
    GenerationEvent,
    Publication,
    TurnFinished,
    TurnProgress,
    WeightFeed,
    WeightsVersion,
)
from asyncrl.core.types import FinishReason, Span, Turn, join_turns

Answer = Callable[[GenerateRequest], Sequence[int]]


def echo(request: GenerateRequest) -> Sequence[int]:
    """The prompt's tokens, cut to `max_tokens`."""
    return request.prompt_ids[: request.sampling["max_tokens"]].tolist()


@dataclass
class EngineCall:
    """One `generate` call in flight."""

    session: str
    requests: Sequence[GenerateRequest]
    turns: list[Turn | None]
    """What each request has so far; its end is in the finish reason."""
    replica: str = ""
    """Empty while it is on none: after a crash, or when none is up."""
    version: int = 0
    """What that replica served when it took the call."""
    go: anyio.Event = field(default_factory=anyio.Event)
    attempt: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    crash: EngineCrashError | None = None

    @property
    def pending(self) -> list[int]:
        return [index for index, turn in enumerate(self.turns) if not complete(turn)]


def complete(turn: Turn | None) -> bool:
    return turn is not None and turn.finish_reason is not FinishReason.ABORTED


class FakeFleet:
    """`EngineFleet`. With `hold`, a call answers once the test calls `release`; else at once, or after `pace(session)`.

    With `chunk_tokens` tokens come in pieces, so many a request, each after `pace(session)`; shorter responses are
    complete earlier, and what was told survives a crash. Without, all of a response comes at once, and a call during
    which its replica changes its version comes back in two spans: the first half by the old one.
    """

    def __init__(
        self,
        *,
        answer: Answer = echo,
        hold: bool = False,
        pace: Callable[[str], Awaitable[None]] | None = None,
        num_replicas: int = 1,
        chunk_tokens: int | None = None,
        poison: Callable[[GenerateRequest], bool] | None = None,
        restart_s: float = 0.0,
        feed: WeightFeed | None = None,
    ) -> None:
        """
        Args:
            poison: A replica crashes when it computes a request of which this is true.
            restart_s: How long a crashed replica is away, by the event loop's clock.
            feed: A crashed replica comes back with the newest version there; without, with what it served.
        """
        self.hold = hold
        self.calls: dict[str, EngineCall] = {}
        """In flight now, by session."""
        self.sessions: list[str] = []
        """Every session ever asked for, in order."""
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.applied: list[int] = []
        self.crashes: list[tuple[str, ...]] = []
        """The sessions each crash has hit."""
        self.max_in_flight = 0
        self.generated_tokens = 0
        self.apply_error: Exception | None = None
        self.stuck_at: WeightsVersion | None = None
        """Replicas stay at this weights version and say so."""
        self.replaced: dict[str, int] = {}
        """Sessions whose replica was replaced, and the version that the new one has started with."""
        self.apply_gate: anyio.Event | None = None
        """Set one to hold the next apply until the test sets the event."""
        self.weights_versions = {f"replica-{number}": WeightsVersion(0, 0) for number in range(num_replicas)}
        """What each replica serves."""
        self._answer = answer
        self._pace = pace
        self._chunk_tokens = chunk_tokens
        self._poison = poison
        self._restart_s = restart_s
        self._feed = feed
        self._down_until: dict[str, float] = {}
        """Crashed replicas that nobody has used since."""
        self._deaths: Counter[str] = Counter()
        self._errors: dict[str, list[Exception]] = {}
        self._changed = anyio.Condition()

    # -------------------------------------------------------------------------------------------- the port

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        call = EngineCall(session, requests, [request.so_far for request in requests])
        self.calls[session] = call
        self.sessions.append(session)
        self.requests.extend(requests)
        self.max_in_flight = max(self.max_in_flight, len(self.calls))
        try:
            yield await self._place(call)
            while call.pending:
                sampled: list[int] = []
                if call.crash is None:
                    with anyio.CancelScope() as call.attempt:
                        sampled = await self._sample_all(call)
                for index in sampled:
                    # A crash does not take back what is complete.
                    turn = call.turns[index]
                    assert turn is not None
                    yield TurnFinished(index, turn) if complete(turn) else TurnProgress(index, turn)
                if (error := call.crash) is not None:
                    call.crash = None
                    if call.pending:
                        yield EngineCrashed(error)
                        yield await self._place(call)
        except (GeneratorExit, anyio.get_cancelled_exc_class()):
            self.cancelled.append(session)
            raise
        finally:
            del self.calls[session]

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        if self.apply_gate is not None:
            await self.apply_gate.wait()
        if self.apply_error is not None:
            raise self.apply_error
        reports = []
        for name in self.weights_versions:
            await self._come_up(name)
            load_s = 0.0
            if self.stuck_at is not None:
                self.weights_versions[name] = self.stuck_at
            elif self.weights_versions[name] < publication.weights_version:
                self.weights_versions[name] = publication.weights_version
                load_s = 0.01
            lineage, version = self.weights_versions[name]
            in_flight = sum(call.replica == name for call in self.calls.values())
            reports.append(ApplyReport(name, version, 0.0, load_s, load_s, in_flight, verified=True, lineage=lineage))
        self.applied.append(self.version)
        await self._notify()
        return reports

    # -------------------------------------------------------------------------------------------- the test's side

    @property
    def version(self) -> int:
        """What every replica serves, or the oldest of them."""
        return min(self.weights_versions.values()).version

    @version.setter
    def version(self, version: int) -> None:
        self.weights_versions = {
            name: WeightsVersion(weights_version.lineage, version)
            for name, weights_version in self.weights_versions.items()
        }

    def release(self, *sessions: str) -> None:
        """Let these calls answer; none named: all that are in flight."""
        for session in sessions or tuple(self.calls):
            self.calls[session].go.set()

    def release_all(self) -> None:
        """Let everything answer, from now on too."""
        self.hold = False
        self.release()

    def fail(self, session: str, *errors: Exception) -> None:
        """The next calls of this session raise these, one each."""
        self._errors.setdefault(session, []).extend(errors)

    def crash(self, replica: str = "replica-0", message: str = "the engine died") -> tuple[str, ...]:
        """The replica dies with what it computes; returns the sessions it had."""
        struck = tuple(session for session, call in self.calls.items() if call.replica == replica)
        process = self._process(replica)
        self._deaths[replica] += 1
        self._down_until[replica] = anyio.current_time() + self._restart_s
        self.crashes.append(struck)
        for session in struck:
            call = self.calls[session]
            call.replica, call.crash = "", EngineCrashError(f"{replica}: {message}")
            call.crash.replica = process
            call.attempt.cancel()
        return struck

    async def until(self, condition: Callable[[FakeFleet], bool]) -> None:
        """Wait until `condition` holds; looked at when a replica takes a call and when a version is applied."""
        with anyio.fail_after(10):
            async with self._changed:
                while not condition(self):
                    await self._changed.wait()

    async def until_in_flight(self, *sessions: str) -> None:
        await self.until(lambda fleet: all(s in fleet.calls and fleet.calls[s].replica for s in sessions))

    # -------------------------------------------------------------------------------------------- inside

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _place(self, call: EngineCall) -> Accepted:
        """Wait for a replica that is up, and take the one with the fewest calls."""
        await self._sleep_until(lambda: min(self._down_s(name) for name in self.weights_versions))
        up = [name for name in self.weights_versions if self._down_s(name) <= 0]
        load = dict.fromkeys(up, 0)
        for other in self.calls.values():
            if other.replica in load:
                load[other.replica] += 1
        name = min(up, key=lambda name: load[name])
        await self._come_up(name)
        call.replica, call.version = name, self.weights_versions[name].version
        await self._notify()
        return Accepted(self._process(name))

    def _process(self, replica: str) -> str:
        """Who is replaced comes back under a name that nobody had."""
        return f"{replica}/{self._deaths[replica]}"

    def _down_s(self, name: str) -> float:
        return self._down_until.get(name, -math.inf) - anyio.current_time()

    async def _sleep_until(self, left_s: Callable[[], float]) -> None:
        while (seconds := left_s()) > 0:  # noqa: ASYNC110  # it is a time that is waited for, and it may move
            await anyio.sleep(seconds)

    async def _come_up(self, name: str) -> None:
        """Wait until a crashed replica is back, and let it catch up."""
        await self._sleep_until(lambda: self._down_s(name))
        if self._down_until.pop(name, None) is None or self._feed is None:
            return
        newest = await self._feed.latest()
        if newest is not None:
            self.weights_versions[name] = max(self.weights_versions[name], newest.weights_version)

    async def _sample_all(self, call: EngineCall) -> list[int]:
        """Sample the next tokens of every request; returns the requests that have new ones."""
        if self.hold:
            await call.go.wait()
        elif self._pace is not None:
            await self._pace(call.session)
        elif self._chunk_tokens is not None:
            await anyio.lowlevel.checkpoint()
        if call.crash is not None:
            return []  # the call was awake already when its replica crashed
        if errors := self._errors.get(call.session):
            raise errors.pop(0)
        pending = call.pending
        if self._poison is not None and any(self._poison(call.requests[index]) for index in pending):
            self.crash(call.replica)
            return []
        for index in pending:
            self._sample(call, index)
        return pending

    def _sample(self, call: EngineCall, index: int) -> None:
        request, head = call.requests[index], call.turns[index]
        num_head = 0 if head is None else len(head.response_ids)
        answer = self._answer(request)
        ids = np.asarray(answer[num_head:][: self._chunk_tokens], dtype=np.int32)
        self.generated_tokens += len(ids)
        serves = self.replaced.get(call.session, self.weights_versions[call.replica].version)
        began_at = self.replaced.get(call.session, call.version)
        spans = [Span(0, began_at if self._chunk_tokens is None else serves)] if len(ids) else []
        if self._chunk_tokens is None and len(ids) > 1 and serves != began_at:
            spans.append(Span(len(ids) // 2, serves))
        finish = FinishReason.ABORTED
        if num_head + len(ids) == len(answer):
            finish = FinishReason.LENGTH if len(answer) >= request.sampling["max_tokens"] else FinishReason.STOP
        tail = Turn(ids, np.full(len(ids), -0.5, dtype=np.float32), tuple(spans), finish)
        call.turns[index] = join_turns(head, tail)


async def finished_turns(
    events: AsyncGenerator[GenerationEvent, None], observe: Callable[[GenerationEvent], None] | None = None
) -> list[Turn]:
    """The finished turns of one call, in the order of its requests. Without `observe` a crash raises."""
    turns: dict[int, Turn] = {}
    async with aclosing(events):
        async for event in events:
            if observe is not None:
                observe(event)
            elif isinstance(event, EngineCrashed):
                raise event.error
            if isinstance(event, TurnFinished):
                turns[event.number] = event.turn
    return [turns[number] for number in sorted(turns)]

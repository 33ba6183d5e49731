"""A fleet without engines: a test scripts its answers, failures, crashes, versions and the order of completion.

It has no threads and uses no real time, so it is deterministic under any event loop.
"""

from __future__ import annotations

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
    WeightsVersion,
)
from asyncrl.core.types import FinishReason, Span, Turn, join_turns

Answer = Callable[[GenerateRequest], Sequence[int]]


def echo(request: GenerateRequest) -> Sequence[int]:
    """Answer with the prompt's tokens, cut to `max_tokens`."""
    return request.prompt_ids[: request.sampling["max_tokens"]].tolist()


@dataclass
class EngineCall:
    """One `generate` call in flight."""

    session: str
    requests: Sequence[GenerateRequest]
    turns: list[Turn | None]
    """The tokens of each request so far. The finish reason of an incomplete turn is ABORTED."""
    replica: str = ""
    """The replica that runs the call; empty after a crash until the call is placed again."""
    version: int = 0
    """The version that the replica served when it accepted the call."""
    go: anyio.Event = field(default_factory=anyio.Event)
    attempt: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    crash: EngineCrashError | None = None

    @property
    def pending(self) -> list[int]:
        return [index for index, turn in enumerate(self.turns) if not complete(turn)]


def complete(turn: Turn | None) -> bool:
    return turn is not None and turn.finish_reason is not FinishReason.ABORTED


class FakeFleet:
    """A scripted `EngineFleet`. A call answers at once, after `pace(session)`, or, with `hold`, on `release`.

    With `chunk_tokens`, every request reports that many tokens at a time, each time after `pace(session)`: shorter
    responses are complete earlier, and reported tokens survive a crash. Without it, a response is reported as a whole,
    and if its replica changes its version meanwhile, the first half of the tokens has the old version.
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
    ) -> None:
        """Create the fleet. A replica crashes when it computes a request for which `poison` returns true."""
        self.hold = hold
        self.calls: dict[str, EngineCall] = {}
        """The calls in flight, by session."""
        self.sessions: list[str] = []
        """The sessions of all calls, in order."""
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.applied: list[int] = []
        self.crashes: list[tuple[str, ...]] = []
        """The sessions that were in flight in each crash."""
        self.max_in_flight = 0
        self.generated_tokens = 0
        self.apply_error: Exception | None = None
        self.stuck_at: WeightsVersion | None = None
        """If set, replicas stay at this weights version and report it."""
        self.replaced: dict[str, int] = {}
        """Sessions whose replica was replaced, with the version of the new replica."""
        self.apply_gate: anyio.Event | None = None
        """If set, the next apply waits for this event."""
        self.weights_versions = {f"replica-{number}": WeightsVersion(0, 0) for number in range(num_replicas)}
        """The weights version of each replica."""
        self.accept_gate: anyio.Event | None = None
        """If set, replicas accept no call before this event."""
        self._answer = answer
        self._pace = pace
        self._chunk_tokens = chunk_tokens
        self._poison = poison
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
                    # A crash does not discard sampled tokens.
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

    # -------------------------------------------------------------------------------------------- for tests

    @property
    def version(self) -> int:
        """The version of every replica, or the oldest version."""
        return min(self.weights_versions.values()).version

    @version.setter
    def version(self, version: int) -> None:
        self.weights_versions = {
            name: WeightsVersion(weights_version.lineage, version)
            for name, weights_version in self.weights_versions.items()
        }

    def release(self, *sessions: str) -> None:
        """Let the calls of these sessions answer, or all calls in flight if there are no arguments."""
        for session in sessions or tuple(self.calls):
            self.calls[session].go.set()

    def release_all(self) -> None:
        """Let all calls answer, including later ones."""
        self.hold = False
        self.release()

    def fail(self, session: str, *errors: Exception) -> None:
        """Let each of the next calls of this session raise one of these errors."""
        self._errors.setdefault(session, []).extend(errors)

    def crash(self, replica: str = "replica-0", message: str = "the engine died") -> tuple[str, ...]:
        """Crash a replica. Return the sessions that were in flight on it."""
        hit = tuple(session for session, call in self.calls.items() if call.replica == replica)
        process = self._process(replica)
        self._deaths[replica] += 1
        self.crashes.append(hit)
        for session in hit:
            call = self.calls[session]
            call.replica, call.crash = "", EngineCrashError(f"{replica}: {message}")
            call.crash.replica = process
            call.attempt.cancel()
        return hit

    async def until(self, condition: Callable[[FakeFleet], bool]) -> None:
        """Wait until `condition` holds; it is evaluated when a replica accepts a call and when a version is applied."""
        with anyio.fail_after(10):
            async with self._changed:
                while not condition(self):
                    await self._changed.wait()

    async def until_in_flight(self, *sessions: str) -> None:
        await self.until(lambda fleet: all(s in fleet.calls and fleet.calls[s].replica for s in sessions))

    # -------------------------------------------------------------------------------------------- internals

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _place(self, call: EngineCall) -> Accepted:
        """Place the call on the replica with the fewest calls."""
        if self.accept_gate is not None:
            await self.accept_gate.wait()
        load = Counter(other.replica for other in self.calls.values())
        name = min(self.weights_versions, key=lambda name: load[name])
        call.replica, call.version = name, self.weights_versions[name].version
        await self._notify()
        return Accepted(self._process(name))

    def _process(self, replica: str) -> str:
        """Return the name of the replica's process: a restarted one has a new name."""
        return f"{replica}/{self._deaths[replica]}"

    async def _sample_all(self, call: EngineCall) -> list[int]:
        """Sample the next tokens of every request. Return the requests that have new tokens."""
        if self.hold:
            await call.go.wait()
        elif self._pace is not None:
            await self._pace(call.session)
        elif self._chunk_tokens is not None:
            await anyio.lowlevel.checkpoint()
        if call.crash is not None:
            return []  # the replica crashed after this call continued
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
    """Return the finished turns of one call, in the order of its requests. Without `observe`, a crash raises."""
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

"""A fleet without engines: answers, failures, versions and the order of completion are the test's to script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from asyncrl.ports import ApplyReport, GenerateRequest, Publication
from asyncrl.types import FinishReason, Span, Turn

Answer = Callable[[GenerateRequest], Sequence[int]]


def echo(request: GenerateRequest) -> Sequence[int]:
    """The prompt's tokens, cut to `max_tokens`."""
    return request.prompt_ids[: request.sampling["max_tokens"]].tolist()


@dataclass
class Call:
    """One `generate` call in flight."""

    session: str
    requests: Sequence[GenerateRequest]
    version: int
    """What the fleet served when the call began."""
    go: anyio.Event = field(default_factory=anyio.Event)


class FakeFleet:
    """`EngineFleet`. With `hold`, a call answers once the test calls `release`; else at once, or after `pace(session)`.

    A call during which the fleet changes its version comes back in two spans: the first half by the old one.
    """

    def __init__(
        self,
        *,
        answer: Answer = echo,
        hold: bool = False,
        pace: Callable[[str], Awaitable[None]] | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.hold = hold
        self.version = 0
        self.calls: dict[str, Call] = {}
        """In flight now, by session."""
        self.sessions: list[str] = []
        """Every session ever asked for, in order."""
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.applied: list[int] = []
        self.max_in_flight = 0
        self.generated_tokens = 0
        self.apply_error: Exception | None = None
        self.stuck_at: int | None = None
        """Replicas stay at this version and say so."""
        self.replaced: dict[str, int] = {}
        """Sessions whose replica was replaced, and the version that the new one has started with."""
        self.apply_gate: anyio.Event | None = None
        """Set one to hold the next apply until the test sets the event."""
        self._answer = answer
        self._pace = pace
        self._replicas = [f"replica-{number}" for number in range(num_replicas)]
        self._errors: dict[str, list[Exception]] = {}
        self._changed = anyio.Condition()

    # -------------------------------------------------------------------------------------------- the port

    async def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        call = Call(session, requests, self.version)
        self.calls[session] = call
        self.sessions.append(session)
        self.requests.extend(requests)
        self.max_in_flight = max(self.max_in_flight, len(self.calls))
        await self._notify()
        try:
            if self.hold:
                await call.go.wait()
            elif self._pace is not None:
                await self._pace(session)
            if errors := self._errors.get(session):
                raise errors.pop(0)
            began_at = self.replaced.get(session, call.version)
            serves = self.replaced.get(session, self.version)
            return [self._turn(request, began_at, serves) for request in requests]
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(session)
            raise
        finally:
            del self.calls[session]

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        if self.apply_gate is not None:
            await self.apply_gate.wait()
        if self.apply_error is not None:
            raise self.apply_error
        self.version = publication.version if self.stuck_at is None else self.stuck_at
        self.applied.append(self.version)
        await self._notify()
        return [
            ApplyReport(
                name, self.version, fetch_s=0.0, pause_s=0.0, load_s=0.0, in_flight=len(self.calls), verified=True
            )
            for name in self._replicas
        ]

    async def status(self) -> list[Mapping[str, Any]]:
        return [
            {
                "replica": name,
                "version": self.version,
                "running": len(self.calls),
                "waiting": 0,
                "kv_cache_usage": 0.0,
                "generated_tokens": self.generated_tokens,
            }
            for name in self._replicas
        ]

    # -------------------------------------------------------------------------------------------- the test's side

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

    async def until(self, condition: Callable[[FakeFleet], bool]) -> None:
        """Wait until `condition` holds; looked at when a call begins and when a version is applied."""
        with anyio.fail_after(10):
            async with self._changed:
                while not condition(self):
                    await self._changed.wait()

    async def until_in_flight(self, *sessions: str) -> None:
        await self.until(lambda fleet: set(sessions) <= fleet.calls.keys())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _turn(self, request: GenerateRequest, began_at: int, serves: int) -> Turn:
        ids = np.asarray(self._answer(request), dtype=np.int32)
        self.generated_tokens += len(ids)
        spans = [Span(0, began_at)] if len(ids) else []
        if len(ids) > 1 and serves != began_at:
            spans.append(Span(len(ids) // 2, serves))
        full = len(ids) >= request.sampling["max_tokens"]
        return Turn(
            response_ids=ids,
            rollout_log_probs=np.full(len(ids), -0.5, dtype=np.float32),
            spans=tuple(spans),
            finish_reason=FinishReason.LENGTH if full else FinishReason.STOP,
        )

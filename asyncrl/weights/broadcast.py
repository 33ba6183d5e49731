"""Rounds of GPU broadcasts (`weight_sync.backend: nccl`): the weight store relays the calls to the engines. Pure.

Rank 0 of the Trainer drives vLLM's weight transfer, which makes the same calls to every engine. Rank 0 cannot reach the
replicas, so both sides use the weight store, which both can reach:

    Rollouter ── open_round ──▶ relay ◀── join_round ── every replica, while it decodes
    rank 0 ────── next_round ──▶  │
    rank 0 ────── join_round ──▶  │                     all are here: now they pause
    rank 0 ── call_engines ──▶    │  ◀── next_call ──── every replica: makes the call, and asks for the next one
                                  ▼
              the round is done, or has failed for everyone, who then load the version from the object store

A round that a member misses fails before anything is paused, and concerns one version only. A failure after that may
leave a rank inside a collective operation, so no further round begins until a Trainer of a newer lineage appears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.core.failures import FencedError, InfraError
from asyncrl.core.ports import WeightsVersion

RANK_ZERO = "rank 0 of the Trainer"


class BroadcastMember(NamedTuple):
    """A replica that can take part in a round."""

    replica: str
    num_workers: int
    """Processes of its engine, each of which has a GPU."""
    weights_version: WeightsVersion
    """The version that it serves."""


class BroadcastRound(NamedTuple):
    """A round that rank 0 can join."""

    weights_version: WeightsVersion
    members: Mapping[str, int]
    """Number of processes of each member, in the order of their ranks in the process group: `RANK_ZERO` first."""
    limit_s: float
    """Time for all calls together, from the moment when everyone is present."""


class RelayedCall(NamedTuple):
    """A call of vLLM's weight transfer that a replica has to make to its engine."""

    method: str
    info: Mapping[str, Any]
    """vLLM's own information for the call; empty if it takes none."""
    limit_s: float
    """Time until the deadline of the round."""


@dataclass(slots=True)
class _Round:
    offer: BroadcastRound
    meet_s: float
    until: float
    """Deadline by the loop's clock: at first for everyone to be present, then for the calls."""
    present: set[str] = field(default_factory=set)
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    num_answered: dict[str, int] = field(default_factory=dict)
    is_done: bool = False
    problem: str = ""

    @property
    def missing(self) -> list[str]:
        return [who for who in self.offer.members if who not in self.present]

    @property
    def has_ended(self) -> bool:
        return self.is_done or bool(self.problem)

    @property
    def is_running(self) -> bool:
        return not self.missing and not self.has_ended

    @property
    def unanswered(self) -> list[str]:
        replicas = [who for who in self.offer.members if who != RANK_ZERO]
        return [replica for replica in replicas if self.num_answered.get(replica, 0) < len(self.calls)]


class BroadcastRelay:
    """Relays the calls of one round after another. The weight store inherits it, so that its methods can be called
    through Ray. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._round: _Round | None = None
        self._round_changed = asyncio.Event()
        self._lineage = -1
        """Lineage of the newest Trainer."""
        self._is_sender_absent = False
        self._off = ""
        """Why no further round begins."""
        self.fallback = ""
        """Why the last version for which a round was asked went through the object store; empty if it did not."""

    async def open_round(
        self,
        weights_version: WeightsVersion,
        members: Sequence[BroadcastMember],
        num_silent: int,
        meet_s: float,
        limit_s: float,
    ) -> str:
        """Open a round for the replicas that do not serve the version. Return why there is none, or an empty string.

        Args:
            num_silent: replicas that did not answer when they were asked to take part.
            meet_s: deadline for the end of the earlier round, and for all members and rank 0 to be present.
            limit_s: deadline for all calls together, from then on.
        """
        workers = {one.replica: one.num_workers for one in sorted(members) if one.weights_version < weights_version}
        if not workers and not num_silent:
            return "all replicas serve the version already"
        until = asyncio.get_running_loop().time() + meet_s
        # Rank 0 ends a round a little later than the replicas, after which the Rollouter opens the next one.
        await self._wait(lambda: self._round is None or not self._round.is_running, until)
        if problem := self._why_no_round(weights_version, len(members), num_silent):
            self.fallback = problem
            return problem
        if self._round is not None:
            self._fail(self._round, f"a round for {weights_version} was opened instead")
        self._round = _Round(BroadcastRound(weights_version, {RANK_ZERO: 1} | workers, limit_s), meet_s, until)
        self._notify()
        return ""

    async def next_round(self, lineage: int, timeout_s: float) -> BroadcastRound | None:
        """Return a round that waits for rank 0. None: there was none within `timeout_s`.

        Rank 0 then joins it with a call of its own, because this call may outlive the process that made it.

        Raises:
            FencedError: training continues in a newer lineage.
        """
        self._begin_lineage(lineage)
        if lineage == self._lineage:
            self._is_sender_absent = False
        until = asyncio.get_running_loop().time() + timeout_s
        await self._wait(lambda: lineage < self._lineage or self._offer(lineage) is not None, until)
        if lineage < self._lineage:
            raise FencedError(f"a Trainer of lineage {self._lineage} has replaced that of lineage {lineage}")
        return self._offer(lineage)

    async def join_round(self, weights_version: WeightsVersion, who: str) -> int:
        """Wait until everyone is present. Return the rank of the member's first process in the process group.

        Raises:
            InfraError: the round has failed, or `who` is no member of it.
        """
        found = self._find(weights_version)
        members = found.offer.members
        if who not in members:
            raise InfraError(f"{who} was not there when the round for {weights_version} was opened")
        if found.missing:
            found.present.add(who)
            if not found.missing:
                found.until = asyncio.get_running_loop().time() + found.offer.limit_s
                self._notify()
        if not await self._wait(lambda: found.has_ended or not found.missing, found.until):
            self._is_sender_absent = RANK_ZERO in found.missing
            self._fail(found, f"{' and '.join(found.missing)} did not take part within {found.meet_s:g} s")
        self._check(found)
        names = list(members)
        return sum(members[name] for name in names[: names.index(who)])

    async def next_call(self, weights_version: WeightsVersion, replica: str, number: int) -> RelayedCall:
        """Record that the replica has made the first `number` calls of the round, and return the next one.

        Raises:
            InfraError: the round has failed.
        """
        await self.record_calls(weights_version, replica, number)
        found = self._find(weights_version)
        await self._proceed(found, lambda: len(found.calls) > number)
        return RelayedCall(*found.calls[number], max(0.0, found.until - asyncio.get_running_loop().time()))

    async def record_calls(self, weights_version: WeightsVersion, replica: str, number: int) -> None:
        """Record that the replica has made the first `number` calls of the round.

        Raises:
            InfraError: the round has failed.
        """
        self._find(weights_version).num_answered[replica] = number
        self._notify()

    async def call_engines(self, weights_version: WeightsVersion, method: str, info: Mapping[str, Any]) -> None:
        """Let every replica make this call to its engine, and wait until all have. `finish_weight_update` is the last.

        Raises:
            InfraError: the round has failed.
        """
        found = self._find(weights_version)
        found.calls.append((method, info))
        self._notify()
        await self._proceed(found, lambda: not found.unanswered)
        if method == "finish_weight_update":
            found.is_done, self.fallback = True, ""
            self._notify()

    async def fail_round(self, weights_version: WeightsVersion, problem: str) -> None:
        """End the round for this version, if it has not ended, because a replica has failed in it or has left it."""
        found = self._round
        if found is None or found.offer.weights_version != weights_version or found.has_ended:
            return
        if found.is_running:
            self._off = problem
        self._fail(found, problem)

    async def end_rounds(self, lineage: int, problem: str) -> None:
        """End the current round, and let no further one begin, because rank 0 of this Trainer has failed."""
        if lineage >= self._lineage:
            self._off = self.fallback = self._off or problem
            if self._round is not None:
                self._fail(self._round, problem)

    def _begin_lineage(self, lineage: int) -> None:
        """End the round of an older Trainer, whose rank 0 makes no further calls. Let rounds begin again."""
        if lineage > self._lineage:
            self._lineage, self._off = lineage, ""
            if self._round is not None and self._round.offer.weights_version.lineage < lineage:
                self._fail(self._round, f"a Trainer of lineage {lineage} has taken over")
            self._notify()

    def _why_no_round(self, weights_version: WeightsVersion, num_answers: int, num_silent: int) -> str:
        if self._off:
            return self._off
        if num_silent:
            return f"{num_silent} of {num_silent + num_answers} replicas did not answer"
        if weights_version.lineage < self._lineage:
            return f"a Trainer of lineage {self._lineage} has taken over"
        if self._is_sender_absent:
            return f"{RANK_ZERO} does not take part any more"
        if (earlier := self._round) is None or earlier.has_ended:
            return ""
        other = earlier.offer.weights_version
        if earlier.is_running:
            return f"the round for {other} has not ended"
        return f"a round for {other} was opened instead" if other > weights_version else ""

    async def _proceed(self, found: _Round, condition: Callable[[], bool]) -> None:
        """Wait for `condition` in a round that has begun. At its deadline, let no further round begin."""
        if not await self._wait(lambda: found.has_ended or condition(), found.until):
            late = (
                f"{' and '.join(found.unanswered)} did not make the call {found.calls[-1][0]}"
                if found.unanswered
                else ""
            )
            problem = f"{late or f'{RANK_ZERO} made no further call'} within {found.offer.limit_s:g} s"
            await self.fail_round(found.offer.weights_version, problem)
        self._check(found)

    def _fail(self, found: _Round, problem: str) -> None:
        if not found.has_ended:
            found.problem = self.fallback = problem
            self._notify()

    def _offer(self, lineage: int) -> BroadcastRound | None:
        """Return the round that waits for rank 0 of this Trainer."""
        found = self._round
        if found is None or found.has_ended or RANK_ZERO in found.present:
            return None
        return found.offer if found.offer.weights_version.lineage == lineage else None

    def _find(self, weights_version: WeightsVersion) -> _Round:
        found = self._round
        if found is None or found.offer.weights_version != weights_version:
            raise InfraError(f"there is no round for {weights_version} any more")
        self._check(found)
        return found

    def _check(self, found: _Round) -> None:
        if found.problem:
            raise InfraError(found.problem)

    def _notify(self) -> None:
        """Wake up everyone who waits, so that they look at the round again."""
        self._round_changed.set()
        self._round_changed = asyncio.Event()

    async def _wait(self, condition: Callable[[], bool], until: float) -> bool:
        """Wait for `condition` up to `until` by the loop's clock, and return whether it holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not condition():
                    await self._round_changed.wait()
        return condition()

"""Decides which samples are blamed for engine crashes, and which of their sessions may run again after a crash.

A session is the requests of one sample or, with an agent, of one of its trajectories; they run on one replica at a
time. An engine crash fails all requests of the engine. The prompt of one of them may have caused the crash, or none
did. The sessions of a sample share its prompt, so the samples are judged:

    crash ─▶ a strike for every sample in flight there ─▶ below the limit: its sessions are tried again at once
                                                       └▶ one sample at the limit: blamed and dropped
                                                       └▶ several at the limit: possible causes, isolated in turn

A crash is assessed once every session that was in flight on the replica has reported it.

One possible cause at a time runs isolated: together with samples that are no possible causes, but not with another
possible cause. Its sessions that were in a crash run one after another. If the engine of one crashes, the sample is
blamed; once they are complete, its strikes are removed. A session of another possible cause may be in flight meanwhile
because no crash has hit it yet. If the engine crashes with it, this session waits, too, and no sample is blamed if the
other one was in all crashes of the isolated one. A blamed sample also explains its earlier crashes: others lose their
strikes for these crashes until they are one below the limit. They are free again, and their next crash makes them
possible causes. No strike is withdrawn if any other sample in the last crash had an earlier strike, because that sample
may be the cause.

A single prompt that always crashes its engine does so at most `max_crashes + 1` times with one session, and
`max_crashes + k` times with k, and no other prompt is dropped. If several prompts crash engines, or engines crash for
other reasons, an innocent prompt can be dropped: one that was isolated, or the only one at the limit, when an engine
crashed.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Literal

import anyio

from asyncrl.core.failures import EngineCrashError, PoisonError
from asyncrl.core.waits import WaitBoard
from rollouter.drop_policy import TooLongError

logger = logging.getLogger(__name__)

REMEMBERED_CRASHES = 16
"""Number of assessed crashes that are kept for sessions that report them late."""
SETTLE_S = 1.0
"""Delay before a crash is assessed: an `Accepted` event of the replica may still be on its way."""
LONGEST_S = 30.0
"""After this time a crash is assessed even if a call to the replica is still open: Ray may have lost the call."""
SessionState = Literal["free", "waiting", "isolated", "blamed"]


class ReplicaCrash:
    """One crash of a replica, as reported by the sessions that were in flight there."""

    def __init__(self, replica: str, at_s: float) -> None:
        self.replica = replica
        self.at_s = at_s
        """Wall clock, seconds."""
        self.messages: dict[str, str] = {}
        """The error message of each session that was in flight on the replica."""
        self.ended: dict[str, int] = {}
        """The sessions in `messages` that have ended since, each with the number of its sample's earlier strikes."""
        self.assessed = False
        self.explained = False
        """Whether a sample was blamed for this crash."""


class CrashBlame:
    """Strikes and possible causes, by sample. Pure."""

    def __init__(self, max_crashes: int) -> None:
        """`max_crashes` is the number of strikes that makes a sample a possible cause; at least 1."""
        self._max_crashes = max_crashes
        self._crashes: dict[str, ReplicaCrash] = {}
        """Crashes by replica: all that are not assessed yet, and the latest assessed ones."""
        self._places: dict[str, str] = {}
        """The replica of each session in flight."""
        self._sessions_on: defaultdict[str, set[str]] = defaultdict(set)
        """The sessions in flight on each replica; no set is empty."""
        self._strikes: dict[str, list[ReplicaCrash]] = {}
        """The crashes of each sample that has sessions in `_crashed`; none may be left."""
        self._crashed: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """The sessions of each sample that were in a crash and are not complete yet, in order; no mapping is empty."""
        self._possible_causes: dict[str, None] = {}
        """The sample that has waited longest comes first."""
        self._suspended: set[str] = set()
        """Samples that are cancelled and not resumed yet."""
        self._isolated: str | None = None
        self._evidence: dict[str, tuple[ReplicaCrash, ...]] = {}
        """The crashes of each blamed sample that has not ended yet."""
        self._num_crashes = 0
        self._num_blamed = 0
        self._num_explained = 0

    def place(self, session: str, replica: str) -> None:
        """Record the replica on which the session is now in flight; an empty name means that there is none."""
        if before := self._places.pop(session, ""):
            self._sessions_on[before].discard(session)
            if not self._sessions_on[before]:
                del self._sessions_on[before]
        if replica:
            self._suspended.discard(_sample_of(session))
            self._places[session] = replica
            self._sessions_on[replica].add(session)

    def report(self, session: str, message: str, replica: str, at_s: float) -> ReplicaCrash:
        """Record that the engine of `replica` crashed with the session in flight. Each replica crashes at most once,
        because the replica that replaces it has another name."""
        crash = self._crashes.get(replica)
        if crash is None:
            crash = self._crashes[replica] = ReplicaCrash(replica, at_s)
            self._num_crashes += 1
            assessed = [replica for replica, crash in self._crashes.items() if crash.assessed]
            for oldest in assessed[:-REMEMBERED_CRASHES]:
                del self._crashes[oldest]
        is_new = session not in crash.messages  # a session that moves to another worker reports its crash again
        crash.messages[session] = message
        if crash.assessed and is_new:  # too late for blame, but the session was in flight on the replica
            self._strike([session], crash)
        self.place(session, "")
        return crash

    def is_reported(self, crash: ReplicaCrash) -> bool:
        """Return whether every session that was in flight on the replica has reported the crash."""
        return crash.replica not in self._sessions_on

    def assess(self, crash: ReplicaCrash) -> None:
        """Blame a sample or add possible causes, based on the reports so far. A second call changes nothing."""
        if crash.assessed:
            return
        crash.assessed = True
        earlier = set(self._possible_causes)
        present = self._strike([session for session in crash.messages if session not in crash.ended], crash)
        at_limit = [sample for sample in present if len(self._strikes[sample]) >= self._max_crashes]
        ended = [session for session, strikes in crash.ended.items() if strikes + 1 >= self._max_crashes]
        if any(_sample_of(session) in self._evidence for session in crash.messages):
            self._explain([crash])  # by a sample that was blamed for another crash
        elif self._isolated is not None and self._isolated in present:
            own = self._strikes[self._isolated]
            others = (earlier - {self._isolated}).intersection(present)
            if not any(all(strike in self._strikes[other] for strike in own) for other in others):
                self._blame(self._isolated, crash)
        elif len(at_limit) == 1 and not ended:
            self._blame(at_limit[0], crash)
        self._isolate_next()

    @property
    def isolated(self) -> str | None:
        """The possible cause that may run now."""
        return self._isolated

    def state_of(self, session: str) -> SessionState:
        """Return the session's state. The session may be tried again if it is `free` or `isolated`."""
        sample = _sample_of(session)
        if sample in self._evidence:
            return "blamed"
        if sample not in self._possible_causes or session not in self._crashed[sample]:
            return "free"
        is_next = sample == self._isolated and session == next(iter(self._crashed[sample]))
        return "isolated" if is_next else "waiting"

    def poison_error(self, session: str) -> PoisonError:
        """Return the evidence against the blamed sample of a session."""
        sample = _sample_of(session)
        crashes, lines = self._evidence[sample], []
        for crash in crashes:
            own = [message for each, message in crash.messages.items() if _sample_of(each) == sample]
            at, others = datetime.fromtimestamp(crash.at_s, UTC), len(crash.messages) - len(own)
            lines.append(f"{at:%Y-%m-%d %H:%M:%S} UTC, with {others} others in flight: {own[0]}")
        return PoisonError(
            f"{len(crashes)} engines crashed with {sample} in flight, the last one without any other possible cause "
            "in flight:\n    " + "\n    ".join(lines)
        )

    def end(self, session: str) -> None:
        """Forget a session that is complete, dropped or cancelled."""
        sample = _sample_of(session)
        for crash in self._crashes.values():
            if not crash.assessed and session in crash.messages:
                # The session will not be tried again, but it was in flight and may be the cause.
                crash.ended[session] = len(self._evidence.get(sample, self._strikes.get(sample, ())))
        if session in (crashed := self._crashed.get(sample, {})):
            del crashed[session]
            if not crashed:
                del self._crashed[sample]
                self._strikes.pop(sample, None)
                self._evidence.pop(sample, None)
                self._possible_causes.pop(sample, None)
        self._suspended.discard(sample)
        self.place(session, "")
        self._isolate_next()

    def suspend(self, session: str) -> None:
        """Keep the strikes of a sample that was cancelled and will be resumed; until then it does not wait for
        isolation, even if one of its crashes is assessed meanwhile."""
        self._possible_causes.pop(_sample_of(session), None)
        self._suspended.add(_sample_of(session))
        self.place(session, "")
        self._isolate_next()

    def status(self) -> Mapping[str, int | str]:
        """Return cumulative counts (`crashes`, `explained`, `blamed`) and the current samples (`with_strikes`,
        `waiting`, `isolated`)."""
        return {
            "crashes": self._num_crashes,
            "explained": self._num_explained,
            "blamed": self._num_blamed,
            "with_strikes": len(self._strikes),
            "waiting": len(self._possible_causes) - (self._isolated is not None),
            "isolated": self._isolated or "",
        }

    def _strike(self, sessions: Iterable[str], crash: ReplicaCrash) -> list[str]:
        """Give the samples of the sessions a strike each for the crash, and return them. Those at the limit become
        possible causes."""
        samples = []
        for session in sessions:
            sample = _sample_of(session)
            self._crashed[sample].setdefault(session)
            if sample in self._evidence:
                continue
            strikes = self._strikes.setdefault(sample, [])
            if crash not in strikes:
                strikes.append(crash)
            if sample not in samples:
                samples.append(sample)
            if sample not in self._suspended and len(strikes) >= self._max_crashes:
                self._possible_causes.setdefault(sample)
        return samples

    def _blame(self, sample: str, last: ReplicaCrash) -> None:
        crashes = self._strikes.pop(sample)
        self._evidence[sample] = tuple(crashes)
        self._num_blamed += 1
        self._explain(crashes)
        self._possible_causes.pop(sample, None)
        others = {_sample_of(session) for session in last.messages} & self._strikes.keys()
        if any(len(self._strikes[other]) > 1 for other in others) or any(last.ended.values()):
            return
        for other, strikes in self._strikes.items():
            explained = [crash for crash in strikes if crash in crashes and crash is not last]
            # Keep enough strikes that one more crash makes the sample a possible cause again.
            surplus = len(strikes) - (self._max_crashes - 1)
            withdrawn = explained[: max(0, surplus)]
            self._strikes[other] = [crash for crash in strikes if crash not in withdrawn]
            if len(self._strikes[other]) < self._max_crashes:
                self._possible_causes.pop(other, None)

    def _explain(self, crashes: Iterable[ReplicaCrash]) -> None:
        for crash in crashes:
            self._num_explained += not crash.explained
            crash.explained = True

    def _isolate_next(self) -> None:
        if self._isolated not in self._possible_causes:
            self._isolated = next(iter(self._possible_causes), None)


def _sample_of(session: str) -> str:
    return session.partition("/")[0]


class TimeLimit:
    """The remaining time of a sample. See `time_limit`."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._pauses = 0
        self._remaining_s = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock until all pauses have ended."""
        if not self._pauses:
            self._remaining_s = self._scope.deadline - anyio.current_time()
            self._scope.deadline = math.inf
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._scope.deadline = anyio.current_time() + self._remaining_s


@contextmanager
def time_limit(name: str, limit_s: float) -> Iterator[TimeLimit]:
    """Cancel the block, which must stay in one task, after `limit_s` seconds.

    Raises:
        TooLongError: the limit has passed.
    """
    with anyio.move_on_after(limit_s) as scope:
        yield TimeLimit(scope)
    if scope.cancelled_caught:
        raise TooLongError(
            f"{name} was not generated within timeouts.sample_s = {limit_s:g} s; raise the limit if such samples are "
            "worth waiting for, or lower rollout.response_length"
        )


class CrashIsolation:
    """Makes sessions wait after a crash until `CrashBlame` allows them to run again. Belongs to one event loop."""

    def __init__(
        self,
        max_crashes: int,
        *,
        waits: WaitBoard,
        settle_s: float = SETTLE_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._blame = CrashBlame(max_crashes)
        self._waits = waits
        self._settle_s = settle_s
        self._wall_clock = wall_clock
        self._changed = anyio.Event()

    def place(self, session: str, replica: str) -> None:
        """See `CrashBlame.place`."""
        self._blame.place(session, replica)
        self._notify()

    async def wait_until_allowed(self, session: str, error: EngineCrashError, limit: TimeLimit) -> None:
        """Report the crash `error`, and return once the session may be tried again.

        The wait does not count against the sample's time limit, except while another session of the same sample is
        isolated: the sessions share the limit, so a pause would let the isolated one run for ever.

        Raises:
            PoisonError: the session is blamed.
        """
        logger.info("%s was in flight when an engine crashed: %s", session, error.message)
        with self._waits.waiting("isolation"):
            with limit.paused():
                crash = self._blame.report(session, error.brief, error.replica, self._wall_clock())
                self._notify()
                with anyio.move_on_after(LONGEST_S):
                    await anyio.sleep(self._settle_s)
                    while not (crash.assessed or self._blame.is_reported(crash)):
                        await self._changed.wait()
                self._blame.assess(crash)
                self._notify()
            while (state := self._blame.state_of(session)) == "waiting":
                is_siblings_turn = self._blame.isolated == _sample_of(session)
                with nullcontext() if is_siblings_turn else limit.paused():
                    await self._changed.wait()
        if state == "blamed":
            raise self._blame.poison_error(session)

    def end(self, session: str) -> None:
        """See `CrashBlame.end`."""
        self._blame.end(session)
        self._notify()

    def suspend(self, session: str) -> None:
        """See `CrashBlame.suspend`."""
        self._blame.suspend(session)
        self._notify()

    def status(self) -> Mapping[str, int | str]:
        """See `CrashBlame.status`."""
        return self._blame.status()

    @contextmanager
    def sample(self, limit: TimeLimit) -> Iterator[SampleSessions]:
        """Track the sessions of one sample; all of them end with the context."""
        sessions = SampleSessions(self, limit)
        try:
            yield sessions
        finally:
            sessions.end_all()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class SampleSessions:
    """The sessions of one sample, whose requests may be on several replicas."""

    def __init__(self, isolation: CrashIsolation, limit: TimeLimit) -> None:
        self._isolation = isolation
        self._limit = limit
        self._open: set[str] = set()
        self._has_replica: dict[str, bool] = {}
        """The sessions in `generating`, and whether a replica has their requests."""
        self._pause = ExitStack()

    @contextmanager
    def generating(self, session: str) -> Iterator[None]:
        """Pause the sample's time limit while sessions in this context wait for a replica and none of them has one.

        While one of them has a replica, the limit is not paused: its requests may never end, and a replica that waits
        for its running requests accepts no others.
        """
        self._has_replica[session] = False
        self._update_pause()
        try:
            yield
        finally:
            self._has_replica.pop(session, None)
            self._update_pause()

    def place(self, session: str, replica: str) -> None:
        """Record the replica that now has the session's requests; an empty name means that there is none."""
        self._open.add(session)
        self._set_replica(session, bool(replica))
        self._isolation.place(session, replica)

    async def wait_until_allowed(self, session: str, error: EngineCrashError) -> None:
        """See `CrashIsolation.wait_until_allowed`."""
        self._open.add(session)
        self._set_replica(session, False)
        await self._isolation.wait_until_allowed(session, error, self._limit)

    def end(self, session: str) -> None:
        """Record that the session's requests are complete. A conversation may send more requests later."""
        self._open.discard(session)
        self._isolation.end(session)

    def end_all(self) -> None:
        for session in self._open:
            self._isolation.end(session)

    def suspend_all(self) -> None:
        """Record that the sample was interrupted and will be resumed."""
        for session in self._open:
            self._isolation.suspend(session)
        self._open.clear()

    def _set_replica(self, session: str, has_replica: bool) -> None:
        """Record whether a replica has the session's requests. Outside `generating` the session waits for none."""
        if session in self._has_replica:
            self._has_replica[session] = has_replica
            self._update_pause()

    def _update_pause(self) -> None:
        self._pause.close()
        if self._has_replica and not any(self._has_replica.values()):
            self._pause.enter_context(self._limit.paused())

"""Chooses replicas for calls: conversations stay on their replicas, and new ones go to the replica with the fewest
outstanding tokens. Pure, except for the clock."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

MAX_AFFINITY_KEYS = 20_000
"""Maximum number of samples whose replica is remembered, 0.3 KB each: 160,000 conversations in groups of 8."""
AFFINITY_S = 600.0
"""How long the replica of a sample without calls is remembered. A sample that calls again after a longer time may get
another replica, which computes its context again."""


def affinity_key(session: str) -> str:
    """Return the key of a session, `sample_0_7` for `sample_0_7/3`. Sessions of one key share prompt and replica."""
    return session.partition("/")[0]


class CallSize(NamedTuple):
    """What the arguments of a call say about its work."""

    context: int
    """Tokens of its longest prompt, with the tokens that an earlier call sampled."""
    response: int
    """The most tokens that it may still sample, over all its requests."""

    def outstanding(self, cached: int) -> int:
        """Return the call's tokens to compute at a replica whose cache may have `cached` tokens of its context."""
        return max(0, self.context - cached) + self.response


class OutstandingTokens:
    """Counts the tokens that each replica still has to compute for the calls of this router.

    A call is *reserved* from the choice of its replica on, so that the choices of concurrent calls see one another. It
    becomes a *try* when Serve sends it, and each try ends once. Serve may choose again for a reserved call, and may
    send a call again, even to the same replica, before it reports the end of the first try.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        """`rng` orders replicas that have equally many tokens."""
        self._rng = rng or random.Random()
        self._tokens: Counter[str] = Counter()
        self._reserved: dict[Hashable, tuple[str, int]] = {}
        self._tries: dict[tuple[str, str], deque[int]] = {}

    def of(self, replica: str) -> int:
        """Return the tokens of the replica's reserved and open calls, never below 0."""
        return self._tokens[replica]

    def total(self) -> int:
        """Return the tokens of all replicas."""
        return self._tokens.total()

    def add(self, call: Hashable, replica: str, tokens: int) -> None:
        """Reserve the replica for a call. A second choice for the same call replaces the first one."""
        self.abandon(call)
        self._reserved[call] = replica, tokens
        self._tokens[replica] += tokens

    def sent(self, call: Hashable, replica: str, request_id: str) -> None:
        """Open a try of a reserved call at the replica to which Serve sends it. `request_id` is Serve's name of the
        call. A call that is not reserved is ignored."""
        if (reserved := self._reserved.get(call)) is None:
            return
        self.abandon(call)
        self._tries.setdefault((replica, request_id), deque()).append(reserved[1])
        self._tokens[replica] += reserved[1]

    def abandon(self, call: Hashable) -> None:
        """End a reserved call that Serve will not send: its caller was cancelled while Serve routed it."""
        if (reserved := self._reserved.pop(call, None)) is not None:
            self._subtract(*reserved)

    def finish(self, replica: str, request_id: str) -> None:
        """End the oldest open try of a call at a replica, whatever its outcome. An unknown one is ignored."""
        if (sizes := self._tries.get((replica, request_id))) is None:
            return
        self._subtract(replica, sizes.popleft())
        if not sizes:
            del self._tries[replica, request_id]

    def drop(self, replica: str) -> None:
        """End all tries of a replica that has died. Serve chooses again for a call that is only reserved."""
        for key in [key for key in self._tries if key[0] == replica]:
            self._subtract(replica, sum(self._tries.pop(key)))

    def least(self, replicas: Iterable[str], count: int) -> list[str]:
        """Return up to `count` replicas in ascending order of their tokens. Equal ones are in random order."""
        return heapq.nsmallest(count, replicas, key=lambda replica: (self._tokens[replica], self._rng.random()))

    def _subtract(self, replica: str, tokens: int) -> None:
        self._tokens[replica] -= tokens
        if not self._tokens[replica]:
            del self._tokens[replica]


class _Assignment(NamedTuple):
    """The replica of a sample, and when the sample was last looked up or assigned."""

    replica: str
    context: int
    """The longest context that was sent to it, in tokens."""
    used_at: float
    """By the clock, in seconds."""


class ReplicaAffinity:
    """Remembers the replica of each sample, so that its next turns find their KV cache. A sample is forgotten some time
    after its last call, and the least recently used one first if there are too many."""

    def __init__(self, max_keys: int = MAX_AFFINITY_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns a time in seconds."""
        self._max_keys = max_keys
        self._clock = clock
        self._replicas: OrderedDict[str, _Assignment] = OrderedDict()

    def find(self, session: str, available: Container[str]) -> str | None:
        """Return the session's replica if it is available."""
        key = affinity_key(session)
        if (assigned := self._replicas.get(key)) is None or assigned.replica not in available:
            return None
        self._remember(key, assigned.replica, assigned.context)
        return assigned.replica

    def cached(self, session: str, replica: str) -> int:
        """Return the longest context of the sample that was sent to the replica, in tokens."""
        assigned = self._replicas.get(affinity_key(session))
        return assigned.context if assigned is not None and assigned.replica == replica else 0

    def assign(self, session: str, replica: str, context: int = 0) -> None:
        """Remember the session's replica, and the length of the context that was sent to it. A session without a name
        is ignored."""
        if session:
            self._remember(affinity_key(session), replica, max(context, self.cached(session, replica)))

    def _remember(self, key: str, replica: str, context: int) -> None:
        now = self._clock()
        self._replicas[key] = _Assignment(replica, context, now)
        self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys or next(iter(self._replicas.values())).used_at < now - AFFINITY_S:
            self._replicas.popitem(last=False)


class SessionBalancer:
    """Chooses the replicas of calls, and remembers what each replica was sent."""

    def __init__(self, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._affinity = ReplicaAffinity(clock=clock)
        self.outstanding = OutstandingTokens(rng)

    def choose(self, session: str, replicas: Collection[str], count: int = 1) -> list[str]:
        """Return the replica of the session, or for a new session up to `count` of those with the fewest tokens, the
        best first. `session` is empty for a call without one."""
        kept = self._affinity.find(session, replicas)
        return [kept] if kept is not None else self.outstanding.least(replicas, count)

    def reserve(self, call: Hashable, session: str, replica: str, size: CallSize) -> None:
        """Count a call at the replica that was chosen for it. Other conversations of a new sample may follow before
        this call is sent, and find the same replica."""
        self._affinity.assign(session, replica)
        self.outstanding.add(call, replica, size.outstanding(self._affinity.cached(session, replica)))

    def sent(self, call: Hashable, session: str, replica: str, request_id: str, *, context: int) -> None:
        """Count a call at the replica to which it is sent, and remember the replica; see `OutstandingTokens.sent`."""
        self.outstanding.sent(call, replica, request_id)
        self._affinity.assign(session, replica, context)


EnginePart = Literal["own", "lent"]
"""The replicas of a run: its own, and those on GPUs that the Trainer lends (`trainer.lend_after_s`)."""


class LentShare:
    """Divides the calls of one process between the run's own replicas and those on lent GPUs, so that each replica has
    about as many requests."""

    def __init__(self, num_replicas: Mapping[EnginePart, int], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns a time in seconds."""
        self.is_open = False
        """Whether the lent replicas take calls."""
        self._num_replicas = num_replicas
        self._affinity = ReplicaAffinity(clock=clock)
        self._running: Counter[str] = Counter()

    def choose(self, session: str) -> EnginePart:
        """Return the part for a call. A conversation stays where its KV cache is, unless these replicas are closed."""
        available: list[EnginePart] = ["own", "lent"] if self.is_open else ["own"]
        kept = self._affinity.find(session, available)
        candidates = [part for part in available if part == kept] or available
        chosen = min(candidates, key=lambda part: (self._running[part] + 1) / self._num_replicas[part])
        self._affinity.assign(session, chosen)
        return chosen

    @contextmanager
    def running(self, part: EnginePart, num_requests: int) -> Iterator[None]:
        """Count the requests of a call during the block."""
        self._running[part] += num_requests
        try:
            yield
        finally:
            self._running[part] -= num_requests

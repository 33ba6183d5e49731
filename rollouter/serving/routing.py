"""Serve's request router for rollouts: keeps conversations on their replicas, and gives new ones to the replica with
the fewest outstanding tokens.

Serve's default router has no sessions, and its load is the number of calls: a call for a group of 16 counts as much as
the last turn of one conversation. Serve's consistent-hash router ignores load, and its prefix-aware router by default.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from asyncrl.core.ports import GenerateRequest
from rollouter.serving.ray_internals import PlacementRouter

MAX_AFFINITY_KEYS = 100_000


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


def call_size(args: Sequence[Any], max_model_len: int) -> CallSize:
    """Return the size of a call of `generate_tokens`, or of the OpenAI API, whose prompt is not tokenized yet.

    The requests of a call share their prompt, so it counts once. A response counts with its limit: the router does not
    see how long responses become, and a limit needs no time to be learned. A request from outside that has no limit, or
    an impossible one, counts `max_model_len`.
    """
    first = args[0] if args else None
    if isinstance(first, Sequence) and first and all(isinstance(one, GenerateRequest) for one in first):
        sampled = [0 if one.so_far is None else len(one.so_far.response_ids) for one in first]
        return CallSize(
            max(len(one.prompt_ids) + past for one, past in zip(first, sampled, strict=True)),
            sum(max(0, one.sampling["max_tokens"] - past) for one, past in zip(first, sampled, strict=True)),
        )
    for name in ("max_completion_tokens", "max_tokens"):
        limit = getattr(first, name, None)
        if isinstance(limit, int) and 0 < limit <= max_model_len:
            return CallSize(0, limit)
    return CallSize(0, max_model_len)


class OutstandingTokens:
    """Counts the tokens that each replica still has to compute for the calls of this router.

    A call is *reserved* from the choice of its replica on, so that the choices of concurrent calls see one another. It
    becomes a *try* when Serve sends it, and each try ends once. Serve may choose again for a reserved call, and may
    send a call again, even to the same replica, before it reports the end of the first try.
    """

    def __init__(self) -> None:
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
        return heapq.nsmallest(count, replicas, key=lambda replica: (self._tokens[replica], random.random()))

    def _subtract(self, replica: str, tokens: int) -> None:
        self._tokens[replica] -= tokens
        if not self._tokens[replica]:
            del self._tokens[replica]


class ReplicaAffinity:
    """Remembers the replica of each sample, so that its next turns find their KV cache. The least recently used sample
    is forgotten first."""

    def __init__(self, max_keys: int = MAX_AFFINITY_KEYS) -> None:
        self._max_keys = max_keys
        self._replicas: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def find(self, session: str, available: Container[str]) -> str | None:
        """Return the session's replica if it is available."""
        key = affinity_key(session)
        if key not in self._replicas or (replica := self._replicas[key][0]) not in available:
            return None
        self._replicas.move_to_end(key)
        return replica

    def cached(self, session: str, replica: str) -> int:
        """Return the longest context of the sample that was sent to the replica, in tokens."""
        known = self._replicas.get(affinity_key(session))
        return known[1] if known is not None and known[0] == replica else 0

    def assign(self, session: str, replica: str, context: int = 0) -> None:
        """Remember the session's replica, and the length of the context that was sent to it. A session without a name
        is ignored."""
        if not session:
            return
        key = affinity_key(session)
        self._replicas[key] = replica, max(context, self.cached(session, replica))
        self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)


class SessionRouter(PlacementRouter):
    """Routes calls by the `session_id` of `handle.options`, and new sessions by outstanding tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = ReplicaAffinity()
        self.outstanding = OutstandingTokens()

    def initialize_state(self, *, max_model_len: int) -> None:
        """Called by Serve with the `request_router_kwargs` of the deployment."""
        self._max_model_len = max_model_len

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the session's replica, or for a new session the least loaded one, and a second one in case that Serve
        cannot reach the first."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replicas[name]] for name in self.outstanding.least(replicas, 2)]
        session = pending_request.metadata.session_id
        kept = self._affinity.find(session, replicas)
        chosen = [kept] if kept is not None else self.outstanding.least(replicas, 2)
        if chosen and not pending_request.future.done():
            # The other conversations of a new sample follow at once, before Serve has sent this one.
            self._affinity.assign(session, chosen[0])
            size = call_size(pending_request.args, self._max_model_len)
            tokens = size.outstanding(self._affinity.cached(session, chosen[0]))
            self.outstanding.add(id(pending_request), chosen[0], tokens)
        return [[replicas[name]] for name in chosen]

    def on_request_placed(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        """Count the call at the replica to which Serve sends it, and remember the replica."""
        replica, metadata = replica_id.unique_id, pending_request.metadata
        self.outstanding.sent(id(pending_request), replica, metadata.internal_request_id)
        context = call_size(pending_request.args, self._max_model_len).context
        self._affinity.assign(metadata.session_id, replica, context)

    def on_request_abandoned(self, pending_request: PendingRequest) -> None:
        """Forget a call that Serve does not send."""
        self.outstanding.abandon(id(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """End a try. Called by Serve once for each: answered, failed, cancelled, or refused by the replica."""
        self.outstanding.finish(replica_id.unique_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the calls of a dead replica. Called by Serve."""
        super().on_replica_actor_died(replica_id)
        self.outstanding.drop(replica_id.unique_id)

"""Serve's request router for rollouts: keeps conversations on their replicas, and gives new ones to the replica with
the fewest outstanding tokens.

Serve's default router has no sessions, and its load is the number of calls: a call for a group of 16 counts as much as
the last turn of one conversation. Serve's consistent-hash router ignores load, and its prefix-aware router by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from asyncrl.core.ports import GenerateRequest
from rollouter.serving.balancing import CallSize, OutstandingTokens, SessionBalancer
from rollouter.serving.ray_internals import PlacementRouter


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


class SessionRouter(PlacementRouter):
    """Routes calls by the `session_id` of `handle.options`, and new sessions by outstanding tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._balancer = SessionBalancer()

    @property
    def outstanding(self) -> OutstandingTokens:
        return self._balancer.outstanding

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
        chosen = self._balancer.choose(session, replicas, 2)
        if chosen and not pending_request.future.done():
            size = call_size(pending_request.args, self._max_model_len)
            self._balancer.reserve(id(pending_request), session, chosen[0], size)
        return [[replicas[name]] for name in chosen]

    def on_request_placed(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        """Count the call at the replica to which Serve sends it, and remember the replica."""
        metadata, context = pending_request.metadata, call_size(pending_request.args, self._max_model_len).context
        self._balancer.sent(
            id(pending_request),
            metadata.session_id,
            replica_id.unique_id,
            metadata.internal_request_id,
            context=context,
        )

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

"""Serve's request router for rollouts: keeps sessions on their replicas, and chooses by load for new sessions.

Serve's default router has no sessions, and it may give a request the replica that was chosen for another request.
Serve's consistent-hash router ignores load.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

MAX_AFFINITY_KEYS = 100_000


def affinity_key(session: str) -> str:
    """Return the key of a session, `sample_0_7` for `sample_0_7/3`. Sessions of one key share prompt and replica."""
    return session.partition("/")[0]


class ReplicaAffinity:
    """Remembers the replica of each sample, so that its next turns find their KV cache. The least recently used sample
    is forgotten first."""

    def __init__(self, max_keys: int = MAX_AFFINITY_KEYS) -> None:
        self._max_keys = max_keys
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def find(self, session: str, available: Container[str]) -> str | None:
        """Return the session's replica if it is available."""
        key = affinity_key(session)
        if (replica := self._replicas.get(key)) is None or replica not in available:
            return None
        self._replicas.move_to_end(key)
        return replica

    def assign(self, session: str, replica: str) -> None:
        """Remember the session's replica. A session without a name is ignored."""
        if not session:
            return
        key = affinity_key(session)
        self._replicas[key] = replica
        self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)


class SessionRouter(RequestRouter):
    """Routes requests by the `session_id` of `handle.options`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = ReplicaAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica, or two of which Serve chooses the one with the shorter queue."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None and (session := pending_request.metadata.session_id):
            replica = self._affinity.find(session, replicas)
            if replica is not None:
                return [[replicas[replica]]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember the replica that Serve has chosen. Called by Serve."""
        self._affinity.assign(pending_request.metadata.session_id, replica_id.unique_id)

"""Serve's router for rollouts: a session stays on its replica, and a new one goes where less is to be done.

Serve's default router has no sessions, and answers requests in an order of its own, so that one may be given the
replica that was chosen for another. Its consistent-hash router knows no load.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rollouter.serving.homes import Homes


class SessionRouter(RequestRouter):
    """`handle.options(session_id=…)` names the session."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes = Homes()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica, or two of which Serve takes the one with the shorter queue."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None and (session := pending_request.metadata.session_id):
            home = self._homes.find(session, replicas)
            if home is not None:
                return [[replicas[home]]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve tells where a request went."""
        self._homes.settle(pending_request.metadata.session_id, replica_id.unique_id)

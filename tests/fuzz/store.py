"""The real weight store and its clients, on an actor that can be killed; weights are not copied."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio

from asyncrl.core.ports import Publication, StoreStatus, WeightsVersion
from asyncrl.weights import object_store
from asyncrl.weights.object_store import ObjectStorePublisher, WeightStoreActor
from tests.fuzz.remote import Gate


class FuzzStore(WeightStoreActor):
    """A process of the store; `number` counts the processes from 0."""

    def __init__(self, number: int) -> None:
        context = SimpleNamespace(was_current_actor_reconstructed=number > 0)
        with patch.object(object_store.ray, "get_runtime_context", lambda: context):
            super().__init__(wall_clock=anyio.current_time)
        self._number = number

    def die(self) -> None:
        """Do nothing, because the store has no files."""

    async def status(self) -> StoreStatus:
        return replace(await super().status(), pid=self._number)


class Publisher(ObjectStorePublisher):
    """A publisher whose weights are lost when its process dies, as objects of Ray are."""

    def __init__(
        self, store: Any, gate: Gate, owners: dict[WeightsVersion, Gate], *, call_s: float, lineage: int
    ) -> None:
        super().__init__(store, call_s=call_s, lineage=lineage)
        self._gate = gate
        self._owners = owners

    async def announce(self, publication: Publication, refs: Any) -> Publication:
        self._owners[WeightsVersion(self._lineage, publication.version)] = self._gate
        return await super().announce(publication, refs)

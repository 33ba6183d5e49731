"""A stand-in for a process of the Rollouter or the Trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.core.failures import AsyncRLError, InfraError
from asyncrl.core.records import RunRecord
from tests.fuzz.remote import Gate


@dataclass(eq=False)
class Process:
    """One process of the Rollouter or the Trainer. After `kill`, no message of the process passes its gate."""

    gate: Gate
    scope: anyio.CancelScope
    ready: anyio.Event
    go: anyio.Event
    send: Any
    records: Any
    stopped: bool = False
    _on_stop: Callable[[], None] = lambda: None
    error: AsyncRLError | None = None

    @classmethod
    def make(cls) -> Process:
        send, receive = anyio.create_memory_object_stream[RunRecord](1000)
        return cls(Gate(), anyio.CancelScope(), anyio.Event(), anyio.Event(), send, receive)

    async def put(self, record: RunRecord) -> None:
        await self.gate.passing()
        await self.send.send(record)

    def stop(self) -> None:
        self.stopped = True
        self._on_stop()

    def stops_by(self, stop: Callable[[], None]) -> None:
        """Set the function that ends the process; call it at once if `stop` was called before."""
        self._on_stop = stop
        if self.stopped:
            stop()

    async def run(self, main: Callable[[Process], Awaitable[None]]) -> None:
        try:
            with self.scope:
                await main(self)
        except AsyncRLError as error:
            self.error = error
        finally:
            self.ready.set()
            self.send.close()

    def kill(self) -> None:
        """Kill the process. The weights that it published are lost, even if its `run` has ended."""
        self.gate.kill()
        if not self.ended:
            self.error = InfraError("the process was killed")
            self.scope.cancel()

    @property
    def ended(self) -> bool:
        return bool(self.send.statistics().open_send_streams == 0)

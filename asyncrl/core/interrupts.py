"""The reaction of a command to Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskStatus


class Interrupts:
    """Handles SIGINT and SIGTERM: the first requests an orderly stop, the second cancels `scope`."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.on_first: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Requests an orderly stop; None: the first signal already cancels `scope`."""
        self.received = False

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Handle signals until cancelled."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async with anyio.create_task_group() as group:
                async for _ in signals:
                    is_first, self.received = not self.received, True
                    if is_first and self.on_first is not None:
                        group.start_soon(self.on_first)
                    else:
                        self.scope.cancel()

"""Ctrl-C: once asks for an orderly end, twice ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskStatus


class Interrupts:
    """SIGINT and SIGTERM of one run. Whatever they may end runs inside `scope`."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.orderly: Callable[[], Coroutine[Any, Any, None]] | None = None
        """How to end in order, from the moment that is possible; before, the first signal already cancels `scope`."""
        self.came = False

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Obey signals until cancelled; ready once `task_status` is started."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async with anyio.create_task_group() as group:
                async for _ in signals:
                    first, self.came = not self.came, True
                    if first and self.orderly is not None:
                        group.start_soon(self.orderly)
                    else:
                        self.scope.cancel()

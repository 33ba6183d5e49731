"""Handles signals, and ends every process that the driver started directly or indirectly."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio
import psutil
from anyio.abc import TaskStatus

_PR_SET_CHILD_SUBREAPER = 36
CLOCK_SLACK_S = 1.0
"""Maximum difference between the kernel's start time of a process and the wall clock."""
MAX_ROUNDS = 10
"""A process in uninterruptible sleep survives SIGKILL, so waiting for it is bounded."""


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


def adopt_orphans() -> None:
    """Make this process the parent of grandchildren whose parent dies (Linux), so that `end_descendants` finds them.

    Ray's workers, and vLLM's engine cores below them, are grandchildren of the driver; without this a worker that is
    killed leaves its engine core to process 1.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 0.0) -> int:
    """End every descendant of this process: SIGTERM, `grace_s` seconds later SIGKILL. Return how many were killed."""
    num_killed = 0
    me = psutil.Process(os.getpid())
    found = me.children(recursive=True)
    if grace_s > 0 and found:
        _signal(found, signal.SIGTERM)
        psutil.wait_procs(found, timeout=grace_s)
    # This process inherits the children of a killed one, so repeat until a round finds none.
    for _ in range(MAX_ROUNDS):
        if not (found := [child for child in me.children(recursive=True) if _is_alive(child)]):
            break
        num_killed += len(found)
        _signal(found, signal.SIGKILL)
        psutil.wait_procs(found, timeout=5.0)
    return num_killed


def end_known(pids: Iterable[int], known_at: float, *, title: str = "") -> int:
    """SIGKILL these processes of this machine, stopped or not, and wait up to 10 s until they are gone.

    Args:
        pids: ids of the processes, as known at `known_at`.
        known_at: wall clock; a process that began later has only reused the id, and is spared.
        title: start of their command lines. It protects processes of this machine that have the same ids as processes
            on another machine.

    Returns:
        The number of processes found.
    """
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            began, command = process.create_time(), "".join(process.cmdline()[:1])
            if began <= known_at + CLOCK_SLACK_S and command.startswith(title) and pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    _signal(found, signal.SIGKILL)
    psutil.wait_procs(found, timeout=10.0)
    return len(found)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:  # it has ended, or belongs to another user
            continue

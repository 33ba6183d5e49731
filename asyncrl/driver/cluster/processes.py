"""Ends every process that the driver started directly or indirectly."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

_PR_SET_CHILD_SUBREAPER = 36
CLOCK_SLACK_S = 1.0
"""Maximum difference between the kernel's start time of a process and the wall clock."""
MAX_ROUNDS = 10
"""A process in uninterruptible sleep survives SIGKILL, so waiting for it is bounded."""


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
        if not (found := [child for child in me.children(recursive=True) if is_alive(child.pid)]):
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


def is_alive(pid: int) -> bool:
    """Return whether the process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:  # it has ended, or belongs to another user
            continue

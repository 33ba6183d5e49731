"""No process outlives a run: whatever the driver started, however indirectly, is found and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

_PR_SET_CHILD_SUBREAPER = 36
CLOCK_SLACK_S = 1.0
"""The kernel's idea of when a process began, and the wall clock, may differ by so much."""
MAX_ROUNDS = 10
"""A process in uninterruptible sleep survives SIGKILL; it is not waited for without end."""


def adopt_orphans() -> None:
    """Make this process the parent of grandchildren whose parent dies (Linux), so that `end_descendants` finds them.

    Ray's workers, and vLLM's engine cores below them, are grandchildren of the driver; without this a worker that is
    killed leaves its engine core to process 1.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 0.0) -> int:
    """End every descendant of this process: SIGTERM, up to `grace_s` seconds of patience, SIGKILL. Returns how many."""
    ended = 0
    me = psutil.Process(os.getpid())
    found = me.children(recursive=True)
    if grace_s > 0 and found:
        _signal(found, signal.SIGTERM)
        psutil.wait_procs(found, timeout=grace_s)
    # A killed parent hands its children to us, so look again until a round finds nobody.
    for _ in range(MAX_ROUNDS):
        if not (found := [child for child in me.children(recursive=True) if _alive(child)]):
            break
        ended += len(found)
        _signal(found, signal.SIGKILL)
        psutil.wait_procs(found, timeout=5.0)
    return ended


def end_known(pids: Iterable[int], heard_at: float, *, title: str = "", limit_s: float = 10.0) -> int:
    """SIGKILL these processes of this machine, stopped or not, and wait up to `limit_s` until they are gone.

    Args:
        pids: theirs when they were heard of.
        heard_at: when that was, wall clock: one that began later has only been given the number again, and is let be.
        title: how their command lines begin, where it is not known whether they are on this machine.
        limit_s: for all of them together.

    Returns:
        How many were found.
    """
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            began, command = process.create_time(), "".join(process.cmdline()[:1])
            if began <= heard_at + CLOCK_SLACK_S and command.startswith(title) and pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    _signal(found, signal.SIGKILL)
    psutil.wait_procs(found, timeout=limit_s)
    return len(found)


def _alive(process: psutil.Process) -> bool:
    """It may vanish between being listed and being asked."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:  # gone, or somebody else's by now
            continue

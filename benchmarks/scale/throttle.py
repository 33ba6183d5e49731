"""Limits the CPU time of processes, so that a machine with few cores shows how many of them scale."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

STEP_S = 0.005
MOST_CREDIT_S = 0.01
"""CPU time that a process without work may save up."""


@contextmanager
def throttled(pids: Sequence[int], share: float) -> Iterator[None]:
    """Within the context, let each process have at most `share` of a core: stop it whenever it has had more CPU time. A
    process that ends meanwhile is left out."""
    ended = threading.Event()
    threads = [threading.Thread(target=_throttle, args=(pid, share, ended), daemon=True) for pid in pids]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _throttle(pid: int, share: float, ended: threading.Event) -> None:
    clock = (~pid << 3) | 2  # Linux's clock of a process's CPU time, as `clock_getcpuclockid` gives it
    with suppress(OSError):  # it has ended
        try:
            credit_s, used_s, now = 0.0, time.clock_gettime(clock), time.monotonic()
            while not ended.wait(STEP_S):
                before_s, before = used_s, now
                used_s, now = time.clock_gettime(clock), time.monotonic()
                credit_s = min(MOST_CREDIT_S, credit_s + share * (now - before) - (used_s - before_s))
                os.kill(pid, signal.SIGCONT if credit_s > 0 else signal.SIGSTOP)
        finally:
            os.kill(pid, signal.SIGCONT)

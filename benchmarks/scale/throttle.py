"""Lets processes run for a share of the time, so that they are the limit on a machine with few cores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

PERIOD_S = 0.05


@contextmanager
def throttled(pids: Sequence[int], share: float) -> Iterator[None]:
    """Within the context, stop each process for `1 - share` of each 50 ms. They run one after another, as far as their
    shares allow. A process that ends meanwhile is left out."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_throttle, args=(pid, share, PERIOD_S * place / len(pids), ended), daemon=True)
        for place, pid in enumerate(pids)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _throttle(pid: int, share: float, delay_s: float, ended: threading.Event) -> None:
    with suppress(ProcessLookupError):
        try:
            ended.wait(delay_s)
            while not ended.is_set():
                os.kill(pid, signal.SIGCONT)
                ended.wait(PERIOD_S * share)
                os.kill(pid, signal.SIGSTOP)
                ended.wait(PERIOD_S * (1 - share))
        finally:
            os.kill(pid, signal.SIGCONT)

"""A replica's word on itself, pushed to the weight store from a thread of its own.

A thread, since the event loop stands still while vLLM starts its engine, and since nothing that is slow or down at the
store's end may touch generation. One report at a time is on its way; what changed meanwhile is in the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from asyncrl.ports import Edition, ReplicaReport

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
ANSWER_WITHIN_S = 10.0
"""A store that takes longer is asked anew, with a newer report."""


class Reporter:
    """Reports until its process ends."""

    def __init__(self, store: Any, describe: Callable[[], ReplicaReport]) -> None:
        """
        Args:
            store: The weight store's handle.
            describe: Called in the reporter's thread.
        """
        self.newest: Edition | None = None
        """What was published last, as of the last answer."""
        self._store = store
        self._describe = describe
        self._changed = threading.Event()
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def changed(self) -> None:
        """Report now rather than within the second."""
        self._changed.set()

    def _run(self) -> None:
        while True:
            try:
                self.newest = ray.get(self._store.report.remote(self._describe()), timeout=ANSWER_WITHIN_S)
            except Exception as error:  # noqa: BLE001  a report that does not arrive is followed by another
                logger.debug("the weight store did not take a report: %r", error)
            self._changed.wait(REPORT_EVERY_S)
            self._changed.clear()

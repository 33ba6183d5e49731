"""Send items from a separate thread to a receiver that may be slow, refuse items or hang, without delaying the run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class Receiver(Generic[Item]):
    """Receives items in the thread of a `BackgroundSender`. Its methods may block and raise any exception."""

    refresh_s: float | None = None
    """Interval at which `refresh` is called while no item comes; None to never call it."""

    def open(self) -> None:
        """Import libraries and connect."""

    def send(self, items: Sequence[Item]) -> None:
        """Send a batch."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Publish the current values again."""

    def close(self, *, ok: bool) -> None:
        """End after the last item. `ok`: the run completed."""

    def abandon(self) -> None:
        """Stop a method that takes too long at the end of the run. Called from another thread; must return at once."""


class BackgroundSender(Generic[Item]):
    """A bounded queue of items and the thread that passes them to a receiver.

    Items that do not fit, or that the receiver refuses, are lost: they are counted, and the first loss is a warning.
    """

    def __init__(
        self, receiver: Receiver[Item], key: str, name: str, unit: str, *, max_items: int, max_batch: int = 1
    ) -> None:
        """Start the thread.

        Args:
            key: the configuration key of the receiver, for warnings.
            name: the receiver's name or address.
            unit: what the items are, in the plural, for warnings.
            max_batch: the most items in one batch.
        """
        self.lost = 0
        """Number of items that were not sent, without items that are None."""
        self._receiver = receiver
        self._key = key
        self._name = name
        self._unit = unit
        self._max_items = max_items
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._sending = False
        self._ok: bool | None = None
        """Whether the run completed; None until it ends."""
        self._unusable = False
        self._joined = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"send-{name}", daemon=True)
        self._thread.start()

    def put(self, items: Sequence[Item]) -> None:
        """Add items to the queue; those that do not fit are lost. Return at once."""
        with self._changed:
            accepts = self._ok is None and not self._unusable
            room = max(0, self._max_items - len(self._items)) if accepts else 0
            self._items.extend(items[:room])
            self.lost += _count(items[room:])
            self._changed.notify_all()
        if accepts and len(items) > room:
            self._warn("is too slow", f"{self._max_items} {self._unit} wait for it already, and more are lost")

    def settle(self, limit_s: float) -> None:
        """Wait until the queued items are sent or lost. Blocks for `limit_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._unusable or not (self._items or self._sending), limit_s)

    def end(self, *, ok: bool) -> None:
        """Send the queued items and accept no more. Return at once."""
        with self._changed:
            self._ok = ok if self._ok is None else self._ok
            self._changed.notify_all()

    def join(self, limit_s: float) -> None:
        """Wait after `end` until the thread has ended, and log how many items are lost. Blocks for `limit_s` at most.
        Only the first call has an effect."""
        if self._joined:
            return
        self._joined = True
        self._thread.join(limit_s)
        with self._changed:
            late = self._thread.is_alive()
            self.lost += _count(self._items)
            self._items.clear()
            self._warned = True
        if late:
            self._receiver.abandon()
            logger.warning(
                "%s did not answer within %g s at the end of the run: it lacks %d %s or more, which the run directory "
                "has",
                *(self._name, limit_s, self.lost, self._unit),
            )
        elif self.lost and not self._unusable:
            logger.warning("%s lacks %d %s of this run", self._name, self.lost, self._unit)

    def close(self, limit_s: float) -> None:
        """Call `end` for a completed run, then `join`."""
        self.end(ok=True)
        self.join(limit_s)

    def _run(self) -> None:
        try:
            self._receiver.open()
        except Exception as error:  # noqa: BLE001  the run continues without it
            self._warn("cannot be used", error)
            with self._changed:
                self._unusable = True
                self.lost += _count(self._items)
                self._items.clear()
                self._changed.notify_all()
            return
        while (items := self._next()) is not None:
            try:
                if items:
                    self._receiver.send(items)
                else:
                    self._receiver.refresh()
            except Exception as error:  # noqa: BLE001  the next batch may succeed
                self.lost += _count(items)
                self._warn(f"does not accept {self._unit}", error)
        try:
            self._receiver.close(ok=self._ok is True)
        except Exception as error:  # noqa: BLE001
            self._warn("did not close", error)

    def _next(self) -> list[Item] | None:
        """Return the next batch: an empty one if no item came for `refresh_s`, None if the sender has ended."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._items or self._ok is not None, self._receiver.refresh_s)
            self._sending = bool(self._items)
            if self._ok is not None and not self._items:
                return None
            return [self._items.popleft() for _ in range(min(self._max_batch, len(self._items)))]

    def _warn(self, problem: str, why: Exception | str) -> None:
        if not self._warned:
            self._warned = True
            reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            logger.warning("%s: %s %s (%s); the run continues", self._key, self._name, problem, reason)


def _count(items: Sequence[object]) -> int:
    return sum(item is not None for item in items)

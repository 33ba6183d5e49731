"""Records the walks of docs/architecture.md: the modules through which a sample and a weights version pass."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGES = ("asyncrl", "rollouter", "trainer", "skip")
NOT_ON_THE_WAY = ("asyncrl.profiling", "skip.manager", "skip.role", "rollouter.rollouter", "trainer.trainer")
"""Modules that only wrap calls or start the loops in which the walks take place."""


class WalkStep(NamedTuple):
    """A step of a walk."""

    name: str
    function: str
    """`module:qualified name`."""
    text: str
    """Description of the step on the page."""


class WalkRecorder:
    """Records the first call of each function of a walk, with the project modules on its call stack."""

    def __init__(self, steps: Sequence[WalkStep]) -> None:
        self.called: dict[str, None] = {}
        """Functions of the steps, in the order of their first call."""
        self._stacks: dict[str, list[str]] = {}
        self._wanted = {step.function for step in steps}
        self._names: dict[CodeType, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls in this thread and in threads that start during the block."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def modules(self, steps: Sequence[WalkStep]) -> list[str]:
        """Return the modules through which calls reach the steps, in the order of the walk."""
        return list(dict.fromkeys(module for step in steps for module in self._stacks[step.function]))

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = f"{frame.f_globals.get('__name__', '')}:{code.co_qualname}"
        if name in self._wanted and name not in self.called:
            self.called[name] = None
            self._stacks[name] = _modules_of(frame)


def _modules_of(frame: FrameType | None) -> list[str]:
    """Return the project modules on the stack, from the outermost call to the innermost."""
    found: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES and not module.startswith(NOT_ON_THE_WAY):
            found.append(module)
        frame = frame.f_back
    return found[::-1]

"""Records the walks of docs/architecture.md: the modules through which a sample and a weights version pass."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

PACKAGES = ("asyncrl", "rollouter", "trainer", "skip")
INSTRUMENTATION = "asyncrl.profiling"
NOT_ON_THE_WAY = (INSTRUMENTATION, "skip.manager", "rollouter.rollouter", "trainer.trainer")
"""Modules that only wrap calls or start the loops in which the walks take place."""


class WalkStep(NamedTuple):
    """A step of a walk."""

    name: str
    function: str
    """`module:qualified name`."""
    text: str
    """Description of the step on the page."""


class Walk:
    """Records what runs from the first call of the first step to the first call of the last step."""

    def __init__(self, *steps: WalkStep) -> None:
        self.steps = steps
        self.stacks: dict[str, list[str]] = {}
        """The steps' functions in the order of their first calls, with the project modules on the call stack."""
        self.entered: set[str] = set()
        """Project modules of which a function ran, in any thread."""
        self._functions = [step.function for step in steps]

    def modules(self, steps: Sequence[WalkStep]) -> list[str]:
        """Return the modules through which calls reach these steps of the walk, in its order."""
        return list(dict.fromkeys(module for step in steps for module in self.stacks[step.function]))

    def on_call(self, module: str, frame: FrameType) -> None:
        """Record that a function of a project module starts, or that a coroutine or generator continues."""
        function = f"{module}:{frame.f_code.co_qualname}"
        has_begun = function == self._functions[0] or self._functions[0] in self.stacks
        if not has_begun or self._functions[-1] in self.stacks:
            return
        if function in self._functions and function not in self.stacks:
            self.stacks[function] = [name for name in _modules_on_stack(frame) if _is_on_the_way(name)][::-1]
        # Only the first run of a process imports, so what an import calls is not part of the walk.
        if module not in self.entered and "importlib._bootstrap" not in _modules_on_stack(frame):
            self.entered.add(module)


@contextmanager
def recording(*walks: Walk) -> Iterator[None]:
    """Record calls in this thread and in threads that start during the block."""

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] in PACKAGES and not module.startswith(INSTRUMENTATION):
            for walk in walks:
                walk.on_call(module, frame)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def package_of(module: str) -> str:
    """Return the folder of a module, with dots."""
    return module.rpartition(".")[0] or module


def find_returns(modules: Sequence[str]) -> list[str]:
    """Return the modules at which the way comes back to a package that it has left."""
    packages = [package_of(module) for module in modules]
    return [
        module
        for number, module in enumerate(modules)
        if packages[number] in packages[:number] and packages[number] != packages[number - 1]
    ]


def _modules_on_stack(frame: FrameType | None) -> Iterator[str]:
    """Yield the modules of a call and of its callers, from the innermost call to the outermost."""
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _is_on_the_way(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES and not module.startswith(NOT_ON_THE_WAY)

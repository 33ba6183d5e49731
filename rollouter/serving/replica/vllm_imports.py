"""Imports vLLM into a replica, and into its engine core, which is a process of its own and begins with this module.
Workers of the engine that are no actors of Ray begin with it, too.

Importing vLLM takes 8 s of CPU time in each of the two, one after the other: most of the time until the first sample.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

from asyncrl.core.imports import collection_paused

_LOWERING = "torch._inductor.lowering"
_PR_SET_PDEATHSIG = 1
_PARENT = "ASYNCRL_ENGINE_PARENT"
"""Environment variable with the id of the process that starts others with this module."""


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent process ends.

    A replica that is killed cannot end its engine, and an engine that is stopped, or still loading, does not notice.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # `multiprocessing` knows the parent only after this module is imported.
    if os.environ.get(_PARENT) not in (None, str(os.getppid())):
        os._exit(1)
    os.environ[_PARENT] = str(os.getpid())  # for workers that this process starts


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep `import vllm` from importing torch's compiler, which vLLM patches if it can be imported, in a process that
    does not compile."""
    unused = os.environ.get("TORCHDYNAMO_DISABLE") == "1" and _LOWERING not in sys.modules
    if unused:
        sys.modules[_LOWERING] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        yield
    finally:
        if unused:
            del sys.modules[_LOWERING]


@contextmanager
def first_module_of_processes() -> Iterator[None]:
    """Start processes with `multiprocessing` (`spawn`) inside this context: each imports this module first."""
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = ModuleSpec(NAME, None)
    os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    finally:
        main.__spec__ = before
        os.environ.pop(_PARENT, None)


NAME = "rollouter.serving.replica.vllm_imports"
"""The name of this module, which is `__mp_main__` in a process that begins with it."""

if __name__ != NAME:  # before vLLM is imported, which takes long
    _die_with_parent()
with collection_paused():
    with _without_compiler():
        import vllm
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401
if __name__ != NAME:  # in an engine core, where collections during the start would search all that vLLM has loaded
    gc.freeze()

"""What this machine has, found out without loading torch."""

from __future__ import annotations

import os

from asyncrl.config.engine_checks import visible_gpus
from asyncrl.config.plan import Machine


def look_at_machine() -> Machine:
    """CPUs this process may use, visible NVIDIA GPUs, physical memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cpus=cpus, gpus=visible_gpus(), memory_bytes=_memory_bytes())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system names these
        return None

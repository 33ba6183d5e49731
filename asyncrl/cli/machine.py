"""What this machine has, found out without loading torch."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.config.plan import Machine


def look_at_machine() -> Machine:
    """CPUs this process may use, visible NVIDIA GPUs, physical memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cpus=cpus, gpus=_gpus(), memory_bytes=_memory_bytes())


def _gpus() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [device for device in visible.split(",") if device.strip() and device.strip() != "-1"]
    return min(present, len(chosen))


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system names these
        return None

"""The lag of an event loop on a fake clock, and the measurement of a process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncrl.profiling import Profiler, ProfilerSettings
from asyncrl.profiling import process_usage as processes
from asyncrl.profiling.process_usage import TICK_S, WINDOW_S, LoopLagMonitor, ProcessMonitor


class FakeTimerLoop(asyncio.AbstractEventLoop):
    """An event loop that runs its only timer when the test calls `turn`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timer: tuple[float, object, tuple[object, ...]] | None = None

    def call_later(self, delay: float, callback: object, *args: object, context: object = None) -> asyncio.TimerHandle:
        self.timer = (self.now_s + delay, callback, args)
        return asyncio.TimerHandle(self.now_s + delay, lambda: None, [], self)

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: object) -> None:
        self.timer = None

    def turn(self, late_s: float = 0.0) -> None:
        """Run the timer `late_s` too late."""
        assert self.timer is not None
        due_s, callback, args = self.timer
        self.now_s = due_s + late_s
        callback(*args)  # type: ignore[operator]


def watched(profiler: Profiler | None = None) -> tuple[FakeTimerLoop, LoopLagMonitor]:
    loop = FakeTimerLoop()
    monitor = LoopLagMonitor("queue", clock=lambda: loop.now_s, profiler=profiler or Profiler())
    asyncio._set_running_loop(loop)
    try:
        monitor.start()
    finally:
        asyncio._set_running_loop(None)
    return loop, monitor


def test_the_longest_lag_of_the_window_is_reported_and_then_forgotten() -> None:
    loop, monitor = watched()
    for late_s in (0.01, 0.4, 0.02, 0.2, 0.0):
        loop.turn(late_s)
    assert abs((monitor.worst_s() or 0.0) - 0.4) < 1e-9
    loop.now_s += 0.05  # the timer is not due yet
    assert abs((monitor.worst_s() or 0.0) - 0.4) < 1e-9
    loop.now_s -= 0.05
    began_s = loop.now_s
    while loop.now_s < began_s + WINDOW_S + 0.01:
        loop.turn()
    assert (monitor.worst_s() or 0.0) < 1e-9


def test_a_lag_that_has_not_ended_counts() -> None:
    loop, monitor = watched()
    loop.turn()
    loop.now_s += TICK_S + 7.0
    assert abs((monitor.worst_s() or 0.0) - 7.0) < 1e-9


def test_the_monitor_remembers_a_bounded_number_of_delays() -> None:
    loop, monitor = watched()
    for number in range(5000):
        loop.turn(0.001 * (number % 90))
    assert len(monitor._delays) <= WINDOW_S / TICK_S + 1


def test_a_stall_is_an_event_and_a_short_delay_is_not() -> None:
    profiler = Profiler()
    profiler.configure("queue", ProfilerSettings("summary", None, 10))
    loop, _ = watched(profiler)
    loop.turn(0.05)
    loop.turn(0.25)
    (event,) = profiler.drain()
    assert event["event"] == "loop.stall" and event["part"] == "queue"
    assert abs(event["duration_s"] - 0.25) < 1e-5
    profiler.close()


def test_a_stopped_monitor_has_no_value_and_no_timer() -> None:
    loop, monitor = watched()
    loop.turn(1.0)
    monitor.stop()
    assert monitor.worst_s() is None and loop.timer is None
    monitor.stop()


async def test_a_thread_can_see_that_a_real_loop_is_blocked() -> None:
    monitor = LoopLagMonitor("driver", profiler=Profiler())
    monitor.start()
    monitor.start()
    seen: list[float] = []

    def look() -> None:
        while (worst_s := monitor.worst_s() or 0.0) < 0.2:
            time.sleep(0.01)
        seen.append(worst_s)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10.0)  # this call blocks the loop
    assert seen and seen[0] >= 0.2
    monitor.stop()


async def test_a_process_measures_its_memory_cpu_and_lag() -> None:
    own = ProcessMonitor("driver")
    health = own.measure()
    assert health is not None and health.rss_bytes > 1 << 20 and health.lag_s is not None and health.dropped_events >= 0
    own.stop()
    last = ProcessMonitor("gone", pid=2**30).measure()
    assert last is None


def test_a_process_reports_only_its_own_dropped_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.configure("rollouter", ProfilerSettings("summary", tmp_path, 100))
    sent = {"timestamp": 0.0, "event": "profiler.dropped", "duration_s": 0.0, "events": 7}
    profiler.ingest("replica-a", [sent])
    monkeypatch.setattr(processes, "profile", profiler)
    health = ProcessMonitor("rollouter").measure()
    assert profiler.status()["dropped"] == 7 and health is not None and health.dropped_events == 0
    profiler.close()


def test_a_measurement_adds_nothing_to_the_table_of_interned_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    interned: list[str] = []

    def intern(string: str, /) -> str:
        interned.append(string)
        return string

    monitor = ProcessMonitor("queue")
    monkeypatch.setattr(sys, "intern", intern)
    assert Path("/proc/of", "a-path").parts
    assert "a-path" in interned, "pathlib interns its parts"
    interned.clear()
    usage = monitor.measure()
    assert usage is not None and usage.rss_bytes > 0
    assert interned == []

"""The watchdog, and what it says."""

from __future__ import annotations

import pytest

from asyncrl.cli.watchdog import StallError, Watchdog, describe
from asyncrl.waits import Wait


def test_progress_keeps_it_quiet_and_a_standstill_does_not() -> None:
    watchdog = Watchdog(10.0)
    for second in range(100):
        watchdog.observe(float(second), second // 9, {})
    watchdog.observe(109.0, 11, {})
    with pytest.raises(StallError, match=r"nothing moved for 11 s.*watchdog_s=10"):
        watchdog.observe(110.1, 11, {"trainer": [Wait("samples", 1, 11.0)]})


def test_it_names_what_every_part_waits_on() -> None:
    text = describe({"trainer": [Wait("samples", 1, 12.0)], "rollouter": [Wait("engine", 3, 90.4)], "queue": []})
    assert "The trainer waits on samples for 12 s." in text
    assert "The rollouter waits on engine for 90 s (3 tasks)." in text
    assert "The queue waits on nothing it knows of." in text

"""The watchdog, and what it says."""

from __future__ import annotations

import pytest

from asyncrl.cli.watchdog import StallError, Watchdog, describe
from asyncrl.waits import Wait, WaitBoard


def test_progress_keeps_it_quiet_and_a_standstill_does_not() -> None:
    watchdog = Watchdog(10.0)
    for second in range(100):
        watchdog.observe(float(second), second // 9, {})
    watchdog.observe(109.0, 11, {})
    with pytest.raises(StallError, match=r"nothing moved for 11 s.*watchdog_s=10"):
        watchdog.observe(110.1, 11, {"trainer": [Wait("samples", 1, 11.0)]})


def test_a_call_within_its_own_deadline_is_no_standstill_and_one_beyond_it_is() -> None:
    watchdog, now_s = Watchdog(10.0), 0.0
    board = WaitBoard(lambda: now_s)
    with board.waiting("permit"), board.waiting("train", limit_s=50.0):
        for second in range(60):
            now_s = float(second)
            watchdog.observe(now_s, "the same", {"trainer": board.snapshot()})
            assert {wait.edge: wait.bounded for wait in board.snapshot()} == {"permit": False, "train": second < 50}
        # The call's deadline should have ended it by then; as it has not, the watchdog does.
        now_s = 60.1
        with pytest.raises(StallError, match=r"nothing moved for 11 s.*train for 60 s"):
            watchdog.observe(now_s, "the same", {"trainer": board.snapshot()})


def test_it_names_what_every_part_waits_on() -> None:
    text = describe({"trainer": [Wait("samples", 1, 12.0)], "rollouter": [Wait("engine", 3, 90.4)], "queue": []})
    assert "The trainer waits on samples for 12 s." in text
    assert "The rollouter waits on engine for 90 s (3 tasks)." in text
    assert "The queue waits on nothing it knows of." in text

"""The watchdog counts progress, fails a stalled run with the chain of waits, and leaves the state in files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.waits import Wait, WaitBoard
from asyncrl.driver.stall_watchdog import StallError, Watchdog, progress_of
from asyncrl.observe.status.run_status import STATE_FILE, Restart, RunState, StateFile, load, read_state
from asyncrl.observe.status.why import write_stall
from tests.fakes.run_states import NOW, queue_status, report, rollouter_waits, running

STUCK = replace(
    rollouter_waits(running(published=WeightsVersion(0, 12), version=12), Wait("permit", 1, 93.5)),
    replicas=(report("0", version=12), report("1", "pausing")),
)


def later(state: RunState, seconds: float) -> RunState:
    """Return the same state as written later; the replicas have continued to report."""
    replicas = tuple(replace(report, reported_at=report.reported_at + seconds) for report in state.replicas)
    return replace(state, written_at=state.written_at + seconds, replicas=replicas)


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(10.0, start_s=60.0, gap_s=60.0)


def test_a_stall_fails_the_run_with_the_chain_of_waits_and_the_file(watchdog: Watchdog) -> None:
    for second in range(11):
        watchdog.observe(float(second), later(STUCK, second))
    with pytest.raises(StallError) as caught:
        watchdog.observe(10.6, later(STUCK, 11))
    assert caught.value.message.startswith(
        "no progress for 11 s (timeouts.watchdog_s=10): Trainer is blocked on samples"
    )
    assert "◀ version 12 is not applied ◀ replica 1 is paused for 10" in caught.value.message
    assert "stall.json" in caught.value.message


MOVES: list[Callable[[RunState, int], RunState]] = [
    lambda state, n: replace(state, queue=queue_status(counts=SampleCounts(fed=400 + n))),
    lambda state, n: replace(state, queue=queue_status(version=n)),
    lambda state, n: replace(state, queue=queue_status(lineage=n)),
    lambda state, n: replace(state, queue=None, counts=SampleCounts(fed=n)),
    lambda state, n: replace(state, step=n),
    lambda state, n: replace(state, version=n),
    lambda state, n: replace(state, published=WeightsVersion(0, n)),
    lambda state, n: replace(state, generated_tokens=n),
    lambda state, n: replace(state, replicas=(report(generated_tokens=n),)),
    lambda state, n: replace(state, replicas=(report(str(n)),)),
    lambda state, n: replace(state, restarts=(Restart("queue", n, 0.0, "x"),)),
    lambda state, n: replace(state, restarts=(Restart("queue", 2, 0.0, "x", recovered_at=n),)),
]


@pytest.mark.parametrize("move", MOVES)
def test_every_kind_of_progress_resets_the_watchdog(
    watchdog: Watchdog, move: Callable[[RunState, int], RunState]
) -> None:
    for step in range(5):
        watchdog.observe(step * 9.0, move(STUCK, step))
    with pytest.raises(StallError):
        watchdog.observe(36.0 + 10.1, move(STUCK, 4))


def test_the_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    watchdog = Watchdog(60.0)
    watchdog.observe(0.0, STUCK)
    watchdog.observe(3600.0, STUCK)
    for second in range(1, 51):
        watchdog.observe(3600.0 + second, STUCK)
    with pytest.raises(StallError, match="no progress for 61 s"):
        watchdog.observe(3651.0, STUCK)


WITH_OLD = replace(STUCK, replicas=(*STUCK.replicas, report("old", version=11)))
BUSY = {"waits": {"trainer": (Wait("samples", 1, 99.0),)}, "silent_s": {"store": 3.0}}
BUSY_REPLICAS = tuple(replace(report, reported_at=NOW + 10, in_flight=3) for report in STUCK.replicas)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STUCK, replace(later(STUCK, 10.1), replicas=BUSY_REPLICAS, **BUSY)),
        pytest.param(WITH_OLD, later(STUCK, 10.1), id="a replica disappears"),
        pytest.param(
            replace(STUCK, replicas=(report(phase="fetching"),)),
            replace(STUCK, replicas=(report(phase="serving"),)),
            id="a replica fails to fetch again and again",
        ),
    ],
)
def test_changes_without_progress_do_not_reset_the_watchdog(
    watchdog: Watchdog, before: RunState, after: RunState
) -> None:
    assert not progress_of(after).is_beyond(progress_of(before))
    watchdog.observe(0.0, before)
    with pytest.raises(StallError):
        watchdog.observe(10.1, after)


def test_a_call_counts_as_progress_until_its_own_deadline(watchdog: Watchdog) -> None:
    now_s = 0.0
    board = WaitBoard(lambda: now_s)
    with board.waiting("permit"), board.waiting("train", limit_s=50.0):
        for second in range(60):
            now_s = float(second)
            watchdog.observe(now_s, replace(STUCK, waits={"trainer": tuple(board.snapshot())}))
            assert {wait.edge: wait.bounded for wait in board.snapshot()} == {"permit": False, "train": second < 50}
        # The call's deadline should have ended the call by then; if it has not, the watchdog fails the run.
        now_s = 60.1
        with pytest.raises(StallError, match=r"no progress for 11 s.*optimizer step for 60 s"):
            watchdog.observe(now_s, replace(STUCK, waits={"trainer": (Wait("train", 1, 60.1),)}))


@pytest.mark.parametrize(
    "state",
    [
        replace(STUCK, restarting={"trainer": NOW}),
        replace(STUCK, replicas=(report("0", "starting", phase_since=NOW),)),
    ],
)
def test_a_restart_has_its_own_deadline(watchdog: Watchdog, state: RunState) -> None:
    for second in range(70):
        watchdog.observe(float(second), later(state, second))
    with pytest.raises(StallError, match=r"being restarted|is starting its engine"):
        watchdog.observe(71.0, later(state, 71))


def test_a_start_counts_as_progress(watchdog: Watchdog) -> None:
    for second in range(0, 100, 9):
        watchdog.observe(float(second), replace(STUCK, phase="starting"))
    watchdog.observe(105.0, replace(STUCK, phase="running"))
    with pytest.raises(StallError):
        watchdog.observe(120.0, replace(STUCK, phase="running"))


# ---------------------------------------------------------------------------------------------- the files


def test_the_state_file_is_replaced_whole_and_read_back(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    file = StateFile(tmp_path / STATE_FILE)
    for state in (STUCK, later(STUCK, 1)):
        anyio.run(file.write, state)
        assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"", "is torn"), (b'{"schema_ver', "is torn"), (b"[]", "is damaged"), (b"\xff", "is torn or damaged")],
)
def test_a_damaged_state_file_is_an_error_with_its_path(tmp_path: Path, content: bytes, error: str) -> None:
    path = tmp_path / STATE_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} {error}"):
        read_state(tmp_path)


def test_a_full_disk_is_logged_once_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path / STATE_FILE)
    file.write_now(STUCK)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Path, "open", full)
        for second in range(3):
            file.write_now(later(STUCK, second))
        assert write_stall(tmp_path, STUCK) is None
    assert [record.getMessage().split(" (")[0] for record in caplog.records][:1] == [
        f"cannot write {tmp_path / STATE_FILE}"
    ]
    assert len(caplog.records) == 2
    assert read_state(tmp_path) == STUCK
    file.write_now(later(STUCK, 9))
    assert read_state(tmp_path) == later(STUCK, 9)


def test_a_stall_writes_the_whole_state(tmp_path: Path) -> None:
    path = write_stall(tmp_path, STUCK)
    assert path == tmp_path / "stall.json"
    dumped = json.loads(path.read_text())
    assert dumped["why"].endswith("replica 1 is paused for 94 s (4 requests; pid 100, engine 101)")
    assert dumped["chain"][-1]["cause"] == "replica"
    assert load(dumped["state"]) == STUCK

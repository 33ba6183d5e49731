"""The turn log: the next incarnation receives completed turns, and disk use is bounded."""

from __future__ import annotations

import errno
import os
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import BugError, ConfigError, DiskFullError
from asyncrl.core.types import FinishReason, SampleId, Span, Turn
from asyncrl.queue.turn_log import MAX_FRAME_BYTES, FileTurns, NoTurns, forget_old_turns, read_turns
from tests.fakes.samples import assert_same_turn, make_turn

ONE, TWO, THREE = SampleId(0, 1), SampleId(0, 2), SampleId(1, 3)


def logs(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "samples").glob("turns-*.log"))


async def keys(turns: FileTurns, sample_id: SampleId) -> set[str]:
    return set(await turns.completed(sample_id))


async def test_the_next_incarnation_receives_completed_turns(tmp_path: Path) -> None:
    first = FileTurns(tmp_path, 1)
    whole = Turn(
        np.array([3, 1, 2], np.int32),
        np.array([-0.5, -1e-30, -np.inf], np.float32),
        (Span(0, 4), Span(2, 5)),
        FinishReason.LENGTH,
    )
    empty = Turn(np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.STOP)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.record, ONE, {"0": whole})
        tasks.start_soon(first.record, ONE, {"baseline": empty})
        tasks.start_soon(first.record, TWO, {"0": make_turn(7)})
    assert await first.completed(ONE) == {}, "an incarnation does not receive its own turns"

    second = FileTurns(tmp_path, 2)
    given_back = await second.completed(ONE)
    assert set(given_back) == {"0", "baseline"}
    assert_same_turn(given_back["0"], whole)
    assert_same_turn(given_back["baseline"], empty)
    assert_same_turn((await second.completed(TWO))["0"], make_turn(7))
    assert await second.completed(THREE) == {}


async def test_a_received_turn_may_not_be_recorded_again(tmp_path: Path) -> None:
    await FileTurns(tmp_path, 1).record(ONE, {"0": make_turn(1)})
    second = FileTurns(tmp_path, 2)
    assert await keys(second, ONE) == {"0"}
    with pytest.raises(BugError, match="turn 0 of sample_0_1 was completed by an earlier incarnation"):
        await second.record(ONE, {"0": make_turn(1)})
    await second.record(ONE, {"1": make_turn(1)})
    await second.forget(ONE)
    # The payload of the sample was lost, so the sample is fed again.
    assert await keys(second, ONE) == set()
    await second.record(ONE, {"0": make_turn(1)})


async def test_disk_use_stays_bounded(tmp_path: Path) -> None:
    turns = FileTurns(tmp_path, 1, max_log_bytes=2000)
    await turns.record(THREE, {"straggler": make_turn(5)})
    for index in range(10, 110):
        await turns.record(SampleId(0, index), {"0": make_turn(1, tokens=50)})
        await turns.forget(SampleId(0, index))
        assert len(logs(tmp_path)) <= 2
    assert logs(tmp_path)[0] == "turns-1-1.log", "the log of the straggler is still needed"
    await turns.forget(THREE)
    assert len(logs(tmp_path)) == 1
    assert await keys(FileTurns(tmp_path, 2), THREE) == set()


async def test_a_torn_or_damaged_log_has_the_turns_before_the_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = FileTurns(tmp_path, 1)
    ends = []
    path = tmp_path / "samples" / "turns-1-1.log"
    for index in (1, 2, 3):
        await first.record(SampleId(0, index), {"0": make_turn(index)})
        ends.append(path.stat().st_size)
    whole = path.read_bytes()

    async def found() -> list[int]:
        turns = FileTurns(tmp_path, 2)
        return [index for index in (1, 2, 3) if await keys(turns, SampleId(0, index))]

    for end in range(0, len(whole), 29):
        path.write_bytes(whole[:end])
        assert await found() == [index for index, last in enumerate(ends, 1) if last <= end]
        path.parent.mkdir(exist_ok=True)
    for place in range(ends[0], len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert await found() == ([1] if place < ends[1] else [1, 2])
    assert f"{path}: " in caplog.text and "The 1 turns before it are used" in caplog.text


async def test_a_turn_of_impossible_size_is_damage_and_is_not_read(tmp_path: Path) -> None:
    """The file is sparse: it takes no room on disk, and the memory of whoever reads it."""
    await FileTurns(tmp_path, 1).record(ONE, {"0": make_turn(1)})
    path = tmp_path / "samples" / "turns-1-1.log"
    with path.open("ab") as file:
        file.write(path.read_bytes()[:1] + (MAX_FRAME_BYTES + 1).to_bytes(8, "little"))
        file.truncate(file.tell() + MAX_FRAME_BYTES + 1)
    tracemalloc.start()
    second = FileTurns(tmp_path, 2)
    assert await keys(second, ONE) == {"0"} and await keys(second, TWO) == set()
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


async def test_a_log_damaged_after_it_was_read_loses_only_the_damaged_turn(tmp_path: Path) -> None:
    first = FileTurns(tmp_path, 1)
    for sample_id in (ONE, TWO):
        await first.record(sample_id, {"0": make_turn(1)})
    second = FileTurns(tmp_path, 2)
    assert await keys(second, ONE) == {"0"}
    path = tmp_path / "samples" / "turns-1-1.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert await keys(second, TWO) == set()
    await second.record(TWO, {"0": make_turn(1)})


async def test_a_full_disk_leaves_no_torn_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FileTurns(tmp_path, 1)
    await turns.record(ONE, {"0": make_turn(1)})

    def half(descriptor: int, buffers: Sequence[memoryview]) -> int:
        os.write(descriptor, buffers[1][:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("asyncrl.storage.segments.os.writev", half)
        with pytest.raises(DiskFullError, match=r"turns-1-1\.log"):
            await turns.record(TWO, {"0": make_turn(2)})
    await turns.record(THREE, {"0": make_turn(3)})
    assert [turn.sample_id for turn in read_turns(tmp_path)] == [ONE, THREE]


async def test_two_logs_of_one_incarnation_are_a_bug(tmp_path: Path) -> None:
    await FileTurns(tmp_path, 1).record(ONE, {"0": make_turn(1)})
    with pytest.raises(BugError, match="two processes log turns as incarnation 1"):
        await FileTurns(tmp_path, 1).record(ONE, {"1": make_turn(1)})


async def test_an_unwritable_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write"):
        await FileTurns(tmp_path, 1).record(ONE, {"0": make_turn(1)})


async def test_all_turns_on_disk_are_read_in_order(tmp_path: Path) -> None:
    assert list(read_turns(tmp_path)) == []
    first = FileTurns(tmp_path, 9, max_log_bytes=1)
    await first.record(ONE, {"0": make_turn(1, tokens=3)})
    await first.record(TWO, {"baseline": make_turn(1, tokens=5)})
    second = FileTurns(tmp_path, 10)
    await second.record(ONE, {"1": make_turn(1, tokens=0)})
    await second.record(THREE, {"0": make_turn(1, tokens=1)})
    await second.forget(THREE)
    assert [(frame.sample_id, frame.key, len(frame.turn.response_ids)) for frame in read_turns(tmp_path)] == [
        (ONE, "0", 3),
        (TWO, "baseline", 5),
        (ONE, "1", 0),
        (THREE, "0", 1),
    ]


async def test_an_ended_run_leaves_no_turns_that_it_no_longer_needs(tmp_path: Path) -> None:
    turns = FileTurns(tmp_path, 1)
    await turns.aclose()
    for sample_id in (ONE, TWO):
        await turns.record(sample_id, {"0": make_turn(1)})
        await turns.forget(sample_id)
    assert logs(tmp_path) == ["turns-1-1.log"], "the run may still record turns"
    await turns.aclose()
    assert logs(tmp_path) == []
    stopped = FileTurns(tmp_path, 2)
    await stopped.record(ONE, {"0": make_turn(1)})
    await stopped.aclose()
    assert await keys(FileTurns(tmp_path, 3), ONE) == {"0"}, "a resumed run can use the turn"


async def test_unneeded_turns_of_a_dead_rollouter_are_deleted(tmp_path: Path) -> None:
    first, second = FileTurns(tmp_path, 1, max_log_bytes=1), FileTurns(tmp_path, 2)
    await first.record(ONE, {"0": make_turn(1)})
    await first.record(TWO, {"0": make_turn(2)})
    await second.record(ONE, {"1": make_turn(3)})
    await second.record(THREE, {"0": make_turn(4)})
    await forget_old_turns(tmp_path, 2, lambda sample_id: sample_id == TWO)
    assert logs(tmp_path) == ["turns-1-1.log", "turns-2-1.log"]
    await forget_old_turns(tmp_path, 3, lambda sample_id: sample_id == ONE)
    assert logs(tmp_path) == ["turns-2-1.log"], "the log has a turn that is needed"
    third = FileTurns(tmp_path, 3)
    assert (await keys(third, ONE), await keys(third, THREE)) == (set(), {"0"})


async def test_a_link_and_a_pipe_are_no_turn_logs(tmp_path: Path) -> None:
    """Forgetting a turn writes to its log, and opening a pipe would wait forever."""
    await FileTurns(tmp_path / "other", 1).record(ONE, {"0": make_turn(1)})
    theirs = tmp_path / "other" / "samples" / "turns-1-1.log"
    before = theirs.read_bytes()
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "turns-1-1.log").symlink_to(theirs)
    os.mkfifo(tmp_path / "samples" / "turns-1-2.log")
    turns = FileTurns(tmp_path, 2)
    assert await keys(turns, ONE) == set()
    await turns.forget(ONE)
    await forget_old_turns(tmp_path, 2, lambda _: True)
    assert theirs.read_bytes() == before
    assert logs(tmp_path) == ["turns-1-1.log", "turns-1-2.log"]


async def test_a_failure_to_delete_turns_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("in the way")
    await forget_old_turns(tmp_path, 2, lambda sample_id: True)
    assert "may stay on disk" in caplog.text


async def test_without_a_journal_no_turn_is_stored(tmp_path: Path) -> None:
    turns = NoTurns()
    await turns.record(ONE, {"0": make_turn(1)})
    assert await turns.completed(ONE) == {}
    await turns.forget(ONE)


steps = st.lists(
    st.tuples(st.sampled_from(["record", "forget", "restart"]), st.integers(1, 4), st.sampled_from(["0", "1", "2"])),
    max_size=40,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.sampled_from([1, 700, 1 << 20]))
def test_any_order_of_records_and_restarts_keeps_the_turns_that_are_not_forgotten(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int, str]], max_log_bytes: int
) -> None:
    """Compare the turn log with a plain dictionary."""

    async def live() -> None:
        run_dir = tmp_path_factory.mktemp("run")
        incarnation, expected, seed = 1, {}, 0
        turns = FileTurns(run_dir, 1, max_log_bytes=max_log_bytes)
        for kind, index, key in [*plan, ("restart", 1, "0")]:
            sample_id = SampleId(0, index)
            if kind == "record" and (sample_id, key) not in expected:
                seed += 1
                await turns.record(sample_id, {key: make_turn(seed)})
                expected[sample_id, key] = seed
            elif kind == "forget":
                await turns.forget(sample_id)
                expected = {place: turn for place, turn in expected.items() if place[0] != sample_id}
            elif kind == "restart":
                incarnation += 1
                turns = FileTurns(run_dir, incarnation, max_log_bytes=max_log_bytes)
                for number in (1, 2, 3, 4):
                    found = await turns.completed(SampleId(0, number))
                    assert set(found) == {name for sample, name in expected if sample.index == number}
                    for name, turn in found.items():
                        assert_same_turn(turn, make_turn(expected[SampleId(0, number), name]))
        if not expected:
            assert logs(run_dir) == []

    anyio.run(live)


async def test_a_killed_process_loses_no_turn(tmp_path: Path) -> None:
    script = """
import os, signal, sys, anyio
from pathlib import Path
from asyncrl.queue.turn_log import MAX_FRAME_BYTES, FileTurns
from asyncrl.core.types import SampleId
from tests.fakes.samples import make_turn
async def write():
    turns = FileTurns(Path(sys.argv[1]), 1)
    async def keep_recording(index):
        for number in range(100_000):
            await turns.record(SampleId(0, index), {str(number): make_turn(number)})
            os.write(1, f"{index} {number}\\n".encode())
            if number == 40 and index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    async with anyio.create_task_group() as tasks:
        for index in range(1, 9):
            tasks.start_soon(keep_recording, index)
anyio.run(write)
"""
    done = await anyio.run_process([sys.executable, "-c", script, str(tmp_path)], stderr=sys.stderr, check=False)
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert done.returncode == -9 and len(lines) >= 41
    turns = FileTurns(tmp_path, 2)
    for index in range(1, 9):
        found = await turns.completed(SampleId(0, index))
        for number in (number for recorded, number in lines if int(recorded) == index):
            assert_same_turn(found[number], make_turn(int(number)))

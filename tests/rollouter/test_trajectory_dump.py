"""The trajectory dump: the content of a line, the order of samples, failing disks, and the dispatcher's calls."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import to_thread
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.rollout import RolloutConfig
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Generated, TokenRow, Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, Prompt, Replay, SampleId, Span
from asyncrl.storage import recent_samples as recent_module
from asyncrl.storage import trajectory_files as files_module
from asyncrl.storage.recent_samples import RecentSamples, recent_names
from asyncrl.storage.trajectory_files import file_name, find, parse, to_line
from rollouter import trajectory_dump as dump_module
from rollouter.sample_runner import SampleProgress
from rollouter.trajectory_dump import SampleKeeper, TrajectoryDump, describe, make_files
from tests.fakes import dumped
from tests.fakes.dispatcher import DispatcherRig, leased_samples
from tests.fakes.dumped import SCORES, decode, group, guess, ids, prompt, sample
from tests.fakes.engine import FakeFleet
from tests.fakes.hostile import messages, texts, values
from tests.fakes.parts import FakeScorer, until


def dump_in(tmp_path: Path, clock: Any = lambda: 1000.5) -> TrajectoryDump:
    return TrajectoryDump(tmp_path / "dump", tmp_path / "run", decode, clock)


def lines(tmp_path: Path, index: int = 42) -> list[dict[str, Any]]:
    text = (tmp_path / "dump" / file_name(index)).read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_a_line_describes_one_trajectory(tmp_path: Path) -> None:
    dump = dump_in(tmp_path)
    await dump.write(sample(), prompt(), group(), SCORES)
    first, second = lines(tmp_path)
    assert list(first)[:3] == ["sample_id", "trajectory", "num_trajectories"]
    assert first == {
        "sample_id": "sample_0_42",
        "trajectory": 0,
        "num_trajectories": 2,
        "asked": 0,
        "run": str(tmp_path / "run"),
        "at": 1000.5,
        "data_source": "arithmetic",
        "ground_truth": "42",
        "finish_reason": "stop",
        "reward": 1.25,
        "reward_extra": {"rule": 1.0},
        "turn_rewards": [0.25, 0.0],
        "scores": {"calc_reward": 1.0},
        "metrics": {"calculator/calls": 1.0},
        "generate_s": 1.5,
        "reward_s": 0.05,
        "baseline_reward": None,
        "replayed_from": None,
        "substituted": False,
        "messages": list(map(dict, dumped.calculation().messages)),
        "turns": [
            {
                "row": 0,
                "first_token": 0,
                "num_tokens": 14,
                "finish_reason": "tool_call",
                "generate_s": 0.5,
                "calls": [
                    {
                        "name": "calculator",
                        "arguments": '{"expression": "6*7"}',
                        "result": "42",
                        "status": "ok",
                        "reward": 0.25,
                        "duration_s": 0.012,
                        "wait_s": 0.5,
                        "metrics": {"calls": 1.0},
                    }
                ],
                "reward": 0.25,
                "user_s": 0.0,
                "text": [[3, "calculate"], [4, "(6*7)"]],
            },
            {
                "row": 0,
                "first_token": 24,
                "num_tokens": 9,
                "finish_reason": "stop",
                "generate_s": 0.25,
                "calls": [],
                "reward": 0.0,
                "user_s": 0.0,
                "text": [[4, "It is 42."]],
            },
        ],
        "rows": [
            {
                "prompt_ids": ids(dumped.PROMPT).tolist(),
                "response_ids": ids("calculate(6*7)[tool: 42]It is 42.").tolist(),
                "response_mask": [[1, 14], [0, 10], [1, 9]],
                "rollout_log_probs": [-0.12346] * 14 + [0.0] * 10 + [-0.12346] * 9,
                "spans": [[0, 3], [9, 4]],
            }
        ],
    }
    assert second["messages"] == [*map(dict, prompt().messages), {"role": "assistant", "content": "It is 41."}]
    assert (second["trajectory"], second["finish_reason"], second["reward"]) == (1, "length", 0.0)


async def test_a_prompt_without_messages_is_dumped_as_text(tmp_path: Path) -> None:
    await dump_in(tmp_path).write(sample(1, group()[1:]), Prompt(ids("6*7?")), group()[1:], SCORES[1:])
    assert lines(tmp_path, 1)[0]["messages"][0] == {"role": "prompt", "content": "6*7?"}


async def test_samples_are_written_one_after_another_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write is slow. The other writes wait for it, and so do their samples."""
    go, begun, at_work, real = anyio.Event(), anyio.Event(), [], dump_module.append

    async def slow(directory: Path, index: int, data: bytes, mode: int) -> None:
        at_work.append(index)
        begun.set()
        await go.wait()
        await real(directory, index, data, mode)

    monkeypatch.setattr(dump_module, "append", slow)
    dump = dump_in(tmp_path)
    done: list[int] = []

    async def write(index: int) -> None:
        await dump.write(sample(index), prompt(), group(), SCORES)
        done.append(index)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for index in range(1, 6):
                tasks.start_soon(write, index)
            await begun.wait()
            await anyio.wait_all_tasks_blocked()
            assert (at_work, done) == ([1], [])
            go.set()
    assert [line["sample_id"] for line in lines(tmp_path)[::2]] == [f"sample_0_{index}" for index in range(1, 6)]
    assert sorted(done) == [1, 2, 3, 4, 5]


async def test_a_cancelled_sample_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(files_module, "open_at_line", lambda *_: go.wait(10))
    with anyio.fail_after(5):
        with anyio.move_on_after(0.05) as scope:
            await dump_in(tmp_path).write(sample(), prompt(), group(), SCORES)
        assert scope.cancelled_caught
    go.set()


async def test_each_kind_of_disk_error_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [errno.ENOSPC, errno.ENOSPC, errno.EROFS]

    async def fails(*_: Any) -> None:
        number = errors.pop(0)
        raise OSError(number, os.strerror(number))

    dump = dump_in(tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(dump_module, "append", fails)
        for index in (1, 2, 3):
            await dump.write(sample(index), prompt(), group(), SCORES)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith(
        f"sample_0_1 is not dumped in {tmp_path / 'dump'}: No space left on device. It is still trained on"
    )
    assert messages[1].startswith("sample_0_3") and "Read-only file system" in messages[1]
    await dump.write(sample(4), prompt(), group(), SCORES)
    assert {line["sample_id"] for line in lines(tmp_path)} == {"sample_0_4"}


def undecodable(tokens: Any) -> str:
    raise IndexError("no such token")


@pytest.mark.parametrize(
    ("directory", "decode", "message"),
    [("file", decode, "Not a directory"), ("dump", undecodable, "IndexError: no such token")],
)
async def test_a_sample_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, directory: str, decode: Any, message: str
) -> None:
    (tmp_path / "file").write_text("")
    dump = TrajectoryDump(tmp_path / directory, tmp_path, decode)
    await dump.write(sample(), prompt(), group(), SCORES)
    assert message in caplog.text


async def test_columns_that_are_not_json_become_their_repr(tmp_path: Path) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    knot: list[Any] = []
    knot.append(knot)
    answers: dict[Any, Any] = {
        "bytes": b"\x00", "set": {1}, "nan": float("nan"), "number": np.float32(0.5), "array": np.arange(2),
        "odd": Odd(), "half": "\udc80", "line": "a\u2028b", 7: None, "knot": knot, "long": range(3),
        "image": b"x" * 9000, "digits": -(10**5000), "\ud83d": 1,
    }  # fmt: skip
    dump = dump_in(tmp_path)
    await dump.write(sample(), replace(prompt(), ground_truth=answers), group(), SCORES)
    column = lines(tmp_path)[0]["ground_truth"]
    assert "[" * 20 in json.dumps(column.pop("knot"))
    assert column.pop("image").endswith("… (9,003 characters)")
    assert column == {
        "bytes": "b'\\x00'", "set": "{1}", "nan": None, "number": 0.5, "array": "array([0, 1])",
        "odd": "<Odd whose repr raised RuntimeError>", "half": "\udc80", "line": "a\u2028b", "7": None,
        "long": "range(0, 3)", "digits": "<int whose repr raised ValueError>", "\ud83d": 1,
    }  # fmt: skip


def test_a_replayed_sample_is_dumped_with_both_versions() -> None:
    recorded = tuple(row.spans for trajectory in group() for row in trajectory.rows)
    made = sample(replay=Replay(42, True, recorded))
    current = (replace(made.rows[0], spans=(Span(0, 9),)), made.rows[1])
    first, second = describe(replace(made, rows=current), prompt(), group(), SCORES, decode, run="/run", at=1.0)
    assert (first.replayed_from, first.substituted) == (42, True)
    assert first.trajectory.rows[0].spans == (Span(0, 9),)
    assert first.recorded_spans == ((Span(0, 3), Span(9, 4)),)
    assert [piece.version for piece in first.texts[0]] == [9]
    assert second.recorded_spans == ()


def test_a_character_sampled_under_two_versions_belongs_to_the_version_of_its_last_token() -> None:
    text = "aé".encode()
    row = TokenRow(
        ids("x"), np.frombuffer(text, np.uint8).astype(np.int32), np.ones(3, np.bool_), np.zeros(3, np.float32),
        (Span(0, 1), Span(2, 2)),
    )  # fmt: skip
    trajectory = Trajectory((row,), (TurnInfo(0, 0, 3, FinishReason.STOP),), FinishReason.STOP)
    (one,) = describe(
        sample(1, [trajectory]), prompt(), [trajectory], [Score(0.0)],
        lambda tokens: bytes(tokens.tolist()).decode(errors="replace"), run="/run", at=1.0,
    )  # fmt: skip
    assert one.texts == (((1, "a"), (2, "é")),)


async def test_the_configuration_sets_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_files(Config(rollout=RolloutConfig(kept_samples=0)), tmp_path, decode) == []
    monkeypatch.chdir(tmp_path)
    for files in make_files(Config(rollout=RolloutConfig(dump_dir="here/below")), tmp_path, decode):
        async with files.running():
            await files.write(sample(), prompt(), group(), SCORES)
    assert (tmp_path / "here" / "below" / file_name(42)).exists()
    assert recent_names(tmp_path / "kept") == ["sample_0_42"]


# ------------------------------------------------------------------------------------------------ kept samples


def kept_indices(tmp_path: Path) -> set[int]:
    return {SampleId.parse(name).index for name in recent_names(tmp_path / "kept")}


async def test_samples_are_kept_in_the_run_directory_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (files,) = make_files(Config(), tmp_path, decode)
    async with files.running():
        for index in range(1, 211):
            await files.write(sample(index), prompt(), group(), SCORES)
        # No sample waits for the disk, and those that will not be kept are never encoded.
        assert kept_indices(tmp_path) == set()
    assert kept_indices(tmp_path) == set(range(11, 211))
    os.rename(tmp_path / "kept", tmp_path / "gone")
    async with files.running():
        for index in (211, 212):
            await files.write(sample(index), prompt(), group(), SCORES)
    (record,) = caplog.records
    assert "sample_0_21" in record.message
    assert "is not kept for `asyncrl show`" in record.message
    assert "rollout.kept_samples=0 keeps none" in record.message


async def test_samples_are_kept_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "KEEP_EVERY_S", 0.0)
    (files,) = make_files(Config(), tmp_path, decode)
    with anyio.fail_after(20):
        async with files.running():
            for index in (1, 2):
                await files.write(sample(index), prompt(), group(), SCORES)
                await until(partial(lambda expected: expected in kept_indices(tmp_path), index))


async def test_a_stopped_run_keeps_its_last_samples(tmp_path: Path) -> None:
    (files,) = make_files(Config(), tmp_path, decode)
    with anyio.CancelScope() as scope:
        async with files.running():
            await files.write(sample(1), prompt(), group(), SCORES)
            scope.cancel()
            await anyio.sleep_forever()
    assert kept_indices(tmp_path) == {1}


async def test_a_sample_that_cannot_be_encoded_is_the_only_one_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (files,) = make_files(Config(), tmp_path, decode)
    encode = recent_module._encode

    def fail_for_second(trajectories: Any, answered: Any) -> Any:
        if trajectories[0].sample_id.index == 2:
            raise ValueError("no such value")
        return encode(trajectories, answered)

    monkeypatch.setattr(recent_module, "_encode", fail_for_second)
    async with files.running():
        for index in (1, 2, 3):
            await files.write(sample(index), prompt(), group(), SCORES)
    assert kept_indices(tmp_path) == {1, 3}
    (record,) = caplog.records
    assert "sample_0_2 is not kept for `asyncrl show`" in record.message
    assert "no such value" in record.message


async def test_no_error_of_kept_samples_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(directory: Path) -> None:
        raise KeyError("a file of another version")

    monkeypatch.setattr(recent_module, "list_recent", fail)
    (files,) = make_files(Config(), tmp_path, decode)
    async with files.running():
        await files.write(sample(1), prompt(), group(), SCORES)
    (record,) = caplog.records
    assert "sample_0_1 is not kept for `asyncrl show`" in record.message and "another version" in record.message


async def test_a_hung_disk_holds_up_neither_samples_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files,) = make_files(Config(), tmp_path, decode)
    assert isinstance(files, SampleKeeper)
    hung, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(dump_module, "KEEP_EVERY_S", 0.0)
    monkeypatch.setattr(dump_module, "LAST_WRITE_S", 0.05)
    monkeypatch.setattr(dump_module, "MAX_BYTES", 3 * _bytes_of_group())
    monkeypatch.setattr(RecentSamples, "add", lambda kept, samples: (hung.set(), go_on.wait(20), {})[-1])
    try:
        with anyio.fail_after(20):
            async with files.running():
                await files.write(sample(1), prompt(), group(), SCORES)
                await to_thread.run_sync(hung.wait)
                for index in range(2, 9):
                    await files.write(sample(index), prompt(), group(), SCORES)
                assert [noted.sample.sample_id.index for noted in files._new] == [6, 7, 8]
        assert not go_on.is_set()
    finally:
        go_on.set()


def _bytes_of_group() -> int:
    rows = [row for trajectory in group() for row in trajectory.rows]
    return sum(4 * len(row.prompt_ids) + 9 * len(row.response_ids) for row in rows)


# ------------------------------------------------------------------------------------------------ dumps of a run


@pytest.mark.parametrize("replayed", [False, True])
async def test_every_scored_sample_is_dumped_before_its_offer(tmp_path: Path, replayed: bool) -> None:
    rig = DispatcherRig(
        permits=1,
        prompts=[prompt()],
        fleet=FakeFleet(),
        scorer=FakeScorer(lambda prompt, trajectory: 0.5),
        dump=dump_in(tmp_path),
    )
    generated = Generated(prompt(), (*group(), guess()), 1.5, has_baseline=True, replayed_from=7 if replayed else None)
    (sample_id,) = (await rig.queue.admit(1, timeout_s=1.0)).sample_ids
    await rig.dispatcher.runner.run(SampleProgress(sample_id, generated))
    (made,) = leased_samples(await rig.lease(1, trainer_version=4))
    found = find(tmp_path / "dump", 1, tmp_path / "run").trajectories
    assert [(one.number, one.score.reward, one.baseline_reward) for one in found] == [(0, 0.5, 0.5), (1, 0.5, 0.5)]
    assert {one.replayed_from for one in found} == {7 if replayed else None}
    assert [one.trajectory.rows[0].spans for one in found] == [row.spans for row in made.rows]
    assert rig.waits.snapshot() == []


@settings(max_examples=30)
@given(said=st.lists(messages().filter(lambda one: isinstance(one, dict)), max_size=3), truth=values() | texts())
def test_conversations_of_any_shape_are_dumped_and_parsed(said: list[Any], truth: Any) -> None:
    trajectories = [replace(one, messages=tuple(said)) for one in group()]
    row = replace(prompt(), ground_truth=truth, messages=tuple(said))
    for one in describe(sample(), row, trajectories, SCORES, decode, run="/run", at=1.0):
        parse(to_line(one))


@pytest.mark.parametrize(("access", "mode"), [("private", 0o700), ("group", 0o750)])
async def test_the_directory_of_the_dump_has_the_access_of_the_configuration(
    access: str, mode: int, tmp_path: Path
) -> None:
    config = Config.model_validate({"rollout": {"dump_dir": str(tmp_path / "dump")}, "directory_access": access})
    before = os.umask(0o022)
    try:
        for files in make_files(config, tmp_path, decode):
            async with files.running():
                await files.write(sample(), prompt(), group(), SCORES)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("dump", "kept")] == [mode, mode]

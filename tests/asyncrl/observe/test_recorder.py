"""The recorder: records become rows in files, view and summary; resume, rewind, restarts and a full disk."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.observe import LoggingConfig
from asyncrl.core.failures import BugError, InfraError
from asyncrl.core.records import StepRecord
from asyncrl.core.waits import Wait
from asyncrl.observe.metrics import registry
from asyncrl.observe.metrics.file_sinks import AppendFile, rewind_jsonl
from asyncrl.observe.metrics.rows import MetricsRow, apply_row, step_row, validation_row
from asyncrl.observe.recorder import MAX_RESTARTS, ROWS_FILE, Recorder
from asyncrl.observe.status.run_status import Restart, RunProgress
from asyncrl.observe.status.summary import ResumePoint, SummaryBuilder
from asyncrl.observe.terminal.live import View
from asyncrl.storage.run_dir import RunDir
from tests.fakes import hostile
from tests.fakes.metric_records import (
    RecordingView,
    apply,
    queue_status,
    rollouter_status,
    step,
    trainer_status,
    validation,
)
from tests.fakes.run_states import running

ROOT = Path(__file__).parents[3]


def rollouter(tokens: int, idle_s: float = 0.0, incarnation: int = 1, **changes: Any) -> dict[str, Any]:
    waits = [Wait("engine", 8, 3.0), Wait("permit", 2, 1.0)]
    return rollouter_status(incarnation, generated_tokens=tokens, idle_s=idle_s, waits=waits, **changes)


@asynccontextmanager
async def recording(
    run_dir: RunDir, *sinks: str, view: View | None = None, resumed: ResumePoint | None = None
) -> AsyncIterator[Recorder]:
    """Open the recorder of one process of a run."""
    config = Config(logging=LoggingConfig.model_validate({"sinks": sinks}))
    recorder = await Recorder.open(config, run_dir, view or View(), resumed)
    yield recorder
    await recorder.aclose()


async def four_steps(recorder: Recorder) -> None:
    await recorder.put(validation(0, 0.0))
    for number in (1, 2, 3, 4):
        recorder.update_parts(queue_status(2 * number), rollouter(100 * number), trainer_status())
        await recorder.put(step(number, 0.1 * number))
        await recorder.put(apply(number))


def answers(recorder: Recorder) -> list[str]:
    """Return the responses of the example before and after training."""
    return [example["response"] for example in recorder.examples() if example is not None]


def lines(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


async def test_every_record_is_one_flat_line(run_dir: RunDir) -> None:
    async with recording(run_dir, "jsonl") as recorder:
        await recorder.put(validation(0, 0.25))
        recorder.update_parts(queue_status(dropped=1), rollouter(1000), trainer_status())
        await recorder.put(step(1, 0.5, **{"actor/loss": float("nan")}))
        await recorder.put(apply(1))
    first, second, third = lines(run_dir)
    assert (first["kind"], first["step"], first["version"]) == ("validation", 0, 0)
    assert first["validation/reward/mean/a/b"] == 0.25
    assert first["examples"][0]["prompt"] == "1+1="
    assert (second["kind"], second["step"], second["version"]) == ("step", 1, 1)
    assert second["actor/loss"] is None
    assert second["queue/dropped/stale"] == 1
    assert second["rollouter/generated_tokens"] == 1000
    assert second["rewards"] == [0.5, 0.5]
    assert second["staleness"] == [0, 1]
    assert (third["kind"], third["step"], third["version"]) == ("apply", 1, 1)
    assert third["weight_sync/pause_s"] == 0.03
    assert third["weight_sync/in_flight"] == 9
    assert third["weight_sync/verified"] == 0.5
    for line in lines(run_dir):
        registry.check(name for name in line if "/" in name)


async def test_an_unregistered_name_is_refused(run_dir: RunDir) -> None:
    async with recording(run_dir, "jsonl") as recorder:
        with pytest.raises(BugError, match=r"'actor/los' is not registered.*'actor/loss'.*metrics.toml"):
            await recorder.put(step(1, 0.5, **{"actor/los": 1.0}))
        with pytest.raises(BugError, match="tokens/trained"):
            await recorder.put(StepRecord(1, 1, {"reward/mean": 0.5}, (), ()))
        with pytest.raises(BugError, match="idle_s"):
            recorder.update_parts(queue_status(), {"incarnation": 1, "generated_tokens": 1}, {})
    assert lines(run_dir) == []


async def test_the_view_gets_rates_shares_and_waits() -> None:
    now_s, view = 100.0, RecordingView()
    recorder = Recorder([], view, clock=lambda: now_s)
    recorder.set_total_steps(10)
    recorder.update_parts(queue_status(), {}, {})
    for second in range(1, 6):
        now_s += 1.0
        await recorder.put(step(second, 0.1 * second))
        recorder.update_parts(queue_status(2 * second), rollouter(50 * second, 0.25 * second), trainer_status())
    await recorder.put(apply(5))
    now_s += 2.0
    summary = recorder.summary("completed", None)
    assert summary["wall_s"] == 7.0
    assert summary["idle"] == {"trainer": pytest.approx(0.5), "rollouter": pytest.approx(0.25)}
    assert summary["tokens"] == {"generated": 250, "trained": 500}
    assert summary["samples"]["trained"] == 10
    board = view.board
    assert (board.step, board.version, board.total_steps) == (5, 5, 10)
    assert (board.generated_per_s, board.trained_per_s) == pytest.approx((50.0, 100.0))
    assert (board.metrics["idle/rollouter"], board.metrics["idle/trainer"]) == pytest.approx((0.25, 0.5))
    assert [wait.edge for wait in board.waits["rollouter"]] == ["engine", "permit"]
    assert board.num_syncs == 1 and board.metrics["weight_sync/pause_s"] == 0.03
    assert board.eta_s(now_s) == pytest.approx(5 * 1.0 - 2.0)


async def test_a_resumed_run_records_no_step_twice_and_summarizes_the_whole_run(run_dir: RunDir) -> None:
    async with recording(run_dir, "jsonl", "tensorboard") as recorder:
        await four_steps(recorder)
    with run_dir.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 5, "ver')  # a killed process leaves a torn line
    resumed = ResumePoint(2, 2, "checkpoints/step_2")
    async with recording(run_dir, "jsonl", "tensorboard", resumed=resumed) as recorder:
        assert recorder.summary("interrupted", None)["step"] == 2
        recorder.update_parts(queue_status(6), rollouter(70), trainer_status())
        for record in (step(3, 1.0), apply(3), validation(3, 1.0)):
            await recorder.put(record)
        summary = recorder.summary("completed", None)
        assert summary["resumed"] == {"step": 2, "version": 2, "checkpoint": "checkpoints/step_2"}
        assert (summary["reward"]["first"], summary["reward"]["last"]) == pytest.approx((0.1, 1.0))
        assert summary["tokens"] == {"generated": 270, "trained": 300}
        # The earlier driver had counted more tokens, because step 3 uses tokens generated before that driver ended.
        recorder.add_earlier_tokens(420)
        recorder.update_parts(queue_status(6), rollouter(75), trainer_status())
        assert recorder.summary("completed", None)["tokens"]["generated"] == 495
        recorder.add_earlier_restarts({"trainer": 2})
        recorder.record_restart(Restart("trainer", 2, 1.0, "killed", 2.0))
        assert recorder.summary("completed", None)["restarts"]["trainer"] == 3
        assert (summary["weight_sync"]["count"], summary["validation"]["before"]["reward"]) == (3, 0.0)
        assert answers(recorder) == ["0", "3"]
    after = lines(run_dir)
    assert [line["step"] for line in after if line["kind"] == "step"] == [1, 2, 3]
    assert [line["version"] for line in after if line["kind"] == "apply"] == [1, 2, 3]
    times = [line["time_s"] for line in after]
    assert times == sorted(times), "a resumed run continues from the time of its last line"


def rewards_on_tensorboard(run_dir: RunDir) -> tuple[Any, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    return events, [(event.step, event.value) for event in events.Scalars("reward/mean")]


async def test_tensorboard_discards_the_steps_that_a_resume_repeats(run_dir: RunDir) -> None:
    for resumed, numbers, reward in ((None, (1, 2, 3), 0.25), (ResumePoint(2, 2, "c"), (3, 4), 0.5)):
        for file in run_dir.tensorboard.glob("*"):  # the file looks as if another process had written it
            file.rename(file.with_name("events.out.tfevents.1.earlier.1"))
        async with recording(run_dir, "tensorboard", resumed=resumed) as recorder:
            for number in numbers:
                await recorder.put(step(number, reward))
    events, rewards_by_step = rewards_on_tensorboard(run_dir)
    assert rewards_by_step == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5)]
    staleness = [event.histogram_value for event in events.Histograms("staleness")]
    assert [(one.num, one.sum, list(one.bucket_limit), list(one.bucket)) for one in staleness][-1] == (
        *(2, 1.0, [0.0, 1.0], [1.0, 1.0]),
    )
    rewards = events.Histograms("rewards")[-1].histogram_value
    assert (rewards.min, rewards.max, list(rewards.bucket)) == (0.5, 0.5, [2.0])


# ---------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("jsonl", [True, False])
async def test_a_rewind_removes_everything_beyond_the_checkpoint(run_dir: RunDir, jsonl: bool) -> None:
    view = RecordingView()
    async with recording(run_dir, *(["jsonl"] if jsonl else []), view=view) as recorder:
        recorder.set_total_steps(10)
        await four_steps(recorder)
        await recorder.put(validation(4, 0.9))
        await recorder.rewind(ResumePoint(2, 2, "checkpoints/step_2", lineage=1))
        board = view.board
        assert (board.step, board.version, board.total_steps) == (2, 2, 10)
        assert board.validations == ((0, 0.0),)
        assert board.rewards == pytest.approx((0.1, 0.2))
        summary = recorder.summary("failed", None)
        assert (summary["step"], summary["version"], summary["lineage"]) == (2, 2, 1)
        assert summary["tokens"]["generated"] == 400
        assert summary["staleness"]["histogram"] == {"0": 2, "1": 2}
        assert summary["resumed"] is None
        # Records of the old lineage that arrive later count only up to the checkpoint.
        for record in (apply(4), step(5, 9.0), apply(2)):
            await recorder.put(record)
        for record in (
            apply(2, lineage=1),
            step(3, 1.0, lineage=1),
            apply(3, lineage=1),
            validation(3, 1.0, lineage=1),
        ):
            await recorder.put(record)
        summary = recorder.summary("completed", None)
        assert (summary["step"], summary["version"], summary["weight_sync"]["count"]) == (3, 3, 5)
        assert summary["reward"]["last"] == 1.0
        assert answers(recorder) == ["0", "3"]
    if jsonl:
        recorded = [(line["kind"], line["version"], line["lineage"]) for line in lines(run_dir)]
        assert recorded == [
            ("validation", 0, 0),
            *(("step", 1, 0), ("apply", 1, 0), ("step", 2, 0), ("apply", 2, 0)),
            *(("apply", 2, 0), ("apply", 2, 1), ("step", 3, 1), ("apply", 3, 1), ("validation", 3, 1)),
        ]


async def test_tensorboard_discards_the_rows_that_a_rewind_removes(run_dir: RunDir) -> None:
    async with recording(run_dir, "tensorboard") as recorder:
        for number in (1, 2, 3):
            await recorder.put(step(number, 0.25))
        await recorder.rewind(ResumePoint(1, 1, "c", lineage=1))
        for number in (2, 3):
            await recorder.put(step(number, 0.5, lineage=1))
    assert rewards_on_tensorboard(run_dir)[1] == [(1, 0.25), (2, 0.5), (3, 0.5)]


async def test_rows_of_abandoned_steps_that_arrive_during_a_rewind_are_discarded(run_dir: RunDir) -> None:
    async with recording(run_dir, "jsonl") as recorder:
        for number in range(1, 6):
            await recorder.put(step(number, 0.5))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recorder.rewind, ResumePoint(2, 2, "c", lineage=1))
            for number in range(1, 11):
                tasks.start_soon(recorder.put, apply(number))
        assert recorder.summary("completed", None)["weight_sync"]["count"] == len(lines(run_dir)) - 2
    assert all(line["version"] <= 2 for line in lines(run_dir))


def test_counters_continue_over_a_restart() -> None:
    now_s, view = 100.0, RecordingView()
    recorder = Recorder([], view, clock=lambda: now_s)
    for tokens, incarnation in ((100, 1), (200, 1), (20, 2), (80, 2)):
        status = rollouter(tokens, tokens / 1000, incarnation, drops={"took too long": tokens})
        recorder.update_parts(queue_status(), status, {})
        now_s += 1.0
    state = recorder.complete_state(running())
    assert state.generated_tokens == 280
    assert state.generated_per_s == pytest.approx(180 / 3)
    assert state.drops == {"took too long": 280}
    assert view.board.metrics["idle/rollouter"] == pytest.approx(0.18 / 3)


def test_the_start_and_the_end_of_a_restart_are_shown_and_recorded_once() -> None:
    view = RecordingView()
    recorder = Recorder([], view)
    begun = Restart("trainer", 2, 1000.0, "rank actor/0 died\nwith more lines")
    recorder.record_restart(begun)
    assert recorder.complete_state(running()).restarts == (begun,)
    assert recorder.summary("failed", None)["recovery"][0]["recovered_s"] is None
    recorder.record_restart(replace(begun, recovered_at=1008.4, detail="back to step 40 (version 5)"))
    recorder.record_restart(Restart("queue", 2, 1010.0, "killed", 1010.5))
    assert view.messages == [
        ("warning", "the trainer is being replaced: rank actor/0 died"),
        ("", "the trainer is back after 8.4 s; back to step 40 (version 5) (rank actor/0 died)"),
        ("", "the queue is back after 500 ms (killed)"),
    ]
    summary = recorder.summary("completed", None)
    assert summary["restarts"] == {"rollouter": 0, "worker": 0, "trainer": 1, "queue": 1, "store": 0, "replica": 0}
    assert [(each["part"], each["incarnation"], each["recovered_s"]) for each in summary["recovery"]] == [
        ("trainer", 2, pytest.approx(8.4)),
        ("queue", 2, pytest.approx(0.5)),
    ]
    assert len(view.board.restarts) == 2


async def test_a_full_disk_stops_the_recording(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recording(run_dir, "jsonl") as recorder:
        real_write = os.write

        def write(descriptor: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real_write(descriptor, data[:-10])

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(InfraError, match=r"disk is full.*metrics.jsonl.*run_dir=PATH"):
            await recorder.put(step(1, 0.5))
    monkeypatch.undo()
    assert recorder.summary("failed", None)["step"] == 1


def test_a_short_write_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "f")
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, bytes(data[:3])))
    file.write(b"0123456789")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_the_page_of_metrics_is_current() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == registry.markdown(), "docs/metrics.md is stale: make docs"


def test_every_metric_is_registered_once_with_unit_and_meaning() -> None:
    names = [metric.name for metric in registry.METRICS]
    assert len(names) == len(set(names))
    assert all(metric.unit and metric.meaning for metric in registry.METRICS)
    assert registry.describe("validation/reward/mean/openai/gsm8k").unit == "1"


def test_names_from_outside_do_not_fill_the_memory() -> None:
    assert registry.find.cache_info().maxsize is not None


def test_observe_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, asyncrl.observe.recorder, asyncrl.observe.terminal.live, asyncrl.observe.status.summary;"
        "from tensorboard.summary.writer import record_writer;"
        "assert not {'torch', 'ray', 'vllm', 'transformers', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rewind_reads_a_line_of_any_length_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.storage.run_dir.MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(ROWS[0].as_json()) + "\n"
    path.write_text(good + "7" * (1 << 20) + "\n" + good)
    tracemalloc.start()
    rewind_jsonl(path, 10, 10, lambda row: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.read_text() == 2 * good
    assert peak < 1 << 20


def test_a_rewind_needs_no_more_memory_for_a_long_run(tmp_path: Path) -> None:
    """A driver of long runs grew by four times the file at each death of the Trainer."""
    path = tmp_path / "metrics.jsonl"
    path.write_text((json.dumps({**ROWS[0].as_json(), "rewards": [0.5] * 1000}) + "\n") * 2000)
    tracemalloc.start()
    rewind_jsonl(path, 10, 10, lambda row: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 20


@pytest.mark.parametrize("sinks", [("jsonl",), ("tensorboard",)])
async def test_rows_are_not_kept_in_memory(run_dir: RunDir, sinks: tuple[str, ...]) -> None:
    """Without the sink `jsonl`, the driver kept all of them."""

    def steps() -> list[MetricsRow]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, MetricsRow) and each.kind == "step"]

    before = steps()  # of other tests; held, so that no new row gets the place of one of them
    async with recording(run_dir, *sinks) as recorder:
        for number in (1, 2):
            await recorder.put(step(number, 0.25))
        await recorder.put(validation(2, 0.5))
        known = {id(row) for row in before}
        assert [row for row in steps() if id(row) not in known] == []
        assert recorder.validated_step == 2
        await recorder.rewind(ResumePoint(1, 1, "c", lineage=1))
        assert recorder.validated_step is None
        assert recorder.summary("failed", None)["step"] == 1
    assert not (run_dir.path / ROWS_FILE).exists()


async def test_a_resumed_run_without_jsonl_goes_back_to_rows_of_earlier_processes(run_dir: RunDir) -> None:
    async with recording(run_dir, "jsonl") as recorder:
        await four_steps(recorder)
    (run_dir.path / ROWS_FILE).write_text("of a process that was killed")
    async with recording(run_dir, "tensorboard", resumed=ResumePoint(2, 2, "c")) as recorder:
        for number in (3, 4):
            await recorder.put(step(number, 0.5))
        await recorder.rewind(ResumePoint(3, 3, "c", lineage=1))
        summary = recorder.summary("completed", None)
        assert (summary["step"], summary["weight_sync"]["count"]) == (3, 2)
        assert (summary["reward"]["first"], summary["reward"]["last"]) == pytest.approx((0.1, 0.5))


def test_the_newest_restarts_are_listed_and_all_are_counted() -> None:
    recorder = Recorder([], View())
    many = MAX_RESTARTS + 50
    for number in range(2, many + 2):
        recorder.record_restart(Restart("replica", number, 1.0, "it ended"))
        recorder.record_restart(Restart("replica", number, 1.0, "it ended", 2.0))
    summary = recorder.summary("completed", None)
    assert summary["restarts"]["replica"] == many
    assert [one["incarnation"] for one in summary["recovery"]] == list(range(52, many + 2))
    state = recorder.complete_state(running())
    assert len(state.restarts) == MAX_RESTARTS and state.earlier_restarts == {"replica": 50}


ROWS = [
    step_row(step(1), {}, time_s=1.0, unix_s=0.0),
    apply_row(apply(1), step=1, time_s=2.0, unix_s=0.0),
    validation_row(validation(1, 0.5), time_s=3.0, unix_s=0.0),
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.tuples(*(hostile.damaged(row.as_json()).map(hostile.dumps) for row in ROWS)))
def test_damaged_rows_are_left_out_and_the_others_can_be_summarized(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    builder = SummaryBuilder()
    rewind_jsonl(tmp_path / "metrics.jsonl", 10, 10, builder.add)
    json.dumps(builder.build("completed", None, RunProgress()))
    builder.example()


def test_rows_with_metrics_of_another_version_are_kept(tmp_path: Path) -> None:
    lines = [json.dumps({**row.as_json(), "old/name": 1.0}) + "\n" for row in ROWS]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    rows: list[MetricsRow] = []
    rewind_jsonl(path, 10, 10, rows.append)
    assert [row.metrics for row in rows] == [row.metrics for row in ROWS]
    assert path.read_text() == "".join(lines)

"""The summary of a run, its file on a full disk, and the meters that it is computed from."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import BugError, ConfigError, InfraError, UserCodeError
from asyncrl.core.ports import ApplyReport, SampleCounts
from asyncrl.core.records import ApplyRecord, StepRecord, ValidationRecord
from asyncrl.observe.metrics.part_metrics import (
    RestartableCounter,
    RollouterIdle,
    TrainerIdle,
    WindowRate,
)
from asyncrl.observe.metrics.rows import MetricsRow, apply_row, finite, step_row, validation_row
from asyncrl.observe.metrics.series import DownsampledSeries, TenthMeans, ThinnedSeries
from asyncrl.observe.status.run_status import RunProgress
from asyncrl.observe.status.summary import (
    RESERVED_BYTES,
    ResumePoint,
    SummaryBuilder,
    SummaryFile,
    attribute_failure_to,
    choose_example,
    describe_error,
    read_summary,
)


def step(number: int, rewards: Sequence[float], **more: Any) -> MetricsRow:
    metrics = {
        "reward/mean": sum(rewards) / len(rewards),
        "tokens/trained": 10.0,
        "timing/wait_samples_s": more.get("wait_s", 0.0),
        "time/monotonic_s": more.get("end_s", float(number)),
    }
    staleness = more.get("staleness", tuple(0 for _ in rewards))
    return step_row(StepRecord(number, number, metrics, tuple(rewards), staleness), {}, time_s=0.0, unix_s=0.0)


def apply(version: int, pause_s: float, delay_s: float, sent_bytes: int = 100) -> MetricsRow:
    report = ApplyReport("r0", version, 0.01, pause_s, 0.001, 3, True)
    record = ApplyRecord(version, (report,), delay_s, num_bytes=100, sent_bytes=sent_bytes)
    return apply_row(record, step=version, time_s=0.0, unix_s=0.0)


def validation(version: int, reward: float, examples: Sequence[dict[str, Any]] = ()) -> MetricsRow:
    record = ValidationRecord(version, version, {"reward/mean": reward}, tuple(examples))
    return validation_row(record, time_s=0.0, unix_s=0.0)


def built(*rows: MetricsRow) -> SummaryBuilder:
    builder = SummaryBuilder()
    for row in rows:
        builder.add(row)
    return builder


def test_the_summary_of_a_complete_run() -> None:
    builder = built(
        validation(0, 0.2),
        step(1, [0.0] * 10, staleness=(0,) * 10),
        apply(1, 0.03, 0.2),
        validation(1, 0.3),
        step(2, [0.5] * 10, staleness=(1,) * 9 + (3,)),
        apply(2, 0.01, 0.4, sent_bytes=25),
        apply(3, 0.02, 0.3, sent_bytes=25),
        validation(2, 0.6),
    )
    counts = SampleCounts(fed=25, running=1, ready=2, leased=0, trained=20, dropped={"stale": 2})
    progress = RunProgress(counts=counts, generated_tokens=400, trained_tokens=20)
    summary = builder.build("completed", None, progress, wall_s=9.0, idle_trainer=0.25)
    assert summary == {
        "status": "completed",
        "error": None,
        "wall_s": 9.0,
        "step": 2,
        "version": 3,
        "lineage": 0,
        "resumed": None,
        "samples": {
            "fed": 25,
            "running": 1,
            "ready": 2,
            "leased": 0,
            "trained": 20,
            "dropped": {"stale": 2, "failed": 0, "filtered": 0, "overlong": 0, "surplus": 0, "shutdown": 0},
            "replayed": 0,
            "substituted": 0,
        },
        "tokens": {"generated": 400, "trained": 20},
        "reward": {"first": 0.0, "last": 0.5, "best": 0.5},
        "staleness": {"mean": 0.6, "max": 3, "histogram": {"0": 10, "1": 9, "3": 1}},
        "idle": {"trainer": 0.25, "rollouter": None},
        "replays": False,
        "weight_sync": {
            "count": 3,
            "pause_s": {"p50": 0.02, "max": 0.03},
            "publish_to_applied_s": {"p50": 0.3, "max": 0.4},
            "sent_share": 0.5,
        },
        "validation": {
            "before": {"step": 0, "version": 0, "reward": 0.2, "metrics": {"reward/mean": 0.2}},
            "after": {"step": 2, "version": 2, "reward": 0.6, "metrics": {"reward/mean": 0.6}},
            "points": [
                {"step": 0, "version": 0, "reward": 0.2},
                {"step": 1, "version": 1, "reward": 0.3},
                {"step": 2, "version": 2, "reward": 0.6},
            ],
        },
        "restarts": {"rollouter": 0, "worker": 0, "trainer": 0, "queue": 0, "store": 0, "replica": 0},
        "recovery": [],
    }


def test_an_empty_run_has_nulls_and_no_nan() -> None:
    summary = SummaryBuilder(ResumePoint(7, 5, "runs/x/checkpoints/step_7")).build("failed", None, RunProgress())
    json.dumps(summary, allow_nan=False)
    assert (summary["step"], summary["version"]) == (7, 5)
    at = {"step": 7, "version": 5, "checkpoint": "runs/x/checkpoints/step_7"}
    assert summary["resumed"] == at
    lost = SummaryBuilder(ResumePoint(**at, lost="it is gone")).build("failed", None, RunProgress())  # type: ignore[arg-type]
    assert lost["resumed"] == at | {"lost": "it is gone"}
    assert summary["reward"] == {"first": None, "last": None, "best": None}
    assert summary["staleness"] == {"mean": None, "max": None, "histogram": {}}
    assert summary["weight_sync"]["pause_s"] == {"p50": None, "max": None}
    assert summary["weight_sync"]["sent_share"] is None
    assert summary["validation"] == {"before": None, "after": None, "points": []}


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=9), min_size=1, max_size=12))
def test_first_and_last_reward_are_means_of_a_tenth_and_best_is_at_least_as_high(steps: list[list[float]]) -> None:
    reward = built(*(step(number, rewards) for number, rewards in enumerate(steps, start=1))).reward()
    flat = [value for rewards in steps for value in rewards]
    tenth = max(1, len(flat) // 10)
    assert reward["first"] == pytest.approx(sum(flat[:tenth]) / tenth, abs=1e-9)
    assert reward["last"] == pytest.approx(sum(flat[-tenth:]) / tenth, abs=1e-9)
    best, *ends = (reward[name] or 0.0 for name in ("best", "first", "last"))
    assert best >= max(ends) - 1e-9


@given(st.lists(st.floats(-1, 1), min_size=40, max_size=400), st.integers(16, 64))
def test_tenths_of_a_long_series_are_nearly_exact(values: list[float], max_totals: int) -> None:
    means, tenth = TenthMeans(max_totals), len(values) / 10
    for value in values:
        means.add(value)
    ends, best = means.ends(), means.best()
    # Each end of a tenth is moved by a stride at most, and a stride is at most two values for each total.
    error = 4 * max(1.0, 2 * len(values) / max_totals) / tenth
    for name, exact in (("first", values[: int(tenth)]), ("last", values[-int(tenth) :])):
        assert ends[name] == pytest.approx(sum(exact) / len(exact), abs=error)
    assert ends["first"] is not None and ends["last"] is not None and best is not None
    assert best >= max(ends["first"], ends["last"])


@given(st.integers(0, 500), st.integers(2, 50))
def test_a_thinned_series_keeps_evenly_spaced_values_and_the_newest(count: int, most: int) -> None:
    series: ThinnedSeries[int] = ThinnedSeries(most)
    for value in range(count):
        series.add(value)
    assert series.every == list(range(0, count, series.stride)) and len(series.every) <= most
    assert series.count == count and series.values[-1:] == list(range(count))[-1:]
    assert series.stride == 1 or len(series.every) >= most // 2


def test_the_summary_of_a_run_of_weeks_needs_no_more_memory_than_that_of_an_hour() -> None:
    builder = SummaryBuilder()
    examples = [{"prompt": "x" * 500, "response": "y", "ground_truth": "1", "reward": 0.5}]

    def add(number: int) -> None:
        if number % 2 == 0:
            builder.add(validation(number, 0.5, examples))
        builder.add(step(number + 1, [float(number % 7)] * 64))
        builder.add(apply(number + 1, 0.1 * (number % 5), 0.2))

    tracemalloc.start()
    allocated = []
    for numbers in (range(1500), range(1500, 4500)):
        for number in numbers:
            add(number)
        gc.collect()
        allocated.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert allocated[1] - allocated[0] < 300_000, "8 bytes for each of 192,000 more samples are 1.5 MB"
    summary = builder.build("completed", None, RunProgress())
    assert (summary["weight_sync"]["pause_s"], summary["weight_sync"]["count"]) == ({"p50": 0.2, "max": 0.4}, 4500)
    assert summary["reward"]["first"] == pytest.approx(3.0, abs=0.02)
    points = summary["validation"]["points"]
    assert len(points) <= 1025 and (points[0]["step"], points[-1]["step"]) == (0, 4498)
    assert (summary["validation"]["before"]["step"], summary["validation"]["after"]["step"]) == (0, 4498)
    assert builder.validated_step == 4498


@pytest.mark.parametrize(("rows", "before", "after"), [
    ((validation(0, 0.2), step(1, [0.1])), 0, None),
    ((step(1, [0.1]), validation(1, 0.2)), None, 1),
])  # fmt: skip
def test_a_single_validation_is_the_one_before_or_the_one_after_training(
    rows: Sequence[MetricsRow], before: int | None, after: int | None
) -> None:
    found = built(*rows).validation()
    assert [point and point["version"] for point in (found["before"], found["after"])] == [before, after]


def test_the_example_is_the_prompt_that_improved_most() -> None:
    def answer(prompt: str, response: str, reward: float) -> dict[str, Any]:
        return {"prompt": prompt, "response": response, "ground_truth": "1", "reward": reward}

    before = [answer("a", "x", 1.0), answer("b", "long wrong", 0.0), answer("c", "x", 0.0), answer("d", "x", 0.0)]
    after = [answer("d", "y", 0.0), answer("c", "y", 1.0), answer("b", "y", 1.0), answer("a", "y", 1.0)]
    chosen = choose_example(before, after)
    assert chosen is not None and chosen[0] == before[2] and chosen[1]["reward"] == 1.0
    assert choose_example(before, []) is None


def test_an_error_is_described_by_its_innermost_exception() -> None:
    cause = ValueError("no digits")
    typed = UserCodeError.wrap("the reward function raised", cause)
    described = describe_error(ExceptionGroup("unhandled", [ExceptionGroup("inner", [typed])]), "rollouter")
    assert "no digits" in described.pop("cause")
    assert described == {"type": "UserCodeError", "message": "the reward function raised", "part": "rollouter"}

    class Wrapper(Exception):
        """An exception like Ray's, which keeps the original one in `cause`."""

        cause = BugError("counts do not balance")

    assert describe_error(Wrapper(), "trainer")["message"] == "counts do not balance"


def test_a_configuration_error_has_a_cause_only_if_a_library_raised_it() -> None:
    try:
        raise ConfigError("model.path=x: is no model; give another")
    except ConfigError as error:
        assert describe_error(error, "trainer")["cause"] == ""
    wrapped = ConfigError.wrap("model.path=x: is no model", OSError("no file config.json"))
    assert describe_error(wrapped, "trainer")["cause"].strip() == "OSError: no file config.json"


def test_guesses_of_ray_about_a_dead_process_are_removed() -> None:
    detail = (
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some "
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) …"
    )
    described = describe_error(InfraError("a rank died", f"Traceback\n{detail}\nlast line"), "trainer")
    assert described["cause"] == f"Traceback\n{detail.partition(' There are')[0]}\nlast line"


def test_not_finite_numbers_become_null_at_any_depth() -> None:
    assert finite({"a": math.nan, "b": [math.inf, 1.0, {"c": (2.0, -math.inf)}]}) == {
        "a": None,
        "b": [None, 1.0, {"c": [2.0, None]}],
    }


# ---------------------------------------------------------------------------------------------- meters


def test_a_rate_covers_its_window_and_restarts_when_the_counter_falls() -> None:
    rate = WindowRate(span_s=10.0)
    assert rate.per_s is None
    for second in range(31):
        rate.add(float(second), 2.0 * second if second < 20 else 40.0 + 5.0 * (second - 20))
    assert rate.per_s == pytest.approx(5.0)
    rate.add(31.0, 0.0)
    assert rate.per_s is None


def test_rollouter_idle_is_interpolated_at_the_first_and_last_step() -> None:
    idle = RollouterIdle()
    idle.observe(0.0, 0.0)
    idle.observe(10.0, 10.0)  # The Rollouter is idle until shortly before the first step ...
    for at_s in (10.5, 11.5, 13.5):
        idle.step(at_s)
        if at_s == 11.5:
            idle.observe(12.0, 11.0)  # ... half idle between 10 and 12 ...
    assert idle.share == pytest.approx(0.5)
    idle.observe(14.0, 11.0)  # ... and busy from then on.
    idle.observe(20.0, 17.0)
    assert idle.share == pytest.approx((11.0 - 10.25) / 3.0)


def test_trainer_idle_begins_with_the_first_step() -> None:
    idle = TrainerIdle()
    idle.add(step(1, [0.0], wait_s=100.0, end_s=50.0))
    assert idle.share is None
    idle.add(step(2, [0.0], wait_s=1.0, end_s=52.0))
    idle.add(step(3, [0.0], wait_s=0.0, end_s=54.0))
    assert idle.share == pytest.approx(0.25)


@given(st.integers(1, 3000))
def test_a_downsampled_series_is_short_and_ends_with_the_last_values(count: int) -> None:
    series = DownsampledSeries(max_points=64)
    for value in range(count):
        series.add(float(value))
    points = series.points
    assert len(points) <= 66 and list(points) == sorted(points)
    assert points[-1] == pytest.approx(count - 1, abs=max(count / 16, 1))


# ---------------------------------------------------------------------------------------------- the file


def failed(cause: str = "trace") -> dict[str, Any]:
    error = {"type": "InfraError", "message": "disk full", "part": "trainer", "cause": cause}
    return built(*(validation(version, 0.5) for version in range(3))).build("failed", error, RunProgress())


def test_the_summary_replaces_its_reserve_and_an_old_summary_is_removed_at_the_start(tmp_path: Path) -> None:
    file = SummaryFile(tmp_path)
    file.path.write_text("{}")
    file.reserve()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.reserve"]
    assert (tmp_path / "summary.reserve").stat().st_size == RESERVED_BYTES
    file.write(failed())
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(file.path.read_text()) == failed()


def test_an_early_summary_counts_once_its_driver_is_gone(tmp_path: Path) -> None:
    file = SummaryFile(tmp_path)
    file.write_early(failed())
    assert read_summary(tmp_path) is None
    os.utime(file.path, (1e9, 1e9))  # as if this process had got the process id of that driver later
    found = read_summary(tmp_path)
    assert found is not None and found.status == "failed"
    for pid in (-1, 10**30):
        file.path.write_text(json.dumps({**failed(), "early_of": pid}))
        assert read_summary(tmp_path) is not None


def test_a_long_summary_is_shortened_to_the_reserve_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk accepts only bytes that replace existing ones of the file."""
    file = SummaryFile(tmp_path)
    file.reserve()

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > os.fstat(self.fileno()).st_size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data) or 0

    monkeypatch.setattr(os, "fdopen", FullDisk)
    file.write(failed("x" * 2 * RESERVED_BYTES))
    read = json.loads(file.path.read_text())
    assert read["error"]["message"] == "disk full"
    assert read["validation"]["points"] == []
    assert 0 < len(read["error"]["cause"]) < RESERVED_BYTES


def test_a_disk_without_space_for_the_reserve_fails_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InfraError, match=r"disk is full.*summary.reserve.*run_dir=PATH"):
        SummaryFile(tmp_path).reserve()


def test_an_error_is_attributed_to_the_innermost_part() -> None:
    def fail() -> None:
        with attribute_failure_to("run"), attribute_failure_to("trainer"):
            raise InfraError("rank 0 died")

    with pytest.raises(InfraError) as caught:
        fail()
    assert describe_error(caught.value, "driver")["part"] == "trainer"
    assert describe_error(ExceptionGroup("g", [caught.value]), "driver")["part"] == "trainer"
    with pytest.raises(ExceptionGroup) as group, attribute_failure_to("queue"):
        raise ExceptionGroup("g", [InfraError("a"), BugError("b")])
    assert describe_error(group.value, "driver")["part"] == "queue"
    assert describe_error(InfraError("x"), "driver")["part"] == "driver"


def test_a_counter_continues_over_restarts() -> None:
    total = RestartableCounter()
    seen = [(5, 1), (9, 1), (9, 1), (0, 2), (3, 2), (3, 3), (4, 3)]
    assert [total.update(value, incarnation) for value, incarnation in seen] == [5, 9, 9, 9, 12, 15, 16]


def test_trainer_idle_survives_a_change_of_clock() -> None:
    idle = TrainerIdle()
    for end_s, wait_s in ((100.0, 0.0), (110.0, 5.0), (3.0, 4.0), (13.0, 1.0)):
        idle.add(step(1, [0.0], end_s=end_s, wait_s=wait_s))
    assert idle.share == pytest.approx(0.1)

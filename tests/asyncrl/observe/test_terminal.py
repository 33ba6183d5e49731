"""The terminal: live view at 80 and 120 columns, plain lines, closing summary, log messages."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.core import failures
from asyncrl.core.ports import SampleCounts
from asyncrl.core.records import StepRecord, ValidationRecord
from asyncrl.core.waits import Wait
from asyncrl.observe.formats import elapsed, short_s
from asyncrl.observe.metrics.rows import MetricsRow, step_row, validation_row
from asyncrl.observe.status.run_status import Restart, RunProgress
from asyncrl.observe.status.summary import SummaryBuilder
from asyncrl.observe.terminal.live import LiveView, PlainView, View, logging_to, make_view
from asyncrl.observe.terminal.screen import Dashboard, sparkline

BOARD = Dashboard(
    total_steps=200,
    step=57,
    version=56,
    metrics={
        "reward/mean": 0.4125,
        "staleness/mean": 0.8,
        "staleness/max": 2.0,
        "idle/trainer": 0.11,
        "idle/rollouter": 0.04,
        "weight_sync/pause_s": 0.028,
        "weight_sync/publish_to_applied_s": 0.21,
        "weight_sync/sent_share": 0.0213,
        "weight_sync/mismatch_kl": 3e-13,
    },
    num_syncs=56,
    rewards=tuple(index / 100 for index in range(57)),
    reward_ends={"first": 0.29, "last": 0.47},
    validations=((0, 0.273), (20, 0.31), (40, 0.391), (48, 0.4), (56, 0.45)),
    counts=SampleCounts(
        fed=1_932, running=64, ready=12, leased=32, trained=1_824, dropped={"stale": 10, "overlong": 0}
    ),
    generated_per_s=3912.4,
    trained_per_s=3701.0,
    waits={
        "rollouter": (Wait("engine", 64, 3.0), Wait("permit", 2, 0.4), Wait("reward", 1, 0.1), Wait("apply", 1, 0.1)),
        "trainer": (),
    },
    step_times=(1000.0, 1010.0),
)


def clock() -> float:
    return 1012.0


def rendered(view: LiveView, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view.render())
    return console.export_text().splitlines()


def live(board: Dashboard = BOARD) -> LiveView:
    view = LiveView(Console(file=io.StringIO(), force_terminal=True), "asyncrl fully_async", clock)
    view.update(board)
    return view


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_live_view_has_one_line_for_each_value(width: int) -> None:
    lines = rendered(live(), width)
    assert all(len(line) <= min(width, 120) for line in lines)
    assert len(lines) == 15
    text = "\n".join(lines)
    for figure in (
        "step 57/200",
        "version 56",
        "28%",
        "ETA 23:48",
        "0.412",
        "first tenth 0.290 → last 0.470",
        "v0 0.273 … v40 0.391 → v48 0.400 → v56 0.450",
        "trained 1,824   dropped 10 (stale 10)",
        "mean 0.80   max 2",
        "running 64   leased 32",
        "queue        ready 12",
        "generated 3,912   trained 3,701",
        "rollouter 4 %   trainer 11 %",
        "pause 28 ms   publish to applied 210 ms   count 56   sent 2 %",
        "rollouter on engine 3.0 s (x64), permit 400 ms (x2)",
        "trainer on nothing",
    ):
        assert figure in text, figure


def test_the_live_view_shows_phases_until_there_is_a_result() -> None:
    view = live(Dashboard(total_steps=10))
    view.phase("starting Ray")
    view.phase("starting the engine")
    text = "\n".join(rendered(view, 80))
    assert "✓ starting Ray" in text
    assert "starting the engine" in text
    assert "reward" not in text
    view.update(BOARD)
    view.phase("")
    assert "starting" not in "\n".join(rendered(view, 80))
    view.phase("saving the checkpoint")
    text = "\n".join(rendered(view, 80))
    assert "saving the checkpoint" in text
    assert "step 57/200" in text


def test_progress_belongs_to_the_current_phase_and_is_printed_once() -> None:
    out = io.StringIO()
    for view in (live(Dashboard(total_steps=10)), PlainView(Console(file=out, width=200), clock)):
        view.phase("starting")
        for text in ("3 of 9 rows", "3 of 9 rows", "6 of 9 rows"):
            view.progress(text)
        if isinstance(view, LiveView):
            assert "starting; 6 of 9 rows" in "\n".join(rendered(view, 80))
        view.phase("validating")
        if isinstance(view, LiveView):
            assert "rows" not in "\n".join(rendered(view, 80))
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == [
        "starting", "3 of 9 rows", "6 of 9 rows", "validating",
    ]  # fmt: skip


def test_a_message_appears_above_the_live_area_and_the_cursor_is_restored() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    view = LiveView(console, "t", clock)
    with pytest.raises(RuntimeError, match="inside"), view:
        view.message("warning", "a prompt is too long")
        raise RuntimeError("inside")
    text = out.getvalue()
    assert text.index("a prompt is too long") < text.rindex("╰")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_messages_have_no_secret_of_the_run() -> None:
    failures.hide("c4n4ry", "…")
    out = io.StringIO()
    for view in (PlainView(Console(file=out), clock), LiveView(Console(file=out, width=80), "t", clock)):
        view.message("warning", "prompt 3 has no answers: 401 for c4n4ry")
    assert out.getvalue().count("warning: prompt 3 has no answers: 401 for …") == 2


# ---------------------------------------------------------------------------------------------- plain lines


def step(number: int) -> MetricsRow:
    metrics = {
        "reward/mean": 0.5,
        "tokens/trained": 1.0,
        "timing/wait_samples_s": 0.0,
        "time/monotonic_s": float(number),
    }
    return step_row(StepRecord(number, number, metrics, (0.5,), (0,)), {}, time_s=0.0, unix_s=0.0)


def plain(total: int, first: int = 0) -> list[str]:
    out = io.StringIO()
    view = PlainView(Console(file=out), clock)
    for number in range(first + 1, total + 1):
        view.row(step(number), Dashboard(total_steps=total, first_step=first))
    return out.getvalue().splitlines()


def test_a_short_run_prints_every_step_and_a_long_one_fewer() -> None:
    assert len(plain(60)) == 60
    for total, first in ((200, 0), (301, 0), (5000, 0), (5003, 4000)):
        lines = plain(total, first)
        assert 60 < len(lines) < 160
        assert f"step {first + 1}/{total} " in lines[0]
        assert f"step {total}/{total} " in lines[-1]


def test_only_some_of_many_validations_are_printed() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out), clock)
    for number in range(1000):
        record = ValidationRecord(number, number, {"reward/mean": 0.5}, ())
        view.row(validation_row(record, time_s=0.0, unix_s=0.0), BOARD)
    assert 100 < len(out.getvalue().splitlines()) < 200


def test_plain_lines_are_one_line_each_without_colour() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=40), clock)
    view.phase("starting the engine")
    view.message("warning", "x" * 100)
    view.row(step(58), BOARD)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "\x1b" not in out.getvalue()
    assert "trained 1824 dropped 10 running 64 leased 32" in lines[2] and " queue 12 " in lines[2]


def test_a_difference_between_engines_and_trainer_is_shown_unless_it_is_tiny() -> None:
    exact = replace(BOARD, total_steps=60)
    rounded = replace(exact, metrics=BOARD.metrics | {"weight_sync/mismatch_kl": 0.0123})
    out = io.StringIO()
    view = PlainView(Console(file=out), clock)
    view.row(step(58), exact)
    view.row(step(59), rounded)
    first, second = out.getvalue().splitlines()
    assert "mismatch" not in first and second.endswith(" mismatch 0.012 nats")
    assert "mismatch 0.012 nats" in "\n".join(rendered(live(rounded), 120))


def test_trained_counts_the_step_just_made() -> None:
    """The queue's last answer is from before the step; its samples were leased then."""
    board = replace(BOARD, staleness={0: 1824 + 20, 1: 12})
    assert (board.shown_counts.trained, board.shown_counts.leased) == (1856, 0)
    assert replace(BOARD, staleness={0: 1800}).shown_counts == BOARD.counts
    counts = replace(BOARD.counts, fed=1942)
    for more in (1, 33, 60, 500):  # samples that were leased, ready, running, or not even fed in the queue's answer
        shown = replace(BOARD, counts=counts, staleness={0: counts.trained + more}).shown_counts
        assert shown.trained == counts.trained + more
        assert shown.fed == shown.running + shown.ready + shown.leased + shown.trained + shown.num_dropped
        assert shown.running == counts.running, "others are generated instead"
    ended = replace(BOARD, counts=counts, step=40, total_steps=40, staleness={0: counts.trained + 1942}).shown_counts
    assert (ended.running, ended.ready, ended.leased) == (0, 0, 0)
    assert "trained 1,856" in "\n".join(rendered(live(board), 120))


def test_a_rollouter_that_only_replays_is_not_idle() -> None:
    replay = replace(BOARD, counts=replace(BOARD.counts, replayed=1800), generated_tokens=0)
    assert "rollouter replaying   trainer 11 %" in "\n".join(rendered(live(replay), 120))
    assert "rollouter 4 %" in "\n".join(rendered(live(replace(replay, generated_tokens=9)), 120))
    content = SummaryBuilder().build("completed", None, replay, idle_trainer=0.5, idle_rollouter=1.0)
    assert content["idle"] == {"trainer": 0.5, "rollouter": None} and content["replays"] is True
    assert "rollouter replaying, trainer 50 %" in ending(content)


def test_the_mode_selects_the_view_and_auto_depends_on_the_terminal() -> None:
    assert isinstance(make_view("auto", "t", Console(file=io.StringIO())), PlainView)
    assert isinstance(make_view("auto", "t", Console(file=io.StringIO(), force_terminal=True)), LiveView)
    assert isinstance(make_view("live", "t", Console(file=io.StringIO())), LiveView)
    assert type(make_view("off", "t")) is View


# ---------------------------------------------------------------------------------------------- restarts

BEGUN = Restart("trainer", 2, 1000.0, "rank actor/0 died\nmore")
BACK = replace(BEGUN, recovered_at=1008.4, detail="back to step 40 (version 5)")


def test_a_restart_prints_one_line_when_it_begins_and_one_when_it_ends() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out), clock)
    view.restart(BEGUN, BOARD)
    view.restart(BACK, BOARD)
    assert out.getvalue().splitlines() == [
        "[0:00] warning: the trainer is being replaced: rank actor/0 died",
        "[0:00] the trainer is back after 8.4 s; back to step 40 (version 5) (rank actor/0 died)",
    ]


def test_the_live_view_has_a_line_for_restarts() -> None:
    board = replace(BOARD, restarts=(Restart("queue", 2, 1.0, "killed", 2.0), BEGUN))
    lines = rendered(live(board), 100)
    assert len(lines) == 16
    assert any("queue 1   trainer 1   the trainer is being replaced: rank actor/0 died" in line for line in lines)


def test_restarts_of_earlier_launches_are_counted() -> None:
    board = replace(BOARD, earlier_restarts={"trainer": 3})
    assert any("restarts     trainer 3" in line for line in rendered(live(board), 100))
    both = replace(board, restarts=(BEGUN,))
    assert any("restarts     trainer 4   the trainer is being replaced" in line for line in rendered(live(both), 100))


def test_the_closing_summary_lists_restarts() -> None:
    builder = SummaryBuilder()
    both = (BACK, Restart("queue", 2, 1.0, "killed", 2.0))
    content = builder.build("completed", None, RunProgress(restarts=both))
    assert "restarts  trainer 1, queue 1; recovered in 4.7 s (max 8.4 s)" in ending(content)
    content = builder.build("failed", None, RunProgress(restarts=(BEGUN,)))
    assert "restarts  trainer 1" in ending(content) and "recovered" not in ending(content)


# ---------------------------------------------------------------------------------------------- the end


def summary(status: Any, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    builder = SummaryBuilder()
    for version, reward in ((0, 0.25), (9, 0.75)):
        record = ValidationRecord(version, version, {"reward/mean": reward}, ())
        builder.add(validation_row(record, time_s=0.0, unix_s=0.0))
    builder.add(step(9))
    counts = SampleCounts(fed=3, trained=1, dropped={"stale": 2})
    progress = RunProgress(counts=counts, generated_tokens=10)
    return builder.build(status, error, progress, wall_s=201.0, idle_trainer=0.5, idle_rollouter=0.25)


def ending(content: Mapping[str, Any], *examples: Mapping[str, Any]) -> str:
    out = io.StringIO()
    before, after = examples or (None, None)
    PlainView(Console(file=out, width=100), clock).finish(content, Path("/runs/quickstart/20260102"), before, after)
    return out.getvalue()


def test_the_piped_closing_summary_has_neither_wrapped_lines_nor_trailing_blanks() -> None:
    example = {"prompt": "p" * 300, "response": "r", "ground_truth": None, "reward": 0.0}
    lines = ending(summary("completed"), example, example).splitlines()
    assert any("p" * 300 in line for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_closing_summary_shows_outcome_example_and_run_directory() -> None:
    before = {"prompt": "17+25=", "response": "[bold]31", "ground_truth": "42", "reward": 0.0}
    text = ending(summary("completed"), before, {**before, "response": "42", "reward": 1.0})
    for part in (
        "completed after 3:21: step 9, version 9",
        "0.250 → 0.750  +0.500  (version 0 and 9)",
        "3 fed, 1 trained, 2 dropped (stale 2)",
        "rollouter 25 %, trainer 50 %",
        "17+25=",
        "[bold]31  reward 0",
        "42  reward 1",
        "/runs/quickstart/20260102",
    ):
        assert part in text, part


def test_a_failed_run_shows_the_error_and_the_end_of_its_traceback() -> None:
    cause = "\n".join(f"frame {index}" for index in range(100))
    error = {"type": "UserCodeError", "message": "score raised", "part": "rollouter", "cause": cause}
    text = ending(summary("failed", error))
    assert "UserCodeError in rollouter: score raised" in text
    assert "frame 99" in text
    assert "frame 10\n" not in text


def test_an_error_in_the_users_code_shows_its_line_and_no_traceback() -> None:
    cause = (
        'Traceback (most recent call last):\n  File "/x/site-packages/anyio/run.py", line 9, in run\n    call()\n'
        '  File "/me/rewards.py", line 12, in score\n    return int(text)\nValueError: no number\n'
    )
    error = {"type": "UserCodeError", "message": "reward.function raised", "part": "rollouter", "cause": cause}
    text = ending(summary("failed", error))
    assert "UserCodeError in rollouter: reward.function raised\n" in text
    assert "    /me/rewards.py line 12, in score: return int(text)\n    because: ValueError: no number\n" in text
    assert "fix: correct it there; logs/driver.log has the traceback" in text
    assert "Traceback" not in text and "anyio" not in text


def test_a_configuration_error_shows_its_message_and_one_line_of_the_cause() -> None:
    cause = "Traceback (most recent call last):\n  frame 1\nOSError: no config.json\n  in that place\n"
    error = {"type": "ConfigError", "message": "model.path=x: is no model", "part": "run", "cause": cause}
    text = ending(summary("failed", error))
    assert "configuration: model.path=x: is no model" in text
    assert "because: OSError: no config.json" in text
    assert "frame" not in text and "Traceback" not in text
    assert "because" not in ending(summary("failed", {**error, "cause": ""}))
    assert "because" not in ending(summary("failed", {**error, "message": "model.path=x: no config.json"}))


# ---------------------------------------------------------------------------------------------- formatting


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(0, 80))
def test_a_sparkline_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set("▁▂▃▄▅▆▇█")


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3, 3], 9) == "▁▁▁"


def test_durations_are_readable() -> None:
    assert [elapsed(seconds) for seconds in (7, 754, 11045)] == ["0:07", "12:34", "3:04:05"]
    assert [short_s(seconds) for seconds in (0.0284, 1.44, 125)] == ["28 ms", "1.4 s", "2:05"]


class MessageView(View):
    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []

    def message(self, level: str, text: str) -> None:
        self.messages.append((level, text))


def test_log_messages_are_selected_by_level_and_the_file_also_has_info_of_asyncrl(tmp_path: Path) -> None:
    view = MessageView()
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    with logging_to(view, tmp_path, "warning"):
        logging.getLogger("a.b").info("too quiet")
        logging.getLogger("asyncrl.driver.supervision").info("the trainer is replaced")
        logging.getLogger("asyncrl.driver.supervision").debug("and more")
        logging.getLogger("a.b").warning("a replica restarted")
        warnings.warn("odd", UserWarning, stacklevel=1)
    assert (root.level, root.handlers) == before
    assert view.messages[0] == ("warning", "a replica restarted")
    assert "odd" in view.messages[1][1]
    text = (tmp_path / "driver.log").read_text()
    assert "WARNING a.b: a replica restarted" in text
    assert "too quiet" not in text
    assert "INFO asyncrl.driver.supervision: the trainer is replaced" in text
    assert "and more" not in text


def test_a_message_with_a_lone_surrogate_does_not_end_the_log(tmp_path: Path) -> None:
    view = MessageView()
    with logging_to(view, tmp_path, "warning"):
        logging.getLogger("a").warning("a library quotes \ud83d")
        logging.getLogger("a").warning("two")
    assert view.messages == [("warning", "a library quotes ?"), ("warning", "two")]
    text = (tmp_path / "driver.log").read_text()
    assert "a library quotes \\ud83d" in text and "WARNING a: two" in text


def test_the_log_of_a_long_run_has_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observe.terminal.live.LOG_BYTES", 1000)
    monkeypatch.setattr("asyncrl.observe.terminal.live.NUM_OLD_LOGS", 2)
    with logging_to(MessageView(), tmp_path, "warning"):
        for number in range(200):
            logging.getLogger("a").warning("message %d", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["driver.log", "driver.log.1", "driver.log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert "message 199" in (tmp_path / "driver.log").read_text()


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = MessageView()

    class FullStream:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    with logging_to(view, tmp_path, "warning"):
        file = logging.getLogger().handlers[0]
        monkeypatch.setattr(file, "stream", FullStream())
        logging.getLogger("a").warning("one")
        logging.getLogger("a").warning("two")
    assert [text for _, text in view.messages if "driver.log" in text] == [
        f"cannot write {tmp_path / 'driver.log'}: the log ends here, later messages are only shown"
    ]
    assert [text for _, text in view.messages if text in ("one", "two")] == ["one", "two"]

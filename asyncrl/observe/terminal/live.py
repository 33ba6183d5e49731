"""The terminal output of a run: a live view, plain lines or nothing, the closing summary, and log messages."""

from __future__ import annotations

import io
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from asyncrl.core.failures import ConfigError, UserCodeError, conceal, users_frame
from asyncrl.core.text import encodable
from asyncrl.observe.formats import elapsed, number, percent, short_s, whole_percent
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.status.run_status import Restart
from asyncrl.observe.terminal.screen import (
    DIM,
    Dashboard,
    ProgressPhase,
    draw,
    facts,
    panel,
    restart_line,
    run_directory,
)
from asyncrl.storage.run_dir import disk_error

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN_LOGGERS = ("asyncrl.", "rollouter.", "trainer.", "skip.")
LOG_BYTES = 64 << 20
"""Size at which a log file is renamed to `driver.log.1`, and a new one begins."""
NUM_OLD_LOGS = 3
ALREADY_SHOWN = {"already_shown": True}
"""`extra` of a log message that the view already shows, so that it goes only to the file."""


Example = Mapping[str, Any]
"""An answer to a validation prompt, as `ValidationRecord.examples` has it."""
MAX_EXAMPLE_CHARS = 600
MAX_TRACEBACK_LINES = 40
_OUTCOME_STYLES = {"completed": "bold green", "failed": "bold red", "interrupted": "bold yellow"}
MAX_STEP_LINES = 150
_UNWRAPPED = 4000
"""Width in which no line of the closing summary is wrapped."""
_LEVEL_STYLES = {"hint": "cyan", "warning": "yellow", "error": "bold red"}


class View:
    """The interface of views. This one shows nothing (`logging.console: off`).

    A context manager: after the block the terminal is restored.
    """

    def phase(self, text: str) -> None:
        """End the current phase and, unless `text` is empty, begin the phase `text`."""

    def progress(self, text: str) -> None:
        """Show how far the current phase is."""

    def row(self, row: MetricsRow, dashboard: Dashboard) -> None:
        """Show a recorded row and the dashboard, which has changed with it."""
        self.update(dashboard)

    def update(self, dashboard: Dashboard) -> None:
        """Show the changed values of the dashboard."""

    def restart(self, restart: Restart, dashboard: Dashboard) -> None:
        """Show that a part is being replaced, or that its replacement has recovered."""
        level = "warning" if restart.recovered_at is None else ""
        self.message(level, restart_line(restart))
        self.update(dashboard)

    def message(self, level: str, text: str) -> None:
        """Print a warning, hint or error, or with an empty level a recovery. It stays on the terminal."""

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        """Show the closing summary. No other method is called after this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class PlainView(View):
    """Prints lines, for logs and pipes: every step of a short run, every k-th of a long one."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._validations = 0
        self._progress = ""

    def phase(self, text: str) -> None:
        if text:
            self._line(text)

    def progress(self, text: str) -> None:
        if text != self._progress:
            self._progress = text
            self._line(text)

    def row(self, row: MetricsRow, dashboard: Dashboard) -> None:
        if row.kind == "validation":
            # Fewer and fewer: the first 40, then every second, every third, …
            if self._validations % (1 + self._validations // 40) == 0:
                reward = number(row.metrics.get("validation/reward/mean"))
                self._line(f"validation of version {row.version} (step {row.step}): reward {reward}")
            self._validations += 1
        elif row.kind == "step" and self._is_shown(row.step, dashboard):
            self._line(_step_line(row, dashboard))

    def _is_shown(self, step: int, dashboard: Dashboard) -> bool:
        total = dashboard.total_steps
        if total is None:
            return True
        every = -(-(total - dashboard.first_step) // MAX_STEP_LINES)
        return step % max(every, 1) == 0 or step in (dashboard.first_step + 1, total)

    def message(self, level: str, text: str) -> None:
        self._line(conceal(f"{level}: {text}" if level else text))

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        wide = Console(file=io.StringIO(), width=_UNWRAPPED, highlight=False, color_system=None)
        with wide.capture() as captured:
            wide.print(closing_summary(summary, run_dir, before, after))
        for line in captured.get().splitlines():
            self._console.print(Text(line.rstrip()), soft_wrap=True)

    def _line(self, text: str) -> None:
        stamp = elapsed(self._clock() - self._started_s)
        self._console.print(Text(f"[{stamp}] {text}"), soft_wrap=True)


def _step_line(row: MetricsRow, board: Dashboard) -> str:
    counts, known = board.shown_counts, board.metrics.get
    total = f"/{board.total_steps}" if board.total_steps else ""
    return (
        f"step {row.step}{total} version {row.version}  reward {number(row.metrics.get('reward/mean'))}  "
        f"trained {counts.trained} dropped {counts.num_dropped} running {counts.running} leased {counts.leased}  "
        f"staleness {number(known('staleness/mean'), '.2f')} max {number(known('staleness/max'), '.0f')}  "
        f"queue {counts.ready}  "
        f"tokens/s {number(board.generated_per_s, '.0f')} generated {number(board.trained_per_s, '.0f')} trained  "
        f"idle rollouter {board.rollouter_idle} trainer {whole_percent(known('idle/trainer'))}  "
        f"pause {board.pause}" + (f" mismatch {board.mismatch}" if board.mismatch else "")
    )


class LiveView(View):
    """Redraws a dashboard in place, in a thread, so that its clock continues while the event loop is busy."""

    def __init__(
        self, console: Console, title: str, clock: Callable[[], float] = time.monotonic, per_second: float = 4.0
    ) -> None:
        self._console = console
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")
        self._title = title
        self._started_s = clock()
        # Both are immutable: the event loop replaces them, and the drawing thread reads them without a lock.
        self._phases: tuple[ProgressPhase, ...] = ()
        self._phase = ""
        self._dashboard: Dashboard | None = None
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=per_second, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the current content of the terminal."""
        now_s = self._clock()
        content = draw(self._phases, self._dashboard, now_s, self._spinner)
        return panel(content, self._title, elapsed(now_s - self._started_s))

    def phase(self, text: str) -> None:
        now_s = self._clock()
        self.progress("")
        ended = tuple(p if p.ended_s is not None else replace(p, ended_s=now_s) for p in self._phases)
        self._phases = (*ended, ProgressPhase(text, now_s)) if text else ended
        self._phase = text

    def progress(self, text: str) -> None:
        if self._phases and (current := self._phases[-1]).ended_s is None:
            shown = f"{self._phase}; {text}" if text else self._phase
            self._phases = (*self._phases[:-1], replace(current, text=shown))

    def update(self, dashboard: Dashboard) -> None:
        # Until there is a first result, the phases are more informative than a table of dashes.
        if self._dashboard is not None or dashboard.rewards or dashboard.validations:
            self._dashboard = dashboard

    def message(self, level: str, text: str) -> None:
        text = conceal(f"{level}: {text}" if level else text)
        self._console.print(Text(text, style=_LEVEL_STYLES.get(level, "")))

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        self.phase("")
        self._live.stop()
        self._console.print(closing_summary(summary, run_dir, before, after))


def make_view(mode: Literal["auto", "live", "plain", "off"], title: str, console: Console | None = None) -> View:
    """Return the view that `logging.console` selects; `auto` is a live view on a terminal and plain lines elsewhere."""
    if mode == "off":
        return View()
    console = console or Console(highlight=False)
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveView(console, title)
    return PlainView(console)


# ------------------------------------------------------------------------------------------------ closing summary


def closing_summary(
    summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None
) -> RenderableType:
    """Return the outcome of a run, its costs, and the answers to one prompt before and after training."""
    parts: list[RenderableType] = [_headline(summary)]
    if summary["error"] is not None:
        parts.append(_error(summary["error"]))
    parts.append(_outcome(summary))
    if before is not None and after is not None:
        parts += [Text(), _example(before, after)]
    path = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    return Group(*parts, Text(), run_directory(path))


def _headline(summary: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (summary["status"], _OUTCOME_STYLES[summary["status"]]),
        f" after {elapsed(summary['wall_s'])}: step {summary['step']}, version {summary['version']}",
    )


def _error(error: Mapping[str, Any]) -> Text:
    if error["type"] == ConfigError.__name__:
        return Text.assemble(("configuration: ", "bold red"), ConfigError(error["message"], error["cause"]).brief)
    text = Text.assemble((f"{error['type']} in {error['part']}: ", "bold red"), error["message"])
    if error["type"] == UserCodeError.__name__ and (place := users_frame(error["cause"])):
        reason = UserCodeError(error["message"], error["cause"]).brief.partition("\n")[2]
        fix = "    fix: correct it there; logs/driver.log has the traceback"
        return text.append("\n" + "\n".join(filter(None, [f"    {place}", reason, fix])))
    lines = error["cause"].rstrip().splitlines()
    if lines:
        cut = ["  …"] if len(lines) > MAX_TRACEBACK_LINES else []
        text.append("\n" + "\n".join([*cut, *lines[-MAX_TRACEBACK_LINES:]]), style=DIM)
    return text


def _outcome(summary: Mapping[str, Any]) -> RenderableType:
    table = facts(width=None)
    reward = summary["reward"]
    if reward["first"] is not None:
        table.add_row("reward", _change(reward["first"], reward["last"], "first and last tenth of the trained samples"))
    before, after = summary["validation"]["before"], summary["validation"]["after"]
    if before and after:
        note = f"version {before['version']} and {after['version']}"
        table.add_row("validation", _change(before["reward"], after["reward"], note))
    table.add_row("samples", _samples(summary["samples"]))
    if replayed := summary["samples"]["replayed"]:
        substituted = summary["samples"]["substituted"]
        other = f", {substituted:,} of them from records of other samples" if substituted else ""
        table.add_row("replayed", f"{replayed:,} samples{other}")
    for role, counts in summary.get("skip", {}).items():
        if text := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
            table.add_row(f"skip {role}", text)
    tokens = summary["tokens"]
    table.add_row("tokens", f"{tokens['generated']:,} generated, {tokens['trained']:,} trained")
    staleness = summary["staleness"]
    if staleness["max"] is not None:
        table.add_row("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']} versions")
    idle = summary["idle"]
    if idle["trainer"] is not None:
        rollouter = "replaying" if summary["replays"] else whole_percent(idle["rollouter"])
        table.add_row("idle", f"rollouter {rollouter}, trainer {whole_percent(idle['trainer'])}")
    if restarts := {part: count for part, count in summary["restarts"].items() if count}:
        table.add_row("restarts", _restarts(restarts, summary["recovery"]))
    sync = summary["weight_sync"]
    if sync["pause_s"]["p50"] is not None:
        pause = sync["pause_s"]
        text = f"{sync['count']}, pause {short_s(pause['p50'])} (max {short_s(pause['max'])})"
        if sync["sent_share"] is not None and sync["sent_share"] < 1.0:
            text += f", {percent(sync['sent_share'])} of the bytes sent"
        table.add_row("weight sync", text)
    return table


def _change(first: float | None, last: float | None, note: str) -> Text:
    text = Text.assemble(number(first), " → ", (number(last), "bold"))
    if first is not None and last is not None:
        text.append(f"  {last - first:+.3f}", style="bold green" if last > first else "bold yellow")
    return text.append(f"  ({note})", style=DIM)


def _samples(samples: Mapping[str, Any]) -> str:
    reasons = [f"{reason} {count:,}" for reason, count in samples["dropped"].items() if count]
    dropped = f"{sum(samples['dropped'].values()):,} dropped" + (f" ({', '.join(reasons)})" if reasons else "")
    return f"{samples['fed']:,} fed, {samples['trained']:,} trained, {dropped}"


def _restarts(counts: Mapping[str, int], recovery: Sequence[Mapping[str, Any]]) -> str:
    text = ", ".join(f"{part} {count}" for part, count in counts.items())
    times_s = [each["recovered_s"] for each in recovery if each["recovered_s"] is not None]
    if times_s:
        text += f"; recovered in {short_s(statistics.median(times_s))} (max {short_s(max(times_s))})"
    return text


def _example(before: Example, after: Example) -> RenderableType:
    table = facts(width=None)
    table.add_row("prompt", _clip(str(before["prompt"])))
    if before["ground_truth"] is not None:
        table.add_row("expected", _clip(str(before["ground_truth"])))
    for name, answer in (("before", before), ("after", after)):
        table.add_row(name, _clip(str(answer["response"])).append(f"  reward {answer['reward']:g}", style=DIM))
    return table


def _clip(text: str) -> Text:
    text = text.strip()
    return Text(text if len(text) <= MAX_EXAMPLE_CHARS else text[:MAX_EXAMPLE_CHARS] + " …")


# ------------------------------------------------------------------------------------------------ logs


class ViewHandler(logging.Handler):
    """Passes log messages to the view, which shows them above its live area."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "already_shown", False):
            self._view.message(record.levelname.lower(), encodable(self.format(record)))


class ConcealingFormatter(logging.Formatter):
    """Formats log messages and tracebacks without the secrets of the run."""

    def format(self, record: logging.LogRecord) -> str:
        return conceal(super().format(record))


class LogFile(RotatingFileHandler):
    """A log file of bounded size; `<name>.1` and higher numbers have earlier messages. It stops with one message when
    its disk is full, so that it never stops a run."""

    def __init__(self, path: Path, view: View) -> None:
        # A lone surrogate is no full disk.
        super().__init__(
            path, maxBytes=LOG_BYTES, backupCount=NUM_OLD_LOGS, encoding="utf-8", errors="backslashreplace"
        )
        self._view = view

    def handleError(self, record: logging.LogRecord) -> None:
        self.setLevel(logging.CRITICAL + 1)
        self._view.message(
            "warning", f"cannot write {self.baseFilename}: the log ends here, later messages are only shown"
        )


@contextmanager
def logging_to(view: View, logs: Path, level: str) -> Iterator[None]:
    """Log to `logs/driver.log` and the view inside the block, from `level` on. The file also gets the messages of this
    project from `info` on, such as restarts of parts.

    Python warnings count as log messages. The previous handlers are restored afterwards.

    Raises:
        InfraError, ConfigError: the log file cannot be made.
    """
    path = logs / "driver.log"
    try:
        file = LogFile(path, view)
    except OSError as error:
        raise disk_error(path, error) from error
    file.setFormatter(ConcealingFormatter(_FORMAT))
    shown = ViewHandler(view)
    shown.setFormatter(ConcealingFormatter())
    shown.setLevel(level.upper())
    file.addFilter(lambda record: record.levelno >= shown.level or record.name.startswith(_OWN_LOGGERS))
    root = logging.getLogger()
    before_level, before_handlers = root.level, root.handlers[:]
    root.handlers[:] = [file, shown]
    root.setLevel(min(shown.level, logging.INFO))
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before_handlers
        root.setLevel(before_level)
        file.close()

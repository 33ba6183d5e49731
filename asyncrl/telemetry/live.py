"""The terminal of a run: a live picture, plain lines, or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from asyncrl.run_state import Restart
from asyncrl.telemetry.closing import Example, closing
from asyncrl.telemetry.dashboard import Dashboard, number, percent, restart_line, short_s, span
from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.screen import Phase, Scene, draw

MAX_STEP_LINES = 150
_LEVEL_STYLES = {"hint": "cyan", "warning": "yellow", "error": "bold red"}


class View:
    """What every view answers to; on its own it shows nothing (`logging.console: off`).

    A context manager: the terminal is its own again after the block, whatever happened in it.
    """

    def phase(self, text: str) -> None:
        """The run is now busy with `text`; the phase before is over. An empty text only ends it."""

    def row(self, row: Row, dashboard: Dashboard) -> None:
        """A record came."""

    def update(self, dashboard: Dashboard) -> None:
        """Something else to show."""

    def restart(self, restart: Restart, dashboard: Dashboard) -> None:
        """A part is being replaced, or the one that was has recovered."""
        level = "warning" if restart.recovered_at is None else ""
        self.message(level, restart_line(restart))
        self.update(dashboard)

    def message(self, level: str, text: str) -> None:
        """A warning, hint or error, or with an empty level good news, for people to keep."""

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        """The run is over: say what came of it. The last call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainView(View):
    """Lines, for logs and pipes: every step of a short run, every k-th of a long one."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._validations = 0

    def phase(self, text: str) -> None:
        if text:
            self._line(text)

    def row(self, row: Row, dashboard: Dashboard) -> None:
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
        self._line(f"{level}: {text}" if level else text)

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        self._console.print(closing(summary, run_dir, before, after))

    def _line(self, text: str) -> None:
        stamp = span(self._clock() - self._started_s)
        self._console.print(Text(f"[{stamp}] {text}"), soft_wrap=True)


def _step_line(row: Row, board: Dashboard) -> str:
    books = board.books
    total = f"/{board.total_steps}" if board.total_steps else ""
    pause = short_s(board.sync.pause_s) if board.sync and board.sync.pause_s is not None else "-"
    return (
        f"step {row.step}{total} version {row.version}  reward {number(row.metrics.get('reward/mean'))}  "
        f"trained {books.trained} dropped {books.num_dropped}  "
        f"staleness {number(board.staleness_mean, '.2f')} max {number(board.staleness_max, '.0f')}  "
        f"queue {books.running} running {books.ready} ready {books.leased} leased  "
        f"tokens/s {number(board.generated_per_s, '.0f')} generated {number(board.trained_per_s, '.0f')} trained  "
        f"idle rollouter {percent(board.idle_rollouter)} trainer {percent(board.idle_trainer)}  pause {pause}"
    )


class LiveView(View):
    """A picture that is redrawn in place by a thread of its own, so that its clock goes on while the loop is busy."""

    def __init__(
        self, console: Console, title: str, clock: Callable[[], float] = time.monotonic, per_second: float = 4.0
    ) -> None:
        self._console = console
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")
        self._lock = threading.Lock()
        """Around the scene: the loop replaces it, the drawing thread reads it."""
        self._scene = Scene(title, clock(), clock(), (), None)
        self._live = Live(
            console=console, get_renderable=self.picture, refresh_per_second=per_second, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def picture(self) -> RenderableType:
        """What the terminal shows now."""
        with self._lock:
            scene = replace(self._scene, now_s=self._clock())
        return draw(scene, self._spinner)

    def phase(self, text: str) -> None:
        now_s = self._clock()
        with self._lock:
            ended = tuple(p if p.ended_s is not None else replace(p, ended_s=now_s) for p in self._scene.phases)
            begun = (Phase(text, now_s),) if text else ()
            self._scene = replace(self._scene, phases=(*ended, *begun))

    def row(self, row: Row, dashboard: Dashboard) -> None:
        self.update(dashboard)

    def update(self, dashboard: Dashboard) -> None:
        with self._lock:
            # Until there is a first result, the phases say more than a table of dashes.
            if self._scene.dashboard is not None or dashboard.rewards or dashboard.validations:
                self._scene = replace(self._scene, dashboard=dashboard)

    def message(self, level: str, text: str) -> None:
        self._console.print(Text(f"{level}: {text}" if level else text, style=_LEVEL_STYLES.get(level, "")))

    def finish(self, summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> None:
        self.phase("")
        self._live.stop()
        self._console.print(closing(summary, run_dir, before, after))


def make_view(mode: Literal["auto", "live", "plain", "off"], title: str, console: Console | None = None) -> View:
    """The view `logging.console` asks for; `auto` is a live one on a terminal and plain lines elsewhere."""
    if mode == "off":
        return View()
    console = console or Console(highlight=False)
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveView(console, title)
    return PlainView(console)

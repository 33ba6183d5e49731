"""The live view's picture: a dashboard in, something rich can draw out. Pure; reads well from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from asyncrl.health.facts import RunHealth
from asyncrl.health.rules import size
from asyncrl.telemetry.dashboard import Dashboard, number, percent, restart_line, short_s, span, sparkline
from asyncrl.telemetry.summary import count_restarts
from asyncrl.waits import Wait

DIM = "grey58"
MAX_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Phase:
    """Something the run does before its first step or after its last."""

    text: str
    started_s: float
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a picture depends on."""

    title: str
    started_s: float
    now_s: float
    phases: tuple[Phase, ...]
    dashboard: Dashboard | None
    """None until the run has something to show besides its phases."""


def draw(scene: Scene, spinner: Spinner) -> RenderableType:
    """`spinner` is kept by the caller between pictures, or it would never turn."""
    parts: list[RenderableType] = []
    if scene.dashboard is None:
        parts.append(_phases(scene.phases, scene.now_s, spinner))
    else:
        parts += [_progress(scene.dashboard, scene.now_s), Text(), _facts(scene.dashboard)]
        open_phases = [phase for phase in scene.phases if phase.ended_s is None]
        if open_phases:
            parts += [Text(), _phases(open_phases, scene.now_s, spinner)]
    return Capped(
        Panel(
            Group(*parts),
            title=Text(scene.title, style="bold"),
            title_align="left",
            subtitle=Text(span(scene.now_s - scene.started_s), style=DIM),
            subtitle_align="right",
            border_style="cyan",
            padding=(0, 1),
        )
    )


@dataclass(frozen=True, slots=True)
class Capped:
    """Lines longer than about 120 columns are hard to follow."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(min(options.max_width, MAX_WIDTH)))


def _phases(phases: Iterable[Phase], now_s: float, spinner: Spinner) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    table.expand = True
    for phase in phases:
        age = short_s((now_s if phase.ended_s is None else phase.ended_s) - phase.started_s)
        if phase.ended_s is None:
            table.add_row(spinner, Text(phase.text), Text(age))
        else:
            table.add_row(Text("✓", style="green"), Text(phase.text, style=DIM), Text(age, style=DIM))
    return table


def _progress(board: Dashboard, now_s: float) -> RenderableType:
    eta_s = board.eta_s(now_s)
    total = board.total_steps
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    head = Text.assemble(
        ("step ", DIM),
        (f"{board.step}", "bold"),
        (f"/{total}" if total else "", "bold"),
        ("  version ", DIM),
        (f"{board.version}", "bold"),
    )
    bar = ProgressBar(total=total or 1, completed=board.step, complete_style="cyan", finished_style="green")
    share = f"{board.step / total:.0%}" if total else ""
    tail = Text.assemble(share, ("  ETA ", DIM), span(eta_s) if eta_s is not None else "-")
    table.add_row(head, bar, tail)
    return table


def _facts(board: Dashboard) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style=DIM, no_wrap=True, width=11)
    table.add_column(ratio=1)
    table.add_row("reward", _Reward(board))
    if board.validations:
        table.add_row("validation", _validation(board))
    table.add_row("samples", _samples(board))
    table.add_row("staleness", items(mean=number(board.staleness_mean, ".2f"), max=number(board.staleness_max, ".0f")))
    books = board.books
    table.add_row("queue", items(running=f"{books.running:,}", ready=f"{books.ready:,}", leased=f"{books.leased:,}"))
    rates = {"generated": number(board.generated_per_s, ",.0f"), "trained": number(board.trained_per_s, ",.0f")}
    table.add_row("tokens/s", items(**rates))
    table.add_row("idle", items(rollouter=percent(board.idle_rollouter), trainer=percent(board.idle_trainer)))
    table.add_row("weight sync", _sync(board))
    if (health := health_line(board.health)) is not None:
        table.add_row("health", health)
    if board.restarts:
        table.add_row("restarts", _restarts(board))
    for index, (part, waits) in enumerate(board.waits.items()):
        table.add_row("" if index else "waits", _waits(part, waits))
    return table


def items(**items: str) -> Text:
    """`name value` pairs: the name dim, the value plain."""
    text = Text()
    for name, value in items.items():
        text.append("   " if text else "")
        text.append(f"{name.replace('_', ' ')} ", style=DIM)
        text.append(value)
    return text or Text("-")


@dataclass(frozen=True, slots=True)
class _Reward:
    """The last step's mean, the course as wide as there is room, the ends."""

    board: Dashboard

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        board = self.board
        if not board.rewards:
            yield Text("-")
            return
        ends = f"first tenth {number(board.reward_first)} → last {number(board.reward_last)}"
        now = number(board.reward_now)
        room = options.max_width - len(now) - len(ends) - 6
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(now, style="bold")
        text.append(f"  {sparkline(board.rewards, room)}", style="green")
        text.append(f"  {ends}", style=DIM)
        yield text


def _validation(board: Dashboard) -> Text:
    """The first point, the best and the last ones."""
    points = board.validations
    text = Text()
    shown = points if len(points) <= 4 else (points[0], *points[-3:])
    for index, (version, reward) in enumerate(shown):
        if index:
            text.append(" → " if len(points) <= 4 or index > 1 else " … ", style=DIM)
        text.append(f"v{version} ", style=DIM)
        text.append(number(reward), style="bold" if index == len(shown) - 1 else "")
    return text


def _samples(board: Dashboard) -> Text:
    books = board.books
    text = items(trained=f"{books.trained:,}", dropped=f"{books.num_dropped:,}")
    reasons = [f"{reason} {count:,}" for reason, count in books.dropped.items() if count]
    if reasons:
        text.append(f" ({', '.join(reasons)})", style=DIM)
    if books.replayed:
        text.append(f"   {books.replayed:,} replayed, {books.substituted:,} of them of other samples", style=DIM)
    return text


def _sync(board: Dashboard) -> Text:
    sync = board.sync
    if sync is None:
        return Text("-")
    pause = "-" if sync.pause_s is None else short_s(sync.pause_s)
    return items(pause=pause, publish_to_applied=short_s(sync.publish_to_applied_s), count=f"{sync.count:,}")


def health_line(health: RunHealth) -> Text | None:
    """The worst of each kind, in one line; None: nothing is known."""
    shown: dict[str, str] = {}
    lags = {name: process.lag_s for name, process in health.processes.items() if process.lag_s is not None}
    if lags:
        worst = max(lags, key=lambda name: lags[name])
        shown["lag"] = f"{short_s(lags[worst])} ({worst})"
    if (machine := health.machine) is not None and machine.memory_bytes:
        shown["memory"] = f"{1 - machine.memory_available_bytes / machine.memory_bytes:.0%}"
    if health.engines:
        shown["KV"] = f"{max(load.kv_cache_usage for load in health.engines.values()):.0%}"
    if health.object_store_share is not None:
        shown["object store"] = f"{health.object_store_share:.0%}"
    if machine is not None and machine.disk_free_bytes is not None:
        shown["disk"] = f"{size(machine.disk_free_bytes)} free"
    if not shown:
        return None
    text = items(**shown)
    text.no_wrap, text.overflow = True, "ellipsis"
    if health.problems:
        text.style = "yellow"
    return text


def _restarts(board: Dashboard) -> Text:
    """How many of each part, and the newest one's cause; one line."""
    counts = count_restarts(board.restarts, board.earlier_restarts)
    text = items(**{part: str(count) for part, count in counts.items()})
    text.no_wrap, text.overflow = True, "ellipsis"
    return text.append(f"   {restart_line(board.restarts[-1])}", style=DIM)


def _waits(part: str, waits: tuple[Wait, ...]) -> Text:
    """The three longest; one line, so that the picture does not jump."""
    text = Text(no_wrap=True, overflow="ellipsis").append(f"{part} on ", style=DIM)
    if not waits:
        return text.append("nothing")
    return text.append(", ".join(_wait(wait) for wait in waits[:3]))


def _wait(wait: Wait) -> str:
    return f"{wait.edge} {short_s(wait.since_s)}" + (f" (x{wait.count})" if wait.count > 1 else "")

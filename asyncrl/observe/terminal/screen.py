"""Draw the live view: the values on the dashboard, and their layout with rich. Pure; legible from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from asyncrl.core.ports import SampleCounts
from asyncrl.core.process_health import RunHealth
from asyncrl.core.waits import Wait
from asyncrl.observe.formats import elapsed, number, short_s, size, whole_percent
from asyncrl.observe.status.run_status import Restart, RunProgress
from asyncrl.observe.status.summary import count_restarts

_SHOWN_MISMATCH_KL = 1e-4
"""In nats per token. Rounding to 16 or 8 bits gives more; in float32 the same weights give about 1e-12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard(RunProgress):
    """The values that the live view shows. Immutable, so that another thread can draw them without a lock."""

    first_step: int = 0
    """Steps that earlier processes of a resumed run have taken."""
    step: int = 0
    version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step and of the last weight sync, and the current idle shares."""
    num_syncs: int = 0
    rewards: tuple[float, ...] = ()
    """Mean rewards over the run, evenly spaced."""
    reward_ends: Mapping[str, float | None] = field(default_factory=dict)
    """Mean rewards of the `first` and the `last` tenth of the trained samples."""
    validations: tuple[tuple[int, float], ...] = ()
    """`(version, mean reward)`."""
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)
    """Open waits by part."""
    step_times: tuple[float, ...] = ()
    """When the last steps ended, on the view's clock; for `eta_s`."""

    @property
    def shown_counts(self) -> SampleCounts:
        """Return the sample counts at the moment of the last step: the queue's last answer may be a second older.

        Samples that were trained since then were leased or ready, or others took their places in generation; after the
        last step there are no others.
        """
        counts, more = self.counts, sum(self.staleness.values()) - self.counts.trained
        if more <= 0:
            return counts
        leased = min(more, counts.leased)
        ready = min(more - leased, counts.ready)
        running = min(more - leased - ready, counts.running) if self.step == self.total_steps else 0
        return replace(
            counts,
            fed=counts.fed + more - leased - ready - running,
            running=counts.running - running,
            ready=counts.ready - ready,
            leased=counts.leased - leased,
            trained=counts.trained + more,
        )

    @property
    def rollouter_idle(self) -> str:
        """Return what the Rollouter does with its time, as text."""
        return "replaying" if self.replays else whole_percent(self.metrics.get("idle/rollouter"))

    @property
    def step_s(self) -> float | None:
        """Return the mean time between the last steps; None if it is not known yet."""
        times = self.step_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def eta_s(self, now_s: float) -> float | None:
        """Return the seconds until the last step, at the pace of the last ones."""
        if self.total_steps is None or self.step_s is None:
            return None
        return max((self.total_steps - self.step) * self.step_s - (now_s - self.step_times[-1]), 0.0)

    @property
    def pause(self) -> str:
        """Return how long the last weight sync paused generation, as text."""
        pause_s = self.metrics.get("weight_sync/pause_s")
        return "-" if pause_s is None else short_s(pause_s)

    @property
    def mismatch(self) -> str | None:
        """Return the KL divergence between the log-probs of engines and Trainer, as text, if it is worth showing."""
        kl = self.metrics.get("weight_sync/mismatch_kl", 0.0)
        return None if kl < _SHOWN_MISMATCH_KL else f"{kl:.2g} nats"


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a sparkline of at most `width` characters."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return _LEVELS[0] * count
    return "".join(_LEVELS[round((mean - low) / (high - low) * (len(_LEVELS) - 1))] for mean in means)


def restart_line(restart: Restart) -> str:
    """Describe a restart in one line: its cause, and after recovery its duration and effect."""
    if restart.recovered_at is None:
        return f"the {restart.part} is being replaced: {_first_line(restart.cause)}"
    detail = f"; {restart.detail}" if restart.detail else ""
    taken_s = restart.recovered_at - restart.failed_at
    return f"the {restart.part} is back after {short_s(taken_s)}{detail} ({_first_line(restart.cause)})"


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no cause known")


DIM = "grey58"
MAX_WIDTH = 120
"""Longer lines are hard to read."""


@dataclass(frozen=True, slots=True)
class ProgressPhase:
    """A phase of the run before its first step or after its last."""

    text: str
    started_s: float
    ended_s: float | None = None


def draw(
    phases: Sequence[ProgressPhase], dashboard: Dashboard | None, now_s: float, spinner: Spinner
) -> RenderableType:
    """Return the content of the live view.

    Args:
        dashboard: None until the run has results.
        spinner: the same object in all calls, because a new one would never turn.
    """
    if dashboard is None:
        return _phases(phases, now_s, spinner)
    parts = [_progress(dashboard, now_s), Text(), _facts(dashboard)]
    if open_phases := [phase for phase in phases if phase.ended_s is None]:
        parts += [Text(), _phases(open_phases, now_s, spinner)]
    return Group(*parts)


def panel(content: RenderableType, title: str, subtitle: str = "") -> RenderableType:
    """Return `content` in a frame of limited width."""
    return Constrain(
        Panel(
            content,
            title=Text(title, style="bold"),
            title_align="left",
            subtitle=Text(subtitle, style=DIM) if subtitle else None,
            subtitle_align="right",
            border_style="cyan",
            padding=(0, 1),
        ),
        MAX_WIDTH,
    )


def _phases(phases: Iterable[ProgressPhase], now_s: float, spinner: Spinner) -> RenderableType:
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
    tail = Text.assemble(share, ("  ETA ", DIM), elapsed(eta_s) if eta_s is not None else "-")
    table.add_row(head, bar, tail)
    return table


def _facts(board: Dashboard) -> RenderableType:
    counts, known = board.shown_counts, board.metrics.get
    rates = {"generated": number(board.generated_per_s, ",.0f"), "trained": number(board.trained_per_s, ",.0f")}
    return facts(
        ("reward", _Reward(board)),
        ("validation", _validation(board) if board.validations else None),
        ("samples", _samples(board)),
        ("samples", items(running=counts.running, leased=counts.leased)),
        ("queue", items(ready=counts.ready)),
        ("staleness", items(mean=number(known("staleness/mean"), ".2f"), max=number(known("staleness/max"), ".0f"))),
        ("tokens/s", items(**rates)),
        ("idle", items(rollouter=board.rollouter_idle, trainer=whole_percent(known("idle/trainer")))),
        ("weight sync", _sync(board)),
        ("health", health_line(board.health)),
        ("restarts", _restarts(board)),
        *(("waits", _waits(part, waits)) for part, waits in board.waits.items()),
    )


def facts(*rows: tuple[str, RenderableType | None], width: int | None = 11) -> Table:
    """Return a table of named values. Rows without a value are left out, and a name that repeats is shown once.

    Args:
        width: the width of the names; None: as wide as the longest one.
    """
    table = Table.grid(padding=(0, 2), expand=width is not None)
    table.add_column(style=DIM, no_wrap=True, width=width)
    table.add_column(ratio=1 if width else None, overflow="fold")
    last = ""
    for name, value in rows:
        if value is not None:
            table.add_row("" if name == last else name, value)
            last = name
    return table


def items(**items: str | int | None) -> Text:
    """Return names and values as one line, with the names dim. Values of None are left out."""
    text = Text()
    for name, value in items.items():
        if value is not None:
            text.append("   " if text else "").append(f"{name.replace('_', ' ')} ", style=DIM)
            text.append(value if isinstance(value, str) else f"{value:,}")
    return text or Text("-")


def run_directory(path: Path | str) -> Text:
    return Text.assemble(("run directory  ", DIM), (str(path), "bold"), overflow="fold")


@dataclass(frozen=True, slots=True)
class _Reward:
    """Draws the reward: the last step's mean, a sparkline of the available width, the first and the last tenth."""

    board: Dashboard

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        board = self.board
        if not board.rewards:
            yield Text("-")
            return
        ends = f"first tenth {number(board.reward_ends['first'])} → last {number(board.reward_ends['last'])}"
        now = number(board.metrics.get("reward/mean"))
        room = options.max_width - len(now) - len(ends) - 6
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(now, style="bold")
        text.append(f"  {sparkline(board.rewards, room)}", style="green")
        text.append(f"  {ends}", style=DIM)
        yield text


def _validation(board: Dashboard) -> Text:
    """Return the first point and the last ones."""
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
    counts = board.shown_counts
    text = items(trained=counts.trained, dropped=counts.num_dropped)
    reasons = [f"{reason} {count:,}" for reason, count in counts.dropped.items() if count]
    if reasons:
        text.append(f" ({', '.join(reasons)})", style=DIM)
    if counts.replayed:
        text.append(f"   {counts.replayed:,} replayed, {counts.substituted:,} from other records", style=DIM)
    return text


def _sync(board: Dashboard) -> Text:
    if (delay_s := board.metrics.get("weight_sync/publish_to_applied_s")) is None:
        return Text("-")
    share = board.metrics.get("weight_sync/sent_share", 1.0)
    sent = whole_percent(share) if share < 1.0 else None
    return items(
        pause=board.pause,
        publish_to_applied=short_s(delay_s),
        count=board.num_syncs,
        sent=sent,
        mismatch=board.mismatch,
    )


def health_line(health: RunHealth) -> Text | None:
    """Return the worst value of each kind in one line; None if all are unknown."""
    shown: dict[str, str | None] = {}
    lags = [(process.lag_s, name) for name, process in health.processes.items() if process.lag_s is not None]
    if lags:
        worst_s, worst = max(lags)
        shown["lag"] = f"{short_s(worst_s)} ({worst})"
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


def _restarts(board: Dashboard) -> Text | None:
    """Return the number of restarts of each part, and the cause of this process' newest, in one line; None without."""
    counts = count_restarts(board.restarts, board.earlier_restarts)
    if not counts:
        return None
    text = items(**{str(part): count for part, count in counts.items()})
    text.no_wrap, text.overflow = True, "ellipsis"
    return text.append(f"   {restart_line(board.restarts[-1])}" if board.restarts else "", style=DIM)


def _waits(part: str, waits: tuple[Wait, ...]) -> Text:
    """Return the three longest waits in one line, so that the layout does not jump."""
    text = Text(no_wrap=True, overflow="ellipsis").append(f"{part} on ", style=DIM)
    if not waits:
        return text.append("nothing")
    return text.append(", ".join(_wait(wait) for wait in waits[:3]))


def _wait(wait: Wait) -> str:
    return f"{wait.edge} {short_s(wait.since_s)}" + (f" (x{wait.count})" if wait.count > 1 else "")

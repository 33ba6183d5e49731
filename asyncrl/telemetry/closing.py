"""What a run says when it is over: what improved, what it cost, one sample before and after, where everything is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.failures import ConfigError
from asyncrl.telemetry.dashboard import number, percent, short_s, span
from asyncrl.telemetry.screen import DIM

MAX_EXAMPLE_CHARS = 600
MAX_TRACEBACK_LINES = 40
_STYLES = {"completed": "bold green", "failed": "bold red", "interrupted": "bold yellow"}

Example = Mapping[str, Any]


def closing(summary: Mapping[str, Any], run_dir: Path, before: Example | None, after: Example | None) -> RenderableType:
    """`before` and `after`: one prompt's answers, as `ValidationRecord.examples` has them."""
    parts: list[RenderableType] = [_headline(summary)]
    if summary["error"] is not None:
        parts.append(_error(summary["error"]))
    parts.append(_outcome(summary))
    if before is not None and after is not None:
        parts += [Text(), _example(before, after)]
    parts += [Text(), _where(run_dir)]
    return Group(*parts)


def _headline(summary: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (summary["status"], _STYLES[summary["status"]]),
        f" after {span(summary['wall_s'])}: step {summary['step']}, version {summary['version']}",
    )


def _error(error: Mapping[str, Any]) -> Text:
    if error["type"] == ConfigError.__name__:  # no traceback: it is told in the user's terms
        return Text.assemble(("configuration: ", "bold red"), ConfigError(error["message"], error["cause"]).brief)
    lines = error["cause"].rstrip().splitlines()
    text = Text.assemble((f"{error['type']} in {error['part']}: ", "bold red"), error["message"])
    if lines:
        cut = ["  …"] if len(lines) > MAX_TRACEBACK_LINES else []
        text.append("\n" + "\n".join([*cut, *lines[-MAX_TRACEBACK_LINES:]]), style=DIM)
    return text


def _outcome(summary: Mapping[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column()
    reward = summary["reward"]
    if reward["first"] is not None:
        table.add_row("reward", _change(reward["first"], reward["last"], "first and last tenth of the trained samples"))
    before, after = summary["validation"]["before"], summary["validation"]["after"]
    if before and after:
        note = f"version {before['version']} and {after['version']}"
        table.add_row("validation", _change(before["reward"], after["reward"], note))
    table.add_row("samples", _samples(summary["samples"]))
    if replayed := summary["samples"]["replayed"]:
        of_others = summary["samples"]["substituted"]
        table.add_row("replayed", f"{replayed:,} samples" + (f", {of_others:,} of other samples" if of_others else ""))
    for role, counts in summary.get("skip", {}).items():
        if told := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
            table.add_row(f"skip {role}", told)
    tokens = summary["tokens"]
    table.add_row("tokens", f"{tokens['generated']:,} generated, {tokens['trained']:,} trained")
    staleness = summary["staleness"]
    if staleness["max"] is not None:
        table.add_row("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']} versions")
    idle = summary["idle"]
    if idle["trainer"] is not None:
        table.add_row("idle", f"rollouter {percent(idle['rollouter'])}, trainer {percent(idle['trainer'])}")
    if restarts := {part: count for part, count in summary["restarts"].items() if count}:
        table.add_row("restarts", _restarts(restarts, summary["recovery"]))
    sync = summary["weight_sync"]
    if sync["pause_s"]["p50"] is not None:
        pause = sync["pause_s"]
        table.add_row("weight sync", f"{sync['count']}, pause {short_s(pause['p50'])} (max {short_s(pause['max'])})")
    return table


def _change(first: float | None, last: float | None, note: str) -> Text:
    text = Text.assemble(number(first), " → ", (number(last), "bold"))
    if first is not None and last is not None:
        rose = last > first
        text.append(f"  {last - first:+.3f}", style="bold green" if rose else "bold yellow")
    return text.append(f"  ({note})", style=DIM)


def _samples(samples: Mapping[str, Any]) -> str:
    reasons = [f"{reason} {count:,}" for reason, count in samples["dropped"].items() if count]
    dropped = f"{sum(samples['dropped'].values()):,} dropped" + (f" ({', '.join(reasons)})" if reasons else "")
    return f"{samples['fed']:,} fed, {samples['trained']:,} trained, {dropped}"


def _restarts(counts: Mapping[str, int], recovery: Sequence[Mapping[str, Any]]) -> str:
    told = ", ".join(f"{part} {count}" for part, count in counts.items())
    taken = [each["recovered_s"] for each in recovery if each["recovered_s"] is not None]
    if not taken:
        return told
    return f"{told}; recovered in {short_s(statistics.median(taken))} (max {short_s(max(taken))})"


def _example(before: Example, after: Example) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", _clip(str(before["prompt"])))
    if before["ground_truth"] is not None:
        table.add_row("expected", _clip(str(before["ground_truth"])))
    for name, answer in (("before", before), ("after", after)):
        table.add_row(name, _clip(str(answer["response"])).append(f"  reward {answer['reward']:g}", style=DIM))
    return table


def _clip(text: str) -> Text:
    text = text.strip()
    return Text(text if len(text) <= MAX_EXAMPLE_CHARS else text[:MAX_EXAMPLE_CHARS] + " …")


def _where(run_dir: Path) -> Text:
    return Text.assemble(("run directory  ", DIM), (_readable(run_dir), "bold"), overflow="fold")


def _readable(path: Path) -> str:
    """Relative where that is shorter to read."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

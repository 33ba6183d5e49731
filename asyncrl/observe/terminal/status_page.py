"""The page of `asyncrl status`: its JSON in, something rich can draw out. Pure; reads well from 80 columns on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.chain import duration
from asyncrl.health.rules import size
from asyncrl.telemetry.dashboard import number, short_s, span
from asyncrl.telemetry.screen import DIM, Capped, items
from asyncrl.why import REPLICA_UNHEARD_S

BAR = 24
MAX_BARS = 10
MAX_RECOVERIES = 5
MAX_PROCESSES = 3
_STYLES = {
    "running": "bold cyan",
    "starting": "bold cyan",
    "stopping": "bold yellow",
    "completed": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
}
_BAD = "bold red"


def page(report: Mapping[str, Any], name: str) -> RenderableType:
    """`report`: see `asyncrl.cli.inspect.report`."""
    title = " · ".join(part for part in (report["experiment"], name, report["mode"]) if part)
    parts: list[RenderableType] = [_headline(report), _place(report), Text(), _facts(report)]
    panel = Panel(
        Group(*parts), title=Text(title, style="bold"), title_align="left", border_style="cyan", padding=(0, 1)
    )
    where = Text.assemble(("run directory  ", DIM), (report["run_dir"], "bold"), overflow="fold")
    return Group(Capped(panel), where)


def _headline(report: Mapping[str, Any]) -> Text:
    """Alive or dead, and how."""
    phase, driver = report["phase"], report["driver"]
    died = not report["live"] and phase in ("starting", "running", "stopping")
    wall_s = "" if report["wall_s"] is None else f" {'for' if report['live'] else 'after'} {span(report['wall_s'])}"
    if died:
        told = "has been gone" if driver["state"] == "gone" else "has not been heard of"
        age = duration(report["age_s"] or 0.0)
        return Text.assemble(("dead", _BAD), wall_s, f": the driver {told} for {age} (it was {phase})")
    text = Text.assemble((phase, _STYLES.get(phase, "bold")), wall_s)
    if report["live"]:
        text.append(f"  driver pid {driver['pid']} on {driver['host']}", style=DIM)
        if driver["state"] == "stopped":
            text.append("  stopped by a signal", style=_BAD)
        elif report["age_s"] > 10:
            text.append(f"  not heard of for {duration(report['age_s'])}", style=_BAD)
    if report["error"] and phase == "failed":
        text.append(f": {report['error'].strip().splitlines()[0]}")
    return text


def _place(report: Mapping[str, Any]) -> Text:
    total = f"/{report['total_steps']}" if report["total_steps"] else ""
    text = items(step=f"{number(report['step'], 'd')}{total}", version=number(report["version"], "d"))
    if report["lineage"]:
        text.append("   lineage ", style=DIM).append(str(report["lineage"]))
    for name in ("published", "applied"):
        if report[name]:
            text.append(f"   {name} ", style=DIM).append(str(report[name]["version"]))
    return text


def _facts(report: Mapping[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style=DIM, no_wrap=True, width=11)
    table.add_column(ratio=1)
    samples = report["samples"]
    dropped = samples["dropped"]
    ended = {name: f"{samples[name]:,}" for name in ("fed", "trained")}
    table.add_row("samples", items(**ended, dropped=f"{sum(dropped.values()):,}"))
    table.add_row("", items(**{name: f"{samples[name]:,}" for name in ("running", "ready", "leased")}))
    table.add_row("", _books(report))
    if samples["replayed"]:
        table.add_row("replayed", items(**{name: f"{samples[name]:,}" for name in ("replayed", "substituted")}))
    if dropped:
        table.add_row("dropped", items(**{reason: f"{count:,}" for reason, count in dropped.items()}))
    for index, (kind, count) in enumerate(report["drops"].items()):
        table.add_row("" if index else "because", Text.assemble(f"{kind} ", (f"{count:,}", "bold")))
    if (report["staleness"] or {}).get("histogram"):
        _histogram(table, report["staleness"])
    table.add_row("tokens", _tokens(report["tokens"]))
    for index, replica in enumerate(report["replicas"]):
        table.add_row("" if index else "replicas", _replica(replica))
    _health(table, report)
    _restarts(table, report)
    steps = [str(each["step"]) for each in report["checkpoints"]]
    table.add_row("checkpoints", Text(f"step {', '.join(steps)}" if steps else "none"))
    if report["journal"]:
        table.add_row("journal", _journal(report["journal"]))
    for index, note in enumerate(report["notes"]):
        table.add_row("" if index else "note", Text(note, style="yellow"))
    if report["phase"] == "failed":  # how is in the first line
        if waited := [link["text"] for link in report["why"]["chain"][1:]]:
            table.add_row("at the end", Text(" ◀ ".join(waited)))
    elif report["phase"] not in ("completed", "interrupted"):
        table.add_row("why", Text(report["why"]["text"]))
    return table


def _books(report: Mapping[str, Any]) -> Text:
    balance = Text("the books balance", style="green") if report["balanced"] else Text("the books do not balance", _BAD)
    if report["total_samples"]:
        balance.append(f"   of {report['total_samples']:,} samples in all", style=DIM)
    return balance.append(f"   ({report['books_from'] or 'no books'})", style=DIM)


def _histogram(table: Table, staleness: Mapping[str, Any]) -> None:
    """Trained samples by staleness; the bars are shares of all."""
    histogram: Mapping[str, int] = staleness["histogram"]
    total = sum(histogram.values())
    shown = list(histogram.items())
    if len(shown) > MAX_BARS:
        rest = sum(count for _, count in shown[MAX_BARS - 1 :])
        shown = [*shown[: MAX_BARS - 1], (f"≥{shown[MAX_BARS - 1][0]}", rest)]
    for index, (versions, count) in enumerate(shown):
        share = count / total
        bar = "█" * round(share * BAR) or "▏"
        text = Text.assemble(f"{versions:>2} ", (bar.ljust(BAR), "cyan"), f" {count:,} ({share:.0%})")
        if index == 0:
            text.append(f"   mean {staleness['mean']:.2f}", style=DIM)
        table.add_row("" if index else "staleness", text)


def _tokens(tokens: Mapping[str, Any]) -> Text:
    text = items(generated=number(tokens["generated"], ",d"))
    for name in ("generated", "trained"):
        if (rate := tokens[f"{name}_per_s"]) is not None:
            text.append(f"   {rate:,.0f}").append(f" {name}/s", style=DIM)
    return text


def _replica(replica: Mapping[str, Any]) -> Text:
    well = replica["phase"] in ("serving", "fetching")
    text = Text(f"{replica['replica']}  ", no_wrap=True, overflow="ellipsis")
    text.append(replica["phase"], style="green" if well else "yellow")
    if replica["unheard_s"] > REPLICA_UNHEARD_S:
        text.append(f"  not heard of for {duration(replica['unheard_s'])}", style=_BAD)
    text.append(f"  version {replica['version']}  {replica['in_flight']} requests", style=DIM)
    text.append(f"  {replica['generated_tokens']:,} tokens  pid {replica['pid']}", style=DIM)
    if load := replica.get("load"):
        text.append(f"  KV {load['kv_cache_usage']:.0%}", style=DIM)
        if load["waiting"]:
            text.append(f"  {load['waiting']} waiting", style="yellow")
    return text


def _health(table: Table, report: Mapping[str, Any]) -> None:
    """What the run takes, and what is wrong with it; of a run that has ended: when it did."""
    health: Mapping[str, Any] = report.get("health") or {}
    processes: Mapping[str, Mapping[str, Any]] = health.get("processes") or {}
    lags = {name: each["lag_s"] for name, each in processes.items() if each["lag_s"] is not None}
    if lags:
        worst = sorted(lags, key=lambda name: -lags[name])[:MAX_PROCESSES]
        table.add_row("loop lag", items(**{name: short_s(lags[name]) for name in worst}))
    if processes:
        largest = sorted(processes, key=lambda name: -processes[name]["rss_bytes"])[:MAX_PROCESSES]
        table.add_row("memory", items(**{name: size(processes[name]["rss_bytes"]) for name in largest}))
    if room := _room(health):
        table.add_row("" if processes else "room", items(**room))
    for index, problem in enumerate(health.get("problems") or ()):
        table.add_row("" if index else "problems", Text(problem["text"], style="yellow"))


def _room(health: Mapping[str, Any]) -> dict[str, str]:
    """What machine, object store and disk have left."""
    room: dict[str, str] = {}
    if machine := health.get("machine"):
        total = size(machine["memory_bytes"])
        room["free"] = f"{size(machine['memory_available_bytes'])} of {total}"
    if health.get("object_store_share") is not None:
        room["object store"] = f"{health['object_store_share']:.0%}"
    if machine and machine["disk_free_bytes"] is not None:
        room["disk"] = f"{size(machine['disk_free_bytes'])} free"
    return room


def _restarts(table: Table, report: Mapping[str, Any]) -> None:
    counts = {part: str(count) for part, count in report["restarts"].items() if count}
    if not counts:
        return
    table.add_row("restarts", items(**counts))
    recovery: Sequence[Mapping[str, Any]] = report["recovery"][-MAX_RECOVERIES:]
    for each in recovery:
        taken = "not yet at work" if each["recovered_s"] is None else f"back after {short_s(each['recovered_s'])}"
        detail = f", {each['detail']}" if each["detail"] else ""
        cause = next(iter(each["cause"].strip().splitlines()), "")
        table.add_row("", Text.assemble(f"{each['part']} {taken}{detail}", (f"  {cause}", DIM)))


def _journal(journal: Mapping[str, Any]) -> Text:
    text = Text() if journal["seq"] is None else Text(f"{journal['seq']:,} transitions, ")
    return text.append(f"{_bytes(journal['bytes'])}; payloads {_bytes(journal['payload_bytes'])}")


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

"""Draw the page of `asyncrl status` from its JSON. Pure; legible from 80 columns on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.observe.health.rules import size
from asyncrl.observe.status.why import REPLICA_SILENT_S, duration
from asyncrl.observe.terminal.screen import DIM, WidthLimited, elapsed, items, number, short_s

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


def status_page(report: Mapping[str, Any], name: str) -> RenderableType:
    """`report`: the result of `asyncrl.observe.status.run_files.status_report`."""
    title = " · ".join(part for part in (report["experiment"], name, report["mode"]) if part)
    parts: list[RenderableType] = [_headline(report), _position(report), Text(), _facts(report)]
    panel = Panel(
        Group(*parts), title=Text(title, style="bold"), title_align="left", border_style="cyan", padding=(0, 1)
    )
    where = Text.assemble(("run directory  ", DIM), (report["run_dir"], "bold"), overflow="fold")
    return Group(WidthLimited(panel), where)


def _headline(report: Mapping[str, Any]) -> Text:
    """The phase of the run and the state of its driver."""
    phase, driver = report["phase"], report["driver"]
    is_dead = not report["live"] and phase in ("starting", "running", "stopping")
    wall_s = "" if report["wall_s"] is None else f" {'for' if report['live'] else 'after'} {elapsed(report['wall_s'])}"
    if is_dead:
        state = "has been gone" if driver["state"] == "gone" else "has not written its state"
        age = duration(report["age_s"] or 0.0)
        return Text.assemble(("dead", _BAD), wall_s, f": the driver {state} for {age} (it was {phase})")
    text = Text.assemble((phase, _STYLES.get(phase, "bold")), wall_s)
    if report["live"]:
        text.append(f"  driver pid {driver['pid']} on {driver['host']}", style=DIM)
        if driver["state"] == "stopped":
            text.append("  stopped by a signal", style=_BAD)
        elif report["age_s"] > 10:
            text.append(f"  state not written for {duration(report['age_s'])}", style=_BAD)
    if report["error"] and phase == "failed":
        text.append(f": {report['error'].strip().splitlines()[0]}")
    return text


def _position(report: Mapping[str, Any]) -> Text:
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
    table.add_row("", _counts(report))
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
    if report["phase"] == "failed":  # the error is in the headline
        if links := [link["text"] for link in report["why"]["chain"][1:]]:
            table.add_row("at the end", Text(" ◀ ".join(links)))
    elif report["phase"] not in ("completed", "interrupted"):
        table.add_row("why", Text(report["why"]["text"]))
    return table


def _counts(report: Mapping[str, Any]) -> Text:
    balance = (
        Text("counts are consistent", style="green") if report["balanced"] else Text("counts are inconsistent", _BAD)
    )
    if report["total_samples"]:
        balance.append(f"   of {report['total_samples']:,} samples in all", style=DIM)
    return balance.append(f"   ({report['counts_from'] or 'no counts'})", style=DIM)


def _histogram(table: Table, staleness: Mapping[str, Any]) -> None:
    """Trained samples by staleness, as shares of all."""
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
    is_healthy = replica["phase"] in ("serving", "fetching")
    text = Text(f"{replica['replica']}  ", no_wrap=True, overflow="ellipsis")
    text.append(replica["phase"], style="green" if is_healthy else "yellow")
    if replica["silent_s"] > REPLICA_SILENT_S:
        text.append(f"  no report for {duration(replica['silent_s'])}", style=_BAD)
    text.append(f"  version {replica['version']}  {replica['in_flight']} requests", style=DIM)
    text.append(f"  {replica['generated_tokens']:,} tokens  pid {replica['pid']}", style=DIM)
    if load := replica.get("load"):
        text.append(f"  KV {load['kv_cache_usage']:.0%}", style=DIM)
        if load["waiting"]:
            text.append(f"  {load['waiting']} waiting", style="yellow")
    return text


def _health(table: Table, report: Mapping[str, Any]) -> None:
    """Resource usage and problems, of a run that has ended those at its end."""
    health: Mapping[str, Any] = report.get("health") or {}
    processes: Mapping[str, Mapping[str, Any]] = health.get("processes") or {}
    lags = {name: each["lag_s"] for name, each in processes.items() if each["lag_s"] is not None}
    if lags:
        worst = sorted(lags, key=lambda name: -lags[name])[:MAX_PROCESSES]
        table.add_row("loop lag", items(**{name: short_s(lags[name]) for name in worst}))
    if processes:
        largest = sorted(processes, key=lambda name: -processes[name]["rss_bytes"])[:MAX_PROCESSES]
        table.add_row("memory", items(**{name: size(processes[name]["rss_bytes"]) for name in largest}))
    if free := _free(health):
        table.add_row("" if processes else "machine", items(**free))
    for index, problem in enumerate(health.get("problems") or ()):
        table.add_row("" if index else "problems", Text(problem["text"], style="yellow"))


def _free(health: Mapping[str, Any]) -> dict[str, str]:
    """Available memory, object store and disk."""
    free: dict[str, str] = {}
    if machine := health.get("machine"):
        total = size(machine["memory_bytes"])
        free["free"] = f"{size(machine['memory_available_bytes'])} of {total}"
    if health.get("object_store_share") is not None:
        free["object store"] = f"{health['object_store_share']:.0%}"
    if machine and machine["disk_free_bytes"] is not None:
        free["disk"] = f"{size(machine['disk_free_bytes'])} free"
    return free


def _restarts(table: Table, report: Mapping[str, Any]) -> None:
    counts = {part: str(count) for part, count in report["restarts"].items() if count}
    if not counts:
        return
    table.add_row("restarts", items(**counts))
    recovery: Sequence[Mapping[str, Any]] = report["recovery"][-MAX_RECOVERIES:]
    for each in recovery:
        outcome = "not yet recovered" if each["recovered_s"] is None else f"back after {short_s(each['recovered_s'])}"
        detail = f", {each['detail']}" if each["detail"] else ""
        cause = next(iter(each["cause"].strip().splitlines()), "")
        table.add_row("", Text.assemble(f"{each['part']} {outcome}{detail}", (f"  {cause}", DIM)))


def _journal(journal: Mapping[str, Any]) -> Text:
    text = Text() if journal["seq"] is None else Text(f"{journal['seq']:,} transitions, ")
    return text.append(f"{size(journal['bytes'])}; payloads {size(journal['payload_bytes'])}")

"""Draw the page of `asyncrl status` from its JSON. Pure; legible from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from asyncrl.observe.formats import duration, elapsed, number, short_s, size
from asyncrl.observe.status.why import REPLICA_SILENT_S
from asyncrl.observe.terminal.screen import DIM, facts, items, panel, run_directory

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
    """Return the page. `report`: the result of `asyncrl.observe.status.run_files.status_report`."""
    title = " · ".join(part for part in (report["experiment"], name, report["mode"]) if part)
    described = {"sft": _facts_of_sft, "eval": _facts_of_evaluation}.get(report["mode"], _facts)
    content = Group(_headline(report), _position(report), Text(), described(report))
    return Group(panel(content, title), run_directory(report["run_dir"]))


def _headline(report: Mapping[str, Any]) -> Text:
    """Return the phase of the run and the state of its driver."""
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
    if report["mode"] == "eval":
        answers = report["answers"]
        done = answers.get("known", 0) + answers.get("answered", 0)
        return items(answered=f"{done}/{answers.get('prompts', '-')}", failed=answers.get("failed", 0))
    if report["mode"] == "sft":
        return items(step=f"{number(report['step'], 'd')}{total}")
    text = items(step=f"{number(report['step'], 'd')}{total}", version=number(report["version"], "d"))
    if report["lineage"]:
        text.append("   lineage ", style=DIM).append(str(report["lineage"]))
    for name in ("published", "applied"):
        if report[name]:
            text.append(f"   {name} ", style=DIM).append(str(report[name]["version"]))
    return text


def _facts_of_sft(report: Mapping[str, Any]) -> RenderableType:
    losses = {name: number(loss, ".4g") for name, loss in report["losses"].items()}
    return facts(
        ("loss", items(**losses) if losses else None),
        ("tokens", items(trained=number(report["tokens"]["trained"], ",d"))),
        ("checkpoints", _checkpoints(report)),
        *_ending(report),
    )


def _facts_of_evaluation(report: Mapping[str, Any]) -> RenderableType:
    kept = report["answers"].get("known")
    return facts(
        ("tokens", items(generated=number(report["tokens"]["generated"], ",d"))),
        ("kept", Text(f"{kept:,} prompts were answered before") if kept else None),
        *_ending(report),
    )


def _checkpoints(report: Mapping[str, Any]) -> Text:
    steps = ", ".join(str(each["step"]) for each in report["checkpoints"])
    return Text(f"step {steps}" if steps else "none")


def _ending(report: Mapping[str, Any]) -> Iterator[tuple[str, Text | None]]:
    """Yield the notes, and what a live run is blocked on, or was at its end."""
    blocked = why = None
    if report["phase"] == "failed":  # the error is in the headline
        blocked = " ◀ ".join(link["text"] for link in report["why"]["chain"][1:]) or None
    elif report["phase"] not in ("completed", "interrupted"):
        why = report["why"]["text"]
    yield from (("note", Text(note, style="yellow")) for note in report["notes"])
    yield "at the end", blocked and Text(blocked)
    yield "why", why and Text(why)


def _facts(report: Mapping[str, Any]) -> RenderableType:
    samples, dropped = report["samples"], report["samples"]["dropped"]
    health: Mapping[str, Any] = report.get("health") or {}
    return facts(
        ("samples", items(fed=samples["fed"], trained=samples["trained"], dropped=sum(dropped.values()))),
        ("samples", items(running=samples["running"], leased=samples["leased"])),
        ("samples", _counts(report)),
        ("queue", items(ready=samples["ready"])),
        (
            "replayed",
            items(**{name: samples[name] for name in ("replayed", "substituted")}) if samples["replayed"] else None,
        ),
        ("dropped", items(**dropped) if dropped else None),
        *(
            ("drop reason", Text.assemble(f"{kind} ", (f"{number:,}", "bold")))
            for kind, number in report["drops"].items()
        ),
        *(("staleness", bar) for bar in _histogram(report["staleness"])),
        ("tokens", items(**{name: number(report["tokens"][name], ",d") for name in ("generated", "trained")})),
        ("tokens", _token_rates(report["tokens"])),
        ("attention", Text(report["attention"]) if report["attention"] else None),
        ("replicas", _num_replicas(report)),
        *(("replicas", _replica(replica)) for replica in report["replicas"]),
        *_health(health),
        *(("problems", Text(problem["text"], style="yellow")) for problem in health.get("problems") or ()),
        *(("restarts", line) for line in _restarts(report)),
        ("checkpoints", _checkpoints(report)),
        ("journal", _journal(report["journal"]) if report["journal"] else None),
        *_ending(report),
    )


def _counts(report: Mapping[str, Any]) -> Text:
    balance = (
        Text("counts are consistent", style="green") if report["balanced"] else Text("counts are inconsistent", _BAD)
    )
    if report["total_samples"]:
        balance.append(f"   of {report['total_samples']:,} samples in all", style=DIM)
    return balance.append(f"   ({report['counts_from'] or 'no counts'})", style=DIM)


def _histogram(staleness: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the trained samples by staleness, as shares of all."""
    shown = [(versions, count) for versions, count in staleness["histogram"].items() if count > 0]
    total = sum(count for _, count in shown)
    if len(shown) > MAX_BARS:
        rest = sum(count for _, count in shown[MAX_BARS - 1 :])
        shown = [*shown[: MAX_BARS - 1], (f"≥{shown[MAX_BARS - 1][0]}", rest)]
    for place, (versions, count) in enumerate(shown):
        bar = "█" * round(count / total * BAR) or "▏"
        mean = "" if place else f"   mean {staleness['mean']:.2f}"
        yield Text.assemble(
            f"{versions:>2} ", (bar.ljust(BAR), "cyan"), f" {count:,} ({count / total:.0%})", (mean, DIM)
        )


def _token_rates(tokens: Mapping[str, Any]) -> Text | None:
    rates = {name: rate for name in ("generated", "trained") if (rate := tokens[f"{name}_per_s"]) is not None}
    shown = [Text.assemble(f"{rate:,.0f}", (f" {name}/s", DIM)) for name, rate in rates.items()]
    return Text("   ").join(shown) if shown else None


def _num_replicas(report: Mapping[str, Any]) -> Text | None:
    """Return how many replicas serve, if it is not the number that the run wants."""
    serving = sum(
        one["phase"] not in ("starting", "leaving", "broken") and one["silent_s"] <= REPLICA_SILENT_S
        for one in report["replicas"]
    )
    wanted = report["num_replicas"]
    if wanted is None or serving == wanted or not report["live"]:
        return None
    return Text.assemble((f"{serving}", "bold"), (f" serving, {wanted} wanted", DIM))


def _replica(replica: Mapping[str, Any]) -> Text:
    is_healthy = replica["phase"] in ("serving", "fetching")
    text = Text(f"{replica['replica']}  ", no_wrap=True, overflow="ellipsis")
    text.append(replica["phase"], style="green" if is_healthy else "yellow")
    if replica["phase"] == "leaving":
        return text
    if replica["silent_s"] > REPLICA_SILENT_S:
        text.append(f"  no report for {duration(replica['silent_s'])}", style=_BAD)
    text.append(f"  version {replica['version']}  {replica['in_flight']} requests", style=DIM)
    text.append(f"  {replica['generated_tokens']:,} tokens  pid {replica['pid']}", style=DIM)
    if load := replica.get("load"):
        text.append(f"  KV {load['kv_cache_usage']:.0%}", style=DIM)
        if load["waiting"]:
            text.append(f"  {load['waiting']} waiting", style="yellow")
    return text


def _health(health: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    """Yield the resource usage; for a run that has ended, the usage at its end."""
    processes: Mapping[str, Mapping[str, Any]] = health.get("processes") or {}
    lags = {name: each["lag_s"] for name, each in processes.items() if each["lag_s"] is not None}
    if lags:
        yield (
            "loop lag",
            items(**{name: short_s(lags[name]) for name in nlargest(MAX_PROCESSES, lags, lags.__getitem__)}),
        )
    if sizes := {name: each["rss_bytes"] for name, each in processes.items()}:
        yield "memory", items(**{name: size(sizes[name]) for name in nlargest(MAX_PROCESSES, sizes, sizes.__getitem__)})
    machine, store = health.get("machine") or {}, health.get("object_store_share")
    free = {
        "free": f"{size(machine['memory_available_bytes'])} of {size(machine['memory_bytes'])}" if machine else None,
        "object store": None if store is None else f"{store:.0%}",
        "disk": None if machine.get("disk_free_bytes") is None else f"{size(machine['disk_free_bytes'])} free",
    }
    if any(free.values()):
        yield "memory" if processes else "machine", items(**free)


def _restarts(report: Mapping[str, Any]) -> Iterator[Text]:
    counts = {part: count for part, count in report["restarts"].items() if count}
    if not counts:
        return
    yield items(**counts)
    for each in report["recovery"][-MAX_RECOVERIES:]:
        outcome = "not yet recovered" if each["recovered_s"] is None else f"back after {short_s(each['recovered_s'])}"
        detail = f", {each['detail']}" if each["detail"] else ""
        cause = next(iter(each["cause"].strip().splitlines()), "")
        yield Text.assemble(f"{each['part']} {outcome}{detail}", (f"  {cause}", DIM))


def _journal(journal: Mapping[str, Any]) -> Text:
    text = Text() if journal["seq"] is None else Text(f"{journal['seq']:,} transitions, ")
    return text.append(f"{size(journal['bytes'])}; payloads {size(journal['payload_bytes'])}")

"""`asyncrl status` and `asyncrl why`: what the files in a run directory say of a run, live or dead. No Ray, no model.

state.json     what the driver knew a second ago, or last        journal.db     the books, to the last transition
summary.json   how it ended                                      checkpoints/   what it can go on from
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import yaml
from rich.console import Console
from rich.live import Live

from asyncrl.chain import Driver, Link, as_json, render
from asyncrl.failures import AsyncRLError, ConfigError
from asyncrl.journal_reader import read_books
from asyncrl.manifest import checkpoint_steps
from asyncrl.ports import Books
from asyncrl.run_dir import JOURNAL, RUNS, SAMPLES
from asyncrl.run_state import ENDED, FILE_NAME, RunState, dump
from asyncrl.telemetry.rows import finite
from asyncrl.telemetry.state_file import read_state
from asyncrl.telemetry.status_page import page
from asyncrl.telemetry.summary import recovery_summary, staleness_summary
from asyncrl.why import STALE_S, explain

WATCH_S = 1.0
SUMMARY = "summary.json"
_MARKS = (FILE_NAME, "config.yaml", SUMMARY)
"""A directory that has one of these is a run's."""
_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything the files say."""

    run_dir: Path
    now: float
    state: RunState | None
    driver: Driver
    summary: Mapping[str, Any] | None
    books: Books
    books_from: str
    journal: Mapping[str, Any] | None
    checkpoints: Mapping[int, Path]
    notes: tuple[str, ...]
    """What could not be read, and why."""


def status(run: str | None, *, as_json: bool, watch: bool) -> int:
    """Print the state of a run; with `watch`, again and again until it ends or Ctrl-C.

    Raises:
        ConfigError: there is no such run, or nothing in it to tell.
    """
    run_dir = find_run(run)
    if as_json:
        _print_json(report(look(run_dir)))
        return 0
    console = Console(highlight=False)
    if not watch:
        console.print(page(report(look(run_dir)), run_dir.name))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            seen = report(look(run_dir))
            live.update(page(seen, run_dir.name), refresh=True)
            if not seen["live"]:
                break
            time.sleep(WATCH_S)  # the driver writes its state as often; a dead one would wake nobody
    return 0


def why(run: str | None, *, as_json: bool) -> int:
    """Print the chain of waits of a run.

    Raises:
        ConfigError: there is no such run, or nothing in it to tell.
    """
    run_dir = find_run(run)
    seen = look(run_dir)
    links = chain(seen)
    if as_json:
        _print_json({"run_dir": str(run_dir), "live": is_live(seen), **_why(links)})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    indent = ""
    if links[0].cause and len(links) > 1:
        console.print(f"{links[0].text}\nat that time:", markup=False)
        links, indent = links[1:], "  "
    for number, link in enumerate(links):
        console.print(f"{indent}  ◀ {link.text}" if number else f"{indent}{link.text}", markup=False)
    return 0


def _print_json(content: Any) -> None:
    Console(highlight=False, soft_wrap=True).print(
        json.dumps(finite(content), indent=2, default=str, ensure_ascii=False), markup=False
    )


# ---------------------------------------------------------------------------------------------- which run


def find_run(name: str | None, root: Path = RUNS) -> Path:
    """The run directory that `name` means: a path, an experiment (its newest run), or None: the newest run of all.

    Raises:
        ConfigError: there is none; the message says what there is.
    """
    if name is None:
        runs = [run for each in _directories(root) for run in ([each] if _is_run(each) else _runs(each))]
        if not runs:
            raise ConfigError(f"there are no runs in {root.absolute()}: give a run directory, e.g. asyncrl status PATH")
        return max(runs, key=_last_active).absolute()
    for path in (Path(name).expanduser(), root / name):
        if _is_run(path):
            return path.resolve()
        if runs := _runs(path):
            return max(runs, key=_last_active).absolute()
    raise ConfigError(f"there is no run {name!r}: it is no run directory and no experiment. {_what_there_is(root)}")


def _what_there_is(root: Path) -> str:
    found = {path.name: 1 if _is_run(path) else len(_runs(path)) for path in _directories(root)}
    listed = [f"{name} ({count} run{'s' if count > 1 else ''})" for name, count in found.items() if count]
    if not listed:
        return f"There are no runs in {root.absolute()}."
    more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return f"In {root.absolute()} there are {', '.join(listed[:_MOST_LISTED])}{more}."


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / mark).exists() for mark in _MARKS)


def _runs(path: Path) -> list[Path]:
    return [each for each in _directories(path) if not each.is_symlink() and _is_run(each)]


def _directories(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _last_active(run: Path) -> float:
    return max((run / mark).stat().st_mtime for mark in _MARKS if (run / mark).exists())


# ---------------------------------------------------------------------------------------------- what its files say


def look(run_dir: Path) -> Seen:
    """Read everything. What is damaged or missing becomes a note, as long as something is left to tell.

    Raises:
        ConfigError: nothing is.
    """
    notes: list[str] = []
    state, summary = None, None
    try:
        state = read_state(run_dir)
    except ConfigError as error:
        notes.append(error.message)
    with contextlib.suppress(FileNotFoundError):
        try:
            summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            notes.append(f"{run_dir / SUMMARY} cannot be read: {error}")
    now = time.time()
    if state is not None and summary is not None and state.phase not in ENDED:
        # The summary comes last, so this run has ended, whatever its last state says.
        state = replace(state, phase=summary["status"], error=_error(summary))
    books, books_from = _books(run_dir, state, summary, now, notes)
    seen = Seen(
        run_dir=run_dir,
        now=now,
        state=state,
        driver=driver_of(state) if state else "unknown",
        summary=summary,
        books=books,
        books_from=books_from,
        journal=_journal(run_dir, state),
        checkpoints=checkpoint_steps(run_dir),
        notes=tuple(notes),
    )
    if state is None and summary is None and not books_from:
        told = "; ".join(notes) or f"there is no {FILE_NAME}, {SUMMARY} or {JOURNAL} in it"
        raise ConfigError(f"{run_dir} tells nothing of its run: {told}. It ended before it began.")
    return seen


def driver_of(state: RunState) -> Driver:
    """How the driver's process is, if it is on this machine."""
    if state.host != socket.gethostname():
        return "unknown"
    try:
        process = psutil.Process(state.pid)
        if process.create_time() > state.written_at + 1:
            return "gone"  # another process has the number now
        found = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return "unknown"
    if found in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if found in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


def is_live(seen: Seen) -> bool:
    """It has not ended, and its driver has written its state lately or is there to do so again."""
    state = seen.state
    if state is None or state.phase in ENDED or seen.driver == "gone":
        return False
    return seen.driver in ("alive", "stopped") or seen.now - state.written_at <= STALE_S


class Standing(NamedTuple):
    """How a run is, from `state.json` and `summary.json` alone."""

    how: Literal["live", "ended", "died", "unknown"]
    """`died`: its driver is gone and has left no word. `unknown`: it has left no state."""
    phase: str
    """While it lives its phase, `running` and the like; once it has ended how, `completed` and the like; or `how`."""
    state: RunState | None


def standing(run_dir: Path) -> Standing:
    """Cheaper than `look`, and never an error. Blocking."""
    state = None
    with contextlib.suppress(ConfigError):
        state = read_state(run_dir)
    try:
        summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        ended = str(summary["status"])
    except (OSError, ValueError, KeyError, TypeError):
        ended = ""
    if state is None:
        return Standing("ended", ended, None) if ended else Standing("unknown", "unknown", None)
    if state.phase in ENDED or ended:  # the summary comes last
        return Standing("ended", ended or state.phase, state)
    driver = driver_of(state)
    if driver in ("alive", "stopped") or (driver == "unknown" and time.time() - state.written_at <= STALE_S):
        return Standing("live", state.phase, state)
    return Standing("died", "died", state)


def events_level(run_dir: Path) -> str | None:
    """profiler.level of the run; None: its config.yaml does not say. Blocking."""
    try:
        level = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["profiler"]["level"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return "off" if level is False else str(level)  # YAML reads a bare `off` as false


def chain(seen: Seen) -> tuple[Link, ...]:
    """See `why.explain`; of a run without a state, what its summary says."""
    if seen.state is not None:
        return explain(seen.state, seen.now, driver=seen.driver)
    if seen.summary is not None:
        status = seen.summary["status"]
        return (Link("run", status, None, _error(seen.summary), status),)
    return (Link("run", "has left no state", None, "only its journal tells of it", "unknown"),)


def _why(links: Iterable[Link]) -> dict[str, Any]:
    told = tuple(links)
    return {"text": render(told), "cause": told[-1].cause, "chain": as_json(told)}


def _error(summary: Mapping[str, Any]) -> str:
    error = summary["error"]
    return f"{error['type']} in {error['part']}: {error['message']}" if error else ""


def _books(
    run_dir: Path, state: RunState | None, summary: Mapping[str, Any] | None, now: float, notes: list[str]
) -> tuple[Books, str]:
    """The newest that there are, and where they are from; empty: there are none.

    The journal goes on while the driver is stopped or dead; of a driver that is well, the state is as good and cheaper,
    once it has heard of the queue.
    """
    files = _journal_files(run_dir)
    written_at = state.written_at if state is not None else 0.0
    is_old = now - written_at > STALE_S or (state is not None and state.phase in ENDED)
    is_behind = is_old and max((file.stat().st_mtime for file in files), default=0.0) > written_at
    if files and (is_behind or (state is not None and state.queue is None)):
        try:
            return read_books(run_dir), JOURNAL
        except (AsyncRLError, sqlite3.Error, OSError) as error:
            notes.append(error.message if isinstance(error, AsyncRLError) else f"{run_dir / JOURNAL}: {error}")
    if state is not None:
        return (state.queue.books if state.queue else state.books), FILE_NAME
    if summary is not None:
        return Books(**summary["samples"]), SUMMARY
    return Books(), ""


def _journal_files(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / JOURNAL, run_dir / f"{JOURNAL}-wal") if path.exists()]


def _journal(run_dir: Path, state: RunState | None) -> dict[str, Any] | None:
    if not (files := _journal_files(run_dir)):
        return None
    return {
        "bytes": sum(file.stat().st_size for file in files),
        "payload_bytes": sum(_sizes(run_dir / SAMPLES)),
        "seq": state.queue.journal_seq if state and state.queue else None,
    }


def _sizes(directory: Path) -> Iterator[int]:
    if directory.is_dir():
        for file in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # the queue may just have removed it
                yield file.stat().st_size


# ---------------------------------------------------------------------------------------------- the answer


def report(seen: Seen) -> dict[str, Any]:
    """What `status --json` prints; the page is drawn from it too."""
    state, summary, books = seen.state, seen.summary, seen.books
    recovery: Mapping[str, Any] = summary or {}
    if state is not None:
        recovery = recovery_summary(state.restarts, state.earlier_restarts)
    known = dump(state) if state is not None else {}
    links = chain(seen)
    queue = known.get("queue") or {}
    at = seen.now if is_live(seen) or state is None else state.written_at
    balanced = books.fed == books.running + books.ready + books.leased + books.trained + books.num_dropped
    return {
        "run_dir": str(seen.run_dir),
        "experiment": known.get("experiment"),
        "mode": known.get("mode"),
        "phase": known.get("phase") or (summary["status"] if summary else "unknown"),
        "live": is_live(seen),
        "driver": {"state": seen.driver, "pid": known.get("pid"), "host": known.get("host")},
        "age_s": round(seen.now - state.written_at, 3) if state else None,
        "wall_s": _wall_s(seen),
        "error": (state.error if state else _error(summary) if summary else "") or None,
        "step": known.get("step", summary["step"] if summary else None),
        "total_steps": known.get("total_steps"),
        "version": known.get("version", summary["version"] if summary else None),
        "lineage": known.get("lineage", summary["lineage"] if summary else None),
        "published": known.get("published"),
        "applied": {"lineage": queue["lineage"], "version": queue["version"]} if queue else None,
        "samples": {
            "fed": books.fed,
            "running": books.running,
            "ready": books.ready,
            "leased": books.leased,
            "trained": books.trained,
            "dropped": {reason: count for reason, count in books.dropped.items() if count},
            "replayed": books.replayed,
            "substituted": books.substituted,
        },
        "books_from": seen.books_from,
        "balanced": balanced,
        "total_samples": queue.get("total_samples"),
        "drops": known.get("drops", {}),
        "staleness": staleness_summary(state.staleness) if state else (summary or {}).get("staleness"),
        "tokens": {
            "generated": known.get("generated_tokens", summary["tokens"]["generated"] if summary else None),
            "generated_per_s": known.get("generated_per_s"),
            "trained_per_s": known.get("trained_per_s"),
        },
        "replicas": [
            {**each, "unheard_s": round(max(0.0, at - each["reported_at"]), 3)} for each in known.get("replicas", [])
        ],
        "num_replicas": known.get("num_replicas"),
        "health": known.get("health"),
        "restarting": known.get("restarting", {}),
        "restarts": recovery.get("restarts", {}),
        "recovery": recovery.get("recovery", []),
        "checkpoints": [{"step": step, "path": str(path)} for step, path in seen.checkpoints.items()],
        "journal": seen.journal,
        "why": _why(links),
        "notes": list(seen.notes),
    }


def _wall_s(seen: Seen) -> float | None:
    if seen.summary is not None and not is_live(seen):
        return float(seen.summary["wall_s"])
    if seen.state is None:
        return None
    return round((seen.now if is_live(seen) else seen.state.written_at) - seen.state.started_at, 3)

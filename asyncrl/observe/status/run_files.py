"""Read the state of a live or ended run from the files of its directory, without Ray.

state.json     what the driver last knew about the run       journal.db     the sample counts, to the last transition
summary.json   how the run ended                             checkpoints/   the steps from which it can continue
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from asyncrl.core.failures import AsyncRLError, ConfigError
from asyncrl.core.ports import SampleCounts
from asyncrl.observe.status.run_status import ENDED, STATE_FILE, RunState, dump, read_readable_state, read_state
from asyncrl.observe.status.summary import (
    SavedSummary,
    read_readable_summary,
    read_summary,
    recovery_summary,
    staleness_summary,
)
from asyncrl.observe.status.why import STALE_S, DriverState, WaitLink, chain_as_json, explain, render_chain
from asyncrl.queue.journal_reader import read_counts
from asyncrl.storage.checkpoint_manifest import checkpoint_steps
from asyncrl.storage.run_dir import JOURNAL, SAMPLES, SUMMARY, RunDir, SavedConfig


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The state of a run according to its files."""

    run_dir: Path
    now: float
    state: RunState | None
    driver: DriverState
    summary: SavedSummary | None
    counts: SampleCounts
    trained_tokens: int | None
    """None: not known."""
    counts_from: str
    """The file that `counts` and `trained_tokens` are from."""
    journal: Mapping[str, Any] | None
    checkpoints: Mapping[int, Path]
    notes: tuple[str, ...]
    """The files that could not be read, each with the reason."""

    @property
    def is_live(self) -> bool:
        return self.state is not None and _is_live(self.state, self.driver, self.now)


def read_run(run_dir: Path) -> RunFiles:
    """Read all files of a run. Unreadable files become notes, unless nothing can be read. Blocking.

    Raises:
        ConfigError: nothing can be read.
    """
    notes: list[str] = []
    state, summary = None, None
    try:
        state = read_state(run_dir)
    except ConfigError as error:
        notes.append(error.message)
    try:
        summary = read_summary(run_dir)
    except ConfigError as error:
        notes.append(error.message)
    now = time.time()
    if state is not None and summary is not None and state.phase not in ENDED:
        # The summary is written last, so this run has ended, even if its last state is older: on a full disk, only the
        # summary has reserved space.
        state = _with_summary(state, summary)
    counts, trained_tokens, counts_from = _counts(run_dir, state, summary, now, notes)
    files = RunFiles(
        run_dir=run_dir,
        now=now,
        state=state,
        driver=driver_state(state) if state else "unknown",
        summary=summary,
        counts=counts,
        trained_tokens=trained_tokens,
        counts_from=counts_from,
        journal=_journal(run_dir, state),
        checkpoints=checkpoint_steps(RunDir.saved(run_dir).checkpoints),
        notes=tuple(notes),
    )
    if state is None and summary is None and not counts_from:
        reason = "; ".join(notes) or f"there is no {STATE_FILE}, {SUMMARY} or {JOURNAL} in it"
        raise ConfigError(f"{run_dir} has nothing to show: {reason}. The run may have ended before it wrote its state.")
    return files


def _is_live(state: RunState, driver: DriverState, now: float) -> bool:
    """Return whether the run has not ended, and its driver has written its state recently or may still do so."""
    if state.phase in ENDED or driver == "gone":
        return False
    return driver in ("alive", "stopped") or now - state.written_at <= STALE_S


def driver_state(state: RunState) -> DriverState:
    """Return the state of the driver's process, if it is on this machine."""
    if state.host != socket.gethostname():
        return "unknown"
    try:
        process = psutil.Process(state.pid)
        if process.create_time() > state.written_at + 1:
            return "gone"  # another process has reused the process id
        found = process.status()
    except (psutil.NoSuchProcess, ValueError):  # ValueError: the number is negative
        return "gone"
    except psutil.Error:
        return "unknown"
    if found in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if found in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


class RunLiveness(NamedTuple):
    """Whether a run is live, from `state.json` and `summary.json` alone."""

    how: Literal["live", "ended", "died", "unknown"]
    """`died`: its driver is gone and left no summary. `unknown`: there is no state."""
    phase: str
    """The phase of a live run, such as `running`; the outcome of an ended one, such as `completed`; otherwise `how`."""
    state: RunState | None


def read_liveness(run_dir: Path) -> RunLiveness:
    """Return whether the run is live; cheaper than `read_run`, and raises nothing. Blocking."""
    state, summary = read_readable_state(run_dir), read_readable_summary(run_dir)
    ended = "" if summary is None else summary.status
    if state is None:
        return RunLiveness("ended", ended, None) if ended else RunLiveness("unknown", "unknown", None)
    if state.phase in ENDED or ended:
        return RunLiveness("ended", ended or state.phase, state)
    if _is_live(state, driver_state(state), time.time()):
        return RunLiveness("live", state.phase, state)
    return RunLiveness("died", "died", state)


def events_level(run_dir: Path) -> str | None:
    """Return `profiler.level` of the run; None if its config.yaml does not contain it. Blocking."""
    level = SavedConfig(run_dir).value("profiler", "level")
    if level is False:  # YAML reads a bare `off` as false
        return "off"
    return level if level and isinstance(level, str) else None


def explain_missing_events(run_dir: Path, *, num_files: int = 0, num_unknown: int = 0) -> str:
    """Explain why a run has no events, and how runs record them. Blocking.

    Args:
        num_files: number of its event files, which hold nothing readable.
        num_unknown: number of events in them that another version of asyncrl has recorded.
    """
    if num_files:
        unknown = f", but {num_unknown} of another version" if num_unknown else ""
        why = f"its {num_files} files hold no readable events of this version of asyncrl{unknown}"
    elif events_level(run_dir) == "off":
        why = "profiler.level was off"
    elif read_liveness(run_dir).how == "live":
        return f"{run_dir} has no events to report yet: the run is starting. Try again in a minute."
    else:
        why = "it has no events/ directory: the run recorded no events, or ended before its first one"
    return (
        f"{run_dir} has no events to report: {why}. Where its time went cannot be determined afterwards. Launch runs "
        "with profiler.level=summary (the default), or with profiler.level=full to also record the work inside steps "
        "and between turns. `asyncrl status` and metrics.jsonl show what is known about this run."
    )


def wait_chain(files: RunFiles) -> tuple[WaitLink, ...]:
    """Return the chain of waits (see `why.explain`), or for a run without a state its outcome from the summary."""
    if files.state is not None:
        return explain(files.state, files.now, driver=files.driver)
    if files.summary is not None:
        status = files.summary.status
        return (WaitLink("run", status, None, _error(files.summary), status),)
    return (WaitLink("run", "has left no state", None, "only its journal is there", "unknown"),)


def wait_chain_as_json(links: tuple[WaitLink, ...]) -> dict[str, Any]:
    return {"text": render_chain(links), "cause": links[-1].cause, "chain": chain_as_json(links)}


def _with_summary(state: RunState, summary: SavedSummary) -> RunState:
    """Return the state of a run that has ended with this summary."""
    counts, generated, trained = summary.samples, summary.tokens.generated or 0, summary.tokens.trained or 0
    return replace(
        state,
        phase=summary.status,
        error=_error(summary),
        counts=counts,
        generated_tokens=generated,
        trained_tokens=trained,
        queue=state.queue and replace(state.queue, counts=counts, trained_tokens=trained),
    )


def _error(summary: SavedSummary) -> str:
    return "" if summary.error is None else summary.error.text


def _counts(
    run_dir: Path, state: RunState | None, summary: SavedSummary | None, now: float, notes: list[str]
) -> tuple[SampleCounts, int | None, str]:
    """Return the newest sample counts, the trained tokens, and the name of their file, which is empty if there is none.

    The journal may be newer than the state while the driver is stopped or dead. While the driver is healthy, its state
    is as good, and cheaper to read; the last state of a run that has ended has the counts of the journal.
    """
    is_current = (
        state is not None and state.queue is not None and (state.phase in ENDED or now - state.written_at <= STALE_S)
    )
    if not is_current and _journal_files(run_dir):
        try:
            counts = read_counts(run_dir)
            return counts.samples, counts.trained_tokens, JOURNAL
        except (AsyncRLError, sqlite3.Error, OSError) as error:
            notes.append(error.message if isinstance(error, AsyncRLError) else f"{run_dir / JOURNAL}: {error}")
    if state is not None:
        known = state.queue or state
        return known.counts, known.trained_tokens, STATE_FILE
    if summary is not None:
        return summary.samples, summary.tokens.trained, SUMMARY
    return SampleCounts(), None, ""


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
            with contextlib.suppress(FileNotFoundError):  # the queue may have removed it
                yield file.stat().st_size


def status_report(files: RunFiles) -> dict[str, Any]:
    """Return what `asyncrl status --json` prints; the page is rendered from it, too."""
    state, summary, counts = files.state, files.summary, files.counts
    recovery: Mapping[str, Any] = {}
    if state is not None:
        recovery = recovery_summary(state.restarts, state.earlier_restarts)
    elif summary is not None:
        recovery = {"restarts": summary.restarts, "recovery": [asdict(each) for each in summary.recovery]}
    staleness = state.staleness if state is not None else summary.staleness.histogram if summary is not None else {}
    known = dump(state) if state is not None else {}
    mode = SavedConfig(files.run_dir).value("mode")
    links = wait_chain(files)
    queue = known.get("queue") or {}
    at = files.now if files.is_live or state is None else state.written_at
    balanced = counts.fed == counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
    return {
        "run_dir": str(files.run_dir),
        "experiment": known.get("experiment"),
        "mode": known.get("mode") or (mode if isinstance(mode, str) else None),
        "phase": known.get("phase") or (summary.status if summary else "unknown"),
        "live": files.is_live,
        "driver": {"state": files.driver, "pid": known.get("pid"), "host": known.get("host")},
        "age_s": round(files.now - state.written_at, 3) if state else None,
        "wall_s": _wall_s(files),
        "error": (state.error if state else _error(summary) if summary else "") or None,
        "step": known.get("step", summary.step if summary else None),
        "total_steps": known.get("total_steps"),
        "version": known.get("version", summary.version if summary else None),
        "lineage": known.get("lineage", summary.lineage if summary else None),
        "losses": known.get("losses", {}),
        "answers": known.get("answers", {}),
        "attention": known.get("attention"),
        "published": known.get("published"),
        "applied": {"lineage": queue["lineage"], "version": queue["version"]} if queue else None,
        "samples": {
            **asdict(counts),
            "dropped": {reason: count for reason, count in counts.dropped.items() if count},
        },
        "counts_from": files.counts_from,
        "balanced": balanced,
        "total_samples": queue.get("total_samples"),
        "drops": known.get("drops", {}),
        "staleness": staleness_summary(staleness),
        "tokens": {
            "generated": known.get("generated_tokens", summary.tokens.generated if summary else None),
            "trained": files.trained_tokens,
            "generated_per_s": known.get("generated_per_s"),
            "trained_per_s": known.get("trained_per_s"),
        },
        "replicas": [
            {**each, "silent_s": round(max(0.0, at - each["reported_at"]), 3)} for each in known.get("replicas", [])
        ],
        "num_replicas": known.get("num_replicas"),
        "health": known.get("health"),
        "restarting": known.get("restarting", {}),
        "restarts": recovery.get("restarts", {}),
        "recovery": recovery.get("recovery", []),
        "checkpoints": [{"step": step, "path": str(path)} for step, path in files.checkpoints.items()],
        "journal": files.journal,
        "why": wait_chain_as_json(links),
        "notes": list(files.notes),
    }


def _wall_s(files: RunFiles) -> float | None:
    if files.summary is not None and not files.is_live:
        return files.summary.wall_s
    if files.state is None:
        return None
    return round((files.now if files.is_live else files.state.written_at) - files.state.started_at, 3)

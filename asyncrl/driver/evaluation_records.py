"""What an evaluation reports besides its answers: state.json for `asyncrl status`, and its figures for all sinks."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.records import Metrics
from asyncrl.core.types import FinishReason
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.sinks import Sink, close_sinks, open_sinks
from asyncrl.observe.status.run_status import STATE_FILE, RunPhase, RunState, StateFile
from asyncrl.observe.status.summary import SummaryFile, describe_early_end
from asyncrl.storage.run_dir import SUMMARY, RunDir

TICK_S = 1.0
_STEP = re.compile(r"step_(\d+)")


class EvaluationRecords:
    """The state of a running evaluation, and its sinks; see `evaluation_records`."""

    def __init__(self, config: Config, directory: Path, sinks: Sequence[Sink]) -> None:
        self._config = config
        self._sinks = sinks
        self._file = StateFile(directory / STATE_FILE)
        self._early = SummaryFile(directory)
        self._began_at = self._moved_at = time.time()
        self._status: dict[str, int] = {}
        self.phase: RunPhase = "starting"

    def report(self, status: Mapping[str, int]) -> None:
        """Take over the numbers of prompts, and of generated tokens, that the Rollouter has counted."""
        if status != self._status:
            self._status, self._moved_at, self.phase = dict(status), time.time(), "running"

    async def keep_state_written(self) -> None:
        """Write state.json every second until cancelled."""
        while True:
            await self._file.write(self._state())
            await anyio.sleep(TICK_S)

    def note_interrupt(self) -> None:
        """Write an early summary for `asyncrl status`, which counts if Ray ends this process before `end`. Blocking."""
        tokens = {"generated": self._status.get("generated_tokens", 0)}
        error = describe_early_end("the same command continues with the answers that are missing")
        self._early.write_early({"status": "interrupted", "error": error, "tokens": tokens})

    def put(self, found: Mapping[str, Any]) -> None:
        """Write the figures to all sinks, as those of a validation at the step of the checkpoint. Blocking."""
        metrics = {f"validation/{name}": value for name, value in figure_metrics(found).items()}
        wall_s = found["wall_s"]
        row = MetricsRow(
            "validation", step_of(self._config.model.path), 0, wall_s, time.time(), metrics, {"examples": []}
        )
        for sink in self._sinks:
            sink.write(row)
        self.phase = "completed"

    def end(self, error: str) -> None:
        """Close the sinks and write the last state. Blocking."""
        if self.phase != "completed":
            self.phase = "failed" if error else "interrupted"
        close_sinks(self._sinks, ok=self.phase == "completed")
        self._early.path.unlink(missing_ok=True)
        self._file.write_now(self._state(error))

    def _state(self, error: str = "") -> RunState:
        return RunState(
            written_at=time.time(),
            started_at=self._began_at,
            pid=os.getpid(),
            phase=self.phase,
            experiment=self._config.experiment_name,
            mode="eval",
            host=socket.gethostname(),
            error=error,
            step=step_of(self._config.model.path),
            generated_tokens=self._status.get("generated_tokens", 0),
            answers={name: count for name, count in self._status.items() if name != "generated_tokens"},
            num_replicas=self._config.rollout.num_replicas,
            last_progress_at=self._moved_at,
        )


@contextmanager
def evaluation_records(config: Config, directory: Path, *, continued: bool) -> Iterator[EvaluationRecords]:
    """Open the records of an evaluation; at the end of the block, they get its outcome. Blocking.

    Args:
        continued: an earlier process has begun it; trackers then continue its run.

    Raises:
        InfraError, ConfigError: a file cannot be written, or there is no such tracker.
    """
    run_dir = RunDir(directory)
    run_dir.metrics.unlink(missing_ok=True)  # an evaluation has one row
    (directory / SUMMARY).unlink(missing_ok=True)  # of an earlier process that a signal ended
    sinks = open_sinks(config, run_dir, step_of(config.model.path) - 1 if continued else None)
    records, error = EvaluationRecords(config, directory, sinks), ""
    try:
        yield records
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        records.end(error)


def step_of(model: str) -> int:
    """Return the step of the checkpoint that a model directory belongs to; 0 for any other model."""
    found = [match for part in Path(model).parts[-2:] if (match := _STEP.fullmatch(part))]
    return int(found[-1][1]) if found else 0


def figure_metrics(found: Mapping[str, Any]) -> Metrics:
    """Return the figures of evaluation.json under the names that they have in a run, without `validation/`."""
    tokens, whole = found["all"]["tokens"], found["all"]
    metrics: Metrics = {
        "response_tokens/mean": tokens["mean"],
        "response_tokens/max": float(tokens["max"]),
        "length_share": whole["finish_reasons"].get(str(FinishReason.LENGTH), 0) / whole["answers"],
        "num_prompts": float(whole["prompts"]),
        "duration_s": found["wall_s"],
    }
    sources = {f"/{name}": one for name, one in found["sources"].items()}
    for source, group in {"": whole, **sources}.items():
        for name, estimate in group["figures"].items():
            kind, _, k = name.partition("@")
            if kind == "mean":
                metrics[f"reward/mean{source}"] = estimate["value"]
            elif not source or len(sources) > 1:
                metrics[f"{kind}{source}@{k}"] = estimate["value"]
    return metrics

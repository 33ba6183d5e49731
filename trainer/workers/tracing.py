"""Traces of ranks by torch.profiler or Nsight Systems, over all calls of chosen optimizer steps.

    a call of step 3 ─▶ start ─▶ its calls … ─▶ the loop has recorded step 3 ─▶ end ─▶ a file

torch   profiles/step_000003/rank-<group>-<number>.json.gz of the run directory: a Chrome trace, also for Perfetto
nsys    the rank runs under `nsys profile`, which captures between cudaProfilerStart and cudaProfilerStop: a report for
        each step, with an NVTX range for each call

torch.profiler holds the interpreter's lock while it writes, so the rank does not respond for seconds, or for a minute
after a long step. If training goes back and repeats a step that has a file, it is not traced again. The same holds for
a step whose rank died while it wrote the trace, because the partial file `.rank-<group>-<number>.json.gz` remains.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.cuda import nvtx

from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.profiling import ProfilerSettings, profile

DIRECTORY = "profiles"
"""Directory of the traces, within the run directory."""


class RankProfiling(NamedTuple):
    """Settings of `profiler` for a rank. Picklable."""

    setup: ProfilerSettings = ProfilerSettings()
    """Settings without a directory, because a rank sends its events with its answers."""
    synchronize: bool = False
    tool: Literal["torch", "nsys"] = "torch"
    steps: frozenset[int] = frozenset()
    """Optimizer steps that `tool` traces."""
    ranks: frozenset[int] = frozenset()
    """Traced ranks of every group."""
    run_dir: Path | None = None
    """Directory of the traces; None: nothing is traced."""

    @classmethod
    def of(cls, config: ProfilerConfig, run_dir: Path | None) -> Self:
        return cls(
            ProfilerSettings.of(config, None),
            config.synchronize,
            config.tool,
            frozenset(config.steps) if run_dir is not None else frozenset(),
            frozenset(config.ranks),
            run_dir,
        )

    def traces_rank(self, rank: int) -> bool:
        """Whether the rank is traced in some step."""
        return bool(self.steps) and rank in self.ranks


NO_PROFILING = RankProfiling()


def nsight_options(group: str, rank: int, directory: Path | None) -> dict[str, str]:
    """Return Ray's `runtime_env["nsight"]` of a rank: options of `nsys profile`, with a report for each captured range.

    Args:
        directory: the directory of the reports, if it certainly exists on the rank's machine; None: `logs/nsight` of
            Ray's session. Ray joins the options to a shell command, so a path that needs quoting counts as None.
    """
    name = f"rank-{group}-{rank}.%p"
    whole = str(directory / name) if directory is not None else name
    unmarked = whole.replace("%", "_")  # shlex would quote for this character, although a shell does not need it
    reads_as_is = shlex.quote(unmarked) == unmarked
    return {
        "t": "cuda,nvtx,cublas,cudnn",
        "o": whole if reads_as_is else name,
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",
        "cuda-graph-trace": "graph",
        "kill": "none",
        "force-overwrite": "true",
    }


def synchronize() -> None:
    """Wait for this thread's GPU. A pending failure is ignored here, because the engine's next operation raises it
    again."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()


class TorchTool:
    """torch.profiler, which writes one trace for each step: `start`, a range for each call, `stop`."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._profiler: Any = None
        self._ranges: list[Any] = []

    def has(self, step: int) -> bool:
        """Return whether the trace of `step` exists, or was attempted."""
        return any(os.path.exists(path) for path in self._paths(step))  # unlike Path.exists, it never raises

    def start(self) -> None:
        if not self._run_dir.is_dir():  # the profiler must not create it on another machine
            raise FileNotFoundError(f"{self._run_dir} does not exist on the rank's machine")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def push(self, what: str) -> None:
        self._ranges.append(torch.profiler.record_function(what))
        self._ranges[-1].__enter__()

    def pop(self) -> None:
        self._ranges.pop().__exit__(None, None, None)

    def stop(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        path, written = self._paths(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        written.touch(exist_ok=False)  # from here on the step is not traced again, even if this process dies
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(written))
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise

    def _paths(self, step: int) -> tuple[Path, Path]:
        """Return the path of the trace, and the path of the file while it is written."""
        path = self._run_dir / DIRECTORY / f"step_{step:06d}" / f"{self._name}.json.gz"
        return path, path.with_name(f".{path.name}")


class NsysTool:
    """Starts and stops the capture of `nsys profile --capture-range=cudaProfilerApi`, which runs around this
    process."""

    def has(self, step: int) -> bool:
        return False

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def push(self, what: str) -> None:
        nvtx.range_push(what)

    def pop(self) -> None:
        nvtx.range_pop()

    def stop(self, step: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class Tracer:
    """Traces one rank, on the thread of its engine, as torch.profiler requires. A problem never makes a call fail: it
    ends the tracing and is reported once."""

    def __init__(self, profiling: RankProfiling, group: str, rank: int) -> None:
        self._label = f"rank {rank} of the {group} group"
        self._steps = profiling.steps if rank in profiling.ranks else frozenset()
        self._tool: TorchTool | NsysTool | None = None
        if self._steps and profiling.run_dir is not None:
            torchs = profiling.tool == "torch"
            self._tool = TorchTool(profiling.run_dir, f"rank-{group}-{rank}") if torchs else NsysTool()
        self._step: int | None = None
        """The step that is being traced."""
        self._ended = 0
        self._problem = ""

    @contextmanager
    def call(self, step: int | None, what: str) -> Iterator[None]:
        """Trace a call that belongs to `step`; None if it belongs to no step."""
        self._enter_step(step)
        if self._tool is None or self._step is None or not self._try(self._tool.push, what):
            yield
            return
        try:
            yield
        finally:
            self._try(self._tool.pop)

    def end(self, step: int | None = None) -> str:
        """Write the trace of `step`, which has ended; None: of any step.

        Returns:
            A description of a problem since the last call; empty if there was none.
        """
        if self._step is not None and step in (None, self._step):
            self._stop(self._step)
        self._ended = max(self._ended, step or 0)  # later calls, such as a checkpoint, don't restart the trace
        problem, self._problem = self._problem, ""
        return problem

    def _enter_step(self, step: int | None) -> None:
        if self._step is not None and step != self._step:
            self._stop(self._step)
        if self._tool is None or self._step is not None or step not in self._steps or step <= self._ended:
            return
        if self._tool.has(step):
            self._ended = step
        elif self._try(self._tool.start):
            self._step = step

    def _stop(self, step: int) -> None:
        self._step, self._ended = None, step
        if self._tool is not None:
            self._try(self._tool.stop, step)

    def _try(self, do: Callable[..., None], *args: Any) -> bool:
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001 - a profiler may raise anything, and the call continues without it
            self._step, self._tool = None, None
            self._problem = self._problem or (
                f"{self._label} makes no traces any more (profiler.steps): {type(error).__name__}: {error}. The run "
                "continues without them; every machine needs access to the run directory, and free space in it"
            )
            return False
        return True


def set_up_profiling(profiling: RankProfiling, *, may_have_gpu: bool) -> None:
    """Apply `profiler.synchronize` in a rank, after `profile.configure`, which resets it."""
    if profiling.synchronize and may_have_gpu and torch.cuda.is_available():
        profile.synchronize = synchronize

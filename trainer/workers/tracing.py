"""What looks into a rank: torch.profiler or Nsight Systems, over all calls of chosen optimizer steps.

    a call of step 3 ─▶ start ─▶ its calls … ─▶ the loop has recorded step 3 ─▶ end ─▶ a file

torch   profiles/step_000003/rank-<group>-<number>.json.gz of the run directory: a Chrome trace, also for Perfetto
nsys    the rank runs under `nsys profile`, which captures between cudaProfilerStart and cudaProfilerStop: a report for
        each step, with an NVTX range for each call

torch.profiler writes with the interpreter's lock held: a rank is silent then, for seconds or, of a long step, a minute.
A step that has a file already is not traced again where training goes back behind it, nor is one whose rank died as it
wrote it: `.rank-<group>-<number>.json.gz` is there then.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch.cuda import nvtx

from asyncrl.config.schema import ProfilerConfig
from asyncrl.profiling import Setup, profile

DIRECTORY = "profiles"
"""Of the run directory."""


class RankProfiling(NamedTuple):
    """What a rank needs to know of `profiler`. Picklable."""

    setup: Setup = Setup()
    """Without a directory: a rank sends its events along with its answers."""
    synchronize: bool = False
    tool: Literal["torch", "nsys"] = "torch"
    steps: frozenset[int] = frozenset()
    """Optimizer steps that `tool` looks into."""
    ranks: frozenset[int] = frozenset()
    """Of every group."""
    run_dir: Path | None = None
    """Where traces go; None: there is none, so nothing is traced."""

    @classmethod
    def of(cls, config: ProfilerConfig, run_dir: Path | None) -> Self:
        return cls(
            Setup.of(config, None),
            config.synchronize,
            config.tool,
            frozenset(config.steps) if run_dir is not None else frozenset(),
            frozenset(config.ranks),
            run_dir,
        )

    def looks_into(self, rank: int) -> bool:
        """At some step."""
        return bool(self.steps) and rank in self.ranks


NO_PROFILING = RankProfiling()


def nsight_options(group: str, rank: int, directory: Path | None) -> dict[str, str]:
    """Ray's `runtime_env["nsight"]` of a rank: options of `nsys profile`, with a report for each captured range.

    Args:
        directory: where reports go, if the rank's machine has it for sure; None: `logs/nsight` of Ray's session. Ray
            makes one shell command of the options, so a path that a shell would read otherwise is not used either.
    """
    name = f"rank-{group}-{rank}.%p"
    whole = str(directory / name) if directory is not None else name
    unmarked = whole.replace("%", "_")  # the one character of ours that a shell would quote, though it reads it as is
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
    """Wait for this thread's GPU. A failure that is pending there comes up again in what the engine does next."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()


class _Tool(Protocol):
    def has(self, step: int) -> bool:
        """Its trace is there, or was begun to be written."""

    def start(self) -> None: ...

    def push(self, what: str) -> None:
        """A range begins."""

    def pop(self) -> None: ...

    def stop(self, step: int) -> None:
        """Write what was seen since `start`."""


class TorchTool:
    """torch.profiler, one trace for each step."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._profiler: Any = None
        self._ranges: list[Any] = []

    def has(self, step: int) -> bool:
        return any(os.path.exists(path) for path in self._paths(step))  # which, unlike Path.exists, never raises

    def start(self) -> None:
        if not self._run_dir.is_dir():  # it is made nowhere but where the run is
            raise FileNotFoundError(f"{self._run_dir} is not on its machine")
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
        written.touch()  # from here on it is not tried again, whatever becomes of this process
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(written))
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise

    def _paths(self, step: int) -> tuple[Path, Path]:
        """Of its trace, and of what is being written."""
        path = self._run_dir / DIRECTORY / f"step_{step:06d}" / f"{self._name}.json.gz"
        return path, path.with_name(f".{path.name}")


class NsysTool:
    """What `nsys profile --capture-range=cudaProfilerApi` around this process waits for. Another process writes it."""

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
    """Of one rank; all on the thread of its engine, as torch.profiler wants it. Nothing here fails a call: what goes
    wrong ends the tracing, and is told once."""

    def __init__(self, profiling: RankProfiling, group: str, rank: int) -> None:
        self._who = f"rank {rank} of the {group} group"
        self._steps = profiling.steps if rank in profiling.ranks else frozenset()
        self._tool: _Tool | None = None
        if self._steps and profiling.run_dir is not None:
            torchs = profiling.tool == "torch"
            self._tool = TorchTool(profiling.run_dir, f"rank-{group}-{rank}") if torchs else NsysTool()
        self._step: int | None = None
        """Whose trace is being made."""
        self._ended = 0
        self._problem = ""

    @contextmanager
    def call(self, step: int | None, what: str) -> Iterator[None]:
        """Around a call that belongs to `step`; None: to none."""
        self._be_at(step)
        if self._tool is None or self._step is None or not self._try(self._tool.push, what):
            yield
            return
        try:
            yield
        finally:
            self._try(self._tool.pop)

    def end(self, step: int | None = None) -> str:
        """`step` is over (None: whatever is under way): its trace is written.

        Returns:
            What went wrong since the last time, for people; empty: nothing.
        """
        if self._step is not None and step in (None, self._step):
            self._stop(self._step)
        self._ended = max(self._ended, step or 0)  # what follows, as a checkpoint, does not begin it again
        problem, self._problem = self._problem, ""
        return problem

    def _be_at(self, step: int | None) -> None:
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
        except Exception as error:  # noqa: BLE001 - whatever a profiler raises, the call goes on without it
            self._step, self._tool = None, None
            self._problem = self._problem or (
                f"{self._who} makes no traces any more (profiler.steps): {type(error).__name__}: {error}. The run goes "
                "on without them; every machine has to see the run directory, with room in it"
            )
            return False
        return True


def prepare(profiling: RankProfiling, *, may_have_gpu: bool) -> None:
    """In a rank, once `profile.configure` was called, which forgets it: what `profiler.synchronize` asks for."""
    if profiling.synchronize and may_have_gpu and torch.cuda.is_available():
        profile.synchronize = synchronize

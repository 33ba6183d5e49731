"""Traces of chosen steps and ranks, with torch.profiler and with a fake of Nsight Systems."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import ConfigError, DeadlineError
from asyncrl.profiling import ProfilerSettings, profile
from tests.fakes.inline_group import InlineGroup
from tests.fakes.losses import Likelihood
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB
from tests.fakes.trainer_rig import TrainerRig
from tests.trainer.conftest import Recorded
from trainer.engines.base import EngineSpec
from trainer.workers.group import WorkerGroup
from trainer.workers.outcomes import CallResult
from trainer.workers.placement import plan_groups
from trainer.workers.processes import Processes, RankActor, check_tool
from trainer.workers.tracing import RankProfiling, Tracer, nsight_options, synchronize

BATCH = make_batch([3, 5, 1, 4, 2], [4, 2, 6, 1, 5], vocab=VOCAB)


def tracing(run_dir: Path, *steps: int, **changes: Any) -> RankProfiling:
    return RankProfiling.of(ProfilerConfig(steps=steps, **changes), run_dir)


def names_in(path: Path) -> list[str]:
    """Return the names of a Chrome trace's events in order."""
    with gzip.open(path, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if "name" in event]


async def start(spec: EngineSpec, profiling: RankProfiling) -> InlineGroup:
    group = await InlineGroup.start(spec, profiling=profiling)
    await group.plan(10)
    await group.set_loss_fn(Likelihood())
    return group


# ------------------------------------------------------------------------------------------------ torch.profiler


async def test_only_chosen_steps_have_a_trace(recorded: Recorded, spec: EngineSpec) -> None:
    run_dir = recorded.run_dir
    group = await start(spec, tracing(run_dir, 2, 4))
    for step in (1, 2, 3, 4):
        profile.set_position(step=step)
        await group.infer_batch(BATCH)
        await group.train_batch(BATCH)
        assert await group.end_traces(step) == ""
        await group.infer_batch(BATCH)  # a call after the step, such as one for a checkpoint
    await group.close()
    paths = sorted(path.relative_to(run_dir).as_posix() for path in (run_dir / "profiles").rglob("*") if path.is_file())
    assert paths == [f"profiles/step_{step:06d}/rank-actor-0.json.gz" for step in (2, 4)]
    for path in paths:
        names = names_in(run_dir / path)
        assert [name for name in names if name.startswith("actor.")] == ["actor.infer_batch", "actor.train_batch"]
        assert sum(name.startswith("aten::") for name in names) > 100
        assert {"aten::mm", "aten::embedding"} <= set(names)
        assert any("Backward" in name for name in names)


async def test_an_unfinished_trace_is_written_by_the_next_step_or_close(recorded: Recorded, spec: EngineSpec) -> None:
    group = await start(spec, tracing(recorded.run_dir, 1, 3))
    for step in (1, 2, 3):
        profile.set_position(step=step)
        await group.infer_batch(BATCH)
    await group.close()
    steps = sorted(path.parent.name for path in recorded.run_dir.rglob("rank-actor-0.json.gz"))
    assert steps == ["step_000001", "step_000003"]


async def test_traces_need_no_events(spec: EngineSpec, tmp_path: Path) -> None:
    profile.configure("trainer", ProfilerSettings("off"))
    group = await start(spec, tracing(tmp_path, 1, level="off"))
    profile.set_position(step=1)
    await group.train_batch(BATCH)
    await group.end_traces(1)
    await group.close()
    profile.configure("", ProfilerSettings())
    assert "actor.train_batch" in names_in(tmp_path / "profiles" / "step_000001" / "rank-actor-0.json.gz")


@pytest.mark.parametrize("failure", ["no run directory", "full disk", "no GPU for nsys"])
async def test_a_failed_trace_is_reported_once_and_calls_continue(
    failure: str, recorded: Recorded, spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {}
    run_dir, message = recorded.run_dir, ""
    if failure == "no run directory":
        run_dir = tmp_path / "on_another_machine"
        message = str(run_dir)
    elif failure == "full disk":
        message = "No space left on device"
        export = Mock(side_effect=OSError(28, message))
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    else:
        changes = {"tool": "nsys"}
    group = await start(spec, tracing(run_dir, 1, 2, **changes))
    problems = []
    for step in (1, 2):
        profile.set_position(step=step)
        await group.train_batch(BATCH)
        problems.append(await group.end_traces(step))
    assert await group.step() == 2
    await group.close()
    assert "rank 0 of the actor group makes no traces any more (profiler.steps)" in problems[0]
    assert message in problems[0]
    assert problems[1] == ""
    assert run_dir.exists() == (failure != "no run directory")
    assert len(recorded.all("rank.call")) == 5  # the calls are plan, loss, two steps, and the number of steps


def trace_step(run_dir: Path, step: int, rank: int = 0) -> Path:
    """Trace two calls of a step with a separate tracer."""
    tracer = Tracer(tracing(run_dir, 1, 2, ranks=(0, 1)), "actor", rank)
    for _ in range(2):
        with tracer.call(step, "actor.step"):
            torch.ones(2, 3).sum()
    assert tracer.end(step) == ""
    return run_dir / "profiles" / f"step_{step:06d}" / f"rank-actor-{rank}.json.gz"


def test_a_step_that_has_a_trace_is_not_traced_again(tmp_path: Path) -> None:
    """Training that went back to an earlier checkpoint repeats the step."""
    first = trace_step(tmp_path, 1)
    first.write_text("the first")
    assert trace_step(tmp_path, 1).read_text() == "the first"
    assert "actor.step" in names_in(trace_step(tmp_path, 1, rank=1))
    assert "actor.step" in names_in(trace_step(tmp_path, 2))


def test_a_trace_during_which_a_rank_died_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DiedError(BaseException):
        pass

    seen: list[set[str]] = []

    def die(self: Any, path: str) -> None:
        seen.append({path.name for path in tmp_path.rglob("*.gz")})
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", die)
        patch.setattr(Path, "unlink", lambda self, missing_ok: None)  # a killed process does not clean up
        with pytest.raises(DiedError):
            trace_step(tmp_path, 1)
    assert seen == [{".rank-actor-0.json.gz"}]
    assert not trace_step(tmp_path, 1).exists()
    assert trace_step(tmp_path, 2).exists()


def test_shapes_are_not_recorded(tmp_path: Path) -> None:
    """Shapes make a trace several times as large, and the rank answers no health checks while it writes."""
    with gzip.open(trace_step(tmp_path, 1), "rt") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event["name"] == "aten::sum" for event in events)
    assert not any("Input Dims" in event.get("args", {}) for event in events)


class SilentRank:
    """An actor that answers no other call while it writes a trace."""

    def __init__(self, writes_s: float) -> None:
        self._writes_s = writes_s
        self._free = anyio.Event()
        self._free.set()
        self.asked, self.wrote = anyio.Event(), anyio.Event()
        self.log: list[str] = []
        self.wait_forever = SimpleNamespace(remote=anyio.sleep_forever)
        self.health = SimpleNamespace(remote=self._measure)
        self.end_trace = SimpleNamespace(remote=self._end_trace)

    async def _measure(self) -> None:
        self.log.append("asked")
        self.asked.set()
        await self._free.wait()
        self.log.append("answered")

    async def _end_trace(self, step: int) -> CallResult:
        self.log.append("writes")
        self._free = anyio.Event()
        await anyio.sleep(self._writes_s)
        self._free.set()
        self.log.append("has written")
        self.wrote.set()
        return CallResult("", None)


def group_of(rank: SilentRank) -> WorkerGroup:
    async def kill(places: Any) -> None:
        processes.actors = []
        rank.log.append("killed")

    plan = SimpleNamespace(name="actor", num_ranks=1, roles=())
    processes: Any = SimpleNamespace(plan=plan, actors=[rank], kill=kill)
    return WorkerGroup(processes, TimeoutsConfig(train_s=5.0))


async def test_a_rank_that_writes_its_trace_does_not_count_as_hung() -> None:
    rank = SilentRank(writes_s=0.6)
    group = group_of(rank)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.watch, 0.2)
        await rank.asked.wait()
        await group.end_traces(1, {0})
        rank.asked = anyio.Event()
        await rank.asked.wait()  # afterwards it counts as hung again
        tasks.cancel_scope.cancel()
    begin, end = rank.log.index("writes"), rank.log.index("has written")
    assert end == begin + 1, "the rank was probed while it wrote its trace"
    assert "killed" not in rank.log


async def test_a_pending_health_check_ends_before_the_trace() -> None:
    rank = SilentRank(writes_s=0.0)
    group, free = group_of(rank), anyio.Event()
    rank._free = free
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.watch, 2.0)
        await rank.asked.wait()
        tasks.start_soon(group.end_traces, 1, {0})
        await anyio.wait_all_tasks_blocked()
        assert rank.log == ["asked"]
        free.set()
        await rank.wrote.wait()
        tasks.cancel_scope.cancel()
    assert rank.log[:4] == ["asked", "answered", "writes", "has written"]


async def test_a_rank_that_never_ends_its_trace_exceeds_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SilentRank(writes_s=1000.0)
    group = group_of(rank)
    monkeypatch.setattr(group, "_timeouts", TimeoutsConfig(train_s=0.3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.watch, 0.1)
        await rank.asked.wait()
        with pytest.raises(DeadlineError, match=r"the trace of step 1: rank 0 .* did not answer within 0\.3 s"):
            await group.end_traces(1, {0})
    assert rank.log[-1] == "killed"


def test_only_chosen_ranks_are_traced(tmp_path: Path) -> None:
    profiling = tracing(tmp_path, 1, ranks=(1, 3))
    assert [rank for rank in range(5) if profiling.traces_rank(rank)] == [1, 3]
    with Tracer(profiling, "actor", 0).call(1, "actor.step"):
        assert not torch.autograd._profiler_enabled()
    tracer = Tracer(profiling, "ref", 3)
    with tracer.call(1, "ref.infer_batch"):
        assert torch.autograd._profiler_enabled()
    assert tracer.end(1) == ""
    assert [path.name for path in tmp_path.rglob("*.json.gz")] == ["rank-ref-3.json.gz"]
    assert not RankProfiling.of(ProfilerConfig(steps=(1,)), None).traces_rank(0), (
        "no trace is written without a run directory"
    )


# ------------------------------------------------------------------------------------------------ steps of the loop


async def test_the_loop_ends_the_traces_of_each_step_after_its_record(recorded: Recorded) -> None:
    rig = TrainerRig(total_steps=4, samples_per_lease=4, samples_per_version=4)
    ended: list[tuple[int, int]] = []

    async def end_traces(step: int) -> None:
        ended.append((step, len(rig.records)))
        assert profile.place[0] == step

    rig.loop._end_traces = end_traces
    await rig.run(8)
    assert ended == [(1, 1), (2, 2), (3, 3), (4, 4)]


async def test_a_rank_synchronizes_the_gpu_only_if_configured(
    spec: EngineSpec, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    on_gpu = replace(spec, engine=spec.engine.model_copy(update={"device": "cuda"}))

    class NoWorker:
        def __init__(self, spec: EngineSpec) -> None:
            raise ConfigError("no worker on this rank")

    monkeypatch.setattr("trainer.workers.rank.TrainingWorker", NoWorker)
    for wanted in (True, False):
        rank = RankActor(None, RankProfiling(synchronize=wanted), "actor")
        await rank.load({"actor": on_gpu})
        assert (profile.synchronize is synchronize) == wanted
        await rank.close()


# ------------------------------------------------------------------------------------------------ Nsight Systems


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the calls to the GPU's profiler."""
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda *args: calls.append("synchronize"))
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    monkeypatch.setattr("torch.cuda.nvtx.range_push", lambda what: calls.append(f"push {what}"))
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: calls.append("pop"))
    return calls


async def test_nsys_captures_the_calls_of_chosen_steps(recorded: Recorded, spec: EngineSpec, cuda: list[str]) -> None:
    group = await start(spec, tracing(recorded.run_dir, 2, tool="nsys"))
    for step in (1, 2, 3):
        profile.set_position(step=step)
        await group.infer_batch(BATCH)
        await group.train_batch(BATCH)
        assert await group.end_traces(step) == ""
    await group.close()
    assert cuda == [
        "synchronize", "start", "push actor.infer_batch", "pop", "push actor.train_batch", "pop", "synchronize", "stop",
    ]  # fmt: skip


def test_a_profiler_range_ends_when_its_call_fails(tmp_path: Path, cuda: list[str]) -> None:
    tracer = Tracer(tracing(tmp_path, 1, tool="nsys"), "actor", 0)
    with pytest.raises(ValueError, match="x"), tracer.call(1, "actor.step"):
        raise ValueError("x")
    tracer.end(1)
    assert cuda == ["synchronize", "start", "push actor.step", "pop", "synchronize", "stop"]


def test_the_options_of_nsys_follow_from_the_configuration() -> None:
    options = nsight_options("actor", 2, Path("/runs/a/profiles"))
    assert options["o"] == "/runs/a/profiles/rank-actor-2.%p"
    assert options["capture-range"] == "cudaProfilerApi"
    assert options["capture-range-end"] == "repeat"
    assert "nvtx" in options["t"]
    # On a cluster, and for paths that a shell would misread, the traces go to the logs of Ray.
    assert nsight_options("actor", 2, None)["o"] == "rank-actor-2.%p"
    assert nsight_options("actor", 2, Path("/my runs/$x/profiles"))["o"] == "rank-actor-2.%p"


async def test_chosen_ranks_are_started_under_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, Any]] = []

    class Actor:
        def options(self, *, runtime_env: dict[str, Any], **options: Any) -> Actor:
            environments.append(runtime_env)
            return self

        def remote(self, *args: Any) -> None:
            pass

    monkeypatch.setattr("ray.remote", lambda actor: Actor())
    monkeypatch.setattr("trainer.workers.processes._device", lambda plan: "cuda")
    plan = plan_groups(Config.model_validate({"trainer": {"num_workers": 3, "strategy": "ddp"}}))[0]
    profiling = tracing(tmp_path, 5, tool="nsys", ranks=(1,))

    async def start(*, reserve_cpus: bool) -> None:
        limit_s = 60.0
        until = anyio.current_time() + limit_s
        await Processes(plan).start(None, reserve_cpus=reserve_cpus, limit_s=limit_s, until=until, profiling=profiling)

    await start(reserve_cpus=False)
    assert ["nsight" in environment for environment in environments] == [False, True, False]
    assert environments[1]["nsight"] == nsight_options("actor", 1, tmp_path / "profiles")
    assert (tmp_path / "profiles").is_dir()
    environments.clear()
    await start(reserve_cpus=True)
    assert environments[1]["nsight"]["o"] == "rank-actor-1.%p"
    environments.clear()
    profiling = tracing(tmp_path, 5, ranks=(1,))
    await start(reserve_cpus=False)
    assert not any("nsight" in environment for environment in environments)


def test_nsys_on_cpu_is_refused(tmp_path: Path) -> None:
    plan = plan_groups(Config())[0]
    with pytest.raises(ConfigError, match=r"profiler\.tool=nsys: the actor group runs on CPU.*trainer\.device=cuda"):
        check_tool(tracing(tmp_path, 1, tool="nsys"), plan, "cpu")
    check_tool(tracing(tmp_path, 1, tool="nsys"), plan, "cuda")
    check_tool(tracing(tmp_path, 1), plan, "cpu")
    check_tool(tracing(tmp_path, tool="nsys"), plan, "cpu")

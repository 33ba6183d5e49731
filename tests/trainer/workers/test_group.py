"""Groups of ranks on a real Ray cluster: results equal to one process, and failures within their deadlines."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray
import torch
from ray.util.placement_group import placement_group_table

import trainer.workers.group
from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, DataError, DeadlineError, DivergenceError, InfraError
from asyncrl.profiling import profile
from asyncrl.weights.object_store import ObjectStoreFeed, ObjectStorePublisher, start_store
from tests.fakes.inline_group import InlineGroup
from tests.fakes.losses import GoesWrong, Likelihood, NotFinite, TakesTime
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB, make_config, write_model
from tests.trainer.conftest import Recorded
from trainer.workers import outcomes
from trainer.workers.group import TrainerGroups, WorkerGroup
from trainer.workers.placement import GroupPlan, RolePlan, plan_groups
from trainer.workers.processes import Processes

pytestmark = pytest.mark.asyncio(loop_scope="module")
BATCH = make_batch([3, 5, 1, 4, 2, 6, 2], [4, 2, 6, 1, 5, 3, 7], vocab=VOCAB)
AGAIN = "the Trainer has to be restarted from its last checkpoint"
DIED = rf"actor\.train_batch: rank 1 of the actor group died; {AGAIN}"
ALONE = {"strategy": "local", "num_workers": 1}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def configure(model: Path, **sections: Any) -> Config:
    trainer = {"strategy": "ddp", "num_workers": 2} | sections.pop("trainer", {})
    return make_config(model, trainer=trainer, **sections)


@asynccontextmanager
async def running(config: Config, **options: Any) -> AsyncIterator[WorkerGroup]:
    group = await WorkerGroup.start(plan_groups(config)[0], config.timeouts, **options)
    processes = [psutil.Process(place.pid) for place in group.locations]
    try:
        yield group
    finally:
        await group.close()
        assert not [process for process in processes if process.is_running()], "a rank outlived its group"


@asynccontextmanager
async def inline(plan: RolePlan) -> AsyncIterator[InlineGroup]:
    spec = plan.spec_on("cpu")
    engine = spec.engine.model_copy(update={"strategy": "local", "num_workers": 1})
    group = await InlineGroup.start(replace(spec, engine=engine))
    try:
        yield group
    finally:
        await group.close()


@pytest.fixture(scope="module")
def config(model: Path) -> Config:
    return configure(
        model, trainer={"strategy": "fsdp2"}, algorithm={"use_kl_loss": True, "adv_estimator": "gae"},
        ref={"strategy": "ddp"}, rollout={"dtype": "bfloat16"},
        profiler={"level": "full", "steps": [70], "ranks": [1]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Any:
    return start_store("group-test", max_restarts=1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def groups(config: Config, store: Any, run_dir: Path) -> AsyncIterator[TrainerGroups]:
    """Groups with actor, reference and critic in the same two ranks."""
    publisher = ObjectStorePublisher(store, call_s=10)
    groups = await TrainerGroups.start(config, publisher=publisher, run_dir=run_dir)
    yield groups
    await groups.close()


@pytest_asyncio.fixture(loop_scope="module")
async def actor(groups: TrainerGroups) -> Any:
    actor = groups.roles["actor"]
    await actor.reset()
    await actor.set_loss_fn(Likelihood())
    await actor.plan(10)
    return actor


def assert_alike(left: Any, right: Any) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4), name


async def test_two_ranks_train_like_one_process(actor: Any, config: Config) -> None:
    """Seven rows are not divisible by two ranks, and one batch has a single row."""
    async with inline(plan_groups(config)[0].roles[0]) as alone:
        await alone.set_loss_fn(Likelihood())
        await alone.plan(10)
        for batch in (BATCH, BATCH[3:6], BATCH[6:], BATCH):
            assert_alike([await actor.train_batch(batch)], [await alone.train_batch(batch)])
        await actor.forward_backward(BATCH)
        await alone.forward_backward(BATCH)
        assert_alike([await actor.optim_step()], [await alone.optim_step()])
        assert await actor.step() == await alone.step() == 5
        ours, theirs = await actor.infer_batch(BATCH), await alone.infer_batch(BATCH)
    assert ours.batch_size == BATCH.batch_size
    torch.testing.assert_close(ours["log_probs"], theirs["log_probs"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours["entropy"], theirs["entropy"], rtol=1e-3, atol=1e-4)


async def test_roles_share_ranks_and_nothing_else(groups: TrainerGroups, actor: Any) -> None:
    reference, critic = groups.roles["ref"], groups.roles["critic"]
    assert [group.plan.name for group in groups.groups] == ["actor"]
    start = (await actor.infer_batch(BATCH))["log_probs"]
    torch.testing.assert_close((await reference.infer_batch(BATCH))["log_probs"], start)
    values = await critic.infer_batch(BATCH)
    assert set(values.sorted_keys) == {"values"}
    await actor.train_batch(BATCH)
    assert ((await actor.infer_batch(BATCH))["log_probs"] - start).abs().max() > 1e-3
    torch.testing.assert_close((await reference.infer_batch(BATCH))["log_probs"], start)
    torch.testing.assert_close((await critic.infer_batch(BATCH))["values"], values["values"])
    assert (await actor.step(), await critic.step()) == (1, 0)


async def test_the_group_stays_usable_after_a_failure_of_all_ranks(actor: Any) -> None:
    batch = BATCH.clone()
    batch["loss_mask"][:] = False
    with pytest.raises(DataError, match="a batch without a single trained token"):
        await actor.train_batch(batch)
    batch["loss_mask"][0, 0] = True
    with pytest.raises(ConfigError, match="lora_rank=0"):
        await actor.infer_batch(BATCH, adapters=False)
    await actor.set_loss_fn(NotFinite())
    with pytest.raises(DivergenceError, match="loss nan"):
        await actor.train_batch(BATCH)
    await actor.set_loss_fn(Likelihood())
    assert (await actor.train_batch(batch))["tokens"] == 1, "one trained token on one of the ranks is enough for a step"
    with pytest.raises(BugError, match="did you mean train_batch"):
        await actor.call("train_batches", BATCH)


async def test_weights_reach_the_store_from_rank_0(actor: Any, store: Any) -> None:
    await actor.train_batch(BATCH)
    published, gather_s, put_s = await actor.publish(1, 1, validate=True)
    assert gather_s > 0 < put_s
    assert await ObjectStoreFeed(store, call_s=10).latest() == published
    assert (published.version, published.step, published.validate) == (1, 1, True)
    offered = store.tensors.remote(published.weights_version)
    chunks = await anyio.to_thread.run_sync(lambda: ray.get(ray.get(offered, timeout=10), timeout=10))
    tensors = {name: array for chunk in chunks for name, array in chunk.items()}
    assert {array.dtype for array in tensors.values()} == {np.dtype("uint16")}, "bfloat16 is sent as its bits"
    assert sum(array.nbytes for array in tensors.values()) == published.num_bytes
    assert "model.embed_tokens.weight" in tensors
    with pytest.raises(BugError, match="version 1 published after version 1"):
        await actor.publish(1, 1, validate=False)
    assert await actor.step() == 1, "the ranks still answer after the store refused the version"
    os.kill((await store.status.remote()).pid, signal.SIGKILL)
    await actor.republish()
    assert (await store.status.remote()).newest == published.weights_version, "republish refills a restarted store"


async def test_ranks_return_the_same_events_as_one_process(
    groups: TrainerGroups, actor: Any, config: Config, recorded: Recorded
) -> None:
    async with inline(plan_groups(config)[0].roles[0]) as alone:
        await alone.set_loss_fn(Likelihood())
        await alone.plan(10)
        for role in (alone, actor):
            profile.set_position(step=5, version=3)
            await role.train_batch(BATCH)
            await role.infer_batch(BATCH)
            profile.set_position(step=6, version=4)
            with pytest.raises(DataError, match="lacks loss_mask"):
                await role.train_batch(BATCH.exclude("loss_mask"))
    found: dict[str, list[Any]] = {}
    for event in recorded.all():
        if "step" in event:
            fields = event["event"], event.get("method"), event["step"], event["version"], event["role"]
            found.setdefault(event["part"], []).append((*fields, event.get("error")))
            assert event["rank"] == (0 if event["part"] == "trainer" else int(event["part"][-1]))
    assert found.keys() == {"trainer", "rank-actor-0", "rank-actor-1"}
    ours = found.pop("trainer")
    assert len(ours) == 7
    for theirs in found.values():
        assert sorted(theirs, key=str) == sorted(ours, key=str)
    assert profile.status()["dropped"] == 0


def traces(run_dir: Path) -> dict[str, set[str]]:
    """Return every trace file with the names in it."""
    found = {}
    for path in run_dir.rglob("*.*"):
        with gzip.open(path, "rt") as stream:
            names = {event["name"] for event in json.load(stream)["traceEvents"]}
        found[path.relative_to(run_dir).as_posix()] = names
    return found


async def test_ranks_write_traces_of_a_chosen_step(
    groups: TrainerGroups, actor: Any, run_dir: Path, recorded: Recorded
) -> None:
    for step in (69, 70, 71):
        profile.set_position(step=step)
        await actor.infer_batch(BATCH)
        await groups.end_traces(step)
    [(path, names)] = traces(run_dir).items()
    assert path == "profiles/step_000070/rank-actor-1.json.gz"
    assert {"actor.infer_batch", "aten::mm"} <= names


async def test_a_cancelled_call_does_not_disturb_the_next(groups: TrainerGroups, actor: Any) -> None:
    group = groups.groups[0]
    sent = anyio.Event()
    actors = group._processes.actors
    send = actors[1]

    class Spy:
        def __getattr__(self, name: str) -> Any:
            sent.set()
            return getattr(send, name)

    actors[1] = Spy()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.train_batch, BATCH)
            await sent.wait()
            tasks.cancel_scope.cancel()
    finally:
        actors[1] = send
    assert await actor.step() == 1, "the next call waits for the running step"
    assert (await actor.train_batch(BATCH))["loss"] > 0


async def test_a_rank_that_dies_in_a_step_fails_the_call_at_once(model: Path) -> None:
    async with running(configure(model, timeouts={"collective_s": 100}), reserve_cpus=True) as group:
        assert await bundles("CREATED") == [[{"CPU": 1.0}] * 2]
        actor = group.role_group("actor")
        await actor.set_loss_fn(GoesWrong(1, "dies"))
        with (
            anyio.fail_after(10),
            pytest.raises(InfraError, match=DIED),
        ):
            await actor.train_batch(BATCH)
        for call in (actor.step(), actor.train_batch(BATCH), actor.wait_for_files()):
            with pytest.raises(InfraError, match=f"the actor group is gone; {AGAIN}"):
                await call
    assert await bundles("CREATED") == []


async def bundles(state: str) -> list[list[dict[str, float]]]:
    """Return the bundles of the cluster's placement groups in this state."""
    table = await anyio.to_thread.run_sync(placement_group_table)
    return [list(entry["bundles"].values()) for entry in table.values() if entry["state"] == state]


async def test_a_full_cluster_is_a_deadline_error(model: Path) -> None:
    config = configure(model, trainer={"cpu_threads": 2}, timeouts={"start_s": 1.0})
    with pytest.raises(DeadlineError, match=r"the actor group waited 1 s for 2 times \{'CPU': 2\.0\} on"):
        await WorkerGroup.start(plan_groups(config)[0], config.timeouts, reserve_cpus=True)


async def test_a_ray_that_creates_no_processes_is_a_deadline_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the event loop serves others."""
    hangs = threading.Event()
    monkeypatch.setattr(Processes, "_create", lambda *args, **options: hangs.wait())
    config = configure(model, timeouts={"start_s": 1.0})
    with pytest.raises(DeadlineError, match="Ray has not created the processes of the actor group within 1 s"):
        await WorkerGroup.start(plan_groups(config)[0], config.timeouts)
    hangs.set()


@ray.remote(num_cpus=0)
class Reserving:
    """A Trainer's process that reserves resources for its ranks."""

    def __init__(self, plan: GroupPlan) -> None:
        self._processes = Processes(plan)

    async def reserve(self, limit_s: float) -> None:
        await self._processes.reserve(cpus=True, limit_s=limit_s, until=anyio.current_time() + limit_s)


@pytest.mark.slow
async def test_reservations_of_a_killed_trainer_are_freed(model: Path) -> None:
    """Ray keeps a reservation until the driver ends, so on a full cluster the next Trainer would wait for ever."""
    plan = plan_groups(configure(model, trainer={"cpu_threads": 1}))[0]
    with anyio.fail_after(200):
        for _ in range(3):
            trainer = Reserving.remote(plan)
            await trainer.reserve.remote(20.0)
            ray.kill(trainer)
        group = await WorkerGroup.start(plan, configure(model).timeouts, reserve_cpus=True)
        await group.close()


async def test_a_rank_that_fails_alone_kills_the_group(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits in a collective operation meanwhile."""
    monkeypatch.setattr(outcomes, "GRACE_S", 0.5)
    async with running(configure(model, timeouts={"collective_s": 100})) as group:
        actor = group.role_group("actor")
        await actor.set_loss_fn(GoesWrong(0, "raises"))
        with anyio.fail_after(10), pytest.raises(BugError, match=r"rank 0 of the actor group: .*only here"):
            await actor.train_batch(BATCH)
        with pytest.raises(InfraError, match="the actor group is gone"):
            await actor.step()


async def test_watch_notices_a_dead_idle_rank_at_once(model: Path) -> None:
    async with running(configure(model, trainer=ALONE)) as group:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(killed, group.locations[0].pid)
            with anyio.fail_after(10), pytest.raises(InfraError, match=f"rank 0 of the actor group died; {AGAIN}"):
                await group.watch(1000.0)
        with pytest.raises(InfraError, match="the actor group is gone"):
            await group.role_group("actor").step()


async def killed(pid: int) -> None:
    await anyio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
async def test_a_stopped_rank_fails_a_step_before_its_deadline(model: Path) -> None:
    async with running(configure(model, trainer=ALONE)) as group:
        actor = group.role_group("actor")
        await actor.set_loss_fn(TakesTime(1000.0))
        failed = []

        async def step() -> None:
            # As in the train loop, a step is never cancelled.
            with anyio.CancelScope(shield=True):
                try:
                    await actor.train_batch(BATCH)
                except InfraError as error:
                    failed.append(error)

        with anyio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.watch, 1.0)
                tasks.start_soon(step)
                while not group._lock.statistics().locked:
                    await anyio.lowlevel.checkpoint()
                os.kill(group.locations[0].pid, signal.SIGSTOP)
        (error,) = caught.value.exceptions
        assert failed == [error]
        assert isinstance(error, DeadlineError)
        assert "a health check: rank 0 of the actor group did not answer within 1 s" in str(error)


async def test_computing_ranks_answer_health_checks(groups: TrainerGroups, actor: Any) -> None:
    """The ranks keep the interpreter busy for longer than the limit of a health check."""
    await actor.set_loss_fn(TakesTime(2.5))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(groups.watch, 2.0)
        assert (await actor.train_batch(BATCH))["loss"] > 0
        tasks.cancel_scope.cancel()
    assert {(rank["group"], rank["rank"]) for rank in groups.ranks} == {("actor", 0), ("actor", 1)}
    assert {rank["pid"] for rank in groups.ranks} == {place.pid for place in groups.groups[0].locations}
    assert all(rank["health"].rss_bytes > 1 << 20 and rank["health"].lag_s is not None for rank in groups.ranks)


@pytest.mark.slow
async def test_a_stopped_rank_misses_its_deadline(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []

    async def spy(answers: Any, limit_s: float) -> Any:
        ends.append(anyio.current_time() + limit_s)
        return await outcomes.gather_outcomes(answers, limit_s)

    monkeypatch.setattr(trainer.workers.group, "gather_outcomes", spy)
    async with running(configure(model, timeouts={"train_s": 1.0, "collective_s": 100})) as group:
        assert len(ends) == 4
        assert max(ends) - min(ends) < 0.5, "all waits of a start share one deadline"
        actor = group.role_group("actor")
        os.kill(group.locations[1].pid, signal.SIGSTOP)
        with anyio.fail_after(10), pytest.raises(DeadlineError, match="did not answer within 1 s"):
            await actor.infer_batch(BATCH)


@pytest.mark.slow
async def test_a_slow_collective_is_a_deadline_error(model: Path) -> None:
    """One rank sleeps, and the other one raises after `collective_s`, so the call does not wait for `train_s`."""
    async with running(configure(model, timeouts={"collective_s": 2.0})) as group:
        actor = group.role_group("actor")
        await actor.set_loss_fn(GoesWrong(1, "sleeps"))
        with anyio.fail_after(20), pytest.raises(DeadlineError, match=r"rank 0 of the actor group: .*collective"):
            await actor.train_batch(BATCH)


async def test_a_failed_start_leaves_no_processes(model: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    config = configure(model, trainer={"strategy": "fsdp3"})
    with pytest.raises(ConfigError, match="not built in; did you mean 'fsdp'"):
        await TrainerGroups.start(config)
    ranks = [
        child for child in psutil.Process().children(recursive=True)
        if child.pid not in before and "RankActor" in " ".join(child.cmdline())
    ]  # fmt: skip
    assert not ranks
    config = configure(model, trainer={"device": "cuda"}, timeouts={"start_s": 0.5})
    with pytest.raises(DeadlineError, match=r"waited 0\.5 s for 2 times .*'GPU': 1\.0.* lower trainer\.num_workers"):
        await TrainerGroups.start(config)

"""The Trainer's Ray actor with the real queue, payloads, weight store and a tiny model; the tests feed samples."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlControlConfig, RolloutCorrectionConfig
from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.core.failures import ConfigError, DataError, InfraError
from asyncrl.core.ports import WeightsVersion
from asyncrl.core.records import StepRecord
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import SampleId, sample_meta
from asyncrl.driver.resume import find_resume, resume_in_run
from asyncrl.observe.metrics.registry import describe
from asyncrl.profiling.files import event_files
from asyncrl.queue.actor import QueueClient, start_queue
from asyncrl.queue.payloads import make_payloads
from asyncrl.queue.sample_queue import QueueOptions
from asyncrl.storage.checkpoint_manifest import NO_REWINDS, Resume
from asyncrl.storage.run_dir import RunDir
from asyncrl.storage.trained_steps import read_trained
from asyncrl.weights.object_store import ObjectStoreFeed, start_store
from tests.fakes.trainer_model import make_config, write_model
from tests.fakes.trainer_parts import make_sample
from trainer.actor import start_trainer

TOTAL_STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(write_model(tmp_path / "model"), run_dir=str(tmp_path / "run"), resume="auto")


@pytest.fixture
def ppo(config: Config) -> Config:
    """The configuration with a critic, and with an adaptive penalty for the KL to a reference in the reward."""
    algorithm = AlgorithmConfig(
        adv_estimator="gae",
        use_kl_in_reward=True,
        kl_ctrl=KlControlConfig(type="adaptive", horizon=10),
        rollout_correction=RolloutCorrectionConfig(bypass_mode=False, rollout_is="token"),
    )
    return config.model_copy(update={"algorithm": algorithm, "profiler": ProfilerConfig(steps=(3,))})


class Run:
    """A Trainer with its store and its queue. The end of the block kills all of them."""

    def __init__(self, config: Config, tmp_path: Path, resume: Resume | None = None, *, journal: bool = False) -> None:
        self.run_dir = RunDir(tmp_path / "run")
        self.resume = resume
        self.store = start_store(f"test-{id(self)}")
        options = QueueOptions(100, Pacing(config.samples_per_version, 100, TOTAL_STEPS * 2))
        self.run_dir.path.mkdir(exist_ok=True)
        self.queue_actor = start_queue(
            options, resume.manifest.queue if resume else None, run_dir=self.run_dir.path if journal else None
        )
        self.queue = QueueClient(self.queue_actor, 20.0)
        # Each Run of a directory has a new incarnation, so the payloads of the previous one stay.
        self.payloads = make_payloads(config, self.run_dir.path, 2 if resume else 1)
        self.trainer = start_trainer(config)
        self.records: list[StepRecord] = []

    async def __aenter__(self) -> Run:
        self.started = await self.trainer.start.remote(self.run_dir, self.resume, self.store, NO_REWINDS, None)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for actor in (self.trainer, self.queue_actor, self.store):
            ray.kill(actor)

    async def feed(self, number: int, **fields: Any) -> list[SampleId]:
        admission = await self.queue.admit(number, timeout_s=10.0)
        assert len(admission.sample_ids) == number
        for sample_id in admission.sample_ids:
            sample = make_sample(sample_id, **fields)
            await self.queue.offer(sample_meta(sample), await self.payloads.put(sample))
        return list(admission.sample_ids)

    async def stream(self, *, served: bool = True) -> AsyncIterator[StepRecord]:
        """Yield the records of the run. With `served`, the Trainer learns at once that the last version is served."""
        with anyio.fail_after(200):
            if served:
                await self.trainer.confirm_served.remote()
            await self.trainer.begin_run.remote(self.queue_actor, TOTAL_STEPS)
            while records := await self.trainer.next_records.remote():
                self.records += records
                for record in records:
                    yield record


def check_events(run_dir: Path) -> None:
    """Check the events of the four steps of two Trainers."""
    events = [
        (path.parent.name, path.stem, json.loads(line)["event"])
        for path in event_files(run_dir)
        for line in path.read_text().splitlines()
    ]
    steps = [f"step_{step:06d}" for step in (1, 2, 3, 4)]
    assert [step for step, part, name in events if (part, name) == ("trainer", "step")] == steps
    for name, number in (
        ("trainer.update", 1),
        ("trainer.experience", 1),
        ("trainer.critic", 1),
        ("sample.trained", 2),
    ):
        counts = Counter(step for step, part, event in events if (part, event) == ("trainer", name))
        assert counts == dict.fromkeys(steps, number), name
    for step in steps:
        ranks = {name for place, part, name in events if (place, part) == (step, "rank-actor-0")}
        assert {"rank.call", "sync.gather", "sync.put"} <= ranks
    assert [path.relative_to(run_dir / "profiles").as_posix() for path in run_dir.glob("profiles/*/*")] == [
        "step_000003/rank-actor-0.json.gz"
    ]


def fetch(store: Any, weights_version: WeightsVersion) -> list[Any]:
    """Fetch a version as a replica does."""
    return ray.get(ray.get(store.tensors.remote(weights_version), timeout=20), timeout=20)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_stopped_run_resumes_from_its_checkpoint(ppo: Config, tmp_path: Path) -> None:
    async with Run(ppo, tmp_path) as first:
        assert first.started == {"step": 0, "version": 0, "attention": "sdpa, packed rows"}
        await first.feed(5)
        async for record in first.stream():
            if record.step == 2:  # the Trainer now waits for a sixth sample
                await first.trainer.stop.remote()
        status = await first.trainer.status.remote()
        assert (status["step"], status["version"], status["trained_samples"]) == (2, 2, 4)
        assert status["skip"] == {}
        assert (await first.queue.admit(1, timeout_s=1.0)).closed

    resume = find_resume(ppo)
    assert resume is not None
    assert {name.partition("/")[0] for name in resume.manifest.files} == {"actor", "critic", "hf"}
    async with Run(ppo, tmp_path, resume) as second:
        assert second.started == {"step": 2, "version": 2, "attention": "sdpa, packed rows"}
        feed = ObjectStoreFeed(second.store, call_s=20.0)
        publication = await feed.latest()
        assert publication is not None and (publication.version, publication.step) == (2, 2)
        fed = await second.feed(4)
        assert [sample_id.index for sample_id in fed] == [5, 6, 7, 8]
        async for _ in second.stream():
            pass
        latest = await feed.latest()
        assert latest is not None and latest.version == 4
        # Replicas may still be fetching this version, and those that are replaced during its validation will fetch it.
        ranks = (await second.trainer.status.remote())["ranks"]
        assert all(psutil.pid_exists(rank["pid"]) for rank in ranks)
        chunks = await anyio.to_thread.run_sync(fetch, second.store, latest.weights_version)
        assert sum(array.nbytes for chunk in chunks for array in chunk.values()) == latest.num_bytes > 0
    records = [*first.records, *second.records]
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_000002", "step_000004"}
    for record in records:
        for name in record.metrics:
            describe(name)
        assert {"actor/loss", "actor/grad_norm", "critic/loss", "critic/lr", "reward/kl"} <= record.metrics.keys()
        assert record.metrics["correction/mismatch_kl"] > 0
    check_events(tmp_path / "run")
    coefficients = [record.metrics["reward/kl_coef"] for record in records]
    assert coefficients[0] == 0.001
    assert len(set(coefficients)) == 4  # training continued from the checkpoint


@pytest.mark.slow
async def test_a_killed_trainer_leaves_no_rank_and_another_resumes_from_its_checkpoint(
    config: Config, tmp_path: Path
) -> None:
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_freq": 2})})
    async with Run(config, tmp_path, journal=True) as run:
        await run.feed(7)
        with pytest.raises(RayActorError):
            async for record in run.stream():
                if record.step == 3:  # beyond the checkpoint
                    while "step_000002" not in {path.name for path in run.run_dir.checkpoints.iterdir()}:
                        await run.queue.status()
                    status = await run.trainer.status.remote()
                    ranks = [psutil.Process(rank["pid"]) for rank in status["ranks"]]
                    assert [rank["group"] for rank in status["ranks"]] == ["actor"]
                    assert status["node_id"] == ray.get_runtime_context().get_node_id()
                    os.kill(status["pid"], signal.SIGKILL)
        assert psutil.wait_procs(ranks, timeout=10)[1] == [], "a rank outlived its Trainer"

        resume = resume_in_run(run.run_dir, NO_REWINDS)
        assert resume is not None
        progress = resume.manifest.progress
        assert (progress.step, progress.version) == (2, 2)
        await run.queue.attach("trainer", 2)
        await run.queue.rewind(2, version=2, lineage=1, total_samples=TOTAL_STEPS * 2)
        counts = (await run.queue.status()).counts
        assert (counts.trained, counts.ready, counts.leased) == (4, 3, 0)
        run.trainer = start_trainer(config, incarnation=2)
        await run.trainer.start.remote(run.run_dir, resume, run.store, resume.history, None)
        store = await run.store.status.remote()
        assert store.newest == WeightsVersion(1, 2)
        await run.feed(1)
        run.records.clear()
        async for _ in run.stream():
            pass
        assert [(record.step, record.lineage) for record in run.records] == [(3, 1), (4, 1)]
    lines = list(read_trained(run.run_dir.path))
    assert [line.get("step", line.get("rewound_to_step")) for line in lines] == [1, 2, 3, 2, 3, 4]
    assert [line["lineage"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert lines[2]["samples"] == lines[4]["samples"], "the sample keeps its place in the order"
    samples = [sample for line in [*lines[:2], *lines[4:]] for sample in line["samples"]]
    assert sorted(samples) == [f"sample_0_{index}" for index in range(1, 9)]


@pytest.mark.slow
async def test_a_rank_that_dies_before_the_last_version_is_served_is_a_failure(config: Config, tmp_path: Path) -> None:
    """The published weights are lost with the rank, so the Rollouter would wait for them for ever."""
    async with Run(config, tmp_path) as run:
        await run.feed(2 * TOTAL_STEPS)
        with pytest.raises(RayTaskError) as caught:
            async for record in run.stream(served=False):
                if record.step == TOTAL_STEPS:
                    while (status := await run.trainer.status.remote())["waits"][:1] != [("served", 1, ANY, False)]:
                        await anyio.lowlevel.checkpoint()
                    os.kill(status["ranks"][0]["pid"], signal.SIGKILL)
        assert isinstance(caught.value.cause, InfraError)
        assert "rank 0 of the actor group died" in str(caught.value.cause)


@pytest.mark.slow
async def test_a_failure_of_the_trainer_is_a_typed_error(config: Config, tmp_path: Path) -> None:
    async with Run(config, tmp_path) as run:
        await run.feed(8, length=30)  # these tokens are beyond the model's vocabulary
        with pytest.raises(RayTaskError) as caught:
            async for _ in run.stream():
                pass
        assert isinstance(caught.value.cause, DataError)
        assert "vocabulary of 24" in str(caught.value.cause)


async def test_a_missing_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(RayTaskError) as caught:
        async with Run(make_config(tmp_path / "nothing"), tmp_path):
            pass
    assert isinstance(caught.value.cause, ConfigError)

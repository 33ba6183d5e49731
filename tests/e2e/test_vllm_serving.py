"""A real vLLM engine under Ray Serve loads new weights while it generates."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.core.failures import BugError, DataError, EngineCrashError
from asyncrl.core.ports import (
    Accepted,
    ApplyReport,
    EngineCrashed,
    GenerateRequest,
    GenerationEvent,
    Publication,
    ReplicaReport,
    TurnFinished,
    WeightsVersion,
)
from asyncrl.core.types import FinishReason, Span, Turn, join_turns, versions_per_token
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.files import event_files
from asyncrl.weights.object_store import ObjectStoreFeed, ObjectStorePublisher
from benchmarks.running import publish_tensors
from rollouter.serving.client import EventBatch
from tests.e2e.conftest import MAX_MODEL_LEN, NAMESPACE, EngineProcess
from tests.fakes.engine import finished_turns

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

PROMPT = np.arange(5, 25, dtype=np.int32)
LONG = 400


def requests(count: int, max_tokens: int, **sampling: Any) -> list[GenerateRequest]:
    params = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True} | sampling
    return [GenerateRequest(f"r{index}", PROMPT, params) for index in range(count)]


def fleet_of(engine: EngineProcess, *, partial: bool = True, mode: str = "keep", clear_kv: bool = False) -> Any:
    from rollouter.serving.fleet import ServeFleet

    changes = {
        "async_training": engine.config.async_training.model_copy(
            update={"partial_rollout": partial, "partial_mode": mode}
        ),
        "weight_sync": engine.config.weight_sync.model_copy(update={"clear_kv_cache": clear_kv}),
    }
    return ServeFleet(engine.config.model_copy(update=changes), namespace=NAMESPACE)


async def publish(engine: EngineProcess, scale: float = 0.02) -> Publication:
    engine.version += 1
    publisher = ObjectStorePublisher(engine.store, call_s=30, lineage=engine.lineage)
    weights = engine.perturb(scale)
    return await publish_tensors(publisher, engine.version, engine.version, weights, probe=engine.probe())


async def until_idle(engine: EngineProcess) -> None:
    """Wait until the engine is idle. Ray cancels calls in the background, so an earlier call may still have
    requests."""
    started = time.time()
    while (last := (await replicas(engine))[-1]).load is None or last.reported_at < started or last.load.running:  # noqa: ASYNC110
        await anyio.sleep(0.1)


async def until_generating(engine: EngineProcess, placed: anyio.Event) -> None:
    """Wait until the accepted requests have tokens: until a short request that is sent after them is complete."""
    await placed.wait()
    (request,) = requests(1, 20)
    await finished_turns(fleet_of(engine).generate([replace(request, request_id="behind")], session="behind"))


async def apply_in_flight(engine: EngineProcess, fleet: Any, count: int) -> tuple[list[Turn], ApplyReport, np.ndarray]:
    """Publish and apply a version while `count` requests run. Also return the log-probs of their tokens under the old
    weights.
    """
    turns: list[Turn] = []
    placed = anyio.Event()

    async def generate() -> None:
        turns.extend(
            await finished_turns(fleet.generate(requests(count, LONG), session="s"), lambda event: placed.set())
        )

    await until_idle(engine)
    old = replace(engine, model=copy.deepcopy(engine.model))
    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_generating(engine, placed)
        publication = await publish(engine)
        (report,) = await fleet.apply(publication)
    return turns, report, np.stack([old.log_probs(PROMPT, turn) for turn in turns])


def assert_agrees(engine: EngineProcess, turn: Turn) -> None:
    np.testing.assert_allclose(turn.rollout_log_probs, engine.log_probs(PROMPT, turn), atol=1e-3)


async def test_a_turn_has_exact_tokens_log_probs_and_end_of_sequence(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    turns = await finished_turns(fleet.generate(requests(4, 40), session="s"))
    for turn in turns:
        assert len(turn.response_ids) == 40
        assert turn.finish_reason is FinishReason.LENGTH
        assert turn.spans == (Span(0, engine.version),)
        assert_agrees(engine, turn)
    (stopped,) = await finished_turns(
        fleet.generate(requests(1, 300, ignore_eos=False, logit_bias={2: 100.0}), session="s")
    )
    assert stopped.response_ids.tolist() == [2]
    assert stopped.finish_reason is FinishReason.STOP


async def test_a_replica_reports_its_load_and_health(engine: EngineProcess) -> None:
    fleet, placed = fleet_of(engine), anyio.Event()

    async def keep_busy() -> None:
        while True:
            await finished_turns(fleet.generate(requests(4, LONG), session="s"), lambda event: placed.set())

    async with anyio.create_task_group() as group:
        group.start_soon(keep_busy)
        await until_generating(engine, placed)
        last = (await replicas(engine))[-1]
        while last.load is None or not last.load.running:
            await anyio.sleep(0.1)
            last = (await replicas(engine))[-1]
        assert 1 <= last.load.running <= 5 and 0 < last.load.kv_cache_usage < 1 and last.load.preemptions == 0
        assert last.health is not None and last.health.rss_bytes > 1 << 26 and last.health.lag_s is not None
        assert last.engine_health is not None and last.engine_health.rss_bytes > 1 << 26
        group.cancel_scope.cancel()
    while last.load is None or last.load.running or last.load.kv_cache_usage:
        await anyio.sleep(0.1)
        last = (await replicas(engine))[-1]
    assert last.load.waiting == 0


async def test_generation_ends_at_a_stop_string(engine: EngineProcess) -> None:
    turns = await finished_turns(fleet_of(engine).generate(requests(8, 300, stop=["!"]), session="s"))
    # A random model samples 300 tokens without "!" in one of a hundred responses.
    assert FinishReason.STOP in [turn.finish_reason for turn in turns]
    for turn in turns:  # "!" is the first character after the special tokens in the vocabulary
        is_end = [*(turn.response_ids == 4)]
        assert not any(is_end[:-1]) and is_end[-1] == (turn.finish_reason is FinishReason.STOP)


async def test_kept_requests_continue_under_the_new_weights(engine: EngineProcess) -> None:
    fleet = fleet_of(engine, clear_kv=True)
    turns, report, old = await apply_in_flight(engine, fleet, 4)
    assert (report.version, report.in_flight, report.verified) == (engine.version, 4, True)
    assert report.mismatch_kl is not None
    assert report.mismatch_kl < 1e-6
    assert 0 < report.load_s < report.pause_s < 5
    for turn, under_old in zip(turns, old, strict=True):
        assert len(turn.response_ids) == LONG
        assert [span.version for span in turn.spans] == [engine.version - 1, engine.version]
        # If the KV cache is recomputed, each log-prob is exactly that of the version in the token's span.
        new = versions_per_token(turn.spans, LONG) == engine.version
        np.testing.assert_allclose(turn.rollout_log_probs[~new], under_old[~new], atol=1e-3)
        np.testing.assert_allclose(turn.rollout_log_probs[new], engine.log_probs(PROMPT, turn)[new], atol=1e-3)
        assert np.abs(under_old[new] - turn.rollout_log_probs[new]).max() > 0.01
    await until_idle(engine)
    load = (await replicas(engine))[-1].load
    assert load is not None and load.preemptions == 0, (
        "clearing the KV cache for a new version does not count as preemption"
    )


async def test_each_request_records_the_duration_of_its_phases(engine: EngineProcess, tmp_path: Path) -> None:
    """The replica sends the events with its answers, and the Rollouter writes them."""
    profile.configure("rollouter", ProfilerSettings("summary", tmp_path / "events"))
    profile.set_position(step=5, version=engine.version)
    fleet = fleet_of(engine)
    named = [replace(request, request_id=f"sample_0_7/{k}.2") for k, request in enumerate(requests(3, LONG))]
    turns: list[Turn] = []
    placed = anyio.Event()

    async def generate() -> None:
        turns.extend(await finished_turns(fleet.generate(named, session="s"), lambda event: placed.set()))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_generating(engine, placed)
        (report,) = await fleet.apply(await publish(engine))
    assert report.events == (), "the fleet removes the events from the report"
    # The caller cancels this request, so the request's event arrives with the next answer.
    async with anyio.create_task_group() as group:
        placed = anyio.Event()
        cut_off = replace(named[0], request_id="sample_0_8/0")
        group.start_soon(finished_turns, fleet.generate([cut_off], session="s"), lambda event: placed.set())
        await until_generating(engine, placed)
        group.cancel_scope.cancel()
    await until_idle(engine)
    (short,) = requests(1, 5)
    await finished_turns(fleet.generate([replace(short, request_id="sample_0_9/0")], session="s"))
    profile.flush()
    lines = (tmp_path / "events" / "step_000005" / f"replica-{report.replica}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    about = {(one.get("sample"), one.get("trajectory")): one for one in events if one["event"] == "request"}
    for k, turn in enumerate(turns):
        one = about["sample_0_7", k]
        assert (one["turn"], one["request"], one["replica"]) == (2, f"sample_0_7/{k}.2-1", report.replica)
        assert (one["prompt_tokens"], one["response_tokens"]) == (len(PROMPT), len(turn.response_ids))
        assert (one["finish_reason"], one["version"], one["step"]) == ("length", engine.version - 1, 5)
        assert one["prefill_s"] > 0 and one["decode_s"] > 0 and one["queued_s"] >= 0
        assert 0 < one["paused_s"] <= report.pause_s + 1e-5
        assert_adds_up(one)
    cut, last = about["sample_0_8", 0], about["sample_0_9", 0]
    assert cut["finish_reason"] == "aborted" and 0 < cut["response_tokens"] < LONG and "error" not in cut
    assert last["response_tokens"] == 5 and last["version"] == engine.version and last["paused_s"] == 0
    for one in (cut, last):
        assert one["prefill_s"] > 0 and one["decode_s"] > 0
        assert_adds_up(one)
    syncs = {one["event"]: one for one in events if one["event"].startswith("sync.")}
    assert syncs.keys() >= {"sync.fetch", "sync.drain", "sync.pause", "sync.load", "sync.verify"}
    assert {one["version"] for one in syncs.values()} == {engine.version}
    assert syncs["sync.pause"]["duration_s"] == pytest.approx(report.pause_s, abs=1e-3)
    assert syncs["sync.load"]["duration_s"] <= syncs["sync.pause"]["duration_s"]
    assert 3 <= syncs["sync.pause"]["in_flight"] <= report.in_flight, "some requests may end before the pause"


def assert_adds_up(one: dict[str, Any]) -> None:
    """Check that the phases add up to at most the duration, which includes the time before and after the engine."""
    assert (
        sum(one[f"{phase}_s"] for phase in ("gate", "queued", "prefill", "decode", "paused"))
        <= one["duration_s"] + 1e-5
    )


async def test_new_requests_never_reuse_prefix_blocks_of_an_older_version(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    turns, _, _ = await apply_in_flight(engine, fleet, 4)
    assert all([span.version for span in turn.spans] == [engine.version - 1, engine.version] for turn in turns)
    for turn in await finished_turns(fleet.generate(requests(2, 40), session="s")):
        assert turn.spans == (Span(0, engine.version),)
        assert_agrees(engine, turn)


async def test_aborted_requests_resume_with_their_tokens_and_budget(engine: EngineProcess) -> None:
    fleet = fleet_of(engine, mode="abort")
    turns, _, old = await apply_in_flight(engine, fleet, 4)
    for turn, under_old in zip(turns, old, strict=True):
        assert len(turn.response_ids) == LONG
        assert turn.finish_reason is FinishReason.LENGTH
        assert [span.version for span in turn.spans] == [engine.version - 1, engine.version]
        new = versions_per_token(turn.spans, LONG) == engine.version
        np.testing.assert_allclose(turn.rollout_log_probs[~new], under_old[~new], atol=1e-3)
        np.testing.assert_allclose(turn.rollout_log_probs[new], engine.log_probs(PROMPT, turn)[new], atol=1e-3)


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_pause_reports_the_requests_in_flight(engine: EngineProcess, tmp_path: Path, mode: str) -> None:
    """Both modes pause an engine without requests; the report has the number of requests when the update began."""
    profile.configure("rollouter", ProfilerSettings("summary", tmp_path / "events"))
    fleet = fleet_of(engine, partial=mode == "abort", mode="abort")
    _, report, _ = await apply_in_flight(engine, fleet, 4)
    assert report.in_flight == 4
    profile.flush()
    events = [json.loads(line) for path in event_files(tmp_path) for line in path.read_text().splitlines()]
    pauses = [one for one in events if one["event"] == "sync.pause" and one["version"] == report.version]
    assert [one["in_flight"] for one in pauses] == [0]


async def test_wait_mode_finishes_requests_before_the_pause(engine: EngineProcess) -> None:
    fleet = fleet_of(engine, partial=False)
    turns, report, old = await apply_in_flight(engine, fleet, 4)
    assert report.pause_s < 1
    for turn, under_old in zip(turns, old, strict=True):
        assert turn.spans == (Span(0, engine.version - 1),)
        np.testing.assert_allclose(turn.rollout_log_probs, under_old, atol=1e-3)
    (after,) = await finished_turns(fleet.generate(requests(1, 40), session="s"))
    assert_agrees(engine, after)


async def test_applying_the_same_version_twice_changes_nothing(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    publication = await publish(engine)
    await fleet.apply(publication)
    (report,) = await fleet.apply(publication)
    assert (report.version, report.pause_s) == (engine.version, 0.0)
    latest = await ObjectStoreFeed(engine.store, call_s=30).latest()
    assert latest == publication


async def test_refused_requests_are_data_errors(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    overlong = GenerateRequest("long", np.full(MAX_MODEL_LEN, 5, dtype=np.int32), {"max_tokens": 8})
    with pytest.raises(DataError, match="leave no room"):
        await finished_turns(fleet.generate([overlong], session="s"))
    with pytest.raises(DataError, match="sampling parameters"):
        await finished_turns(fleet.generate(requests(1, 8, temprature=1.0), session="s"))
    with pytest.raises(DataError, match="seed"):
        await finished_turns(fleet.generate(requests(1, 8, seed=7), session="s"))
    (fine,) = await finished_turns(fleet.generate(requests(1, 8), session="s"))
    assert len(fine.response_ids) == 8


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["checksums", "log-probs"])
async def test_verification_detects_a_corrupt_version_and_the_replica_is_replaced(
    engine: EngineProcess, wrong: str
) -> None:
    """The engine restarts, and serves the store's version before it takes a request."""
    fleet = fleet_of(engine)
    before = engine.probe()
    publication = await publish(engine, 0.1)
    if wrong == "checksums":
        lying = replace(publication, checksums=publication.checksums | {"layers.1": 7})
        message = r"checksums differ in layers\.1"
    else:
        lying = replace(publication, probe=before)
        message = r"computes other log-probs than the Trainer: .* weight_sync\.max_mismatch_kl allows 0\.0001"
    with pytest.raises(BugError, match=message):
        await fleet.apply(lying)
    (turn,) = await finished_turns(fleet.generate(requests(1, 20), session="s"))
    assert turn.spans == (Span(0, engine.version),)
    assert_agrees(engine, turn)


async def test_replicas_follow_training_back_to_a_checkpoint(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    for _ in range(2):
        await fleet.apply(await publish(engine))
    engine.lineage, engine.version = engine.lineage + 1, engine.version - 2
    (report,) = await fleet.apply(await publish(engine))
    assert (report.weights_version, report.verified) == (WeightsVersion(engine.lineage, engine.version), True)
    (turn,) = await finished_turns(fleet.generate(requests(1, 40), session="s"))
    assert turn.spans == (Span(0, engine.version),)
    assert_agrees(engine, turn)


class Calls:
    """Observes the calls of a fleet and collects the tokens of each request over all calls."""

    def __init__(self, fleet: Any, count: int) -> None:
        self.received: list[Turn | None] = [None] * count
        self.crashes: list[EngineCrashError] = []
        self.at_crash: list[Turn | None] = []
        self.completed: list[int] = []
        self.placed = anyio.Event()
        self._call = fleet._call
        fleet._call = self.call

    async def call(self, batch: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Any, None]:
        numbers = [int(request.request_id[1:].partition("-")[0]) for request in batch]
        async for item in self._call(batch, session=session):
            for delta in () if isinstance(item, Accepted | EventBatch) else item:
                number = numbers[delta.number]
                self.received[number] = join_turns(self.received[number], delta.turn)
            yield item

    def observe(self, event: GenerationEvent) -> None:
        match event:
            case Accepted():
                self.placed.set()
            case EngineCrashed(error):
                self.crashes.append(error)
                self.at_crash = list(self.received)
            case TurnFinished(number):
                self.completed.append(number)


async def replicas(engine: EngineProcess) -> tuple[ReplicaReport, ...]:
    return (await engine.store.status.remote()).replicas


class WeightsTrainer:
    """A stand-in for the Trainer. The versions that it published are lost when its process dies."""

    def __init__(self, store: Any, lineage: int) -> None:
        self._publisher = ObjectStorePublisher(store, call_s=30, lineage=lineage)

    async def publish(self, version: int, tensors: dict[str, np.ndarray]) -> Publication:
        return await publish_tensors(self._publisher, version, version, tensors)


async def test_tokens_of_a_dead_engine_continue_on_its_successor_which_waits_for_fetchable_weights(
    engine: EngineProcess,
) -> None:
    """The test kills the engine core and the process that published the served version."""
    import ray

    trainer: Any = ray.remote(WeightsTrainer).options(num_cpus=0).remote(engine.store, engine.lineage + 1)
    fleet = fleet_of(engine)
    before = engine.version + 3
    (report,) = await fleet.apply(await trainer.publish.remote(before, engine.perturb()))
    assert report.weights_version == WeightsVersion(engine.lineage + 1, before)
    calls = Calls(fleet, 4)
    turns: list[Turn] = []

    async def generate() -> None:
        turns.extend(await finished_turns(fleet.generate(requests(4, LONG), session="s"), calls.observe))

    old = copy.deepcopy(engine)
    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_generating(engine, calls.placed)
        replica = (await replicas(engine))[-1]
        assert replica.phase == "serving"
        ray.kill(trainer)
        os.kill(replica.engine_pids[0], signal.SIGKILL)
        # The next engine is up but has no weights, because no process holds any.
        while (last := (await replicas(engine))[-1]).replica == replica.replica or not last.engine_pids:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        assert last.phase in ("starting", "fetching")
        engine.lineage += 2
        await publish(engine)
    assert sorted(calls.completed) == [0, 1, 2, 3]
    assert len(calls.crashes) == 1
    for turn, partial in zip(turns, calls.at_crash, strict=True):
        assert partial is not None
        count = len(partial.response_ids)
        assert 0 < count < LONG
        assert len(turn.response_ids) == LONG
        assert turn.response_ids[:count].tolist() == partial.response_ids.tolist()
        assert turn.rollout_log_probs[:count].tolist() == partial.rollout_log_probs.tolist()
        assert turn.spans == (Span(0, before), Span(count, engine.version))
        np.testing.assert_allclose(partial.rollout_log_probs, old.log_probs(PROMPT, partial), atol=1e-3)
        np.testing.assert_allclose(turn.rollout_log_probs[count:], engine.log_probs(PROMPT, turn)[count:], atol=1e-3)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_replaced(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    calls = Calls(fleet, 2)
    turns: list[Turn] = []

    async def generate() -> None:
        turns.extend(await finished_turns(fleet.generate(requests(2, LONG), session="s"), calls.observe))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_generating(engine, calls.placed)
        replica = (await replicas(engine))[-1]
        os.kill(replica.engine_pids[0], signal.SIGSTOP)
    (crash,) = calls.crashes
    assert "has 2 requests and made no token for 30 s" in crash.message
    for turn, partial in zip(turns, calls.at_crash, strict=True):
        assert partial is not None
        assert turn.response_ids[: len(partial.response_ids)].tolist() == partial.response_ids.tolist()
        assert turn.spans == (Span(0, engine.version),)
        assert len(turn.response_ids) == LONG
    with pytest.raises(ProcessLookupError):
        os.kill(replica.engine_pids[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("applying", [False, True])
async def test_an_engine_that_hangs_while_it_is_idle_is_replaced(engine: EngineProcess, applying: bool) -> None:
    """The engine stays idle, or the fleet asks it to apply a version."""
    fleet = fleet_of(engine)
    await finished_turns(fleet.generate(requests(1, 8), session="s"))
    replica = (await replicas(engine))[-1]
    os.kill(replica.engine_pids[0], signal.SIGSTOP)
    with anyio.fail_after(200):
        if applying:
            (report,) = await fleet.apply(await publish(engine))
            assert report.replica != replica.replica
        while (last := (await replicas(engine))[-1]).replica == replica.replica or last.phase != "serving":  # noqa: ASYNC110
            await anyio.sleep(0.1)
    (error,) = [one.error for one in await replicas(engine) if one.replica == replica.replica]
    assert "its engine did not answer for 30 s (timeouts.engine_s)" in error
    with pytest.raises(ProcessLookupError):
        os.kill(replica.engine_pids[0], 0)
    (turn,) = await finished_turns(fleet.generate(requests(1, 20), session="s"))
    assert turn.spans == (Span(0, engine.version),)
    assert_agrees(engine, turn)


@pytest.mark.slow
async def test_a_hung_replica_is_replaced_and_the_version_is_applied(engine: EngineProcess) -> None:
    fleet = fleet_of(engine)
    calls = Calls(fleet, 2)
    turns: list[Turn] = []

    async def generate() -> None:
        turns.extend(await finished_turns(fleet.generate(requests(2, LONG), session="s"), calls.observe))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_generating(engine, calls.placed)
        replica = (await replicas(engine))[-1]
        os.kill(replica.pid, signal.SIGSTOP)
        with anyio.fail_after(120):
            (report,) = await fleet.apply(await publish(engine))
    assert report.replica != replica.replica
    assert report.version == engine.version
    assert len(calls.crashes) == 1
    assert [len(turn.response_ids) for turn in turns] == [LONG, LONG]

"""The fleet on a scripted Serve handle: retries, final errors, and streams. The tests run no Ray."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import ray

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, DeadlineError, EngineCrashError, InfraError, ReplicaLeftError
from asyncrl.core.ports import (
    Accepted,
    ApplyReport,
    EngineCrashed,
    GenerateRequest,
    GenerationEvent,
    Publication,
    Unplaced,
)
from asyncrl.core.types import FinishReason, Span, Turn
from asyncrl.profiling import ProfilerSettings, profile
from rollouter.serving import fleet as module
from rollouter.serving.client import Delta, EventBatch
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.handles import answer, connect, items, own_log, typed
from rollouter.serving.reward_model import ServedRewardModel
from tests.fakes.engine import finished_turns

DEAD = ray.exceptions.ActorDiedError()


def published(version: int, lineage: int = 0) -> Publication:
    return Publication(version, version, 10, {}, lineage=lineage)


def report(replica: str, version: int, pause_s: float = 0.0, lineage: int = 0) -> ApplyReport:
    return ApplyReport(replica, version, 0.0, pause_s, pause_s, 0, verified=True, lineage=lineage)


class Stream:
    """A streaming call that yields items and raises errors in order, and hangs at None."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.cancelled = False

    async def __anext__(self) -> Any:
        if not self.script:
            raise StopAsyncIteration
        item = self.script.pop(0)
        if item is None:
            await anyio.sleep_forever()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle whose broadcasts and streaming calls have scripted answers."""

    def __init__(self, broadcasts: Sequence[Any] = (), streams: Sequence[Stream] = ()) -> None:
        self.broadcasts = list(broadcasts)
        self.streams = list(streams)
        self.asked: list[str] = []
        self.applied: list[Publication] = []
        self.requests: list[list[GenerateRequest]] = []

    def options(self, *, stream: bool, session_id: str) -> Handle:
        assert stream
        return self

    @property
    def generate_tokens(self) -> Handle:
        return self

    def remote(self, requests: list[GenerateRequest]) -> Stream:
        self.requests.append(requests)
        return self.streams.pop(0)

    def broadcast(self, method: str, *args: Any) -> Handle:
        self.asked.append(method)
        self.applied.extend(arg for arg in args if isinstance(arg, Publication))
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        outcome = self.broadcasts.pop(0)
        if outcome is None:
            await anyio.sleep_forever()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Feed:
    def __init__(self, newest: Publication | None) -> None:
        self.newest = newest

    async def latest(self) -> Publication | None:
        return self.newest


def make(
    monkeypatch: pytest.MonkeyPatch, handle: Handle, *, newest: Publication | None = None, **timeouts: float
) -> ServeFleet:
    async def up(namespace: str, limit_s: float) -> None:
        handle.asked.append("up?")

    monkeypatch.setattr(module.client, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(module.serve, "get_deployment_handle", lambda *args: handle)
    monkeypatch.setattr(module, "replicas_up", up)
    monkeypatch.setattr(module, "find_store", lambda namespace: newest)
    monkeypatch.setattr(module, "ObjectStoreFeed", lambda store, call_s: Feed(store))
    return ServeFleet(Config.model_validate({"timeouts": timeouts}), namespace="run")


async def test_a_controller_that_restarts_does_not_hold_the_event_loop_of_a_rollouter_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(module.serve, "get_deployment_handle", lambda *_: answer.wait(30))
    try:
        for make in (ServeFleet, ServedRewardModel):
            with (
                anyio.fail_after(15),
                pytest.raises(DeadlineError, match=r"controller has not answered within 0\.05 s"),
            ):
                await connect(partial(make, Config(), namespace="run"), 0.05)
    finally:
        answer.set()


async def test_a_replica_that_leaves_does_not_delay_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([[report("a", 3, 0.5), ReplicaLeftError("b is leaving")], [report("a", 3)]])
    reports = await make(monkeypatch, handle).apply(published(3))
    assert reports == [report("a", 3, 0.5)]
    assert handle.asked == ["apply_version", "apply_version"], "nothing waits for a replacement of b"


async def test_a_replica_for_whose_replacement_there_is_no_room_does_not_delay_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    async def no_room(namespace: str, limit_s: float) -> None:
        limits.append(limit_s)
        raise DeadlineError("not replaced")

    handle = Handle([[report("a", 3, 0.5), DEAD], [report("a", 3)]])
    fleet = make(monkeypatch, handle)
    monkeypatch.setattr(module, "replicas_up", no_room)
    assert await fleet.apply(published(3)) == [report("a", 3, 0.5)]
    assert limits == [module.REPLACED_S]


def test_a_replica_on_a_preempted_node_left_as_planned() -> None:
    preempted = ray.exceptions.ActorDiedError()
    preempted._preempted = True
    assert isinstance(typed(preempted, "a call"), ReplicaLeftError)
    assert isinstance(typed(DEAD, "a call"), EngineCrashError)


async def test_apply_is_repeated_until_every_replica_has_the_version_and_returns_the_first_report_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Handle(
        [
            [report("a", 3, 0.5), DEAD],
            RuntimeError("no replica"),
            [],
            [report("a", 3)],
        ]
    )
    reports = await make(monkeypatch, handle).apply(published(3))
    assert reports == [report("a", 3, 0.5)]
    assert handle.asked == ["apply_version", "up?"] * 3 + ["apply_version"]


async def test_apply_reports_only_the_replicas_of_its_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([[report("a", 3, 0.5), InfraError("the load failed")], [report("b", 4), report("c", 3, 0.2)]])
    assert await make(monkeypatch, handle).apply(published(3)) == [report("b", 4), report("c", 3, 0.2)]


async def test_apply_continues_with_a_newer_version_if_its_version_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = report("a", 1, 0.3, lineage=1)
    handle = Handle([[report("a", 3, 0.5), InfraError("its owner is dead")], [newer, report("b", 1, 0.2, lineage=1)]])
    fleet = make(monkeypatch, handle, newest=published(1, lineage=1))
    assert await fleet.apply(published(3)) == [newer, report("b", 1, 0.2, lineage=1)]
    assert handle.applied == [published(3), published(1, lineage=1)]


@pytest.mark.parametrize("raises", [False, True])
async def test_apply_continues_with_its_version_if_the_store_does_not_answer(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()

    def find_store(namespace: str) -> None:
        if raises:
            raise ray.exceptions.GetTimeoutError("there was timeout in getting the actor handle")
        hung.wait()

    handle = Handle([[report("a", 3, 0.5), DEAD], [report("a", 3), report("b", 3, 0.2)]])
    fleet = make(monkeypatch, handle, call_s=0.05)
    monkeypatch.setattr(module, "find_store", find_store)
    try:
        with anyio.fail_after(5):
            assert await fleet.apply(published(3)) == [report("a", 3, 0.5), report("b", 3, 0.2)]
    finally:
        hung.set()


async def test_an_apply_that_times_out_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([None, [report("a", 3, 0.5)]])
    fleet = make(monkeypatch, handle, newest=published(3), start_s=0.03, apply_s=0.02, engine_s=0.01, call_s=0.01)
    assert await fleet.apply(published(3)) == [report("a", 3, 0.5)]


async def test_apply_ends_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([[InfraError("no")]] * 10_000)
    with pytest.raises(InfraError, match="no"):
        await make(monkeypatch, handle, newest=published(3), start_s=0.05).apply(published(3))
    handle = Handle([None] * 10_000)
    monkeypatch.setattr("asyncrl.config.sections.run.PROBE_LIMIT_S", 0.0)
    with pytest.raises(DeadlineError, match=r"not every replica answered within 0\.04 s"):
        await make(monkeypatch, handle, start_s=0.05, apply_s=0.01, engine_s=0.01, call_s=0.01).apply(published(3))


async def test_a_bug_error_of_one_replica_ends_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([[InfraError("no"), BugError("checksums differ")]])
    with pytest.raises(BugError, match="checksums differ"):
        await make(monkeypatch, handle).apply(published(3))


def delta(first: int, count: int, finish: FinishReason = FinishReason.ABORTED) -> Delta:
    ids = np.arange(first, first + count, dtype=np.int32)
    turn = Turn(ids, -ids.astype(np.float32), (Span(0, 1),) if count else (), finish)
    return Delta(0, turn, finish is not FinishReason.ABORTED)


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest("a", np.arange(3, dtype=np.int32), {"max_tokens": max_tokens})


async def test_a_call_past_its_deadline_resumes_on_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Stream(Accepted("a"), [delta(0, 4)], None)
    dying = Stream(Accepted("b"), [delta(4, 2)], DEAD)
    last = Stream(Accepted("c"), [delta(6, 2, FinishReason.LENGTH)])
    # The death of a replica before it accepts the call does not count as a crash.
    handle = Handle(streams=[slow, dying, Stream(DEAD), last])
    events: list[GenerationEvent] = []
    fleet = make(monkeypatch, handle, generate_s=0.05)
    (turn,) = await finished_turns(fleet.generate([request(8)], session="s"), events.append)
    assert turn.response_ids.tolist() == list(range(8))
    assert [(stream.cancelled) for stream in (slow, dying, last)] == [True, False, False]
    assert [len(one.so_far.response_ids) if one.so_far else 0 for (one,) in handle.requests] == [0, 4, 6, 6]
    (crash,) = [event.error for event in events if isinstance(event, EngineCrashed)]
    assert "process is gone" in crash.message and crash.replica == "b"
    # After a crash, the requests count as in flight on the replica until the crash is assessed.
    places = [event for event in events if isinstance(event, Accepted | Unplaced)]
    assert places == [Accepted("a"), Unplaced(), Accepted("b"), Unplaced(), Accepted("c"), Unplaced()]


async def test_cancellation_cancels_the_call_to_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream([delta(0, 4)], None)
    with anyio.move_on_after(0.02) as scope:
        await finished_turns(make(monkeypatch, Handle(streams=[stream])).generate([request(8)], session="s"))
    assert scope.cancelled_caught
    assert stream.cancelled


async def test_events_of_replicas_are_written_by_the_rollouter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile.configure("rollouter", ProfilerSettings("summary", tmp_path / "events"))
    profile.set_position(step=2)

    def event(name: str) -> dict[str, Any]:
        return {"timestamp": 5.0, "event": name, "duration_s": 1.0, "replica": "a"}

    whole = delta(0, 4, FinishReason.LENGTH)
    stream = Stream(Accepted("a"), EventBatch("a", [event("request")]), [whole], EventBatch("a", [event("loop.stall")]))
    applied = replace(report("a", 3), events=(event("sync.load"), event("sync.pause")))
    fleet = make(monkeypatch, Handle([[applied]], [stream]))
    (turn,) = await finished_turns(fleet.generate([request(4)], session="s"))
    assert len(turn.response_ids) == 4
    assert await fleet.apply(published(3)) == [report("a", 3)], "the report no longer has the events"
    profile.flush()
    lines = (tmp_path / "events" / "step_000002" / "replica-a.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["request", "loop.stall", "sync.load", "sync.pause"]


async def test_a_call_cancelled_by_its_replica_is_an_infra_error() -> None:
    stream = Stream(asyncio.CancelledError())
    with pytest.raises(InfraError, match="a call: no answer"):
        await anext(items(stream, "a call", 1.0, "key"))

    async def cancelled() -> None:
        raise asyncio.CancelledError

    class Response:
        def __await__(self) -> Any:
            return cancelled().__await__()

        def cancel(self) -> None: ...

    with pytest.raises(InfraError, match="a call: no answer"):
        await answer(Response(), "a call")


@pytest.mark.skipif(sys.platform != "linux", reason="the test looks up file descriptors as on Linux")
def test_error_messages_name_the_log_files_of_the_process(tmp_path: Path) -> None:
    for name, expected in (("worker-1-2.err", "worker-1-2.out and .err"), ("all.log", "all.log")):
        with (tmp_path / name).open("w") as file:
            assert own_log(file.fileno()) == f"{tmp_path}/{expected}"
    with Path("/dev/null").open("w") as file:
        assert "logs/ of the Ray session" in own_log(file.fileno())


async def test_all_replicas_fall_asleep_also_those_that_are_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle([[None, DEAD], [None, ReplicaLeftError("b is leaving")], [None, None], [None, None]])
    fleet = make(monkeypatch, handle)
    await fleet.sleep()
    assert handle.asked == ["up?", "sleep_engine"] * 3
    await fleet.wake()
    assert handle.asked[6:] == ["up?", "wake_engine"]


async def test_a_replica_that_never_falls_asleep_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match="it does not sleep"):
        await make(monkeypatch, Handle([[InfraError("it does not sleep")]] * 10_000), start_s=0.05).sleep()
    with pytest.raises(BugError):
        await make(monkeypatch, Handle([[BugError("wrong weights")]])).sleep()

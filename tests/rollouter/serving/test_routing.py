"""Replica affinity of sessions and outstanding tokens: alone, in the router without a cluster, and on a real Ray Serve
with a deployment that returns the name of its replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ray.exceptions import ActorDiedError
from ray.serve.request_router import PendingRequest, RequestRouter

from asyncrl.core.ports import GenerateRequest
from benchmarks.routing import ReplicaSpeed, SimulatedReplica, make_router
from rollouter.serving.balancing import AFFINITY_S, LentShare, OutstandingTokens, ReplicaAffinity, affinity_key
from rollouter.serving.options import ROUTER
from rollouter.serving.ray_internals import RequestMetadata, choose_replica
from rollouter.serving.routing import call_size
from tests.fakes.samples import make_turn

pytestmark = pytest.mark.timeout(120)


def test_a_session_stays_on_its_replica_while_the_replica_is_available() -> None:
    affinity = ReplicaAffinity()
    assert affinity.find("sample_0_1", {"a", "b"}) is None
    affinity.assign("sample_0_1", "b")
    assert affinity.find("sample_0_1", {"a", "b"}) == "b"
    assert affinity.find("sample_0_2", {"a", "b"}) is None
    assert affinity.find("sample_0_1", {"a"}) is None
    affinity.assign("sample_0_1", "a")
    assert affinity.find("sample_0_1", {"a", "b"}) == "a"


def test_conversations_of_a_sample_share_a_replica() -> None:
    affinity = ReplicaAffinity()
    affinity.assign("sample_0_1/0", "a")
    assert affinity.find("sample_0_1/7", {"a"}) == "a"
    assert affinity_key("val_3_7_try_2") != affinity_key("val_3_7"), "another try may go to another replica"


def test_the_least_recently_used_sessions_are_forgotten() -> None:
    affinity = ReplicaAffinity(max_keys=2)
    affinity.assign("one", "a")
    affinity.assign("two", "a")
    assert affinity.find("one", {"a"}) == "a"
    affinity.assign("three", "a")
    assert affinity.find("one", {"a"}) == "a" and affinity.find("two", {"a"}) is None


def test_a_sample_is_forgotten_some_time_after_its_last_call() -> None:
    now = 0.0
    affinity = ReplicaAffinity(clock=lambda: now)
    affinity.assign("ended", "a")
    affinity.assign("slow", "a")
    now = AFFINITY_S
    assert affinity.find("slow", {"a"}) == "a"
    now = 1.5 * AFFINITY_S
    affinity.assign("new", "a")
    assert affinity.find("ended", {"a"}) is None and affinity.find("slow", {"a"}) == "a"


def test_a_session_without_a_name_has_no_affinity() -> None:
    affinity = ReplicaAffinity()
    affinity.assign("", "a")
    assert affinity.find("", {"a"}) is None


def test_the_longest_context_that_went_to_a_replica_is_known() -> None:
    affinity = ReplicaAffinity()
    affinity.assign("sample_0_1/0", "a", 500)
    affinity.assign("sample_0_1/1", "a", 300)
    assert affinity.cached("sample_0_1/2", "a") == 500
    assert affinity.cached("sample_0_1/2", "b") == 0
    affinity.assign("sample_0_1/0", "b")
    assert affinity.cached("sample_0_1/2", "b") == 0, "the cache of the other replica does not move"


# --------------------------------------------------------------------------------------------- outstanding tokens


def request(prompt: int, max_tokens: int, so_far: int | None = None) -> GenerateRequest:
    turn = None if so_far is None else make_turn(0, so_far)
    return GenerateRequest("r", np.zeros(prompt, np.int32), {"max_tokens": max_tokens}, so_far=turn)


def test_calls_go_to_lent_replicas_in_proportion_while_these_are_open() -> None:
    share, stack = LentShare({"own": 3, "lent": 1}), ExitStack()

    def call(session: str) -> str:
        part = share.choose(session)
        stack.enter_context(share.running(part, 4))
        return part

    with stack:
        assert {call(f"before_{number}/0") for number in range(6)} == {"own"}
        share.is_open = True
        assert [call(f"new_{number}/0") for number in range(2)] == ["lent", "lent"], "they have nothing to do yet"
        assert Counter(call(f"more_{number}/0") for number in range(80))["lent"] == 20
        assert (share.choose("before_0/1"), share.choose("new_0/1")) == ("own", "lent"), "they have the KV cache"
        share.is_open = False
        assert {share.choose(f"new_{number}/0") for number in range(2)} == {"own"}
        share.is_open = True
        assert share.choose("new_0/0") == "own", "it has the longer KV cache by now"
    assert share.choose("idle/0") == "own"


def test_a_call_counts_its_prompt_once_and_what_its_responses_may_still_have() -> None:
    size = call_size([[request(100, 50), request(100, 50, so_far=20)]], 1000)
    assert size == (120, 80)
    assert size.outstanding(cached=0) == 200
    assert size.outstanding(cached=100) == 100
    assert size.outstanding(cached=500) == 80


@pytest.mark.parametrize("limit", [None, -5, 0, 10**12, "many", float("nan")])
def test_a_call_from_outside_counts_at_most_the_context_of_the_model(limit: Any) -> None:
    assert call_size([SimpleNamespace(max_tokens=limit, prompt="x")], 1000) == (0, 1000)
    assert call_size([SimpleNamespace(max_completion_tokens=limit, max_tokens=7)], 1000) == (0, 7)
    assert call_size([], 1000) == (0, 1000)


REPLICAS = ("a", "b", "c")


@dataclass
class ModelCall:
    name: int
    reserved: tuple[str, int] | None = None
    tries: list[tuple[str, int]] = field(default_factory=list)


class OutstandingMachine(RuleBasedStateMachine):
    """Calls that Serve chooses, sends, sends again, and ends in any order, against the list of open calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = OutstandingTokens()
        self.calls: list[ModelCall] = []

    def _draw(self, data: st.DataObject, calls: list[ModelCall]) -> ModelCall:
        return data.draw(st.sampled_from(calls))

    @rule()
    def arrive(self) -> None:
        self.calls.append(ModelCall(len(self.calls)))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS), size=st.integers(0, 50))
    def choose(self, data: st.DataObject, replica: str, size: int) -> None:
        call = self._draw(data, self.calls)
        self.tokens.add(call.name, replica, size)
        call.reserved = replica, size

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def send(self, data: st.DataObject, replica: str) -> None:
        call = self._draw(data, self.calls)
        self.tokens.sent(call.name, replica, str(call.name))
        if call.reserved is not None:
            call.tries.append((replica, call.reserved[1]))
            call.reserved = None

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel_while_routing(self, data: st.DataObject) -> None:
        call = self._draw(data, self.calls)
        self.tokens.abandon(call.name)
        call.reserved = None

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def end(self, data: st.DataObject, replica: str) -> None:
        call = self._draw(data, self.calls)
        self.tokens.finish(replica, str(call.name))
        if (oldest := next((one for one in call.tries if one[0] == replica), None)) is not None:
            call.tries.remove(oldest)

    @rule(replica=st.sampled_from(REPLICAS))
    def die(self, replica: str) -> None:
        self.tokens.drop(replica)
        for call in self.calls:
            call.tries = [one for one in call.tries if one[0] != replica]

    @invariant()
    def the_sum_is_that_of_the_open_calls(self) -> None:
        expected: Counter[str] = Counter()
        for call in self.calls:
            for replica, size in [*call.tries, *([call.reserved] if call.reserved is not None else [])]:
                expected[replica] += size
        assert [self.tokens.of(replica) for replica in REPLICAS] == [expected[replica] for replica in REPLICAS]
        assert self.tokens.total() == expected.total() >= 0
        ordered = self.tokens.least(REPLICAS, 2)
        assert [expected[replica] for replica in ordered] == sorted(expected[replica] for replica in REPLICAS)[:2]


TestOutstandingTokens = OutstandingMachine.TestCase
TestOutstandingTokens.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -------------------------------------------------------------------------------------- the router without a cluster


def routed(replicas: int = 4) -> tuple[Any, list[SimulatedReplica]]:
    router = make_router("sessions", lambda: 0.0, max_model_len=1000)
    found = [SimulatedReplica(f"replica-{number}", ReplicaSpeed(), lambda: 0.0) for number in range(replicas)]
    router.update_replicas(found)
    return router, found


def pending(name: str, *requests: GenerateRequest) -> PendingRequest:
    metadata = RequestMetadata(name, name, session_id=name)
    return PendingRequest([list(requests) or [request(10, 100)]], {}, metadata)


async def chosen(router: RequestRouter, call: PendingRequest) -> str:
    replica: str = (await choose_replica(router, call)).replica_id.unique_id
    return replica


async def test_new_sessions_of_one_moment_are_spread_and_groups_stay_together() -> None:
    router, _ = routed()
    names = [f"sample_0_{sample}/{number}" for number in range(3) for sample in range(8)]
    replicas = await asyncio.gather(*(chosen(router, pending(name)) for name in names))
    by_sample = dict(zip(names[:8], replicas[:8], strict=True))
    assert set(Counter(by_sample.values()).values()) == {2}, "each choice sees those before it"
    assert replicas == replicas[:8] * 3


async def test_a_group_counts_more_than_a_call_of_one_request() -> None:
    router, _ = routed(2)
    group = await chosen(router, pending("sample_0_1", *[request(10, 100)] * 8))
    others = [await chosen(router, pending(f"sample_0_{number}")) for number in range(2, 8)]
    assert group not in others, "Serve's own load would be one call against up to six"


async def test_every_moment_at_which_a_caller_is_cancelled_leaves_no_tokens() -> None:
    router, _ = routed()
    await asyncio.sleep(0)
    moments = Counter[str]()
    for steps in range(12):
        call = pending(f"sample_0_{steps}")
        task = asyncio.create_task(choose_replica(router, call))
        for _ in range(steps):
            await asyncio.sleep(0)
        before = router.outstanding.total()
        moments["sent" if task.done() else "reserved" if before else "waiting"] += 1
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        if not task.cancelled():
            assert router.outstanding.total() == 110
            router.on_request_completed(task.result().replica_id, f"sample_0_{steps}")
        assert router.outstanding.total() == 0, f"cancelled after {steps} steps of the event loop"
    assert set(moments) == {"waiting", "reserved", "sent"}, moments


async def test_a_caller_that_is_cancelled_while_no_replica_is_up_leaves_no_tokens() -> None:
    router = make_router("sessions", lambda: 0.0, max_model_len=1000)
    task = asyncio.create_task(choose_replica(router, pending("sample_0_1")))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert task.cancelled() and router.outstanding.total() == 0
    router.update_replicas([SimulatedReplica("late", ReplicaSpeed(), lambda: 0.0)])
    await asyncio.sleep(0.01)
    assert router.outstanding.total() == 0


async def test_a_retry_at_the_same_replica_ends_with_its_own_report() -> None:
    router, replicas = routed(1)
    call = pending("sample_0_1")
    await chosen(router, call)
    await router._choose_replica_for_request(call, is_retry=True)
    first = router.outstanding.total()
    router.on_request_completed(replicas[0].replica_id, "sample_0_1")
    assert 0 < router.outstanding.total() < first, "the report of the first try arrives after the second began"
    router.on_request_completed(replicas[0].replica_id, "sample_0_1")
    assert router.outstanding.total() == 0


async def test_the_calls_of_a_dead_replica_are_forgotten_and_its_sessions_move() -> None:
    router, replicas = routed(2)
    gone = await chosen(router, pending("sample_0_1/0"))
    dead = next(replica for replica in replicas if replica.name == gone)
    router.on_replica_actor_died(dead.replica_id)
    assert router.outstanding.total() == 0
    moved = await chosen(router, pending("sample_0_1/1"))
    assert moved != gone
    router.on_request_completed(dead.replica_id, "sample_0_1/0")
    assert router.outstanding.of(moved) == 110 == router.outstanding.total()


async def test_a_replica_that_dies_while_it_is_chosen_is_replaced_by_the_second_choice() -> None:
    class Dead(SimulatedReplica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            raise ActorDiedError()

    router = make_router("sessions", lambda: 0.0, max_model_len=1000)
    alive = SimulatedReplica("alive", ReplicaSpeed(), lambda: 0.0)
    for number in range(5):
        router.update_replicas([alive, Dead(f"dead-{number}", ReplicaSpeed(), lambda: 0.0)])
        assert await chosen(router, pending(f"sample_0_{number}")) == "alive"
        assert router.outstanding.of("alive") == router.outstanding.total() == 110 * (number + 1)


# ------------------------------------------------------------------------------------------------------- Ray Serve


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

    class Where:
        async def where(self) -> str:
            await asyncio.sleep(0.01)
            return serve.get_replica_context().replica_id.unique_id

        async def wait(self) -> None:
            await asyncio.sleep(60)

        async def end(self) -> None:
            import os

            os._exit(1)

    deployment = serve.deployment(
        num_replicas=3,
        max_ongoing_requests=1000,
        request_router_config={"request_router_class": ROUTER, "request_router_kwargs": {"max_model_len": 1000}},
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
    )(Where)
    serve.start(proxy_location="Disabled")
    yield serve.run(deployment.bind(), name="where", route_prefix=None)
    serve.shutdown()
    ray.shutdown()


async def test_serve_keeps_sessions_on_their_replicas(handle: Any) -> None:
    async def where(session: str) -> str:
        replica: str = await handle.options(session_id=session).where.remote()
        return replica

    from ray.exceptions import RayError

    with anyio.fail_after(100):
        names = [f"sample_0_{number}" for number in range(48)]
        replicas = dict(zip(names, await asyncio.gather(*map(where, names)), strict=True))
        # The router may not know every replica yet when the first sessions arrive.
        assert len(set(replicas.values())) >= 2, f"sessions are spread: {Counter(replicas.values())}"
        asked = [f"{name}/{turn}" for turn in range(8) for name in names]
        answers = await asyncio.gather(*map(where, asked))
        assert answers == [replicas[name.partition("/")[0]] for name in asked], (
            "sessions stay on their replicas under concurrent requests"
        )
        gone = replicas[names[0]]
        with pytest.raises(RayError):
            await handle.options(session_id=names[0]).end.remote()
        moved = await where(names[0])
        assert moved != gone and {await where(names[0]) for _ in range(5)} == {moved}


async def test_serve_reports_the_end_of_every_call(handle: Any) -> None:
    """Answered calls, failed ones, and callers that are cancelled before, while and after Serve routes their calls."""
    await handle.where.remote()
    outstanding: OutstandingTokens = handle._router._asyncio_router.request_router.outstanding

    async def cancelled(number: int) -> None:
        response = handle.options(session_id=f"sample_1_{number}").wait.remote()
        task = asyncio.ensure_future(_result(response))
        await asyncio.sleep(0.002 * number)
        response.cancel()
        task.cancel()
        await asyncio.wait([task])

    async def failing() -> None:
        with pytest.raises(Exception, match="unexpected"):
            await handle.where.remote(unexpected=1)

    with anyio.fail_after(100):
        running = asyncio.ensure_future(_result(handle.options(session_id="sample_1").wait.remote()))
        while not outstanding.total():  # noqa: ASYNC110  Serve's thread sends no event
            await asyncio.sleep(0.01)
        await asyncio.gather(*map(cancelled, range(40)), *(failing() for _ in range(5)))
        running.cancel()
        while outstanding.total():  # noqa: ASYNC110  Serve's thread sends no event
            await asyncio.sleep(0.05)


async def _result(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise

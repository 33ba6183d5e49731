"""The rounds of GPU broadcasts: who takes part, which calls reach whom, deadlines, and what a failure ends.

Time is virtual and every test runs in several orders of the callbacks (`tests.fuzz.loop`).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import FencedError, InfraError
from asyncrl.core.ports import WeightsVersion
from asyncrl.weights.broadcast import RANK_ZERO, BroadcastMember, BroadcastRelay
from tests.fuzz.loop import run as run_virtually

V0, V1, V2 = (WeightsVersion(0, number) for number in range(3))
CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
MEET_S, LIMIT_S = 10.0, 100.0


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test with a virtual clock, and with callbacks in ten random orders."""

    @wraps(test)
    def run(**given: Any) -> None:
        for seed in range(10):
            run_virtually(lambda: test(Rig(), **given), seed)

    parameters = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest passes the rest
    return run


class Rig:
    """A relay with two replicas, of which `b` has two workers."""

    def __init__(self) -> None:
        self.relay = BroadcastRelay()
        self.members = [BroadcastMember("b", 2, V0), BroadcastMember("a", 1, V0)]
        self.calls: list[tuple[str, str]] = []
        """Who has been asked for what, and when rank 0 had the answers of all."""

    async def open(self, version: WeightsVersion = V1) -> str:
        return await self.relay.open_round(version, self.members, 0, MEET_S, LIMIT_S)

    async def rank_zero(self, lineage: int = 0, upto: int = len(CALLS)) -> None:
        """Take part in one round, with the first `upto` calls."""
        found = await self.relay.next_round(lineage, 2 * MEET_S)
        if found is None:
            return
        assert await self.relay.join_round(found.weights_version, RANK_ZERO) == 0
        for method in CALLS[:upto]:
            await self.relay.call_engines(found.weights_version, method, {"names": [method]})
            self.calls.append((RANK_ZERO, method))

    async def replica(self, name: str, version: WeightsVersion = V1) -> None:
        """Take part in the round. As in vLLM's protocol, it finishes by itself once it has made `update_weights`."""
        assert await self.relay.join_round(version, name) == {"a": 1, "b": 2}[name]
        method, number = "", 0
        while method != "update_weights":
            call = await self.relay.next_call(version, name, number)
            method, number = call.method, number + 1
            assert call.info == {"names": [method]} and 0 < call.limit_s <= LIMIT_S
            self.calls.append((name, method))
        await self.relay.record_calls(version, name, number + 1)

    async def complete(self, version: WeightsVersion) -> None:
        """Open a round and run it to its end."""
        assert await self.open(version) == ""
        found = await together(
            rank=self.rank_zero(version.lineage), a=self.replica("a", version), b=self.replica("b", version)
        )
        assert found == dict.fromkeys(("rank", "a", "b")) and self.relay.fallback == ""


async def together(**calls: Awaitable[Any]) -> dict[str, Any]:
    """Await calls concurrently, and return the answer or error of each."""
    answers: dict[str, Any] = {}

    async def answer(name: str, call: Awaitable[Any]) -> None:
        try:
            answers[name] = await call
        except InfraError as error:
            answers[name] = error.message

    async with anyio.create_task_group() as group:
        for name, call in calls.items():
            group.start_soon(answer, name, call)
    return answers


async def later(call: Awaitable[Any], seconds: float = 1.0) -> Any:
    await anyio.sleep(seconds)
    return await call


@virtual
async def test_rank_zero_calls_all_replicas_one_call_after_the_other(rig: Rig) -> None:
    await rig.complete(V1)
    for method in CALLS[:3]:
        asked = [{rig.calls.pop(0), rig.calls.pop(0)}, rig.calls.pop(0)]
        assert asked == [{("a", method), ("b", method)}, (RANK_ZERO, method)]
    assert rig.calls == [(RANK_ZERO, "finish_weight_update")]
    assert anyio.current_time() == 0.0


@pytest.mark.parametrize("missing", ["b", "rank"])
@virtual
async def test_a_round_without_all_members_fails_for_those_who_wait(rig: Rig, missing: str) -> None:
    assert await rig.open() == ""
    calls = {"rank": rig.rank_zero(), "a": rig.replica("a"), "b": rig.replica("b")}
    calls.pop(missing).close()
    answers = await together(**calls)
    name = {"b": "b", "rank": RANK_ZERO}[missing]
    assert answers["a"] == rig.relay.fallback == f"{name} did not take part within 10 s"
    assert anyio.current_time() == MEET_S
    if missing == "rank":
        assert await rig.open(V2) == "rank 0 of the Trainer does not take part any more"
        assert await rig.relay.next_round(0, 0.0) is None
    await rig.complete(V2)


@virtual
async def test_a_trainer_that_dies_while_it_waits_for_a_round_does_not_let_one_begin(rig: Rig) -> None:
    """Ray does not end its calls to the store."""
    answers = await together(
        ghost=rig.relay.next_round(0, 30.0),
        opened=later(rig.open()),
        a=later(rig.replica("a"), 2.0),
        b=later(rig.replica("b"), 2.0),
    )
    assert answers["a"] == answers["b"] == "rank 0 of the Trainer did not take part within 10 s"
    assert rig.calls == []


@virtual
async def test_a_replica_that_joined_after_the_round_was_opened_is_no_member(rig: Rig) -> None:
    assert await rig.open() == ""
    with pytest.raises(InfraError, match="c was not there when the round"):
        await rig.relay.join_round(V1, "c")
    with pytest.raises(InfraError, match="there is no round for"):
        await rig.relay.join_round(V2, "a")
    await together(rank=rig.rank_zero(), a=rig.replica("a"), b=rig.replica("b"))
    assert rig.relay.fallback == ""


@virtual
async def test_replicas_that_serve_the_version_are_no_members_and_silent_ones_prevent_a_round(rig: Rig) -> None:
    rig.members.append(BroadcastMember("c", 1, V1))
    await rig.complete(V1)
    rig.members = [member._replace(weights_version=V1) for member in rig.members]
    assert await rig.open() == "all replicas serve the version already"
    assert rig.relay.fallback == "", "nothing has to be sent"
    problem = await rig.relay.open_round(V2, rig.members, 1, MEET_S, LIMIT_S)
    assert problem == rig.relay.fallback == "1 of 4 replicas did not answer"


@virtual
async def test_a_late_replica_ends_broadcasts_until_a_newer_trainer_appears(rig: Rig) -> None:
    assert await rig.open() == ""
    silent = rig.relay.join_round(V1, "b")
    answers = await together(rank=rig.rank_zero(), a=rig.replica("a"), b=silent)
    problem = "b did not make the call init_weight_transfer_engine within 100 s"
    assert answers == {"rank": problem, "a": problem, "b": 2}
    assert anyio.current_time() == LIMIT_S
    assert await rig.open(V2) == rig.relay.fallback == problem
    assert await rig.relay.next_round(0, 0.0) is None, "the same Trainer does not turn them on again"
    assert await rig.open(V2) == problem
    assert await rig.relay.next_round(1, 0.0) is None
    assert await rig.open(V2) == "a Trainer of lineage 1 has taken over"
    await rig.complete(WeightsVersion(1, 2))
    with pytest.raises(FencedError, match="a Trainer of lineage 1 has replaced that of lineage 0"):
        await rig.relay.next_round(0, 0.0)
    await rig.relay.end_rounds(0, "an old Trainer failed")
    await rig.complete(WeightsVersion(1, 3))
    await rig.relay.end_rounds(1, "this Trainer failed")
    assert await rig.open(WeightsVersion(1, 4)) == "this Trainer failed"


@virtual
async def test_a_failure_of_one_reaches_everyone_at_once(rig: Rig) -> None:
    async def fail() -> None:
        await rig.relay.join_round(V1, "b")
        await rig.relay.next_call(V1, "b", 0)
        await rig.relay.fail_round(V2, "the report of another round")
        await rig.relay.fail_round(V1, "replica b: NCCL error")

    assert await rig.open() == ""
    answers = await together(rank=rig.rank_zero(), a=rig.replica("a"), b=fail())
    assert answers == {"rank": "replica b: NCCL error", "a": "replica b: NCCL error", "b": None}
    assert anyio.current_time() == 0.0
    assert await rig.open(V2) == "replica b: NCCL error"


@virtual
async def test_a_replica_that_leaves_before_the_round_begins_ends_only_this_round(rig: Rig) -> None:
    assert await rig.open() == ""
    waiting = {"a": rig.replica("a"), "b": rig.replica("b")}
    answers = await together(**waiting, left=later(rig.relay.fail_round(V1, "replica b: CancelledError")))
    assert answers["a"] == rig.relay.fallback == "replica b: CancelledError"
    assert anyio.current_time() == 1.0
    await rig.complete(V2)


@virtual
async def test_a_new_trainer_ends_the_round_of_the_one_that_died_in_it(rig: Rig) -> None:
    assert await rig.open() == ""
    died = rig.rank_zero(upto=2)
    new = later(rig.relay.next_round(1, 0.0), 5.0)
    answers = await together(died=died, a=rig.replica("a"), b=rig.replica("b"), new=new)
    assert answers["a"] == answers["b"] == "a Trainer of lineage 1 has taken over"
    assert anyio.current_time() == 5.0
    rig.calls.clear()
    await rig.complete(WeightsVersion(1, 2))


@virtual
async def test_the_next_round_waits_until_rank_zero_has_ended_the_earlier_one(rig: Rig) -> None:
    await rig.open()
    await together(rank=rig.rank_zero(upto=3), a=rig.replica("a"), b=rig.replica("b"))
    answers = await together(
        opened=rig.open(V2), end=later(rig.relay.call_engines(V1, "finish_weight_update", {}), MEET_S / 2)
    )
    assert answers == {"opened": "", "end": None}
    assert anyio.current_time() == MEET_S / 2
    await together(rank=rig.rank_zero(upto=3), a=rig.replica("a", V2), b=rig.replica("b", V2))
    assert "has not ended" in await rig.open(WeightsVersion(0, 3)), "it does not wait for long"
    assert anyio.current_time() == MEET_S / 2 + MEET_S


@virtual
async def test_only_a_newer_round_replaces_one_that_has_not_begun(rig: Rig) -> None:
    assert await rig.open() == ""
    answers = await together(a=rig.replica("a"), later=later(rig.complete(V2)))
    assert "was opened instead" in answers["a"]
    assert await rig.open(WeightsVersion(0, 3)) == ""
    assert "was opened instead" in await rig.open(V2)
    await together(
        rank=rig.rank_zero(),
        a=rig.replica("a", WeightsVersion(0, 3)),
        b=rig.replica("b", WeightsVersion(0, 3)),
    )
    assert rig.relay.fallback == ""


@pytest.mark.parametrize("seed", range(200))
def test_whoever_stops_anywhere_the_others_end_in_time_and_agree(seed: int) -> None:
    """One of the three stops after a random time, silently or with a report. No one waits beyond the deadlines, and a
    round counts as done only if all replicas have finished."""
    rng = random.Random(seed)
    victim, at_s, reports = rng.choice(["rank", "a", "b", ""]), rng.uniform(0.0, 12.0), rng.random() < 0.5
    ended: dict[str, str] = {}

    async def main() -> None:
        rig = Rig()
        relay = rig.relay
        genuine = relay.next_call, relay.call_engines

        async def slow(call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
            await anyio.sleep(rng.uniform(0.0, 3.0))
            return await call(*args)

        relay.next_call, relay.call_engines = (lambda *args, call=call: slow(call, *args) for call in genuine)  # type: ignore[method-assign, assignment]

        async def part(name: str, work: Awaitable[None]) -> None:
            with anyio.CancelScope() as scope:
                if name == victim:
                    scope.deadline = anyio.current_time() + at_s
                try:
                    await work
                    ended[name] = "done"
                except InfraError as error:
                    ended[name] = error.message
            if scope.cancelled_caught:
                ended[name] = "stopped"
                if reports:
                    await relay.fail_round(V1, "stopped") if name != "rank" else await relay.end_rounds(0, "stopped")

        assert await rig.open() == ""
        async with anyio.create_task_group() as group:
            for name, work in (("rank", rig.rank_zero()), ("a", rig.replica("a")), ("b", rig.replica("b"))):
                group.start_soon(part, name, work)
        # Every call of the relay takes up to 3 s here, so the round itself takes up to 24 s.
        assert anyio.current_time() <= (36.0 if reports else MEET_S + LIMIT_S + 3.0)
        assert set(ended) == {"rank", "a", "b"}
        is_done = ended["rank"] == "done"
        if is_done:
            assert ended == dict.fromkeys(("rank", "a", "b"), "done") and relay.fallback == ""
        elif ended["a"] == ended["b"] == "done":
            return  # rank 0 stopped in its last call, for which no replica waits
        else:
            assert relay.fallback and {*ended.values()} <= {"done", "stopped", relay.fallback}
        if rig.calls and not is_done:
            assert await rig.open(V2) == relay.fallback, "a failure in a running round ends all further ones"

    run_virtually(main, seed)

"""The requests and the table of the benchmark of replicas that join and leave."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import EngineCrashError
from asyncrl.core.ports import Accepted, EngineCrashed, TurnFinished, TurnProgress, WantedReplicas
from benchmarks.elastic import FRESH_S, ClosedLoop, TimedRequest, _reach, main, table

TURN: Any = None


class Fleet:
    """Gives every request the same events, and changes the fleet's name after some requests."""

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.load: ClosedLoop | None = None
        self.names = iter(("constant, 1", "changing", "changing", None))
        self.sessions: list[str] = []

    async def generate(self, requests: Any, *, session: str) -> AsyncGenerator[Any, None]:
        assert self.load is not None
        self.sessions.append(session)
        for event in self.events:
            await anyio.lowlevel.checkpoint()
            yield event
        if (name := next(self.names)) is None:
            await anyio.sleep_forever()
        self.load.now = name


async def test_requests_that_end_under_another_fleet_than_they_started_with_do_not_count() -> None:
    fleet: Any = Fleet(Accepted("a"), TurnProgress(0, TURN), Accepted("b"), TurnFinished(0, TURN))
    fleet.load = load = ClosedLoop(fleet, 10)
    load.now = "constant, 1"
    async with anyio.create_task_group() as group:
        group.start_soon(load.call)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert [one.fleet for one in load.done] == ["constant, 1", "changing"], "the second request saw the change"
    assert all(one.replicas == ["a", "b"] and one.moved and len(one.tokens_at) == 2 for one in load.done)
    assert len(set(fleet.sessions)) == 4


async def test_a_crash_ends_the_measurement() -> None:
    fleet: Any = Fleet(Accepted("a"), EngineCrashed(EngineCrashError("the engine died")))
    fleet.load = load = ClosedLoop(fleet, 10)
    with pytest.raises(EngineCrashError, match="the engine died"):
        await load.call()
    assert load.done == []


def test_the_table_has_a_row_for_each_fleet_and_one_for_those_that_moved_while_it_changed() -> None:
    one, changing = "constant, 1", "changing"
    requests = [
        TimedRequest(0.0, one, ["a"], [1.0, 2.0]),
        TimedRequest(0.0, one, ["a"], [1.0, 4.0]),
        TimedRequest(0.0, changing, ["a"], [1.0]),
        TimedRequest(0.0, changing, ["a", "b"], [1.0, 6.0]),
        TimedRequest(0.0, "", ["a", "b"], [90.0]),  # while the first fleets were set up
    ]
    rows = {row["fleet"]: row for row in table(requests, (one, "constant, 2", changing))}
    assert list(rows) == [one, "constant, 2", changing, "of these, moved"]
    assert (rows[one]["p50_s"], rows[one]["worst_s"], rows[one]["worst_gap_s"]) == (3.0, 4.0, 3.0)
    assert set(rows["constant, 2"].values()) == {"constant, 2", 0, None}, "a row without requests is valid JSON"
    assert (rows[changing]["requests"], rows[changing]["moved"], rows[changing]["p99_s"]) == (2, 1, pytest.approx(5.95))
    assert (rows["of these, moved"]["requests"], rows["of these, moved"]["worst_gap_s"]) == (1, 5.0)


async def test_a_number_of_replicas_is_reached_once_exactly_so_many_serve() -> None:
    def replica(phase: str = "serving", age_s: float = 0.0) -> Any:
        return SimpleNamespace(phase=phase, reported_at=100.0 - age_s)

    answers = [
        [replica()],
        [replica(), replica("starting")],
        [replica(), replica(), replica()],
        [replica(), replica(), replica(age_s=FRESH_S + 1)],
        [],  # not asked for
    ]
    wanted: list[WantedReplicas] = []

    async def want(decision: WantedReplicas) -> None:
        wanted.append(decision)

    async def status() -> Any:
        return SimpleNamespace(at=100.0, replicas=answers.pop(0))

    store = SimpleNamespace(want_replicas=SimpleNamespace(remote=want), status=SimpleNamespace(remote=status))
    with anyio.fail_after(30):
        await _reach(store, 3, 2)
    assert (wanted, answers) == ([WantedReplicas(3, 2)], [[]])


def test_one_replica_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["elastic", "--replicas", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "one replica always stays" in capsys.readouterr().err

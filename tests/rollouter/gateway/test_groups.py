"""Groups of external agents on a fake fleet, over the real HTTP side."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.core.trajectory import SampleRequest
from asyncrl.core.types import SampleId, Turn
from rollouter.gateway.task import AgentTask
from rollouter.group import GroupGeneration, own_sessions
from tests.fakes.gateway_agent import GatewayRig


def group(rig: GatewayRig, *, n: int, extra: int = 0) -> SampleRequest:
    sampling = {"max_tokens": 50, "temperature": 1.0}
    return SampleRequest(SampleId(0, 1), rig.prompt(), sampling, n, extra=extra)


async def test_each_trajectory_is_a_run_of_the_agent() -> None:
    rig = GatewayRig()
    fleet, turns = rig.fleet("12"), dict[str, Turn]()
    agent = rig.made(lambda task: rig.talk(task))
    made = await GroupGeneration(group(rig, n=3), fleet=fleet, agent=agent, turns=turns).run()
    assert [one.scores["agent"] for one in made] == [0.0, 1.0, 2.0]
    assert [len(one.turns) for one in made] == [2, 2, 2] and len({task.api_key for task in rig.tasks}) == 3
    assert sorted(fleet.sessions) == sorted(f"sample_0_1/{k}" for k in range(3) for _ in range(2))
    assert {request.sampling["max_tokens"] for request in fleet.requests} == {50}
    assert sorted(key.split(".")[0] for key in turns) == ["0", "0", "1", "1", "2", "2"]


async def test_logged_turns_are_not_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sessions end with the trajectories. A worker may have been lost before it could report that."""
    rig = GatewayRig()
    ended: list[str] = []
    turns, fleet = dict[str, Turn](), rig.fleet("12")
    agent = rig.made(lambda task: rig.talk(task))
    (first,) = await GroupGeneration(group(rig, n=1), fleet=fleet, agent=agent, turns=turns).run()
    idle, sessions = rig.fleet("99"), own_sessions()
    monkeypatch.setattr(sessions, "end", ended.append)
    (again,) = await GroupGeneration(group(rig, n=1), fleet=idle, agent=agent, turns=turns, sessions=sessions).run()
    assert idle.requests == [] and ended == ["sample_0_1/0"]
    assert again.rows[0].response_ids.tolist() == first.rows[0].response_ids.tolist()


async def test_agents_of_surplus_trajectories_are_ended() -> None:
    rig = GatewayRig()
    ended: list[int] = []

    async def agent(task: AgentTask) -> float:
        if task.trajectory == 1:
            try:
                await rig.question(task)
                await anyio.sleep_forever()
            finally:
                ended.append(task.trajectory)
        return await rig.talk(task)

    agents = rig.made(agent)
    with anyio.fail_after(10):
        made = await GroupGeneration(group(rig, n=2, extra=1), fleet=rig.fleet("12"), agent=agents).run()
    assert [one.scores["agent"] for one in made] == [0.0, 2.0] and ended == [1]
    late = await agents.gateway.answer(rig.tasks[1].api_key, "models", {})
    assert late.status == 409

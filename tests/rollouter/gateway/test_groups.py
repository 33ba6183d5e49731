"""Groups of agents on a fake fleet, over the real HTTP side: turns are the fleet's, surplus ones are ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from asyncrl.core.ports import GenerateRequest
from asyncrl.core.types import SampleId, Turn
from rollouter.gateway.task import AgentTask
from rollouter.group import GroupRequest, generate_group
from tests.fakes.engine import FakeFleet
from tests.fakes.gateway_agent import MODEL, QUESTION, GatewayRig


def group(rig: GatewayRig, *, n: int, extra: int = 0) -> GroupRequest:
    sampling = {"max_tokens": 50, "temperature": 1.0}
    return GroupRequest("sample_0_1", SampleId(0, 1), rig.prompt(), sampling, n, extra=extra)


def fleet_of(rig: GatewayRig, text: str, **more: Any) -> FakeFleet:
    def answer(request: GenerateRequest) -> Sequence[int]:
        return [*rig.cache.tokens(text), rig.tokenizer.eos_token_id][: request.sampling["max_tokens"]]

    return FakeFleet(answer=answer, **more)


async def asks_twice(rig: GatewayRig, task: AgentTask) -> float:
    client = rig.client(task)
    messages: list[Any] = [QUESTION]
    for _ in range(2):
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "1"}]
    return float(task.trajectory)


async def test_each_trajectory_is_a_run_of_the_agent() -> None:
    rig = GatewayRig()
    fleet, turns = fleet_of(rig, "12"), dict[str, Turn]()
    agent = rig.made(lambda task: asks_twice(rig, task))
    made = await generate_group(fleet, group(rig, n=3), agent=agent, turns=turns)
    assert [one.scores["agent"] for one in made] == [0.0, 1.0, 2.0]
    assert [len(one.turns) for one in made] == [2, 2, 2] and len({task.api_key for task in rig.tasks}) == 3
    assert sorted(fleet.sessions) == sorted(f"sample_0_1/{k}" for k in range(3) for _ in range(2))
    assert {request.sampling["max_tokens"] for request in fleet.requests} == {50}
    assert sorted(key.split(".")[0] for key in turns) == ["0", "0", "1", "1", "2", "2"]


async def test_logged_turns_are_not_asked_for_again() -> None:
    rig = GatewayRig()
    turns, fleet = dict[str, Turn](), fleet_of(rig, "12")
    agent = rig.made(lambda task: asks_twice(rig, task))
    (first,) = await generate_group(fleet, group(rig, n=1), agent=agent, turns=turns)
    idle = fleet_of(rig, "99")
    (again,) = await generate_group(idle, group(rig, n=1), agent=agent, turns=turns)
    assert idle.requests == []
    assert again.rows[0].response_ids.tolist() == first.rows[0].response_ids.tolist()


async def test_agents_beyond_what_is_needed_are_ended() -> None:
    rig = GatewayRig()
    ended: list[int] = []

    async def agent(task: AgentTask) -> float:
        if task.trajectory == 1:
            try:
                await rig.client(task).chat.completions.create(model=MODEL, messages=[QUESTION])
                await anyio.sleep_forever()
            finally:
                ended.append(task.trajectory)
        return await asks_twice(rig, task)

    agents = rig.made(agent)
    with anyio.fail_after(10):
        made = await generate_group(fleet_of(rig, "12"), group(rig, n=2, extra=1), agent=agents)
    assert [one.scores["agent"] for one in made] == [0.0, 2.0] and ended == [1]
    late = await agents.gateway.answer(rig.tasks[1].api_key, "models", {})
    assert late.status == 409

"""Rewards from functions, tools, environments and reward models: single, weighted, per turn, and concurrent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import ConfigError, InfraError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Trajectory
from rollouter.rewards.conversation import ScoredConversation
from rollouter.rewards.functions import RewardFunction, load_reward_functions
from rollouter.rewards.scorer import CombinedScorer, function_scorer
from tests.fakes.conversations import CALL, QUESTION, RESULT, answer, decode, dialogue, prompt

TOOLS = {"multi_turn": {"enable": True}}


def own(call: Callable[..., Any], *, batch: bool = False) -> RewardFunction:
    return RewardFunction("my:reward", call, {}, batch=batch)


def run(**sections: Any) -> Config:
    return Config.model_validate({"reward": {"function": "none"}, **sections})


def combined(
    config: Config, functions: Mapping[str, RewardFunction] | None = None, model: Any = None
) -> CombinedScorer:
    loaded = load_reward_functions(config.reward) if functions is None else functions
    return CombinedScorer(function_scorer(config, loaded, decode), config, decode, model)


async def test_with_a_teacher_alone_every_reward_is_zero() -> None:
    config = run(teacher={"path": "large"}, algorithm={"adv_estimator": "on_policy_distill"})
    assert await combined(config).score(prompt(), [answer("22"), answer("23")]) == [Score(0.0), Score(0.0)]


class Lengths:
    """A reward model that returns the response length, after `gate` is set."""

    def __init__(self, error: Exception | None = None, gate: anyio.Event | None = None) -> None:
        self._error = error
        self._gate = gate
        self.read: list[ScoredConversation] = []

    async def score(self, conversations: Sequence[ScoredConversation]) -> list[float]:
        self.read += conversations
        if self._gate is not None:
            await self._gate.wait()
        if self._error is not None:
            raise self._error
        return [float(len(one.response)) for one in conversations]


# ------------------------------------------------------------------------------------------------ single sources


@pytest.mark.parametrize("weight", [1.0, 0.1, -2.5, 1 / 3])
async def test_the_reward_of_a_single_turn_comes_from_the_function(weight: float) -> None:
    config = run(reward={"weight": weight})
    scores = await combined(config).score(prompt(), [answer("22"), answer("23")])
    assert scores == [Score(weight * 1.0, answer="22"), Score(weight * 0.0, answer="23")]
    function = {"rule": own(lambda **given: {"score": 0.7, "acc": True, "text": "x"})}
    (score,) = await combined(config, function).score(prompt(), [answer("22")])
    assert (score.reward, score.extra, score.turn_rewards) == (weight * 0.7, {"acc": 1.0}, ())


async def test_tools_and_environments_reward_trajectory_and_turns() -> None:
    config = run(rollout=TOOLS)
    one = dialogue("add", "#22", rewards=[0.25, -0.5], scores={"add": 2.0, "environment": 0.5})
    (score,) = await combined(config).score(prompt(), [one])
    assert score == Score(2.25, {"tools": 2.5, "turns": -0.25}, (0.25, -0.5))
    weighed = run(rollout=TOOLS, reward={"function": "none", "tool_weight": 0.0, "turn_weight": 2.0})
    (score,) = await combined(weighed).score(prompt(), [one])
    assert score == Score(-0.5, {"tools": 2.5, "turns": -0.25}, (0.5, -1.0))
    (score,) = await combined(run(rollout=TOOLS)).score(prompt(), [dialogue("add", "#22")])
    assert score == Score(0.0, {"tools": 0.0, "turns": 0.0}, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [({"scores": {"add": float("nan")}}, "add is nan"), ({"rewards": [1.0, float("inf")]}, "turn 1")],
)
async def test_a_tool_reward_that_is_not_finite_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        await combined(run(rollout=TOOLS)).score(prompt(), [dialogue("add", "#22", **given)])


@pytest.mark.parametrize("turn_scores", [[0.5, 1.0], (np.float32(0.5), 1), np.array([0.5, 1.0])])
async def test_a_function_may_score_turns(turn_scores: Any) -> None:
    function = own(lambda **given: {"score": 1.0, "turn_scores": turn_scores, "acc": 1})
    config = run(reward={"weight": 2.0})
    (score,) = await combined(config, {"rule": function}).score(prompt(), [dialogue("add", "#22")])
    assert score == Score(5.0, {"acc": 1.0}, (1.0, 2.0))


@pytest.mark.parametrize("turn_scores", [[0.5], [0.5, None], [0.5, float("nan")], 3.0, "ab", [[1.0], [2.0]]])
async def test_turn_scores_must_be_one_finite_number_per_turn(turn_scores: Any) -> None:
    function = own(lambda **given: {"score": 1.0, "turn_scores": turn_scores})
    with pytest.raises(UserCodeError, match=r"turn_scores .*expected a list of 2 finite numbers"):
        await combined(run(reward={}), {"rule": function}).score(prompt(), [dialogue("add", "#22")])


async def test_a_reward_model_reads_the_conversation() -> None:
    model = Lengths()
    config = run(reward_model={"placement": "serve", "weight": 0.5})
    scores = await combined(config, model=model).score(prompt(), [answer("22"), dialogue("add", "#22")])
    assert scores == [Score(1.0), Score(1.5)]
    assert model.read == [ScoredConversation((QUESTION,), "22"), ScoredConversation((QUESTION, CALL, RESULT), "#22")]


# ------------------------------------------------------------------------------------------------ several sources


async def test_the_rollouter_does_not_score_with_the_trainers_reward_model() -> None:
    config = run(reward={"weight": 2.0}, reward_model={"placement": "worker"})
    (score,) = await combined(config).score(prompt(), [answer("22")])
    assert score == Score(2.0, {"rule": 1.0}, answer="22")


async def test_all_sources_together() -> None:
    entries = [
        {"name": "brief", "function": "x:y", "weight": 0.5},
        {"name": "steps", "function": "x:y", "weight": -1.0},
    ]
    config = run(
        reward={"weight": 2.0, "functions": entries, "tool_weight": 3.0, "turn_weight": 0.5},
        reward_model={"placement": "serve", "weight": 0.25},
        rollout=TOOLS,
    )
    functions = {
        "rule": own(lambda **given: 1.0),
        "brief": own(lambda **given: {"score": 4.0, "length": 3}),
        "steps": own(lambda **given: [{"score": 0.5, "turn_scores": [1.0, 2.0]}], batch=True),
    }
    one = dialogue("add", "#22", rewards=[10.0, 20.0], scores={"add": 7.0})
    (score,) = await combined(config, functions, Lengths()).score(prompt(), [one])
    parts = {"rule": 1.0, "brief": 4.0, "steps": 3.5, "tools": 7.0, "turns": 30.0, "model": 3.0}
    assert score.extra == {**parts, "length": 3.0}
    assert score.reward == (2.0 * 1 + 0.5 * 4 - 3.5 + 3 * 7 + 0.5 * 30 + 0.25 * 3)
    assert score.turn_rewards == (0.5 * 10 - 1, 0.5 * 20 - 2)


@pytest.mark.parametrize("extra", ["turns", "brief", "acc"])
async def test_two_extras_with_the_same_name_are_an_error(extra: str) -> None:
    config = run(reward={"functions": [{"name": "brief", "function": "x:y"}]}, rollout=TOOLS)
    functions = {
        "rule": own(lambda **given: {"score": 1.0, extra: 2.0}),
        "brief": own(lambda **given: {"score": 1.0, "acc": 1.0}),
    }
    with pytest.raises(UserCodeError, match=f"two numbers of one response are called '{extra}'"):
        await combined(config, functions).score(prompt(), [answer("22")])


async def test_functions_and_their_names_come_from_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    file.write_text("def brief(solution_str, limit, **row):\n    return float(len(solution_str) < limit)\n")
    entries = [
        {"name": "brief", "function": f"{file}:brief", "kwargs": {"limit": 3}, "weight": 0.5},
        {"name": "fives", "function": "exact_match", "kwargs": {"pattern": "(5)"}},
    ]
    config = run(reward={"functions": entries})
    scores = await combined(config).score(prompt(), [answer("22"), answer("#22")])
    assert scores[0] == Score(1.5, {"rule": 1.0, "brief": 1.0, "fives": 0.0}, answer="22")
    assert scores[1] == Score(1.0, {"rule": 1.0, "brief": 0.0, "fives": 0.0}, answer="22")


def test_only_user_batch_functions_need_the_whole_group() -> None:
    assert not combined(run(reward={})).whole_group
    assert not combined(run(rollout=TOOLS, reward_model={"placement": "serve"}), model=Lengths()).whole_group
    batch = own(lambda **given: [], batch=True)
    assert combined(run(reward={}), {"rule": batch}).whole_group


async def test_a_group_is_scored_as_a_whole_once_all_sources_are_known_to_be_cheap() -> None:
    both = combined(run(reward={}, rollout=TOOLS), {"rule": own(lambda **given: 1.0)})
    slow_model = combined(run(reward={}, reward_model={"placement": "serve"}), model=Lengths())
    for scorer, expected in ((both, True), (slow_model, False)):
        assert not scorer.whole_group
        await scorer.score(prompt(), [answer("22"), answer("23")])
        assert scorer.whole_group is expected


# ------------------------------------------------------------------------------------------------ arguments


async def test_a_function_receives_the_conversation() -> None:
    given: list[dict[str, Any]] = []

    def reward(**fields: Any) -> float:
        given.append(fields)
        return 0.0

    one = dialogue("add", "#22", rewards=[0.5, 0.0], scores={"add": 1.0}, reason="max_turns")
    row = prompt(extra_info={"index": 3, "num_turns": 9})
    await combined(run(reward={}), {"rule": own(reward)}).score(row, [one, answer("22")])
    conversation, plain = sorted(given, key=lambda fields: len(fields["extra_info"]), reverse=True)
    assert (conversation["solution_str"], conversation["ground_truth"], conversation["data_source"]) == (
        "#22",
        "22",
        "sums",
    )
    assert conversation["extra_info"] == {
        "index": 3,
        "messages": [dict(QUESTION), dict(CALL), dict(RESULT), {"role": "assistant", "content": "#22"}],
        "num_turns": 2,
        "num_tool_calls": 1,
        "finish_reason": "max_turns",
        "tool_scores": {"add": 1.0},
        "turn_rewards": [0.5, 0.0],
    }
    assert plain["extra_info"] == {"index": 3, "num_turns": 9}
    assert "trajectory" not in conversation


TRAJECTORIES = """
def one(solution_str, trajectory, **row):
    return float(trajectory.num_calls)

async def later(data_source, solution_str, ground_truth, extra_info, trajectory=None):
    return {"score": 0.0, "turn_scores": [turn.num_tokens for turn in trajectory.turns]}

def group(data_sources, solution_strs, ground_truths, extra_infos, trajectories):
    most = max(len(trajectory.turns) for trajectory in trajectories)
    return [len(trajectory.turns) / most for trajectory in trajectories]

def wrong(data_sources, solution_strs, ground_truths, extra_infos, trajectory):
    return 0.0
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_trajectories.py"
    path.write_text(TRAJECTORIES)
    return path


@pytest.mark.parametrize(
    ("function", "batch", "expected"),
    [("one", False, [1.0, 0.0]), ("later", False, [6.0, 2.0]), ("group", True, [1, 0.5])],
)
async def test_a_function_with_a_trajectory_parameter_gets_trajectories(
    module: Path, function: str, batch: bool, expected: list[float]
) -> None:
    config = run(reward={"function": f"{module}:{function}", "batch": batch})
    scores = await combined(config).score(prompt(), [dialogue("add", "#22"), answer("22")])
    assert [score.reward for score in scores] == expected
    assert [score.turn_rewards for score in scores] == ([(3.0, 3.0), (2.0,)] if function == "later" else [(), ()])


def test_a_wrong_parameter_for_trajectories_is_refused(module: Path) -> None:
    config = RewardConfig(function=f"{module}:wrong", batch=True)
    with pytest.raises(ConfigError, match="missing a required argument: 'trajectory'"):
        load_reward_functions(config)
    given_twice = RewardConfig(function=f"{module}:one", kwargs={"trajectory": 1})
    with pytest.raises(ConfigError, match="trajectory"):
        load_reward_functions(given_twice)


async def test_the_last_answer_is_read_from_the_row_of_its_turn() -> None:
    one = dialogue("add", "#22")
    other = dialogue("22")
    last = one.turns[-1]
    forked = Trajectory(
        (one.rows[0], other.rows[0]),
        (one.turns[0], type(last)(1, 0, 2, last.finish_reason)),
        one.finish_reason,
        one.messages,
    )
    (score,) = await combined(run(reward={})).score(prompt(), [forked])
    assert score.reward == 1.0


# ------------------------------------------------------------------------------------------------ concurrency


async def test_the_first_failure_is_raised_alone_and_cancels_the_others() -> None:
    config = run(reward={}, reward_model={"placement": "serve"})
    with pytest.raises(InfraError, match="gone"):
        await combined(config, model=Lengths(InfraError("gone"))).score(prompt(), [answer("22")])

    def broken(**given: Any) -> float:
        raise ValueError("no")

    with anyio.fail_after(10), pytest.raises(UserCodeError, match="ValueError: no"):
        await combined(config, {"rule": own(broken)}, Lengths(gate=anyio.Event())).score(prompt(), [answer("22")])


async def test_sources_score_concurrently() -> None:
    model_has_it = anyio.Event()
    rule_has_it = anyio.Event()

    async def rule(**given: Any) -> float:
        rule_has_it.set()
        await model_has_it.wait()
        return 1.0

    class Model(Lengths):
        async def score(self, conversations: Sequence[ScoredConversation]) -> list[float]:
            model_has_it.set()
            await rule_has_it.wait()
            return [1.0]

    config = run(reward={}, reward_model={"placement": "serve"})
    with anyio.fail_after(10):
        (score,) = await combined(config, {"rule": own(rule)}, Model()).score(prompt(), [answer("22")])
    assert score.reward == 2.0


async def test_functions_share_max_concurrency() -> None:
    inside, most, full = 0, 0, anyio.Event()

    async def reward(**given: Any) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if most == 3:
            full.set()
        with anyio.move_on_after(5):  # the groups come from threads, one after another
            await full.wait()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        inside -= 1
        return 1.0

    config = run(reward={"max_concurrency": 3, "functions": [{"name": "more", "function": "x:y"}]})
    functions = {name: own(reward) for name in ("rule", "more")}
    scorer = combined(config, functions)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(scorer.score, prompt(), [answer("22")] * 4)
    assert (inside, most) == (0, 3)


async def test_a_group_without_trajectories_has_no_scores() -> None:
    batch = own(lambda **given: [1 / 0], batch=True)
    assert await combined(run(reward={}), {"rule": batch}).score(prompt(), []) == []

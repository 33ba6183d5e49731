"""Rule-based users: scripted replies, retries until the answer is right, and reasoning-gym tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import reasoning_gym

from asyncrl.config.sections.data import ReasoningGymConfig
from asyncrl.core.failures import DataError
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import EpisodeContext, Reply
from rollouter.prompts.dataset import GymRows, parse_row
from tests.fakes.environments import assistant, context, interaction, load

QUESTION = {"data_source": "sums", "ground_truth": 22}


async def talk(
    class_name: str, config: dict[str, Any], turns: Sequence[str], row: EpisodeContext | None = None
) -> tuple[list[Reply], float | None]:
    """Return the replies to the turns, and the score."""
    replies: list[Reply] = []
    async with load(interaction(class_name, config=config)).session(row or context(**QUESTION)) as session:
        assert await session.reset() == ()
        for turn in turns:
            assert not (replies and replies[-1].done), "the conversation continued after its end"
            replies.append(await session.step(*assistant(turn)))
        return replies, await session.score()


def row(**interaction_kwargs: Any) -> EpisodeContext:
    return context(extra_info={"interaction_kwargs": interaction_kwargs})


# ------------------------------------------------------------------------------------------------ scripted


async def test_replies_come_in_order() -> None:
    replies, score = await talk("scripted", {"replies": ["why?", "sure?"]}, ["22", "since", "yes"])
    assert replies == [Reply("why?"), Reply("sure?"), Reply(done=True)]
    assert score is None


async def test_without_a_script_the_first_answer_is_the_last() -> None:
    assert (await talk("scripted", {}, ["22"]))[0] == [Reply(done=True)]


@pytest.mark.parametrize("replies", [["how?"], ("how?",), np.array(["how?"], dtype=object)])
async def test_a_row_may_have_its_own_script(replies: Any) -> None:
    replies_given, _ = await talk("scripted", {"replies": ["why?", "sure?"]}, ["22", "so"], row(replies=replies))
    assert replies_given == [Reply("how?"), Reply(done=True)]


@pytest.mark.parametrize("replies", ["how?", [1], ["how?", ""], {"a": "how?"}, 3])
async def test_a_row_with_malformed_replies_is_refused(replies: Any) -> None:
    with pytest.raises(DataError, match=r"interaction_kwargs\.replies: .* is not a list of texts"):
        await talk("scripted", {}, ["22"], row(replies=replies))


async def test_a_turn_that_matches_stop_when_ends_the_conversation() -> None:
    config = {"replies": ["why?", "sure?"], "stop_when": r"#\d+"}
    assert (await talk("scripted", config, ["so it is #22"]))[0] == [Reply(done=True)]
    assert (await talk("scripted", config, ["so it is #", "#22"]))[0] == [Reply("why?"), Reply(done=True)]


# ------------------------------------------------------------------------------------------------ retry


async def test_retry_allows_another_try_until_the_answer_is_right() -> None:
    config = {"discount": 0.5, "wrong_reward": -0.1, "wrong": "No."}
    replies, score = await talk("retry", config, ["#21", "#23", "#22"])
    assert replies == [
        Reply("No.", reward=-0.1),
        Reply("No.", reward=-0.1),
        Reply(done=True, reward=0.25, metrics={"tries": 3.0, "solved": 1.0}),
    ]
    assert score is None, "the reward is in the turns"


async def test_retry_with_a_right_first_answer_and_without_a_right_answer() -> None:
    assert (await talk("retry", {}, ["#22"]))[0] == [
        Reply(done=True, reward=1.0, metrics={"tries": 1.0, "solved": 1.0})
    ]
    assert (await talk("retry", {"max_tries": 2}, ["#21", "#21"]))[0] == [
        Reply("That is wrong, try again."),
        Reply(done=True, metrics={"tries": 2.0, "solved": 0.0}),
    ]


def length_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, *, scale: float = 1.0) -> Any:
    return {"score": scale * len(solution_str), "source": data_source}


async def exact_match_async(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(solution_str == str(ground_truth))


def invalid(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    return {"nan": float("nan"), "none": None, "empty": {}}[solution_str]


@pytest.mark.parametrize(
    ("config", "wrong", "right"),
    [
        ({"kwargs": {"pattern": r"=(\d+)"}}, "22", "17+5=22"),
        ({"function": "math_verify"}, "$21$", "$\\frac{44}{2}$"),
        ({"function": f"{__name__}:length_score", "kwargs": {"scale": 0.25}, "threshold": 0.75}, "ab", "abc"),
        ({"function": f"{__name__}:exact_match_async"}, "21", "22"),
    ],
)
async def test_each_kind_of_reward_function_can_check_the_answer(
    config: dict[str, Any], wrong: str, right: str
) -> None:
    replies, _ = await talk("retry", config, [wrong, right])
    assert [reply.done for reply in replies] == [False, True]
    assert replies[1].metrics == {"tries": 2.0, "solved": 1.0}


@pytest.mark.parametrize("answer", ["nan", "none", "empty"])
async def test_a_reward_function_that_returns_no_number_is_refused(answer: str) -> None:
    with pytest.raises(ToolFailedError, match=r"RetryUser\.step raised ValueError: .*invalid returned .*finite number"):
        await talk("retry", {"function": f"{__name__}:invalid"}, [answer])


async def test_a_row_without_a_ground_truth_is_refused() -> None:
    with pytest.raises(ToolFailedError, match=r"no reward_model\.ground_truth"):
        await talk("retry", {}, ["22"], context())


# ------------------------------------------------------------------------------------------------ reasoning-gym


def gym_row() -> EpisodeContext:
    rows = GymRows(ReasoningGymConfig(task="chain_sum", train_size=1, val_size=1), split="train", seed=0)
    made = parse_row(rows.row(0), "here")
    return context(ground_truth=made.ground_truth, extra_info=made.extra_info, data_source="chain_sum")


async def test_a_gym_task_scores_each_try_and_returns_the_best_score() -> None:
    given = gym_row()
    right = f"so <answer>{given.ground_truth}</answer>"
    near = f"{given.ground_truth} or so"  # a text that contains the right number gets a small score
    replies, score = await talk("reasoning_gym", {"feedback": "Only {score}."}, [near, right], given)
    worth = reasoning_gym.get_score_answer_fn("chain_sum")(near, given.extra_info["entry"])
    assert 0.0 < worth < 1.0
    assert replies == [
        Reply(f"Only {worth:.2f}."),
        Reply(done=True, metrics={"tries": 2.0, "solved": 1.0, "best_score": 1.0}),
    ]
    assert score == 1.0


async def test_a_gym_task_ends_after_its_last_try() -> None:
    replies, score = await talk("reasoning_gym", {"max_tries": 2}, ["no", "idea"], gym_row())
    assert replies[0] == Reply("That is not right. Try again.")
    assert (replies[1].done, replies[1].metrics["solved"], replies[1].metrics["tries"]) == (True, 0.0, 2.0)
    assert score == replies[1].metrics["best_score"] < 1.0


async def test_a_gym_task_without_a_try_scores_zero() -> None:
    assert await talk("reasoning_gym", {}, [], gym_row()) == ([], 0.0)


@pytest.mark.parametrize("extra_info", [{}, {"entry": None}, {"entry": {"metadata": {}}}])
async def test_a_row_that_is_not_of_a_gym_task_is_refused(extra_info: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"no extra_info\.entry with metadata\.source_dataset"):
        await talk("reasoning_gym", {}, [], context(extra_info=extra_info))

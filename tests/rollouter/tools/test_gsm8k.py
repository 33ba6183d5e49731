"""The GSM8K tool: numbers in answers, and their rewards."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from asyncrl.core.failures import ConfigError, UserCodeError
from rollouter.tools import ToolContext
from rollouter.tools.gsm8k import Gsm8kTool, parse_answer


def context(ground_truth: Any = None) -> ToolContext:
    return ToolContext("val", 0, ground_truth=ground_truth)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72),
        ("#### 72", 72),
        ("####72", 72),
        ("48 / 2 = 24, and 48 + 24 = 72\n#### 72", 72),
        ("#### 7 #### 72", 72),
        ("$1,234.00.", 1234),
        ("1,000,000", 1_000_000),
        ("-5", -5),
        ("-$5", -5),
        ("\u22125", -5),
        ("7-3", 3),
        ("72 apples.", 72),
        ("it costs 72, I think", 72),
        ("72,", 72),
        (".5", Decimal("0.5")),
        ("0.50", Decimal("0.5")),
        ("72.", 72),
        ("", None),
        ("####", None),
        ("72 ####", None),
        ("seventy-two", None),
        ("$.", None),
    ],
)
def test_numbers_in_answers_are_parsed(text: str, number: int | Decimal | None) -> None:
    assert parse_answer(text) == number


async def test_only_a_better_answer_avoids_the_penalty() -> None:
    tool = Gsm8kTool()
    state = await tool.create(context("72"))
    earned = [await tool.execute(state, {"answer": answer}) for answer in ("70", "#### 72", "72", "1")]
    assert [one.text for one in earned] == [
        "Current parsed answer='70' reward=0.0",
        "Current parsed answer='#### 72' reward=1.0",
        "Current parsed answer='72' reward=1.0",
        "Current parsed answer='1' reward=0.0",
    ]
    assert [one.reward for one in earned] == [-0.05, 0.0, -0.05, -0.05]
    assert await tool.calc_reward(state) == 1.0
    gentle = Gsm8kTool(penalty=0.0)
    assert (await gentle.execute(await gentle.create(context(72)), {"answer": "1"})).reward == 0.0


async def test_a_row_may_override_the_ground_truth() -> None:
    tool = Gsm8kTool()
    assert tool.function_schema()["function"]["name"] == "calc_gsm8k_reward"
    state = await tool.create(context("1"), ground_truth="1,234")
    assert (await tool.execute(state, {"answer": "1234"})).text.endswith("reward=1.0")


@pytest.mark.parametrize(
    ("truth", "message"), [(None, r"neither its reward_model\.ground_truth nor"), ("none", "'none' is not a number")]
)
async def test_a_row_without_a_number_is_an_error(truth: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        await Gsm8kTool().create(context(truth))


def test_a_positive_penalty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"penalty = 0\.05: .* write -0\.05"):
        Gsm8kTool(penalty=0.05)

"""A tool with which the model checks its answer to a problem whose solution is a number (GSM8K)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from asyncrl.core.failures import ConfigError, UserCodeError
from rollouter.tools.base import BaseTool, ToolContext, ToolResponse

# A minus between two numbers is not a sign: the last number of `7-3` is 3.
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclass(slots=True)
class Gsm8kState:
    ground_truth: Decimal
    reward: float = 0.0
    """Reward of the best answer so far."""


class Gsm8kTool(BaseTool[Gsm8kState]):
    """Checks an answer like verl's `calc_gsm8k_reward`, and answers `Current parsed answer='72' reward=1.0`.

    `calc_reward` is 1 if any answer was right, else 0. A turn whose answer is not better than earlier answers gets the
    reward `penalty`. The ground truth is the row's `tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`, or else
    its `reward_model.ground_truth`.
    """

    name: ClassVar[str] = "calc_gsm8k_reward"
    schema: ClassVar[Mapping[str, Any]] = {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Check your answer to the problem. The reward is 1.0 if it is right, and 0.0 if not.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "Your answer, a number."}},
                "required": ["answer"],
            },
        },
    }

    def __init__(self, *, penalty: float = -0.05) -> None:
        """Set the reward of turns whose answer is not better than earlier answers.

        Raises:
            ConfigError: the penalty is above zero, which would reward wrong answers.
        """
        if penalty > 0:
            raise ConfigError(
                f"penalty = {penalty!r}: it is the reward of a turn whose answer is not better than earlier ones, and "
                f"a value above zero rewards wrong answers; write {-penalty!r}"
            )
        self._penalty = penalty

    async def create(self, context: ToolContext, ground_truth: Any = None, **kwargs: Any) -> Gsm8kState:
        """Read the ground truth.

        Raises:
            UserCodeError: the row has no ground truth, or it is not a number.
        """
        given = context.ground_truth if ground_truth is None else ground_truth
        if given is None:
            raise UserCodeError(
                "the row has no ground truth for calc_gsm8k_reward: neither its "
                "reward_model.ground_truth nor extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth"
            )
        number = parse_answer(str(given))
        if number is None:
            raise UserCodeError(f"calc_gsm8k_reward: the row's ground truth {given!r} is not a number")
        return Gsm8kState(number)

    async def execute(self, state: Gsm8kState, arguments: Mapping[str, Any], **kwargs: Any) -> ToolResponse:
        answer: str = arguments["answer"]
        reward = float(parse_answer(answer) == state.ground_truth)
        improved = reward > state.reward
        state.reward = max(state.reward, reward)
        return ToolResponse(f"Current parsed {answer=} {reward=}", 0.0 if improved else self._penalty)

    async def calc_reward(self, state: Gsm8kState, **kwargs: Any) -> float:
        return state.reward


def parse_answer(text: str) -> Decimal | None:
    """Return the last number after the last `####`, or else of the whole text; None if there is no number.

    `$`, commas between digits, units and full stops are ignored: `#### $1,234.00.` is 1234.
    """
    numbers = _NUMBER.findall(text.rpartition("####")[2].replace("$", "").replace("\u2212", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None

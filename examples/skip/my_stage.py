"""A stage of one's own that is recorded and replayed: the verdicts of a judge, which take long and cost something.

    python examples/skip/ask_twice.py

asks it for eight responses to two questions, twice: the second time nobody is asked. In a run it gives the reward
(README.md beside this has the command).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import anyio

from skip import Action, BaseSkip, Call, Content, Fingerprint, Served, SkipManager, field, register_skip

JUDGE_S = 0.25
"""What the judge takes for one verdict."""


@register_skip("judge")
class JudgeSkip(BaseSkip):
    """Around `judge`. Its step is the question's row in the data, and each response to it has a record of its own."""

    support_online_step = True
    support_actions = frozenset({Action.CACHE})  # the verdict on another question would be wrong

    def extract_step(self, call: Call) -> int:
        return int(call["row"])

    def call_name(self, call: Call) -> str:
        # The answer too: a reward function also scores the validation set, whose rows have the same numbers.
        return hashlib.sha256(f"{call['answer']}\n{call['response']}".encode()).hexdigest()[:16]

    def fingerprint(self, call: Call) -> Fingerprint:
        judge = call.options["model"]
        return {"response": field(call["response"]), "answer": field(call["answer"]), "judge": field(judge)}

    def to_content(self, call: Call, result: float) -> Content:
        return Content(data={"verdict": result})

    def prepare_data(self, call: Call, served: Served) -> float:
        verdict = served.record.content.data["verdict"]
        if not isinstance(verdict, float):
            raise TypeError(f"{verdict!r} is no verdict")
        return verdict


@SkipManager.annotate(role="judge", model="judge-1")
async def judge(row: int, response: str, answer: str) -> float:
    """From 0 to 1. It stands for a request to a service."""
    await anyio.sleep(JUDGE_S)
    return float(response.endswith(answer))


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """`reward.function`."""
    return await judge(extra_info["index"], solution_str, ground_truth)

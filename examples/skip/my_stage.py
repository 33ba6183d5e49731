"""A custom stage that is recorded and replayed: the verdicts of a slow and expensive judge.

    python examples/skip/ask_twice.py

requests verdicts on eight responses to two questions twice; the second time, all of them are replayed. In a run, the
judge computes the reward (README.md has the command).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import anyio

from skip import Call, Content, Fingerprint, RecordSkip, Served, SkipAction, SkipManager, field, register_skip

JUDGE_S = 0.25
"""Seconds that the judge takes for one verdict."""


@register_skip("judge")
class JudgeSkip(RecordSkip):
    """The role of `judge`. Its step is the question's row in the data, and each response has its own record."""

    support_online_step = True
    support_actions = (SkipAction.CACHE,)  # a verdict on another question would be wrong

    def extract_step(self, call: Call) -> int:
        return int(call["row"])

    def call_name(self, call: Call) -> str:
        # Include the answer: the reward function also scores the validation set, whose rows have the same indices.
        return hashlib.sha256(f"{call['answer']}\n{call['response']}".encode()).hexdigest()[:16]

    def fingerprint(self, call: Call) -> Fingerprint:
        judge = call.options["model"]
        return {"response": field(call["response"]), "answer": field(call["answer"]), "judge": field(judge)}

    def to_content(self, call: Call, result: float) -> Content:
        return Content(data={"verdict": result})

    def to_result(self, call: Call, served: Served) -> float:
        verdict = served.record.content.data["verdict"]
        if not isinstance(verdict, float):
            raise TypeError(f"{verdict!r} is no verdict")
        return verdict


@SkipManager.annotate(role="judge", model="judge-1")
async def judge(row: int, response: str, answer: str) -> float:
    """Return a verdict from 0 to 1, after a delay that simulates a request to a service."""
    await anyio.sleep(JUDGE_S)
    return float(response.endswith(answer))


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """Return the reward of a response; configured as `reward.function`."""
    return await judge(extra_info["index"], solution_str, ground_truth)

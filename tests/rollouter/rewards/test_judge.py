"""The judge with a local server that plays an OpenAI endpoint: requests, ratings and failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.core.failures import ConfigError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.text import encodable_values
from rollouter.rewards.conversation import conversation, transcript
from rollouter.rewards.functions import load_reward_functions
from rollouter.rewards.judge import JudgeScorer
from rollouter.rewards.scorer import CombinedScorer, function_scorer
from tests.fakes.conversations import answer, decode, dialogue, prompt
from tests.fakes.hostile import messages
from tests.fakes.openai_server import Hang, OpenAIServer, Script, chat_answer, error_answer, openai_server


class Setup:
    def __init__(self, server: OpenAIServer, judge: JudgeScorer) -> None:
        self.server, self.judge = server, judge

    @property
    def asked(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.server.requests]


@asynccontextmanager
async def judging(script: Any, **changes: Any) -> AsyncIterator[Setup]:
    async with openai_server(script) as server:
        judge = JudgeScorer(JudgeConfig(model="judge-1", base_url=server.base_url, **changes), decode)
        try:
            with anyio.fail_after(20):
                yield Setup(server, judge)
        finally:
            await judge.aclose()


async def test_the_judge_gets_question_truth_and_answer() -> None:
    async with judging([chat_answer("Right, but curt.\nscore: 7")], params={"temperature": 0}) as setup:
        assert await setup.judge.score(prompt(), [answer("#22 {question}")]) == [Score(0.7)]
        (request,) = setup.server.requests
        assert (request["model"], request["temperature"]) == ("judge-1", 0)
        (asked,) = setup.asked
        for part in ("Question:\n17+5?\n", "Correct answer: 22\n", "response:\n#22 {question}\n", "score: 7"):
            assert part in asked


async def test_a_prompt_may_contain_the_conversation() -> None:
    async with judging([chat_answer("score: 10")], prompt='{conversation} -- {"json": {}} {truth}') as setup:
        assert await setup.judge.score(prompt(), [dialogue("add", "#22")]) == [Score(1.0)]
        assert setup.asked == [
            'user: 17+5?\n\nassistant: Let me see.\n[calls add with {"a": 17, "b": 5}]\n\ntool: 22\n\nassistant: #22'
            ' -- {"json": {}} {truth}'
        ]


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("score: 7", {}, 0.7),
        ("Score = 7.5.", {}, 0.75),
        ("**Score:** 7/10", {}, 0.7),
        ("I first thought score: 3, no.\nSCORE: 0", {}, 0.0),
        ("score: 3", {"min": 1, "max": 5}, 0.5),
        ("score: -1", {"min": -2, "max": 2}, 0.25),
        ("verdict [[4]]", {"pattern": r"\[\[(\d)\]\]", "max": 4}, 1.0),
    ],
)
async def test_the_last_number_counts(text: str, settings: Mapping[str, Any], expected: float) -> None:
    async with judging([chat_answer(text)], **settings) as setup:
        (score,) = await setup.judge.score(prompt(), [answer("22")])
        assert score.reward == pytest.approx(expected)


@pytest.mark.parametrize(
    "first",
    [
        chat_answer("Good."),
        chat_answer("score: 11"),
        chat_answer("score: none"),
        chat_answer(None),
        chat_answer("", refusal="I do not"),
    ],
)
async def test_an_answer_without_a_rating_is_retried(first: Script) -> None:
    async with judging([first, chat_answer("score: 5")]) as setup:
        assert await setup.judge.score(prompt(), [answer("22")]) == [Score(0.5)]
        assert len(set(setup.asked)) == 1 and len(setup.asked) == 2


async def test_no_rating_in_any_attempt_is_a_user_error() -> None:
    async with judging(lambda request: chat_answer("I cannot say."), max_attempts=2) as setup:
        with pytest.raises(UserCodeError, match=r"no rating from 0 to 10, asked 2 times .*'I cannot say\.'"):
            await setup.judge.score(prompt(), [answer("22")])
        assert len(setup.asked) == 2


async def test_a_failing_endpoint_is_a_user_error() -> None:
    async with judging([error_answer(500, "boom")], max_attempts=1) as setup:
        with pytest.raises(UserCodeError, match=r"reward\.judge: model 'judge-1' at .* failed once.*boom"):
            await setup.judge.score(prompt(), [answer("22")])


async def test_an_endpoint_that_does_not_answer_has_a_deadline() -> None:
    async with judging([Hang()], max_attempts=1, timeout_s=0.1) as setup:
        with pytest.raises(UserCodeError, match=r"no answer within timeout_s = 0\.1 s"):
            await setup.judge.score(prompt(), [answer("22")])


async def test_a_missing_model_stops_the_run() -> None:
    async with judging([error_answer(404, "no such model")]) as setup:
        with pytest.raises(ConfigError, match="no such model"):
            await setup.judge.score(prompt(), [answer("22")])


async def test_concurrent_requests_are_limited() -> None:
    def script(request: Mapping[str, Any]) -> Script:
        return chat_answer(f"score: {len(request['messages'][0]['content']) - 1}")

    async with judging(script, max_concurrency=2, prompt="{response}.") as setup:
        scores = await setup.judge.score(prompt(), [answer("x" * length) for length in range(8)])
        assert [score.reward for score in scores] == pytest.approx([length / 10 for length in range(8)])
        assert setup.server.most_open <= 2
        assert not setup.judge.whole_group


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": None}, "a judge needs both model and base_url"),
        ({"base_url": "127.0.0.1:8000"}, r"reward\.judge\.base_url: '127"),
        ({"api_key_env": "ASYNCRL_NO_SUCH_KEY"}, r"reward\.judge\.api_key_env: .*ASYNCRL_NO_SUCH_KEY"),
        ({"params": {"n": 2}}, r"reward\.judge\.params\.n"),
    ],
)
def test_invalid_endpoints_are_refused_at_the_start(changes: dict[str, Any], message: str) -> None:
    settings = {"model": "judge-1", "base_url": "http://127.0.0.1:1/v1"} | changes
    with pytest.raises(ConfigError, match=message):
        JudgeScorer(JudgeConfig.model_validate(settings), decode)


async def test_a_judge_adds_to_the_reward_function() -> None:
    async with openai_server([chat_answer("score: 5")]) as server:
        judge = {"model": "judge-1", "base_url": server.base_url, "weight": 0.5}
        config = Config.model_validate({"reward": {"judge": judge, "weight": 2.0}})
        functions = function_scorer(config, load_reward_functions(config.reward), decode)
        scorer = CombinedScorer(functions, config, decode, None)
        assert await scorer.score(prompt(), [answer("22")]) == [Score(2.25, {"rule": 1.0, "judge": 0.5}, answer="22")]
        assert not scorer.whole_group
        await scorer.aclose()


@settings(max_examples=50)
@given(st.lists(messages(), max_size=2))
def test_conversations_of_any_shape_have_a_transcript(said: list[Any]) -> None:
    """Messages may come from a row, whose tool calls have no fixed shape."""
    try:
        given = tuple(message for message in encodable_values(said) if isinstance(message, dict))
    except ValueError:
        return
    one = dialogue("add", "#22")
    made = conversation(prompt(messages=given), replace(one, messages=(*given, *one.messages)), "#22")
    assert transcript(made).endswith("assistant: #22")

"""A language model as judge, behind an OpenAI-compatible endpoint: asked about one trajectory, its answer a number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import anyio
from anyio import to_thread

from asyncrl.config.schema import JudgeConfig
from asyncrl.failures import ConfigError, DataError, InfraError, UserCodeError, first_failure
from asyncrl.ports import Score
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt
from rollouter.chat_endpoint import ChatEndpoint
from rollouter.rewards.conversation import conversation, question, transcript
from rollouter.rewards.results import shown
from rollouter.template import Decode

NO_TRUTH = "(not given)"
ENDING = 100
"""Characters of an answer that an error repeats, of its end: that is where the number should be."""
_FIELD = re.compile(r"\{(question|response|conversation|ground_truth)\}")


class Judge:
    """`RewardScorer`: ratings from 0 to 1."""

    whole_group = False

    def __init__(self, config: JudgeConfig, decode: Decode) -> None:
        """Nothing is asked yet.

        Raises:
            ConfigError: see `ChatEndpoint`.
        """
        if config.model is None or config.base_url is None:
            raise ConfigError("reward.judge: a judge needs both model and base_url; give them, or neither")
        self._config = config
        self._decode = decode
        self._pattern = re.compile(config.pattern)
        try:
            self._endpoint = ChatEndpoint(
                config.base_url,
                config.model,
                api_key_env=config.api_key_env,
                timeout_s=config.timeout_s,
                max_concurrency=config.max_concurrency,
                max_attempts=config.max_attempts,
                params=config.params,
            )
        except ConfigError as error:
            raise ConfigError(f"reward.judge.{error.message}", error.cause) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory.

        Raises:
            UserCodeError: the endpoint failed, or gave no answer with a number, as often as `max_attempts` allows.
            ConfigError: it knows no such model, or refuses the key.
        """
        ratings = [math.nan] * len(trajectories)

        async def rate(number: int) -> None:
            text = await to_thread.run_sync(self._asked, prompt, trajectories[number])
            ratings[number] = await self._rate(text)

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(trajectories)):
                    group.start_soon(rate, number)
        except BaseExceptionGroup as error:
            raise first_failure(error) from error
        return [Score(rating) for rating in ratings]

    def _asked(self, prompt: Prompt, trajectory: Trajectory) -> str:
        response = self._decode(trajectory.turn_ids())
        truth = prompt.ground_truth
        values = {
            "question": question(prompt),
            "response": response,
            "conversation": transcript(conversation(prompt, trajectory, response)),
            "ground_truth": NO_TRUTH if truth is None else str(truth),
        }
        # One pass: braces in what was said are nobody's fields.
        return _FIELD.sub(lambda match: values[match[1]], self._config.template)

    async def _rate(self, asked: str) -> float:
        told = ""
        for _ in range(self._config.max_attempts):
            try:
                answer = await self._endpoint.ask([{"role": "user", "content": asked}])
            except DataError as error:
                told = error.message
                continue
            except InfraError as error:
                raise UserCodeError(f"reward.judge: {error.message}") from error
            number = self._number(answer)
            if number is not None:
                return (number - self._config.min) / (self._config.max - self._config.min)
            told = f"it answered {shown(answer[-ENDING:])}"
        config = self._config
        raise UserCodeError(
            f"reward.judge: {config.model} gave no rating from {config.min:g} to {config.max:g}, asked "
            f"{config.max_attempts} times (reward.judge.max_attempts), the last time: {told}. Look at "
            "reward.judge.prompt and reward.judge.pattern, or raise max_tokens in reward.judge.params"
        )

    def _number(self, answer: str) -> float | None:
        """The last number in the answer; None: there is none between `min` and `max`."""
        groups = [match[1] for match in self._pattern.finditer(answer)]
        try:
            number = float(groups[-1])
        except (IndexError, TypeError, ValueError):
            return None
        return number if self._config.min <= number <= self._config.max else None

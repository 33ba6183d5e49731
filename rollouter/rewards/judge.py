"""A language model behind an OpenAI-compatible endpoint that rates trajectories."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyio import to_thread

from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.core.failures import ConfigError, DataError, InfraError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.tasks import gather
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import Prompt
from rollouter.prompts.chat_template import Decode
from rollouter.rewards.chat_endpoint import ChatEndpoint
from rollouter.rewards.conversation import conversation, question, transcript
from rollouter.user_code import shown

NO_TRUTH = "(not given)"
QUOTED_CHARS = 100
"""Number of last characters of an answer that an error quotes, because the rating is expected there."""
_FIELD = re.compile(r"\{(question|response|conversation|ground_truth)\}")


class JudgeScorer:
    """A `RewardScorer` whose scores are ratings from 0 to 1."""

    whole_group = False
    is_cheap = False

    def __init__(self, config: JudgeConfig, decode: Decode) -> None:
        """Check the configuration. Nothing is sent yet.

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
        """Return one score per trajectory.

        Raises:
            UserCodeError: the endpoint failed or gave no valid rating in `max_attempts` attempts.
            ConfigError: the endpoint has no such model, or refuses the key.
        """

        async def rate(trajectory: Trajectory) -> Score:
            return Score(await self._rate(await to_thread.run_sync(self._question, prompt, trajectory)))

        return await gather(rate, trajectories)

    def _question(self, prompt: Prompt, trajectory: Trajectory) -> str:
        response = self._decode(trajectory.turn_ids())
        truth = prompt.ground_truth
        values = {
            "question": question(prompt),
            "response": response,
            "conversation": transcript(conversation(prompt, trajectory, response)),
            "ground_truth": NO_TRUTH if truth is None else str(truth),
        }
        # All fields are replaced in one pass, so that braces in the conversation do not count as fields.
        return _FIELD.sub(lambda match: values[match[1]], self._config.template)

    async def _rate(self, question: str) -> float:
        problem = ""
        for _ in range(self._config.max_attempts):
            try:
                answer = await self._endpoint.ask([{"role": "user", "content": question}])
            except DataError as error:
                problem = error.message
                continue
            except InfraError as error:
                raise UserCodeError(f"reward.judge: {error.message}") from error
            number = self._number(answer)
            if number is not None:
                return (number - self._config.min) / (self._config.max - self._config.min)
            problem = f"it answered {shown(answer[-QUOTED_CHARS:])}"
        config = self._config
        raise UserCodeError(
            f"reward.judge: {config.model} gave no rating from {config.min:g} to {config.max:g}, asked "
            f"{config.max_attempts} times (reward.judge.max_attempts), the last time: {problem}. Look at "
            "reward.judge.prompt and reward.judge.pattern, or raise max_tokens in reward.judge.params"
        )

    def _number(self, answer: str) -> float | None:
        """Return the last number in the answer, or None if it is missing or not between `min` and `max`."""
        groups = [match[1] for match in self._pattern.finditer(answer)]
        try:
            number = float(groups[-1])
        except (IndexError, TypeError, ValueError):
            return None
        return number if self._config.min <= number <= self._config.max else None

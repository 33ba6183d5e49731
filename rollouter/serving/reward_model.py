"""The reward model of a run behind Ray Serve: its deployment, and the Rollouter's client.

The driver binds the deployment without importing torch; only the replicas load it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import anyio
from anyio import to_thread
from ray import serve

from asyncrl.config.schema import Config
from asyncrl.config.sections.trainer import RewardModelConfig
from asyncrl.core.failures import BugError, DataError, DeadlineError, InfraError
from asyncrl.core.tasks import gather
from rollouter.rewards.conversation import ScoredConversation
from rollouter.serving.client import FIRST_BACKOFF_S
from rollouter.serving.handles import answer
from rollouter.serving.options import REWARD_DEPLOYMENT_NAME, app_name, reward_deployment_options

BATCH_WAIT_S = 0.01
"""Time for which a batch waits to fill. The responses of a group arrive within a millisecond or two."""


class RewardReplica:
    """A replica of the reward model."""

    async def __init__(self, config: RewardModelConfig, device: Literal["cpu", "cuda"]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the model. Without a reserved GPU, Ray does not hide those that others use.

        Raises:
            ConfigError: see `RewardClassifier.load`.
        """
        from rollouter.rewards.classifier import RewardClassifier

        self._classifier = await to_thread.run_sync(partial(RewardClassifier.load, config, device=device))
        self.score.set_max_batch_size(config.max_batch_size)

    @serve.batch(batch_wait_timeout_s=BATCH_WAIT_S)
    async def score(self, conversations: list[ScoredConversation]) -> list[float | DataError]:
        """Score one conversation per call; Serve batches the calls. An error is returned, as it concerns one call."""
        return await to_thread.run_sync(self._classifier.score, conversations)


def build_reward_app(config: Config, *, gpus: bool, driver: str) -> serve.Application:
    """Return the Serve application of the run's reward model. `driver`: Ray's job id of the launch."""
    deployment = serve.deployment(
        name=REWARD_DEPLOYMENT_NAME,
        **reward_deployment_options(config.reward_model, probe_s=config.timeouts.probe_s, gpus=gpus, driver=driver),
    )(RewardReplica)
    return deployment.bind(config.reward_model, "cuda" if gpus else "cpu")


class ServedRewardModel:
    """A `RewardModelPort` that calls the run's deployment, from any process of its Ray cluster."""

    def __init__(
        self, config: Config, *, namespace: str, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    ) -> None:
        """Create it by `handles.connect`. `sleep` waits between failed calls: 1 s, 2 s, 4 s and so on."""
        self._sleep = sleep
        self._timeout_s = config.reward.timeout_s
        self._start_s = config.timeouts.start_s
        self._waiting: set[anyio.CancelScope] = set()
        self._replaced_by: float | None = None
        """The time until which the replacement of a dead replica may be loading; None once a call is answered."""
        self._max_attempts = config.rollout.max_attempts
        self._handle = serve.get_deployment_handle(REWARD_DEPLOYMENT_NAME, app_name(namespace, "reward"))
        model = config.reward_model
        # Two batches per replica, one running and one waiting, so that the deadline covers no long queue.
        self._calls = anyio.CapacityLimiter(2 * model.num_replicas * model.max_batch_size)

    async def score(self, conversations: Sequence[ScoredConversation]) -> list[float]:
        """Return one score per conversation.

        Raises:
            DataError: the model cannot score a conversation.
            InfraError: `rollout.max_attempts` calls for a conversation have failed.
            DeadlineError: a conversation took longer than `reward.timeout_s`, including failed tries. While a dead
                replica is being replaced, the limit is up to `timeouts.start_s` longer.
        """

        async def score(conversation: ScoredConversation) -> float:
            async with self._calls:
                return await self._score(conversation)

        return await gather(score, conversations)

    async def _score(self, conversation: ScoredConversation) -> float:
        with anyio.CancelScope() as scope:
            scope.deadline = max(anyio.current_time(), self._replaced_by or 0.0) + self._timeout_s
            self._waiting.add(scope)
            try:
                return await self._try(conversation)
            finally:
                self._waiting.discard(scope)
        raise DeadlineError(
            f"the reward model did not answer within reward.timeout_s = {self._timeout_s:g} s; raise the limit, lower "
            "reward_model.max_batch_size, or raise reward_model.num_replicas"
        )

    async def _try(self, conversation: ScoredConversation) -> float:
        for attempt in range(1, self._max_attempts + 1):
            try:
                score = _number(await self._ask(conversation))
            except InfraError as error:
                if attempt == self._max_attempts:
                    message = f"the reward model failed {attempt} times, the last time: {error.message}"
                    raise InfraError(message, error.cause) from error
                self._wait_for_another()
                await self._sleep(FIRST_BACKOFF_S * 2 ** (attempt - 1))
            else:
                self._replaced_by = None
                return score
        raise AssertionError("max_attempts is positive")

    def _wait_for_another(self) -> None:
        """Extend all deadlines after a replica failed: Serve delays calls until its replacement is up."""
        if self._replaced_by is None:
            self._replaced_by = anyio.current_time() + self._start_s
            for scope in self._waiting:
                scope.deadline = self._replaced_by + self._timeout_s

    async def _ask(self, conversation: ScoredConversation) -> Any:
        return await answer(self._handle.score.remote(conversation), "scoring by the reward model")


def _number(answer: Any) -> float:
    if isinstance(answer, DataError):
        raise answer
    if not isinstance(answer, float):
        raise BugError(f"a replica of the reward model answered {answer!r}")
    return answer

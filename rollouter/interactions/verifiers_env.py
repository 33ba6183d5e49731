"""Environments of the package `verifiers`: `class_name: verifiers`, for environments that exchange text.

    init_state ─▶ setup_state ─▶ (add_trajectory_step ─▶ is_completed ─▶ env_response) … ─▶ rubric.score_rollout

These are the steps of `MultiTurnEnv.rollout` without its model calls, because here the policy takes the turns.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pydantic import Field

from asyncrl.config.sections.base import ConfigSection
from asyncrl.core.failures import ConfigError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.user_code import parse_settings

SUPPORTED = "0.1.10"
"""Later versions conflict with our other dependencies, and earlier versions have a different interface."""
_INSTALL = f"pip install 'verifiers=={SUPPORTED}'"


class VerifiersSettings(ConfigSection):
    env_id: str
    """The module of an installed environment, for `verifiers.load_environment`."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the module's `load_environment`."""


class VerifiersEnvironment(Environment):
    """One rollout of a `verifiers.MultiTurnEnv`, with its rubric's reward as the score, and with its metrics.

    Rows come from the environment's own data set (`rows` yields them). The environment sees only the policy's text:
    `response` and `tokens` of a trajectory step are None. Rubrics that compare the rollouts of a group, and tools of
    the environment, are not supported.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._state: Any = None
        self._score: float | None = None

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(VerifiersSettings, config)
        return {"environment": load_environment(settings.env_id, settings.env_args)}

    async def reset(self, context: EpisodeContext) -> Sequence[Message]:
        given = {
            "prompt": [dict(message) for message in context.messages],
            "answer": "" if context.ground_truth is None else str(context.ground_truth),
            "task": context.data_source,
            "info": context.extra_info.get("info") or {},
            "example_id": context.extra_info.get("index", 0),
        }
        # No client: only the policy takes turns.
        self._state = await self._environment.init_state(given, client=None, model="policy")
        self._state = await self._environment.setup_state(self._state)
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Add the policy's turn to the rollout, and return the environment's answer.

        Raises:
            ValueError: the environment answers with anything but a user's text.
            Exception: an error that the environment reports in its state.
        """
        state = self._state
        said = {
            "prompt": [dict(message) for message in messages[:-1]],
            "completion": [{"role": "assistant", "content": text}],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state["trajectory_id"],
            "extras": {},
        }
        await self._environment.add_trajectory_step(state, said)
        if not await self._environment.is_completed(state):
            answers = await self._environment.env_response([*said["prompt"], *said["completion"]], state)
            if state.get("final_env_response") is None:
                return Reply(_user_text(answers))
            await self._environment.is_completed(state)
        await self._rate()
        return Reply(done=True, metrics=state["metrics"] or {})

    async def score(self) -> float | None:
        """Return the rubric's reward, or None without any turn."""
        if self._score is None and self._state is not None and self._state["trajectory"]:
            await self._complete()
            await self._rate()
        return self._score

    async def close(self) -> None:
        if self._state is not None:
            await self._complete()

    async def _complete(self) -> None:
        """End the rollout from outside, so that the environment's clean-up runs exactly once."""
        if not self._state["is_completed"]:
            if self._state.get("final_env_response") is None:
                self._state["final_env_response"] = []  # a stop condition of every MultiTurnEnv
            await self._environment.is_completed(self._state)

    async def _rate(self) -> None:
        state = self._state
        if (error := state.get("error")) is not None:
            raise error
        await self._environment.render_completion(state)
        await self._environment.rubric.score_rollout(state)
        self._score = state["reward"]


def load_environment(env_id: str, env_args: Mapping[str, Any]) -> Any:
    """Load a `verifiers.MultiTurnEnv` for `VerifiersEnvironment`. Loading it may also load a data set.

    Raises:
        ConfigError: `verifiers` is missing or has another version, it cannot load the environment, or the environment
            is of an unsupported kind.
    """
    verifiers = _package()
    with _no_signal_handlers():
        try:
            environment = verifiers.load_environment(env_id, **env_args)
        except Exception as error:
            raise ConfigError.wrap(f"env_id: {error}", error) from error
    if not isinstance(environment, verifiers.MultiTurnEnv):
        kind = type(environment).__name__
        raise ConfigError(f"env_id: {env_id!r} is a {kind}; only subclasses of MultiTurnEnv are supported")
    if environment.message_type != "chat":
        raise ConfigError(f"env_id: {env_id!r} has message_type {environment.message_type!r}; only chat is supported")
    if getattr(environment, "oai_tools", None):
        raise ConfigError(
            f"env_id: {env_id!r} has tools, which the model would not see; list them in rollout.multi_turn.tools, and "
            "use an environment without tools"
        )
    if type(environment).get_prompt_messages is not verifiers.MultiTurnEnv.get_prompt_messages:
        raise ConfigError(f"env_id: {env_id!r} rewrites the conversation between turns, which is not supported")
    return environment


def rows(env_id: str, env_args: Mapping[str, Any], *, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the environment's data set as JSON rows for `data.train_files`. `split` is `train` or `eval`.

    Raises:
        ConfigError: see `load_environment`.
    """
    environment = load_environment(env_id, env_args)
    data = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    for row in data:
        yield {
            "prompt": row["prompt"],
            "data_source": row.get("task", env_id),
            "reward_model": {"style": "rule", "ground_truth": row.get("answer", "")},
            "extra_info": {"index": row["example_id"], "info": row.get("info") or {}},
        }


def _package() -> ModuleType:
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError.wrap(
            f"env_id: the package verifiers is required and cannot be imported: {error}; {_INSTALL}", error
        ) from error
    version = str(getattr(verifiers, "__version__", "without a version"))
    if version != SUPPORTED and not version.startswith(f"{SUPPORTED}."):
        raise ConfigError(f"env_id: verifiers {version} is installed, which has a different interface; {_INSTALL}")
    return verifiers


@contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Keep environments of verifiers from installing handlers for SIGINT and SIGTERM. These signals belong to the run,
    and outside of the main thread the installation would raise."""
    home = importlib.import_module("verifiers.envs.environment")

    class Signals:
        def __getattr__(self, name: str) -> Any:
            return getattr(signal, name)

        def signal(self, number: int, handler: Any) -> Any:
            return signal.getsignal(number)

    real, home.signal = home.signal, Signals()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        home.signal = real  # type: ignore[attr-defined]


def _user_text(answers: Any) -> str:
    """Return the text of an `env_response` as one message of the user."""
    texts: list[str] = []
    for message in [answers] if isinstance(answers, Mapping) else answers:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] != "user" or any(part["type"] != "text" for part in parts):
            raise ValueError(f"the environment answers {message!r}; the policy accepts only text of the role user")
        texts += [part["text"] for part in parts]
    return "\n\n".join(texts)

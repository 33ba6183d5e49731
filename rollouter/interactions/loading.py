"""Loads and checks `rollout.multi_turn.interactions` before the first trajectory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from asyncrl.config.import_path import call_problem, load_registered, nearest
from asyncrl.config.interpolation import reveal
from asyncrl.config.sections.rollout import InteractionConfig
from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from rollouter.interactions.base import Environment, EpisodeContext
from rollouter.interactions.session import CLOSE_S, ConfiguredInteraction, InteractionSession
from rollouter.user_code import describe, name_of, shown

BUILT_IN = {
    "scripted": "rollouter.interactions.builtin:ScriptedUser",
    "model": "rollouter.interactions.model_user:ModelUser",
    "retry": "rollouter.interactions.builtin:RetryUser",
    "reasoning_gym": "rollouter.interactions.builtin:ReasoningGymEnvironment",
    "verifiers": "rollouter.interactions.verifiers_env:VerifiersEnvironment",
}
METHODS = ("reset", "step", "score", "close")

logger = logging.getLogger(__name__)


class InteractionSet:
    """The interactions of a run, at least one."""

    def __init__(self, interactions: Sequence[ConfiguredInteraction]) -> None:
        self._by_name = {interaction.config.name: interaction for interaction in interactions}

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order of the configuration; rows that name no interaction use the first."""
        return tuple(self._by_name)

    def session(self, context: EpisodeContext) -> InteractionSession:
        """Return the session with the environment that the row chooses by `extra_info.interaction_kwargs.name`.

        None values in `interaction_kwargs` are dropped, because parquet stores them for missing keys.

        Raises:
            DataError: no interaction has that name, or `interaction_kwargs` is not a mapping.
        """
        given = context.extra_info.get("interaction_kwargs")
        if given is not None and not isinstance(given, Mapping):
            raise DataError(f"extra_info.interaction_kwargs: {shown(given)} is not a mapping")
        kwargs = _without_none(given or {})
        name = kwargs.pop("name", self.names[0])
        if not isinstance(name, str) or name not in self._by_name:
            near = nearest(name_of(name), list(self._by_name))
            raise DataError(f"extra_info.interaction_kwargs.name: there is no interaction {shown(name)}{near}")
        return InteractionSession(self._by_name[name], context, kwargs)

    async def aclose(self) -> None:
        """Close the resources that environments share. Failures are only logged, because the run has ended."""
        for interaction in self._by_name.values():
            for shared in interaction.arguments.values():
                if not hasattr(shared, "aclose"):
                    continue
                with anyio.move_on_after(CLOSE_S, shield=True) as deadline:
                    try:
                        await shared.aclose()
                    except Exception as error:  # noqa: BLE001
                        logger.warning("%s: closing %s failed: %s", interaction.key, type(shared).__name__, error)
                if deadline.cancelled_caught:
                    logger.warning("%s: closing %s took too long", interaction.key, type(shared).__name__)


def load_interactions(configs: Sequence[InteractionConfig]) -> InteractionSet:
    """Load the classes and prepare them. It may block, for example if a class loads a data set.

    Raises:
        ConfigError: a class does not exist or is not an `Environment`, or its `config` is wrong.
        UserCodeError: the module or the `prepare` of a class raised.
    """
    interactions: list[ConfiguredInteraction] = []
    for number, config in enumerate(configs):
        here = f"rollout.multi_turn.interactions[{number}]"
        kind = _class(config.class_name, f"{here}.class_name")
        arguments = _prepared(kind, config, here)
        calls = anyio.CapacityLimiter(config.max_concurrency)
        interactions.append(ConfiguredInteraction(here, config, kind, arguments, calls))
    return InteractionSet(interactions)


def _class(name: str, key: str) -> type[Environment]:
    kind = load_registered(name, key, BUILT_IN, "Class")
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"{key}: {name} is not a subclass of rollouter.interactions.Environment; derive it from that")
    for method in METHODS:
        if not inspect.iscoroutinefunction(inspect.unwrap(getattr(kind, method))):
            raise ConfigError(
                f"{key}: {kind.__name__}.{method} is not async, so it would block all trajectories; write `async def`"
            )
    if kind.step is Environment.step:
        raise ConfigError(f"{key}: {kind.__name__} does not define step, so it cannot answer turns; define it")
    return kind


def _prepared(kind: type[Environment], config: InteractionConfig, key: str) -> Mapping[str, Any]:
    settings = reveal(config.config, f"{key}.config")
    try:
        arguments = kind.prepare(**settings)
    except ConfigError as error:
        raise ConfigError(f"{key}.config.{error.message}", error.cause) from error
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError.wrap(f"{key}: {kind.__name__}.prepare raised {describe(error)}", error) from error
    if problem := call_problem(kind, **arguments):
        raise ConfigError(f"{key}.config: it does not fit {problem}")
    return arguments


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }

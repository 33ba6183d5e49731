"""A stand-in for the package `verifiers`: the interfaces that `verifiers_env` uses, which behave as in version 0.1.10.

Tests that run against this stand-in also run against the real package where it is installed.
"""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.1.10"


class Error(Exception):
    pass


class State(dict[str, Any]):
    """A rollout's state, which also gives access to the fields of its row."""

    def __getitem__(self, key: str) -> Any:
        given = super().get("input", {})
        return given[key] if key in given else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def stop(function: Any) -> Any:
    function.stop = True
    return function


def cleanup(function: Any) -> Any:
    function.cleanup = True
    return function


class Rubric:
    def __init__(self, funcs: Sequence[Callable[..., Any]] = (), weights: Sequence[float] | None = None) -> None:
        self.funcs = list(funcs)
        self.weights = list(weights or [1.0] * len(self.funcs))

    async def score_rollout(self, state: State) -> None:
        metrics: dict[str, float] = {}
        for function in self.funcs:
            given = {name: state[name] for name in inspect.signature(function).parameters if name != "state"}
            result = function(
                **given, **({"state": state} if "state" in inspect.signature(function).parameters else {})
            )
            metrics[function.__name__] = float(await result if inspect.isawaitable(result) else result)
        state["metrics"] = metrics
        state["reward"] = sum(weight * value for weight, value in zip(self.weights, metrics.values(), strict=True))


class Environment:
    oai_tools: Any = None

    def __init__(
        self, *, dataset: Any = None, rubric: Rubric | None = None, message_type: str = "chat", oai_tools: Any = None
    ) -> None:
        self._rows = dataset
        self.rubric = rubric or Rubric()
        self.message_type = message_type
        self.oai_tools = oai_tools
        methods = [method for _, method in inspect.getmembers(self, predicate=inspect.ismethod)]
        self._stops = [method for method in methods if hasattr(method, "stop")]
        self._cleanups = [method for method in methods if hasattr(method, "cleanup")]
        # The package sets signal handlers through `signal` in this module.
        sys.modules["verifiers.envs.environment"].signal.signal(signal.SIGTERM, lambda *_: None)

    def get_dataset(self) -> list[dict[str, Any]]:
        return [
            {"prompt": [{"role": "user", "content": row["question"]}], "task": "default", "example_id": number, **row}
            for number, row in enumerate(self._rows)
        ]

    async def init_state(self, given: dict[str, Any], client: Any, model: str) -> State:
        fields = ("error", "final_env_response", "reward", "metrics")
        return State(
            input=dict(given),
            trajectory=[],
            trajectory_id=uuid.uuid4().hex,
            is_completed=False,
            **dict.fromkeys(fields),
        )

    async def is_completed(self, state: State) -> bool:
        for condition in self._stops:
            if await condition(state):
                state["is_completed"] = True
                for clean in self._cleanups:
                    await clean(state)
                return True
        return False


class MultiTurnEnv(Environment):
    def __init__(self, max_turns: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.max_turns = max_turns

    @stop
    async def has_error(self, state: State) -> bool:
        return state.get("error") is not None

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop
    async def has_final_env_response(self, state: State) -> bool:
        return state.get("final_env_response") is not None

    async def setup_state(self, state: State) -> State:
        return state

    async def get_prompt_messages(self, state: State) -> Any:
        raise AssertionError("the policy generates the turns, not the environment")

    async def add_trajectory_step(self, state: State, step: dict[str, Any]) -> None:
        state["trajectory"].append(step)

    async def render_completion(self, state: State) -> None:
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"], *(state["final_env_response"] or [])]
        state["completion"] = messages[len(state["prompt"]) :]


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(max_turns=1, **options)


class EnvGroup(Environment):
    pass


def load_environment(env_id: str, **env_args: Any) -> Any:
    try:
        return importlib.import_module(env_id).load_environment(**env_args)
    except ImportError as error:
        raise ValueError(f"Could not import '{env_id}' environment.") from error


def modules() -> dict[str, types.ModuleType]:
    """Return the modules that an import of the package puts into `sys.modules`."""
    environment = types.ModuleType("verifiers.envs.environment")
    environment.signal = signal  # type: ignore[attr-defined]
    return {
        "verifiers": sys.modules[__name__],
        "verifiers.envs": types.ModuleType("verifiers.envs"),
        "verifiers.envs.environment": environment,
    }

"""User-defined environments, as configurations name them: `tests.fakes.environments:Own`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asyncrl.config.sections.rollout import InteractionConfig
from asyncrl.core.failures import ConfigError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.loading import InteractionSet, load_interactions

HERE = "tests.fakes.environments"


async def _reply() -> Any:
    return Reply("and then?")


async def _nothing() -> Any:
    return None


class Own(Environment):
    """An environment whose methods run the functions that a test puts into `does`; `calls` lists the calls."""

    def __init__(
        self, does: Mapping[str, Callable[[], Awaitable[Any]]] | None = None, calls: list[Any] | None = None
    ) -> None:
        self._does = does or {}
        self._calls = calls if calls is not None else []

    async def reset(self, context: EpisodeContext, mood: str = "calm", **kwargs: Any) -> Any:
        self._calls.append(("reset", mood, kwargs))
        return await self._does.get("reset", _nothing)()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        self._calls.append(("step", text))
        return await self._does.get("step", _reply)()

    async def score(self) -> Any:
        self._calls.append("score")
        return await self._does.get("score", _nothing)()

    async def close(self) -> None:
        self._calls.append("close")
        await self._does.get("close", _nothing)()


class Picky(Environment):
    async def reset(self, context: EpisodeContext, *, level: int) -> Sequence[Message]:
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        return Reply("and then?")


class Broken(Environment):
    def __init__(self) -> None:
        raise RuntimeError("no display")

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        return Reply("and then?")


class Silent(Environment):
    pass


class BlockingEnvironment(Environment):
    def step(self, text: str, messages: Sequence[Message]) -> Reply:  # type: ignore[override]
        return Reply("hm")


class Shared:
    closed = 0

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def aclose(self) -> None:
        Shared.closed += 1
        if self._error is not None:
            raise self._error


class Sharing(Environment):
    def __init__(self, shared: Shared, volume: int) -> None:
        self.shared = shared

    @classmethod
    def prepare(cls, *, volume: int = 1, fails: bool = False, unpacked: bool = False) -> Mapping[str, Any]:
        if volume > 11:
            raise ConfigError(f"volume: {volume} is too loud; it goes to 11")
        if volume < 0:
            raise ValueError("a negative volume")
        if unpacked:
            return {"volum": volume}
        return {"shared": Shared(OSError("gone") if fails else None), "volume": volume}

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        return Reply("and then?")


class NotOne:
    pass


def interaction(class_name: str = "Own", **fields: Any) -> InteractionConfig:
    reference = f"{HERE}:{class_name}" if class_name[0].isupper() else class_name
    return InteractionConfig(class_name=reference, **fields)


def load(*configs: InteractionConfig) -> InteractionSet:
    return load_interactions(configs)


def context(**fields: Any) -> EpisodeContext:
    settings: dict[str, Any] = {
        "sample_id": "row",
        "trajectory": 0,
        "messages": ({"role": "user", "content": "17+5?"},),
    } | fields
    return EpisodeContext(**settings)


def assistant(text: str) -> tuple[str, list[Message]]:
    """Return the arguments of `step` for the first turn."""
    return text, [{"role": "user", "content": "17+5?"}, {"role": "assistant", "content": text}]

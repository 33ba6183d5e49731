"""All replicas of a run, as the Rollouter sees them (`ports.EngineFleet`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from ray import serve

from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.ports import ApplyReport, GenerateRequest, Publication
from asyncrl.types import Turn
from rollouter import client
from rollouter.serving.app import replicas_up
from rollouter.serving.handles import answer, typed
from rollouter.serving.options import DEPLOYMENT_NAME, app_name


class ServeFleet:
    """Talks to a started application (`app.start_app`), from any process of its Ray cluster."""

    def __init__(self, config: Config, *, namespace: str) -> None:
        self._timeouts = config.timeouts
        self._max_attempts = config.rollout.max_attempts
        self._clear_kv = config.weight_sync.clear_kv_cache
        self._mode = config.async_training.partial_mode if config.async_training.partial_rollout else "wait"
        self._namespace = namespace
        self._handle = serve.get_deployment_handle(DEPLOYMENT_NAME, app_name(namespace))

    async def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        """Run the requests on one replica; see `ports.EngineFleet`.

        Raises:
            InfraError: engines failed more often than `rollout.max_attempts` allows.
            DeadlineError: it took longer than `timeouts.generate_s`, failed tries included.
            DataError: the engine refuses a prompt.
        """
        limit_s = self._timeouts.generate_s
        try:
            with anyio.fail_after(limit_s):
                return await client.generate(self._call, requests, session=session, max_attempts=self._max_attempts)
        except TimeoutError as error:
            raise DeadlineError(f"a generate call of {len(requests)} requests took over {limit_s:g} s") from error

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """Bring every replica to the publication's version, all at once; a failed replica is tried again once replaced.

        Raises:
            InfraError: some replica could not, within `rollout.max_attempts` tries.
            DeadlineError: nor within `timeouts.apply_s` a try.
            BugError: an engine serves other weights than were published.
        """
        for attempt in range(1, self._max_attempts + 1):
            try:
                return await self._everywhere(
                    "apply_version", publication, self._mode, self._clear_kv, limit_s=self._timeouts.apply_s
                )
            except InfraError:
                if attempt == self._max_attempts:
                    raise
                await anyio.sleep(client.FIRST_BACKOFF_S * 2 ** (attempt - 1))
                await replicas_up(self._namespace, self._timeouts.start_s)
        raise AssertionError("max_attempts is positive")

    async def status(self) -> list[Mapping[str, Any]]:
        """Per replica, see `ports.EngineFleet`."""
        return await self._everywhere("server_status", limit_s=self._timeouts.call_s)

    async def _call(self, requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        response = self._handle.options(session_id=session).generate_tokens.remote(list(requests))
        turns: list[Turn] = await answer(response, "a generate call")
        return turns

    async def _everywhere(self, method: str, *args: Any, limit_s: float) -> list[Any]:
        try:
            with anyio.fail_after(limit_s):
                return await self._handle.broadcast(method, *args).results_async()
        except TimeoutError as error:
            raise DeadlineError(f"{method}: not every replica answered within {limit_s:g} s") from error
        except Exception as error:
            raise typed(error, method) from error

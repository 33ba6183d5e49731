"""The deployment of a launch: a `RolloutServer`, behind a class that the driver can bind without importing vLLM.

`ray.serve.llm` imports vLLM when it is imported (7 s on CPU). Only the replica needs it, so only the replica pays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from asyncrl.core.failures import AsyncRLError, InfraError
from asyncrl.core.ports import Accepted, ApplyReport, GenerateRequest, Publication
from rollouter.serving.client import Delta, EventBatch
from rollouter.serving.options import ServingOptions

if TYPE_CHECKING:
    from rollouter.serving.replica.weights import PauseMode


class RolloutReplica:
    """Delegates to the methods of the same names of `RolloutServer`."""

    async def __init__(self, options: ServingOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine.

        Raises:
            InfraError: it does not start; the engine's own error is the cause.
        """
        await self._start(options)

    async def _start(self, options: ServingOptions, *, openai: bool = False) -> None:
        try:
            from rollouter.serving.replica.server import start_server

            self._server = await start_server(options, openai=openai)
        except AsyncRLError:
            raise
        except Exception as error:  # noqa: BLE001  any library's, and typed here before it leaves the process
            model = options.llm_config["model_loading_config"]["model_source"]
            raise InfraError.wrap(f"the engine for {model} did not start", error) from None

    async def generate_tokens(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Accepted | EventBatch | list[Delta], None]:
        async with aclosing(self._server.generate_tokens(requests)) as items:
            async for item in items:
                yield item

    async def apply_version(self, publication: Publication, mode: PauseMode, clear_kv: bool) -> ApplyReport:
        return await self._server.apply_version(publication, mode, clear_kv)

    async def check_health(self) -> None:
        await self._server.check_health()

"""A replica's part in a round by GPU broadcast: it makes the calls that rank 0 of the Trainer asks for to its engine.

    join (while decoding) ▸ pause ▸ [init_weight_transfer_engine] ▸ start_weight_update ▸ update_weights ▸ finished

See `asyncrl.weights.broadcast`. A new process group is formed only if its members have changed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import WeightsVersion
from asyncrl.weights.object_store import answer_of

ANSWER_S = 10.0
"""Time for which the store may exceed the deadline of a round, which is its own."""


class BroadcastReceiver:
    """One version on its way to one engine."""

    def __init__(self, llm: AsyncLLM, store: Any, replica: str, weights_version: WeightsVersion) -> None:
        self._llm, self._store = llm, store
        self._weights_version, self._replica = weights_version, replica
        self._first_rank = 0
        self._num_calls = 0
        self.has_started = False
        """Whether the engine has an update in progress."""

    async def join(self, limit_s: float) -> None:
        """Wait until rank 0 and all replicas of the round are present.

        Raises:
            InfraError: they are not, or this replica is no member.
        """
        try:
            self._first_rank = await self._ask("join_round", limit_s)
        except BaseException as error:
            self.fail(error)
            raise

    async def receive(self, limit_s: float) -> None:
        """Make the calls of the round, up to the one that loads the version.

        Raises:
            InfraError: the round has failed.
        """
        method = ""
        while method != "update_weights":
            call = await self._ask("next_call", limit_s, self._num_calls)
            method, info = call.method, {"broadcast": dict(call.info), "limit_s": call.limit_s}
            match method:
                case "init_weight_transfer_engine":
                    info["broadcast"]["rank_offset"] = self._first_rank
                    try:
                        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
                    except Exception as error:
                        raise InfraError(self._problem(error)) from error
                case "start_weight_update":
                    await self.start_update()
                case "update_weights":
                    await self._llm.update_weights(WeightTransferUpdateRequest(info))
                    for failure in filter(None, await self._llm.collective_rpc("broadcast_failure")):
                        raise InfraError(f"replica {self._replica}: {failure.splitlines()[0]}")
            self._num_calls += 1

    async def start_update(self) -> None:
        """Begin an update of the engine, unless one is in progress."""
        if not self.has_started:
            self.has_started = True
            await self._llm.start_weight_update()

    def finish(self) -> None:
        """Report that the engine serves the version. The answer is not awaited: the replica is done."""
        self._store.record_calls.remote(self._weights_version, self._replica, self._num_calls + 1)

    def fail(self, error: BaseException) -> None:
        """End the round for everyone, if it has not ended. Nothing is awaited, as the caller may be cancelled."""
        problem = error.message if isinstance(error, InfraError) else self._problem(error)
        self._store.fail_round.remote(self._weights_version, problem)

    async def _ask(self, method: str, limit_s: float, *args: Any) -> Any:
        call = getattr(self._store, method).remote(self._weights_version, self._replica, *args)
        return await answer_of(call, limit_s + ANSWER_S, "a GPU broadcast")

    def _problem(self, error: BaseException) -> str:
        lines = str(error).splitlines() or [""]
        return f"replica {self._replica}: {type(error).__name__}: {lines[0]}"

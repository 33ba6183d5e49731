"""One replica: an `AsyncLLM` under `ray.serve.llm`, with token-exact generation and live weight updates.

    requests ──▶ gate ──▶ AsyncLLM ──▶ turns with spans
                  │ shut from pause to resume
    apply: fetch (decoding goes on) → shut gate → pause → load → name the version → resume → open gate → verify

Whatever fails on the way, the replica ends in one of three states: it serves the new version; it serves the old one and
says so (the failure came before the load); or it is broken, refuses every request and ends its process, so that Serve
replaces it (the failure came during or after the load, so what it would serve is unknown).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import ray
from ray import serve
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.failures import AsyncRLError, BugError, DataError, InfraError
from asyncrl.ports import ApplyReport, GenerateRequest, Publication
from asyncrl.types import FinishReason, Span, Turn
from asyncrl.weights.checksums import differing_groups, merge
from asyncrl.weights.object_store import STORE_NAME, find_store
from rollouter.serving.engine import RolloutEngine
from rollouter.serving.options import ServingOptions
from rollouter.serving.own_log import own_log

logger = logging.getLogger(__name__)

PauseMode = Literal["keep", "abort", "wait"]
VERIFY_BYTES_PER_CALL = 64 << 20
"""A checksum call holds up decoding for as long as it reads so many bytes: some 10 ms."""
LAST_WORDS_S = 0.5
"""Between giving up and the end of the process: answers are on their way."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class RolloutServer(LLMServer):
    """What the Rollouter calls on a replica, besides everything `LLMServer` has."""

    _default_engine_cls = RolloutEngine

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        llm_config: LLMConfig,
        *,
        options: ServingOptions,
        engine_cls: type | None = None,
    ) -> None:
        """Start the engine and, if the run has a weight store with a version in it, apply that before any request.

        Args:
            llm_config: Ray's description of model, engine and resources.
            options: Where versions come from, and how they are applied.
            engine_cls: Another engine class, for one with an HTTP side.

        Raises:
            InfraError: the engine does not start.
        """
        self._version = 0
        self._broken = ""
        self._verify = options.verify
        self._verified = False
        self._apply_s = options.apply_s
        self._namespace = options.namespace
        self._apply_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._replica = serve.get_replica_context().replica_id.unique_id
        await super().__init__(llm_config, engine_cls=engine_cls)
        await self._llm.update_weight_version("0")
        self._max_model_len = self._llm.model_config.max_model_len
        if find_store(self._namespace) is not None:
            await self._llm.collective_rpc(
                "connect_store", args=(ray.get_runtime_context().gcs_address, self._namespace, STORE_NAME)
            )
            await self._catch_up()

    @property
    def _llm(self) -> AsyncLLM:
        return self.engine.client

    # ---------------------------------------------------------------------------------------------- generation

    async def generate_tokens(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        """Run the requests together; turns in their order. A turn holds what this call sampled, without `so_far`.

        Raises:
            DataError: a prompt or its sampling parameters that the engine refuses.
            InfraError: the engine died, or this replica is waiting to be replaced.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(request)) for request in requests]
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        return [task.result() for task in tasks]

    async def _generate(self, request: GenerateRequest) -> Turn:
        prompt_ids, params = self._resolve(request)
        await self._gate.wait()
        if self._broken:
            raise InfraError(self._broken)
        # The salt keeps versions apart in the prefix cache: a request admitted under v never reads a block that an
        # older version computed, even where running requests (`keep`) forbid emptying the cache.
        prompt = tokens_input(prompt_ids, cache_salt=str(self._version))
        try:
            # FINAL_ONLY: one output comes, at the end.
            results = [result async for result in self._llm.generate(prompt, params, request.request_id)]
        except (VLLMClientError, ValueError) as error:
            raise DataError.wrap(f"request {request.request_id}: the engine refuses it", error) from error
        except EngineDeadError as error:
            self._give_up("its engine is dead")
            raise InfraError.wrap(
                f"replica {self._replica}: the engine is dead; why is in {own_log()}, in logs/ray of the run directory",
                error,
            ) from error
        if self._broken:
            raise InfraError(self._broken)
        if len(results) != 1:
            raise BugError(f"request {request.request_id}: the engine gave {len(results)} final outputs")
        return _turn(request.request_id, results[0].outputs[0])

    def _resolve(self, request: GenerateRequest) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters of the engine call; tokens so far join the prompt and leave the budget."""
        done = 0 if request.so_far is None else len(request.so_far.response_ids)
        prompt_ids = request.prompt_ids.tolist()
        if request.so_far is not None:
            prompt_ids += request.so_far.response_ids.tolist()
        if len(prompt_ids) >= self._max_model_len:
            raise DataError(
                f"request {request.request_id}: {len(prompt_ids)} prompt tokens leave no room in a context of "
                f"{self._max_model_len}; lower data.max_prompt_length or raise rollout.max_model_len"
            )
        sampling = dict(request.sampling)
        if sampling.get("seed") is not None and current_platform.is_cpu():
            raise DataError(f"request {request.request_id}: a per-request seed ends vLLM's CPU engine; leave it out")
        sampling["max_tokens"] -= done
        if "min_tokens" in sampling:
            sampling["min_tokens"] = max(0, sampling["min_tokens"] - done)
        stop = list(sampling.pop("stop", ()))
        try:
            return prompt_ids, SamplingParams(
                **sampling,
                stop=stop,
                detokenize=bool(stop),
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except (TypeError, ValueError) as error:
            raise DataError.wrap(f"request {request.request_id}: sampling parameters", error) from error

    # ---------------------------------------------------------------------------------------------- weights

    async def apply_version(self, publication: Publication, mode: PauseMode, clear_kv: bool) -> ApplyReport:
        """Serve `publication`. A replica that already does, or serves a newer version, answers at once.

        Args:
            publication: What to apply.
            mode: What becomes of requests in flight: go on (`keep`), come back ABORTED, or finish first (`wait`).
            clear_kv: With `keep`: compute their KV cache anew under the new weights.

        Raises:
            InfraError: it could not be applied; the message says what the replica serves now.
            BugError: the engine serves other weights than were published.
        """
        async with self._apply_lock:
            if publication.version <= self._version:
                return self._report(0.0, 0.0, 0.0, 0)
            fetch_s = await self._fetch(publication.version)
            pause_s, load_s, in_flight = await self._swap(publication.version, mode, clear_kv)
            if self._verify == "every" or (self._verify == "first" and not self._verified):
                await self._check(publication)
            return self._report(fetch_s, pause_s, load_s, in_flight)

    async def _catch_up(self) -> None:
        store = find_store(self._namespace)
        latest: Publication | None = None if store is None else await store.latest.remote()
        if latest is not None:
            await self.apply_version(latest, "abort", True)

    async def _fetch(self, version: int) -> float:
        """Bring the version's bytes to this node and into the workers, while they decode. Returns seconds."""
        started = time.perf_counter()
        try:
            store = find_store(self._namespace)
            if store is None:
                raise InfraError(f"no weight store in Ray namespace {self._namespace!r}")
            async with asyncio.timeout(self._apply_s):
                refs = await store.tensors.remote(version)
                # Objects on this node first: the workers' own fetch then is a mapping, not a transfer.
                await asyncio.to_thread(ray.wait, refs, num_returns=len(refs), timeout=self._apply_s)
                await self._llm.collective_rpc("fetch_version", args=(version,))
                await self._llm.collective_rpc("await_fetch", args=(self._apply_s,))
        except Exception as error:
            raise InfraError.wrap(f"{self._state()}: fetching version {version} failed", error) from error
        return time.perf_counter() - started

    async def _swap(self, version: int, mode: PauseMode, clear_kv: bool) -> tuple[float, float, int]:
        """Pause, load, resume. Returns pause seconds, load seconds, requests in flight at the pause."""
        self._gate.clear()
        in_flight = self._llm.output_processor.get_num_unfinished_requests()
        loading = False
        try:
            async with asyncio.timeout(self._apply_s):
                # `AsyncLLM.pause_generation` is this and 20 ms of sleep, for callers that want outputs delivered first.
                await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_kv or mode != "keep")
                # The steps that were under way (all of a drain) made tokens until here.
                started = time.perf_counter()
                loading = True
                load_s = max(await self._llm.collective_rpc("load_version", args=(version,)))
                await self._llm.update_weight_version(str(version))
                self._version = version
                await self._llm.resume_generation()
        except BaseException as error:
            await asyncio.shield(self._recover(version, loading, error))
            if isinstance(error, Exception):
                raise InfraError.wrap(f"{self._state()}: applying version {version} failed", error) from error
            raise
        finally:
            self._gate.set()
        return time.perf_counter() - started, load_s, in_flight

    async def _recover(self, version: int, loading: bool, error: BaseException) -> None:
        """After a failed swap: serve the old version if its weights are untouched, else wait to be replaced."""
        if not loading:
            try:
                await self._llm.resume_generation()
            except Exception as second:  # noqa: BLE001  the first error is the one to report
                self._give_up(f"resuming after {error!r} failed: {second!r}")
            return
        self._give_up(f"loading version {version} failed half-way: {error!r}")
        # Frozen requests would wait for ever: nothing resumes this engine.
        await self._llm.abort(list(self._llm.output_processor.request_states), internal=True)

    async def _check(self, publication: Publication) -> None:
        """Compare what the engine serves with what was published, a few groups at a time so that decoding goes on."""
        served: dict[str, int] = {}
        for groups in _batches(merge(await self._llm.collective_rpc("group_sizes"))):
            served |= merge(await self._llm.collective_rpc("group_checksums", args=(groups,)))
        if wrong := differing_groups(publication.checksums, served):
            self._give_up(
                f"version {publication.version} is not what was published: checksums differ in {', '.join(wrong)}"
            )
            raise BugError(self._broken)
        self._verified = True

    def _give_up(self, why: str) -> None:
        """Refuse everything from now on, and end this process once the answers are out: Serve starts another."""
        if not self._broken:
            self._broken = f"replica {self._replica} must be replaced: {why}"
            logger.error(self._broken)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._exit)

    def _exit(self) -> None:
        try:
            self._llm.shutdown()
        finally:
            os._exit(1)

    def _state(self) -> str:
        return self._broken or f"replica {self._replica} still serves version {self._version}"

    def _report(self, fetch_s: float, pause_s: float, load_s: float, in_flight: int) -> ApplyReport:
        return ApplyReport(self._replica, self._version, fetch_s, pause_s, load_s, in_flight, self._verified)

    # ---------------------------------------------------------------------------------------------- health

    async def check_health(self) -> None:
        """Serve calls this; raising makes it replace the replica."""
        if self._broken:
            raise InfraError(self._broken)
        await super().check_health()

    async def server_status(self) -> Mapping[str, Any]:
        """See `ports.EngineFleet.status`."""
        gauges = self.engine.gauges
        return {
            "replica": self._replica,
            "version": self._version,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_cache_usage": gauges.kv_cache_usage,
            "generated_tokens": gauges.generated_tokens,
        }


async def start_server(options: ServingOptions) -> RolloutServer:
    """A started server. Serve awaits asynchronous constructors; plain Python does not."""
    server = RolloutServer.__new__(RolloutServer)
    await server.__init__(LLMConfig(**options.llm_config), options=options)  # type: ignore[misc]
    return server


def _turn(request_id: str, output: CompletionOutput) -> Turn:
    finish = _FINISH.get(output.finish_reason or "")
    if finish is None:
        raise InfraError(f"request {request_id}: the engine ended it with {output.finish_reason!r}")
    log_probs = np.asarray(output.logprobs.logprobs if output.logprobs else (), dtype=np.float32)
    if len(log_probs) != len(output.token_ids):
        raise BugError(f"request {request_id}: {len(output.token_ids)} tokens with {len(log_probs)} log-probs")
    if output.token_ids and not output.weight_versions:
        raise BugError(f"request {request_id}: the engine did not say which version sampled its tokens")
    return Turn(
        response_ids=np.asarray(output.token_ids, dtype=np.int32),
        rollout_log_probs=log_probs,
        spans=tuple(
            Span(span.start, int(span.version)) for span in output.weight_versions or () if span.end > span.start
        ),
        finish_reason=finish,
    )


def _batches(sizes: Mapping[str, int]) -> list[list[str]]:
    """Groups in lists of about `VERIFY_BYTES_PER_CALL`."""
    batches: list[list[str]] = [[]]
    held = 0
    for group, size in sizes.items():
        if batches[-1] and held + size > VERIFY_BYTES_PER_CALL:
            batches.append([])
            held = 0
        batches[-1].append(group)
        held += size
    return batches


def _first(failures: BaseExceptionGroup) -> BaseException:
    """One error of ours out of a group, the gravest class first; else whatever came first."""
    leaves: list[BaseException] = []
    for failure in failures.exceptions:
        leaves.append(_first(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    for kind in (BugError, InfraError, AsyncRLError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]

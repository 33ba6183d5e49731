"""One replica: an `AsyncLLM` under `ray.serve.llm`, with token-exact generation and live weight updates.

    requests ──▶ gate ──▶ AsyncLLM ──▶ pieces of turns, with spans
                  │ shut from pause to resume
    apply: fetch (decoding goes on) → shut gate → pause → load → name the version → resume → open gate → verify

Whatever fails on the way, the replica ends in one of three states: it serves the new version; it serves the old one and
says so (the failure came before the load); or it is broken, refuses every request and ends its process, so that Serve
replaces it (the failure came during or after the load, so what it would serve is unknown). It also ends when its engine
is dead, or has requests and makes no token for `timeouts.engine_s` outside a pause; then each of those may be why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import psutil
import ray
from ray import serve
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.failures import AsyncRLError, BugError, DataError, EngineCrashError, InfraError
from asyncrl.ports import ApplyReport, Edition, GenerateRequest, Publication, ReplicaPhase, ReplicaReport
from asyncrl.weights.checksums import differing_groups, merge
from asyncrl.weights.object_store import STORE_NAME, find_store
from rollouter.serving.engine import RolloutEngine
from rollouter.serving.options import ServingOptions
from rollouter.serving.own_log import own_log
from rollouter.serving.pieces import Piece
from rollouter.serving.reporter import Reporter
from rollouter.serving.running import FINISH, Running

logger = logging.getLogger(__name__)

PauseMode = Literal["keep", "abort", "wait"]
VERIFY_BYTES_PER_CALL = 64 << 20
"""A checksum call holds up decoding for as long as it reads so many bytes: some 10 ms."""
TELL_EVERY_S = 1.0
"""What requests that go on have made is told so often: a replica that dies takes no more than this with it."""
GATHER_S = 0.25
"""When a request has ended, its call waits so long for others to end before it tells, as a message costs a millisecond;
when all have ended, that is told at once."""
WATCH_EVERY_S = 1.0
ASK_STORE_S = 5.0
"""A replica that cannot fetch a version waits so long for another one before it tries again."""
FRESH_S = 15.0
"""So long after its start a replica may be unknown to whoever applies versions, and follows the store by itself."""
LAST_WORDS_S = 0.5
"""Between giving up and the end of the process: answers are on their way."""


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
        self._edition = Edition(0, 0)
        self._broken = ""
        self._crashed = False
        self._verify = options.verify
        self._verified = False
        self._apply_s = options.apply_s
        self._engine_s = options.engine_s
        self._start_s = options.start_s
        self._namespace = options.namespace
        self._engine_pids: tuple[int, ...] = ()
        self._engine_up = False
        self._up = False
        self._paused = False
        self._apply_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._node_id = ray.get_runtime_context().get_node_id()
        self._phase: tuple[ReplicaPhase, float] = ("starting", time.time())
        self._store = await asyncio.to_thread(find_store, self._namespace)
        self._reporter = None if self._store is None else Reporter(self._store, self._describe)
        await super().__init__(llm_config, engine_cls=engine_cls)
        self._engine_pids = await asyncio.to_thread(_engine_pids, self._llm)
        self._engine_up = True
        await self._llm.update_weight_version("0")
        self._max_model_len = self._llm.model_config.max_model_len
        self._tasks = [self._in_background(self._watch())]
        if self._store is not None:
            await self._llm.collective_rpc(
                "connect_store", args=(ray.get_runtime_context().gcs_address, self._namespace, STORE_NAME)
            )
            await self._catch_up(self._store)
            if self._edition > Edition(0, 0):
                self._tasks.append(self._in_background(self._follow(self._store)))
        self._up = True
        self._enter("serving")

    @property
    def _llm(self) -> AsyncLLM:
        return self.engine.client

    # ---------------------------------------------------------------------------------------------- generation

    async def generate_tokens(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[Piece], None]:
        """Run the requests together, and tell what they sample, without `so_far`: soon after some have ended, and of
        those that go on about once a second. Before an error comes all that there is, and before everything else, it
        may be without a token, that the engine has them all: whatever ends this process now may be of their making.

        Raises:
            DataError: a prompt or its sampling parameters that the engine refuses.
            EngineCrashError: the engine died or hung.
            InfraError: this replica is waiting to be replaced.
        """
        if self._broken:
            raise InfraError(self._broken)
        runs = [Running(number, request.request_id) for number, request in enumerate(requests)]
        news = asyncio.Event()
        taken = False
        work = asyncio.create_task(self._run(requests, runs, news))
        work.add_done_callback(lambda _: news.set())
        try:
            while not work.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(TELL_EVERY_S):
                        await news.wait()
                some = news.is_set()
                news.clear()
                if not taken:
                    if taken := all(run.collector is not None for run in runs):
                        yield _pieces(runs)
                    continue
                if some and not work.done():
                    await asyncio.wait([work], timeout=GATHER_S)
                if pieces := _pieces(runs):
                    yield pieces
            if pieces := _pieces(runs):
                yield pieces
            await work
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=ASK_STORE_S)

    async def _run(self, requests: Sequence[GenerateRequest], runs: Sequence[Running], news: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for request, run in zip(requests, runs, strict=True):
                    group.create_task(self._generate(request, run, news))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _generate(self, request: GenerateRequest, run: Running, news: asyncio.Event) -> None:
        prompt_ids, params = self._resolve(request)
        await self._gate.wait()
        if self._broken:
            raise InfraError(self._broken)
        # The salt keeps versions apart in the prefix cache: a request admitted under v never reads a block that an
        # older version computed, even where running requests (`keep`) forbid emptying the cache.
        prompt = tokens_input(prompt_ids, cache_salt=f"{self._edition.lineage}-{self._edition.version}")
        try:
            try:
                run.collector = await self._llm.add_request(request.request_id, prompt, params)
            except (VLLMClientError, ValueError) as error:
                raise DataError.wrap(f"request {request.request_id}: the engine refuses it", error) from error
            run.state = self._llm.output_processor.request_states.get(run.collector.request_id)
            news.set()
            # FINAL_ONLY: one output comes, at the end.
            run.output = await run.collector.get()
        except asyncio.CancelledError:
            with suppress(EngineDeadError):
                if run.collector is None:
                    await self._llm.abort(request.request_id)
                else:
                    await self._llm.abort(run.collector.request_id, internal=True)
            raise
        except DataError:
            raise
        except Exception as error:
            dead = isinstance(error, EngineDeadError)
            if run.collector is None and not dead:
                raise InfraError.wrap(f"request {request.request_id}: the engine did not take it", error) from error
            self._give_up("its engine is dead" if dead else f"its engine's client failed: {error!r}", crash=True)
            kind = EngineCrashError if self._crashed and run.collector is not None else InfraError
            told = f"{self._broken}; why is in {own_log()}, in logs/ray of the run directory"
            raise kind.wrap(told, error) from error
        news.set()
        reason = run.output.outputs[0].finish_reason
        if not run.output.finished or reason not in FINISH:
            raise InfraError(f"request {request.request_id}: the engine ended it with {reason!r}")

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
            if self._broken:
                raise InfraError(self._broken)
            if publication.edition <= self._edition:
                return self._report(0.0, 0.0, 0.0, 0)
            try:
                fetch_s = await self._fetch(publication.edition)
                pause_s, load_s, in_flight = await self._swap(publication.edition, mode, clear_kv)
                if self._verify == "every" or (self._verify == "first" and not self._verified):
                    await self._check(publication)
            finally:
                self._enter("serving" if self._up else "starting")
            return self._report(fetch_s, pause_s, load_s, in_flight)

    async def _catch_up(self, store: Any) -> None:
        """Serve what the store has newest; the model's files, if nothing was ever published.

        What cannot be fetched any more, as the Trainer that published it is dead, is waited out: another comes.

        Raises:
            InfraError: nothing could be fetched within `timeouts.start_s`, or applying failed half-way.
            BugError: the engine serves other weights than were published.
        """
        lost: Edition | None = None
        problem = "the weight store did not answer"
        until = time.monotonic() + self._start_s
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(2 * ASK_STORE_S):
                    newest: Publication | None = await store.start_with.remote(ASK_STORE_S, lost)
            except (TimeoutError, ray.exceptions.RayError) as error:
                problem = f"the weight store cannot be asked: {error}"
                await asyncio.sleep(WATCH_EVERY_S)
                continue
            if newest is None or newest.edition <= self._edition:
                return
            try:
                await self.apply_version(newest, "abort", True)
                lost = None
            except InfraError as error:
                if self._broken:
                    raise
                problem = error.message
                logger.warning("%s; it is tried again, or what is published next", error.brief)
                lost = newest.edition
        raise InfraError(
            f"replica {self._replica} found no version that it could fetch within {self._start_s:g} s "
            f"(timeouts.start_s): {problem}"
        )

    async def _follow(self, store: Any) -> None:
        """What is published between a replica's last look at the store and the moment in which whoever applies versions
        gets to know of the replica reaches it in no other way."""
        until = time.monotonic() + FRESH_S
        while time.monotonic() < until and not self._broken:
            await asyncio.sleep(WATCH_EVERY_S)
            newest = None if self._reporter is None else self._reporter.newest
            if newest is not None and newest > self._edition:
                with suppress(InfraError):
                    await self._catch_up(store)

    async def _fetch(self, edition: Edition) -> float:
        """Bring the version's bytes to this node and into the workers, while they decode. Returns seconds."""
        started = time.perf_counter()
        self._enter("fetching")
        try:
            if self._store is None:
                raise InfraError(f"no weight store in Ray namespace {self._namespace!r}")
            async with asyncio.timeout(self._apply_s):
                refs = await self._store.tensors.remote(edition)
                # Objects on this node first: the workers' own fetch then is a mapping, not a transfer. And what is lost
                # is told here with its cause.
                await asyncio.to_thread(_bring, refs, self._apply_s)
                await self._llm.collective_rpc("fetch_version", args=tuple(edition))
                await self._llm.collective_rpc("await_fetch", args=(self._apply_s,))
        except Exception as error:
            raise InfraError.wrap(f"{self._state()}: fetching version {edition.version} failed", error) from error
        return time.perf_counter() - started

    async def _swap(self, edition: Edition, mode: PauseMode, clear_kv: bool) -> tuple[float, float, int]:
        """Pause, load, resume. Returns pause seconds, load seconds, requests in flight at the pause."""
        self._gate.clear()
        self._enter("pausing")
        in_flight = self._llm.output_processor.get_num_unfinished_requests()
        try:
            async with asyncio.timeout(self._apply_s):
                # `AsyncLLM.pause_generation` is this and 20 ms of sleep, for callers that want outputs delivered first.
                await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_kv or mode != "keep")
                # The steps that were under way (all of a drain) made tokens until here.
                started = time.perf_counter()
                self._paused = True
                self._enter("loading")
                load_s = max(await self._llm.collective_rpc("load_version", args=tuple(edition)))
                await self._llm.update_weight_version(str(edition.version))
                self._edition = edition
                await self._llm.resume_generation()
        except BaseException as error:
            await asyncio.shield(self._recover(edition.version, error))
            if isinstance(error, Exception):
                raise InfraError.wrap(f"{self._state()}: applying version {edition.version} failed", error) from error
            raise
        finally:
            self._paused = False
            self._gate.set()
        return time.perf_counter() - started, load_s, in_flight

    async def _recover(self, version: int, error: BaseException) -> None:
        """After a failed swap: serve the old version if its weights are untouched, else wait to be replaced."""
        if self._paused:
            self._give_up(f"loading version {version} failed half-way: {error!r}")
            return
        try:
            async with asyncio.timeout(self._engine_s):
                await self._llm.resume_generation()
        except Exception as second:  # noqa: BLE001  the first error is the one to report
            self._give_up(f"resuming after {error!r} failed: {second!r}", crash=True)

    async def _check(self, publication: Publication) -> None:
        """Compare what the engine serves with what was published, a few groups at a time so that decoding goes on."""
        self._enter("verifying")
        served: dict[str, int] = {}
        try:
            async with asyncio.timeout(self._apply_s):
                for groups in _batches(merge(await self._llm.collective_rpc("group_sizes"))):
                    served |= merge(await self._llm.collective_rpc("group_checksums", args=(groups,)))
        except Exception as error:
            self._give_up(f"its weights of version {publication.version} could not be verified: {error!r}", crash=True)
            raise InfraError.wrap(self._broken, error) from error
        if wrong := differing_groups(publication.checksums, served):
            self._give_up(
                f"version {publication.version} is not what was published: checksums differ in {', '.join(wrong)}"
            )
            raise BugError(self._broken)
        self._verified = True

    def _report(self, fetch_s: float, pause_s: float, load_s: float, in_flight: int) -> ApplyReport:
        lineage, version = self._edition
        return ApplyReport(self._replica, version, fetch_s, pause_s, load_s, in_flight, self._verified, lineage)

    # ---------------------------------------------------------------------------------------------- health

    def _give_up(self, why: str, *, crash: bool = False) -> None:
        """Refuse everything from now on, and end this process once the answers are out: Serve starts another.

        Args:
            why: What happened.
            crash: The requests that are in the engine may be why, and are told so.
        """
        if self._broken:
            return
        self._broken = f"replica {self._replica} must be replaced: {why}"
        self._crashed = crash
        logger.error(self._broken)
        self._enter("broken")
        # Nothing else would end requests that are frozen in the engine, or that it is stuck with.
        self._llm.output_processor.propagate_error(EngineDeadError())
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._exit)

    def _exit(self) -> None:
        """End the engine's processes for certain, stopped ones too, and this one whatever they do."""
        threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()
        for pid in self._engine_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            self._llm.shutdown()
        finally:
            os._exit(1)

    async def _watch(self) -> None:
        """Give up an engine that is dead, or that has requests and makes no token."""
        tokens = -1
        stuck_s = 0.0
        while not self._broken:
            seen = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            if self._llm.errored:
                self._give_up("its engine is dead", crash=True)
                continue
            before, tokens = tokens, self.engine.gauges.generated_tokens
            busy = self._llm.output_processor.get_num_unfinished_requests() > 0
            if tokens != before or not busy or self._paused:
                stuck_s = 0.0
                continue
            # Time in which this loop stood still itself says nothing of the engine.
            stuck_s += min(time.monotonic() - seen, 2 * WATCH_EVERY_S)
            if stuck_s >= self._engine_s:
                self._give_up(
                    f"its engine has {self._llm.output_processor.get_num_unfinished_requests()} requests and made no "
                    f"token for {self._engine_s:g} s (timeouts.engine_s)",
                    crash=True,
                )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this process's whole life. If it fails, nobody watches this replica any more."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._give_up(f"what watches it failed: {error!r}")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _enter(self, phase: ReplicaPhase) -> None:
        """Say in which phase this replica is now; `broken` is the last one."""
        if self._phase[0] not in (phase, "broken"):
            self._phase = (phase, time.time())
            if self._reporter is not None:
                self._reporter.changed()

    def _describe(self) -> ReplicaReport:
        """Called in the reporter's thread, and while the engine starts."""
        llm = self._llm if self._engine_up else None
        phase, since = self._phase
        return ReplicaReport(
            replica=self._replica,
            node_id=self._node_id,
            pid=os.getpid(),
            engine_pids=self._engine_pids,
            phase=phase,
            phase_since=since,
            lineage=self._edition.lineage,
            version=self._edition.version,
            in_flight=0 if llm is None else llm.output_processor.get_num_unfinished_requests(),
            generated_tokens=0 if llm is None else self.engine.gauges.generated_tokens,
            reported_at=time.time(),
            told=self._broken,
        )

    def _state(self) -> str:
        return self._broken or f"replica {self._replica} still serves version {self._edition.version}"

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
            "version": self._edition.version,
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


def _pieces(runs: Sequence[Running]) -> list[Piece]:
    return [piece for run in runs if (piece := run.piece()) is not None]


def _bring(refs: Sequence[ray.ObjectRef], timeout_s: float) -> None:
    """Have these objects on this node. They are mapped, not copied."""
    ray.get(list(refs), timeout=timeout_s)


def _engine_pids(llm: AsyncLLM) -> tuple[int, ...]:
    """vLLM's processes below this one: the engine core, and what it has started."""
    manager = llm.engine_core.resources.engine_manager
    cores = [process.pid for process in getattr(manager, "processes", ()) if process.pid is not None]
    below = [child.pid for core in cores for child in psutil.Process(core).children(recursive=True)]
    return (*cores, *below)


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

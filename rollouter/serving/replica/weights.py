"""Live weight updates of one replica.

    fetch (during decoding) → close gate → pause → load → set the version number → resume → open gate → verify

With `weight_sync.backend: nccl`, the replica waits for all others instead of the fetch, and loads what rank 0 of the
Trainer broadcasts. If that fails, it fetches the version within the pause.

A version consists of full weights, which vLLM's workers fetch and load, or of LoRA adapters, which this process fetches
and vLLM loads from files (`ServedRun.adapters`).

If the replica's GPUs are also those of the ranks, it sleeps while they compute, and wakes up for the next version:

    sleep: close gate → drain (or abort) → sleep … wake up weights → load → wake up KV cache → open gate

After an update, the replica is in one of three states. It serves the new version. Or it still serves the old version
and reports this, because the update failed before the load. Or it is broken, because its engine did not answer or the
update failed during or after the load, so that its weights are unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
import ray
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.config.sections.run import PROBE_LIMIT_S, TimeoutsConfig
from asyncrl.core.failures import BugError, ConfigError, InfraError
from asyncrl.core.ports import ApplyReport, Publication, WeightsProbe, WeightsVersion
from asyncrl.profiling import ProfilerSpan, profile
from asyncrl.weights.broadcast import BroadcastMember
from asyncrl.weights.checksums import differing_groups, merge
from asyncrl.weights.object_store import STORE_NAME, ServedRun, find_store
from asyncrl.weights.transport import OwnChunk, StoredChunk, check_importable
from rollouter.serving.replica.adapters import (
    LEFTOVER_S,
    delete_files,
    delete_leftovers,
    new_adapter,
    replacing,
    write_adapter,
)
from rollouter.serving.replica.broadcast import BroadcastReceiver
from rollouter.serving.replica.engine import OpenAIEngine
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.request_phases import EnginePauses
from rollouter.serving.replica.worker import StoreAddress

logger = logging.getLogger(__name__)

PauseMode = Literal["keep", "abort", "wait"]
OTHER_WEIGHTS = WeightsVersion(-1, -1)
"""Weights of another run, or of files that need not be those with which the run begins."""
VERIFY_BYTES_PER_CALL = 64 << 20
"""Number of bytes that one checksum call reads. Decoding stops for about 10 ms during each call."""
FETCH_SLICE_S = 0.02
"""Maximum time for which a worker stops decoding while it waits for the bytes of a version."""
ASK_STORE_S = 5.0
"""Time for which a replica that cannot fetch a version waits for another version before it tries again."""
RETRY_S = 1.0


class _Swap(NamedTuple):
    """Timings of one swap, in seconds, with the meanings of `ApplyReport`."""

    drain_s: float
    pause_s: float
    load_s: float
    in_flight: int
    """Number of requests in the engine when the pause was requested."""


class WeightUpdates:
    """Applies versions to one replica, one after another."""

    def __init__(self, engine: OpenAIEngine, health: ReplicaHealth, namespace: str, timeouts: TimeoutsConfig) -> None:
        """`namespace` is the Ray namespace in which the workers look for the weight store."""
        self.gate = asyncio.Event()
        """Requests wait while this event is not set."""
        self.gate.set()
        self.pauses = EnginePauses()
        self.timeouts = timeouts
        self._llm: AsyncLLM = engine.client
        self._gauges = engine.gauges
        self._health = health
        self._namespace = namespace
        self._store: Any = None
        self.run = ServedRun()
        """The run whose versions the engine serves, or the last one."""
        self.adapter: LoRARequest | None = None
        """The adapter that the engine serves; None if it serves full weights, or no version yet."""
        self._verified = False
        """Whether the engine passed its last comparison, in whole: log-probs too, if the version has a probe."""
        self._compared_lineage = -1
        """Lineage of the version whose log-probs were compared last."""
        self.asleep = False
        """Whether the engine sleeps, or wakes up right now. The gate is closed meanwhile."""
        self._slept_at = 0.0
        self._fallback: str | None = None
        """See `ApplyReport.fallback`, for the current update."""
        self._lock = asyncio.Lock()
        self._joining: asyncio.Task[None] | None = None

    def follows(self, store: Any) -> bool:
        """Return whether the versions come from this store. Each run that attaches has its own."""
        return bool(store == self._store)

    async def follow(self, store: Any, run: ServedRun, *, serves_initial: bool) -> None:
        """Take versions from the store of this run from now on, once an update to an earlier run's version has ended.

        Args:
            serves_initial: Whether the replica has the weights with which the run begins. If not, every version of the
                run is newer than what the replica serves.
        """
        async with self._lock:
            source = StoreAddress(ray.get_runtime_context().gcs_address, self._namespace, STORE_NAME)
            request = WeightTransferInitRequest(asdict(source))
            await self._answered(self._llm.init_weight_transfer_engine(request))
            if run.adapters:
                await asyncio.to_thread(delete_leftovers, LEFTOVER_S + 2 * self.timeouts.apply_s)
            # Without an await in between, because the call may be cancelled.
            self._store, self.run, self._joining = store, run, None
            self._verified, self._compared_lineage, self._health.num_uncompared = False, -1, 0
            if not serves_initial:
                self._health.weights_version = OTHER_WEIGHTS

    async def start(self) -> None:
        """Serve the newest published version.

        Raises:
            InfraError, BugError: see `_catch_up`.
        """
        await self._catch_up()

    async def join(self) -> None:
        """Serve the newest published version before the first request.

        A version that was published after `start` was broadcast without this replica if Serve did not know it yet. Once
        the Rollouter knows it, all later broadcasts reach it. If the first request is from a worker of the Rollouter
        that knows it earlier, the replica may miss one more version, and generates with the older one until the next.

        If this fails, the next request tries again.

        Raises:
            InfraError, BugError: see `_catch_up`.
        """
        if self._store is None:
            return
        if self.asleep:  # `apply` would wake the engine while the ranks have its GPUs
            await self.gate.wait()
        joining = self._joining
        if joining is None or (joining.done() and (joining.cancelled() or joining.exception() is not None)):
            self._joining = joining = asyncio.create_task(self._catch_up())
        # Requests may be cancelled, and a load that is interrupted breaks the replica.
        await asyncio.shield(joining)

    async def apply(
        self,
        publication: Publication,
        mode: PauseMode,
        clear_kv: bool,
        broadcast: bool = False,
        run: str | None = None,
    ) -> ApplyReport:
        """Update the engine to `publication`. A replica that serves it already, or a newer version, answers at once.
        An engine that sleeps wakes up.

        The replica answers within twice `timeouts.apply_s` plus `timeouts.engine_s` plus `PROBE_LIMIT_S`.

        Args:
            mode: Requests in flight continue (`keep`), return ABORTED (`abort`), or finish first (`wait`).
            clear_kv: With `keep`, recompute the KV cache of these requests under the new weights.
            broadcast: Take part in a round by GPU broadcast. If it fails, the version comes from the weight store.
            run: Namespace of the run that published the version. None: that of the store.

        Raises:
            InfraError: the version could not be applied; the message names the version that the replica serves now. Or
                the replica follows another run meanwhile, whose store may have another version of the same number.
            BugError: the engine's weights differ from the published ones, or it computes other log-probs with them.
            ConfigError: the class of `weight_sync.backend` cannot be imported here.
        """
        health, weights_version = self._health, publication.weights_version
        async with self._exclusive() as until:
            if run is not None and run != self.run.namespace:
                raise InfraError(f"{health.describe_state()}: it does not follow the run {run}")
            if weights_version <= health.weights_version:
                await self._wake()
                return self._report()
            adapter = new_adapter(weights_version) if self.run.adapters else None
            receiver: BroadcastReceiver | None = None
            self._fallback = None
            try:
                with self._span("sync.fetch", weights_version):
                    if broadcast and self._store is not None:
                        receiver = await self._join_round(weights_version, until)
                    fetch_s = 0.0 if receiver is not None else await self._fetch(weights_version, until, adapter)
                swap = await self._swap(weights_version, mode, clear_kv, until, adapter, receiver)
                loaded, verify_s, mismatch_kl = time.perf_counter(), 0.0, None
                if self.run.verify != "off":
                    with self._span("sync.verify", weights_version):
                        mismatch_kl = await self._check(publication)
                    verify_s = time.perf_counter() - loaded
            finally:
                if adapter is not None:
                    delete_files(adapter)
                health.end_update()
            return replace(
                self._report(),
                fetch_s=fetch_s,
                verify_s=verify_s,
                mismatch_kl=mismatch_kl,
                fallback=self._fallback,
                **swap._asdict(),
            )

    async def sleep(self, mode: PauseMode = "wait") -> None:
        """Wait for the end of all requests in the engine, or abort them, hold new ones back, and free the GPU memory of
        the engine.

        At vLLM's level 1 the weights move to the memory of the machine. At level 2 they would be lost, so a replica
        could neither keep its version if it cannot fetch the next one, nor wake up without a new one.

        Raises:
            InfraError: requests did not end in time, and the engine continues; or the replica is broken.
        """
        async with self._exclusive() as until:
            if self.asleep:
                return
            try:
                async with asyncio.timeout_at(until):
                    await self._begin_pause(self._health.weights_version, mode, False)
                    self.asleep, self._slept_at = True, time.perf_counter()
                    self._health.enter("sleeping")
                    await self._llm.sleep(level=1)
            except BaseException as error:
                await asyncio.shield(self._recover("falling asleep", error, self.asleep))
                self._end_pause()
                self._health.end_update()
                if isinstance(error, Exception):
                    raise InfraError.wrap(f"{self._health.describe_state()}: it does not sleep", error) from error
                raise

    async def wake(self) -> None:
        """Serve the same version as before `sleep`. An engine that does not sleep continues.

        Raises:
            InfraError: the replica is broken.
        """
        async with self._exclusive():
            await self._wake()

    async def _wake(self) -> None:
        if not self.asleep:
            return
        try:
            async with asyncio.timeout(self.timeouts.apply_s):
                await self._llm.wake_up(tags=["weights"])
                await self._llm.wake_up(tags=["kv_cache"])
        except BaseException as error:
            await asyncio.shield(self._recover("waking up", error, True))
            if isinstance(error, Exception):
                raise InfraError.wrap(self._health.broken, error) from error
            raise
        finally:
            self._end_pause()
        self._health.end_update()

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[float]:
        """Hold the lock for an update in the block, and yield its deadline, by the loop's clock.

        Raises:
            InfraError: another update did not end within `timeouts.apply_s`, or the replica is broken.
        """
        until = asyncio.get_running_loop().time() + self.timeouts.apply_s
        try:
            async with asyncio.timeout_at(until):
                await self._lock.acquire()
        except TimeoutError as error:
            raise InfraError.wrap(
                f"{self._health.describe_state()}: it was busy with another version for {self.timeouts.apply_s:g} s "
                "(timeouts.apply_s)",
                error,
            ) from error
        try:
            if self._health.broken:
                raise InfraError(self._health.broken)
            yield until
        finally:
            self._lock.release()

    async def _catch_up(self) -> None:
        """Serve the newest version of the store, or the model's files if nothing was ever published.

        If a version cannot be fetched, because the Trainer that published it is dead, wait for the next version. If the
        run has ended, so that there is no store any more, keep the weights.

        Raises:
            InfraError: no version could be fetched within `timeouts.start_s`, or an update failed during the load.
            BugError: the engine's weights differ from the published ones.
        """
        lost: WeightsVersion | None = None
        problem = "the weight store did not answer"
        until = time.monotonic() + self.timeouts.start_s
        while time.monotonic() < until:
            store, run = self._store, self.run.namespace
            try:
                async with asyncio.timeout(2 * ASK_STORE_S):
                    newest: Publication | None = await store.start_with.remote(ASK_STORE_S, lost)
            except (TimeoutError, ray.exceptions.RayError) as error:
                if isinstance(error, ray.exceptions.RayActorError) and await self._has_ended(store):
                    return
                problem = f"the weight store cannot be asked: {error}"
                await asyncio.sleep(RETRY_S)
                continue
            if store != self._store:  # another run has attached meanwhile
                lost = None
                continue
            if newest is None or newest.weights_version <= self._health.weights_version:
                return
            try:
                await self.apply(newest, "abort", True, False, run)
                lost = None
            except InfraError as error:
                if self._health.broken:
                    raise
                problem = error.message
                logger.warning("%s; this version or the next one is tried again", error.brief)
                lost = newest.weights_version if store == self._store else None
        raise InfraError(
            f"replica {self._health.replica} found no version that it could fetch within {self.timeouts.start_s:g} s "
            f"(timeouts.start_s): {problem}"
        )

    async def _has_ended(self, store: Any) -> bool:
        """Whether the run of this store has ended. False if Ray does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_STORE_S):
                return await asyncio.to_thread(find_store, self._namespace) != store
        return False

    async def _fetch(self, weights_version: WeightsVersion, until: float, adapter: LoRARequest | None) -> float:
        """Map the version's bytes into the workers, while they decode, or write the files of the adapter. Return the
        duration in seconds.

        The deadline for the store is `until` (by the loop's clock). Each call to the engine may take
        `timeouts.engine_s`: these calls need almost no time, so an unanswered one shows that the engine hangs.

        Raises:
            ConfigError: the class of `weight_sync.backend` cannot be imported here.
            InfraError: the version could not be fetched.
        """
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        self._health.enter("fetching")
        try:
            if self._store is None:
                raise InfraError(f"no weight store in Ray namespace {self._namespace!r}")
            async with asyncio.timeout_at(until):
                refs = await self._store.tensors.remote(weights_version)
                for backend in {ref.backend for ref in refs if isinstance(ref, OwnChunk)}:
                    # Here, because the engine's processes report errors as text only.
                    await asyncio.to_thread(check_importable, backend)
                if adapter is not None:
                    await asyncio.to_thread(write_adapter, adapter, refs, max(0.0, until - loop.time()))
                    return time.perf_counter() - started
                # Transfer the objects to this node first, so that the workers only map them, and so that the loss of an
                # object is reported here with its cause.
                of_ray = [ref for ref in refs if not isinstance(ref, StoredChunk)]
                await asyncio.to_thread(ray.get, of_ray, timeout=max(0.0, until - loop.time()))
            left_s = max(FETCH_SLICE_S, until - loop.time())
            wanted = (*weights_version, left_s, self._compares_weights)
            await self._answered(self._llm.collective_rpc("fetch_version", args=wanted))
            while not all(await self._answered(self._llm.collective_rpc("await_fetch", args=(FETCH_SLICE_S,)))):
                if loop.time() >= until:
                    limit_s = self.timeouts.apply_s
                    raise TimeoutError(f"the workers have not mapped it after {limit_s:g} s (timeouts.apply_s)")
                await asyncio.sleep(FETCH_SLICE_S)
        except ConfigError:
            raise
        except Exception as error:
            state = self._health.describe_state()
            raise InfraError.wrap(f"{state}: fetching version {weights_version.version} failed", error) from error
        return time.perf_counter() - started

    async def _join_round(self, weights_version: WeightsVersion, until: float) -> BroadcastReceiver | None:
        """Wait, while the engine decodes, until all members of the round are present. None: they are not."""
        receiver = BroadcastReceiver(self._llm, self._store, self._health.replica, weights_version)
        self._health.enter("fetching")
        self._fallback = ""
        try:
            await receiver.join(until - asyncio.get_running_loop().time())
        except InfraError as error:
            self._fallback = error.message
            return None
        return receiver

    async def _answered(self, call: Awaitable[Any]) -> Any:
        """Return the engine's answer to a call that needs almost no time. An engine that does not answer hangs.

        Raises:
            InfraError: the engine hangs.
            Others: the errors of the call.
        """
        limit = asyncio.timeout(self.timeouts.engine_s)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            self._health.give_up_hung_engine("its engine did not answer")
            raise InfraError(self._health.broken) from None

    async def _swap(
        self,
        weights_version: WeightsVersion,
        mode: PauseMode,
        clear_kv: bool,
        until: float,
        adapter: LoRARequest | None,
        receiver: BroadcastReceiver | None,
    ) -> _Swap:
        """Pause the engine, load the version, and resume.

        If the engine sleeps, its weights wake up before the load and its KV cache after it, which may need the memory
        that the load has used.
        """
        health = self._health
        in_flight = self._llm.output_processor.get_num_unfinished_requests()
        requested = time.perf_counter()
        try:
            async with asyncio.timeout_at(until):
                held = 0 if self.asleep else await self._begin_pause(weights_version, mode, clear_kv)
                # The pause starts here: the steps that were running (with `wait`, all steps) sampled tokens until now.
                started = time.perf_counter()
                health.enter("loading")
                if self.asleep:
                    await self._llm.wake_up(tags=["weights"])
                with self._span("sync.load", weights_version):
                    if receiver is None:
                        await self._load(weights_version, adapter)
                    else:
                        await self._receive(receiver, weights_version, until)
                load_s = time.perf_counter() - started
                health.weights_version, self.adapter = weights_version, adapter
                if self.asleep:
                    await self._llm.wake_up(tags=["kv_cache"])
                await self._llm.resume_generation()
        except BaseException as error:
            if receiver is not None:
                receiver.fail(error)
            is_touched = health.paused and (receiver is None or receiver.has_started)
            await asyncio.shield(self._recover(f"loading version {weights_version.version}", error, is_touched))
            if isinstance(error, Exception):
                raise InfraError.wrap(
                    f"{health.describe_state()}: applying version {weights_version.version} failed", error
                ) from error
            raise
        finally:
            self._end_pause()
        pause_s = time.perf_counter() - started
        profile.record_ended(
            "sync.pause", pause_s, version=weights_version.version, replica=health.replica, in_flight=held
        )
        return _Swap(started - requested, pause_s, load_s, in_flight)

    async def _receive(self, receiver: BroadcastReceiver, weights_version: WeightsVersion, until: float) -> None:
        """Load the version by broadcast; or, if that fails, from the weight store in the same update of the engine."""
        try:
            await receiver.receive(until - asyncio.get_running_loop().time())
        except InfraError as error:
            receiver.fail(error)
            self._fallback = error.message
            logger.warning("version %d comes from the weight store: %s", weights_version.version, error.message)
            await self._fetch(weights_version, until, None)
            self._health.enter("loading")
            await receiver.start_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(weights_version._asdict()))
        await self._llm.finish_weight_update(str(weights_version.version))
        if not self._fallback:
            receiver.finish()

    async def _load(self, weights_version: WeightsVersion, adapter: LoRARequest | None) -> None:
        """Load the version and set the number with which the engine stamps tokens from now on."""
        number = str(weights_version.version)
        if adapter is None:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(weights_version._asdict()))
            await self._llm.finish_weight_update(number)
            return
        if not await self._llm.add_lora(replacing(adapter)):
            raise InfraError(f"vLLM did not load the adapter of version {number}")
        await self._llm.update_weight_version(number)

    async def _begin_pause(self, weights_version: WeightsVersion, mode: PauseMode, clear_kv: bool) -> int:
        """Close the gate and pause the engine. Return the number of requests that stay in the engine."""
        self.gate.clear()
        self._health.enter("pausing")
        # `AsyncLLM.pause_generation` does the same, but then sleeps for 20 ms to let outputs arrive.
        with self._span("sync.drain", weights_version):
            if mode == "abort":  # which would lose the tokens that wait in the engine core, see `batched_outputs`
                await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_kv or mode != "keep")
        # The other modes leave no requests in the engine, though their last outputs may still be on the way.
        held = self._llm.output_processor.get_num_unfinished_requests() if mode == "keep" else 0
        if clear_kv:
            self._gauges.clear(held)
        self.pauses.begin(time.monotonic())
        self._health.paused = True
        return held

    def _end_pause(self) -> None:
        """Open the gate, so that waiting requests enter the engine."""
        if self.asleep:
            self.asleep, slept_s = False, time.perf_counter() - self._slept_at
            profile.record_ended("engine.asleep", slept_s, replica=self._health.replica)
        self._health.paused = False
        self.pauses.end(time.monotonic())
        self.gate.set()

    def _span(self, name: str, weights_version: WeightsVersion) -> ProfilerSpan:
        return profile.span(name, version=weights_version.version, replica=self._health.replica)

    async def _recover(self, what: str, error: BaseException, is_touched: bool) -> None:
        """Recover from a failed pause for `what`: serve the old version if its weights are untouched, else give up."""
        if self._health.broken:
            return
        if is_touched:
            self._health.give_up(f"{what} failed half-way: {error!r}")
            return
        try:
            async with asyncio.timeout(self.timeouts.engine_s):
                await self._llm.resume_generation()
        except Exception as second:  # noqa: BLE001  the first error is the one to report
            self._health.give_up(f"resuming after {error!r} failed: {second!r}", crash=True)

    @property
    def _compares_weights(self) -> bool:
        """Whether the checksums of the next version are compared."""
        return self.run.verify == "every" or (self.run.verify == "first" and not self._verified)

    async def _check(self, publication: Publication) -> float | None:
        """Compare the engine's weights with the published checksums, and its log-probs with those of the probe.
        Decoding continues meanwhile. Return the KL divergence of the log-probs, or None if they were not compared.
        With `verify: first`, each is compared until it has passed once, log-probs once per lineage.

        Raises:
            InfraError: the engine failed or did not answer.
            BugError: the engine has other weights, or computes other log-probs than `weight_sync.max_mismatch_kl`
                allows.
        """
        self._health.enter("verifying")
        served: dict[str, int] = {}
        compares_weights, is_compared = self._compares_weights, self._compared_lineage == publication.lineage
        probe = None if is_compared and self.run.verify != "every" else publication.probe
        try:
            async with asyncio.timeout(self.timeouts.apply_s):
                if compares_weights and self.adapter is not None:
                    served = merge(await self._llm.collective_rpc("adapter_checksums"))
                elif compares_weights:
                    # A few groups at a time, so that decoding continues.
                    for groups in _batches(merge(await self._llm.collective_rpc("group_sizes"))):
                        served |= merge(await self._llm.collective_rpc("group_checksums", args=(groups,)))
            mismatch_kl = await self._mismatch(probe) if probe is not None else None
        except Exception as error:
            self._health.give_up(
                f"its weights of version {publication.version} could not be verified: {error!r}", crash=True
            )
            raise InfraError.wrap(self._health.broken, error) from error
        if compares_weights and (wrong := differing_groups(publication.checksums, served)):
            self._health.give_up(
                f"version {publication.version} is not what was published: checksums differ in {', '.join(wrong)}"
            )
            raise BugError(self._health.broken)
        limit = self.run.max_mismatch_kl
        if mismatch_kl is not None and limit is not None and not mismatch_kl <= limit:  # so that NaN fails, too
            self._health.give_up(
                f"with the weights of version {publication.version}, the engine computes other log-probs than the "
                f"Trainer: the KL divergence is {mismatch_kl:.2g} nats per token, and weight_sync.max_mismatch_kl "
                f"allows {limit:g}. Raise the limit if the dtypes of rollout and trainer or a quantized rollout "
                "explain the difference, else report the model"
                + (", unless the files at model.path differ from the Trainer's" if self.adapter is not None else "")
            )
            raise BugError(self._health.broken)
        self._verified = probe is None or mismatch_kl is not None
        if not self._verified:
            self._health.num_uncompared += 1
        elif probe is not None:
            self._compared_lineage, self._health.num_uncompared = publication.lineage, 0
        return mismatch_kl

    async def _mismatch(self, probe: WeightsProbe) -> float | None:
        """Return the KL divergence between the engine's and the Trainer's log-probs, in nats per token, or None if the
        engine is too full to compute them within `PROBE_LIMIT_S`."""
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                served = await asyncio.gather(*(self._log_probs(list(ids)) for ids in probe.token_ids))
        except TimeoutError:
            logger.warning(
                "%s was too full for %g s to compute log-probs of two texts, so those of this version are not compared "
                "with the Trainer's",
                self._health.replica,
                PROBE_LIMIT_S,
            )
            return None
        return probe_mismatch(probe, served)

    async def _log_probs(self, token_ids: list[int]) -> list[float]:
        """Return the engine's log-probs of every token but the first, at temperature 1."""
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        answers = self._llm.generate(prompt, sampling, f"probe-{uuid4().hex}", lora_request=self.adapter)
        outputs = [output async for output in answers]
        rows = zip(token_ids[1:], (outputs[-1].prompt_logprobs or [])[1:], strict=True)
        return [candidates[token].logprob for token, candidates in rows if candidates is not None]

    def member(self) -> BroadcastMember:
        """Return what this replica would be in a round by GPU broadcast. Raises InfraError if it is broken."""
        if self._health.broken:
            raise InfraError(self._health.broken)
        num_workers = self._llm.vllm_config.parallel_config.world_size
        return BroadcastMember(self._health.replica, num_workers, self._health.weights_version)

    def _report(self) -> ApplyReport:
        """Return the report of a replica that did not have to apply anything."""
        lineage, version = self._health.weights_version
        return ApplyReport(self._health.replica, version, 0.0, 0.0, 0.0, 0, self._verified, lineage)


def probe_mismatch(probe: WeightsProbe, served: Sequence[Sequence[float]]) -> float:
    """Return the mean over all tokens of `e^-d - 1 + d`, where d is the difference of the two log-probs in nats: the
    estimate k3 of the KL divergence (Schulman, http://joschu.net/blog/kl-approx.html)."""
    trained = np.concatenate([np.asarray(row, np.float64) for row in probe.log_probs])
    engine = np.concatenate([np.asarray(row, np.float64) for row in served])
    difference = np.clip(engine - trained, -20.0, 20.0)
    return float(np.mean(np.expm1(-difference) + difference))


def _batches(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide the groups into lists of about `VERIFY_BYTES_PER_CALL` bytes each."""
    batches: list[list[str]] = [[]]
    held = 0
    for group, size in sizes.items():
        if batches[-1] and held + size > VERIFY_BYTES_PER_CALL:
            batches.append([])
            held = 0
        batches[-1].append(group)
        held += size
    return batches

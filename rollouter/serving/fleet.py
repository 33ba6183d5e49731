"""The replicas of a run behind Ray Serve, as an `EngineFleet`."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
from ray import serve
from ray.exceptions import RayError

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, DeadlineError, InfraError, ReplicaLeftError
from asyncrl.core.ports import ApplyReport, GenerateRequest, GenerationEvent, Publication
from asyncrl.profiling import profile
from asyncrl.weights.broadcast import BroadcastMember
from asyncrl.weights.object_store import ObjectStoreFeed, answer_of, find_store
from rollouter.serving import client
from rollouter.serving.app import REPLACED_S, replicas_up
from rollouter.serving.handles import items, typed
from rollouter.serving.options import DEPLOYMENT_NAME, lent_app, rollout_app

logger = logging.getLogger(__name__)

LEFT_S = 0.2
"""Time after which a broadcast that has met a leaving replica is repeated. Serve has taken the replica out by then."""


class ServeFleet:
    """Calls the replicas of a started application (`app.start_app`), from any process of its Ray cluster."""

    def __init__(self, config: Config, *, namespace: str, lent: bool = False) -> None:
        """Create it by `handles.connect`, because Serve's controller may not answer at once.

        Args:
            namespace: the run's Ray namespace.
            lent: the replicas on GPUs that the Trainer lends, instead of the run's own.
        """
        self._namespace = namespace
        self._timeouts = config.timeouts
        self._max_attempts = config.rollout.max_attempts
        self._clear_kv = config.weight_sync.clear_kv_cache
        limits = config.timeouts
        # A Trainer that died is replaced only once the engines have left the GPUs to it.
        self._retry_s = limits.probe_s if config.takes_turns or lent else limits.start_s
        self._broadcasts = config.weight_sync.backend == "nccl"
        self._mode = config.async_training.partial_mode if config.async_training.partial_rollout else "wait"
        self._app = lent_app(namespace) if lent else rollout_app(config, namespace)
        self._handle = serve.get_deployment_handle(DEPLOYMENT_NAME, self._app.name)

    def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[GenerationEvent, None]:
        """See `ports.EngineFleet`. Each call to a replica may take `timeouts.generate_s`. Up to `rollout.max_attempts`
        consecutive calls may fail without a token."""
        return client.generate(self._call, requests, session=session, max_attempts=self._max_attempts)

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """Update all replicas to the publication's version concurrently. If a replica fails, try again once Serve has
        replaced it, or after `REPLACED_S`. A replica that leaves does not delay this, and one that joins applies the
        newest version before it serves.

        A replica that does not answer delays this until Serve replaces it, after about 1.5 times `timeouts.probe_s`.
        If a replica fails and there is a newer publication by then, the newer one is applied instead, and the reports
        contain its version: the older one cannot be fetched any more if its Trainer has died.

        Raises:
            InfraError: a replica failed, and no other replica has succeeded for `timeouts.start_s`, or for
                `timeouts.probe_s` if the Trainer may be waiting for the GPUs of the replicas.
            BugError: the weights of an engine differ from the published ones.
        """
        reports: dict[str, ApplyReport] = {}
        no_round = await self._open_round(publication) if self._broadcasts else None
        broadcast = no_round == ""
        limit_s, until = self._timeouts.apply_call_s, math.inf
        while True:
            args = (publication, self._mode, self._clear_kv, broadcast, self._namespace)
            outcomes = await self._everywhere("apply_version", *args, limit_s=limit_s)
            broadcast = False
            has_progress = any(isinstance(one, ApplyReport) and one.replica not in reports for one in outcomes)
            if has_progress or until == math.inf:
                # The time starts at the end of a try, so that a try that used all of its time is repeated.
                until = anyio.current_time() + self._retry_s
            for report in outcomes:
                # A replica that already serves the version answers at once, with a report without timings.
                if isinstance(report, ApplyReport) and not (
                    report.replica in reports and reports[report.replica].weights_version == report.weights_version
                ):
                    reports[report.replica] = report
            failures = [outcome for outcome in outcomes if isinstance(outcome, AsyncRLError)]
            if not failures:
                answers = [reports[report.replica] for report in outcomes]
                return answers if no_round is None else _note_fallback(answers, no_round)
            if all(isinstance(failure, ReplicaLeftError) for failure in failures):
                await anyio.sleep(LEFT_S)
                continue
            for failure in failures:
                if not isinstance(failure, InfraError) or anyio.current_time() >= until:
                    raise failure
            publication = await self._newest(publication)
            logger.warning("version %d is applied once more: %s", publication.version, failures[0].brief)
            await anyio.sleep(client.FIRST_BACKOFF_S)
            with suppress(DeadlineError):
                await replicas_up(self._app.name, min(REPLACED_S, self._timeouts.start_s))

    async def sleep(self) -> None:
        """See `ports.SleepingFleet`. A replica that starts is waited for. Raises as `_call_all`."""
        await self._call_all("sleep_engine")

    async def wake(self) -> None:
        """See `ports.SleepingFleet`. Raises as `_call_all`."""
        await self._call_all("wake_engine")

    async def _call_all(self, method: str) -> None:
        """Call every replica, and all of them again once Serve has replaced those that failed.

        Raises:
            InfraError: some replica still fails `timeouts.start_s` after the first failure.
        """
        until = math.inf
        while True:
            await replicas_up(self._app.name, self._timeouts.start_s)
            outcomes = await self._everywhere(method, limit_s=self._timeouts.apply_call_s)
            failures = [outcome for outcome in outcomes if isinstance(outcome, AsyncRLError)]
            if not failures:
                return
            for failure in failures:
                if not isinstance(failure, InfraError) or anyio.current_time() >= until:
                    raise failure
            until = min(until, anyio.current_time() + self._timeouts.start_s)
            logger.warning("%s is called once more on all replicas: %s", method, failures[0].brief)
            await anyio.sleep(client.FIRST_BACKOFF_S)

    async def _open_round(self, publication: Publication) -> str:
        """Open a round in which all replicas get the version by GPU broadcast. Return why there is none, or an empty
        string."""
        limits = self._timeouts
        found = await self._everywhere("broadcast_member", limit_s=limits.call_s)
        members = [one for one in found if isinstance(one, BroadcastMember)]
        num_silent = sum(not isinstance(one, BroadcastMember | ReplicaLeftError) for one in found)
        if (store := await self._store()) is None:
            return "there is no weight store"
        version, meet_s = publication.weights_version, min(limits.probe_s, limits.apply_s / 4)
        call = store.open_round.remote(version, members, num_silent, meet_s, limits.apply_s / 2)
        try:
            problem: str = await answer_of(call, meet_s + limits.call_s, "opening a round for a GPU broadcast")
        except InfraError as error:
            return error.message
        return problem

    async def _newest(self, publication: Publication) -> Publication:
        """Return the newest publication, or `publication` if there is no newer one."""
        if (store := await self._store()) is None:
            return publication
        try:
            newest = await ObjectStoreFeed(store, call_s=self._timeouts.call_s).latest()
        except DeadlineError:  # the store was restarted and has no publication yet
            return publication
        return newest if newest is not None and newest.weights_version > publication.weights_version else publication

    async def _store(self) -> Any:
        """Return the weight store; None if there is none, or Ray does not answer."""
        with anyio.move_on_after(self._timeouts.call_s), suppress(RayError):
            return await anyio.to_thread.run_sync(find_store, self._app.store_namespace, abandon_on_cancel=True)
        return None

    def _call(self, requests: Sequence[GenerateRequest], *, session: str) -> client.ReplicaStream:
        handle = self._handle.options(stream=True, session_id=session)
        what = f"a generate call of {len(requests)} requests"
        return items(
            handle.generate_tokens.remote(list(requests)), what, self._timeouts.generate_s, "timeouts.generate_s"
        )

    async def _everywhere(self, method: str, *args: Any, limit_s: float) -> list[Any]:
        """Return each replica's answer or error. The list is never empty."""
        try:
            with anyio.fail_after(limit_s):
                outcomes = await self._handle.broadcast(method, *args).results_async(return_exceptions=True)
        except TimeoutError:
            return [DeadlineError(f"{method}: not every replica answered within {limit_s:g} s")]
        except Exception as error:  # noqa: BLE001  typed, and the caller decides
            return [typed(error, method)]
        answers = [typed(one, method) if isinstance(one, BaseException) else _without_events(one) for one in outcomes]
        return answers or [DeadlineError(f"{method}: Serve knows of no replica at the moment")]


def _note_fallback(reports: Sequence[ApplyReport], no_round: str) -> list[ApplyReport]:
    """Return the reports, and log if replicas did not get the version by GPU broadcast. `no_round`: why no round was
    opened, or an empty string."""
    noted = []
    for report in reports:
        if report.fallback is None and report.load_s:
            report = replace(report, fallback=no_round or "the version was applied once more")
        noted.append(report)
    if late := [report for report in noted if report.fallback]:
        reason, version = late[0].fallback, late[0].version
        logger.warning(
            "version %d went through the object store instead of a GPU broadcast on %d of %d replicas: %s",
            version, len(late), len(noted), reason,
        )  # fmt: skip
        profile.record_ended("sync.fallback", 0.0, version=version, replicas=len(late), reason=reason)
    return noted


def _without_events(answer: Any) -> Any:
    """Ingest the replica's profiler events, and return its answer without them."""
    if isinstance(answer, ApplyReport) and answer.events:
        profile.ingest(f"replica-{answer.replica}", answer.events)
        return replace(answer, events=())
    return answer

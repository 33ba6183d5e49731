"""All replicas of a run, as the Rollouter sees them (`ports.EngineFleet`)."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import anyio
from ray import serve

from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError, DeadlineError, InfraError
from asyncrl.ports import ApplyReport, GenerateRequest, OnCrash, OnCut, OnPlace, OnTurn, Publication
from asyncrl.profiling import profile
from asyncrl.types import Turn
from asyncrl.weights.object_store import ObjectStoreFeed, find_store
from rollouter import client
from rollouter.serving.app import replicas_up
from rollouter.serving.handles import items, typed
from rollouter.serving.options import DEPLOYMENT_NAME, app_name
from rollouter.serving.pieces import Piece, Taken, Told

logger = logging.getLogger(__name__)


class ServeFleet:
    """Talks to a started application (`app.start_app`), from any process of its Ray cluster."""

    def __init__(self, config: Config, *, namespace: str) -> None:
        self._timeouts = config.timeouts
        self._max_attempts = config.rollout.max_attempts
        self._clear_kv = config.weight_sync.clear_kv_cache
        self._mode = config.async_training.partial_mode if config.async_training.partial_rollout else "wait"
        self._namespace = namespace
        self._handle = serve.get_deployment_handle(DEPLOYMENT_NAME, app_name(namespace))

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        session: str,
        on_turn: OnTurn | None = None,
        on_place: OnPlace | None = None,
        on_crash: OnCrash | None = None,
        on_cut: OnCut | None = None,
    ) -> list[Turn]:
        """Run the requests on one replica; see `ports.EngineFleet`. A replica has `timeouts.generate_s` for its call.

        Raises:
            InfraError: `rollout.max_attempts` calls in a row failed without a token.
            DataError: the engine refuses a prompt.
            Whatever `on_turn` and `on_crash` raise.
        """
        return await client.generate(
            self._call,
            requests,
            session=session,
            max_attempts=self._max_attempts,
            on_turn=on_turn,
            on_place=on_place,
            on_crash=on_crash,
            on_cut=on_cut,
        )

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """Bring every replica to the publication's version, all at once; a failed replica is tried again once replaced.

        A replica that does not answer at all holds this up until Serve replaces it, after some 1.5 times
        `timeouts.probe_s`. Where a replica fails and there is a newer publication by then, that is applied instead, and
        the reports say so: the Trainer that published this one may be dead, so that nobody can fetch it any more.

        Raises:
            InfraError: some replica could not, and `timeouts.start_s` have passed since the first try, or since one in
                which one more could.
            BugError: an engine serves other weights than were published.
        """
        reports: dict[str, ApplyReport] = {}
        limit_s, until = self._timeouts.apply_call_s, math.inf
        while True:
            outcomes = await self._everywhere("apply_version", publication, self._mode, self._clear_kv, limit_s=limit_s)
            one_more = any(isinstance(one, ApplyReport) and one.replica not in reports for one in outcomes)
            if one_more or until == math.inf:
                # From the end of a try, so that one that took all its time is made once more.
                until = anyio.current_time() + self._timeouts.start_s
            for report in outcomes:
                # Asked again, a replica that has applied it answers at once and tells of no pause.
                if isinstance(report, ApplyReport) and not (
                    report.replica in reports and reports[report.replica].edition == report.edition
                ):
                    reports[report.replica] = report
            failures = [outcome for outcome in outcomes if isinstance(outcome, AsyncRLError)]
            if not failures:
                return [reports[report.replica] for report in outcomes]
            for failure in failures:
                if not isinstance(failure, InfraError) or anyio.current_time() >= until:
                    raise failure
            publication = await self._newest(publication)
            logger.warning("version %d is applied once more: %s", publication.version, failures[0].brief)
            await anyio.sleep(client.FIRST_BACKOFF_S)
            await replicas_up(self._namespace, self._timeouts.start_s)

    async def _newest(self, publication: Publication) -> Publication:
        """What has been published since, or else the same."""
        store = None
        with anyio.move_on_after(self._timeouts.call_s):
            store = await anyio.to_thread.run_sync(find_store, self._namespace, abandon_on_cancel=True)
        if store is None:
            return publication
        try:
            newest = await ObjectStoreFeed(store, call_s=self._timeouts.call_s).latest()
        except DeadlineError:  # it has forgotten what there was
            return publication
        return newest if newest is not None and newest.edition > publication.edition else publication

    def _call(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Taken | Told | Sequence[Piece], None]:
        handle = self._handle.options(stream=True, session_id=session)
        what = f"a generate call of {len(requests)} requests"
        return items(
            handle.generate_tokens.remote(list(requests)), what, self._timeouts.generate_s, "timeouts.generate_s"
        )

    async def _everywhere(self, method: str, *args: Any, limit_s: float) -> list[Any]:
        """What each replica answers, or why it does not; at least one."""
        try:
            with anyio.fail_after(limit_s):
                outcomes = await self._handle.broadcast(method, *args).results_async(return_exceptions=True)
        except TimeoutError:
            return [DeadlineError(f"{method}: not every replica answered within {limit_s:g} s")]
        except Exception as error:  # noqa: BLE001  typed, and the caller decides
            return [typed(error, method)]
        answers = [typed(one, method) if isinstance(one, BaseException) else _profiled(one) for one in outcomes]
        return answers or [DeadlineError(f"{method}: Serve knows of no replica at the moment")]


def _profiled(answer: Any) -> Any:
    """The answer of a replica without the events that came with it."""
    if isinstance(answer, ApplyReport) and answer.events:
        profile.take(f"replica-{answer.replica}", answer.events)
        return replace(answer, events=())
    return answer

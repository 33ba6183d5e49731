"""The event of each request in this replica's engine, from its own moments and vLLM's."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import RequestStateStats

from asyncrl.profiling import profile
from asyncrl.types import FinishReason
from rollouter.request_ids import parse
from rollouter.serving.health import Health
from rollouter.serving.phases import Moments, Pauses, phases
from rollouter.serving.running import FINISH, Running


class RequestWatch:
    """The event `request` of one request, from before the gate to its end, whatever that is."""

    def __init__(self, run: Running, llm: AsyncLLM, health: Health, pauses: Pauses) -> None:
        self._run = run
        self._llm = llm
        self._health = health
        self._pauses = pauses
        self._moments = Moments(time.monotonic())
        self._fields: dict[str, Any] = {}

    def admitted(self, prompt_tokens: int) -> None:
        """It has passed the gate and is on its way into the engine."""
        if profile.records("request"):
            self._moments.admitted = time.monotonic()
            self._fields = {
                "version": self._health.edition.version,
                "prompt_tokens": prompt_tokens,
                "in_flight": self._llm.output_processor.get_num_unfinished_requests(),
            }

    def ended(self, error: BaseException | None) -> None:
        """Record it. `error`: what ended it, if it did not end by itself."""
        if not profile.records("request"):
            return
        run, moments = self._run, self._moments
        moments.ended = time.monotonic()
        stats = _stats(run)
        if stats is not None:
            moments.queued, moments.scheduled = stats.queued_ts, stats.scheduled_ts
            moments.first_token, moments.last_token = stats.first_token_ts, stats.last_token_ts
        spent = phases(moments, self._pauses)._asdict()
        if stats is None and moments.admitted:
            # The engine keeps no statistics: nothing but the gate is known.
            spent = {"gate_s": spent["gate_s"]}
        duration_s = moments.ended - moments.asked
        end = run.output.outputs[0].finish_reason if run.output is not None else None
        profile.record(
            "request",
            time.time() - duration_s,
            duration_s,
            **self._fields,
            replica=self._health.replica,
            request=run.request_id,
            **parse(run.request_id)._asdict(),
            response_tokens=run.num_tokens,
            finish_reason=str(FINISH.get(end or "abort", FinishReason.ABORTED)),
            error=None if error is None or isinstance(error, asyncio.CancelledError) else type(error).__name__,
            **{name: round(seconds, 6) for name, seconds in spent.items()},
        )


def _stats(run: Running) -> RequestStateStats | None:
    return run.state.stats if run.state is not None else getattr(run.output, "metrics", None)

"""Token-exact generation on one replica's `AsyncLLM`.

requests ──▶ gate ──▶ AsyncLLM ──▶ pieces of turns, with spans
              │ shut from pause to resume, see `weights`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import EngineInput, tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.failures import AsyncRLError, BugError, DataError, EngineCrashError, InfraError
from asyncrl.ports import GenerateRequest
from rollouter.serving.health import Health
from rollouter.serving.media import with_media
from rollouter.serving.own_log import own_log
from rollouter.serving.phases import Pauses
from rollouter.serving.pieces import Piece, Taken
from rollouter.serving.request_events import RequestWatch
from rollouter.serving.running import FINISH, Running

TELL_EVERY_S = 1.0
"""What requests that go on have made is told so often: a replica that dies takes no more than this with it."""
GATHER_S = 0.25
"""When a request has ended, its call waits so long for others to end before it tells, as a message costs a millisecond;
when all have ended, that is told at once."""
CANCEL_S = 5.0
"""For requests of a call that nobody wants any more to leave the engine."""


class Generation:
    """What a replica does with requests."""

    def __init__(self, llm: AsyncLLM, health: Health, gate: asyncio.Event, pauses: Pauses) -> None:
        """
        Args:
            gate: Requests wait until it is set.
            pauses: When the engine stood still, for what is told of requests.
        """
        self._llm = llm
        self._health = health
        self._gate = gate
        self._pauses = pauses
        self._max_model_len = llm.model_config.max_model_len

    async def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Taken | list[Piece], None]:
        """Run the requests together, and tell what they sample, without `so_far`: soon after some have ended, and of
        those that go on about once a second. Before an error comes all that there is, and before everything else that
        the engine has them all: whatever ends this process now may be of their making.

        Raises:
            DataError: a prompt or its sampling parameters that the engine refuses.
            EngineCrashError: the engine died or hung.
            InfraError: this replica is waiting to be replaced.
        """
        if self._health.broken:
            raise InfraError(self._health.broken)
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
                        yield Taken(self._health.replica)
                        if pieces := _pieces(runs):
                            yield pieces
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
                await asyncio.wait([work], timeout=CANCEL_S)

    async def _run(self, requests: Sequence[GenerateRequest], runs: Sequence[Running], news: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for request, run in zip(requests, runs, strict=True):
                    group.create_task(self._generate(request, run, news))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _generate(self, request: GenerateRequest, run: Running, news: asyncio.Event) -> None:
        watch = RequestWatch(run, self._llm, self._health, self._pauses)
        try:
            await self._in_engine(request, run, news, watch)
        except DataError:
            raise  # it was in no engine
        except BaseException as error:
            watch.ended(error)
            raise
        watch.ended(None)
        news.set()
        reason = run.output.outputs[0].finish_reason if run.output is not None else None
        if run.output is None or not run.output.finished or reason not in FINISH:
            raise InfraError(f"request {request.request_id}: the engine ended it with {reason!r}")

    async def _in_engine(
        self, request: GenerateRequest, run: Running, news: asyncio.Event, watch: RequestWatch
    ) -> None:
        """Returns once the engine has told its end."""
        health = self._health
        prompt_ids, params = self._resolve(request)
        await self._gate.wait()
        if health.broken:
            raise InfraError(health.broken)
        watch.admitted(len(prompt_ids))
        # The salt keeps versions apart in the prefix cache: a request admitted under v never reads a block that an
        # older version computed, even where running requests (`keep`) forbid emptying the cache.
        salt = f"{health.edition.lineage}-{health.edition.version}"
        prompt: EngineInput = tokens_input(prompt_ids, cache_salt=salt)
        if request.media:
            prompt = await self._with_media(request, prompt_ids, salt)
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
            health.give_up("its engine is dead" if dead else f"its engine's client failed: {error!r}", crash=True)
            told = f"{health.broken}; why is in {own_log()}, in logs/ray of the run directory"
            if not health.crashed or run.collector is None:
                raise InfraError.wrap(told, error) from error
            crash = EngineCrashError.wrap(told, error)
            crash.replica = health.replica
            raise crash from error

    async def _with_media(self, request: GenerateRequest, prompt_ids: Sequence[int], salt: str) -> EngineInput:
        try:
            return await with_media(self._llm.renderer, prompt_ids, request.media, salt)
        except DataError as error:
            raise DataError.wrap(f"request {request.request_id}: {error}", error) from error

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


def _pieces(runs: Sequence[Running]) -> list[Piece]:
    return [piece for run in runs if (piece := run.piece()) is not None]


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

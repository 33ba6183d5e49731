"""Token-exact generation on one replica's `AsyncLLM`.

requests ──▶ gate ──▶ AsyncLLM ──▶ deltas of turns, with spans
              │ closed from pause to resume, see `weights`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import EngineInput, MultiModalInput, mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.parse import parse_mm_uuids
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.torch_utils import set_default_torch_num_threads
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.metrics.stats import RequestStateStats

from asyncrl.core.failures import AsyncRLError, BugError, DataError, EngineCrashError, InfraError
from asyncrl.core.ports import Accepted, GenerateRequest
from asyncrl.core.types import FinishReason, Media
from asyncrl.storage.media import digest, frames_of, video_array
from rollouter.serving.client import Delta, cut_delta
from rollouter.serving.handles import own_log
from rollouter.serving.replica.batched_outputs import AT_ONCE
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.request_phases import EnginePauses, RequestRecorder

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer

REPORT_EVERY_S = 1.0
"""Interval at which running requests report their tokens. A replica that dies loses the tokens of at most that time."""
STREAM_EVERY_S = 0.02
"""The same interval for requests whose client reads the tokens as they are sampled."""
MAX_STREAM_REPORTS_PER_S = 200
"""Limit for such reports of one replica, because each costs a millisecond of CPU. With more streams than fit, each
reports less often."""
GATHER_S = 0.25
"""Time for which a call waits for other requests to end after one has ended, because a message costs a millisecond.
Once all requests have ended, the call reports at once."""
CANCEL_S = 5.0
"""Limit for the requests of a cancelled call to leave the engine."""
LEFT_S = 0.1
"""Time after which a replica that leaves or sleeps refuses a call. Meanwhile the callers learn of it."""
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
"""The finish reasons of vLLM that are not failures."""


@dataclass(slots=True)
class RunningRequest:
    """One request in vLLM, and its tokens so far.

    vLLM reports a request once, when it ends (`FINAL_ONLY`), which costs nothing per token. Until then, the tokens are
    read from vLLM's state in this process, which survives the death of the engine core, but lacks the newest tokens
    (`batched_outputs`). Use this class on the event
    loop of the engine client, where the state changes only during an await.
    """

    number: int
    request_id: str
    collector: RequestOutputCollector | None = None
    state: RequestState | None = None
    """None until the engine has the request, and if the request ended before its state was read."""
    output: RequestOutput | None = None
    """The engine's last output."""
    num_reported: int = 0
    is_reported: bool = False
    """Whether the end of the request has been reported."""

    @property
    def num_tokens(self) -> int:
        if (end := self._end()) is not None:
            return len(end.token_ids)
        if self.state is None or self.state.detokenizer is None:
            return 0
        return len(self.state.detokenizer.output_token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.output.outputs[0].finish_reason if self.output is not None else None
        return FINISH_REASONS.get(reason or "abort", FinishReason.ABORTED)

    @property
    def stats(self) -> RequestStateStats | None:
        return self.state.stats if self.state is not None else getattr(self.output, "metrics", None)

    def take_delta(self) -> Delta | None:
        """Return the tokens since the last delta, if any.

        Raises:
            BugError: the engine has reported tokens without log-probs or versions.
        """
        if self.is_reported:
            return None
        end = self._end()
        if end is not None and end.finish_reason in FINISH_REASONS:
            self.is_reported = True
            spans = [span for span in end.weight_versions or () if span.end > span.start]
            return self._delta(
                end.token_ids,
                end.logprobs.logprobs if end.logprobs else [],
                [(span.version, span.start) for span in spans],
                FINISH_REASONS[end.finish_reason],
                done=True,
            )
        if self.state is None or self.state.detokenizer is None or self.state.logprobs_processor is None:
            return None
        tokens = self.state.detokenizer.output_token_ids
        if len(tokens) == self.num_reported:
            return None
        log_probs = self.state.logprobs_processor.logprobs
        return self._delta(
            tokens,
            log_probs.logprobs if log_probs else [],
            self.state.weight_version_starts,
            FinishReason.ABORTED,
            done=False,
        )

    def aborted(self) -> Delta:
        """Return the end of a request that goes on elsewhere, without further tokens."""
        self.is_reported = True
        return Delta(self.number, cut_delta((), (), (), 0, FinishReason.ABORTED), done=True)

    def _end(self) -> CompletionOutput | None:
        """Return the engine's last output, which may still be in the collector."""
        waiting = self.collector.output if self.collector is not None else None
        output = self.output or (waiting if isinstance(waiting, RequestOutput) else None)
        return output.outputs[0] if output is not None else None

    def _delta(
        self,
        tokens: list[int],
        log_probs: list[float],
        starts: list[tuple[str, int]],
        finish: FinishReason,
        *,
        done: bool,
    ) -> Delta:
        if len(log_probs) != len(tokens):
            raise BugError(f"request {self.request_id}: {len(tokens)} tokens with {len(log_probs)} log-probs")
        if tokens and not starts:
            raise BugError(f"request {self.request_id}: the engine did not report which version sampled its tokens")
        turn = cut_delta(tokens, log_probs, starts, self.num_reported, finish)
        self.num_reported = len(tokens)
        return Delta(self.number, turn, done)


class TokenGeneration:
    """Runs the requests of generate calls in the engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        health: ReplicaHealth,
        gate: asyncio.Event,
        pauses: EnginePauses,
        adapter: Callable[[], LoRARequest | None] = lambda: None,
    ) -> None:
        """Requests wait until `gate` is set, and their events take `pauses` into account. `adapter` returns the LoRA
        adapter that they use."""
        self._llm = llm
        self._health = health
        self._gate = gate
        self._pauses = pauses
        self._adapter = adapter
        self.closed = False
        """Whether calls are handed back, because the ranks have the replica's GPUs or want them."""
        self._max_model_len = llm.model_config.max_model_len
        self._calls: set[asyncio.Event] = set()
        self._num_streams = 0
        """Running calls whose client reads the tokens as they are sampled."""

    def hand_back(self) -> None:
        """End all calls of a replica that is leaving or `closed` now. Their requests end as aborted, with all their
        tokens, and the caller continues them on another replica, as after an abort by a weight update. Later calls are
        refused."""
        for changed in self._calls:
            changed.set()

    @property
    def _hands_back(self) -> bool:
        return self._health.leaving or self.closed

    async def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Accepted | list[Delta], None]:
        """Run the requests together, and yield the tokens that they sample: soon after a request has ended, while
        requests run about once a second, or every few hundredths of a second with `stream`, and at once if the replica
        hands them back (`hand_back`). The first item is yielded once the engine has all requests: if this process dies
        afterwards, they may be the cause. All tokens are yielded before an error is raised.

        Raises:
            DataError: the engine refuses a prompt or its sampling parameters.
            EngineCrashError: the engine died or hung.
            InfraError: this replica is waiting to be replaced.
        """
        if self._health.broken:
            raise InfraError(self._health.broken)
        runs = [RunningRequest(number, request.request_id) for number, request in enumerate(requests)]
        if self._hands_back:
            await asyncio.sleep(LEFT_S)
            yield [run.aborted() for run in runs]
            return
        changed = asyncio.Event()
        accepted = False
        self._calls.add(changed)
        streams = any(request.stream for request in requests)
        self._num_streams += streams
        work = asyncio.create_task(self._run(requests, runs, changed))
        work.add_done_callback(lambda _: changed.set())
        try:
            while not work.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(stream_interval(self._num_streams) if streams else REPORT_EVERY_S):
                        await changed.wait()
                if self._hands_back:
                    work.cancel()
                    await asyncio.wait([work], timeout=CANCEL_S)
                    yield [*_deltas(runs), *(run.aborted() for run in runs if not run.is_reported)]
                    return
                some_ended = changed.is_set()
                changed.clear()
                if not accepted:
                    if accepted := all(run.collector is not None for run in runs):
                        yield Accepted(self._health.replica)
                        if deltas := _deltas(runs):
                            yield deltas
                    continue
                if some_ended and not work.done():
                    await asyncio.wait([work], timeout=GATHER_S)
                if deltas := _deltas(runs):
                    yield deltas
            if deltas := _deltas(runs):
                yield deltas
            await work
        finally:
            self._calls.discard(changed)
            self._num_streams -= streams
            if not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=CANCEL_S)

    async def _run(
        self, requests: Sequence[GenerateRequest], runs: Sequence[RunningRequest], changed: asyncio.Event
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for request, run in zip(requests, runs, strict=True):
                    group.create_task(self._generate(request, run, changed))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _generate(self, request: GenerateRequest, run: RunningRequest, changed: asyncio.Event) -> None:
        recorder = RequestRecorder(run, self._llm, self._health, self._pauses)
        try:
            await self._in_engine(request, run, changed, recorder)
        except DataError:
            raise  # the request never was in the engine
        except BaseException as error:
            recorder.record(error)
            raise
        recorder.record(None)
        changed.set()
        reason = run.output.outputs[0].finish_reason if run.output is not None else None
        if run.output is None or not run.output.finished or reason not in FINISH_REASONS:
            raise InfraError(f"request {request.request_id}: the engine ended it with {reason!r}")

    async def _in_engine(
        self, request: GenerateRequest, run: RunningRequest, changed: asyncio.Event, recorder: RequestRecorder
    ) -> None:
        """Run one request in the engine, and return once it has ended."""
        health = self._health
        prompt_ids, params = self._resolve(request)
        await self._gate.wait()
        if health.broken:
            raise InfraError(health.broken)
        recorder.note_admitted(len(prompt_ids))
        # The salt separates versions in the prefix cache: a request admitted under version v never reads a block that
        # an older version computed, even if running requests (`keep`) prevent the cache from being emptied.
        salt = f"{health.weights_version.lineage}-{health.weights_version.version}"
        prompt: EngineInput = tokens_input(prompt_ids, cache_salt=salt)
        if request.media:
            prompt = await self._with_media(request, prompt_ids, salt)
        try:
            try:
                run.collector = await self._llm.add_request(
                    request.request_id, prompt, params, lora_request=self._adapter()
                )
            except (VLLMClientError, ValueError) as error:
                raise DataError.wrap(f"request {request.request_id}: the engine refuses it", error) from error
            run.state = self._llm.output_processor.request_states.get(run.collector.request_id)
            changed.set()
            # With FINAL_ONLY, the only output comes at the end.
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
                raise InfraError.wrap(f"request {request.request_id}: the engine did not accept it", error) from error
            health.give_up("its engine is dead" if dead else f"its engine's client failed: {error!r}", crash=True)
            message = f"{health.broken}; the cause is in {own_log()}, in logs/ray of the run directory"
            if not health.crashed or run.collector is None:
                raise InfraError.wrap(message, error) from error
            crash = EngineCrashError.wrap(message, error)
            crash.replica = health.replica
            raise crash from error

    async def _with_media(self, request: GenerateRequest, prompt_ids: Sequence[int], salt: str) -> EngineInput:
        try:
            return await media_input(self._llm.renderer, prompt_ids, request.media, salt)
        except DataError as error:
            raise DataError.wrap(f"request {request.request_id}: {error}", error) from error

    def _resolve(self, request: GenerateRequest) -> tuple[list[int], SamplingParams]:
        """Return prompt and sampling parameters for the engine. The tokens so far are appended to the prompt, and
        `max_tokens` is reduced by their number."""
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
            params = SamplingParams(
                **sampling,
                stop=stop,
                detokenize=bool(stop),
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={AT_ONCE: True} if request.stream else None,
            )
            # vLLM does not check all types, and an engine that receives a wrong one answers no request any more.
            msgspec.convert(msgspec.to_builtins(params), SamplingParams)
            return prompt_ids, params
        except (TypeError, ValueError, VLLMClientError, msgspec.MsgspecError) as error:
            raise DataError.wrap(f"request {request.request_id}: invalid sampling parameters", error) from error


def stream_interval(num_streams: int) -> float:
    """Return the interval in seconds at which each of a replica's streams reports its tokens."""
    return min(REPORT_EVERY_S, max(STREAM_EVERY_S, num_streams / MAX_STREAM_REPORTS_PER_S))


def _deltas(runs: Sequence[RunningRequest]) -> list[Delta]:
    return [delta for run in runs if (delta := run.take_delta()) is not None]


def _first(failures: BaseExceptionGroup) -> BaseException:
    """Return the most severe typed error in a group, or else the first error."""
    leaves: list[BaseException] = []
    for failure in failures.exceptions:
        leaves.append(_first(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    for kind in (BugError, InfraError, AsyncRLError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


async def media_input(
    renderer: BaseRenderer[Any], prompt_ids: Sequence[int], media: Sequence[Media], salt: str
) -> MultiModalInput:
    """Return the engine's input for `prompt_ids` and `media`, computed off the event loop.

    The ids contain all placeholders already, because the Trainer sees the same ids. vLLM's processor would insert them
    again, so this function requests only the features and the positions of the placeholders in these ids.

    Args:
        salt: Identifies the weights, because cached features belong to one version.

    Raises:
        DataError: the model does not accept such media, or vLLM expects placeholders that the prompt does not have.
    """
    # This runs in vLLM's thread for media, because vLLM's processor and its cache are not thread-safe.
    return await asyncio.get_running_loop().run_in_executor(
        renderer._mm_executor, _media_input, renderer, list(prompt_ids), media, salt
    )


def _media_input(
    renderer: BaseRenderer[Any], prompt_ids: list[int], media: Sequence[Media], salt: str
) -> MultiModalInput:
    processor = renderer.mm_processor
    if processor is None:
        raise DataError("its prompt has images or videos, but vLLM serves this model with text only")
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    try:
        for one in media:
            data.setdefault(one.kind, []).append(frames_of(one)[0] if one.kind == "image" else video_array(one))
            names.setdefault(one.kind, []).append(f"{salt}-{digest(one)}")
        inputs = ProcessorInputs(
            prompt_ids,
            processor.info.parse_mm_data(data),
            parse_mm_uuids(names),
            cache=renderer._mm_processor_only_cache,
        )
        with set_default_torch_num_threads():
            result = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    except ValueError as error:
        raise DataError.wrap(f"vLLM cannot process its {', '.join(data)}: {error}", error) from error
    found = processor._find_mm_placeholders(prompt_ids, result.prompt_updates)
    missing = [kind for kind, items in data.items() if len(found.get(kind, ())) != len(items)]
    if missing:
        kind = missing[0]
        raise DataError(
            f"vLLM finds placeholders of {len(found.get(kind, ()))} {kind}s in its tokens, but the prompt has "
            f"{len(data[kind])}; the model's processors in transformers and in vLLM disagree, or the chat "
            "template has rewritten the conversation"
        )
    ranges = {kind: [place.to_range() for place in places] for kind, places in found.items()}
    return mm_input(prompt_ids, result.kwargs, result.hashes, ranges, cache_salt=salt)

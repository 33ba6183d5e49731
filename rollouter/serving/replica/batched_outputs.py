"""vLLM's scheduler, which sends the tokens of several steps to the replica in one message.

vLLM sends a message after each step, and its client handles each request in it in Python. With a model of a million
parameters, that was half of the CPU time of the replica's process. A replica needs the tokens of a running request only
once a second, so they wait in the engine core.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

HOLD_S = 0.05
"""Time after which the next step sends all tokens that wait. A request that is cancelled, and an engine core that dies,
lose those that wait."""
AT_ONCE = "send_tokens_at_once"
"""Key in a request's `SamplingParams.extra_args` that keeps its tokens from waiting."""
_MERGED = ("request_id", "new_token_ids", "new_logprobs")
_OTHERS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _MERGED)
_DEFAULTS = EngineCoreOutput(request_id="", new_token_ids=[])


def tokens_wait(params: SamplingParams | None) -> bool:
    """Return whether the tokens of a running request may wait: not if its client reads them as they are sampled, nor
    if the replica looks for strings in them that end the request."""
    return params is not None and not params.stop and not (params.extra_args or {}).get(AT_ONCE)


@dataclass(slots=True)
class WaitingTokens:
    """The tokens of one request that have not been sent, with their log-probs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def move_to(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Insert the tokens before those of `output`."""
        self.add(output)
        output.new_token_ids = self.token_ids
        if self.logprobs:
            arrays = zip(*(part[:3] for part in self.logprobs), strict=True)
            output.new_logprobs = LogprobsLists(*(np.concatenate(parts) for parts in arrays))
        return output


class BatchedOutputs(Scheduler):
    """Holds back outputs that have nothing but tokens. All others, such as the first and the last one of a request,
    are sent at once, together with the request's tokens that wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: dict[int, dict[str, WaitingTokens]] = {}
        """By client, then by request."""
        self._all_sent_at = time.monotonic()

    def has_requests(self) -> bool:
        """Have the engine core make another step while tokens wait, above all before a pause is complete: the version
        of the weights that the client notes for tokens is that at the time of the message."""
        return bool(self._waiting) or super().has_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        messages = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        # A paused scheduler has no unfinished requests.
        send_all = now - self._all_sent_at >= HOLD_S or not self.has_unfinished_requests()
        for client, message in messages.items():
            message.outputs = [output for output in message.outputs if not self._holds(client, output, send_all)]
        if send_all:
            self._all_sent_at = now
            for client, requests in self._waiting.items():
                message = messages.setdefault(client, EngineCoreOutputs())
                message.outputs += [
                    tokens.move_to(EngineCoreOutput(request_id=request_id, new_token_ids=[]))
                    for request_id, tokens in requests.items()
                    if request_id in self.requests
                ]
            self._waiting.clear()
            return messages
        return {
            client: message
            for client, message in messages.items()
            if message.outputs or message.finished_requests is not None
        }

    def _holds(self, client: int, output: EngineCoreOutput, send_all: bool) -> bool:
        """Add the tokens of `output` to those that wait, or else those that wait to it."""
        request = self.requests.get(output.request_id)
        only_tokens = all(getattr(output, name) is getattr(_DEFAULTS, name) for name in _OTHERS)
        if not send_all and only_tokens and request is not None and tokens_wait(request.sampling_params):
            self._waiting.setdefault(client, {}).setdefault(output.request_id, WaitingTokens()).add(output)
            return True
        if (tokens := self._waiting.get(client, {}).pop(output.request_id, None)) is not None:
            tokens.move_to(output)
        return False


class BatchedOutputsAsync(BatchedOutputs, AsyncScheduler):
    """The same for an engine that prepares a step while the one before it runs."""


def batch_outputs(config: VllmConfig) -> None:
    """Have the engine use these schedulers, unless the user has chosen one."""
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = BatchedOutputsAsync if scheduling.async_scheduling else BatchedOutputs

"""The scheduler that sends the tokens of several steps together, against vLLM's own on the same steps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import vllm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from asyncrl.assets import resolve
from rollouter.serving.replica import batched_outputs
from rollouter.serving.replica.batched_outputs import (
    AT_ONCE,
    HOLD_S,
    BatchedOutputs,
    BatchedOutputsAsync,
    batch_outputs,
)

BLOCKS, BLOCK_SIZE = 12, 16
"""Few blocks, so that requests are preempted."""


@pytest.fixture(scope="module", autouse=True)
def config() -> VllmConfig:
    if not hasattr(Steps, "config"):
        Steps.config = EngineArgs(
            model=resolve("asyncrl://quickstart"),
            block_size=BLOCK_SIZE,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
            async_scheduling=False,
        ).create_engine_config()
        Steps.config.cache_config.num_gpu_blocks = BLOCKS
    return Steps.config


class Client:
    """What arrives of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[tuple[int, float, int]]] = {}
        """Token, log-prob, and version of the weights at the time of the message."""
        self.ends: dict[str, str] = {}
        self.num_messages = 0

    def receive(self, messages: dict[int, EngineCoreOutputs], version: int) -> None:
        for sent in messages.values():
            message = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
            self.num_messages += bool(message.outputs)
            for output in message.outputs:
                assert output.request_id not in self.ends
                ids, log_probs, ranks, _ = output.new_logprobs or LogprobsLists(*[np.zeros((0, 1))] * 3)
                assert len(ids) == len(log_probs) == len(ranks) == len(output.new_token_ids)
                assert [row[0] for row in ids] == output.new_token_ids
                self.tokens.setdefault(output.request_id, []).extend(
                    (token, float(row[0]), version) for token, row in zip(output.new_token_ids, log_probs, strict=True)
                )
                if output.finish_reason is not None:
                    self.ends[output.request_id] = str(output.finish_reason)


def scheduler(kind: type[Scheduler], config: VllmConfig) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def sampled(request_id: str, place: int) -> int:
    """Return the token at `place` of a response, the same in both schedulers."""
    return 3 + (sum(request_id.encode()) + 7 * place) % 90


class Engine:
    """An engine core with the steps of `vllm.v1.engine.core`; with `ahead`, it schedules a step before it has the
    tokens of the one before."""

    def __init__(self, kind: type[Scheduler], config: VllmConfig, ahead: bool = False) -> None:
        self.scheduler = scheduler(kind, config)
        self._num_scheduled = 2 if ahead else 1
        self._scheduled: deque[tuple[SchedulerOutput, set[str]]] = deque()

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._scheduled)

    def step(self) -> dict[int, EngineCoreOutputs]:
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            # Parts of a prompt sample no token.
            samples = {
                one for one in step.num_scheduled_tokens
                if self.scheduler.requests[one].num_computed_tokens >= self.scheduler.requests[one].num_tokens
            }  # fmt: skip
            self._scheduled.append((step, samples))
            more = step.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self._scheduled) < self._num_scheduled and more:
                return {}
        return self._update(*self._scheduled.popleft())

    def _update(self, step: SchedulerOutput, samples: set[str]) -> dict[int, EngineCoreOutputs]:
        ids = list(step.num_scheduled_tokens)
        known = self.scheduler.requests
        tokens = [
            [sampled(one, known[one].num_output_tokens)] if one in samples and one in known else [] for one in ids
        ]
        column = np.array([part or [0] for part in tokens], dtype=np.int64).reshape(-1, 1)
        return self.scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={one: number for number, one in enumerate(ids)},
                sampled_token_ids=tokens,
                logprobs=LogprobsLists(column, -column.astype(np.float32) / 7, column[:, 0]) if ids else None,
            ),
        )


class Steps(RuleBasedStateMachine):
    """Requests come, are cancelled and end, time passes, and the weights change in pauses; both clients must know the
    same at each pause and at the end."""

    config: VllmConfig

    @initialize(ahead=st.booleans())
    def start(self, ahead: bool) -> None:
        self.now = 100.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(batched_outputs.time, "monotonic", lambda: self.now)
        kinds = (BatchedOutputsAsync, AsyncScheduler) if ahead else (BatchedOutputs, Scheduler)
        self.ours, self.plain = (Engine(kind, self.config, ahead) for kind in kinds)
        self.ahead = ahead
        self.our_client, self.plain_client = Client(), Client()
        self.number, self.version, self.cancelled = 0, 0, set[str]()

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            try:
                while self.plain.has_work() or self.ours.has_work():
                    self.step(0.0)
                self.compare()
            finally:
                self.patch.undo()

    def compare(self) -> None:
        for request_id, tokens in self.plain_client.tokens.items():
            ours = self.our_client.tokens.get(request_id, [])
            if request_id in self.cancelled:
                assert ours == tokens[: len(ours)]
            else:
                assert ours == tokens
        assert self.our_client.ends == self.plain_client.ends

    @rule(length=st.integers(1, 40), limit=st.integers(1, 60), kind=st.sampled_from(["", "", "stop", "stream"]))
    def add(self, length: int, limit: int, kind: str) -> None:
        self.number += 1
        request_id = f"{kind}{self.number}"
        for side in (self.ours, self.plain):
            params = SamplingParams(
                max_tokens=limit,
                logprobs=0,
                stop=["x"] if kind == "stop" else None,
                extra_args={AT_ONCE: True} if kind == "stream" else None,
            )
            side.scheduler.add_request(Request(request_id, [5] * length, params, None))

    @rule(passes=st.sampled_from([0.0, HOLD_S / 3, HOLD_S]))
    def step(self, passes: float) -> None:
        self.now += passes
        for side, client in ((self.ours, self.our_client), (self.plain, self.plain_client)):
            if side.has_work():
                client.receive(side.step(), self.version)

    @precondition(lambda self: self.plain.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.plain.scheduler.requests)))
        self.cancelled.add(request_id)
        for side in (self.ours, self.plain):
            side.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @rule()
    def change_weights(self) -> None:
        """A pause is complete once the engine has nothing to do."""
        for side, client in ((self.ours, self.our_client), (self.plain, self.plain_client)):
            side.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while side.has_work():
                client.receive(side.step(), self.version)
        self.compare()
        self.version += 1
        for side in (self.ours, self.plain):
            side.scheduler.set_pause_state(PauseState.UNPAUSED)

    @invariant()
    def streams_and_requests_with_stop_strings_never_wait(self) -> None:
        if getattr(self, "ahead", True):  # then one engine may have an empty step more than the other
            return
        for request_id, tokens in self.plain_client.tokens.items():
            if request_id.startswith("s") and request_id not in self.cancelled:
                assert self.our_client.tokens[request_id] == tokens


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(batched_outputs.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("kind", "expected"), [(Scheduler, 40), (BatchedOutputs, 9)])
def test_tokens_of_several_steps_make_one_message(
    kind: type[Scheduler], expected: int, config: VllmConfig, clock: list[float]
) -> None:
    engine, client = Engine(kind, config), Client()
    for number in range(3):
        engine.scheduler.add_request(Request(str(number), [5] * 8, SamplingParams(max_tokens=40, logprobs=0), None))
    while engine.has_work():
        clock[0] += HOLD_S / 5 + 1e-9
        client.receive(engine.step(), 0)
    assert [len(tokens) for tokens in client.tokens.values()] == [40] * 3
    assert client.num_messages == expected


def test_every_other_part_of_an_output_is_sent_at_once(config: VllmConfig, clock: list[float]) -> None:
    engine: Any = scheduler(BatchedOutputs, config)
    engine.add_request(Request("1", [5] * 8, SamplingParams(max_tokens=60), None))
    for name in EngineCoreOutput.__struct_fields__:
        if name not in ("request_id", "new_token_ids", "new_logprobs"):
            output = EngineCoreOutput("1", [5], **{name: msgspec.UNSET})
            assert not engine._holds(0, output, send_all=False), name
    assert engine._holds(0, EngineCoreOutput("1", [5]), send_all=False)


@pytest.mark.parametrize(
    ("own", "ahead", "chosen"),
    [(None, False, BatchedOutputs), (None, True, BatchedOutputsAsync), ("own.Scheduler", True, "own.Scheduler")],
)
def test_a_scheduler_of_the_users_own_stays(own: str | None, ahead: bool, chosen: Any) -> None:
    scheduling = SimpleNamespace(scheduler_cls=own, async_scheduling=ahead)
    batch_outputs(cast(VllmConfig, SimpleNamespace(scheduler_config=scheduling)))
    assert scheduling.scheduler_cls is chosen


def test_this_is_the_version_of_vllm_that_was_checked() -> None:
    assert vllm.__version__.startswith("0.32."), (
        "vLLM's scheduler is no public interface: compare `update_from_output`, `has_requests` and the steps of "
        "vllm.v1.engine.core of this version with rollouter/serving/replica/batched_outputs.py first"
    )

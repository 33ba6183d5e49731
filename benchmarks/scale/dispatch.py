"""The real dispatcher, client and choice of replicas over simulated replicas, in one process without Ray: how fast it
hands out samples."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import Any

import anyio
import numpy as np

from asyncrl.config.compose import check_config
from asyncrl.core.ports import Accepted, ApplyReport, GenerateRequest, GenerationEvent, Publication
from asyncrl.core.types import FinishReason, Prompt, SampleId
from benchmarks.agents.rollouts import RolloutWork, take
from benchmarks.report import Table
from benchmarks.running import print_progress
from rollouter.serving import client
from rollouter.serving.balancing import CallSize, SessionBalancer
from rollouter.serving.client import Delta, ReplicaStream, cut_delta

LATENCY_S = 0.1
"""Time that a simulated replica takes for a call, so that all replicas are busy at once."""
TOKENS = 60
PROMPT_TOKENS = 24
VERSIONS = 2


class FixedPrompts:
    """A `PromptSource` of equal prompts."""

    def __len__(self) -> int:
        return 1_000_000

    def at(self, sample_id: SampleId) -> Prompt:
        return Prompt(np.arange(PROMPT_TOKENS, dtype=np.int32))


class SimulatedReplicas:
    """An `EngineFleet` of replicas that cost nothing, chosen as the router of a run chooses them."""

    def __init__(self, replicas: int) -> None:
        self._balancer = SessionBalancer()
        self._names = [f"replica-{number}" for number in range(replicas)]
        self._numbers = count()
        self._in_flight = 0
        self.most_in_flight = 0

    def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[GenerationEvent, None]:
        """See `ports.EngineFleet`."""
        return client.generate(self._call, requests, session=session, max_attempts=1)

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return []

    async def _call(self, requests: Sequence[GenerateRequest], *, session: str) -> ReplicaStream:
        call = str(next(self._numbers))
        replica = self._balancer.choose(session, dict.fromkeys(self._names), 2)[0]
        size = CallSize(PROMPT_TOKENS, TOKENS * len(requests))
        self._balancer.reserve(call, session, replica, size)
        self._balancer.sent(call, session, replica, call, context=size.context)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            yield Accepted(replica)
            await anyio.sleep(LATENCY_S)
            token_ids, log_probs = [5] * TOKENS, [-0.5] * TOKENS
            yield [
                Delta(number, cut_delta(token_ids, log_probs, [("0", 0)], 0, FinishReason.LENGTH), done=True)
                for number in range(len(requests))
            ]
        finally:
            self._balancer.outstanding.finish(replica, call)
            self._in_flight -= 1


def measure_dispatch(replicas: Sequence[int], group: int) -> Table:
    """Return a row for each number of replicas, with one sample in flight for each of them."""
    return [anyio.run(_row, number, group) for number in replicas]


async def _row(replicas: int, group: int) -> dict[str, Any]:
    print_progress(f"dispatch, {replicas} replicas")
    overrides = (
        f"rollout.n={group}",
        f"rollout.response_length={TOKENS}",
        f"rollout.max_concurrent_samples={replicas}",
        f"trainer.ppo_mini_batch_size={replicas}",
    )
    fleet = SimulatedReplicas(replicas)
    work = RolloutWork(check_config(None, overrides).require(), FixedPrompts(), fleet)
    cpu_s = time.process_time()
    outcome = await take(work, VERSIONS)
    cpu_s = time.process_time() - cpu_s
    return {
        "replicas": replicas,
        "calls at once": fleet.most_in_flight,
        "decisions/s": len(outcome.samples) / outcome.seconds,
        "CPU ms/decision": 1e3 * cpu_s / len(outcome.samples),
        "CPU ms/response": 1e3 * cpu_s / outcome.trajectories,
    }

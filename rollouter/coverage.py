"""Determines whether a run needs engines, or whether records cover every sample that it trains on. Blocking.

The driver calls this before it starts engines (`skip.async_rollout.engines=auto`). Each record is read completely and
its checksum is verified, so that every record found here can be replayed later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.ports import ApplyReport, GenerateRequest, GenerationEvent, PromptSource, Publication
from asyncrl.core.types import SampleId
from rollouter.agent.conversation import ConversationAgent
from rollouter.sample_runner import ask_for
from skip import Call, RecordSkip, SkipAction, SkipManager


class RemainingSamples(NamedTuple):
    """The samples that a run still has to train on."""

    num_samples: int
    outstanding: tuple[SampleId, ...] = ()
    """Samples that were admitted before and are not trained on yet."""
    next_index: int = 1
    """Index of the first sample that was never admitted."""

    def ids(self, prompts_per_epoch: int) -> Iterator[SampleId]:
        """Yield the samples in feed order, without end."""
        yield from sorted(self.outstanding, key=lambda sample_id: sample_id.index)
        for index in count(self.next_index):
            yield SampleId((index - 1) // prompts_per_epoch, index)


def first_uncovered(
    config: Config, prompts: PromptSource, remaining: RemainingSamples, agent: ConversationAgent | None = None
) -> str:
    """Return the first remaining sample that needs an engine, with the reason; empty if no sample does.

    Samples with an unusable prompt are skipped, because the run drops and replaces them too.

    Raises:
        ConfigError: a record does not match this run, and `on_mismatch` is `error`.
    """
    role = SkipManager.get("async_rollout")
    if not isinstance(role, RecordSkip):
        return "skip.async_rollout is not enabled"
    counts = role.active.counts.copy()
    try:
        return _first_uncovered(role, config, prompts, remaining, agent)
    finally:
        role.active.counts = counts  # a lookup does not count as a replay


def _first_uncovered(
    role: RecordSkip,
    config: Config,
    prompts: PromptSource,
    remaining: RemainingSamples,
    agent: ConversationAgent | None,
) -> str:
    covered = num_unusable = 0
    covered_shapes: set[tuple[object, ...]] = set()
    for sample_id in remaining.ids(len(prompts)):
        if covered == remaining.num_samples:
            break
        try:
            request = ask_for(config, sample_id, prompts, agent)
        except DataError:
            num_unusable += 1
            if num_unusable > remaining.num_samples + len(prompts):
                return "no prompt is usable"
            continue
        if sample_id.index not in role.steps:
            return f"{sample_id} is not among skip.async_rollout.steps={role.steps}"
        covered += 1
        # With `repeat`, all samples of the same shape use the same record.
        shape = (request.n, request.baseline is None, request.sampling.get("max_tokens"))
        if role.action is SkipAction.REPEAT and shape in covered_shapes:
            continue
        call = Call({"request": request}, {})
        if role.active.look_up(ask_for, sample_id.index, (call,), {}).outcome is None:
            return f"{sample_id} has no record that can be used in {role.files.root}"
        covered_shapes.add(shape)
    return ""


class UnavailableFleet:
    """The `EngineFleet` of a run without engines, whose samples are all covered by records."""

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Refuse to generate.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"skip.async_rollout.engines=auto: {session} has no record. No engine was started, because records "
            "covered every sample when the run started. Either a record was deleted since then, or a dropped sample "
            "needs a replacement that was not recorded; set skip.async_rollout.engines=always"
        )
        yield  # makes this an async generator

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return []

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return

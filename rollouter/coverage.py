"""Whether a run needs engines at all: every sample that it trains on may be recorded. Blocking.

The driver asks before it starts them (`skip.async_rollout.serve_when_covered=false`). Each record is read whole and its
checksums are checked, so that what is promised here holds when the sample is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, DataError
from asyncrl.ports import ApplyReport, GenerateRequest, OnCrash, OnCut, OnPlace, OnTurn, PromptSource, Publication
from asyncrl.types import SampleId, Turn
from rollouter.agent.asking import Converser
from rollouter.stages import ask_for
from skip import Action, BaseSkip, Call, SkipManager


class ToCome(NamedTuple):
    """Which samples a run has still to train on."""

    num_samples: int
    outstanding: tuple[SampleId, ...] = ()
    """Fed already, and to be trained or fed again."""
    next_index: int = 1
    """Of the first that was never fed."""

    def ids(self, prompts_per_epoch: int) -> Iterator[SampleId]:
        """In feed order, without end."""
        yield from sorted(self.outstanding, key=lambda sample_id: sample_id.index)
        for index in count(self.next_index):
            yield SampleId((index - 1) // prompts_per_epoch, index)


def first_uncovered(config: Config, prompts: PromptSource, to_come: ToCome, agent: Converser | None = None) -> str:
    """Which sample of those to come an engine is needed for, and why; empty: none.

    Samples whose prompt cannot be asked for are dropped in the run, and others take their place; so they do here.

    Raises:
        ConfigError: a record was made by something else, and `on_mismatch` is `error`.
    """
    role = SkipManager.get("async_rollout")
    if role is None:
        return "skip.async_rollout is not enabled"
    counts = role.counts.copy()
    try:
        return _first_uncovered(role, config, prompts, to_come, agent)
    finally:
        role.counts = counts  # looking is not replaying


def _first_uncovered(
    role: BaseSkip, config: Config, prompts: PromptSource, to_come: ToCome, agent: Converser | None
) -> str:
    covered = passed_over = 0
    answered: set[tuple[object, ...]] = set()
    for sample_id in to_come.ids(len(prompts)):
        if covered == to_come.num_samples:
            break
        try:
            asked = ask_for(config, sample_id, prompts, agent)
        except DataError:
            passed_over += 1
            if passed_over > to_come.num_samples + len(prompts):
                return "no prompt can be asked for"
            continue
        if sample_id.index not in role.steps:
            return f"{sample_id} is not among skip.async_rollout.steps={role.steps}"
        covered += 1
        # What `repeat` finds for one sample it finds for all that ask for as much.
        wanted = (asked.n, asked.baseline is None, asked.sampling.get("max_tokens"))
        if role.action is Action.REPEAT and wanted in answered:
            continue
        ask = role.ask(Call({"asked": asked}, {}), None)
        if ask is None or role.meet_precondition(ask) is None:
            return f"{sample_id} has no record that can be used in {role.files.root}"
        answered.add(wanted)
    return ""


class NoFleet:
    """`EngineFleet` of a run that has no engines, because its records cover it."""

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
        """
        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"skip.async_rollout.serve_when_covered=false: {session} has no record, and there is no engine to generate "
            "it, since the run was covered when it began. Either a record has gone since, or dropped samples brought "
            "this one in beyond the recorded ones; set skip.async_rollout.serve_when_covered=true"
        )

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """There is nobody to apply it."""
        return []

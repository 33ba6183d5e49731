"""Read the records of a run from disk, for `promises`. Blocking."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.yaml_files import load_yaml
from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.types import SampleId, SampleMeta
from asyncrl.queue.core import Operation
from asyncrl.queue.journal_reader import read_beginning, read_counts, read_operations, read_samples
from asyncrl.queue.operations import OfferSamples, PermitsGranted, RequeueSample, RewindTraining, SetAppliedVersion
from asyncrl.queue.state import QueueState
from asyncrl.queue.turn_log import read_turns
from asyncrl.storage.run_dir import SAMPLES
from asyncrl.storage.trained_steps import read_trained, surviving_steps
from benchmarks.chaos.promises import BrokenCall, CompletedTurn, Fate, RunRecords, surviving_samples


class RunFigures(NamedTuple):
    samples: dict[str, int]
    """Number of samples by state, and of dropped samples by reason."""
    steps: int
    """Optimizer steps, including those that were rewound."""
    lineages: int


class TurnLogKeeper:
    """Keeps turn logs that the run deletes, by linking them under a second name."""

    def __init__(self, run_dir: Path, keep_in: Path) -> None:
        """`keep_in`: a directory on the same file system."""
        self._run_dir = run_dir
        self._root = keep_in
        self._kept: dict[int, str] = {}
        """Names of the linked logs by inode."""

    def link(self) -> None:
        """Link the logs that exist now."""
        target = self._root / SAMPLES
        with suppress(FileNotFoundError), os.scandir(self._run_dir / SAMPLES) as entries:
            for entry in entries:
                if entry.name.startswith("turns-") and entry.inode() not in self._kept:
                    target.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError, FileExistsError):
                        os.link(entry.path, target / entry.name)
                        self._kept[entry.inode()] = entry.name

    def turns(self) -> list[CompletedTurn]:
        """Return the turns of all logs, in order."""
        self.link()
        return [
            CompletedTurn(one.sample_id, one.key, len(one.turn.response_ids), one.turn.spans)
            for one in read_turns(self._root)
        ]


class JournalFacts(NamedTuple):
    """What a journal's operations contain besides the fates of samples; see `RunRecords`."""

    metas: dict[SampleId, SampleMeta]
    generated_anew: set[SampleId]
    rewinds: list[WeightsVersion]
    served_when_fed: dict[SampleId, int]


def journal_facts(operations: Iterable[Operation]) -> JournalFacts:
    """Collect the values in the journal's order."""
    facts = JournalFacts({}, set(), [], {})
    served = 0
    for operation in operations:
        if isinstance(operation, OfferSamples):
            facts.metas.update((sample.meta.sample_id, sample.meta) for sample in operation.samples)
        elif isinstance(operation, RequeueSample):
            facts.generated_anew.add(operation.sample_id)
        elif isinstance(operation, RewindTraining):
            facts.generated_anew.update(operation.trained_since)
            facts.rewinds.append(WeightsVersion(operation.lineage, operation.version))
        elif isinstance(operation, SetAppliedVersion):
            served = operation.version
        elif isinstance(operation, PermitsGranted):
            facts.served_when_fed.update(
                (one, served) for one in operation.sample_ids if one not in facts.served_when_fed
            )
    return facts


def read_records(
    run_dir: Path, turns: Sequence[CompletedTurn], broken_calls: Sequence[BrokenCall]
) -> tuple[RunRecords, RunFigures]:
    """Read the records of a run that has ended.

    Raises:
        ConfigError: its journal is damaged or missing.
    """
    trained = list(read_trained(run_dir))
    counts = read_counts(run_dir).samples
    fates = [Fate(record.sample_id, record.state, record.reason) for record in read_samples(run_dir)]
    fates += forgotten_fates(read_beginning(run_dir), fates, counts, surviving_samples(trained))
    figures = RunFigures(
        samples={
            "fed": counts.fed,
            "trained": counts.trained,
            **{f"dropped {reason}": count for reason, count in counts.dropped.items() if count},
        },
        steps=sum("step" in line for line in trained),
        lineages=max((line["lineage"] for line in trained), default=0) + 1,
    )
    facts = journal_facts(operation for _, operation in read_operations(run_dir))
    completed = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] == "completed"
    drift = load_yaml(run_dir / "config.yaml")["async_training"]
    records = RunRecords(
        fates=fates,
        counts=counts,
        trained=trained,
        turns=turns,
        metas=facts.metas,
        generated_anew=facts.generated_anew,
        rewinds=facts.rewinds,
        served_when_fed=facts.served_when_fed,
        broken_calls=broken_calls,
        max_staleness=drift["max_staleness"] if drift["stale_action"] == "drop" else None,
        completed=completed,
    )
    return records, figures


def forgotten_fates(
    begin: QueueState, known: Sequence[Fate], counts: SampleCounts, trained: Sequence[SampleId]
) -> list[Fate]:
    """Return the fates of samples that ended before the journal begins, in the state `begin`, and that it has
    forgotten.

    Those that the Trainer recorded are TRAINED. The others are DROPPED: the counts by reason, without those of the
    `known` samples, are distributed over them. If there are too few, the rest have no reason.
    """
    remembered = {fate.sample_id for fate in known} | set(begin.snapshot().outstanding)
    forgotten = [begin.id_of(index) for index in range(1, begin.next_index) if begin.id_of(index) not in remembered]
    reasons = (Counter(counts.dropped) - Counter(fate.reason for fate in known if fate.state == "dropped")).elements()
    in_model = set(trained)
    return [
        Fate(sample_id, "trained") if sample_id in in_model else Fate(sample_id, "dropped", next(reasons, ""))
        for sample_id in forgotten
    ]


def last_surviving_step(run_dir: Path) -> int:
    """Return the last step in the surviving model, according to the Trainer's record."""
    steps = surviving_steps(read_trained(run_dir))
    return steps[-1]["step"] if steps else 0


def steps_discarded(run_dir: Path) -> int:
    """Return the number of optimizer steps that all rewinds have discarded."""
    lines = list(read_trained(run_dir))
    return sum("step" in line for line in lines) - len(surviving_steps(lines))

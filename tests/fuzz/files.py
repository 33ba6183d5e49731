"""The files of a run, in memory: journal, checkpoints, payloads, turns and trained steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.core.ports import QueueSnapshot
from asyncrl.core.records import ValidationRecord
from asyncrl.core.types import Sample, SampleId, Turn
from asyncrl.storage.checkpoint_manifest import Progress
from asyncrl.storage.sample_bytes import FileRef
from benchmarks.chaos.promises import CompletedTurn
from tests.fakes.parts import MemoryTurns
from tests.fuzz.journal import Disk
from tests.fuzz.setup import FuzzSetup


class Checkpoint(NamedTuple):
    progress: Progress
    queue: QueueSnapshot
    model: tuple[SampleId, ...]
    """The samples on which the weights were trained."""


class Files:
    """All files of a run, and counts over the whole run."""

    def __init__(self, setup: FuzzSetup) -> None:
        self.journal = Disk(setup.num_prompts)
        self.checkpoints: dict[int, Checkpoint] = {}
        self.payloads: dict[str, Sample] = {}
        self.not_needed: set[str] = set()
        """Payload files that the queue has deleted."""
        self.turns = CountedTurns()
        self.trained: list[Mapping[str, Any]] = []
        self.validations: list[ValidationRecord] = []
        """Validations in the run's metrics, without those that a rewind abandoned."""
        self.num_segments = 0


class CountedTurns(MemoryTurns):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[CompletedTurn] = []

    async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        await super().record(sample_id, turns)
        self.log += [CompletedTurn(sample_id, key, len(turn.response_ids), turn.spans) for key, turn in turns.items()]


class MemoryFiles:
    """A `PayloadStore` that keeps files in memory."""

    def __init__(self, files: Files, pause: Callable[[], Awaitable[None]]) -> None:
        self._files = files
        self._pause = pause

    async def put(self, sample: Sample) -> FileRef:
        self._files.num_segments += 1
        name = f"1-{self._files.num_segments}.safetensors"
        self._files.payloads[name] = sample
        await self._pause()
        return FileRef(name, 0)

    async def get(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        asked = [payload.file for payload in payloads]
        assert not (gone := self._files.not_needed.intersection(asked)), f"{gone} were deleted although they are needed"
        return [self._files.payloads.get(file) for file in asked]


class MemoryTrainedSteps:
    """A `TrainedStepsFile` in memory."""

    def __init__(self, files: Files, lineage: int) -> None:
        self._files = files
        self._lineage = lineage

    async def append_rewind(self, step: int) -> None:
        self._files.trained.append({"lineage": self._lineage, "rewound_to_step": step})

    async def append(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        line = {"lineage": self._lineage, "step": step, "version": version, "samples": list(map(str, sample_ids))}
        self._files.trained.append(line)

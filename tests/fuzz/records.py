"""Recorded samples (`skip.async_rollout`): the real role and files, of which a fault loses or damages some."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asyncrl.core.ports import PromptSource
from asyncrl.core.trajectory import Generated, single_turn
from asyncrl.core.types import FinishReason, SampleId, Span, Turn
from rollouter.sample_runner import ask_for
from skip import Call, SkipManager
from skip.file_thread import Result
from skip.generation import AsyncRolloutSkip
from skip.record import MANIFEST, TENSORS
from skip.record_role import Served
from skip.role import ActiveRole
from skip.store import RecordFiles, record_name
from tests.fuzz.remote import Gate
from tests.fuzz.world import FuzzWorld

EARLIER = 1_000_000
"""The tokens of an earlier run are above this number."""
MEMORY = Path("/dev/shm")
"""A directory whose files are in memory, where it exists."""
LATE = 0.02
"""Probability that a record takes too long to read or write."""


class FuzzRecords(AsyncRolloutSkip):
    """The role as one process of the Rollouter has it."""

    def __init__(self, world: FuzzWorld, files: RecordFiles, gate: Gate) -> None:
        config = world.setup.config
        super().__init__(config.skip.async_rollout, config)
        self.files = files
        self._model = {}  # the digests of the model's files, which take longer than a run
        self._world = world
        FuzzActiveRole(self, world, gate)

    def prepare_data(self, step: int, result: Any, call: Call) -> None:
        if not self.files.damage(record_name(step)):
            self._world.broken.append(f"step {step} was generated although its record is intact")
        self._world.recorded[step] = _tokens(result)
        super().prepare_data(step, result, call)

    def to_result(self, call: Call, served: Served) -> Generated:
        generated = super().to_result(call, served)
        if _tokens(generated) != self._world.recorded[served.step]:
            self._world.broken.append(f"step {served.step} was replayed with other tokens than were recorded")
        return generated


class FuzzActiveRole(ActiveRole):
    """Reads and writes files in the time of the world, and sometimes too late."""

    def __init__(self, instance: FuzzRecords, world: FuzzWorld, gate: Gate) -> None:
        super().__init__("async_rollout", "skip.async_rollout", instance)
        self._world = world
        self._gate = gate

    async def in_file_thread(self, name: str, function: Callable[[], Result]) -> Result | None:
        await self._gate.passing()
        result = function()
        await self._world.pause()
        await self._gate.passing()
        return None if self._world.rng.random() < LATE else result


def _tokens(generated: Generated) -> list[Any]:
    rows = [row for trajectory in generated.trajectories for row in trajectory.rows]
    return [(row.response_ids.tolist(), row.response_mask.tolist(), row.spans) for row in rows]


@contextmanager
def stored(world: FuzzWorld, prompts: PromptSource) -> Iterator[None]:
    """Store the records of the run, if it has any; an earlier run has left some of them."""
    config, num_recorded = world.setup.config, world.setup.num_recorded
    if num_recorded is None:
        yield
        return
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        world.records = RecordFiles(Path(directory))
        role = FuzzRecords(world, world.records, Gate())
        for index in range(1, num_recorded + 1):
            request = ask_for(config, SampleId(0, index), prompts)
            ids = np.full(2, EARLIER + index, dtype=np.int32)
            turn = Turn(ids, np.full(2, -0.5, dtype=np.float32), (Span(0, 0),), FinishReason.STOP)
            generated = Generated(request.prompt, (single_turn(request.prompt, turn),) * request.n)
            role.prepare_data(index, generated, Call({"request": request}, {}))
        try:
            yield
        finally:
            SkipManager.reset()


def spoil(files: RecordFiles, rng: random.Random) -> None:
    """Delete, tear or damage a record, if there is any."""
    names = sorted(files.names())
    if not names:
        return
    name = rng.choice(names)
    path = files.root / name / rng.choice([MANIFEST, TENSORS])
    data = path.read_bytes()
    match rng.choice(["delete", "tear", "damage"]):
        case "delete":
            files.remove(name)
        case "tear":
            path.write_bytes(data[: rng.randrange(len(data))])
        case "damage":
            damage(path, rng)


def damage(path: Path, rng: random.Random) -> None:
    """Change one bit in the second half of a file, where a file of arrays has its arrays. An empty file has none."""
    data = bytearray(path.read_bytes())
    if not data:
        return
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)

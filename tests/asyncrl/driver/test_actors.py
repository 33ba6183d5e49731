"""The creation of actors while Ray does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from ray.exceptions import RaySystemError

from asyncrl.config.schema import Config
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import DeadlineError
from asyncrl.driver import actors
from asyncrl.driver import run as run_module
from asyncrl.driver.actors import SupervisedRollouter, SupervisedTrainer
from asyncrl.driver.run import Run
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.terminal.live import View
from asyncrl.storage.run_dir import RunDir
from rollouter import worker_actor
from rollouter.weight_updates import RolloutStart
from rollouter.worker_actor import ActorLink

CONFIG = Config(timeouts=TimeoutsConfig(start_s=0.2))


@pytest.fixture
def unanswered() -> Iterator[Callable[..., Any]]:
    """A call to Ray whose answer does not come before the end of the test."""
    answered = threading.Event()
    yield lambda *_, **__: answered.wait(5)
    answered.set()


async def ends_in_time(start: Callable[[], Any], part: str) -> None:
    """Check that a start ends at its deadline, and that the event loop runs meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.01)
            turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        with pytest.raises(DeadlineError, match=rf"{part} did not finish its creation within 0\.2 s"):
            await start()
        group.cancel_scope.cancel()
    assert turns > 1


@pytest.mark.parametrize("name", ["rollouter", "trainer"])
async def test_the_start_of_a_part_does_not_block_the_driver(
    name: str, unanswered: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, f"start_{name}", unanswered)
    directory = RunDir(tmp_path)
    part = {
        "rollouter": SupervisedRollouter(CONFIG, directory, lambda: RolloutStart(False)),
        "trainer": SupervisedTrainer(CONFIG, directory, None, AsyncMock(), lambda: None),
    }[name]
    await ends_in_time(lambda: part.start(1), name)


async def test_the_start_of_the_queue_does_not_block_the_driver(
    unanswered: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "start_queue", unanswered)
    directory, recorder = RunDir(tmp_path), Recorder([], View())
    run = Run(CONFIG, directory, None, recorder, View(), RunStatus(CONFIG, directory, recorder))
    run._trainer_part.total_steps = 1
    await ends_in_time(lambda: run._start_queue(8), "queue")


async def test_the_start_of_a_worker_does_not_block_the_rollouter(
    unanswered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_actor.ray, "remote", unanswered)
    link = ActorLink(CONFIG, 3)
    await ends_in_time(link.load, "worker 3")
    await link.kill()


async def test_a_worker_that_ray_cannot_kill_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool replaces it. Ray ends it with the Rollouter."""
    asked = []

    def kill(actor: Any) -> None:
        asked.append(actor)
        raise RaySystemError("the GCS did not register the actor")

    monkeypatch.setattr(worker_actor.ray, "kill", kill)
    link = ActorLink(CONFIG, 3)
    link._actor = "its handle"
    await link.kill()
    assert asked == ["its handle"]

"""An evaluation with its real parts in one process: configuration, data, reward, Rollouter and files, without Ray and
engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.run import RecoveryConfig
from asyncrl.core.failures import ConfigError, DataError, InfraError
from asyncrl.core.ports import GenerateRequest
from asyncrl.driver import evaluate as driver
from asyncrl.observe.status.run_files import read_run, status_report
from asyncrl.storage.answer_files import read_answers
from rollouter import actor as actor_module
from rollouter.actor import RolloutActor
from rollouter.group_workers.pool import LostWorker
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.serving import app as app_module
from tests.fakes.engine import FakeFleet

NUM_PROMPTS = 8
TOKENIZER = load_tokenizer(load_config().model)


def sums(request: GenerateRequest) -> list[int]:
    """Answer a question such as `12+34=`: correctly, unless the first number is odd."""
    numbers = [int(text) for text in re.findall(r"\d+", TOKENIZER.decode(request.prompt_ids, skip_special_tokens=True))]
    return list(TOKENIZER.encode(str(sum(numbers) + numbers[0] % 2), add_special_tokens=False))


class LocalActor:
    """An actor in this process, called like one of Ray's."""

    def __init__(self, actor: RolloutActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self._actor, name)(*args)))


class Machine:
    """Stands in for Ray, Serve and the engines."""

    def __init__(self) -> None:
        self.fleet = FakeFleet(answer=sums)
        self.events: list[str] = []
        self.start_error: Exception | None = None

    @asynccontextmanager
    async def cluster(self, config: Config, name: str) -> AsyncIterator[str]:
        self.events.append("cluster")
        yield name
        self.events.append("shut down")

    async def start_app(self, config: Config, *, namespace: str) -> None:
        self.events.append(f"engines for {Path(config.model.path).name}")
        if self.start_error is not None:
            raise self.start_error

    async def stop_app(self, namespace: str) -> None:
        self.events.append("engines stopped")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    machine = Machine()
    monkeypatch.setattr(driver, "cluster", machine.cluster)
    monkeypatch.setattr(driver, "link_logs", lambda logs: None)
    monkeypatch.setattr(app_module, "start_app", machine.start_app)
    monkeypatch.setattr(app_module, "stop_app", machine.stop_app)
    context = SimpleNamespace(namespace="eval", get_node_id=lambda: "here")
    ray = SimpleNamespace(is_initialized=lambda: False, get_runtime_context=lambda: context)
    monkeypatch.setattr(actor_module, "ray", ray)
    monkeypatch.setattr(actor_module, "start_rollouter", lambda config: LocalActor(RolloutActor(config)))
    monkeypatch.setattr(RolloutActor, "_fleet", lambda actor: machine.fleet)
    monkeypatch.setattr(actor_module.gc, "freeze", lambda: None)
    yield machine


def why(directory: Path) -> str:
    return str(status_report(read_run(directory))["why"]["text"]) if (directory / "state.json").exists() else ""


def config_of(*overrides: str) -> Config:
    more = (f"data.max_val_samples={NUM_PROMPTS}", "logging.console=plain", "trainer.total_training_steps=0")
    return load_config("quickstart", [*more, *overrides])


def test_the_answers_are_those_of_the_engines_scored_by_the_reward(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driver.evaluate(config_of(), out=tmp_path / "out", as_json=True) == 0
    assert machine.events == ["cluster", "engines for quickstart", "engines stopped", "shut down"]
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    answers = read_answers(tmp_path / "out" / "answers.jsonl")
    assert len(answers) == found["answered"] == NUM_PROMPTS
    for one in answers.values():
        (answer,) = one.answers
        assert answer.is_correct == (answer.text.strip() == str(one.ground_truth)) == (answer.reward == 1.0)
        assert answer.answer == answer.text.strip()
    share = sum(one.answers[0].is_correct for one in answers.values()) / NUM_PROMPTS
    assert 0 < share < 1
    assert found["all"]["figures"]["pass@1"]["value"] == found["all"]["figures"]["mean@1"]["value"] == share


def test_the_first_ctrl_c_keeps_all_answers_and_the_next_command_continues(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fleet = FakeFleet(answer=sums, hold=True)
    config = config_of("rollout.max_concurrent_samples=2")
    held = machine.fleet
    seen: list[str] = []

    async def interrupted(*args: Any) -> Any:
        """Answer one prompt, then press Ctrl-C."""
        async with anyio.create_task_group() as group:
            group.start_soon(press, args[1])
            found = await evaluate(*args)
        shutil.copytree(args[1], tmp_path / "killed")  # as if Ray had ended the driver
        os.utime(tmp_path / "killed" / "summary.json", (1e9, 1e9))
        return found

    async def press(directory: Path) -> None:
        await held.until_in_flight("val_0_0", "val_0_1")
        held.release("val_0_0")
        await held.until_in_flight("val_0_2")
        while "have 7 prompts to answer" not in why(directory):  # noqa: ASYNC110  a file has no event
            await anyio.sleep(0.05)
        seen.append(status_report(read_run(directory))["phase"])
        os.kill(os.getpid(), signal.SIGINT)

    evaluate, driver_evaluate = driver._evaluate, driver.evaluate
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "_evaluate", interrupted)
        assert driver_evaluate(config, out=tmp_path / "out") == 130
    assert machine.events[-2:] == ["engines stopped", "shut down"], "an orderly end"
    assert seen == ["running"]
    for directory in ("out", "killed"):
        assert status_report(read_run(tmp_path / directory))["phase"] == "interrupted"
    assert "the same command continues" in status_report(read_run(tmp_path / "killed"))["error"]
    assert not (tmp_path / "out" / "summary.json").exists()
    assert "interrupted: 1 prompts are answered; the same command continues" in capsys.readouterr().err
    machine.fleet = FakeFleet(answer=sums)
    assert driver_evaluate(config, out=tmp_path / "out", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kept"], found["answered"], len(machine.fleet.sessions)) == (1, NUM_PROMPTS, NUM_PROMPTS - 1)


def test_ctrl_c_ends_an_evaluation_whose_rollouter_ray_does_not_create(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def create(config: Config) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        answered.wait(5)

    monkeypatch.setattr(actor_module, "start_rollouter", create)
    try:
        assert driver.evaluate(config_of(), out=tmp_path / "out") == 130
    finally:
        answered.set()


class DyingLink:
    """A worker that dies as soon as it has started."""

    def __init__(self, config: Config, place: int, has_engines: bool = True) -> None: ...

    async def load(self) -> None: ...

    async def start(self, has_engines: bool) -> None: ...

    async def post(self, commands: Any) -> None: ...

    async def take(self) -> Any:
        await anyio.sleep(0.01)
        raise InfraError("out of memory")

    async def kill(self) -> None: ...


def test_workers_that_die_again_and_again_end_the_evaluation(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_link(*args: Any, **options: Any) -> DyingLink:
        return DyingLink(*args, **options)

    monkeypatch.setattr(driver, "PROGRESS_S", 0.01)
    monkeypatch.setattr(actor_module, "ActorLink", DyingLink)
    monkeypatch.setattr(actor_module, "start_link", start_link)
    config = config_of("rollout.num_workers=2", "recovery.max_restarts=3")
    with pytest.raises(InfraError, match=r"workers failed 4 times within 3600 s \(.*max_restarts=3\).*: out of memory"):
        driver.evaluate(config, out=tmp_path / "out")


async def test_lost_workers_do_not_end_an_evaluation_that_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [LostWorker(number, 0, at=0.0, cause="it died") for number in range(1, 10)]
    statuses = [(0, 1), (0, 1), (1, 2), (1, 3), (2, 5), (2, 6)]
    """Prompts that are done and losses, as the Rollouter reports them one after another."""
    messages: list[str] = []

    async def status() -> Any:
        done, num_lost = statuses.pop(0)
        evaluation = {"prompts": 8, "known": 0, "answered": done, "failed": 0}
        return {"evaluation": evaluation, "lost_workers": lost[:num_lost]}

    rollouter = SimpleNamespace(status=SimpleNamespace(remote=status))
    view: Any = SimpleNamespace(message=lambda level, text: messages.append(text) if level else None)
    records: Any = SimpleNamespace(report=lambda at: None)
    monkeypatch.setattr(driver, "PROGRESS_S", 0.002)
    config = Config(recovery=RecoveryConfig(max_restarts=2, window_s=0.001))
    with pytest.raises(InfraError, match="3 times in a row and the run did not get past prompt 2"):
        await driver._report(config, rollouter, view, records)
    assert not statuses and messages == ["worker 0 is replaced: it died"] * 6


def test_the_second_ctrl_c_keeps_the_counts_of_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped_at_once(*args: Any) -> None:
        args[-1].report({"prompts": 8, "known": 2, "answered": 3, "failed": 0})

    monkeypatch.setattr(driver, "_evaluate", stopped_at_once)
    assert driver.evaluate(config_of(), out=tmp_path / "out") == 130
    assert status_report(read_run(tmp_path / "out"))["answers"]["answered"] == 3


@pytest.mark.parametrize(
    ("error", "kind"), [(InfraError("no engine starts"), InfraError), (ConfigError("no such model"), ConfigError)]
)
def test_engines_that_do_not_start_end_the_evaluation_with_their_error(
    error: Exception, kind: type[Exception], machine: Machine, tmp_path: Path
) -> None:
    machine.start_error = error
    with pytest.raises(kind, match=str(error)):
        driver.evaluate(config_of(), out=tmp_path / "out")
    state = status_report(read_run(tmp_path / "out"))
    assert state["phase"] == "failed" and str(error) in state["error"]
    machine.start_error = None
    assert driver.evaluate(config_of(), out=tmp_path / "out") == 0


def test_a_data_set_that_cannot_be_used_is_named(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.val_files: no prompt is left"):
        driver.evaluate(config_of("data.max_prompt_length=1"), out=tmp_path / "out")


def test_prompts_that_engines_refuse_are_in_no_figure(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fleet.fail("val_0_3", DataError("the engine refuses it"))
    assert driver.evaluate(config_of(), out=tmp_path / "out", as_json=True) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["answered"], found["all"]["prompts"]) == (NUM_PROMPTS - 1, NUM_PROMPTS - 1)
    assert found["failed"][0]["number"] == 3
    assert "warning: prompt 3" in printed.err and "the engine refuses it" in printed.err

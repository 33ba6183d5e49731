"""Tests of annotated stages: when they run, which records they read and write, and which messages they give."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, UserCodeError
from asyncrl.core.waits import WaitBoard
from asyncrl.observe.metrics import registry
from skip import BaseSkip, Call, Content, Fingerprint, RecordSkip, Served, SkipAction, SkipManager, field, register_skip
from skip import role as role_module
from skip.file_thread import file_thread
from skip.record import MANIFEST, TENSORS
from skip.role import Outcome


@register_skip("double")
class Double(RecordSkip):
    """The role of a function with the arguments `step` and `number`."""

    support_online_step = True

    def extract_step(self, call: Call) -> int:
        return int(call["step"])

    def fingerprint(self, call: Call) -> Fingerprint:
        return {"number": field(call["number"])}

    def to_content(self, call: Call, result: Any) -> Content:
        if result == 13:
            raise ValueError("unlucky")
        return Content({"result": np.array([result], dtype=np.int32)}, {"number": call["number"]})

    def to_result(self, call: Call, served: Served) -> int:
        return int(served.record.content.arrays["result"][0])

    def versions(self, result: Any) -> tuple[int, int]:
        return (result, result + 1)


@register_skip("looped")
class Looped(Double):
    """A role that takes its step from `SkipManager.set_step`."""

    support_online_step = False
    support_actions = (SkipAction.CACHE,)


@pytest.fixture
def dump_dir(tmp_path: Path) -> Path:
    return tmp_path / "asyncrl" / "quickstart"


def configure(tmp_path: Path, role: str = "double", **section: Any) -> Config:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all", **section}
    return Config.model_validate({"skip": {"roles": {role: settings}}})


class Stage:
    """A sync or async stage that returns twice its number and keeps the steps for which it ran."""

    def __init__(self, *, is_async: bool = False) -> None:
        self.ran: list[int] = []
        self._is_async = is_async

    async def __call__(self, step: int, number: int = 4) -> int:
        return await self.arun(step, number) if self._is_async else self.run(step, number)

    @SkipManager.annotate(role="double")
    def run(self, step: int, number: int = 4) -> int:
        self.ran.append(step)
        return 2 * number

    @SkipManager.annotate(role="double")
    async def arun(self, step: int, number: int = 4) -> int:
        await anyio.lowlevel.checkpoint()
        self.ran.append(step)
        return 2 * number

    @SkipManager.annotate(role="looped")
    def loop(self, number: int, step: int = 0) -> int:
        self.ran.append(number)
        return 2 * number


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(is_async=request.param)


def double() -> Double:
    """Return the enabled role."""
    made = SkipManager.get("double")
    assert isinstance(made, Double)
    return made


# ------------------------------------------------------------------------------------------------ disabled roles


async def test_before_init_and_for_disabled_roles_the_function_runs_unchanged(tmp_path: Path, stage: Stage) -> None:
    assert await stage(1) == 8
    SkipManager.init(configure(tmp_path, enable=False, steps=[]))
    assert SkipManager.get("double") is None
    assert await stage(1) == 8
    assert stage.ran == [1, 1] and os.listdir(tmp_path) == []


def test_a_decorated_function_keeps_its_kind_name_and_signature() -> None:
    assert inspect.iscoroutinefunction(Stage.arun) and not inspect.iscoroutinefunction(Stage.run)
    assert Stage.run.__name__ == "run" and list(inspect.signature(Stage.run).parameters) == ["self", "step", "number"]
    with pytest.raises(TypeError, match="yields its results one by one"):

        @SkipManager.annotate(role="double")
        def generator() -> Iterator[int]:
            yield 1


def test_sessions_share_nothing(tmp_path: Path) -> None:
    with SkipManager.session(configure(tmp_path, "looped")):
        SkipManager.set_step(3)
        assert Stage().loop(4) == 8
    assert SkipManager.get("looped") is None
    with (
        SkipManager.session(configure(tmp_path, "looped")),
        pytest.raises(BugError, match=r"skip\.roles\.looped: the step is unknown; call SkipManager\.set_step"),
    ):
        Stage().loop(4)


# ------------------------------------------------------------------------------------------------ cache


async def test_a_step_runs_once_and_is_then_replayed(tmp_path: Path, dump_dir: Path, stage: Stage) -> None:
    SkipManager.init(configure(tmp_path, steps="1-2"))
    assert [await stage(step) for step in (1, 2, 3, 1, 2, 3)] == [8] * 6
    assert stage.ran == [1, 2, 3, 3]
    assert SkipManager.status() == {"double": {"recorded": 2, "replayed": 2}}
    assert {path.name for path in (dump_dir / "double").iterdir()} == {"1", "2"}
    manifest = json.loads((dump_dir / "double" / "1" / MANIFEST).read_text())
    assert manifest["fingerprint"] == {"number": "4"} and manifest["content"] == {"number": 4}
    assert (manifest["origin"]["oldest_version"], manifest["origin"]["newest_version"]) == (8, 9)
    # A new `init` simulates a later process.
    SkipManager.init(configure(tmp_path))
    assert await stage(2, 4) == 8


def test_a_sequential_role_uses_the_step_of_the_loop(tmp_path: Path, dump_dir: Path) -> None:
    SkipManager.init(configure(tmp_path, "looped"))
    stage = Stage()
    for step in (1, 2, 1):
        SkipManager.set_step(step)
        assert stage.loop(4) == 8
    assert stage.ran == [4, 4] and {path.name for path in (dump_dir / "looped").iterdir()} == {"1", "2"}


async def test_a_mismatch_is_recorded_again_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: Stage
) -> None:
    SkipManager.init(configure(tmp_path))
    for step in (1, 2):
        await stage(step)
    assert [await stage(step, 5) for step in (1, 2)] == [10, 10]
    assert [await stage(step, 5) for step in (1, 2)] == [10, 10]
    assert stage.ran == [1, 2, 1, 2]
    assert SkipManager.status()["double"] == {"recorded": 4, "mismatched": 2, "replayed": 2}
    (message,) = SkipManager.messages()
    assert "it differs in number (recorded 4, now 5)" in message and message in caplog.messages


async def test_a_mismatch_is_an_error_if_on_mismatch_is_error(tmp_path: Path, dump_dir: Path, stage: Stage) -> None:
    SkipManager.init(configure(tmp_path, on_mismatch="error"))
    await stage(1)
    with pytest.raises(ConfigError) as caught:
        await stage(1, 5)
    assert f"the record {dump_dir}/double/1 was made from another call: it differs in number" in caught.value.message
    assert "set skip.roles.double.on_mismatch=regenerate" in caught.value.message
    assert stage.ran == [1]


async def test_a_damaged_record_counts_as_absent(
    tmp_path: Path, dump_dir: Path, caplog: pytest.LogCaptureFixture, stage: Stage
) -> None:
    SkipManager.init(configure(tmp_path))
    await stage(1)
    tensors = dump_dir / "double" / "1" / TENSORS
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert await stage(1) == 8
    assert await stage(1) == 8
    assert stage.ran == [1, 1]
    assert SkipManager.status()["double"] == {"recorded": 2, "damaged": 1, "replayed": 1}
    assert sum("counts as absent" in message for message in caplog.messages) == 1


# ------------------------------------------------------------------------------------------------ repeat


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_outcome_of_a_call_is_a_metric(outcome: str) -> None:
    assert registry.find(f"skip/async_rollout/{outcome}")[1] == {"role": "async_rollout"}


async def test_repeat_serves_the_nearest_earlier_step_or_else_the_nearest_later_one(tmp_path: Path) -> None:
    SkipManager.init(configure(tmp_path))
    for step in (3, 5, 9):
        Stage().run(step, 10 * step)
    SkipManager.init(configure(tmp_path, action="repeat"))
    stage = Stage()
    asked = (3, 4, 8, 9, 100, 2, 0)
    assert [await stage.arun(step, 10 * step) for step in asked] == [2 * 10 * step for step in (3, 3, 5, 9, 9, 3, 3)]
    assert stage.ran == []
    assert SkipManager.status()["double"] == {"replayed": 2, "substituted": 5}
    # A different request at the same step also gets a substitute.
    assert stage.run(3, 1) == 60
    assert SkipManager.status()["double"]["substituted"] == 6


def test_repeat_skips_damaged_records_and_records_if_there_is_none(tmp_path: Path, dump_dir: Path) -> None:
    SkipManager.init(configure(tmp_path, action="repeat"))
    stage = Stage()
    assert stage.run(4, 4) == 8
    assert stage.ran == [4] and stage.run(5, 5) == 8
    (dump_dir / "double" / "4" / MANIFEST).unlink()
    assert stage.run(5, 5) == 10
    assert stage.run(6, 6) == 10, "the record of step 5 is nearer than that of step 4, which is damaged"
    assert stage.ran == [4, 5]


# ------------------------------------------------------------------------------------------------ failures


async def test_a_failed_record_never_fails_the_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    SkipManager.init(configure(tmp_path))

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    made = double()
    with monkeypatch.context() as patch:
        patch.setattr(made.files, "write", full)
        assert [await stage(step) for step in (1, 2, 3)] == [8, 8, 8]
    assert made.active.counts == {"unrecorded": 3}
    assert sum("No space left on device" in message for message in caplog.messages) == 1
    assert await stage(1) == 8
    assert made.active.counts == {"unrecorded": 3, "recorded": 1}


async def test_a_stage_that_raises_records_nothing(tmp_path: Path) -> None:
    SkipManager.init(configure(tmp_path))

    @SkipManager.annotate(role="double")
    async def fails(step: int, number: int) -> int:
        raise UserCodeError("no")

    with pytest.raises(UserCodeError):
        await fails(1, 4)
    assert os.listdir(tmp_path) == []


def test_beyond_max_bytes_nothing_is_recorded(tmp_path: Path, dump_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    SkipManager.init(configure(tmp_path))
    Stage().run(1, 4)
    size = sum(file.stat().st_size for file in (dump_dir / "double" / "1").iterdir())
    SkipManager.init(configure(tmp_path, max_bytes=2 * size + size // 2))
    for step in range(1, 6):
        assert Stage().run(step, 4) == 8
    status = SkipManager.status()["double"]
    assert status["replayed"] == 1 and status["recorded"] + status["unrecorded"] == 4 and status["unrecorded"] >= 2
    total = sum(file.stat().st_size for file in (dump_dir / "double").glob("*/*"))
    assert total <= 2 * size + size // 2
    assert sum("is full, and nothing more is recorded" in message for message in caplog.messages) == 1


# ------------------------------------------------------------------------------------------------ concurrent calls


async def test_64_concurrent_calls_do_not_share_a_step(tmp_path: Path) -> None:
    """Calls end in random order; 16 of the 48 steps are requested twice at the same time."""
    SkipManager.init(configure(tmp_path))
    rng = np.random.default_rng(0)

    @SkipManager.annotate(role="double")
    async def generate(step: int, number: int) -> int:
        await anyio.sleep(rng.random() * 0.05)
        return 3 * number

    async def check(step: int) -> None:
        assert await generate(step, step) == 3 * step

    for _ in range(2):
        async with anyio.create_task_group() as group:
            for step in [*range(1, 49), *range(1, 17)]:
                group.start_soon(check, step)
    counts = double().active.counts
    assert counts["replayed"] >= 64 and counts["damaged"] == 0
    assert len(double().files.names()) == 48


async def test_a_call_can_be_cancelled_while_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SkipManager.init(configure(tmp_path))
    made = double()
    hangs = threading.Event()
    monkeypatch.setattr(made.files, "read", lambda name: hangs.wait(30))
    began = time.monotonic()
    with anyio.move_on_after(0.05) as scope:
        await Stage().arun(1, 4)
    hangs.set()
    assert scope.cancelled_caught and time.monotonic() - began < 10


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("role", "section", "message"),
    [
        (
            "looped",
            {"action": "repeat"},
            r"skip\.roles\.looped\.action=repeat: this role can only cache; set skip\.roles\.looped\.action=cache",
        ),
        ("doubel", {}, r"skip\.roles\.doubel: no module has registered this role.*did you mean double\?"),
        ("another_name", {}, r"name the module that registers it in skip\.modules"),
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, role: str, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkipManager.init(configure(tmp_path, role, **section))
    assert SkipManager.get(role) is None


def test_a_role_can_be_defined_in_a_user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_roles.py").write_text(
        "from tests.skip.test_manager import Double\n"
        "from skip import register_skip\n"
        "@register_skip('triple')\n"
        "class Triple(Double):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"enable": True, "dump_dir": str(tmp_path / "dump"), "steps": [1]}
    SkipManager.init(Config.model_validate({"skip": {"modules": ["my_roles"], "roles": {"triple": settings}}}))

    @SkipManager.annotate(role="triple")
    def triple(step: int, number: int) -> int:
        return 3 * number

    assert triple(1, 4) == 12 and SkipManager.status() == {"triple": {"recorded": 1}}


@pytest.mark.parametrize(
    ("module", "source", "kind", "message"),
    [
        ("no_such_module_here", None, ConfigError, "skip.modules: there is no module 'no_such_module_here'"),
        ("raises_on_import", "1 / 0", UserCodeError, "importing raises_on_import failed: division by zero"),
        ("imports_nothing", "import no_such_thing", UserCodeError, "importing imports_nothing failed: No module named"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str | None, kind: type, message: str
) -> None:
    if source is not None:
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(kind, match=message):
        SkipManager.init(Config.model_validate({"skip": {"modules": [module]}}))


def test_a_role_has_one_class() -> None:
    with pytest.raises(ConfigError, match=r"role double is registered by .*\.Double and by .*\.Looped: give one"):
        register_skip("double")(Looped)
    register_skip("double")(Double)


def test_a_file_that_is_imported_under_two_names_registers_its_role_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from skip import BaseSkip, register_skip\n\n@register_skip('mine')\nclass Mine(BaseSkip):\n    pass\n"
    )
    for name in ("mine", "asyncrl_reward_mine"):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SkipManager.init(configure(Path("~/records")))
    Stage().run(1, 4)
    assert (tmp_path / "records" / "asyncrl" / "quickstart" / "double" / "1" / MANIFEST).exists()


# ------------------------------------------------------------------------------------------------ roles that misbehave


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), AssertionError(), MemoryError(), RecursionError(), BugError("x")]
)
@pytest.mark.parametrize("method", ["fingerprint", "to_content", "to_result", "versions", "call_name"])
async def test_errors_of_a_role_lose_the_record_and_do_not_fail_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage, error: Exception, method: str
) -> None:
    with SkipManager.session(configure(tmp_path)):
        await stage(1)

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Double, method, fails)
    with SkipManager.session(configure(tmp_path)):
        assert await stage(1) == 8
        assert await stage(2, 5) == 10


async def test_a_role_may_override_which_records_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    with SkipManager.session(configure(tmp_path)):
        await stage(1)
        monkeypatch.setattr(Double, "meet_precondition", lambda self, step, func, call: False)
        await stage(1)
        assert stage.ran == [1, 1]
        monkeypatch.undo()
        monkeypatch.setattr(Double, "may_serve", lambda self, served: True)
        assert await stage(1, 5) == 8


def test_a_failed_init_leaves_no_role_enabled(tmp_path: Path) -> None:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    config = Config.model_validate({"skip": {"roles": {"double": settings, "unknown": settings}}})
    with pytest.raises(ConfigError, match="unknown"), SkipManager.session(config):
        pass
    assert SkipManager.status() == {}


async def test_suspended_stages_are_neither_recorded_nor_replayed(tmp_path: Path, stage: Stage) -> None:
    with SkipManager.session(configure(tmp_path)):
        with SkipManager.suspended():
            async with anyio.create_task_group() as group:
                group.start_soon(stage, 1)
        assert SkipManager.status() == {"double": {}}
        await stage(1)
        with SkipManager.suspended():
            await stage(1)
    assert stage.ran == [1, 1, 1]


# ------------------------------------------------------------------------------------------------ a disk that hangs


async def test_a_disk_that_hangs_delays_neither_the_event_loop_nor_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each read, write and note ends at its deadline, and the next one does not start another thread."""
    monkeypatch.setattr(role_module, "FILES_LIMIT_S", 0.05)
    hangs = threading.Event()
    stage = Stage()
    with SkipManager.session(configure(tmp_path)):
        made = double()
        assert await stage.arun(1, 4) == 8
        for method in ("read", "write", "note"):
            monkeypatch.setattr(made.files, method, lambda *_: hangs.wait())
        before, beats = threading.active_count(), 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await anyio.sleep(0.002)
                beats += 1

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            await SkipManager.note("double", 1, {"x": 1})
            for number in range(3):
                assert await stage.arun(2 + number, 4) == 8
            group.cancel_scope.cancel()
        hangs.set()
        assert SkipManager.status()["double"]["late"] == 3
    assert beats  # while a call of the disk blocked
    assert threading.active_count() <= before + 2
    assert "takes longer than 0.05 s to read" in caplog.text


async def test_waits_for_files_are_on_the_wait_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, seen = WaitBoard(), []
    with SkipManager.session(configure(tmp_path)):
        SkipManager.watch(waits.waiting)
        monkeypatch.setattr(double(), "meet_precondition", lambda *_: seen.extend(waits.snapshot()))
        await Stage().arun(1)
    assert [(wait.edge, wait.bounded) for wait in seen] == [("records", True)]


async def test_a_cancelled_job_is_not_started() -> None:
    line, go, done = file_thread("test"), threading.Event(), []
    with anyio.move_on_after(0.01):
        await line.run(go.wait)
    with anyio.move_on_after(0.01):
        await line.run(lambda: done.append(1))
    go.set()
    await line.run(lambda: done.append(2))
    assert done == [2]


async def test_a_job_that_is_given_up_while_the_disk_hangs_keeps_no_memory() -> None:
    thread, begun, go = file_thread("test"), threading.Event(), threading.Event()

    class Record:
        """What a job would write."""

    async with anyio.create_task_group() as group:
        group.start_soon(thread.run, lambda: begun.set() or go.wait(30))
        await anyio.to_thread.run_sync(begun.wait, 30)
        kept = weakref.WeakSet[Record]()
        for _ in range(100):
            with anyio.CancelScope() as scope:
                kept.add(record := Record())
                scope.cancel()
                await thread.run(partial(str, record))
            del record
        gc.collect()
        assert len(kept) <= 1, "the last one may be in a traceback"
        go.set()
    assert await thread.run(lambda: 5) == 5


async def test_an_error_of_a_job_is_raised_in_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await file_thread("test").run(lambda: 1 // 0)
    assert await file_thread("test").run(lambda: 5) == 5


async def test_a_directory_that_cannot_be_listed_does_not_fail_the_stage(tmp_path: Path, stage: Stage) -> None:
    """`repeat` lists all records; here a file is where their directory should be."""
    (tmp_path / "asyncrl" / "quickstart").mkdir(parents=True)
    (tmp_path / "asyncrl" / "quickstart" / "double").write_text("")
    with SkipManager.session(configure(tmp_path, action="repeat")):
        assert await stage(3, 4) == 8
        assert SkipManager.status()["double"] == {"damaged": 1, "unrecorded": 1}
        assert any("cannot be listed" in message for message in SkipManager.messages())


def test_failures_of_one_kind_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Double, call: Call, result: Any) -> Content:
        raise ValueError(f"no place for {result}")

    monkeypatch.setattr(Double, "to_content", fails)
    with SkipManager.session(configure(tmp_path)):
        for number in range(40):
            Stage().run(number, number)
        assert len(SkipManager.messages()) == 1
        assert SkipManager.status()["double"]["unrecorded"] == 40


def test_a_role_without_extract_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "extract_step", BaseSkip.extract_step)
    with pytest.raises(ConfigError, match=r"skip\.roles\.double: Double has support_online_step and no extract_step"):
        SkipManager.init(configure(tmp_path))

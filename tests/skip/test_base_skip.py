"""Tests of roles that are written against verl's signatures, with own files and no fingerprint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest
from omegaconf import OmegaConf

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, UserCodeError
from skip import BaseSkip, SkipAction, SkipManager
from tests.fakes.foreign_roles import EmptySkip, PickledOnlineSkip, PickledSkip


def ours(tmp_path: Path, role: str, **section: Any) -> Config:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "1-100", **section}
    return Config.model_validate({"skip": {"modules": ["tests.fakes.foreign_roles"], "roles": {role: settings}}})


def mapping(tmp_path: Path, role: str, **section: Any) -> Mapping[str, Any]:
    return {"skip": {role: {"enable": True, "dump_dir": str(tmp_path), "steps": [*range(1, 101)], **section}}}


def dictconfig(tmp_path: Path, role: str, **section: Any) -> Any:
    return OmegaConf.create(dict(mapping(tmp_path, role, **section)))


@pytest.fixture(params=[ours, mapping, dictconfig])
def configure(request: pytest.FixtureRequest) -> Any:
    return request.param


class Numbers:
    """A stage that returns ten times its step, and the steps for which it ran."""

    def __init__(self, *, is_async: bool) -> None:
        self.ran: list[int] = []
        self._is_async = is_async

    async def __call__(self, step: int, role: str) -> int:
        SkipManager.set_step(step)
        return await self._functions[role, self._is_async](step, self) if self._is_async else self.plain(role, step)

    def plain(self, role: str, step: int, **more: Any) -> int:
        result: int = self._functions[role, False](step, self, **more)
        return result

    _functions: ClassVar[dict[tuple[str, bool], Callable[..., Any]]] = {}


def plain(step: int, stage: Numbers, batch: Any = None) -> int:
    stage.ran.append(step)
    return 10 * step


async def awaited(step: int, stage: Numbers, batch: Any = None) -> int:
    await anyio.lowlevel.checkpoint()
    stage.ran.append(step)
    return 10 * step


for name in ("pickled", "pickled_online"):
    Numbers._functions[name, False] = SkipManager.annotate(role=name)(plain)
    Numbers._functions[name, True] = SkipManager.annotate(role=name)(awaited)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def stage(request: pytest.FixtureRequest) -> Numbers:
    return Numbers(is_async=request.param)


@pytest.fixture(params=["pickled", "pickled_online"])
def role(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    SkipManager.reset()


def instance(role: str) -> PickledSkip:
    made = SkipManager.skip_instances[role]
    assert isinstance(made, PickledSkip)
    return made


async def test_cache_loads_what_was_dumped_for_the_same_step(
    tmp_path: Path, configure: Any, stage: Numbers, role: str
) -> None:
    SkipManager.init(configure(tmp_path, role))
    assert [await stage(step, role) for step in (1, 2, 101, 1, 2, 101)] == [10, 20, 1010, 10, 20, 1010]
    assert stage.ran == [1, 2, 101, 101]
    assert SkipManager.status() == {role: {"recorded": 2, "replayed": 2}}
    assert sorted(os.listdir(tmp_path / "pickles")) == ["1.pkl", "2.pkl"]
    SkipManager.init(configure(tmp_path, role))  # as a later process
    assert await stage(2, role) == 20 and stage.ran == [1, 2, 101, 101]


async def test_repeat_loads_what_the_class_chooses(tmp_path: Path, stage: Numbers, role: str) -> None:
    SkipManager.init(ours(tmp_path, role, action="repeat"))
    assert [await stage(step, role) for step in (3, 1, 2, 4, 3)] == [30] * 5
    assert stage.ran == [3] and instance(role).action == SkipAction.REPEAT


def test_the_attributes_are_those_of_verl(tmp_path: Path, configure: Any) -> None:
    config = configure(tmp_path, "pickled", steps=[1, 2, 5])
    SkipManager.init(config)
    made = SkipManager.skip_instances["pickled"]
    assert (made.action, made.enable, made.dump_dir, list(made.steps)) == ("cache", True, str(tmp_path), [1, 2, 5])
    assert made.is_enabled() and made.global_config is config and max(made.steps) == 5
    assert SkipManager.step == -1
    SkipManager.set_step(4)
    assert SkipManager.step == 4
    SkipManager.reset()
    assert (SkipManager.step, SkipManager.skip_instances) == (-1, {})


async def test_verbs_run_one_at_a_time_and_off_the_event_loop(tmp_path: Path) -> None:
    """32 concurrent calls of 16 steps."""
    SkipManager.init(ours(tmp_path, "pickled_online"))
    results: list[int] = []

    @SkipManager.annotate(role="pickled_online")
    async def slow(step: int) -> int:
        await anyio.sleep(0.01)
        return 10 * step

    async def call(step: int) -> None:
        results.append(await slow(step) - 10 * step)

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(call, 1 + number % 16)
    made, counts = instance("pickled_online"), SkipManager.status()["pickled_online"]
    assert results == [0] * 64 and counts["recorded"] + counts["replayed"] == 64 and counts["replayed"] >= 32
    assert threading.get_ident() not in made.threads and len(made.threads) == 1
    assert made.num_calls == 64 + 64, "each call is looked up, and then either loaded or dumped"


async def test_a_slow_role_delays_no_other_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    roles = {name: settings for name in ("pickled", "pickled_online")}
    SkipManager.init(Config.model_validate({"skip": {"modules": ["tests.fakes.foreign_roles"], "roles": roles}}))
    go = threading.Event()
    monkeypatch.setattr(instance("pickled"), "meet_precondition", lambda *args: not go.wait(30))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Numbers(is_async=True), 1, "pickled")
            await anyio.wait_all_tasks_blocked()
            assert await Numbers(is_async=True)(2, "pickled_online") == 20
            go.set()


async def test_validation_is_neither_loaded_nor_dumped(tmp_path: Path, stage: Numbers, role: str) -> None:
    SkipManager.init(ours(tmp_path, role))
    with SkipManager.suspended():
        await stage(1, role)
    SkipManager.set_step(1)
    validation, training = (SimpleNamespace(meta_info={"validate": value}) for value in (True, False))
    stage.plain(role, 1, batch=SimpleNamespace(non_tensor_data={"validate": True}))
    assert SkipManager.status() == {role: {}} and os.listdir(tmp_path) == []
    stage.plain(role, 1, batch=training)
    stage.plain(role, 1, batch=validation)
    stage.plain(role, 1, batch=training)
    assert SkipManager.status() == {role: {"recorded": 1, "replayed": 1}} and stage.ran == [1, 1, 1, 1]


async def test_a_failed_dump_loses_the_record_and_not_the_result(
    tmp_path: Path, stage: Numbers, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(ours(tmp_path, role))
    (tmp_path / "pickles").write_text("a file where the directory would be")
    assert [await stage(step, role) for step in (1, 2)] == [10, 20]
    assert SkipManager.status() == {role: {"unrecorded": 2}}
    (message,) = SkipManager.messages()
    assert message == f"step 1 of {role} is not recorded in skip.roles.{role}.dump_dir={tmp_path}: File exists"
    assert message in caplog.messages


async def test_what_cannot_be_loaded_is_made_again(tmp_path: Path, stage: Numbers, role: str) -> None:
    SkipManager.init(ours(tmp_path, role))
    await stage(1, role)
    (tmp_path / "pickles" / "1.pkl").write_bytes(b"torn")
    assert [await stage(1, role), await stage(1, role)] == [10, 10]
    assert stage.ran == [1, 1] and SkipManager.status()[role] == {"recorded": 2, "damaged": 1, "replayed": 1}
    assert f"what is recorded for step 1 of {role} counts as absent: UnpicklingError" in SkipManager.messages()[0]


async def test_a_role_that_fails_to_look_runs_the_stage(
    tmp_path: Path, stage: Numbers, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SkipManager.init(ours(tmp_path, role))
    monkeypatch.setattr(PickledSkip, "_find", lambda self, step: 1 // 0)
    assert await stage(1, role) == 10
    assert SkipManager.status() == {role: {"unrecorded": 1}} and os.listdir(tmp_path) == []
    assert "is neither looked up nor recorded: ZeroDivisionError" in SkipManager.messages()[0]


async def test_an_error_of_extract_step_reaches_the_caller(tmp_path: Path, stage: Numbers) -> None:
    SkipManager.init(ours(tmp_path, "pickled_online"))
    with pytest.raises(ValueError, match="invalid literal"):
        await stage("seven", "pickled_online")  # type: ignore[arg-type]
    SkipManager.init(ours(tmp_path, "pickled"))
    with pytest.raises(BugError, match=r"skip\.roles\.pickled: the step is unknown; call SkipManager\.set_step"):
        stage.plain("pickled", 1)


async def test_is_enabled_is_asked_at_each_call(tmp_path: Path, stage: Numbers, configure: Any, role: str) -> None:
    SkipManager.init(configure(tmp_path, role, enable=False))
    made = SkipManager.skip_instances[role]
    await stage(1, role)
    assert not made.is_enabled() and SkipManager.get(role) is None and SkipManager.status() == {}
    made.enable = True
    await stage(1, role)
    await stage(1, role)
    assert stage.ran == [1, 1] and SkipManager.status() == {role: {"recorded": 1, "replayed": 1}}


def test_a_role_may_skip_the_function_and_have_keys_of_its_own(tmp_path: Path) -> None:
    @SkipManager.annotate(role="nothing")
    def function() -> int:
        return 5

    SkipManager.init(mapping(tmp_path, "nothing", action="empty", value={"a": 1}))
    SkipManager.set_step(1)
    assert function() == {"a": 1}
    SkipManager.init(ours(tmp_path, "nothing", action="empty"))
    SkipManager.set_step(1)
    assert function() is None


@pytest.mark.parametrize(
    ("role", "section", "message"),
    [
        ("pickled", {"action": "empty"}, r"{key}\.action=empty: this role can only cache or repeat"),
        ("nothing", {}, r"{key}\.action=cache: this role can only empty; set {key}\.action=empty"),
        ("pickled", {"max_bytes": 5}, r"{key}\.max_bytes: PickledSkip keeps its own files, so this has no effect"),
        ("pickled", {"on_mismatch": "error"}, r"{key}\.on_mismatch: PickledSkip keeps its own files"),
        ("pickeld", {}, r"{key}: no module has registered this role.*did you mean pickled\?"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(
    tmp_path: Path, role: str, section: dict[str, Any], message: str
) -> None:
    for config, key in ((ours, rf"skip\.roles\.{role}"), (mapping, rf"skip\.{role}")):
        with pytest.raises(ConfigError, match=message.format(key=key)):
            SkipManager.init(config(tmp_path, role, **section))
        assert SkipManager.skip_instances == {}


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (None, "skip: the configuration has no such section"),
        ({"pickled": 5}, r"skip\.pickled: these are no settings of a role"),
        ({"pickled": {"steps": "x"}}, r"skip\.pickled: these are no settings of a role: 'x' is no step"),
        ({"pickled": {"action": "other"}}, r"skip\.pickled: these are no settings of a role: .*'cache', 'repeat'"),
        ({"reward": {"enable": True}}, r"skip\.reward: the records of RewardSkip need an asyncrl Config"),
    ],
)
def test_a_mapping_that_is_no_configuration_is_refused(skip: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        SkipManager.init({} if skip is None else {"skip": skip})


def test_a_class_that_cannot_be_made_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmptySkip, "__init__", lambda self, local_config, global_config: 1 // 0)
    with pytest.raises(UserCodeError, match=r"skip\.roles\.nothing: EmptySkip cannot be made: ZeroDivisionError"):
        SkipManager.init(ours(tmp_path, "nothing", action="empty"))


def test_async_verbs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def meet_precondition(self: Any, step: int, func: Any) -> bool:
        return False

    monkeypatch.setattr(PickledSkip, "meet_precondition", meet_precondition)
    with pytest.raises(ConfigError, match=r"skip\.roles\.pickled: PickledSkip has an async verb; verbs are plain"):
        SkipManager.init(ours(tmp_path, "pickled"))


def test_a_class_without_a_verb_runs_until_the_verb_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PickledSkip, "prepare_data")
    stage = Numbers(is_async=False)
    SkipManager.init(ours(tmp_path, "pickled_online"))
    assert issubclass(PickledOnlineSkip, BaseSkip) and stage.plain("pickled_online", 1) == 10
    assert "PickledOnlineSkip has no prepare_data" in SkipManager.messages()[0]

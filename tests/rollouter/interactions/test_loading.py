"""Loading of environments: classes, their arguments, and the environment that a row chooses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from rollouter.interactions.loading import BUILT_IN
from tests.fakes.environments import HERE, Shared, assistant, context, interaction, load

KEY = r"rollout\.multi_turn\.interactions\[0\]"


def test_rows_choose_an_environment_by_name_or_get_the_first() -> None:
    loaded = load(interaction("scripted", name="tutor"), interaction("scripted", name="child"))
    assert loaded.names == ("tutor", "child")

    def chosen(**interaction_kwargs: Any) -> str:
        return loaded.session(context(extra_info={"interaction_kwargs": interaction_kwargs})).name

    assert loaded.session(context()).name == "tutor"
    assert loaded.session(context(extra_info={"interaction_kwargs": None})).name == "tutor"
    assert chosen() == chosen(name=None) == "tutor"
    assert chosen(name="child") == "child"
    with pytest.raises(DataError, match=r"no interaction 'chil'; did you mean 'child'\?"):
        chosen(name="chil")
    with pytest.raises(DataError, match="no interaction 7; there is child, tutor"):
        chosen(name=7)
    with pytest.raises(DataError, match="interaction_kwargs: 'child' is not a mapping"):
        loaded.session(context(extra_info={"interaction_kwargs": "child"}))


async def test_none_values_of_parquet_are_dropped() -> None:
    calls: list[Any] = []
    row = {"name": None, "mood": "cross", "hint": None, "more": {"a": None, "b": 1}}
    loaded = load(interaction(config={"calls": calls}))
    async with loaded.session(context(extra_info={"interaction_kwargs": row})) as session:
        await session.reset()
    assert calls[0] == ("reset", "cross", {"more": {"b": 1}})


def test_an_environment_can_be_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from rollouter.interactions import Environment\nclass Mine(Environment):\n"
        "    async def step(self, text, messages): ...\n"
    )
    assert load(interaction(f"{path}:Mine", name="mine")).names == ("mine",)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"model", "verifiers"}))
def test_built_in_environments_have_short_names(name: str) -> None:
    assert load(interaction(name)).names == ("default",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"class_name": "scriptd"}, r"class_name: 'scriptd' is not built in; did you mean 'scripted'\?"),
        ({"class_name": f"{HERE}:Ownn"}, r"class_name: .* has no 'Ownn'; did you mean 'Own'\?"),
        ({"class_name": "NotOne"}, "NotOne is not a subclass of rollouter.interactions.Environment"),
        ({"class_name": f"{HERE}:interaction"}, "interaction is not a subclass"),
        ({"class_name": "BlockingEnvironment"}, r"BlockingEnvironment\.step is not async.*write `async def`"),
        ({"class_name": "Silent"}, "Silent does not define step"),
        ({"config": {"call": []}}, r"config: it does not fit Own\(.*'call'; did you mean 'calls'\?"),
        ({"class_name": "Broken", "config": {"x": 1}}, "config: it does not fit Broken"),
        ({"class_name": "Sharing", "config": {"volume": 12}}, r"config\.volume: 12 is too loud"),
        ({"class_name": "Sharing", "config": {"unpacked": True}}, r"config: it does not fit Sharing\("),
    ],
)
def test_configuration_errors_name_the_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}.*{message}"):
        load(interaction(**fields))


def test_a_prepare_that_raises_is_a_user_error() -> None:
    with pytest.raises(UserCodeError, match=rf"{KEY}: Sharing\.prepare raised ValueError: a negative volume") as raised:
        load(interaction("Sharing", config={"volume": -1}))
    assert 'raise ValueError("a negative volume")' in raised.value.cause


def test_a_module_that_raises_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("1 / 0\n")
    with pytest.raises(UserCodeError, match=rf"{KEY}\.class_name: importing .*torn\.py:1 failed: division by zero"):
        load(interaction(f"{tmp_path}/torn.py:Mine"))


async def test_shared_resources_are_closed_with_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """All trajectories share an object, and all objects are closed even if closing one fails."""
    loaded = load(
        interaction("Sharing", name="a", config={"fails": True}),
        interaction("Sharing", name="b"),
        interaction(name="c"),
    )
    async with loaded.session(context()) as one, loaded.session(context()) as other:
        assert one._environment.shared is other._environment.shared  # type: ignore[attr-defined]
    Shared.closed = 0
    with caplog.at_level(logging.WARNING):
        await loaded.aclose()
    assert Shared.closed == 2
    assert "interactions[0]: closing Shared failed: gone" in caplog.text


ENDPOINT = {"base_url": "http://localhost:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("class_name", "config", "message"),
    [
        ("scripted", {"reply": ["a"]}, r"config\.reply: there is no such key.*did you mean 'replies'\?"),
        ("scripted", {"replies": [1]}, r"config\.replies\.0: 1 cannot be used"),
        ("scripted", {"replies": ["a", ""]}, r"config\.replies: one reply is empty"),
        ("scripted", {"stop_when": "(#"}, r"config\.stop_when: '\(#' is not a regular expression"),
        ("retry", {"max_tries": 0}, r"config\.max_tries: 0 cannot be used"),
        ("retry", {"wrong": ""}, r"config\.wrong: '' cannot be used"),
        ("retry", {"function": "exact_macth"}, r"config\.function: .*did you mean 'exact_match'\?"),
        ("retry", {"function": f"{HERE}:nobody"}, r"config\.function: .* has no 'nobody'"),
        ("retry", {"kwargs": {"pattern": "x"}}, r"config\.kwargs\.pattern: 'x' has no group"),
        ("reasoning_gym", {"max_tries": "many"}, r"config\.max_tries: 'many' cannot be used"),
        ("reasoning_gym", {"feedback": ""}, r"config\.feedback: '' cannot be used"),
        ("model", {**ENDPOINT, "base_url": None}, r"config\.base_url: None cannot be used"),
        ("model", {**ENDPOINT, "modl": "x"}, r"config\.modl: there is no such key.*did you mean 'model'\?"),
        (
            "model",
            {**ENDPOINT, "api_key_env": "NO_SUCH_KEY"},
            r"config\.api_key_env: the environment variable 'NO_SUCH_KEY' is not set",
        ),
        ("model", {**ENDPOINT, "base_url": "localhost"}, r"config\.base_url: 'localhost' is not an address"),
        ("model", {**ENDPOINT, "params": {"model": "x"}}, r"config\.params\.model: it is set for every request"),
        ("model", {**ENDPOINT, "stop_phrase": ""}, r"config\.stop_phrase: '' cannot be used"),
        (
            "model",
            {**ENDPOINT, "system_prompt": "ask {queston}"},
            r"config\.system_prompt: no value for \{queston\}; did you mean 'question'",
        ),
        ("model", {"base_url": "http://localhost:1/v1"}, r"config\.model: it is required here"),
    ],
)
def test_errors_in_settings_of_built_in_environments_name_the_key(
    class_name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"interactions\[0\]\.{message}"):
        load(interaction(class_name, config=config))


async def test_an_environment_gets_its_secrets_and_its_errors_do_not_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLY", "c4n4ry-of-users")
    config = interaction("scripted", config={"replies": ["${secret:REPLY}"]})
    async with load(config).session(context()) as session:
        await session.reset()
        assert (await session.step(*assistant("42"))).text == "c4n4ry-of-users"
    assert config.config == {"replies": ["${secret:REPLY}"]}
    with pytest.raises(ConfigError, match=rf"{KEY}\.config\.replies: .*\$\{{secret:REPLY\}}") as raised:
        load(interaction("scripted", config={"replies": {"a": "${secret:REPLY}"}}))
    assert "c4n4ry" not in str(raised.value)

"""Secrets and environment variables in a configuration: what it has, what is printed, and what errors show."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from asyncrl.cli.main import main
from asyncrl.config.compose import check_config, load_config, recipes, to_yaml
from asyncrl.config.interpolation import looks_secret, reveal, secret_name, secret_names, without_secrets
from asyncrl.config.keys import all_keys
from asyncrl.config.problems import ConfigProblem, format_problems
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, UserCodeError, conceal
from tests.fakes.command_line import CommandLine
from tests.fakes.configurations import single

CANARY = "c4n4ry-of-interpolation"
MULTI_TURN = "rollout.multi_turn"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("FOUR", "4")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def write(path: Path, tree: Any) -> str:
    """Write a configuration that builds on the quickstart."""
    file = path / "mine.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["quickstart"], **tree}), encoding="utf-8")
    return str(file)


def with_server(**server: Any) -> dict[str, Any]:
    """Return the sections of a run that has a tool server."""
    tools = [{"mcp": {"command": ["cat"], **server}}]
    turns = {"enable": True, "tools": tools, "max_tool_response_length": 64}
    return {"rollout": {"response_length": 160, "multi_turn": turns}}


def server_of(values: Any) -> Any:
    return values["rollout"]["multi_turn"]["tools"][0]["mcp"]


# ------------------------------------------------------------------------------------------------ secrets


def test_a_secret_stays_a_reference_wherever_the_configuration_is_written_or_shown(
    tmp_path: Path, cli: CommandLine
) -> None:
    file = write(tmp_path, with_server(env={"API_TOKEN": "Bearer ${secret:CANARY}"}))
    config = load_config(file)
    assert config.rollout.multi_turn.tools[0].mcp.env == {"API_TOKEN": "Bearer ${secret:CANARY}"}  # type: ignore[union-attr]
    printed = cli("launch", "fully_async", file, "--dry-run")
    assert "API_TOKEN: 'Bearer ${secret:CANARY}'" in printed.out
    as_json = cli("launch", "fully_async", file, "--dry-run", "--json")
    assert server_of(as_json.json["config"])["env"] == {"API_TOKEN": "Bearer ${secret:CANARY}"}
    assert CANARY not in printed.out + printed.err + as_json.out + as_json.err
    (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


def test_a_missing_secret_is_reported_with_its_key_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, ""):
        monkeypatch.delenv("CANARY") if value is None else monkeypatch.setenv("CANARY", value)
        problem = single(check_config(write(tmp_path, with_server(env={"API_TOKEN": "${secret:CANARY}"}))).problems)
        assert problem.key == f"{MULTI_TURN}.tools.0.mcp.env.API_TOKEN" and problem.value == "${secret:CANARY}"
        assert "no variable CANARY" in problem.consequence and "export CANARY=" in problem.fix
        assert (problem.severity, problem.where) == ("error", "mine.yaml line 12")


def test_a_tool_that_is_off_needs_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANARY")
    tree = with_server(env={"API_TOKEN": "${secret:CANARY}"})
    tree["rollout"]["multi_turn"]["enable"] = False
    assert not any("CANARY" in str(problem) for problem in check_config(write(tmp_path, tree)).problems)


def test_a_secret_where_nothing_looks_it_up_is_refused() -> None:
    problem = single(check_config(None, ["model.path=${secret:CANARY}/model"]).problems[:1])
    assert (problem.key, problem.value) == ("model.path", "${secret:CANARY}/model")
    assert "would not be looked up" in problem.consequence
    assert f"{MULTI_TURN}.tools.*.mcp.env" in problem.fix and "_env" in problem.fix


@pytest.mark.parametrize("name", ["my-token", "1", "A,B"])
def test_a_reference_to_no_variable_is_refused(name: str, tmp_path: Path) -> None:
    problem = single(check_config(write(tmp_path, with_server(env={"T": f"${{secret:{name}}}"}))).problems)
    assert problem.key == f"{MULTI_TURN}.tools[0].mcp.env.T"


@pytest.mark.parametrize("value", [CANARY, "${oc.env:CANARY}"])
def test_a_plain_secret_in_the_environment_of_a_server_is_refused_and_not_shown(
    value: str, tmp_path: Path, cli: CommandLine
) -> None:
    file = write(tmp_path, with_server(env={"API_TOKEN": value}))
    printed = cli("launch", "fully_async", file, "--dry-run", code=2)
    assert f"{MULTI_TURN}.tools.0.mcp.env.API_TOKEN = …  (mine.yaml line 12)" in printed.err
    assert "write API_TOKEN: ${secret:API_TOKEN}" in printed.err
    assert CANARY not in printed.out + printed.err
    assert CANARY not in cli("launch", "fully_async", file, "--dry-run", "--json", code=2).out


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("reward.kwargs.api_key", "API_KEY"),
        ("reward.kwargs.judge.x-api-token", "X_API_TOKEN"),
        ("reward.functions.0.kwargs.password", "PASSWORD"),
        (f"{MULTI_TURN}.tools.0.config.token", "TOKEN"),
    ],
)
def test_a_plain_secret_for_user_code_gives_a_warning_without_the_secret(
    key: str, variable: str, tmp_path: Path, cli: CommandLine
) -> None:
    *_, name = key.split(".")
    tree: dict[str, Any] = {}
    if "tools" in key:
        tool = {"class_name": "calculator", "config": {name: CANARY}}
        turns = {"enable": True, "tools": [tool], "max_tool_response_length": 64}
        tree = {"rollout": {"response_length": 160, "multi_turn": turns}}
    elif "functions" in key:
        function = {"name": "sums", "function": "exact_match", "kwargs": {name: CANARY}}
        tree = {"reward": {"functions": [function]}}
    else:
        kwargs = {"judge": {name: CANARY}} if "judge" in key else {name: CANARY}
        tree = {"reward": {"kwargs": kwargs}}
    found = [one for one in check_config(write(tmp_path, tree)).problems if one.key == key]
    problem = single(found)
    assert (problem.severity, problem.value) == ("warning", "…")
    assert problem.where.startswith("mine.yaml line")
    assert f"export {variable}=" in problem.fix and f"write {name}: ${{secret:{variable}}}" in problem.fix
    assert CANARY not in str(problem)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (with_server(environment={"API_TOKEN": CANARY}), f"{MULTI_TURN}.tools.0.mcp.environment"),
        ({"rollout": {"mcp": {"env": {"API_KEY": CANARY}}}}, "rollout.mcp.env.API_KEY"),
        (with_server(env=[{"API_TOKEN": CANARY}]), f"{MULTI_TURN}.tools.0.mcp.env"),
        (with_server(env={"API_TOKEN": [CANARY]}), f"{MULTI_TURN}.tools.0.mcp.env"),
    ],
)
def test_an_error_in_a_key_does_not_show_secrets_in_its_value(tree: Any, key: str, tmp_path: Path) -> None:
    problem = single(check_config(write(tmp_path, tree)).problems)
    assert problem.key == key
    assert CANARY not in format_problems([problem]) and "…" in str(problem)


@pytest.mark.parametrize(
    "name",
    [
        *("API_KEY", "HF_TOKEN", "CLIENT_SECRET", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "key", "apiKey"),
        *("x-api-key", "Authorization", "credentials", "access_token", "cookie", "auth"),
    ],
)
def test_names_that_look_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("MAX_TOKENS", "TOKENIZERS_PARALLELISM", "KEYBOARD", "SSH_KEY_FILE", "api_key_env", "URL", "token_ids"),
        *("tokenizer_path", "answer_key", "eos_token", "RAY_AUTH_MODE", "author"),
    ],
)
def test_names_that_do_not_look_secret(name: str) -> None:
    assert not looks_secret(name)


def test_no_key_of_the_schema_and_no_recipe_looks_like_a_secret() -> None:
    assert [key for key in all_keys() if secret_name(key.split("."))] == []
    for recipe in recipes():
        config = check_config(recipe).config
        assert config is not None and config.public_values() == config.saved_values(), recipe


PLAIN = {
    "ray.runtime_env.env_vars.WANDB_API_KEY": (CANARY, "…"),
    "rollout.engine_kwargs.hf_token": (CANARY, "…"),
    "data.dataset_kwargs.api_key": (CANARY, "…"),
    "data.dataset_kwargs.credentials.user": (CANARY, "…"),
    "reward.judge.params.extra_headers.Authorization": (f"Bearer {CANARY}", "…"),
    "reward.kwargs.keys.api_key": (CANARY, "…"),
    "trainer.checkpoint_dir": (f"s3://user:{CANARY}@bucket/a", "s3://…@bucket/a"),
    "reward.judge.base_url": (f"https://{CANARY}@judge/v1", "https://…@judge/v1"),
    "reward.kwargs.url": (f"http://a/mcp?n=1&api_key={CANARY}&m=2", "http://a/mcp?n=1&api_key=…&m=2"),
}
"""Keys with secrets in plain text, their values, and what is shown."""


def suspected(problems: Iterable[ConfigProblem]) -> dict[str, tuple[str, Any]]:
    found = [one for one in problems if "looks like a secret" in one.consequence]
    return {one.key: (one.severity, one.value) for one in found}


def test_plain_secrets_are_shown_nowhere_and_stay_in_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = [f"++{key}='{value}'" for key, (value, _) in PLAIN.items()]
    outcome = check_config(None, overrides)
    assert suspected(outcome.problems) == {key: ("warning", shown) for key, (_, shown) in PLAIN.items()}
    config = outcome.config
    assert config is not None
    for key, (value, shown) in PLAIN.items():
        saved, public, identity = config.saved_values(), config.public_values(), config.identity_values()
        for name in key.split("."):
            saved, public, identity = saved[name], public[name], identity[name]
        assert (saved, public) == (value, shown) and str(identity).startswith(f"{shown} (sha256:")
    assert CANARY not in str(config.public_values()) + str(config.identity_values())
    assert CANARY not in ConfigError(f"401 for {CANARY}").message
    for options in (("--dry-run",), ("--dry-run", "--json")):
        main(["launch", "fully_async", *overrides, *options])
        assert CANARY not in "".join(capsys.readouterr())
    (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert check_config(tmp_path / "again.yaml").config == config


def test_numbers_that_are_secrets_are_shown_nowhere_and_stay_numbers(tmp_path: Path, cli: CommandLine) -> None:
    secrets = {"password": 73519264, "pins": {"api_key": [-5926.53589]}}
    file = write(tmp_path, {"reward": {"kwargs": {**secrets, "verify_auth": True, "retries": 48151623}}})
    outcome = check_config(file)
    assert suspected(outcome.problems) == {
        "reward.kwargs.password": ("warning", "…"), "reward.kwargs.pins.api_key.0": ("warning", "…"),
    }  # fmt: skip
    config = outcome.config
    assert config is not None
    others = {"verify_auth": True, "retries": 48151623}
    assert config.saved_values()["reward"]["kwargs"] == {**secrets, **others}
    assert config.public_values()["reward"]["kwargs"] == {"password": "…", "pins": {"api_key": ["…"]}, **others}
    identity = config.identity_values()["reward"]["kwargs"]
    assert identity["password"].startswith("… (sha256:") and identity["pins"]["api_key"][0].startswith("… (sha256:")
    error = UserCodeError.wrap("401 for 73519264", ValueError("at -5926.53589"))
    printed = [cli("launch", "fully_async", file, "--dry-run", *options) for options in ((), ("--json",))]
    shown = f"{identity} {error} {error.cause} {[one.out + one.err for one in printed]}"
    assert "73519264" not in shown and "5926.5" not in shown and "48151623" in shown
    (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


def test_secrets_from_the_environment_give_no_warning_and_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (value, _) in enumerate(PLAIN.values()):
        monkeypatch.setenv(f"PLAIN_{number}", value)
    outcome = check_config(None, [f"++{key}='${{oc.env:PLAIN_{number}}}'" for number, key in enumerate(PLAIN)])
    assert suspected(outcome.problems) == {}
    assert outcome.config is not None and CANARY not in str(outcome.config.saved_values())
    assert outcome.config.rollout.engine_kwargs["hf_token"] == CANARY


def test_a_configuration_without_its_secret_is_refused_with_the_way_to_give_it(tmp_path: Path) -> None:
    config = check_config(None, [f"trainer.checkpoint_dir='memory://user:{CANARY}@bucket'"]).config
    assert config is not None
    (tmp_path / "shown.yaml").write_text(yaml.safe_dump(config.public_values()), encoding="utf-8")
    problem = single(one for one in check_config(tmp_path / "shown.yaml").problems if one.severity == "error")
    assert (problem.key, problem.value) == ("trainer.checkpoint_dir", "memory://…@bucket")
    assert "stands for a secret" in problem.consequence
    assert "write checkpoint_dir: ${oc.env:TRAINER_CHECKPOINT_DIR}" in problem.fix


@pytest.mark.parametrize(
    "text",
    ["abfs://container@account.dfs/a", "ssh://git@host/a", "http://host:80/a@b", "s3://${oc.env:A}:${oc.env:B}@c"],
)
def test_addresses_without_credentials_are_shown(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("quoted", [repr, json.dumps, quote, lambda text: quote(text, safe=""), str])
def test_quoted_secrets_are_hidden_too(monkeypatch: pytest.MonkeyPatch, quoted: Callable[[str], str]) -> None:
    secret = 'p"ss\\w/rd é'
    monkeypatch.setenv("QUOTED_SECRET", secret)
    reveal("${secret:QUOTED_SECRET}", "reward.kwargs.key")
    shown = ConfigError(f"a request for {quoted(secret)} failed").message
    assert "${secret:QUOTED_SECRET}" in shown and "rd" not in shown


def test_revealed_secrets_are_not_in_errors_and_conceal_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "a")
    values = {"a": ["x ${secret:CANARY}", 7, None], "b": {"c": "${secret:SHORT}"}}
    assert reveal(values, "k") == {"a": [f"x {CANARY}", 7, None], "b": {"c": "a"}}
    assert secret_names("${secret:CANARY}-${secret:SHORT}${oc.env:HOME}") == ["CANARY", "SHORT"]
    assert conceal(f"a {CANARY}!") == "a ${secret:CANARY}!"
    error = UserCodeError.wrap(f"401 for {CANARY}", ValueError(f"at {CANARY}"))
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert "401 for ${secret:CANARY}" in str(one) and "at ${secret:CANARY}" in one.cause
        assert CANARY not in str(one) + one.brief
    monkeypatch.delenv("CANARY")
    with pytest.raises(ConfigError, match=r"k\.a\.0 has \$\{secret:CANARY\}: the environment has no variable CANARY"):
        reveal(values, "k")


# ------------------------------------------------------------------------------------------------ other variables


def test_values_from_the_environment_are_resolved_in_the_process_and_unresolved_where_they_are_written(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '{"prompt": "1+1", "reward_model": {"ground_truth": "2"}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 100, encoding="utf-8")
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    tree: dict[str, Any] = with_server(
        env={"DATA": "${oc.env:CANARY}/data", "SAME": "${experiment_name}", "MODE": "fast"}
    )
    tree |= {
        "experiment_name": "${oc.env:CANARY}",
        "data": {"train_files": ["${oc.env:ROWS}"], "val_files": "${data.train_files}"},
        "reward": {"kwargs": "${oc.decode:'{pattern: ${oc.env:CANARY}}'}"},
        "seed": "${oc.decode:${oc.env:FOUR}}",
    }
    file = write(tmp_path, tree)
    config = load_config(file)
    assert (config.experiment_name, config.seed, config.reward.kwargs) == (CANARY, 4, {"pattern": CANARY})
    assert config.data.val_files == config.data.train_files == (str(tmp_path / "rows.jsonl"),)
    public = config.public_values()
    assert server_of(public)["env"] == {
        "DATA": "${oc.env:CANARY}/data",
        "SAME": "${experiment_name}",
        "MODE": "fast",
    }
    assert (public["experiment_name"], public["seed"]) == ("${oc.env:CANARY}", 4)
    assert public["reward"]["kwargs"] == tree["reward"]["kwargs"]
    assert public["data"]["val_files"] == "${data.train_files}" and public["data"]["train_files"] == ["${oc.env:ROWS}"]
    printed = cli("launch", "fully_async", file, "--dry-run").out
    assert CANARY not in printed and str(tmp_path) not in printed
    (tmp_path / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


def test_the_texts_survive_other_processes_and_the_synchronous_mode() -> None:
    config = load_config(None, ["experiment_name=${oc.env:CANARY}"], mode="sync")
    for one in (config, pickle.loads(pickle.dumps(config)), config.model_copy(update={"seed": 1})):
        assert (one.experiment_name, one.public_values()["experiment_name"]) == (CANARY, "${oc.env:CANARY}")


def test_identities_have_a_digest_of_values_from_the_environment() -> None:
    def identity(value: str) -> Any:
        config = Config.model_validate({"reward": {"kwargs": {"a": [value, 1]}}})
        return config.with_unresolved({("reward", "kwargs"): "${x}"}).identity_values()["reward"]["kwargs"]

    found = identity(CANARY)
    assert found["a"][1] == 1 and found["a"][0].startswith("${x} (sha256:") and CANARY not in str(found)
    assert identity(CANARY) == found != identity("another")


def test_a_config_without_variables_is_unchanged() -> None:
    config = load_config()
    assert config.public_values() == config.identity_values() == config.model_dump(mode="json")


@pytest.mark.parametrize(
    "override",
    [
        "rollout.n=${oc.env:CANARY}",
        "data.train_files=[${oc.env:CANARY}]",
        "model.path=/${oc.env:CANARY}",
        "rollout.${oc.env:CANARY}=1",
        "logging.level=${oc.env:CANARY}",
        "experiment_name='${${oc.env:CANARY}}'",
        "reward.kwargs={a: ${oc.decode:'{${oc.env:CANARY}'}}",
        "rollout.nn={a: [${oc.env:CANARY}]}",
        "reward.function='${oc.env:CANARY}:f'",
    ],
)
def test_errors_name_the_variable_instead_of_its_value(override: str, cli: CommandLine) -> None:
    printed = cli("launch", "fully_async", override, code=2)
    as_json = cli("launch", "fully_async", override, "--dry-run", "--json", code=2)
    assert CANARY not in printed.out + printed.err + as_json.out + as_json.err
    assert "CANARY" in printed.err


def test_the_resolvers_are_as_before_once_a_configuration_is_composed() -> None:
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    load_config()
    assert OmegaConf.create({"a": "${oc.env:CANARY}"}).a == CANARY
    assert oc.env("CANARY") == CANARY

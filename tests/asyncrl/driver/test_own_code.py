"""The user's files on nodes of a cluster that do not have them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from asyncrl.config.compose import check_config
from asyncrl.config.import_path import import_module, load_function
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver.cluster.connection import _runtime_env, _start


@pytest.fixture
def address() -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def test_a_process_of_a_cluster_can_import_a_file_that_its_node_lacks(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rewards", "agents", "own_package"):
        (tmp_path / name).mkdir()
    (tmp_path / "rewards" / "own_rewards.py").write_text("def score(**row):\n    return 7.0\n")
    (tmp_path / "agents" / "loop.py").write_text("def run():\n    return 3.0\n")
    (tmp_path / "own_stages.py").write_text("VALUE = 2.0\n")
    (tmp_path / "own_package" / "__init__.py").write_text("from own_package.losses import clip\n")
    (tmp_path / "own_package" / "losses.py").write_text("def clip(counts):\n    return 0.5\n")
    (tmp_path / "own_tool.py").write_text("def Lookup():\n    return 5.0\n")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: own_tool.Lookup}]\n")
    names = {"reward": "rewards/own_rewards.py:score", "loss": "own_package:clip", "agent": "agents.loop:run"}
    values = {
        "ray": {"address": address, "runtime_env": {"env_vars": {"OWN_VARIABLE": "1"}}},
        "reward": {"function": names["reward"]},
        "algorithm": {"loss_agg_mode": names["loss"]},
        "rollout": {
            "agent": {"program": names["agent"]},
            "multi_turn": {"enable": True, "tool_config_path": "tools.yaml"},
        },
        "skip": {"modules": ["own_stages"]},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(values))
    config = check_config("own.yaml").config
    assert config is not None
    names["tool"] = str(config.rollout.multi_turn.tools[0].class_name)
    _start(config, "own-code")
    for file in list(tmp_path.rglob("*.py")):
        file.unlink()

    @ray.remote(num_cpus=0)
    def call(name: str) -> float:
        function = load_function(name, "a.key", {})
        return function(None) if name.endswith("clip") else function()

    @ray.remote(num_cpus=0)
    def others() -> tuple[float, str]:
        return import_module("own_stages", "skip.modules").VALUE, os.environ["OWN_VARIABLE"]

    assert ray.get([call.remote(name) for name in names.values()], timeout=120) == [7.0, 0.5, 3.0, 5.0]
    assert ray.get(others.remote(), timeout=120) == (2.0, "1")
    with pytest.raises(ConfigError, match="there is no file"):
        load_function(names["reward"], "a.key", {})


def _write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("VALUE = 7\n")


@pytest.mark.parametrize("folder", ["", "{root}/", "../elsewhere/"])
def test_only_code_that_the_configuration_names_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    monkeypatch.chdir(root)
    _write(root, "agents/__init__.py", "agents.py", "skipped.py", "unused.py", "data.jsonl", "repository/code.py")
    file = f"{folder.format(root=root)}rewards/score.py"
    _write(root, file)
    config = Config.model_validate(
        {
            "ray": {"runtime_env": {"py_modules": ["/mine"], "container": {"image": "repository:latest"}}},
            "reward": {"function": f"{file}:VALUE"},
            "rollout": {"agent": {"program": "agents.loop:VALUE"}},
            "skip": {"modules": ["skipped", "json"]},
            "model": {"path": "unused.py"},
        }
    )
    sent = _runtime_env(config)
    assert sent is not None
    assert sent["container"] == {"image": "repository:latest"}
    assert sent["py_modules"][0] == "/mine"
    assert {Path(one) for one in sent["py_modules"][1:]} == {
        (root / file).resolve(), root / "agents", root / "skipped.py"
    }  # fmt: skip
    assert _runtime_env(Config()) is None


def test_two_files_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "a/score.py", "b/score.py")
    config = Config.model_validate(
        {"reward": {"function": "a/score.py:VALUE"}, "algorithm": {"loss_agg_mode": "b/score.py:VALUE"}}
    )
    with pytest.raises(ConfigError, match=r"/score\.py and .*/score\.py.*rename one"):
        _runtime_env(config)

"""The user's files on nodes of a cluster that do not have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from asyncrl.config.import_path import load_function
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver.cluster import _start


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
    (tmp_path / "own_rewards.py").write_text("def score(**row):\n    return 7.0\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from own_package.losses import clip\n")
    (tmp_path / "own_package" / "losses.py").write_text("def clip(counts):\n    return 0.5\n")
    names = {"reward": f"{tmp_path}/own_rewards.py:score", "loss": "own_package:clip"}
    config = Config.model_validate(
        {
            "ray": {"address": address},
            "reward": {"function": names["reward"]},
            "algorithm": {"loss_agg_mode": names["loss"]},
        }
    )
    _start(config, "own-code")
    for file in ("own_rewards.py", "own_package/losses.py", "own_package/__init__.py"):
        (tmp_path / file).unlink()

    @ray.remote(num_cpus=0)
    def call(name: str) -> float:
        function = load_function(name, "a.key", {})
        return function(None) if name.endswith("clip") else function()

    assert ray.get([call.remote(name) for name in names.values()], timeout=120) == [7.0, 0.5]
    with pytest.raises(ConfigError, match="there is no file"):
        load_function(names["reward"], "a.key", {})

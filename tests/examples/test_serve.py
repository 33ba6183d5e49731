"""The deployments in examples/serve are valid for Ray Serve and for the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from asyncrl.config.compose import check_config
from rollouter.serving import app
from rollouter.serving.options import DEPLOYMENT_NAME

EXAMPLES = Path(__file__).parents[2] / "examples" / "serve"


def deployment(name: str) -> dict[str, Any]:
    """Return the configuration for Serve, which KubeRay's manifest contains as text."""
    file = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    return yaml.safe_load(file["spec"]["serveConfigV2"]) if "spec" in file else file


@pytest.mark.parametrize("name", ["rollout.yaml", "kuberay.yaml"])
def test_the_deployment_is_valid(name: str) -> None:
    (application,) = ServeDeploySchema.model_validate(deployment(name)).applications
    module, _, function = application.import_path.partition(":")
    assert getattr(app, function) is app.build_app and module == app.__name__
    args = {key: value for key, value in application.args.items() if key != "config"}
    checked = check_config(application.args.get("config"), tuple(app._overrides(args)), scope="app")
    # The machine of this test has neither the model nor the key.
    assert {problem.key for problem in checked.problems} <= {"model.path", "serve.api_key_env"}
    assert {one.name for one in application.deployments} <= {DEPLOYMENT_NAME, "openai"}

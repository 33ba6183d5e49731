"""The manifests for Kubernetes follow the schemas of KubeRay, which refuse what Kubernetes would refuse or ignore."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from asyncrl.config.compose import check_config
from asyncrl.config.resources.placement import gangs
from rollouter.serving import app, http
from rollouter.serving.options import deployment_options

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEMA = yaml.safe_load((Path(__file__).parent / "kuberay_schema.yaml").read_text(encoding="utf-8"))
MANIFESTS = ("deploy/kuberay.yaml", "serve/kuberay.yaml")


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def problems(found: dict[str, Any]) -> list[str]:
    schema = SCHEMA | {"$ref": f"#/$defs/{found['kind']}"}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(found)]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_follows_the_schema(name: str) -> None:
    assert problems(manifest(name)) == []


def misspell_a_field_of_the_spec(spec: dict[str, Any], _: dict[str, Any]) -> None:
    spec["suspended"] = False


def misspell_a_field_of_a_group(_: dict[str, Any], cluster: dict[str, Any]) -> None:
    group = cluster["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")


def give_a_number_to_ray_start(_: dict[str, Any], cluster: dict[str, Any]) -> None:
    cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] = 0


def misspell_a_field_of_a_pod(_: dict[str, Any], cluster: dict[str, Any]) -> None:
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    pod["containers"][0]["volumeMount"] = []


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (misspell_a_field_of_the_spec, "'suspended' was unexpected"),
        (misspell_a_field_of_a_group, "'maxReplicas' is a required property"),
        (give_a_number_to_ray_start, "0 is not of type 'string'"),
        (misspell_a_field_of_a_pod, "'volumeMount' was unexpected"),
    ],
)
def test_a_wrong_manifest_is_refused(name: str, damage: Any, message: str) -> None:
    found = manifest(name)
    spec = found["spec"]
    damage(spec, spec.get("rayClusterSpec") or spec["rayClusterConfig"])
    assert any(message in problem for problem in problems(found))


def gpus_of_pods(cluster: dict[str, Any], group: str) -> int:
    """Return the GPUs that KubeRay can add in a group of pods."""
    (found,) = [one for one in cluster["workerGroupSpecs"] if one["groupName"] == group]
    (container,) = found["template"]["spec"]["containers"]
    return found["maxReplicas"] * container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_servers_are_built_for_gpus_before_the_pods_with_gpus_join(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = manifest("serve/kuberay.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    built: list[Any] = []
    monkeypatch.setenv(application["args"]["serve"]["api_key_env"], "key")
    monkeypatch.setattr(http, "build_http_app", lambda options, *_, **__: built.append(options))
    monkeypatch.setattr("rollouter.agent.parsing.resolve_format", lambda *_: None)
    monkeypatch.setattr(app, "_gpus", lambda: False)
    args = application["args"] | {"model": "asyncrl://quickstart", "data": {"max_prompt_length": 64}}
    args["rollout"]["response_length"] = 256  # this machine has another model, with a shorter context
    app.build_app(args)
    (options,) = built
    deployed, engine = deployment_options(options), options.llm_config["engine_kwargs"]
    assert deployed["placement_group_bundles"] == [{"GPU": 1.0, "CPU": 1.0}]
    assert deployed["num_replicas"] <= gpus_of_pods(spec["rayClusterConfig"], "rollout")
    assert (engine["enforce_eager"], engine["dtype"]) == (False, "bfloat16")
    assert "TORCHDYNAMO_DISABLE" not in options.env_vars


def test_the_run_demands_the_gpus_of_all_pods_before_any_has_joined() -> None:
    spec = manifest("deploy/kuberay.yaml")["spec"]
    overrides = [word for word in shlex.split(spec["entrypoint"])[4:] if not word.startswith(("run_dir=", "resume="))]
    config = check_config("quickstart", [*overrides, "trainer.strategy=fsdp2"]).config
    assert config is not None
    demanded = {gang.section: gang.total("GPUs") for gang in gangs(config, gpus=False)}
    pods = {"trainer": "train", "rollout": "rollout"}
    assert demanded == {part: gpus_of_pods(spec["rayClusterSpec"], group) for part, group in pods.items()}
    assert (config.rollout.dtype, config.rollout.enforce_eager, config.trainer.dtype) == ("bfloat16", False, "bfloat16")

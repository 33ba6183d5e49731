"""The manifests for Kubernetes follow the schemas of KubeRay, which refuse what Kubernetes would refuse or ignore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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

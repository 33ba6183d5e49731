"""The policy in Serve's controller on Serve's own context, as Serve pickles and calls it."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from rollouter.serving.autoscaling import WANTED_REPLICAS
from rollouter.serving.options import SCALING_POLICY

DEPLOYMENT = DeploymentID("rollout", "app")


def replica(name: str) -> ReplicaID:
    return ReplicaID(name, DEPLOYMENT)


def context(target: int, **reported: list[tuple[float, float]]) -> AutoscalingContext:
    """Return the context of a deployment whose replicas have reported numbers at times."""
    series = {replica(name): [TimeStampedValue(*point) for point in points] for name, points in reported.items()}
    others: dict[str, Any] = dict.fromkeys(
        ("total_num_requests", "total_queued_requests", "last_scale_up_time", "last_scale_down_time", "config"), 0.0
    )
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name=DEPLOYMENT.name,
        app_name=DEPLOYMENT.app_name,
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=list(series),
        aggregated_metrics={},
        raw_metrics={"running_requests": {}, **({WANTED_REPLICAS: series} if series else {})},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        current_time=100.0,
        **others,
    )


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({}, 3),
        ({"a": []}, 3),
        ({"a": [(1.0, 2.0), (7.0, 4.0)]}, 4),
        ({"a": [(1.0, 2.0), (7.0, 4.0)], "b": [(9.0, 1.0)], "c": [(8.0, 6.0)]}, 1),
    ],
)
def test_the_newest_number_that_any_replica_has_reported_is_wanted(
    reported: dict[str, list[tuple[float, float]]], wanted: int
) -> None:
    policy = AutoscalingPolicy(policy_function=SCALING_POLICY)
    in_controller = AutoscalingPolicy.from_serialized_policy_def(
        policy.model_dump(), policy.get_serialized_policy_def() or b""
    ).get_policy()
    assert in_controller(context(3, **reported)) == (wanted, {})

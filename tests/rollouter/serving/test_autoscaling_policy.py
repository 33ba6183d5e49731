"""The policy in Serve's controller on Serve's own context, as Serve pickles and calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from asyncrl.core.ports import WantedReplicas
from rollouter.serving.autoscaling import WANTED_REPLICAS, replica_metrics
from rollouter.serving.options import SCALING_POLICY

DEPLOYMENT = DeploymentID("rollout", "app")


def replica(name: str) -> ReplicaID:
    return ReplicaID(name, DEPLOYMENT)


def context(
    target: int, reported: Mapping[str, Sequence[WantedReplicas]], state: dict[str, Any] | None = None
) -> AutoscalingContext:
    """Return the context of a deployment whose replicas have reported decisions, one a second."""
    metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {"running_requests": {}}
    for name, decisions in reported.items():
        for time_s, decision in enumerate(decisions):
            for metric, value in replica_metrics(decision).items():
                metrics.setdefault(metric, {}).setdefault(replica(name), []).append(TimeStampedValue(time_s, value))
    others: dict[str, Any] = dict.fromkeys(
        ("total_num_requests", "total_queued_requests", "last_scale_up_time", "last_scale_down_time", "config"), 0.0
    )
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name=DEPLOYMENT.name,
        app_name=DEPLOYMENT.app_name,
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[replica(name) for name in reported],
        aggregated_metrics={},
        raw_metrics=metrics,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state=state or {},
        current_time=100.0,
        **others,
    )


@pytest.fixture
def policy() -> Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]:
    """Return the policy as it arrives in Serve's controller."""
    made = AutoscalingPolicy(policy_function=SCALING_POLICY)
    in_controller: Any = AutoscalingPolicy.from_serialized_policy_def(
        made.model_dump(), made.get_serialized_policy_def() or b""
    ).get_policy()
    return in_controller


FIRST, SECOND, THIRD = WantedReplicas(0, 1), WantedReplicas(1, 4), WantedReplicas(2, 2)


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({"a": [FIRST, SECOND]}, 4),
        ({"a": [FIRST, SECOND, THIRD], "b": [FIRST, FIRST, FIRST, FIRST]}, 2),
        ({"a": [], "b": [SECOND]}, 4),
    ],
)
def test_the_latest_decision_that_any_replica_has_reported_counts(
    policy: Any, reported: dict[str, list[WantedReplicas]], wanted: int
) -> None:
    assert policy(context(3, reported))[0] == wanted


@pytest.mark.parametrize("reported", [{}, {"a": []}])
def test_without_a_decision_the_number_stays(policy: Any, reported: dict[str, list[WantedReplicas]]) -> None:
    assert policy(context(3, reported)) == (3, {})


def test_the_end_of_the_replica_that_reported_a_decision_does_not_undo_it(policy: Any) -> None:
    """Serve forgets the metrics of a replica that ends, and the others may not have heard of the decision yet."""
    before = {"a": [FIRST, SECOND], "b": [SECOND], "c": [SECOND]}
    _, state = policy(context(4, before))
    wanted, state = policy(context(4, {**before, "a": [SECOND, THIRD]}, state))
    assert wanted == 2
    assert policy(context(2, {"b": [SECOND], "c": [SECOND]}, state)) == (2, state)
    assert state[WANTED_REPLICAS] == (2, 2)

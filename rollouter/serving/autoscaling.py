"""The autoscaling policy of the engines' deployment: Serve runs as many replicas as the run's driver wants.

    driver: replica_scaling ──▶ weight store ──▶ replicas: record_autoscaling_stats ──▶ Serve's controller: policy

What decides, the waits of Trainer and Rollouter, is known to the driver, so the driver decides
(`asyncrl.core.autoscaling`). The policy is called in Serve's controller about ten times a second and must never block
it, so it reads the number from the metrics that the replicas push there. The replicas have it from the weight store's
answer to their reports, which they send anyway. Serve's other public way, the scaling API of applications with
`external_scaler_enabled`, is an endpoint of Ray's dashboard, which a private cluster does not start.

The numbers of the replicas reach Serve at different times, up to 16 s apart, and with a replica that ends, its metrics
are gone. So each number comes with that of its decision, and the policy keeps the latest decision in its state:
otherwise Serve would return to an earlier decision, and start or end replicas for some seconds.

Serve pickles this module by value, as it does with every policy: the controller need not have asyncrl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingContext

if TYPE_CHECKING:
    from asyncrl.core.ports import WantedReplicas

WANTED_REPLICAS = "wanted_replicas"
"""Name of the metric in which the replicas report the number that the driver wants, and of the policy's state."""
DECISION = "wanted_replicas_decision"
"""Name of the metric with the number of the decision."""


def replica_metrics(wanted: WantedReplicas | None) -> dict[str, float]:
    """Return what a replica reports to Serve about the driver's decision `wanted`; nothing if there is none."""
    return {} if wanted is None else {DECISION: float(wanted.decision), WANTED_REPLICAS: float(wanted.num_replicas)}


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas of the driver's latest decision that has reached Serve, and the decision as the
    state. Until there is one, the number of replicas stays as it is."""
    metrics = context.raw_metrics or {}
    state = context.policy_state or {}
    known = [state[WANTED_REPLICAS]] if WANTED_REPLICAS in state else []
    for replica, decisions in metrics.get(DECISION, {}).items():
        numbers = metrics[WANTED_REPLICAS][replica]
        known += [(decision.value, number.value) for decision, number in zip(decisions, numbers, strict=True)]
    if not known:
        return context.target_num_replicas, {}
    latest = max(known)
    return int(latest[1]), {WANTED_REPLICAS: latest}

"""The autoscaling policy of the engines' deployment: Serve runs as many replicas as the run's driver wants.

    driver: replica_scaling ──▶ weight store ──▶ replicas: record_autoscaling_stats ──▶ Serve's controller: policy

What decides, the waits of Trainer and Rollouter, is known to the driver, so the driver decides
(`asyncrl.core.autoscaling`). The policy is called in Serve's controller about ten times a second and must never block
it, so it reads the number from the metrics that the replicas push there. The replicas have it from the weight store's
answer to their reports, which they send anyway. Serve's other public way, the scaling API of applications with
`external_scaler_enabled`, is an endpoint of Ray's dashboard, which a private cluster does not start.

Serve pickles this module by value, as it does with every policy: the controller need not have asyncrl.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

WANTED_REPLICAS = "wanted_replicas"
"""Name of the metric in which the replicas report the number that the driver wants."""


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas that the driver wants, as it has last reached Serve, and no state. Until it has
    reached Serve, the number of replicas stays as it is."""
    reported = (context.raw_metrics or {}).get(WANTED_REPLICAS, {})
    points = [point for series in reported.values() for point in series]
    if not points:
        return context.target_num_replicas, {}
    return int(max(points, key=lambda point: point.timestamp).value), {}

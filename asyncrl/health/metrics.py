"""A run's health as metrics, for the lines of steps. Pure."""

from __future__ import annotations

from asyncrl.health.facts import RunHealth


def health_metrics(health: RunHealth) -> dict[str, float]:
    """What is known of it; see the registry for what each name means."""
    metrics: dict[str, float] = {}
    for name, process in health.processes.items():
        metrics[f"health/rss_bytes/{name}"] = float(process.rss_bytes)
        metrics[f"health/cpu/{name}"] = process.cpu
        if process.lag_s is not None:
            metrics[f"health/loop_lag_s/{name}"] = process.lag_s
    for replica, load in health.engines.items():
        metrics[f"health/kv_cache_usage/{replica}"] = load.kv_cache_usage
    if loads := list(health.engines.values()):
        metrics["health/kv_cache_usage"] = max(load.kv_cache_usage for load in loads)
        metrics["health/requests_running"] = float(sum(load.running for load in loads))
        metrics["health/requests_waiting"] = float(sum(load.waiting for load in loads))
        metrics["health/preemptions"] = float(sum(load.preemptions for load in loads))
    if health.object_store_share is not None:
        metrics["health/object_store_share"] = health.object_store_share
    if (machine := health.machine) is not None:
        metrics["health/memory_available_bytes"] = float(machine.memory_available_bytes)
        if machine.disk_free_bytes is not None:
            metrics["health/disk_free_bytes"] = float(machine.disk_free_bytes)
    metrics["health/problems"] = float(len(health.problems))
    return metrics

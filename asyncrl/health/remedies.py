"""What helps against a late event loop and against memory that grows, by the kind of process. Pure."""

from __future__ import annotations

from typing import Literal

from asyncrl.health.facts import ProcessHealth

Kind = Literal["driver", "queue", "store", "rollouter", "trainer", "rank", "replica", "engine"]

BUSY_CPU = 0.8
"""CPUs that a process which computes keeps busy, at least."""
BUSY_MACHINE = 0.95

_COMPUTES: dict[Kind, str] = {
    "rollouter": (
        "something computes on it; move blocking work of rewards, tools and interactions into asyncio.to_thread or a "
        "process, or lower rollout.max_concurrent_samples"
    ),
    "trainer": (
        "something computes on it, while batches are put together or a reward, an advantage or a loss of your own is "
        "imported or called: make that cheaper, or lower trainer.ppo_mini_batch_size"
    ),
    "rank": (
        "its training keeps the processor from it. Steps do not suffer, but a rank that gives no sign of life within "
        "timeouts.probe_s is ended: lower trainer.cpu_threads so that a CPU is left for it, or raise timeouts.probe_s"
    ),
    "replica": (
        "it has more requests and tokens to pass on than one CPU can: lower rollout.max_concurrent_samples, or raise "
        "rollout.num_replicas"
    ),
    "queue": "it has more samples to keep books of than one CPU can: lower rollout.max_concurrent_samples",
    "store": "it has more replicas to answer than one CPU can: lower rollout.num_replicas",
    "driver": "it has more to record than one CPU can: name fewer logging.sinks, or set profiler.level=summary or off",
}
_BLOCKED: dict[Kind, str] = {
    "rollouter": (
        "something blocks it (a file, a network call, a lock); in rewards, tools and interactions of your own use "
        "asyncio.to_thread for what blocks"
    ),
    "trainer": (
        "something blocks it, most likely the disk of the run directory: use a faster one, or checkpoints less often "
        "(trainer.save_freq)"
    ),
    "rank": (
        "something blocks it (a collective that others are late for, a file). A rank that gives no sign of life within "
        "timeouts.probe_s is ended: look which rank is late, or raise timeouts.probe_s"
    ),
    "replica": (
        "something blocks it, most likely vLLM while weights are loaded or large media are read: raise rollout."
        "num_replicas, so that others answer meanwhile"
    ),
    "queue": "something blocks it, most likely the disk of the run directory, where its journal is: use a faster one",
    "store": "something blocks it, most likely memory that is swapped or written to disk: give its machine more",
    "driver": "something blocks it, most likely the disk of the run directory or one of logging.sinks: use fewer, or a "
    "faster disk",
}
_GROWS: dict[Kind, str] = {
    "rollouter": (
        "Something keeps what it no longer needs, most likely code of your own (rewards, tools, interactions). Fewer "
        "samples at once (rollout.max_concurrent_samples) take less"
    ),
    "trainer": (
        "Something keeps batches that it no longer needs, most likely code of your own (rewards, advantages). Smaller "
        "batches (trainer.ppo_mini_batch_size) take less"
    ),
    "rank": (
        "Something keeps tensors from step to step, most likely a loss or a model of your own, or sequences become "
        "longer: fewer tokens at once (trainer.ppo_max_token_len) take less"
    ),
    "replica": (
        "Requests or what was cached of their media pile up in it: fewer at once (rollout.max_concurrent_samples) take "
        "less"
    ),
    "engine": (
        "vLLM keeps what it no longer needs, or its cache is not yet in use as a whole: a smaller one (on CPU "
        "rollout.cpu_kv_cache_gib) and fewer requests at once (rollout.max_num_seqs) take less"
    ),
    "queue": (
        "Samples pile up in it: less generation ahead (async_training.staleness_threshold) and fewer samples at once "
        "(rollout.max_concurrent_samples) take less"
    ),
    "store": "Versions of the weights pile up in it: see which replica does not apply them (asyncrl status)",
    "driver": "What it records piles up, most likely in one of logging.sinks that is too slow: use fewer",
}


def kind_of(name: str) -> Kind:
    """Of a process, as `RunHealth.processes` names it."""
    first = name.partition("-")[0]
    kinds: tuple[Kind, ...] = ("queue", "store", "rollouter", "trainer", "rank", "replica", "engine")
    return next((kind for kind in kinds if kind == first), "driver")


def against_lag(name: str, process: ProcessHealth | None, machine_cpu: float | None) -> str:
    """Why its event loop is late, and what to do.

    Args:
        name: whose.
        process: None: it does not answer, so that nothing is known of it.
        machine_cpu: share of its machine's CPUs that is busy; None: not known.
    """
    kind = kind_of(name)
    if kind != "rank" and process is not None and process.cpu >= BUSY_CPU:
        return _COMPUTES.get(kind, _COMPUTES["driver"])
    if machine_cpu is not None and machine_cpu > BUSY_MACHINE:
        return (
            "the machine's CPUs are all busy; lower rollout.max_concurrent_samples or the number of processes, or give "
            "the run more CPUs"
        )
    if process is not None and process.cpu >= BUSY_CPU:  # a rank is always busy while it trains
        return _COMPUTES["rank"]
    return f"{_BLOCKED.get(kind, _BLOCKED['driver'])}. `loop.stall` events tell when"


def against_growth(name: str) -> str:
    """Why its memory grows, most likely, and what to do until that is found."""
    return _GROWS[kind_of(name)]

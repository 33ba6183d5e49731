"""The threads of engines and ranks (`cpu_threads=auto`), ranks on CPU (`trainer.device=auto`), and sharing of CPUs.

Engines and ranks compute all the time and share the CPUs of the machine. In a synchronous run they take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from asyncrl.config.environment import usable_cpus, visible_gpus
from asyncrl.config.problems import ConfigProblem, warning
from asyncrl.config.resources.plan import ENGINE_THREADS, MachineResources, computing_processes, threads_at_once
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import on_gpus

AUTO = "auto"
RANK_THREADS = "trainer.cpu_threads"
KEYS = (ENGINE_THREADS, RANK_THREADS)
_SPARE_FROM = 8
"""From this number of CPUs on, one of them is left for the processes that do not compute: Rollouter, replicas' HTTP and
message handling, queue and driver. Together they use less than half a CPU where engines and ranks have one each."""


def take_auto(tree: dict[str, Any]) -> list[str]:
    """Replace `auto` in a tree of values by 1 thread, and return the keys that had it."""
    keys = []
    for key in KEYS:
        section, _, name = key.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and values.get(name) == AUTO:
            values[name] = 1
            keys.append(key)
    return keys


def with_threads(config: Config, keys: Collection[str], machine: MachineResources, *, trains: bool = True) -> Config:
    """Return the configuration with a number of threads at each of `keys`.

    Sides with `auto` share the CPUs that the other side and the rest of the run leave: each of their processes gets the
    same number of threads, and ranks may try more (`trainer.max_cpu_threads`). In a synchronous run, each side gets all
    CPUs. On GPUs a process has one thread.

    Args:
        trains: whether there are training processes besides the engines.
    """
    if not keys:
        return config
    parts = computing_processes(config, machine, trains=trains)
    cpus = machine.cpus - (machine.cpus >= _SPARE_FROM)
    fixed = sum(part.count * part.threads for part in parts if part.threads_key not in keys)
    alternates = config.mode == "sync"
    chosen = dict.fromkeys(keys, 1)
    for key in chosen:
        sharing = {key} if alternates else set(keys)
        if any(part.threads_key == key for part in parts):
            processes = sum(part.count for part in parts if part.threads_key in sharing)
            chosen[key] = max(1, (cpus if alternates else cpus - fixed) // processes)
    sections = {key.partition(".")[0]: threads for key, threads in chosen.items()}
    changes = {name: getattr(config, name).model_copy(update={"cpu_threads": n}) for name, n in sections.items()}
    ranks = sum(part.count for part in parts if part.threads_key == RANK_THREADS)
    is_fixed = config.async_training.deterministic or config.trainer.max_cpu_threads is not None
    if RANK_THREADS in keys and ranks and config.mode == "fully_async" and not is_fixed:
        most = max(chosen[RANK_THREADS], machine.cpus // ranks)
        changes["trainer"] = changes["trainer"].model_copy(update={"max_cpu_threads": most})
    return config.model_copy(update=changes)


def resolve_device(config: Config) -> tuple[Config, list[ConfigProblem]]:
    """Return the configuration with ranks on CPU, and a warning, if `trainer.device` is `auto` and the engine has the
    only GPU of this machine."""
    rollout, alone = config.rollout, config.mode == "sft" or config.validates_only or config.shares_gpus
    has_engine = rollout.attach is None and on_gpus(rollout.device, present=True)
    if alone or not has_engine or config.ray.address or config.trainer.device != "auto" or visible_gpus() != 1:
        return config, []
    consequence = (
        "the engine has the only GPU of this machine, so the Trainer is on the CPU: slow for all but small models"
    )
    fix = "use the GPU in turns: `asyncrl launch sync` with placement=colocated; or set it to cpu"
    trainer = config.trainer.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"trainer": trainer}), [warning("trainer.device", "auto", consequence, fix)]


def resolve_auto(config: Config, keys: Collection[str], *, trains: bool = True) -> tuple[Config, list[ConfigProblem]]:
    """Return the configuration with a number of threads at each of `keys` for this machine (`with_threads`), and the
    problems of keys that cannot have `auto`."""
    machine = MachineResources(usable_cpus(), visible_gpus())
    return with_threads(config, keys, machine, trains=trains), list(_misplaced(config, keys))


def _misplaced(config: Config, keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each key with `auto` in a run on a cluster, whose nodes are not known yet."""
    if config.ray.address is not None:
        for key in keys:
            consequence = "it divides the CPUs of this machine, and ray.address places the processes on other nodes"
            yield ConfigProblem(key, AUTO, consequence, "give a number of threads")


def share_cpus(config: Config, machine: MachineResources) -> bool:
    """Return whether the threads of engines and ranks leave no CPU of this machine to other processes.

    OpenMP's threads then have to sleep where they wait: by default, they spin for milliseconds at the end of each
    parallel region, on the CPUs that the threads they wait for need.
    """
    return threads_at_once(computing_processes(config, machine), alternating=False) >= machine.cpus

"""Training engines that a configuration names: whether they, what they need and their GPUs are on this machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from asyncrl.config.model_checks import model_config
from asyncrl.config.problems import Problem, warning
from asyncrl.config.schema import Config
from asyncrl.config.trainer_rules import roles

BUILTIN_STRATEGIES = ("local", "ddp", "fsdp", "fsdp2")
STRATEGY_ENTRY_POINTS = "asyncrl.engines"
LIBRARIES = {"torchtitan": "torchtitan", "megatron": "megatron.core"}
"""What this project's own adapters adapt."""


def problems(config: Config) -> Iterator[Problem]:
    """What is wrong wherever the run takes place."""
    yield from _strategies(config)
    yield from _sequence_parallel(config)


def machine_problems(config: Config) -> Iterator[Problem]:
    """What is wrong if the run takes place on this machine."""
    yield from _libraries(config)
    if config.trainer.use_liger and importlib.util.find_spec("liger_kernel") is None:
        yield Problem(
            "trainer.use_liger",
            True,
            "the package liger-kernel is not installed here",
            "pip install 'asyncrl[liger]', or leave this key out",
        )
    gpus = visible_gpus()
    yield from _profiler(config, gpus)
    yield from _without_gpus(config) if not gpus else _few_gpus(config, gpus)


def _profiler(config: Config, gpus: int) -> Iterator[Problem]:
    if config.profiler.tool != "nsys" or not config.profiler.steps or config.trainer.device == "cpu":
        return
    if not gpus:
        yield Problem(
            "profiler.tool",
            "nsys",
            "this machine has no visible NVIDIA GPU, and Nsight Systems looks into training processes on GPUs",
            "set profiler.tool=torch, or run where there is one",
        )
    if shutil.which("nsys") is None:
        yield Problem(
            "profiler.tool",
            "nsys",
            "the command nsys is not on PATH here, and the training processes are started under it",
            "install NVIDIA Nsight Systems (https://developer.nvidia.com/nsight-systems), or set profiler.tool=torch",
        )


def visible_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    driver = Path("/proc/driver/nvidia/gpus")
    present = len(list(driver.iterdir())) if driver.is_dir() else _managed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [device for device in visible.split(",") if device.strip() and device.strip() != "-1"]
    return min(present, len(chosen))


def _managed_gpus() -> int:
    """By NVIDIA's management library, as Ray counts them: where the driver shows no files, as below Windows."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return 0 if failed else count.value


def _strategies(config: Config) -> Iterator[Problem]:
    """Misspelt names, also of models that this run does not have: they would be the next thing to mend."""
    given = {
        "trainer.strategy": config.trainer.strategy,
        "ref.strategy": config.ref.strategy,
        "critic.strategy": config.critic.strategy,
        "reward_model.worker.strategy": config.reward_model.worker.strategy,
    }
    known = sorted({*BUILTIN_STRATEGIES, *(point.name for point in entry_points(group=STRATEGY_ENTRY_POINTS))})
    for key, strategy in given.items():
        if strategy is not None and strategy not in known:
            near = get_close_matches(strategy.lower(), known, n=2) or get_close_matches(strategy, known, 1, cutoff=0.0)
            yield Problem(
                key,
                strategy,
                f"there is no such engine; known are {', '.join(known)}",
                f"did you mean {' or '.join(near)}? Or install the package that registers it as "
                f"an entry point of {STRATEGY_ENTRY_POINTS}",
            )


def _libraries(config: Config) -> Iterator[Problem]:
    """Backends of entry points, without importing them: what else one needs is told when it is loaded."""
    given = {"trainer.strategy": config.trainer.strategy}
    given |= {f"{name}.strategy": role.strategy for name, role in roles(config).items() if role.strategy is not None}
    modules = {point.name: point.module.partition(".")[0] for point in entry_points(group=STRATEGY_ENTRY_POINTS)}
    for key, strategy in given.items():
        module = LIBRARIES.get(strategy, modules.get(strategy))
        if module is not None and not _installed(module):
            ours = strategy in LIBRARIES
            fix = f"pip install 'asyncrl[{strategy}]'" if ours else f"install the package that {module} is in"
            yield Problem(
                key, strategy, f"it needs {module}, which is not installed here", f"{fix}, or use fsdp2 or fsdp"
            )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package above it is missing, or is none
        return False


def _sequence_parallel(config: Config) -> Iterator[Problem]:
    """Ranks that share a sequence share its heads too; one problem for both, so that its fix holds for both."""
    size, ranks = config.trainer.ulysses_sequence_parallel_size, config.trainer.num_workers
    told = model_config(config.model.path).get("num_attention_heads")
    heads = told if isinstance(told, int) and told > 0 else None
    against = []
    if ranks % size:
        against.append(f"trainer.num_workers = {ranks} ranks cannot be cut into groups of {size}")
    if heads is not None and heads % size:
        against.append(f"the model at {config.model.path} has {heads} attention heads, which {size} ranks cannot share")
    if not against:
        return
    able = [number for number in range(1, (heads or ranks) + 1) if (heads or ranks) % number == 0]
    now = [str(number) for number in able if ranks % number == 0]
    later = [str(number) for number in able if ranks % number and (heads or 0) % number == 0]
    fix = f"set it to {' or '.join(now)}"
    if heads is None or heads % size == 0:
        fix += f", or trainer.num_workers to a multiple of {size}"
    elif later:
        fix += f", or to {' or '.join(later)} with trainer.num_workers a multiple of that"
    yield Problem("trainer.ulysses_sequence_parallel_size", size, "; and ".join(against), fix)


def _without_gpus(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    devices = {"trainer": trainer.device}
    devices |= {name: role.device for name, role in roles(config).items() if role.placement == "own" and role.device}
    for section, device in devices.items():
        if device == "cuda" and config.ray.address is None:
            yield Problem(
                f"{section}.device",
                device,
                "this machine shows no GPU (to this process: see CUDA_VISIBLE_DEVICES)",
                f"set {section}.device=auto or cpu, or point ray.address at a cluster that has GPUs",
            )
    if trainer.device != "auto":
        return
    found = "this machine shows no GPU, which trainer.device=auto would take"  # `idle` has the same for `cpu`
    for key in ("activation_offload", "param_offload", "optimizer_offload"):
        if getattr(trainer, key):
            yield warning(f"trainer.{key}", True, f"{found}: on CPU it has no effect", "leave this key out")
    if trainer.use_liger:
        yield Problem("trainer.use_liger", True, f"{found}: Liger kernels run on GPUs only", "leave this key out")


def _few_gpus(config: Config, gpus: int) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.device != "cpu" and trainer.num_workers > gpus and config.ray.address is None:
        yield Problem(
            "trainer.num_workers",
            trainer.num_workers,
            f"each rank takes a GPU, and this machine shows {gpus}",
            f"set it to {gpus} or fewer, or trainer.device=cpu, or point ray.address at a cluster",
        )

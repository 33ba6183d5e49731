"""The length of a run, and the resources and limits that `--dry-run` prints. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.environment import no_gpu
from asyncrl.config.problems import ConfigProblem, configured, errors, format_problems, warning
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import on_gpus
from asyncrl.config.sections.trainer import RoleConfig
from asyncrl.config.sections.trainer_rules import (
    STRATEGIES_WITH_MESHES,
    check_length,
    epoch_samples,
    epoch_steps,
    model_roles,
)
from asyncrl.core.failures import ConfigError

GIB = 1024**3
ENGINE_THREADS = "rollout.cpu_threads"
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENT_BYTES = 8
"""The two Adam moments of a parameter."""
_TRAINING_BYTES = 4 + 4 + _MOMENT_BYTES
"""A parameter's float32 master weight, gradient and two Adam moments."""
_SAVED_BYTES = 4 + 8
"""A parameter's float32 master weight and two Adam moments in a checkpoint."""
_EXPORT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""A parameter of the policy in Hugging Face format, by `trainer.hf_export_dtype`."""
_UNSHARDED = ("local", "ddp", "megatron_layers")
"""Strategies that have the whole model on every rank."""
STORED_VERSIONS = 4
"""Versions that the object store must hold: one on its way there, the newest, and two that replicas may still load."""


def training_steps(config: Config, num_prompts: int) -> int:
    """Return the optimizer steps of the whole run, over which learning rates decay.

    Args:
        num_prompts: prompts per epoch, after filtering.

    Raises:
        ConfigError: the prompts do not fill one step, or fill only the critic's warm-up.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if problems := errors(check_length(config, num_prompts)):
        raise ConfigError(format_problems(problems))
    return epoch_steps(config, num_prompts)


def total_samples(
    config: Config, total_steps: int, num_prompts: int | None, *, step: int = 0, trained_samples: int = 0
) -> int:
    """Return the number of samples that the run trains on, including those before a resume. No others are admitted.

    Every pass (`trainer.ppo_epochs`) over a lease uses the same samples. A run that stops in the middle of a lease may
    skip the last passes over it. After a resume, the steps of these passes use new samples, so the run may need more
    samples than planned, but never more than its epochs contain if `trainer.total_epochs` sets its length.

    Args:
        num_prompts: prompts per epoch, after filtering; may be None with `trainer.total_training_steps`.
        step, trained_samples: counters of the checkpoint that a resumed run starts from.
    """
    mini_batches = math.ceil(max(0, total_steps - step) / config.trainer.ppo_epochs)
    samples = trained_samples + mini_batches * config.trainer.ppo_mini_batch_size
    if config.trainer.total_training_steps is None and num_prompts is not None:
        return min(samples, epoch_samples(config, num_prompts))
    return samples


def validation_due(test_freq: int, *, validated_step: int, step: int) -> bool:
    """Whether a multiple of `trainer.test_freq` is above the newest `validated_step` and at most `step`."""
    return test_freq > 0 and step // test_freq > validated_step // test_freq


@dataclass(frozen=True, slots=True)
class MachineResources:
    """CPUs, visible GPUs and memory of a machine, and the memory of its smallest GPU."""

    cpus: int
    gpus: int
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    cpu_build: str = ""
    """The package whose build for CPUs leaves GPUs of the machine unused; empty if there is none."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A kind of process of the run. `threads`, `gpus` and `memory_bytes` are per process."""

    name: str
    count: int
    threads: int
    gpus: int
    memory_bytes: int | None
    """Weights, optimizer and caches, without activations and libraries; None if unknown. On a GPU: of its memory."""
    computes: bool = False
    """Whether it keeps its threads busy."""
    key: str = ""
    """The configuration key of `count`, or of a factor of it; `threads_key`: that of `threads`."""
    threads_key: str = ""
    offloaded_bytes: int = 0
    """What a process with a GPU keeps in the memory of the machine while it does not compute."""

    @property
    def host_bytes(self) -> int:
        """The memory of the machine that is planned for a process."""
        return self.offloaded_bytes if self.gpus else self.memory_bytes or 0


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """The processes of a run, its length, and how far generation may run ahead of training."""

    parts: tuple[PlannedProcess, ...]
    machine: MachineResources
    num_gpus: int
    """GPUs that the processes need at the same time. If engines and ranks take turns, two of them share each GPU."""
    num_parameters: int | None
    num_prompts: int | None
    """Training prompts before filtering."""
    total_steps: int | None
    total_versions: int | None
    total_samples: int | None
    """Samples that the whole run trains on; with `total_epochs`, computed from the unfiltered prompts."""
    samples_per_step: int
    samples_per_lease: int
    samples_per_version: int
    max_unconsumed_samples: int
    """Maximum number of samples that are generated and not yet trained: `(1 + staleness_threshold) x
    samples_per_version`."""
    max_generating_samples: int
    max_generating_trajectories: int
    max_model_len: int
    validation: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    config: Config,
    machine: MachineResources,
    *,
    num_parameters: int | None,
    num_prompts: int | None,
    teacher_parameters: int | None = None,
) -> ResourcePlan:
    """Return the plan of a run on a machine; `num_prompts` before filtering, None if unknown.

    Raises:
        ConfigError: there are too few prompts for a step.
    """
    total_steps = config.trainer.total_training_steps
    if total_steps is None and num_prompts is not None:
        total_steps = training_steps(config, num_prompts)
    steps_per_version = config.steps_per_lease * config.async_training.trigger_parameter_sync_step
    unconsumed = config.max_unconsumed_samples
    surplus = math.ceil(config.rollout.over_sample.samples * config.samples_per_version)
    generating = min(unconsumed + surplus, config.rollout.max_concurrent_samples)
    parts = tuple(_processes(config, machine, num_parameters, teacher_parameters))
    return ResourcePlan(
        parts=parts,
        machine=machine,
        num_gpus=_gpus_at_once(parts, alternating=config.takes_turns),
        num_parameters=num_parameters,
        num_prompts=num_prompts,
        total_steps=total_steps,
        # The last step is always published, even in the middle of a version.
        total_versions=None if total_steps is None else math.ceil(total_steps / steps_per_version),
        total_samples=None if total_steps is None else total_samples(config, total_steps, num_prompts),
        samples_per_step=config.trainer.ppo_mini_batch_size,
        samples_per_lease=config.samples_per_lease,
        samples_per_version=config.samples_per_version,
        max_unconsumed_samples=unconsumed,
        max_generating_samples=generating,
        max_generating_trajectories=generating * (config.rollout.n + config.rollout.over_sample.trajectories),
        max_model_len=config.max_model_len,
        validation=config.has_validation,
    )


def computing_processes(config: Config, machine: MachineResources, *, trains: bool = True) -> list[PlannedProcess]:
    """Return the processes on CPU that keep their threads busy. `trains`: False for engines alone."""
    return [
        part
        for part in _processes(config, machine, None, None)
        if part.computes and not part.gpus and (trains if part.threads_key != ENGINE_THREADS else config.mode != "sft")
    ]


def threads_at_once(parts: Sequence[PlannedProcess], *, alternating: bool) -> int:
    """Return how many threads of `parts` compute at the same time.

    `alternating`: engines and the other processes take turns, as in a synchronous run.
    """
    engines = sum(part.count * part.threads for part in parts if part.threads_key == ENGINE_THREADS)
    others = sum(part.count * part.threads for part in parts) - engines
    return max(engines, others) if alternating else engines + others


def _gpus_at_once(parts: Sequence[PlannedProcess], *, alternating: bool) -> int:
    """Return how many GPUs the parts need; `alternating`: engines and the other processes use the same ones."""
    engines = sum(part.count * part.gpus for part in parts if part.threads_key == ENGINE_THREADS)
    others = sum(part.count * part.gpus for part in parts) - engines
    return max(engines, others) if alternating else engines + others


def _processes(
    config: Config, machine: MachineResources, num_parameters: int | None, teacher_parameters: int | None
) -> Iterator[PlannedProcess]:
    rollout = config.rollout
    on_gpu = on_gpus(rollout.device, machine.gpus > 0)
    weights = None if num_parameters is None else num_parameters * _BYTES[rollout.dtype]
    cache = 0 if on_gpu else rollout.cpu_kv_cache_gib * GIB
    engine = None if weights is None else weights // rollout.replica_size + cache
    asleep = engine if engine and config.takes_turns and on_gpu else 0
    engines, threads = rollout.max_replicas * rollout.replica_size, 1 if on_gpu else rollout.cpu_threads
    yield PlannedProcess("driver", 1, 1, 0, None)
    if not config.validates_only:
        yield PlannedProcess("sample queue", 1, 1, 0, None)
        stored = None if weights is None or config.syncs_adapters else STORED_VERSIONS * weights
        yield PlannedProcess("weight store", 1, 1, 0, stored)
    yield PlannedProcess("rollouter", 1, 1, 0, None)
    if rollout.attach is None:
        key = "rollout.autoscaling.max_replicas" if rollout.autoscaling.enable else "rollout.num_replicas"
        key = "rollout.n_gpus_per_node" if rollout.num_processes else key
        yield PlannedProcess("engine (vLLM)", engines, threads, int(on_gpu), engine, True, key, ENGINE_THREADS, asleep)
    if lent := config.num_lent_replicas:
        # They compute only while the ranks do not, on the GPUs of these.
        count = lent * rollout.replica_size
        yield PlannedProcess("lent engine (vLLM)", count, threads, 0, engine, False, "trainer.num_workers")
    if config.reward_model.placement == "serve":
        replicas = config.reward_model.num_replicas
        key = "reward_model.num_replicas"
        yield PlannedProcess("reward model (Serve)", replicas, 1, int(on_gpu), None, computes=True, key=key)
    if config.validates_only:
        return
    yield PlannedProcess("trainer", 1, 1, 0, None)
    yield from _ranks(config, machine.gpus > 0, num_parameters, teacher_parameters)


def _ranks(
    config: Config, has_gpus: bool, num_parameters: int | None, teacher_parameters: int | None
) -> Iterator[PlannedProcess]:
    """Yield the training processes that the policy and other models share, and the processes of separate models.

    All models but the teacher are assumed to have the size of the policy, and so is a teacher of unknown size.
    """
    relative = teacher_parameters / num_parameters if teacher_parameters and num_parameters else 1.0
    trainer, roles = config.trainer, model_roles(config)
    number = "n_gpus_per_node" if trainer.num_processes else "num_workers"

    def process(name: str, models: Sequence[str], role: RoleConfig | None) -> PlannedProcess:
        own = role or RoleConfig()
        count, gpu = own.num_workers or trainer.num_workers, on_gpus(own.device or trainer.device, has_gpus)
        memory = offloaded = 0.0
        for model in models:
            each = _bytes_per_parameter(config, model, gpu=gpu) * (relative if model == "teacher" else 1.0)
            parts = _num_parts(config, roles.get(model), count)
            memory += each / parts
            offloaded += _offloaded_bytes(config, model, each) / parts
        keys = ("trainer" if own.num_workers is None else name, "trainer" if own.cpu_threads is None else name)
        return PlannedProcess(
            f"{name} rank",
            count,
            1 if gpu else own.cpu_threads or trainer.cpu_threads,
            int(gpu),
            None if num_parameters is None else int(num_parameters * memory),
            True,
            f"{keys[0]}.{number if keys[0] == 'trainer' else 'num_workers'}",
            f"{keys[1]}.cpu_threads",
            int((num_parameters or 0) * offloaded) if gpu else 0,
        )

    shared = [name for name, role in roles.items() if role.placement == "actor"]
    shared = [name for name in shared if _bytes_per_parameter(config, name, gpu=False)]
    yield process(" + ".join(["policy", *shared]), ["trainer", *shared], None)
    for name, role in roles.items():
        if role.placement == "own":
            yield process(name, [name], role)


def _num_parts(config: Config, role: RoleConfig | None, ranks: int) -> int:
    """Return over how many of its ranks a model is split."""
    trainer = config.trainer
    strategy = role.strategy if role and role.strategy else trainer.strategy
    if strategy in _UNSHARDED:
        return 1
    if strategy not in STRATEGIES_WITH_MESHES or strategy != trainer.strategy or trainer.fsdp_size is None:
        return ranks
    tensor = math.gcd(trainer.tensor_parallel_size, ranks)
    return math.gcd(trainer.fsdp_size, ranks // tensor) * tensor


def _is_trained(config: Config, name: str) -> bool:
    """Whether all weights of a model are trained. LoRA adapters are not counted, because they are small."""
    return name == "critic" or (name == "trainer" and config.model.lora_rank == 0)


def _bytes_per_parameter(config: Config, name: str, *, gpu: bool) -> int:
    role = model_roles(config).get(name)
    if name == "ref" and config.model.lora_rank and config.ref.placement == "actor":
        return 0
    if _is_trained(config, name):
        return _TRAINING_BYTES
    return _BYTES["float32" if role is None else role.dtype or ("bfloat16" if gpu else config.trainer.dtype)]


def _offloaded_bytes(config: Config, name: str, each: float) -> float:
    """Return how many of a model's `each` bytes per parameter are in the memory of the machine between calls."""
    trainer, role = config.trainer, model_roles(config).get(name)
    if config.shares_gpus:
        return each
    offload = trainer.param_offload if role is None or role.param_offload is None else role.param_offload
    if not _is_trained(config, name):
        return each if offload else 0
    return _BYTES["float32"] * offload + _MOMENT_BYTES * trainer.optimizer_offload


def checkpoint_bytes(config: Config, num_parameters: int) -> int:
    """Return the size of a checkpoint: weights and moments in float32 of the trained models, and the export."""
    export = 0 if config.trainer.hf_export == "never" else _EXPORT_BYTES[config.trainer.hf_export_dtype]
    policy = export + (0 if config.model.lora_rank else _SAVED_BYTES)
    return num_parameters * (policy + (_SAVED_BYTES if config.needs_critic else 0))


def shortages(plan: ResourcePlan, config: Config, *, trains: bool = True) -> Iterator[ConfigProblem]:
    """Yield a problem for each resource of which this machine has too little, at the key that demands most.

    Too few GPUs are an error: the processes would wait for them until the start fails. With too few CPUs everything is
    slow, and the memory is an estimate, so these are warnings. The memory of GPUs is compared if it is known. `trains`:
    False for engines alone.
    """
    machine, parts = plan.machine, [part for part in plan.parts if trains or part.key.startswith("rollout.")]
    if config.rollout.device == "cuda" and not machine.gpus:
        fix = "set it to auto or cpu, or point ray.address at a cluster that has GPUs"
        yield ConfigProblem("rollout.device", "cuda", no_gpu(machine.cpu_build), fix)
        return
    yield from unused_gpus(config, machine, *(["rollout.device", "trainer.device"] if trains else ["rollout.device"]))
    if machine.gpus < (wanted := _gpus_at_once(parts, alternating=config.takes_turns)):
        users = [part for part in parts if part.gpus]
        room, most = machine.gpus - wanted, max(users, key=lambda part: part.count)
        fix = _smaller(config, most, room + most.count)
        if not fix and trains and config.trainer.device != "cpu" and not config.takes_turns:
            fix = "set trainer.device=cpu, which is enough for small models"
            if machine.gpus >= _gpus_at_once(parts, alternating=True):
                fix = f"use the GPU in turns: `asyncrl launch sync` with placement=colocated; or {fix}"
        fix = fix or "use a smaller number"
        names = ", ".join(f"{part.count} for {part.name}" for part in users)
        consequence = f"{wanted} GPUs are needed ({names}), and this machine shows {machine.gpus}"
        value = configured(config, most.key)
        yield ConfigProblem(most.key, value, consequence, f"{fix}, or point ray.address at a cluster")
    busy = [part for part in parts if part.computes and not part.gpus]
    alternating = config.mode == "sync"
    if not wanted and machine.cpus < (threads := threads_at_once(busy, alternating=alternating)):
        most = max(busy, key=lambda part: part.count * part.threads)
        left = machine.cpus if alternating else machine.cpus - threads + most.count * most.threads
        key = most.threads_key if most.threads > 1 else most.key
        if left // most.count in range(1, most.threads):
            fix = f"set {most.threads_key}={left // most.count}"
        elif not (fix := _smaller(config, most, left // most.threads)) and (fewer := _smaller(config, most, left)):
            fix = f"{fewer}, and {most.threads_key}=1"
        sources = ", ".join(_thread_text(config, part) for part in busy)
        has = f"this machine has {machine.cpus} CPU{'s' * (machine.cpus > 1)}"
        consequence = f"{threads} threads compute at the same time ({sources}), and {has}: all are slow"
        yield warning(key, configured(config, key), consequence, fix or "use a machine with more CPUs")
    yield from _too_little_memory(config, machine, parts)
    yield from _too_little_gpu_memory(config, machine, parts)


def _too_little_memory(
    config: Config, machine: MachineResources, parts: Sequence[PlannedProcess]
) -> Iterator[ConfigProblem]:
    needed = sum(part.count * part.host_bytes for part in parts)
    if machine.memory_bytes is None or machine.memory_bytes >= needed:
        return
    most = max(parts, key=lambda part: part.count * part.host_bytes)
    offloads = [one for one in ("optimizer_offload", "param_offload") if getattr(config.trainer, one)]
    has = f"this machine has {machine.memory_bytes / GIB:.1f} GiB"
    what = "weights, optimizer and caches"
    key, fix = most.key, _smaller(config, most, (machine.memory_bytes - needed) // most.host_bytes + most.count)
    if most.gpus:
        what += " that are not on the GPUs all the time"
        if config.takes_turns:
            key, fix = "placement", "set it to separate, which takes more GPUs, or use a smaller model"
        elif config.lends_gpus:
            key, fix = "trainer.lend_after_s", "set it to null, or use a smaller model"
        else:
            key = f"trainer.{offloads[0]}" if offloads else "model.path"
            fix = "set it to false, with more ranks if their GPUs need it" if offloads else ""
    elif most.name.endswith(" rank"):
        fix = fix if config.trainer.strategy in _UNSHARDED else ""  # fewer ranks would have larger parts
    consequence = f"{what} need {needed / GIB:.1f} GiB of memory, and {has}"
    key = key if fix else "model.path"
    yield warning(key, configured(config, key), consequence, fix or "use a smaller model")


def _too_little_gpu_memory(
    config: Config, machine: MachineResources, parts: Sequence[PlannedProcess]
) -> Iterator[ConfigProblem]:
    for part in parts:
        if not part.gpus or not part.memory_bytes or machine.gpu_memory_bytes is None:
            continue
        is_engine = part.threads_key == ENGINE_THREADS
        room = machine.gpu_memory_bytes * (config.rollout.gpu_memory_utilization if is_engine else 1)
        if part.memory_bytes <= room:
            continue
        times = part.memory_bytes / room
        has = f"the smallest GPU of this machine has {machine.gpu_memory_bytes / GIB:.1f} GiB"
        consequence = f"each process of {part.name} needs {part.memory_bytes / GIB:.1f} GiB of a GPU, and {has}"
        if is_engine:
            key = "rollout.tensor_parallel_size"
            fix = f"set it to {math.ceil(times * config.rollout.tensor_parallel_size)} or more"
            consequence += f", of which engines may use {config.rollout.gpu_memory_utilization:.0%}"
        elif config.trainer.strategy in _UNSHARDED:
            key, fix = "trainer.strategy", "use fsdp2, which splits the model over the ranks"
        elif config.trainer.fsdp_size is not None:
            key, fix = "trainer.fsdp_size", "leave it out, so that the model is split over all ranks"
        else:
            key, fix = part.key, f"set it to {math.ceil(times * part.count)} or more"
        yield warning(key, configured(config, key), consequence, f"{fix}, or use a smaller model")


def unused_gpus(config: Config, machine: MachineResources, *keys: str) -> Iterator[ConfigProblem]:
    """Warn that a device is `auto`, and the packages cannot use this machine's GPUs."""
    automatic = [key for key in keys if configured(config, key) == "auto"]
    if machine.cpu_build and automatic:
        fix = f"set {' and '.join(f'{key}=cpu' for key in automatic)} if this is what you want"
        yield warning(automatic[0], "auto", no_gpu(machine.cpu_build), fix)


def _thread_text(config: Config, part: PlannedProcess) -> str:
    """Return the threads of a kind of process and the keys that they come from."""
    keys = " x ".join(f"{key}={configured(config, key)}" for key in (part.key, part.threads_key) if key)
    return f"{part.count * part.threads} of {part.name}: {keys}"


def _smaller(config: Config, part: PlannedProcess, most: int) -> str:
    """Return how to have at most `most` processes of a kind; empty if its key does not allow it."""
    value = configured(config, part.key) if part.key else None
    if not isinstance(value, int) or most >= part.count or (number := most * value // part.count) < 1:
        return ""
    if part.key == "rollout.n_gpus_per_node" and number % config.rollout.replica_size:
        number -= number % config.rollout.replica_size  # whole replicas
    return f"set {part.key}={number}" if number else ""


def quantity_rows(plan: ResourcePlan) -> list[tuple[str, str]]:
    """Return the plan's quantities as pairs of name and value, in words for users."""

    def number(value: int | None, source: str = "the data") -> str:
        return f"not known before {source} is read" if value is None else f"{value:,}"

    rest = (plan.total_samples or 0) % plan.samples_per_step
    smaller_last = f" (the last one with {rest:,} of {plan.samples_per_step:,} samples)" if rest else ""
    shared = plan.num_gpus < sum(part.count * part.gpus for part in plan.parts)
    gpus = f"{plan.num_gpus}, which engines and ranks use in turns" if shared else str(plan.num_gpus)
    return [
        *([("GPUs", gpus)] if plan.num_gpus else []),
        ("model parameters", number(plan.num_parameters, "the model")),
        ("training prompts, before filtering", number(plan.num_prompts)),
        ("optimizer steps", number(plan.total_steps) + smaller_last),
        ("versions published", number(plan.total_versions)),
        ("samples trained", number(plan.total_samples)),
        ("samples per step / lease / version",
         f"{plan.samples_per_step:,} / {plan.samples_per_lease:,} / {plan.samples_per_version:,}"),
        ("samples generated and not yet trained, at most", f"{plan.max_unconsumed_samples:,}"),
        ("samples (trajectories) in generation, at most",
         f"{plan.max_generating_samples:,} ({plan.max_generating_trajectories:,})"),
        ("context of an engine, tokens", f"{plan.max_model_len:,}"),
        ("validation", "yes" if plan.validation else "no"),
    ]  # fmt: skip


def process_rows(plan: ResourcePlan) -> list[tuple[str, str, str, str, str]]:
    """Return name, count, threads, GPUs and memory of each kind of process."""
    return [
        (
            part.name,
            str(part.count),
            str(part.threads),
            str(part.gpus),
            "-" if part.memory_bytes is None else f"{part.memory_bytes / GIB:.2f} GiB",
        )
        for part in plan.parts
    ]

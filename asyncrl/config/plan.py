"""What a configuration will ask of the machine and how far its parts may drift apart: `--dry-run`'s answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.problems import Problem, errors, report, warning
from asyncrl.config.schema import Config
from asyncrl.config.trainer_rules import epoch_samples, epoch_steps, fits, roles, too_few_prompts
from asyncrl.failures import ConfigError

GIB = 1024**3
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRAINING_BYTES = 4 + 4 + 8
"""A parameter's float32 master weight, gradient and two Adam moments."""
_UNSHARDED = ("local", "ddp")
"""Strategies by which every rank holds whole models."""
_VERSIONS_HELD = 3
"""Published versions in the object store: the newest, and two that replicas may still be loading."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is. `gpus`: visible ones."""

    cpus: int
    gpus: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of process. `threads` and `gpus` are of each."""

    name: str
    count: int
    threads: int
    gpus: int
    memory_bytes: int | None
    """Weights, optimizer and caches; activations and the libraries themselves come on top. None: not known."""
    computes: bool = False
    """Keeps its threads busy."""


@dataclass(frozen=True, slots=True)
class Plan:
    parts: tuple[Part, ...]
    machine: Machine
    num_parameters: int | None
    num_prompts: int | None
    """Training prompts before filtering."""
    total_steps: int | None
    total_versions: int | None
    total_samples: int | None
    """Samples trained over the run; with `total_epochs`, what the unfiltered prompts would give."""
    samples_per_step: int
    samples_per_lease: int
    samples_per_version: int
    max_unconsumed_samples: int
    """What pacing lets be generated and not yet trained: `(1 + staleness_threshold) x samples_per_version`."""
    max_generating_samples: int
    max_generating_trajectories: int
    max_model_len: int
    validation: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: Config, machine: Machine, *, num_parameters: int | None, num_prompts: int | None) -> Plan:
    """The plan of `config` on `machine`; `num_prompts` before filtering, None where unknown.

    Raises:
        ConfigError: there are too few prompts for a step.
    """
    total_steps = config.trainer.total_training_steps
    if total_steps is None and num_prompts is not None:
        total_steps = training_steps(config, num_prompts)
    steps_per_version = config.steps_per_lease * config.async_training.trigger_parameter_sync_step
    # An admission needs fed - dropped < bound, so a fractional bound rounds up.
    unconsumed = math.ceil((1 + config.async_training.staleness_threshold) * config.samples_per_version)
    over = config.rollout.over_sample
    under_way = unconsumed + math.ceil(over.samples * config.samples_per_version)
    generating = min(under_way, config.rollout.max_concurrent_samples)
    return Plan(
        parts=tuple(_parts(config, machine, num_parameters)),
        machine=machine,
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
        max_generating_trajectories=generating * (config.rollout.n + over.trajectories),
        max_model_len=config.max_model_len,
        validation=config.has_validation,
    )


def training_steps(config: Config, num_prompts: int) -> int:
    """Optimizer steps of the whole run, with `num_prompts` an epoch (after filtering). They are what learning rates
    decay over.

    Raises:
        ConfigError: the prompts do not fill a step, or only the critic's warm-up.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    steps = epoch_steps(config, num_prompts)
    found = errors(fits(config, steps)) if steps else [too_few_prompts(config, num_prompts)]
    if found:
        raise ConfigError(report(found))
    return steps


def total_samples(
    config: Config, total_steps: int, num_prompts: int | None, *, step: int = 0, trained_samples: int = 0
) -> int:
    """Samples that the run trains on in all, earlier parts included: pacing admits no more, what is dropped aside.

    Every pass (`trainer.ppo_epochs`) over a lease takes the same ones. A stop in the middle of a lease may have left
    out passes over samples that are trained already. The steps which these would have been take other samples, so a run
    that goes on may need more than it did at first; but never more than the epochs have, where they decide the length.

    Args:
        num_prompts: of an epoch, after filtering; may be None with `trainer.total_training_steps`.
        step: of the checkpoint that the run goes on from, as is `trained_samples`.
    """
    mini_batches = math.ceil(max(0, total_steps - step) / config.trainer.ppo_epochs)
    samples = trained_samples + mini_batches * config.trainer.ppo_mini_batch_size
    if config.trainer.total_training_steps is None and num_prompts is not None:
        return min(samples, epoch_samples(config, num_prompts))
    return samples


def validation_due(test_freq: int, *, validated_step: int, step: int) -> bool:
    """Whether the weights of `step` are to be validated: a multiple of `trainer.test_freq` lies behind
    `validated_step`, the newest step that was (0: none), and not behind `step`."""
    return test_freq > 0 and step // test_freq > validated_step // test_freq


def _parts(config: Config, machine: Machine, num_parameters: int | None) -> Iterator[Part]:
    on_gpu = machine.gpus > 0
    weights = None if num_parameters is None else num_parameters * _BYTES[config.rollout.dtype]
    cache = 0 if on_gpu else config.rollout.cpu_kv_cache_gib * GIB
    engine = None if weights is None else weights // config.rollout.tensor_parallel_size + cache
    ranks = config.rollout.num_replicas * config.rollout.tensor_parallel_size
    threads = 1 if on_gpu else config.rollout.cpu_threads
    yield Part("driver", 1, 1, 0, None)
    yield Part("sample queue", 1, 1, 0, None)
    yield Part("weight store", 1, 1, 0, None if weights is None else _VERSIONS_HELD * weights)
    yield Part("rollouter", 1, 1, 0, None)
    yield Part("engine (vLLM)", ranks, threads, int(on_gpu), engine, computes=True)
    if config.reward_model.placement == "serve":
        yield Part("reward model (Serve)", config.reward_model.num_replicas, 1, int(on_gpu), None, computes=True)
    yield Part("trainer", 1, 1, 0, None)
    yield from _ranks(config, on_gpu, num_parameters)


def _ranks(config: Config, on_gpu: bool, num_parameters: int | None) -> Iterator[Part]:
    """The training processes: the policy's, with the models that share them, and those of models apart."""
    trainer, others = config.trainer, roles(config)
    inside = [name for name, role in others.items() if role.placement == "actor"]
    shared = {name: size for name in inside if (size := _model_bytes(config, name))}
    policy = _rank_bytes(
        num_parameters, _model_bytes(config, "trainer") + sum(shared.values()), trainer.strategy, trainer.num_workers
    )
    gpu = _takes_gpu(trainer.device, on_gpu)
    threads = 1 if gpu else trainer.cpu_threads
    yield Part(" + ".join(["policy", *shared]) + " rank", trainer.num_workers, threads, int(gpu), policy, computes=True)
    for name, role in others.items():
        if role.placement == "own":
            count, device = role.num_workers or trainer.num_workers, role.device or trainer.device
            gpu = _takes_gpu(device, on_gpu)
            threads = 1 if gpu else role.cpu_threads or trainer.cpu_threads
            memory = _rank_bytes(num_parameters, _model_bytes(config, name), role.strategy or trainer.strategy, count)
            yield Part(f"{name} rank", count, threads, int(gpu), memory, computes=True)


def _model_bytes(config: Config, name: str) -> int:
    """Of each parameter. With LoRA the adapters, which alone are trained, are small beside the weights."""
    lora = config.model.lora_rank > 0
    if name == "ref" and lora and config.ref.placement == "actor":
        return 0
    trained = name == "critic" or (name == "trainer" and not lora)
    return _TRAINING_BYTES if trained else _BYTES["float32"]


def _rank_bytes(num_parameters: int | None, model_bytes: int, strategy: str, num_ranks: int) -> int | None:
    """Models besides the policy are taken to be of its size."""
    if num_parameters is None:
        return None
    return num_parameters * model_bytes // (1 if strategy in _UNSHARDED else num_ranks)


def _takes_gpu(device: str, on_gpu: bool) -> bool:
    return device == "cuda" or (device == "auto" and on_gpu)


def problems(plan: Plan) -> list[Problem]:
    """Where the machine seems too small; warnings, because a cluster may be larger and a guess is a guess."""
    return list(_shortages(plan))


def _shortages(plan: Plan) -> Iterator[Problem]:
    gpus = sum(part.count * part.gpus for part in plan.parts)
    if gpus > plan.machine.gpus:
        yield warning(
            "resources",
            f"{gpus} GPUs",
            f"this machine shows {plan.machine.gpus}",
            "lower trainer.num_workers, rollout.num_replicas, rollout.tensor_parallel_size or "
            "reward_model.num_replicas, or point ray.address at a cluster",
        )
    busy = sum(part.count * part.threads for part in plan.parts if part.computes)
    if not gpus and busy > plan.machine.cpus:
        yield warning(
            "resources",
            f"{busy} computing threads",
            f"this machine has {plan.machine.cpus} CPUs, so engines and Trainer slow each other down",
            "lower rollout.cpu_threads, trainer.cpu_threads, trainer.num_workers or rollout.num_replicas",
        )
    needed = sum(part.count * (part.memory_bytes or 0) for part in plan.parts if not part.gpus)
    available = plan.machine.memory_bytes
    if available is not None and needed > available:
        yield warning(
            "resources",
            f"{needed / GIB:.1f} GiB",
            f"this machine has {available / GIB:.1f} GiB of memory",
            "take a smaller model, fewer replicas or a smaller rollout.cpu_kv_cache_gib",
        )


def rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan's quantities for people, as name and value."""

    def number(value: int | None) -> str:
        return "not known before the data is read" if value is None else f"{value:,}"

    parameters = "not known before the model is read" if plan.num_parameters is None else f"{plan.num_parameters:,}"
    return [
        ("model parameters", parameters),
        ("training prompts, before filtering", number(plan.num_prompts)),
        ("optimizer steps", number(plan.total_steps) + _smaller_last(plan)),
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


def _smaller_last(plan: Plan) -> str:
    rest = (plan.total_samples or 0) % plan.samples_per_step
    return f" (the last one with {rest:,} of {plan.samples_per_step:,} samples)" if rest else ""


def part_rows(plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """Name, count, threads, GPUs and memory of each kind of process."""
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

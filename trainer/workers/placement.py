"""Plan which models the Trainer runs, and in which processes, from the configuration. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from asyncrl.config.resources.placement import RANK_SHARE, Gang, rank_gang
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import Device, Dtype
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig, RoleConfig
from trainer.engines.base import EngineSpec, ModelType

Role = Literal["actor", "ref", "teacher", "critic", "reward_model"]


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A model that runs on every rank of its group."""

    role: Role
    spec: EngineSpec
    weights_dtype: Dtype
    """Dtype of published weights."""

    def spec_on(self, device: Literal["cpu", "cuda"]) -> EngineSpec:
        """Return the specification of the engine on ranks of this device."""
        return replace(self.spec, engine=self.spec.engine.model_copy(update={"device": device}))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Ranks that share one process group, and the models that each of them has."""

    name: str
    num_ranks: int
    device: Device
    cpu_threads: int
    """Threads of each rank, and the CPUs that it reserves on a shared cluster: the maximum over its models."""
    per_node: int | None
    """Ranks on each node; None: on as few nodes as possible."""
    node_labels: Mapping[str, str]
    """Labels of the nodes that may have ranks."""
    roles: tuple[RolePlan, ...]
    gpu_share: float = 1.0
    """Share of a GPU that each rank on GPUs reserves."""

    @property
    def shares_gpus(self) -> bool:
        """Whether engines have the other shares."""
        return self.gpu_share < 1

    def gang(self, *, cpus: bool, gpu: bool) -> Gang:
        """Return the resources of the ranks and the nodes that may have them.

        Args:
            cpus: whether their CPUs are reserved.
            gpu: whether they run on GPUs.
        """
        return rank_gang(
            f"{self.name} rank",
            self.section,
            num_ranks=self.num_ranks,
            per_node=self.per_node,
            cpus=self.cpu_threads * cpus,
            gpus=self.gpu_share * gpu,
            node_labels=self.node_labels,
        )

    @property
    def section(self) -> str:
        """The configuration section with `num_workers` and `device` of this group."""
        return {"actor": "trainer", "reward_model": "reward_model.worker"}.get(self.name, self.name)


class RoleRow(NamedTuple):
    """The configuration of a role besides the actor."""

    role: Role
    model_type: ModelType
    needed: bool
    settings: RoleConfig
    path: str | None
    """The path of its model; None: the policy's."""
    optim: OptimConfig | None
    """None: forward only."""


def plan_groups(config: Config) -> list[GroupPlan]:
    """Return the actor's group, then a group for each role with `placement: own`."""
    ref, teacher, critic, reward = config.ref, config.teacher, config.critic, config.reward_model
    needs_ref = config.needs_reference and not reference_is_actor(config)
    rows = (
        RoleRow("ref", "language_model", needs_ref, ref, None, None),
        RoleRow("teacher", "language_model", config.needs_teacher, teacher, teacher.path, None),
        RoleRow("critic", "value_model", config.needs_critic, critic, critic.path, critic.optim),
        RoleRow("reward_model", "reward_model", reward.placement == "worker", reward.worker, reward.path, None),
    )
    actor = EngineSpec(
        "language_model",
        config.model,
        EngineConfig.model_validate(config.trainer.model_dump(include=set(EngineConfig.model_fields))),
        config.trainer.optim,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        router_aux_loss_coef=config.trainer.router_aux_loss_coef,
        adapters_only=config.syncs_adapters,
        collective_s=config.timeouts.collective_s,
    )
    groups = {"actor": [RolePlan("actor", actor, config.rollout.dtype)]}
    for row in rows:
        if row.needed:
            name = "actor" if row.settings.placement == "actor" else row.role
            groups.setdefault(name, []).append(RolePlan(row.role, _spec(config, row, actor), config.rollout.dtype))
    return [_group(config, name, plans) for name, plans in groups.items()]


def reference_is_actor(config: Config) -> bool:
    """Return whether reference log-probs come from the policy without its LoRA adapters, so that no second model is
    loaded."""
    return config.needs_reference and config.model.lora_rank > 0 and config.ref.placement == "actor"


def _group(config: Config, name: str, plans: list[RolePlan]) -> GroupPlan:
    engines = [plan.spec.engine for plan in plans]
    return GroupPlan(
        name,
        engines[0].num_workers,
        engines[0].device,
        cpu_threads=max(engine.cpu_threads for engine in engines),
        per_node=config.trainer.n_gpus_per_node if name == "actor" else None,
        node_labels=config.trainer.node_labels,
        roles=tuple(plans),
        gpu_share=RANK_SHARE if config.shares_gpus else 1.0,
    )


def _spec(config: Config, row: RoleRow, actor: EngineSpec) -> EngineSpec:
    """Return the specification of another role. It has no LoRA: all weights of a critic are trained, because a value
    head needs more than adapters."""
    changes: dict[str, Any] = {"path": row.path or config.model.path, "lora_rank": 0}
    if row.role == "reward_model":
        changes["trust_remote_code"] = config.reward_model.trust_remote_code
    return replace(
        actor,
        model_type=row.model_type,
        model=config.model.model_copy(update=changes),
        engine=_engine(row, actor.engine),
        optim=row.optim,
        router_aux_loss_coef=0.0,
        adapters_only=False,
        bfloat16_on_gpu=row.optim is None and row.settings.dtype is None,
        path_key="model.path" if row.path is None else f"{row.role}.path",
    )


def _engine(row: RoleRow, actor: EngineConfig) -> EngineConfig:
    """Return the actor's engine settings with the changes of the role. In the actor's ranks, the number of ranks, the
    device and the threads are those of the actor."""
    own = row.settings.model_dump(include=set(EngineConfig.model_fields), exclude_none=True)
    if row.optim is None:
        own |= {"gradient_checkpointing": False, "activation_offload": False, "optimizer_offload": False}
    if row.settings.strategy not in (None, actor.strategy):
        own |= {"fsdp_size": None, "tensor_parallel_size": 1}  # other backends do not have them
    if row.settings.placement == "actor":
        own = {key: value for key, value in own.items() if key not in ("num_workers", "device", "cpu_threads")}
        return actor.model_copy(update=own)
    merged = actor.model_copy(update=own)
    # The trainer's sizes may not divide this role's number of ranks. Results do not depend on them.
    degree = math.gcd(merged.ulysses_sequence_parallel_size, merged.num_workers)
    tensor = math.gcd(merged.tensor_parallel_size, merged.num_workers)
    parts = None if merged.fsdp_size is None else math.gcd(merged.fsdp_size, merged.num_workers // tensor)
    sizes = {"ulysses_sequence_parallel_size": degree, "tensor_parallel_size": tensor, "fsdp_size": parts}
    return merged.model_copy(update=sizes)

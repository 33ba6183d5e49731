"""Plan which models the Trainer runs, and in which processes, from the configuration. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.config.sections.base import Dtype
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig, RoleConfig

Role = Literal["actor", "ref", "critic", "reward_model"]

_MODEL_TYPES: dict[Role, Literal["language_model", "value_model", "reward_model"]] = {
    "actor": "language_model",
    "ref": "language_model",
    "critic": "value_model",
    "reward_model": "reward_model",
}


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A model that runs on every rank of its group: the fields of `trainer.engines.base.EngineSpec`, without torch."""

    role: Role
    model: ModelConfig
    path_key: str
    """The configuration key of the model's path."""
    engine: EngineConfig
    optim: OptimConfig | None
    """None: forward only."""
    temperature: float
    seed: int
    weights_dtype: Dtype
    """Dtype of published weights."""

    @property
    def model_type(self) -> Literal["language_model", "value_model", "reward_model"]:
        return _MODEL_TYPES[self.role]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Ranks that share one process group, and the models that each of them has."""

    name: str
    num_ranks: int
    device: Literal["auto", "cpu", "cuda"]
    cpu_threads: int
    """Number of CPUs of each rank on CPU: the maximum over its models."""
    roles: tuple[RolePlan, ...]

    @property
    def section(self) -> str:
        """The configuration section with `num_workers` and `device` of this group."""
        return {"actor": "trainer", "reward_model": "reward_model.worker"}.get(self.name, self.name)


def plan_groups(config: Config) -> list[GroupPlan]:
    """Return the actor's group, then a group for each role with `placement: own`."""
    others = _other_roles(config)
    inside = [plan for plan, settings in others if settings.placement == "actor"]
    outside = [plan for plan, settings in others if settings.placement == "own"]
    return [_group("actor", [_actor(config), *inside])] + [_group(plan.role, [plan]) for plan in outside]


def reference_is_actor(config: Config) -> bool:
    """Return whether reference log-probs come from the policy without its LoRA adapters, so that no second model is
    loaded."""
    return config.needs_reference and config.model.lora_rank > 0 and config.ref.placement == "actor"


def _other_roles(config: Config) -> list[tuple[RolePlan, RoleConfig]]:
    roles: list[tuple[RolePlan, RoleConfig]] = []
    if config.needs_reference and not reference_is_actor(config):
        roles.append((_forward_only("ref", config, config.ref, None), config.ref))
    if config.needs_critic:
        roles.append((_critic(config), config.critic))
    if config.reward_model.placement == "worker":
        plan = _forward_only("reward_model", config, config.reward_model.worker, config.reward_model.path)
        roles.append((plan, config.reward_model.worker))
    return roles


def _group(name: str, roles: list[RolePlan]) -> GroupPlan:
    first = roles[0].engine
    threads = max(plan.engine.cpu_threads for plan in roles)
    return GroupPlan(name, first.num_workers, first.device, threads, tuple(roles))


def _actor(config: Config) -> RolePlan:
    return _plan("actor", config, config.model, _trainer_engine(config), config.trainer.optim)


def _critic(config: Config) -> RolePlan:
    """Plan the critic. It uses no LoRA: all of its weights are trained, because a value head needs more than
    adapters."""
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path, "lora_rank": 0})
    plan = _plan("critic", config, model, _role_engine(config, config.critic), config.critic.optim)
    return plan if config.critic.path is None else replace(plan, path_key="critic.path")


def _forward_only(role: Role, config: Config, settings: RoleConfig, path: str | None) -> RolePlan:
    """Plan a role without an optimizer. `path`: the path of its model; None: the policy's."""
    changes: dict[str, Any] = {"path": path or config.model.path, "lora_rank": 0}
    if role == "reward_model":
        changes["trust_remote_code"] = config.reward_model.trust_remote_code
    engine = _role_engine(config, settings).model_copy(
        update={"gradient_checkpointing": False, "activation_offload": False, "optimizer_offload": False}
    )
    plan = _plan(role, config, config.model.model_copy(update=changes), engine, None)
    return plan if path is None else replace(plan, path_key=f"{role}.path")


def _plan(role: Role, config: Config, model: ModelConfig, engine: EngineConfig, optim: OptimConfig | None) -> RolePlan:
    temperature, dtype = config.rollout.sampling.temperature, config.rollout.dtype
    return RolePlan(role, model, "model.path", engine, optim, temperature, config.seed, dtype)


def _trainer_engine(config: Config) -> EngineConfig:
    return EngineConfig.model_validate(config.trainer.model_dump(include=set(EngineConfig.model_fields)))


def _role_engine(config: Config, settings: RoleConfig) -> EngineConfig:
    """Return the trainer's engine settings with the changes of the role. In the actor's ranks, the number of ranks, the
    device and the threads are those of the actor."""
    engine = _trainer_engine(config)
    own = settings.model_dump(include=set(EngineConfig.model_fields), exclude_none=True)
    if settings.placement == "actor":
        own = {key: value for key, value in own.items() if key not in ("num_workers", "device", "cpu_threads")}
        return engine.model_copy(update=own)
    merged = engine.model_copy(update=own)
    # The trainer's degree may not divide this role's number of ranks. Results do not depend on the degree.
    degree = math.gcd(merged.ulysses_sequence_parallel_size, merged.num_workers)
    return merged.model_copy(update={"ulysses_sequence_parallel_size": degree})

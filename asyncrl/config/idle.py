"""Keys that have no effect under what other keys say: somebody who writes one believes otherwise. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from asyncrl.config import algorithm_rules, multi_turn_rules, reward_rules
from asyncrl.config.keys import leaves
from asyncrl.config.problems import Given, Problem
from asyncrl.config.schema import Config, RoleConfig

Idle = tuple[str, Callable[[Config], bool], str, str]
"""Key, which may end in `*`; when it has no effect; because; what to do."""


def no_effect(config: Config, given: Given) -> Iterator[Problem]:
    """A problem for each given key that is idle; the first entry that fits tells why."""
    values = leaves(config.model_dump(mode="json"))
    for key in sorted(set(given) & values.keys()):
        for pattern, idle, because, fix in IDLE:
            if fnmatchcase(key, pattern) and idle(config):
                yield Problem(key, values[key], f"it would have no effect: {because}", f"{fix}, or leave this key out")
                break


def _elsewhere(name: str, settings: Callable[[Config], RoleConfig]) -> Iterator[Idle]:
    """Keys of a role that count only in processes of its own."""
    for key in ("num_workers", "device", "cpu_threads"):
        yield (
            f"{name}.{key}",
            lambda config: settings(config).placement == "actor",
            f"{name}.placement is actor, so trainer.{key} holds for this model too",
            f"set {name}.placement=own",
        )


def _for_gpus() -> Iterator[Idle]:
    for key in ("activation_offload", "param_offload", "optimizer_offload", "use_liger"):
        yield (
            f"trainer.{key}",
            lambda config: config.trainer.device == "cpu",
            "trainer.device is cpu, and it is for GPUs",
            "set trainer.device=cuda",
        )


IDLE: tuple[Idle, ...] = (
    ("async_training.stale_action", lambda c: c.async_training.max_staleness is None,
     "async_training.max_staleness is null, so nothing is ever too stale", "set async_training.max_staleness too"),
    ("async_training.partial_mode", lambda c: c.mode != "sync" and not c.async_training.partial_rollout,
     "async_training.partial_rollout is false, so no response goes on under new weights",
     "set async_training.partial_rollout=true"),
    ("weight_sync.clear_kv_cache",
     lambda c: c.mode != "sync" and (not c.async_training.partial_rollout or c.async_training.partial_mode != "keep"),
     "no response keeps its KV cache over a sync",
     "set async_training.partial_rollout=true and async_training.partial_mode=keep"),
    ("reward_model.*", lambda c: c.reward_model.placement == "off",
     "reward_model.placement is off", "set reward_model.placement to serve or worker"),
    ("reward_model.worker.*", lambda c: c.reward_model.placement != "worker",
     "reward_model.placement is not worker", "set reward_model.placement=worker"),
    ("reward_model.num_replicas", lambda c: c.reward_model.placement != "serve",
     "reward_model.placement is not serve", "set reward_model.placement=serve"),
    ("reward_model.max_batch_size", lambda c: c.reward_model.placement != "serve",
     "reward_model.placement is not serve", "set reward_model.placement=serve"),
    *_elsewhere("reward_model.worker", lambda c: c.reward_model.worker),
    ("ref.*", lambda c: not c.needs_reference,
     "nothing asks for a reference model", "set algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true"),
    ("ref.*", lambda c: c.model.lora_rank > 0 and c.ref.placement == "actor",
     "with LoRA the reference is the policy without its adapters", "set ref.placement=own"),
    *_elsewhere("ref", lambda c: c.ref),
    ("critic.*", lambda c: not c.needs_critic,
     "only algorithm.adv_estimator=gae has a critic", "set algorithm.adv_estimator=gae"),
    ("critic.optim.min_lr_ratio", lambda c: c.critic.optim.decay == "constant",
     "critic.optim.decay is constant", "set critic.optim.decay to linear or cosine"),
    *_elsewhere("critic", lambda c: c.critic),
    ("model.lora_alpha", lambda c: c.model.lora_rank == 0, "model.lora_rank is 0", "set model.lora_rank"),
    ("model.target_modules", lambda c: c.model.lora_rank == 0, "model.lora_rank is 0", "set model.lora_rank"),
    ("trainer.optim.min_lr_ratio", lambda c: c.trainer.optim.decay == "constant",
     "trainer.optim.decay is constant", "set trainer.optim.decay to linear or cosine"),
    *_for_gpus(),
    ("ray.object_store_memory_bytes", lambda c: c.ray.address is not None,
     "the cluster at ray.address has its own object store", "leave one of the two out"),
    *algorithm_rules.IDLE,
    *reward_rules.IDLE,
    *multi_turn_rules.IDLE,
)  # fmt: skip
"""Of entries for the same key, the one that tells more comes first."""

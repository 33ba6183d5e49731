"""The placement of models in groups of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.trainer import EngineConfig
from trainer.workers.placement import RolePlan, plan_groups, reference_is_actor

LORA = {"model": {"path": "policy", "lora_rank": 8}}
KL = {"algorithm": {"use_kl_loss": True}}
CRITIC = {"algorithm": {"adv_estimator": "gae"}}
REWARD = {"reward_model": {"placement": "worker", "path": "scorer"}}


def layout(config: Config) -> dict[str, tuple[str, ...]]:
    return {group.name: tuple(plan.role for plan in group.roles) for group in plan_groups(config)}


def find(config: Config, role: str) -> RolePlan:
    return next(plan for group in plan_groups(config) for plan in group.roles if plan.role == role)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"actor": ("actor",)}),
        (KL, {"actor": ("actor", "ref")}),
        ({"algorithm": {"use_kl_in_reward": True}}, {"actor": ("actor", "ref")}),
        (KL | {"ref": {"placement": "own"}}, {"actor": ("actor",), "ref": ("ref",)}),
        (KL | LORA, {"actor": ("actor",)}),
        (KL | LORA | {"ref": {"placement": "own"}}, {"actor": ("actor",), "ref": ("ref",)}),
        (CRITIC, {"actor": ("actor", "critic")}),
        (CRITIC | {"critic": {"placement": "own"}}, {"actor": ("actor",), "critic": ("critic",)}),
        ({"teacher": {"path": "large"}}, {"actor": ("actor", "teacher")}),
        ({"teacher": {"path": "large", "placement": "own"}}, {"actor": ("actor",), "teacher": ("teacher",)}),
        (CRITIC | REWARD, {"actor": ("actor", "critic", "reward_model")}),
        ({"reward_model": {"placement": "serve", "path": "scorer"}}, {"actor": ("actor",)}),
    ],
)
def test_roles_are_placed_in_groups(sections: dict[str, Any], expected: dict[str, tuple[str, ...]]) -> None:
    assert layout(Config.model_validate(sections)) == expected


def test_the_reference_is_the_actor_only_with_adapters_in_the_same_ranks() -> None:
    assert reference_is_actor(Config.model_validate(KL | LORA))
    assert not reference_is_actor(Config.model_validate(LORA))
    assert not reference_is_actor(Config.model_validate(KL))
    assert not reference_is_actor(Config.model_validate(KL | LORA | {"ref": {"placement": "own"}}))


def test_each_role_has_its_model() -> None:
    config = Config.model_validate(
        CRITIC
        | REWARD
        | LORA
        | {"critic": {"optim": {"lr": 3e-5}}, "trainer": {"optim": {"lr": 1e-6}, "gradient_checkpointing": True}}
        | {"seed": 7, "rollout": {"dtype": "bfloat16", "sampling": {"temperature": 0.7}}}
    )
    actor, critic, scorer = (find(config, role) for role in ("actor", "critic", "reward_model"))
    assert [plan.spec.model_type for plan in (actor, critic, scorer)] == [
        "language_model",
        "value_model",
        "reward_model",
    ]
    assert [plan.spec.model.path for plan in (actor, critic, scorer)] == ["policy", "policy", "scorer"]
    assert [plan.spec.path_key for plan in (actor, critic, scorer)] == ["model.path", "model.path", "reward_model.path"]
    assert [plan.spec.model.lora_rank for plan in (actor, critic, scorer)] == [8, 0, 0]
    assert actor.spec.optim is not None
    assert critic.spec.optim is not None
    assert scorer.spec.optim is None
    assert (actor.spec.optim.lr, critic.spec.optim.lr) == (1e-6, 3e-5)
    assert [plan.spec.engine.gradient_checkpointing for plan in (actor, critic, scorer)] == [True, True, False]
    assert (actor.spec.temperature, actor.spec.seed, actor.weights_dtype) == (0.7, 7, "bfloat16")


def test_code_of_a_model_directory_runs_only_if_its_role_allows_it() -> None:
    config = Config.model_validate(REWARD | {"model": {"trust_remote_code": True}})
    assert not find(config, "reward_model").spec.model.trust_remote_code
    config = Config.model_validate({"reward_model": REWARD["reward_model"] | {"trust_remote_code": True}})
    assert find(config, "reward_model").spec.model.trust_remote_code
    assert not find(config, "actor").spec.model.trust_remote_code


@given(
    own=st.fixed_dictionaries(
        {},
        optional={
            "strategy": st.sampled_from(["ddp", "local"]),
            "num_workers": st.integers(1, 12),
            "device": st.sampled_from(["cpu", "cuda"]),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
            "cpu_threads": st.integers(1, 4),
            "ppo_max_token_len": st.integers(1, 1 << 15),
            "param_offload": st.booleans(),
        },
    ),
    degree=st.sampled_from([1, 2, 4]),
)
def test_unset_keys_of_a_role_are_those_of_the_trainer(own: dict[str, Any], degree: int) -> None:
    trainer = {"num_workers": 4, "cpu_threads": 3, "ulysses_sequence_parallel_size": degree, "device": "cpu"}
    for placement in ("actor", "own"):
        settings = own | {"placement": placement}
        config = Config.model_validate(KL | {"ref": settings, "trainer": trainer})
        engine = find(config, "ref").spec.engine
        assert type(engine) is EngineConfig
        of_the_ranks = {"num_workers", "device", "cpu_threads"} if placement == "actor" else set()
        for key in EngineConfig.model_fields.keys() - {"ulysses_sequence_parallel_size"}:
            wanted = own[key] if key in own and key not in of_the_ranks else getattr(config.trainer, key)
            assert getattr(engine, key) == wanted, key
        assert engine.num_workers % engine.ulysses_sequence_parallel_size == 0
        assert engine.ulysses_sequence_parallel_size <= degree
        group = plan_groups(config)[-1]
        assert (group.num_ranks, group.device) == (engine.num_workers, engine.device)
        assert group.cpu_threads == max(plan.spec.engine.cpu_threads for plan in group.roles)


def test_models_that_are_not_trained_are_in_bfloat16_on_a_gpu_unless_their_dtype_is_set() -> None:
    algorithm = {"adv_estimator": "gae", "use_kl_loss": True}
    teacher = {"path": "teacher", "dtype": "float32"}
    config = Config.model_validate({"algorithm": algorithm, "teacher": teacher})
    roles: list[Any] = ["actor", "critic", "ref", "teacher"]
    assert [find(config, role).spec.bfloat16_on_gpu for role in roles] == [False, False, True, False]


def test_errors_of_a_critic_with_a_separate_path_name_its_key() -> None:
    plan = find(Config.model_validate({**CRITIC, "critic": {"path": "judge"}}), "critic")
    assert (plan.spec.model.path, plan.spec.path_key) == ("judge", "critic.path")


def test_each_group_has_the_section_that_sets_its_ranks() -> None:
    own = {"placement": "own"}
    reward = {"reward_model": {"placement": "worker", "path": "scorer", "worker": own}}
    algorithm = {"adv_estimator": "gae", "use_kl_loss": True}
    groups = plan_groups(Config.model_validate({"algorithm": algorithm, "critic": own, "ref": own, **reward}))
    assert {group.name: group.section for group in groups} == {
        "actor": "trainer", "ref": "ref", "critic": "critic", "reward_model": "reward_model.worker",
    }  # fmt: skip

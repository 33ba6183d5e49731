"""The length of runs and the resource plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.compose import load_config
from asyncrl.config.environment import num_parameters as count_parameters
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.resources.plan import (
    GIB,
    STORED_VERSIONS,
    MachineResources,
    ResourcePlan,
    make_plan,
    process_rows,
    quantity_rows,
    shortages,
    total_samples,
    training_steps,
    validation_due,
)
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import num_prompts as count_prompts
from asyncrl.core.failures import ConfigError
from asyncrl.weights.object_store import NUM_KEPT_VERSIONS
from tests.fakes.configurations import config_with, single

LAPTOP = MachineResources(cpus=2, gpus=0, memory_bytes=16 * GIB)
STEPS, SIZE, PASSES = "trainer.total_training_steps", "trainer.ppo_mini_batch_size", "trainer.ppo_epochs"


def plan_of(
    config: Config, machine: MachineResources = LAPTOP, *, num_parameters: int | None = 1000, prompts: int | None = None
) -> ResourcePlan:
    return make_plan(config, machine, num_parameters=num_parameters, num_prompts=prompts)


def test_counts_follow_from_the_config() -> None:
    config = config_with(
        {SIZE: 4, STEPS: 27, "async_training.require_batches": 3, "async_training.trigger_parameter_sync_step": 2,
         "async_training.staleness_threshold": 0.5, "rollout.n": 5, "rollout.max_concurrent_samples": 7}
    )  # fmt: skip
    plan = plan_of(config, prompts=100)
    assert (plan.samples_per_step, plan.samples_per_lease, plan.samples_per_version) == (4, 12, 24)
    assert (plan.total_steps, plan.total_samples) == (27, 108)
    assert plan.total_versions == 5  # 27 steps are 9 leases: four versions of two leases, and a last version of one
    assert plan.max_unconsumed_samples == 36
    assert (plan.max_generating_samples, plan.max_generating_trajectories) == (7, 35)
    assert plan.max_model_len == config.data.max_prompt_length + config.rollout.response_length


def test_a_run_of_no_steps_has_engines_and_a_rollouter() -> None:
    plan = plan_of(config_with({STEPS: 0}), prompts=0)
    assert [part.name for part in plan.parts] == ["driver", "rollouter", "engine (vLLM)"]
    assert (plan.total_steps, plan.total_versions, plan.total_samples) == (0, 0, 0)


def test_passes_over_a_lease_are_steps_on_the_same_samples() -> None:
    plan = plan_of(config_with({SIZE: 4, PASSES: 2, STEPS: 30, "async_training.require_batches": 3}), prompts=100)
    assert (plan.total_samples, plan.samples_per_lease, plan.total_versions) == (60, 12, 5)
    epochs = config_with({SIZE: 4, PASSES: 2, STEPS: None, "trainer.total_epochs": 3})
    assert training_steps(epochs, 8) == 3 * 2 * 2


def rank_bytes(changes: dict[str, Any], gpus: int = 0) -> dict[str, float]:
    """Return the bytes per parameter of each training process."""
    plan = plan_of(config_with(changes), MachineResources(64, gpus))
    return {part.name: (part.memory_bytes or 0) / 1000 for part in plan.parts if "rank" in part.name}


def test_ranks_have_the_parts_into_which_their_engine_splits_a_model() -> None:
    eight, key = {"trainer.num_workers": 8, "trainer.strategy": "fsdp2"}, "policy rank"
    assert rank_bytes(eight)[key] == 2
    assert rank_bytes(eight | {"trainer.fsdp_size": 2})[key] == 8
    assert rank_bytes(eight | {"trainer.fsdp_size": 2, "trainer.tensor_parallel_size": 2})[key] == 4
    assert rank_bytes(eight | {"trainer.fsdp_size": 2, "trainer.strategy": "torchtitan"})[key] == 8
    assert rank_bytes(eight | {"trainer.strategy": "megatron_layers"})[key] == 16
    assert rank_bytes(eight | {"trainer.strategy": "fsdp"})[key] == 2
    reference = {"algorithm.use_kl_loss": True, "ref.strategy": "ddp"}
    assert rank_bytes(eight | reference) == {"policy + ref rank": 2 + 4}
    own = eight | {"algorithm.use_kl_loss": True, "ref.placement": "own", "ref.num_workers": 4, "trainer.fsdp_size": 8}
    assert rank_bytes(own) == {"policy rank": 2, "ref rank": 1}


def test_models_that_are_not_trained_have_half_precision_on_gpus() -> None:
    """As `trainer.engines.torch_engine` loads them."""
    reference = {"algorithm.use_kl_loss": True}
    assert rank_bytes(reference) == {"policy + ref rank": 16 + 4}
    assert rank_bytes(reference, gpus=8) == {"policy + ref rank": 16 + 2}
    assert rank_bytes(reference | {"trainer.dtype": "bfloat16"}) == {"policy + ref rank": 16 + 2}
    assert rank_bytes(reference | {"ref.dtype": "float32"}, gpus=8) == {"policy + ref rank": 16 + 4}
    assert rank_bytes({"model.lora_rank": 8}, gpus=8) == {"policy rank": 4}


def test_the_weight_store_holds_the_versions_that_the_object_store_needs_room_for() -> None:
    assert STORED_VERSIONS == NUM_KEPT_VERSIONS + 2
    sizes = {part.name: part.memory_bytes for part in plan_of(config_with({"rollout.dtype": "bfloat16"})).parts}
    assert sizes["weight store"] == STORED_VERSIONS * 2000
    adapters = {"weight_sync.lora": "adapter", "model.lora_rank": 8}
    assert {part.name: part.memory_bytes for part in plan_of(config_with(adapters)).parts}["weight store"] is None


def memory(overrides: list[str]) -> dict[str, tuple[int, float]]:
    """Return the number of training processes and their bytes per parameter."""
    plan = plan_of(load_config(None, overrides))
    return {part.name: (part.count, (part.memory_bytes or 0) / 1000) for part in plan.parts if "rank" in part.name}


def test_a_teacher_has_its_own_size() -> None:
    config = load_config(None, ["teacher.path=asyncrl://quickstart", "teacher.placement=own"])
    plan = make_plan(config, LAPTOP, num_parameters=1000, num_prompts=None, teacher_parameters=7000)
    sizes = {part.name: part.memory_bytes for part in plan.parts}
    assert (sizes["policy rank"], sizes["teacher rank"]) == (16_000, 28_000)
    shared = config.model_copy(update={"teacher": config.teacher.model_copy(update={"placement": "actor"})})
    plan = make_plan(shared, LAPTOP, num_parameters=1000, num_prompts=None, teacher_parameters=7000)
    assert {part.name: part.memory_bytes for part in plan.parts}["policy + teacher rank"] == 44_000


def test_planned_memory_is_that_of_weights_optimizer_and_cache() -> None:
    config = load_config(None, ["algorithm=grpo_kl", "rollout.dtype=bfloat16"])
    parts = {part.name: part for part in plan_of(config).parts}
    assert parts["policy + ref rank"].memory_bytes == 1000 * (16 + 4)
    assert parts["engine (vLLM)"].memory_bytes == GIB + 2000
    ranks = ["trainer.num_workers=2", "trainer.strategy=fsdp2"]
    gae = ["algorithm.adv_estimator=gae"]
    assert memory([*ranks, *gae]) == {"policy + critic rank": (2, (16 + 16) / 2)}
    assert memory([*ranks, "trainer.strategy=ddp", *gae]) == {"policy + critic rank": (2, 32)}
    assert memory([*gae, "critic.placement=own", "critic.num_workers=4", *ranks]) == {
        "policy rank": (2, 8),
        "critic rank": (4, 4),
    }
    lora = ["model.lora_rank=8", "algorithm=grpo_kl"]
    assert memory(lora) == {"policy rank": (1, 4)}
    assert memory([*lora, "ref.placement=own"]) == {"policy rank": (1, 4), "ref rank": (1, 4)}


EPOCHS = ("trainer.total_training_steps=null", "trainer.total_epochs=2", "async_training.require_batches=2",
          "trainer.ppo_mini_batch_size=8")  # fmt: skip


@pytest.mark.parametrize(
    ("num_prompts", "steps", "samples"), [(24, 6, 48), (25, 7, 50), (31, 8, 62), (1, 1, 2), (8, 2, 16)]
)
def test_epochs_are_trained_to_the_last_prompt(num_prompts: int, steps: int, samples: int) -> None:
    config = load_config(None, [*EPOCHS])
    plan = plan_of(config, num_parameters=None, prompts=num_prompts)
    assert (plan.total_steps, plan.total_samples) == (steps, samples)
    assert plan.total_versions == math.ceil(samples / config.samples_per_version)
    rest = f" (the last one with {samples % 8} of 8 samples)" if samples % 8 else ""
    assert dict(quantity_rows(plan))["optimizer steps"] == f"{steps}{rest}"
    assert training_steps(load_config(None, [*EPOCHS, "trainer.ppo_epochs=3"]), num_prompts) == 3 * steps
    assert plan_of(config, num_parameters=None).total_samples is None
    with pytest.raises(ConfigError, match="no prompt to train on"):
        training_steps(config, 0)


def test_epochs_are_trained_in_whole_leases_if_the_partial_last_one_is_dropped() -> None:
    config = load_config(None, [*EPOCHS, "trainer.partial_final_batch=drop"])
    size = config.samples_per_lease
    assert training_steps(config, size + size // 2) == 3 * 2
    assert training_steps(config, size - 1) == 2
    assert total_samples(config, 2, size - 1) == size
    with pytest.raises(ConfigError, match=r"trainer\.partial_final_batch = drop.*\n.*do not fill a lease"):
        training_steps(config, size // 2 - 1)


def test_a_resumed_run_trains_on_new_samples_in_place_of_the_passes_that_it_skips() -> None:
    steps = config_with({SIZE: 4, PASSES: 2, STEPS: 8})
    assert total_samples(steps, 8, None) == 16
    assert total_samples(steps, 8, None, step=2, trained_samples=4) == 16
    assert total_samples(steps, 8, None, step=1, trained_samples=4) == 20, (
        "seven steps are left, and each mini-batch takes two"
    )
    epochs = config_with({SIZE: 4, PASSES: 2, STEPS: None})
    assert training_steps(epochs, 15) == 8
    assert total_samples(epochs, 8, 15) == 15
    assert total_samples(epochs, 8, 15, step=1, trained_samples=4) == 15, "an epoch has only 15 samples"


def test_too_few_prompts_for_the_critics_warm_up_are_refused() -> None:
    config = load_config(None, ["algorithm=ppo", "critic.warmup_steps=5", f"{STEPS}=null", "trainer.total_epochs=1"])
    size = config.samples_per_lease
    assert training_steps(config, 6 * size) == 6
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps = 5.*\n.*the run has 5 steps"):
        training_steps(config, 5 * size)


def lacking(changes: dict[str, Any], machine: MachineResources, *, num_parameters: int = 1000) -> list[ConfigProblem]:
    config = config_with(changes)
    return list(shortages(plan_of(config, machine, num_parameters=num_parameters), config))


def test_engines_and_ranks_that_take_turns_need_a_gpu_once() -> None:
    colocated = {"placement": "colocated", "trainer.num_workers": 2, "rollout.num_replicas": 2}
    two = MachineResources(cpus=64, gpus=2)
    assert lacking(colocated | {"mode": "sync"}, two) == []
    in_turns, separate = (plan_of(config_with(colocated | mode), two) for mode in ({"mode": "sync"}, {}))
    assert dict(quantity_rows(in_turns))["GPUs"] == "2, which engines and ranks use in turns"
    assert dict(quantity_rows(separate))["GPUs"] == "4"
    assert "GPUs" not in dict(quantity_rows(plan_of(config_with({}))))
    assert "4 GPUs are needed" in single(lacking(colocated, two)).consequence
    assert "2 GPUs are needed" in single(lacking(colocated | {"mode": "sync"}, MachineResources(64, 1))).consequence


def test_engines_on_lent_gpus_need_no_gpu_of_their_own_but_memory() -> None:
    lent = {"trainer.lend_after_s": 5, "trainer.num_workers": 2, "rollout.num_replicas": 2}
    four = MachineResources(cpus=64, gpus=4)
    assert lacking(lent, four) == []
    plan = plan_of(config_with(lent), four, num_parameters=1000)
    engines = {part.name: (part.count, part.gpus) for part in plan.parts if "engine" in part.name}
    assert engines == {"engine (vLLM)": (2, 1), "lent engine (vLLM)": (2, 0)}
    assert plan.num_gpus == 4
    assert "4 GPUs are needed" in single(lacking(lent, MachineResources(64, 3))).consequence


def test_too_few_gpus_are_an_error_at_the_key_that_demands_most() -> None:
    two = MachineResources(cpus=64, gpus=2)
    problem = single(lacking({"rollout.num_replicas": 4, "trainer.device": "cuda"}, two))
    assert (problem.key, problem.value, problem.severity) == ("rollout.num_replicas", 4, "error")
    assert "5 GPUs are needed (4 for engine (vLLM), 1 for policy rank), and this machine shows 2" in problem.consequence
    assert problem.fix == "set rollout.num_replicas=1, or point ray.address at a cluster"
    scored = {"reward_model.placement": "serve", "reward_model.num_replicas": 3, "reward_model.path": "rm"}
    problem = single(lacking(scored | {"trainer.device": "cuda"}, two))
    assert problem.key == "reward_model.num_replicas", "one GPU for the engine, one for the rank, three for the model"
    problem = single(lacking({"rollout.device": "cuda"}, LAPTOP))
    assert problem.key == "rollout.device" and "this machine shows no GPU" in problem.consequence
    one = MachineResources(cpus=64, gpus=1)
    assert lacking({"rollout.device": "cpu"}, one) == []
    in_turns = "use the GPU in turns: `asyncrl launch sync` with placement=colocated; or "
    on_cpu = "set trainer.device=cpu, which is enough for small models, or point ray.address at a cluster"
    assert single(lacking({}, one)).fix == in_turns + on_cpu
    judged = {"reward_model.placement": "serve", "reward_model.path": "rm"}
    assert single(lacking(judged, one)).fix == on_cpu, "the reward model needs a GPU besides"
    assert lacking({"trainer.device": "cpu"}, one) == []
    parallel = {"rollout.num_replicas": 3, "rollout.tensor_parallel_size": 2}
    assert single(lacking(parallel, MachineResources(cpus=64, gpus=6))).fix.startswith("set rollout.num_replicas=2,")
    config = config_with(parallel)
    assert list(shortages(plan_of(config, MachineResources(cpus=64, gpus=6)), config, trains=False)) == []


def test_the_fix_for_too_few_gpus_changes_the_key_that_sets_the_number() -> None:
    eight = MachineResources(cpus=64, gpus=8)
    nodes = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.num_workers": 8}
    problem = single(lacking(nodes, eight))
    assert (problem.key, problem.value) == ("trainer.n_gpus_per_node", 8)
    assert problem.fix.startswith("set trainer.n_gpus_per_node=7,")
    engines = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, "rollout.tensor_parallel_size": 2}
    problem = single(lacking(engines | {"rollout.num_replicas": 4}, eight))
    assert problem.fix.startswith("set rollout.n_gpus_per_node=6,"), "7 GPUs are no whole number of replicas"


def test_gpus_that_the_installed_packages_cannot_use_are_reported() -> None:
    machine = MachineResources(cpus=64, gpus=0, cpu_build="torch")
    problem = single(lacking({"rollout.device": "cuda"}, machine))
    assert (problem.key, problem.severity) == ("rollout.device", "error")
    assert "the installed torch is a build for CPUs" in problem.consequence
    assert "`make setup GPU=1`" in problem.consequence
    note = single(lacking({}, machine))
    assert (note.key, note.value, note.severity) == ("rollout.device", "auto", "warning")
    assert "`make setup GPU=1`" in note.consequence
    assert note.fix.startswith("set rollout.device=cpu and trainer.device=cpu")
    assert lacking({"rollout.device": "cpu", "trainer.device": "cpu"}, machine) == []


def test_too_few_cpus_and_too_little_memory_are_warnings() -> None:
    problem = single(lacking({"rollout.cpu_threads": 8}, LAPTOP))
    assert (problem.key, problem.severity, problem.fix) == (
        "rollout.cpu_threads",
        "warning",
        "set rollout.cpu_threads=1",
    )
    problem = single(lacking({"rollout.num_replicas": 4}, dataclasses.replace(LAPTOP, cpus=4)))
    assert (problem.key, problem.fix) == ("rollout.num_replicas", "set rollout.num_replicas=3")
    problem = single(lacking({"rollout.num_replicas": 2, "rollout.cpu_threads": 4}, LAPTOP))
    assert (problem.key, problem.fix) == (
        "rollout.cpu_threads",
        "set rollout.num_replicas=1, and rollout.cpu_threads=1",
    )
    assert problem.consequence.startswith(
        "9 threads compute at the same time (8 of engine (vLLM): rollout.num_replicas=2 x rollout.cpu_threads=4, "
        "1 of policy rank: trainer.num_workers=1 x trainer.cpu_threads=1), and this machine has 2 CPUs"
    )
    small = dataclasses.replace(LAPTOP, cpus=64, memory_bytes=24 * GIB)
    problem = single(lacking({"rollout.num_replicas": 4}, small, num_parameters=10**9))
    assert (problem.key, problem.value) == ("model.path", "asyncrl://quickstart")
    assert problem.consequence.startswith("weights, optimizer and caches need 48.7 GiB of memory")
    smaller = dataclasses.replace(small, memory_bytes=12 * GIB)
    problem = single(lacking({"rollout.num_replicas": 9}, smaller, num_parameters=10**8))
    assert (problem.key, problem.fix) == ("rollout.num_replicas", "set rollout.num_replicas=6")


ON_GPUS = {"rollout.dtype": "bfloat16", "rollout.device": "cuda", "trainer.device": "cuda"}
COLOCATED = ON_GPUS | {"mode": "sync", "placement": "colocated"}


@pytest.mark.parametrize(
    ("changes", "gib", "key", "fix"),
    [
        # Per parameter, the store has 4 versions of 2 bytes, ranks at rest have 16 bytes, and engines at rest have 2.
        (COLOCATED, 8 + 16 + 2, "placement", "set it to separate"),
        (ON_GPUS | {"trainer.lend_after_s": 5}, 8 + 16 + 2, "trainer.lend_after_s", "set it to null"),
        (ON_GPUS | {"trainer.param_offload": True, "trainer.optimizer_offload": True}, 8 + 12,
         "trainer.optimizer_offload", "set it to false"),
        (ON_GPUS | {"trainer.param_offload": True, "algorithm.use_kl_loss": True, "trainer.num_workers": 2,
          "trainer.strategy": "fsdp2"}, 8 + 4 + 2,
         "model.path", "use a smaller model"),
        (ON_GPUS, 0, "", ""),
    ],
)  # fmt: skip
def test_what_rests_in_the_memory_of_the_machine_between_calls_is_counted(
    changes: dict[str, Any], gib: int, key: str, fix: str
) -> None:
    """Ranks and engines that take turns, and ranks with offload."""
    machine = MachineResources(cpus=64, gpus=8, memory_bytes=9 * GIB)
    problems = lacking(changes, machine, num_parameters=GIB)
    assert [(one.key, one.severity) for one in problems] == ([(key, "warning")] if key else [])
    for problem in problems:
        assert problem.fix.startswith(fix)
        assert f"need {gib}.0 GiB of memory, and this machine has 9.0 GiB" in problem.consequence
    enough = dataclasses.replace(machine, memory_bytes=gib * GIB)
    assert not key or lacking(changes, enough, num_parameters=GIB) == []


def test_fewer_ranks_of_a_model_that_is_split_over_them_need_no_less_memory() -> None:
    for strategy, gib, key, fix in (
        ("fsdp2", 30, "model.path", "use a smaller model"),
        ("ddp", 40, "trainer.num_workers", "set trainer.num_workers=1"),
    ):
        machine = MachineResources(cpus=64, gpus=0, memory_bytes=gib * GIB)
        changes = {"trainer.num_workers": 2, "trainer.strategy": strategy, "rollout.dtype": "bfloat16"}
        (problem,) = lacking(changes, machine, num_parameters=GIB * 5 // 4)
        assert (problem.key, problem.fix) == (key, fix)


@pytest.mark.parametrize(
    ("changes", "parameters", "key", "needs", "fix"),
    [
        ({"trainer.num_workers": 4}, 72, "trainer.num_workers", "288.0 GiB", "set it to 15 or more"),
        ({"trainer.num_workers": 4, "trainer.strategy": "ddp"}, 6, "trainer.strategy", "96.0 GiB", "use fsdp2"),
        ({"trainer.num_workers": 4, "trainer.fsdp_size": 2}, 12, "trainer.fsdp_size", "96.0 GiB", "leave it out"),
        ({"trainer.num_workers": 4, "rollout.tensor_parallel_size": 8}, 20, "", "", ""),
        ({"trainer.device": "cpu", "rollout.tensor_parallel_size": 2}, 72, "rollout.tensor_parallel_size", "72.0 GiB",
         "set it to 3 or more"),
    ],
)  # fmt: skip
def test_processes_that_do_not_fit_on_a_gpu_give_a_warning(
    changes: dict[str, Any], parameters: int, key: str, needs: str, fix: str
) -> None:
    machine = MachineResources(cpus=64, gpus=64, gpu_memory_bytes=80 * GIB)
    wide = {"rollout.dtype": "bfloat16", "rollout.device": "cuda", "rollout.tensor_parallel_size": 8}
    wide |= {"trainer.strategy": "fsdp2"} | changes
    problems = lacking(wide, machine, num_parameters=parameters * GIB)
    assert [(one.key, one.severity) for one in problems] == ([(key, "warning")] if key else [])
    for problem in problems:
        assert needs in problem.consequence and "has 80.0 GiB" in problem.consequence
        assert problem.fix.startswith(fix)
    unknown = dataclasses.replace(machine, gpu_memory_bytes=None)
    assert lacking(wide, unknown, num_parameters=parameters * GIB) == []


def test_parameters_and_prompts_are_counted_without_libraries() -> None:
    config = load_config()
    parameters, prompts = count_parameters(config.model.path), count_prompts(config)
    assert parameters is not None and 500_000 < parameters < 2_000_000
    assert prompts is not None and prompts > 100
    plan = plan_of(config, num_parameters=parameters, prompts=prompts)
    assert len(quantity_rows(plan)) == 10
    assert {row[0] for row in process_rows(plan)} >= {"rollouter", "trainer", "sample queue"}


@given(freq=st.integers(1, 6), steps=st.lists(st.integers(1, 5), max_size=20))
def test_the_first_version_at_or_after_each_multiple_of_the_frequency_is_validated(freq: int, steps: list[int]) -> None:
    step = validated = 0
    for more in steps:
        before, step = step, step + more
        due = validation_due(freq, validated_step=validated, step=step)
        assert due == any(number % freq == 0 for number in range(before + 1, step + 1))
        assert not validation_due(-1, validated_step=validated, step=step)
        validated = step if due else validated

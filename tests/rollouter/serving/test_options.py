"""The options for Ray and vLLM that follow from the configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from asyncrl.config.schema import Config
from asyncrl.profiling import PROFILING_OFF, ProfilerSettings
from asyncrl.weights.object_store import ServedRun
from rollouter.serving.autoscaling import wanted_replicas
from rollouter.serving.options import DRIVER_MARK, deployment_options, serving_options


def options(*, gpus: bool = False, lent: bool = False, **groups: Any) -> Any:
    config = Config.model_validate({"model": {"path": "/models/tiny"}, **groups})
    return serving_options(config, namespace="run", gpus=gpus, lent=lent)


def test_options_on_cpu() -> None:
    built = options(rollout={"cpu_threads": 2, "cpu_kv_cache_gib": 3, "num_replicas": 2, "response_length": 100})
    assert built.gang.bundles == [{"CPU": 2.0}]
    assert built.env_vars["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert built.env_vars["OMP_NUM_THREADS"] == "2"
    kwargs = built.llm_config["engine_kwargs"]
    assert kwargs["dtype"] == "float32"
    assert kwargs["enforce_eager"] is True
    assert kwargs["max_model_len"] == 612
    assert "gpu_memory_utilization" not in kwargs
    assert built.llm_config["model_loading_config"] == {"model_id": "tiny", "model_source": "/models/tiny"}
    assert deployment_options(built)["num_replicas"] == 2


def test_the_device_decides_on_a_cluster_that_has_no_gpu_yet_and_on_one_that_has_some() -> None:
    on_gpus = options(rollout={"device": "cuda", "tensor_parallel_size": 2, "enforce_eager": False})
    assert on_gpus == options(gpus=True, rollout={"device": "auto", "tensor_parallel_size": 2, "enforce_eager": False})
    assert deployment_options(on_gpus)["placement_group_bundles"] == [{"GPU": 1.0, "CPU": 1.0}] * 2
    kwargs = on_gpus.llm_config["engine_kwargs"]
    assert (kwargs["enforce_eager"], kwargs["gpu_memory_utilization"]) == (False, 0.85)
    assert "TORCHDYNAMO_DISABLE" not in on_gpus.env_vars
    stages = options(gpus=True, rollout={"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    assert deployment_options(stages)["placement_group_bundles"] == [{"GPU": 1.0, "CPU": 1.0}] * 6
    assert [stages.llm_config["engine_kwargs"][f"{kind}_parallel_size"] for kind in ("tensor", "pipeline")] == [2, 3]
    assert options(gpus=True, rollout={"device": "cpu"}) == options()


def test_engines_that_share_their_gpus_with_ranks_can_sleep() -> None:
    built = options(gpus=True, placement="colocated", mode="sync", rollout={"tensor_parallel_size": 2})
    assert built.gang.bundles == [{"GPU": 0.4, "CPU": 1.0}] * 2
    assert built.llm_config["engine_kwargs"]["enable_sleep_mode"] is True
    assert built.env_vars["VLLM_RAY_PER_WORKER_GPUS"] == "0.4"
    for alone in (options(gpus=True, placement="colocated"), options(gpus=False, placement="colocated", mode="sync")):
        assert alone.gang.bundles[0].get("GPU", 1.0) == 1.0, "asyncrl serve, and a CPU"
        assert "enable_sleep_mode" not in alone.llm_config["engine_kwargs"]


def test_engines_on_lent_gpus_share_them_with_the_ranks_and_the_others_do_not() -> None:
    run = {"trainer": {"num_workers": 4, "lend_after_s": 5}, "rollout": {"tensor_parallel_size": 2, "num_replicas": 3}}
    own, lent = options(gpus=True, **run), options(gpus=True, lent=True, **run)
    assert own.gang.bundles == [{"GPU": 1.0, "CPU": 1.0}] * 2 and lent.gang.bundles == [{"GPU": 0.4, "CPU": 1.0}] * 2
    assert [deployment_options(one)["num_replicas"] for one in (own, lent)] == [3, 2]
    assert [(one.shares_gpus, one.lent) for one in (own, lent)] == [(False, False), (True, True)]
    assert lent.llm_config["engine_kwargs"] == own.llm_config["engine_kwargs"] | {"enable_sleep_mode": True}
    assert lent.env_vars == own.env_vars | {"VLLM_RAY_PER_WORKER_GPUS": "0.4"}


def test_with_autoscaling_serve_follows_the_run_at_once() -> None:
    scaling = {"enable": True, "min_replicas": 2, "max_replicas": 5, "up_after_s": 7, "down_after_s": 9}
    built = deployment_options(options(rollout={"num_replicas": 3, "autoscaling": scaling}))
    assert "num_replicas" not in built
    serves = AutoscalingConfig.model_validate(built["autoscaling_config"])
    assert (serves.min_replicas, serves.initial_replicas, serves.max_replicas) == (2, 3, 5)
    assert (serves.upscale_delay_s, serves.downscale_delay_s) == (0, 0), "the driver's decisions have these periods"
    assert serves.policy.get_policy().__name__ == wanted_replicas.__name__


def test_replicas_go_to_labelled_nodes_and_name_their_driver() -> None:
    built = options(gpus=True, rollout={"tensor_parallel_size": 2, "node_labels": {"pool": "rollout"}})
    given = deployment_options(replace(built, driver="01000000"))
    assert given["placement_group_bundle_label_selector"] == [{"pool": "rollout"}] * 2
    assert given["ray_actor_options"]["runtime_env"]["env_vars"][DRIVER_MARK] == "01000000"
    assert DRIVER_MARK not in deployment_options(built)["ray_actor_options"]["runtime_env"]["env_vars"]


def test_replicas_record_events_and_write_no_files() -> None:
    def served(profiler: dict[str, Any]) -> ProfilerSettings:
        return ServedRun.of(Config.model_validate({"profiler": profiler}), name="run", namespace="run").profiler

    assert served({"level": "full", "buffer_events": 7}) == ProfilerSettings("full", None, 7)
    assert served({"level": "off"})._replace(buffer_events=PROFILING_OFF.buffer_events) == PROFILING_OFF


def test_health_checks_allow_for_a_stopped_rollouter() -> None:
    """A stopped Rollouter can block a replica; tests/e2e/test_launch.py stops one in the middle of its streams."""
    settings = deployment_options(options(timeouts={"probe_s": 12}))
    assert settings["health_check_timeout_s"] * 3 == 18


def test_options_on_gpus() -> None:
    built = options(gpus=True, rollout={"tensor_parallel_size": 2, "dtype": "bfloat16", "enforce_eager": False})
    assert built.gang.bundles == [{"GPU": 1.0, "CPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}]
    assert deployment_options(built)["placement_group_strategy"] == "STRICT_PACK"
    assert deployment_options(built)["placement_group_bundle_label_selector"] is None
    assert "VLLM_CPU_KVCACHE_SPACE" not in built.env_vars
    kwargs = built.llm_config["engine_kwargs"]
    assert (kwargs["dtype"], kwargs["enforce_eager"], kwargs["gpu_memory_utilization"]) == ("bfloat16", False, 0.85)


@pytest.mark.parametrize(
    ("temperature", "mode"), [(1.0, "raw_logprobs"), (0.0, "raw_logprobs"), (0.7, "processed_logprobs")]
)
def test_log_probs_are_those_of_the_tempered_policy(temperature: float, mode: str) -> None:
    built = options(rollout={"sampling": {"temperature": temperature}})
    assert built.llm_config["engine_kwargs"]["logprobs_mode"] == mode


def test_engines_round_their_weights_if_they_should() -> None:
    kwargs = options(rollout={"quantization": "fp8_per_channel", "dtype": "bfloat16"}).llm_config["engine_kwargs"]
    assert kwargs["quantization"] == "fp8_per_channel"
    assert "quantization" not in options().llm_config["engine_kwargs"]


def test_engine_kwargs_are_passed_to_vllm() -> None:
    more = {"max_num_batched_tokens": 1024, "speculative_config": {"method": "ngram"}, "enable_expert_parallel": True}
    assert options(rollout={"engine_kwargs": more}).llm_config["engine_kwargs"].items() >= more.items()


@pytest.mark.parametrize(("rank", "largest"), [(1, 1), (3, 8), (16, 16), (257, 320), (512, 512)])
def test_engines_of_a_run_that_publishes_adapters_load_one_at_a_time(rank: int, largest: int) -> None:
    model = {"path": "/models/tiny", "lora_rank": rank, "target_modules": ["v_proj", "layers.1.mlp.down_proj"]}
    config = Config.model_validate({"model": model, "weight_sync": {"lora": "adapter"}})
    expected = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": largest,
        "lora_target_modules": ["down_proj", "v_proj"],
    }
    kwargs = serving_options(config, namespace="run", gpus=False).llm_config["engine_kwargs"]
    assert {name: value for name, value in kwargs.items() if "lora" in name} == expected
    assert ServedRun.of(config, name="run", namespace="run").adapters
    deployed = serving_options(config, namespace=None, gpus=False).llm_config["engine_kwargs"]
    assert "enable_lora" not in deployed, "rollout servers of their own serve full weights"
    evaluation = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 0})})
    kwargs = serving_options(evaluation, namespace="run", gpus=False).llm_config["engine_kwargs"]
    assert "enable_lora" not in kwargs, "an evaluated checkpoint has its adapters merged in"


@pytest.mark.parametrize(("targets", "layers"), [("all-linear", None), (["q_proj"], ["q_proj"])])
def test_the_adapted_layers_of_a_model_elsewhere_are_those_that_the_configuration_names(
    targets: Any, layers: list[str] | None
) -> None:
    model = {"path": "/models/tiny", "lora_rank": 4, "target_modules": targets}
    kwargs = options(model=model, weight_sync={"lora": "adapter"}).llm_config["engine_kwargs"]
    assert kwargs.get("lora_target_modules") == layers


def test_the_driver_side_does_not_import_vllm() -> None:
    """Only replicas need `ray.serve.llm`, whose import takes 7 s."""
    code = "import sys, rollouter.serving.fleet; sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'ray.llm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

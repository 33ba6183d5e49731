"""Derives the options of Ray Serve and vLLM from a configuration. Pure: it imports neither of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.assets import resolve
from asyncrl.config.environment import model_config
from asyncrl.config.resources.placement import ENGINE_SHARE, Gang, replica_gang
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import on_gpus
from asyncrl.config.sections.data import adapted_layers, engine_lora_rank
from asyncrl.config.sections.rollout import AutoscalingConfig
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.config.sections.trainer import RewardModelConfig

DEPLOYMENT_NAME = "rollout"
REWARD_DEPLOYMENT_NAME = "reward-model"
WORKER_EXTENSION = "rollouter.serving.replica.worker.WorkerExtension"
WEIGHT_TRANSFER = "asyncrl"
"""The name of the weight transfer from the run's weight store, in vLLM's registry."""
ROUTER = "rollouter.serving.routing.SessionRouter"
SCALING_POLICY = "rollouter.serving.autoscaling:wanted_replicas"


_SIZES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
"""The keys of config.json that determine the shapes of a model's weights."""
DRIVER_MARK = "ASYNCRL_DRIVER"
"""Environment variable of the replicas that a launch deploys: Ray's job id of its driver. It distinguishes them from
applications of users, whatever their names are."""
UNANSWERED_CHECKS = 3
"""Serve replaces a replica after this many consecutive unanswered health checks. This is a constant of Serve."""
PATIENCE = 1.5
"""Serve replaces a replica that is silent for `PATIENCE` times `probe_s`. When a stream of answers ends, Ray blocks the
replica's event loop until the caller has acknowledged all answers (`WaitAllObjectsReported`), so a caller that hangs
silences every replica that answers it. The driver ends such a caller after `probe_s`; healthy replicas must survive
until then."""
LEAVE_S = 10.0
"""Time in which a leaving replica hands its requests back. Serve kills a replica that has not ended by then; one
without requests ends at once."""
_REPLICAS = {
    # No limit, because replicas queue requests themselves and the Rollouter limits how many it sends.
    "max_ongoing_requests": 1_000_000,
    # This limits attempts of the first start only. Once a replica has run, Serve tries to replace it without a limit.
    "max_constructor_retry_count": 1,
    "health_check_period_s": 1.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 2.0,
}


def app_name(namespace: str, part: str = "rollout") -> str:
    """Return Serve's name for an application of the run in this Ray namespace."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', namespace)}-{part}"


def app_namespace(app: str) -> str:
    """Return the Ray namespace in which the replicas of a deployed application look for the weight store of a run."""
    return f"asyncrl-app-{app}"


@dataclass(frozen=True, slots=True)
class RolloutApp:
    """The application whose replicas a run uses."""

    name: str
    """Serve's name of the application."""
    store_namespace: str
    """Ray namespace in which its replicas look for the weight store."""
    attached: bool
    """Whether it was deployed separately and outlives the run."""


def rollout_app(config: Config, namespace: str) -> RolloutApp:
    """Return the application of the run in this Ray namespace: `rollout.attach`, or one that the run deploys."""
    if (name := config.rollout.attach) is not None:
        return RolloutApp(name, app_namespace(name), attached=True)
    return RolloutApp(app_name(namespace), namespace, attached=False)


def lent_app(namespace: str) -> RolloutApp:
    """Return the application of the engines on GPUs that the Trainer lends."""
    return RolloutApp(app_name(namespace, "lent"), namespace, attached=False)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options of the deployment of the engines (`RolloutReplica`)."""

    llm_config: dict[str, Any]
    """Keyword arguments of `ray.serve.llm.LLMConfig`, including resources and environment."""
    gang: Gang
    """The resources of the replicas and the nodes that may have them."""
    env_vars: dict[str, str]
    namespace: str | None
    """Ray namespace of the weight store; None: that of the application (`app_namespace`), to which runs attach."""
    num_replicas: int
    """The number at the start; it changes only with `autoscaling`."""
    autoscaling: AutoscalingConfig
    timeouts: TimeoutsConfig
    driver: str = ""
    """Ray's job id of the launch that deploys the engines; empty: they are deployed separately."""
    shares_gpus: bool = False
    """Whether the engines sleep while ranks use their GPUs."""
    lent: bool = False
    """Whether they are those on GPUs that the Trainer lends (`trainer.lend_after_s`)."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a run needs of the replicas to which it attaches (`weights.object_store.ServedRun.engines`)."""

    replica: str
    model: str
    max_model_len: int
    logprobs_mode: str
    dtype: str
    """`rollout.dtype`."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """The values of the model's config.json that determine the shapes of its weights; empty if it is not readable."""
    quantization: str | None = None
    """`rollout.quantization`."""

    @classmethod
    def of(cls, options: ServingOptions, replica: str) -> Self:
        """Return the facts of a replica with these options. Reads the model's config.json."""
        engine = options.llm_config["engine_kwargs"]
        model = options.llm_config["model_loading_config"]["model_source"]
        sizes, quantization = _sizes(model_config(model)), engine.get("quantization")
        return cls(
            replica, model, engine["max_model_len"], engine["logprobs_mode"], engine["dtype"], sizes, quantization
        )

    @classmethod
    def wanted(cls, config: Config) -> Self:
        """Return the facts of the replicas that a run would start. Reads the model's config.json."""
        return cls.of(serving_options(config, namespace=None, gpus=False), "")

    def misfit(self, wanted: Self) -> str:
        """Return why this replica cannot generate for a run that would start replicas with the facts `wanted`, or an
        empty string if it can."""
        if other := [name for name, size in wanted.sizes.items() if self.sizes.get(name, size) != size]:
            here, there = ([f"{name}={one.sizes[name]}" for name in other] for one in (self, wanted))
            return (
                f"its engines have the model {self.model} ({', '.join(here)}), and model.path={wanted.model} has "
                f"{', '.join(there)}, so the run's weights do not fit into them; attach to rollout servers of the same "
                "model, or deploy them with it"
            )
        if self.max_model_len < wanted.max_model_len:
            return (
                f"its engines have a context of {self.max_model_len} tokens, and the run needs {wanted.max_model_len} "
                "(data.max_prompt_length + rollout.response_length, or rollout.max_model_len), so long samples would "
                "be refused; deploy with a larger rollout.max_model_len"
            )
        if self.logprobs_mode != wanted.logprobs_mode:
            return (
                f"its engines report {self.logprobs_mode}, and rollout.sampling.temperature of the run needs "
                f"{wanted.logprobs_mode}: the recorded log-probs would be those of another distribution; deploy with "
                "the same temperature"
            )
        if self.dtype != wanted.dtype:
            return (
                f"its engines have rollout.dtype={self.dtype}, and the run publishes weights in {wanted.dtype}, which "
                f"engines would round or widen; set rollout.dtype={self.dtype} for the run, or deploy with "
                f"rollout.dtype={wanted.dtype}"
            )
        if self.quantization != wanted.quantization:
            return (
                f"its engines have rollout.quantization={self.quantization or 'null'}, and the run has "
                f"{wanted.quantization or 'null'}, so its loss would not correct for what engines round; set the same"
            )
        return ""


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a model's config.json that determine the shapes of its weights."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    return {name: merged[name] for name in _SIZES if name in merged}


def serving_options(config: Config, *, namespace: str | None, gpus: bool, lent: bool = False) -> ServingOptions:
    """Return the options for `config`.

    The checks of the configuration forbid `rollout.engine_kwargs` that another key sets.

    Args:
        gpus: whether the cluster has GPUs, which decides with `rollout.device=auto`.
        lent: those of the engines on GPUs that the Trainer lends.
    """
    rollout = config.rollout
    gpus = on_gpus(rollout.device, gpus)
    shares = lent or config.takes_turns
    gang = replica_gang(config, gpus=gpus, lent=lent)
    env_vars = _env_vars(config, gpus, shares)
    path = resolve(config.model.path)
    return ServingOptions(
        llm_config={
            "model_loading_config": {"model_id": path.rstrip("/").rsplit("/", 1)[-1], "model_source": path},
            "engine_kwargs": _engine_kwargs(config, gpus, shares)
            | (_lora_kwargs(config) if namespace is not None else {}),
            "placement_group_config": {"bundles": gang.bundles, "strategy": gang.strategy},
            "runtime_env": {"env_vars": env_vars},
            "log_engine_metrics": False,
        },
        gang=gang,
        env_vars=env_vars,
        namespace=namespace,
        num_replicas=gang.count,
        autoscaling=rollout.autoscaling,
        timeouts=config.timeouts,
        shares_gpus=shares,
        lent=lent,
    )


def deployment_options(options: ServingOptions) -> dict[str, Any]:
    """Return Serve's options of the replicas."""
    return {
        **_replicas(options.timeouts.probe_s),
        "graceful_shutdown_timeout_s": LEAVE_S,
        **_num_replicas(options),
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"max_model_len": options.llm_config["engine_kwargs"]["max_model_len"]},
        },
        "placement_group_bundles": options.gang.bundles,
        "placement_group_strategy": options.gang.strategy,
        "placement_group_bundle_label_selector": options.gang.label_selectors,
        "logging_config": {"enable_access_log": False},  # the event `request` has more, and costs less
        "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": options.env_vars | mark(options.driver)}},
    }


def _num_replicas(options: ServingOptions) -> dict[str, Any]:
    """Return how many replicas Serve runs: a fixed number, or what the driver wants. The driver's policy has the
    periods and the hysteresis already, so Serve follows it at once."""
    scaling = options.autoscaling
    if not scaling.enable:
        return {"num_replicas": options.num_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "initial_replicas": options.num_replicas,
            "max_replicas": scaling.max_replicas,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": SCALING_POLICY},
        }
    }


def mark(driver: str) -> dict[str, str]:
    """Return the environment variable that marks the replicas of a launch; empty for no launch."""
    return {DRIVER_MARK: driver} if driver else {}


def reward_deployment_options(model: RewardModelConfig, *, probe_s: float, gpus: bool, driver: str) -> dict[str, Any]:
    """Return Serve's options of the reward model's replicas. `gpus`: they have one GPU each.

    A placement group reserves it, which Ray lists while it waits for room (`pending_demands`)."""
    resources = {"num_cpus": 1, "num_gpus": 1} if gpus else {"num_cpus": 0}
    return {
        **_replicas(probe_s),
        "num_replicas": model.num_replicas,
        "placement_group_bundles": [{"GPU": 1, "CPU": 1}] if gpus else None,
        "ray_actor_options": {**resources, "runtime_env": {"env_vars": mark(driver)}},
    }


def _replicas(probe_s: float) -> dict[str, Any]:
    return {**_REPLICAS, "health_check_timeout_s": PATIENCE * probe_s / UNANSWERED_CHECKS}


def _engine_kwargs(config: Config, gpus: bool, shares_gpus: bool) -> dict[str, Any]:
    rollout = config.rollout
    kwargs: dict[str, Any] = {
        "dtype": rollout.dtype,
        "enforce_eager": rollout.enforce_eager or not gpus,
        "load_format": "safetensors",  # never a pickle from disk
        "max_model_len": config.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_parallel_size,
        "trust_remote_code": config.model.trust_remote_code,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
        "worker_extension_cls": WORKER_EXTENSION,
        # The log-probs must include the temperature. At temperature 1 the raw log-probs are equal and cost less.
        "logprobs_mode": "raw_logprobs" if rollout.sampling.temperature in (0.0, 1.0) else "processed_logprobs",
    }
    if rollout.quantization is not None:
        kwargs["quantization"] = rollout.quantization
    if gpus:
        kwargs["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        if shares_gpus:
            kwargs["enable_sleep_mode"] = True
    if config.model.tokenizer_path is not None:
        kwargs["tokenizer"] = resolve(config.model.tokenizer_path)
    return kwargs | rollout.engine_kwargs


def _lora_kwargs(config: Config) -> dict[str, Any]:
    """Return vLLM's arguments for a run whose versions are adapters. Only one adapter is loaded at a time."""
    if not config.syncs_adapters:
        return {}
    kwargs = {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_lora_rank(config.model)}
    # Other layers, such as embeddings, would pay for adapters that they never get.
    return kwargs | ({"lora_target_modules": layers} if (layers := adapted_layers(config.model)) else {})


def _env_vars(config: Config, gpus: bool, shares_gpus: bool) -> dict[str, str]:
    env_vars = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": config.logging.level.upper()}
    if gpus and shares_gpus:
        env_vars["VLLM_RAY_PER_WORKER_GPUS"] = str(ENGINE_SHARE)
    if not gpus:
        env_vars |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.cpu_kv_cache_gib),
            # Trainer and engines share the cores. A bound engine thread would wait for Trainer threads on its core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.rollout.cpu_threads),
            # vLLM compiles a line of its sampler even in eager mode, which takes 15 s in the first request.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return env_vars

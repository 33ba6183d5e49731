"""Rules between keys: each broken combination is reported with its key, and valid combinations are not."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.problems import errors
from asyncrl.config.rules import as_evaluation
from asyncrl.config.sections.reward import part_weights
from tests.fakes.configurations import config_with, machine_problems, rule_problems, single

Changes = dict[str, Any]

CORRECTION = "algorithm.rollout_correction"
IS, RS = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
TURNS = "rollout.multi_turn"
OTLP = "profiler.otlp_endpoint"
URL = "http://127.0.0.1:4318/v1/traces"

RLOO: Changes = {"algorithm.adv_estimator": "rloo"}
GAE: Changes = {"algorithm.adv_estimator": "gae"}
REMAX: Changes = {"algorithm.adv_estimator": "remax"}
REINFORCE: Changes = {"algorithm.policy_loss": "reinforce"}
GSPO: Changes = {"algorithm.policy_loss": "gspo"}
ON_POLICY: Changes = {"async_training.staleness_threshold": 0}
ADAPTIVE: Changes = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
FILTER: Changes = {"algorithm.filter_groups.enable": True}
TEACHER: Changes = {"teacher.path": "large"}
DISTILL: Changes = {"algorithm.adv_estimator": "on_policy_distill"}
REFERENCE: Changes = {"algorithm.use_kl_loss": True}
ADAPTERS: Changes = {"model.lora_rank": 4, "weight_sync.lora": "adapter"}
NCCL: Changes = {"weight_sync.backend": "nccl"}
DELTAS: Changes = {"weight_sync.backend": "disk", "weight_sync.max_deltas": 5}
SERVED: Changes = {"reward_model.placement": "serve", "reward_model.path": "rm"}
SCORED: Changes = SERVED | {"reward_model.placement": "worker"}
TOOLS: Changes = {f"{TURNS}.enable": True, f"{TURNS}.tools": [{"class_name": "calculator"}]}
USER: Changes = {f"{TURNS}.enable": True, f"{TURNS}.interactions": [{"class_name": "scripted"}]}
AGENT: Changes = {"rollout.agent.program": "my:agent"}
NO_FUNCTION: Changes = {"reward.function": "none"}
JUDGE: Changes = {"reward.judge.model": "judge-1", "reward.judge.base_url": "http://127.0.0.1:8000/v1"}
OVER: Changes = {"rollout.over_sample.samples": 0.5}
RECORD: Changes = {"skip.async_rollout.enable": True, "skip.async_rollout.steps": "all"}
RECORD_BATCHES: Changes = {"skip.rollout.enable": True, "skip.rollout.steps": "all", "mode": "sync"}
RECORD_TOOLS: Changes = {"skip.tool.enable": True, "skip.tool.steps": "all"}
RECORD_REWARDS: Changes = {"skip.reward.enable": True, "skip.reward.steps": "all"}
OWN_ROLE: Changes = {"skip.modules": ["sums"], "skip.roles": {"sums": {"enable": True, "steps": "all"}}}
TWO_NODES: Changes = {
    "ray.address": "auto",
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 1,
    "trainer.num_workers": 2,
    "trainer.strategy": "fsdp2",
}
COLOCATED: Changes = {"placement": "colocated", "mode": "sync"}
LENT: Changes = {"trainer.lend_after_s": 5}
NSYS: Changes = {"profiler.tool": "nsys", "profiler.steps": [1]}


def functions(**fields: Any) -> Changes:
    return {"reward.functions": [{"name": "brief", "function": "exact_match", **fields}]}


def tools(**fields: Any) -> Changes:
    return {f"{TURNS}.enable": True, f"{TURNS}.tools": [fields]}


BROKEN: list[tuple[str, Changes, str]] = [
    ("placement", {"placement": "colocated"}, "here both compute all the time"),
    ("ray.address", COLOCATED | {"ray.address": "auto"}, "the GPUs of this machine"),
    (
        "trainer.nnodes",
        COLOCATED | {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1},
        "with placement=colocated both sides share the GPUs of this machine",
    ),
    ("rollout.nnodes", COLOCATED | {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 1}, "of this machine"),
    ("ray.address", COLOCATED | {"rollout.attach": "servers", "ray.address": "auto"}, "the GPUs of this machine"),
    (
        "rollout.autoscaling.enable",
        COLOCATED | {"rollout.autoscaling": {"enable": True, "max_replicas": 2}},
        "the number of engines is fixed",
    ),
    ("trainer.num_workers", COLOCATED | {"rollout.num_replicas": 2}, "pipeline_parallel_size = 2 x 1 parts"),
    ("weight_sync.backend", COLOCATED | NCCL, "NCCL sends between different ones only"),
    ("reward_model.placement", COLOCATED | SERVED, "this would need another GPU"),
    ("ref.placement", COLOCATED | REFERENCE | {"ref.placement": "own"}, "this would need another GPU"),
    ("trainer.strategy", COLOCATED | {"trainer.strategy": "ddp"}, "28 GB for 7B"),
    ("trainer.strategy", LENT | {"trainer.strategy": "megatron_layers"}, "28 GB for 7B"),
    ("critic.strategy", COLOCATED | GAE | {"critic.strategy": "ddp"}, "28 GB for 7B"),
    ("ray.address", LENT | {"ray.address": "auto"}, "with trainer.lend_after_s=5.0 both sides share the GPUs"),
    (
        "rollout.autoscaling.enable",
        LENT | {"rollout.autoscaling": {"enable": True, "max_replicas": 2}},
        "the number of engines is fixed",
    ),
    ("trainer.num_workers", LENT | {"rollout.tensor_parallel_size": 2}, "an engine has 2 GPUs of the ranks"),
    ("weight_sync.backend", LENT | NCCL, "NCCL sends between different ones only"),
    ("ref.placement", LENT | REFERENCE | {"ref.placement": "own"}, "this would need another GPU"),
    ("rollout.engine_kwargs.enable_sleep_mode", {"rollout.engine_kwargs": {"enable_sleep_mode": True}}, "asyncrl sets"),
    ("experiment_name", {"experiment_name": "a/b"}, "below runs/"),
    ("project_name", RECORD | {"project_name": "../elsewhere"}, "dump_dir"),
    ("run_dir", {"run_dir": "s3://bucket/run"}, "only checkpoints can go to a URL"),
    ("rollout.dump_dir", {"rollout.dump_dir": "gs://bucket/dump"}, "only checkpoints can go to a URL"),
    ("trainer.validation_data_dir", {"trainer.validation_data_dir": "s3://b/a"}, "only checkpoints can go to a URL"),
    (
        "skip.async_rollout.dump_dir",
        RECORD | {"skip.async_rollout.dump_dir": "s3://bucket/records"},
        "only checkpoints can go to a URL",
    ),
    ("data.train_files", {"data.train_files": []}, "no prompts"),
    ("data.train_files", {"data.reasoning_gym": {"task": "chain_sum"}}, "chain_sum generates the prompts"),
    ("rollout.attach", {"rollout.attach": "servers"}, "a cluster of its own"),
    ("rollout.num_workers", AGENT | {"rollout.num_workers": 2}, "reach the Rollouter's process only"),
    ("rollout.num_workers", RECORD_TOOLS | TOOLS | {"rollout.num_workers": 2}, "the records of skip.tool"),
    ("rollout.num_workers", RECORD_REWARDS | {"rollout.num_workers": 2}, "score what they generate"),
    ("rollout.autoscaling.max_replicas", {"rollout.autoscaling": {"enable": True}}, "no other number"),
    (
        "rollout.num_replicas",
        {"rollout.autoscaling": {"enable": True, "max_replicas": 3}, "rollout.num_replicas": 4},
        "allows 1 to 3",
    ),
    ("weight_sync.backend", NCCL | {"trainer.device": "cpu"}, "broadcasts from a GPU"),
    ("weight_sync.backend", NCCL | {"rollout.device": "cpu"}, "to those of the engines"),
    ("weight_sync.backend", NCCL | ADAPTERS, "from files"),
    ("weight_sync.backend", NCCL | {"async_training.partial_rollout": False}, "stand still"),
    ("weight_sync.max_deltas", {"weight_sync.max_deltas": 5}, "weight_sync.backend is object_store"),
    ("weight_sync.max_deltas", NCCL | {"weight_sync.max_deltas": 5}, "weight_sync.backend is nccl"),
    ("weight_sync.max_deltas", ADAPTERS | DELTAS, "change as a whole"),
    ("weight_sync.lora", {"weight_sync.lora": "adapter"}, "there are no adapters"),
    ("model.lora_rank", ADAPTERS | {"model.lora_rank": 513}, "up to rank 512"),
    ("weight_sync.lora", ADAPTERS | {"trainer.strategy": "megatron_layers"}, "layers of its own"),
    ("weight_sync.lora", ADAPTERS | {"rollout.attach": "servers", "ray.address": "auto"}, "started without adapters"),
    ("weight_sync.lora",
     ADAPTERS | {"rollout.tensor_parallel_size": 4, "rollout.nnodes": 2, "rollout.n_gpus_per_node": 2}, "one node"),
    ("rollout.pipeline_parallel_size", ADAPTERS | {"rollout.pipeline_parallel_size": 2},
     "has not been checked"),
    ("rollout.engine_kwargs.max_loras", {"rollout.engine_kwargs": {"max_loras": 2}}, "could differ"),
    ("rollout.max_model_len", {"rollout.max_model_len": 191}, "do not fit"),
    ("rollout.sampling.temperature", {"rollout.sampling.temperature": 0}, "nothing is explored"),
    ("rollout.sampling.temperature", GAE | {"rollout.sampling.temperature": 0, "rollout.n": 1}, "nothing is explored"),
    ("rollout.engine_kwargs.dtype", {"rollout.engine_kwargs": {"dtype": "half"}}, "could differ"),
    ("rollout.engine_kwargs.data_parallel_size", {"rollout.engine_kwargs": {"data_parallel_size": 2}}, "assigns GPUs"),
    *((f"rollout.engine_kwargs.{name}", {"rollout.engine_kwargs": {name: value}}, text)
      for name, value, text in (("pipeline_parallel_size", 2, "could differ"),
                                ("data_parallel_size_local", 2, "assigns GPUs"), ("nnodes", 2, "assigns GPUs"),
                                ("hf_config_path", "other", "another model"),
                                ("config_format", "mistral", "another model"),
                                ("runner", "pooling", "generate nothing"), ("convert", "embed", "generate nothing"))),
    ("rollout.engine_kwargs.quantization", {"rollout.engine_kwargs": {"quantization": "fp8"}}, "could differ"),
    ("rollout.quantization", {"rollout.quantization": "mxfp8"}, "16 bits"),
    ("rollout.quantization",
     {"rollout.quantization": "mxfp8", "rollout.dtype": "bfloat16", "weight_sync.backend": "nccl"}, "they fetch"),
    *((f"rollout.engine_kwargs.{name}", {"rollout.engine_kwargs": {name: value}, **changes}, text)
      for name, value, changes, text in [
          ("hf_overrides", {"num_hidden_layers": 1}, {}, "another model than the Trainer"),
          ("logits_processors", ["mine:Processor"], {}, "a changed distribution"),
          ("kv_cache_dtype", "fp8", {}, "keys and values are rounded"),
          ("speculative_config", {"method": "ngram", "rejection_sample_method": "synthetic"}, {}, "no samples of the"),
      ]),
    (f"{TURNS}.enable", {f"{TURNS}.enable": True}, "no tool to call"),
    (f"{TURNS}.max_assistant_turns", TOOLS | {f"{TURNS}.max_assistant_turns": 1}, "no turn left"),
    (f"{TURNS}.timeout_s", TOOLS | {f"{TURNS}.timeout_s": 3600}, "drops the whole sample first"),
    (f"{TURNS}.tools.0", tools(class_name="calculator", function="a:b"), "more than one"),
    (f"{TURNS}.tools.0", tools(), "none of them"),
    (f"{TURNS}.tools.0.mcp", tools(mcp={"command": ["a"], "url": "http://b"}), "both are set"),
    (f"{TURNS}.tools.0.mcp", tools(mcp={}), "neither is set"),
    (f"{TURNS}.tools.0.mcp.url", tools(mcp={"url": "ftp://b"}), "over HTTP"),
    (f"{TURNS}.tools.0.timeout_s", tools(class_name="calculator", timeout_s=3600), "before a call that hangs"),
    (f"{TURNS}.interactions", {f"{TURNS}.enable": True, f"{TURNS}.interactions": [{"class_name": "scripted"}] * 2},
     "two interactions have this name"),
    ("rollout.agent.command", AGENT | {"rollout.agent.command": ["python"]}, "only one of them"),
    ("rollout.agent", AGENT | TOOLS, "only one of them"),
    ("rollout.agent.timeout_s", AGENT | {"rollout.agent.timeout_s": 7200}, "no agent gets that long"),
    ("rollout.over_sample.samples", OVER | {"async_training.deterministic": True}, "feed order"),
    ("rollout.over_sample.samples", OVER | RECORD_BATCHES, "one batch"),
    ("trainer.ppo_max_token_len", {"trainer.ppo_max_token_len": 191}, "would not fit a micro-batch"),
    ("critic.ppo_max_token_len", GAE | {"critic.ppo_max_token_len": 191}, "would not fit a micro-batch"),
    ("trainer.total_training_steps", {"async_training.require_batches": 3}, "cannot end at step"),
    ("trainer.total_training_steps", {"trainer.ppo_epochs": 7}, "in each of 7 passes"),
    ("trainer.dtype", {"trainer.dtype": "float16"}, "underflow"),
    ("trainer.attn_implementation",
     {"trainer.attn_implementation": "flex_attention", "trainer.device": "cpu"}, "runs on GPUs only"),
    ("trainer.attn_implementation", {"trainer.attn_implementation": "flash_attention_2"}, "half precision only"),
    ("trainer.attn_implementation",
     {"trainer.attn_implementation": "eager", "trainer.num_workers": 2, "trainer.ulysses_sequence_parallel_size": 2},
     "only sdpa packs them"),
    ("trainer.router_aux_loss_coef",
     {"trainer.router_aux_loss_coef": 0.001, "trainer.strategy": "torchtitan"}, "does not have this loss"),
    ("trainer.fsdp_size",
     {"trainer.strategy": "fsdp2", "trainer.num_workers": 2, "trainer.tensor_parallel_size": 2, "trainer.fsdp_size": 2},
     "groups of 2: 2 (trainer.num_workers) / 2 (trainer.tensor_parallel_size) are left"),
    ("trainer.fsdp_size",
     {"trainer.strategy": "torchtitan", "trainer.num_workers": 4, "trainer.fsdp_size": 3}, "groups of 3"),
    ("trainer.tensor_parallel_size",
     {"trainer.strategy": "ddp", "trainer.num_workers": 2, "trainer.tensor_parallel_size": 2},
     "only fsdp2, torchtitan, nemo_automodel have it"),
    ("critic.dtype", GAE | {"critic.dtype": "float16"}, "underflow"),
    ("trainer.num_workers", {"trainer.num_workers": 2, "trainer.strategy": "local"}, "one process"),
    ("critic.strategy", GAE | {"critic.strategy": "local", "trainer.num_workers": 2, "trainer.strategy": "ddp"},
     "one process"),
    ("critic.num_workers", GAE | {"critic.placement": "own", "critic.num_workers": 2, "trainer.strategy": "local"},
     "one process"),
    ("trainer.ulysses_sequence_parallel_size",
     {"trainer.ulysses_sequence_parallel_size": 2, "trainer.num_workers": 4, "trainer.use_remove_padding": False},
     "packed form"),
    ("critic.warmup_steps", GAE | {"critic.warmup_steps": 1000}, "only the critic would learn"),
    ("reward_model.path", {"reward_model.placement": "serve"}, "needs a model"),
    ("rollout.n", {"rollout.n": 1}, "every advantage is 0"),
    ("rollout.n", RLOO | {"rollout.n": 1}, "every advantage is 0"),
    ("algorithm.filter_groups.enable", REMAX | FILTER | {"rollout.n": 1}, "equal rewards"),
    ("algorithm.filter_groups.enable", SCORED | FILTER, "before the Trainer's reward model"),
    ("reward_model.placement", REMAX | SCORED, "ReMax"),
    (IS, {IS: "token"}, "count it twice"),
    (f"{IS}_batch_normalize", REINFORCE | {IS: "token", f"{IS}_batch_normalize": True}, "no mean over the lease"),
    (f"{IS}_threshold_low",
     {f"{CORRECTION}.bypass_mode": False, IS: "token", f"{IS}_mode": "mask", f"{IS}_threshold_low": 2.0},
     "all would be 0"),
    (f"{RS}_threshold", {RS: "geometric", f"{RS}_threshold": 0.9}, "every response would be rejected"),
    (f"{RS}_threshold", {RS: "seq_mean_k1"}, "seq_mean_k1 rejects"),
    ("reward.function", NO_FUNCTION, "nothing else counts"),
    ("reward.function", NO_FUNCTION | TOOLS | {"reward.tool_weight": 0, "reward.turn_weight": 0}, "nothing else"),
    ("reward.weight", {"reward.weight": 0}, "no other score counts"),
    ("reward.weight", SERVED | {"reward.weight": 0, "reward_model.weight": 0}, "no other score counts"),
    ("reward.weight", functions(weight=0) | {"reward.weight": 0}, "no other score counts"),
    ("reward.functions.name", functions(name="tools"), "a part 'tools' already"),
    ("reward.functions.name", functions(name="a b"), "cannot name a metric"),
    ("reward.functions.name", {"reward.functions": functions()["reward.functions"] * 2}, "2 functions have this name"),
    ("reward.functions.function", functions(function="none"), "would score nothing"),
    ("reward.judge.base_url", {"reward.judge.model": "judge-1"}, "no endpoint"),
    ("reward.judge.base_url", {"reward.judge.model": ""}, "no endpoint"),  # only null turns the judge off
    ("reward.judge.base_url", JUDGE | {"reward.judge.base_url": "localhost:8000"}, "no endpoint"),
    ("reward.judge.min", JUDGE | {"reward.judge.min": 10}, "no number between them"),
    ("reward.judge.params.model", JUDGE | {"reward.judge.params": {"model": "x"}}, "set for every request"),
    ("reward.judge.prompt", JUDGE | {"reward.judge.prompt": "Is {question} hard?"}, "not see what it judges"),
    ("reward.judge.pattern", JUDGE | {"reward.judge.pattern": "("}, "no regular expression"),
    ("reward.judge.pattern", JUDGE | {"reward.judge.pattern": r"\d"}, "no group"),
    ("reward.overlong_buffer.len", {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 4096},
     "every response would be punished"),
    ("serve.host", {"serve.host": "0.0.0.0"}, "anybody"),
    ("serve.allowed_hosts", {"serve.allowed_hosts": ["proxy:8000"]}, "without scheme, port"),
    ("logging.sinks", {"logging.sinks": ["jsonl", "jsonl"]}, "twice"),
    (OTLP, {OTLP: "127.0.0.1:4318"}, "not an HTTP address"),
    (OTLP, {OTLP: "http://127.0.0.1:port/v1/traces"}, "not an HTTP address"),
    (OTLP, {OTLP: "http:///v1/traces"}, "not an HTTP address"),
    ("profiler.ranks", {"profiler.steps": [1], "profiler.ranks": []}, "no process"),
    ("profiler.ranks", {"profiler.steps": [1], "profiler.ranks": [0, 2], "trainer.num_workers": 2},
     "from 0 to 1, so there is no rank 2"),
    ("profiler.tool", NSYS | {"trainer.device": "cpu"}, "profiles GPUs"),
    ("skip.async_rollout.steps", {"skip.async_rollout.enable": True}, "record and replay nothing"),
    ("skip.async_rollout.steps", RECORD | {"skip.async_rollout.steps": "1-"}, "range"),
    ("skip.async_rollout.steps", RECORD | {"skip.async_rollout.steps": 0}, "counted from 1"),
    ("skip.async_rollout.dump_dir", RECORD | {"skip.async_rollout.dump_dir": ""}, "in which the run is started"),
    ("skip.async_rollout.enable", RECORD | RECORD_BATCHES, "recorded twice"),
    ("skip.rollout.enable", RECORD_BATCHES | {"mode": "fully_async"}, "launch sync"),
    ("skip.roles.sums.steps", OWN_ROLE | {"skip.roles": {"sums": {"enable": True}}}, "record and replay nothing"),
    ("skip.roles.sums", {"skip.roles": OWN_ROLE["skip.roles"]}, "no module registers"),
    ("skip.roles.reward", OWN_ROLE | {"skip.roles": {"reward": {}}}, "has its own section"),
    ("skip.tool.enable", RECORD_TOOLS, "calls no tools"),
    ("teacher.path", DISTILL, "there is none"),
    ("algorithm.filter_groups.enable", DISTILL | TEACHER | FILTER, "learns from the teacher alone"),
    ("algorithm.use_kl_in_reward", DISTILL | TEACHER | {"algorithm.use_kl_in_reward": True}, "does not use rewards"),
    ("skip.ref_log_prob.enable", {"skip.ref_log_prob.enable": True, "skip.ref_log_prob.steps": "all"}, "no reference"),
]  # fmt: skip

SURPRISING: list[tuple[str, Changes]] = [
    ("trainer.nnodes", TWO_NODES),
    ("weight_sync.backend", {"weight_sync.backend": "mine:Folder", "rollout.attach": "servers", "ray.address": "auto"}),
    ("rollout.sampling.top_p", {"rollout.sampling.top_p": 0.9}),
    ("rollout.sampling.top_k", {"rollout.sampling.top_k": 20}),
    ("rollout.sampling.min_p", {"rollout.sampling.min_p": 0.1}),
    ("rollout.val.n", {"rollout.val.n": 4}),
    ("rollout.max_num_seqs", {"rollout.max_num_seqs": 2}),
    (f"{TURNS}.max_tool_response_length", TOOLS | {f"{TURNS}.max_tool_response_length": 4096}),
    ("trainer.test_freq", {"trainer.test_freq": 5, "data.val_files": []}),
    ("trainer.dtype", {"trainer.dtype": "bfloat16", "trainer.device": "cpu"}),
    ("trainer.num_workers", {"trainer.num_workers": 64, "trainer.strategy": "ddp", "trainer.ppo_mini_batch_size": 2}),
    ("trainer.ppo_epochs", REINFORCE | {"trainer.ppo_epochs": 2}),
    ("trainer.optim.warmup_steps", {"trainer.optim.warmup_steps": 10_000}),
    ("trainer.optim.warmup_steps", GAE | {"critic.warmup_steps": 75}),
    ("critic.warmup_steps", GAE | {"critic.warmup_steps": 41, "trainer.total_training_steps": 80}),
    ("critic.optim.warmup_steps", GAE | {"critic.optim.warmup_steps": 10_000}),
    ("ref.placement", REFERENCE | {"ref.placement": "own", "model.lora_rank": 4}),
    ("reward_model.weight", SERVED | {"reward_model.weight": 0}),
    ("algorithm.filter_groups.enable", GAE | FILTER),
    ("algorithm.filter_groups.enable", TEACHER | FILTER),
    ("algorithm.kl_loss_coef", REFERENCE | {"algorithm.kl_loss_coef": 0.0}),
    ("algorithm.kl_ctrl.kl_coef", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0}),
    ("algorithm.use_kl_in_reward", REFERENCE | {"algorithm.use_kl_in_reward": True}),
    ("algorithm.clip_ratio_high", GSPO | {"algorithm.loss_agg_mode": "seq-mean-token-mean"}),
    ("algorithm.loss_agg_mode", GSPO | {"algorithm.clip_ratio_low": 3e-4, "algorithm.clip_ratio_high": 4e-4}),
    ("algorithm.kl_ctrl.horizon", ADAPTIVE | {"algorithm.kl_ctrl.horizon": 127}),
    (IS, REINFORCE),
    (IS, ON_POLICY | REINFORCE | {"async_training.trigger_parameter_sync_step": 2}),
    ("reward.judge.weight", JUDGE | {"reward.judge.weight": 0}),
    ("reward.judge.prompt", JUDGE | {"reward.judge.prompt": "{response} {truth}"}),
    ("async_training.max_staleness", {"async_training.max_staleness": 1, "async_training.staleness_threshold": 3}),
    ("weight_sync.max_deltas", DELTAS),
    ("trainer.lend_after_s", LENT),
    ("timeouts.watchdog_s", {"timeouts.watchdog_s": 5}),
    ("timeouts.watchdog_s", {"timeouts.generate_s": 900}),
    ("timeouts.watchdog_s", {"reward.timeout_s": 900}),
    ("timeouts.watchdog_s", JUDGE | {"reward.judge.timeout_s": 900}),
    ("timeouts.sample_s", {"timeouts.sample_s": 599}),
    ("timeouts.probe_s", {"timeouts.probe_s": 61}),
    ("trainer.save_freq", {"trainer.total_training_steps": 3_000, "rollout.response_length": 8192}),
    ("trainer.save_freq", {"trainer.total_training_steps": 3_200}),
    ("logging.sinks", {"logging.sinks": ["tensorboard"]}),
    (OTLP, {OTLP: "http://127.0.0.1:4318"}),
    ("profiler.steps", {"profiler.steps": [4, 9], "trainer.total_training_steps": 8}),
    ("skip.async_rollout.dump_dir", RECORD | {"skip.async_rollout.dump_dir": "records"}),
    ("skip.async_rollout.engines", RECORD | {"skip.async_rollout.engines": "auto", "data.val_files": ["val.jsonl"]}),
    ("skip.async_rollout.replay_versions",
     RECORD | {"skip.async_rollout.action": "repeat", "async_training.max_staleness": 2}),
]  # fmt: skip

WITHOUT_EFFECT: list[tuple[str, Any, Changes]] = [
    ("trainer.total_epochs", 3, {}),
    ("trainer.lend_after_s", 5.0, {"mode": "sync"}),
    ("trainer.partial_final_batch", "drop", {}),
    ("trainer.optim.min_lr_ratio", 0.1, {}),
    ("trainer.param_offload", True, {"trainer.device": "cpu"}),
    ("trainer.use_liger", True, {"trainer.device": "cpu"}),
    ("trainer.attn_implementation", "eager", {"trainer.strategy": "megatron_layers"}),
    ("ref.dtype", "bfloat16", {}),
    ("teacher.coef", 2.0, {}),
    ("teacher.num_workers", 2, TEACHER),
    ("ref.dtype", "bfloat16", REFERENCE | {"model.lora_rank": 4}),
    ("ref.num_workers", 2, REFERENCE),
    ("critic.path", "model", {}),
    ("critic.cpu_threads", 2, GAE),
    ("critic.optim.min_lr_ratio", 0.5, GAE),
    ("reward_model.weight", 0.5, {}),
    ("reward_model.worker.dtype", "bfloat16", SERVED),
    ("reward_model.max_batch_size", 2, SCORED),
    ("model.lora_alpha", 32.0, {}),
    ("model.target_modules", ["q_proj"], {}),
    ("async_training.stale_action", "mask", {}),
    ("async_training.partial_mode", "abort", {"async_training.partial_rollout": False}),
    ("weight_sync.clear_kv_cache", True, {"async_training.partial_mode": "abort"}),
    ("recovery.window_s", 60.0, {"recovery.max_restarts": 0}),
    ("ray.object_store_memory_bytes", 10**9, {"ray.address": "auto"}),
    ("ray.keep_logs_days", 3.0, {"ray.address": "auto"}),
    ("rollout.num_replicas", 2, {"ray.address": "auto", "rollout.attach": "servers"}),
    ("rollout.autoscaling.enable", True, {"ray.address": "auto", "rollout.attach": "servers"}),
    ("rollout.autoscaling.up_after_s", 9.0, {}),
    ("algorithm.norm_adv_by_std_in_grpo", False, RLOO),
    ("algorithm.gamma", 0.9, {}),
    ("algorithm.lam", 0.9, RLOO),
    ("algorithm.clip_ratio_low", 0.1, REINFORCE),
    ("algorithm.clip_ratio_high", 0.1, REINFORCE),
    ("algorithm.clip_ratio_c", 5.0, {"algorithm.policy_loss": "cispo"}),
    ("algorithm.loss_scale_factor", 100.0, {}),
    ("algorithm.kl_loss_coef", 0.1, {}),
    ("algorithm.kl_loss_type", "k1", {}),
    ("algorithm.kl_penalty", "k2", {}),
    ("algorithm.kl_ctrl.type", "adaptive", {}),
    ("algorithm.kl_ctrl.target_kl", 6.0, {"algorithm.use_kl_in_reward": True}),
    ("algorithm.kl_ctrl.horizon", 100, {"algorithm.use_kl_in_reward": True}),
    ("algorithm.filter_groups.max_consecutive", 8, {}),
    (f"{IS}_mode", "mask", {}),
    (f"{IS}_threshold", 3.0, {}),
    (f"{IS}_threshold_low", 0.5, {}),
    (f"{IS}_batch_normalize", True, {}),
    (f"{RS}_threshold", 2.0, {}),
    (f"{RS}_threshold_low", 0.5, {RS: "token_k2", f"{RS}_threshold": 0.1}),
    ("reward.max_errors", 3, {}),
    ("reward.weight", 2.0, NO_FUNCTION | JUDGE),
    ("reward.batch", True, NO_FUNCTION | JUDGE),
    ("reward.max_concurrency", 2, NO_FUNCTION | JUDGE),
    ("reward.tool_weight", 2.0, {}),
    ("reward.turn_weight", 2.0, {}),
    ("reward.judge.weight", 2.0, {}),
    ("reward.overlong_buffer.len", 8, {}),
    ("reward.overlong_buffer.penalty_factor", 2.0, {}),
    (f"{TURNS}.max_user_turns", 3, AGENT),
    (f"{TURNS}.max_user_turns", 3, TOOLS),
    (f"{TURNS}.timeout_s", 3, AGENT),
    (f"{TURNS}.format", "mistral", {}),
    (f"{TURNS}.max_parallel_calls", 2, USER),
    ("rollout.agent.max_concurrency", 3, {}),
    ("rollout.over_sample.unfinished", "keep_partial", {}),
    ("profiler.buffer_events", 5, {"profiler.level": "off"}),
    ("profiler.keep_gb", 0.5, {"profiler.level": "off"}),
    ("profiler.synchronize", True, {"profiler.level": "off"}),
    (OTLP, URL, {"profiler.level": "off"}),
    ("profiler.ranks", [1], {}),
    ("profiler.tool", "nsys", {}),
    ("skip.async_rollout.steps", "all", {}),
    ("skip.async_rollout.on_mismatch", "error", RECORD | {"skip.async_rollout.action": "repeat"}),
]  # fmt: skip

VALID: list[Changes] = [
    COLOCATED,
    COLOCATED | {"trainer.strategy": "ddp", "model.lora_rank": 4},
    COLOCATED
    | ADAPTERS
    | {"trainer.num_workers": 4, "rollout.num_replicas": 2, "rollout.tensor_parallel_size": 2}
    | {"trainer.strategy": "fsdp2"},
    TWO_NODES | {"trainer.checkpoint_dir": "/shared/run", "trainer.save_freq": 5},
    TWO_NODES | {"trainer.save_last": False},
    {
        "rollout.engine_kwargs": {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
            "kv_cache_dtype": "auto",
            "enable_expert_parallel": True,
            "hf_overrides": {},
        }
    },
    {"rollout.engine_kwargs": {"kv_cache_dtype": "fp8"}, "weight_sync.max_mismatch_kl": None},
    {},
    NCCL | {"async_training.partial_rollout": False, "async_training.staleness_threshold": 0},
    DELTAS | {"rollout.dtype": "bfloat16"},
    # Calls with these deadlines count as progress.
    {"timeouts.train_s": 7200, "timeouts.collective_s": 3600, "timeouts.apply_s": 900},
    REINFORCE | ON_POLICY,
    REINFORCE | {IS: "token"},
    ADAPTIVE | {"algorithm.kl_ctrl.horizon": 128},
    {RS: "geometric"},
    SERVED | {"reward.weight": 0},
    SERVED | FILTER,
    {"reward.weight": 0, "reward.overlong_buffer.enable": True},
    NO_FUNCTION | JUDGE,
    NO_FUNCTION | TEACHER | DISTILL | {"rollout.n": 1, "teacher.placement": "own"},
    NO_FUNCTION | TOOLS | {f"{TURNS}.max_tool_response_length": 64},
    NO_FUNCTION | functions(),
    JUDGE | {"reward.judge.prompt": '{conversation} {"json": 1}', "reward.judge.min": -1},
    AGENT | {f"{TURNS}.format": "mistral", f"{TURNS}.tokenization_sanity_check_mode": "strict"},
    AGENT | NO_FUNCTION | {"serve.host": "0.0.0.0", "serve.api_key_env": "MINE"},
    AGENT | {"rollout.agent.timeout_s": 60, "rollout.agent.max_concurrency": 2},
    {"profiler.level": "off"},
    {"profiler.level": "full", "profiler.synchronize": True, "profiler.buffer_events": 5},
    NSYS,
    # A model in separate processes may have more ranks than the policy.
    REFERENCE
    | {"profiler.steps": [1], "profiler.ranks": [2], "ref.placement": "own", "ref.num_workers": 3}
    | {"ref.strategy": "ddp"},
    {OTLP: URL},
    RECORD | {"skip.reward.enable": True, "skip.reward.steps": [1, "2-4"]},
    RECORD_BATCHES,
    OWN_ROLE,
    RECORD_TOOLS | TOOLS | {f"{TURNS}.max_tool_response_length": 64},
]


@pytest.mark.parametrize(("key", "changes", "text"), BROKEN, ids=[f"{key}-{n}" for n, (key, *_) in enumerate(BROKEN)])
def test_a_combination_that_cannot_work_is_an_error(key: str, changes: Changes, text: str) -> None:
    problem = single(one for one in errors(rule_problems(changes)) if one.key == key)
    assert text in problem.consequence
    assert problem.fix


@pytest.mark.parametrize(("key", "changes"), SURPRISING, ids=[f"{k}-{n}" for n, (k, _) in enumerate(SURPRISING)])
def test_a_combination_that_surprises_is_a_warning(key: str, changes: Changes) -> None:
    found = rule_problems(changes)
    assert [one.severity for one in found if one.key == key] == ["warning"]
    assert errors(found) == []


@pytest.mark.parametrize(
    ("key", "value", "changes"), WITHOUT_EFFECT, ids=[f"{key}-{n}" for n, (key, *_) in enumerate(WITHOUT_EFFECT)]
)
def test_a_key_without_effect_is_an_error(key: str, value: Any, changes: Changes) -> None:
    problem = single(one for one in errors(rule_problems(changes | {key: value})) if one.key == key)
    assert problem.value == value
    assert problem.consequence.startswith("it would have no effect: ")
    assert problem.fix.endswith(", or leave this key out")


@pytest.mark.parametrize("changes", VALID, ids=[str(number) for number in range(len(VALID))])
def test_a_valid_combination_is_accepted(changes: Changes) -> None:
    assert rule_problems(changes) == []


def test_a_run_of_no_steps_needs_nothing_of_a_trainer() -> None:
    """Neither training data nor a Trainer's devices and libraries, and keys of training may be set."""
    none: Changes = {"trainer.total_training_steps": 0}
    training: Changes = {
        "trainer.strategy": "megatron_layers", "trainer.device": "cuda", "trainer.num_workers": 8,
        "critic.warmup_steps": 5, "algorithm.adv_estimator": "gae", "rollout.sampling.temperature": 0.7,
        "profiler.steps": [9],
    }  # fmt: skip
    assert rule_problems(none | training | {"data.train_files": []}) == []
    assert machine_problems(none | training | {"data.train_files": []}) == []
    assert single(rule_problems(none | {"data.val_files": []})).key == "data.val_files"
    assert single(rule_problems(none | {"resume": "auto"})).key == "resume"
    assert single(machine_problems(none | {"data.val_files": ["nope.jsonl"]})).key == "data.val_files"


def test_an_evaluation_leaves_out_what_it_does_not_use() -> None:
    config = as_evaluation(config_with({"skip.async_rollout.enable": True, "rollout.autoscaling.enable": True}))
    assert (config.data.train_files, config.profiler.level) == ((), "off")
    assert not config.skip.async_rollout.enable and not config.rollout.autoscaling.enable


EPOCHS: Changes = {"trainer.total_training_steps": None, "trainer.total_epochs": 1, "data.max_train_samples": 50}
"""The run has three steps of 16 samples, and a last one of 2 unless it is dropped."""
WHOLE: Changes = EPOCHS | {"trainer.partial_final_batch": "drop"}
WHOLE_GAE: Changes = WHOLE | GAE | {"trainer.optim.warmup_steps": 0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (EPOCHS | {"trainer.optim.warmup_steps": 3}, None),
        (EPOCHS | {"trainer.optim.warmup_steps": 4}, ("trainer.optim.warmup_steps", "warning")),
        (WHOLE | {"trainer.optim.warmup_steps": 2}, None),
        (WHOLE | {"trainer.optim.warmup_steps": 3}, ("trainer.optim.warmup_steps", "warning")),
        (WHOLE_GAE | {"critic.warmup_steps": 1}, None),
        (WHOLE_GAE | {"critic.warmup_steps": 2}, ("critic.warmup_steps", "warning")),  # the warm-up is most of the run
        (WHOLE_GAE | {"critic.warmup_steps": 3}, ("critic.warmup_steps", "error")),
        (WHOLE_GAE | {"critic.optim.warmup_steps": 3}, ("critic.optim.warmup_steps", "warning")),
        (WHOLE_GAE | {"critic.optim.warmup_steps": 3, "critic.ppo_epochs": 2}, None),
        (EPOCHS | {"data.max_train_samples": 15, "trainer.optim.warmup_steps": 0}, None),
        (WHOLE | {"data.max_train_samples": 15}, ("trainer.partial_final_batch", "error")),
    ],
)
def test_warm_ups_are_checked_against_the_length_of_the_data(
    changes: Changes, expected: tuple[str, str] | None
) -> None:
    assert [(one.key, one.severity) for one in machine_problems(changes)] == ([expected] if expected else [])


@pytest.mark.parametrize(("epochs", "extra", "warns"), [
    (1000, {}, False),
    (1001, {}, True),
    (1001, {"journal": "off"}, False),
    (1001, {"trainer.save_freq": 100}, False),
    (1001, {"trainer.save_freq": 50_000}, True),  # the run is shorter
])  # fmt: skip
def test_a_run_whose_journal_nothing_bounds_gets_a_warning(epochs: int, extra: Changes, warns: bool) -> None:
    found = machine_problems(EPOCHS | {"trainer.total_epochs": epochs} | extra)
    assert [(one.key, one.severity) for one in found] == [("trainer.save_freq", "warning")] * warns
    assert not warns or "nothing bounds the journal" in found[0].consequence


def test_a_key_with_its_default_value_is_accepted_where_it_has_no_effect() -> None:
    assert check_config(None, ["algorithm.kl_loss_coef=0.001"]).problems == ()


def test_a_skip_role_that_is_switched_off_may_keep_its_settings() -> None:
    assert check_config(None, ["skip.reward.steps=all", "skip.reward.enable=false"]).problems == ()
    assert check_config(None, ["skip.reward.steps=all"]).problems != ()


def test_sync_accepts_the_overrides_of_an_asynchronous_run() -> None:
    assert check_config(None, ["async_training.partial_mode=abort"], mode="sync").problems == ()
    problem = single(check_config(None, ["async_training.trigger_parameter_sync_step=3"], mode="sync").problems)
    assert "require_batches x trigger_parameter_sync_step" in problem.consequence


def test_serving_needs_no_training_data() -> None:
    assert check_config(None, ["data.train_files=[]"], scope="serve").problems == ()


def test_part_weights_has_every_source_of_rewards() -> None:
    assert part_weights(config_with({"reward.weight": 2.0})) == {"rule": 2.0}
    everything = (
        functions(weight=0.5) | TOOLS | JUDGE | SERVED | {"reward.tool_weight": 3.0, "reward_model.weight": 4.0}
    )
    parts = {"rule": 1.0, "brief": 0.5, "tools": 3.0, "turns": 1.0, "judge": 1.0, "model": 4.0}
    assert part_weights(config_with(everything)) == parts
    assert part_weights(config_with(NO_FUNCTION | AGENT)) == {"tools": 1.0, "turns": 1.0}

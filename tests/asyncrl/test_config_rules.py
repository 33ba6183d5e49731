"""Rules between keys, and checks of files and environment: each once broken, and told with key and fix."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import rules
from asyncrl.config.compose import examine
from asyncrl.config.problems import Problem, errors
from tests.fakes.configurations import changed, looked, only


def ruled(changes: Mapping[str, Any]) -> list[Problem]:
    return rules.problems(changed(changes), set(changes))


CORRECTION = "algorithm.rollout_correction"
RLOO = {"algorithm.adv_estimator": "rloo"}

GAE = {"algorithm.adv_estimator": "gae"}
REMAX = {"algorithm.adv_estimator": "remax"}
ULYSSES = {"trainer.ulysses_sequence_parallel_size": 2, "trainer.strategy": "fsdp2"}
SCORED = {"reward_model.placement": "serve", "reward_model.path": "rm"}
REINFORCE = {"algorithm.policy_loss": "reinforce"}
ON_POLICY = {"async_training.staleness_threshold": 0}
ADAPTIVE = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("experiment_name", {"experiment_name": "a/b"}),
    ("experiment_name", {"experiment_name": ".."}),
    ("trainer.optim.lr", {"trainer.optim.lr": float("inf")}),
    ("data.train_files", {"data.train_files": []}),
    ("data.train_files", {"data.reasoning_gym": {"task": "chain_sum"}}),
    ("rollout.max_model_len", {"rollout.max_model_len": 191}),
    ("trainer.ppo_max_token_len", {"trainer.ppo_max_token_len": 191}),
    ("rollout.n", {"rollout.n": 1}),
    ("rollout.sampling.temperature", {"rollout.sampling.temperature": 0}),
    ("rollout.sampling.temperature", GAE | {"rollout.sampling.temperature": 0, "rollout.n": 1}),
    ("rollout.sampling.top_k", {"rollout.sampling.top_k": 0}),
    ("rollout.val.top_k", {"rollout.val.top_k": -2}),
    ("trainer.test_freq", {"trainer.test_freq": 0}),
    ("trainer.save_freq", {"trainer.save_freq": -2}),
    ("trainer.total_training_steps", {"async_training.require_batches": 3}),
    ("trainer.total_epochs", {"trainer.total_epochs": 3}),
    ("trainer.partial_final_batch", {"trainer.partial_final_batch": "drop"}),
    ("trainer.optim.betas", {"trainer.optim.betas": [0.9, 1.0]}),
    ("trainer.dtype", {"trainer.dtype": "float16"}),
    ("async_training.stale_action", {"async_training.stale_action": "mask"}),
    ("async_training.partial_mode", {"async_training.partial_mode": "abort", "async_training.partial_rollout": False}),
    ("weight_sync.clear_kv_cache", {"weight_sync.clear_kv_cache": True, "async_training.partial_mode": "abort"}),
    ("algorithm.kl_loss_coef", {"algorithm.kl_loss_coef": 0.1}),
    ("algorithm.kl_loss_type", {"algorithm.kl_loss_type": "k1"}),
    ("rollout.n", {"rollout.n": 1, "algorithm.adv_estimator": "rloo"}),
    (
        "algorithm.filter_groups.enable",
        {"rollout.n": 1, "algorithm.adv_estimator": "remax", "algorithm.filter_groups.enable": True},
    ),
    (f"{CORRECTION}.rollout_is", {f"{CORRECTION}.rollout_is": "token"}),
    (
        f"{CORRECTION}.rollout_is_batch_normalize",
        {
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_batch_normalize": True,
            "algorithm.policy_loss": "reinforce",
        },
    ),
    (
        f"{CORRECTION}.rollout_is_threshold_low",
        {
            f"{CORRECTION}.bypass_mode": False,
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_mode": "mask",
            f"{CORRECTION}.rollout_is_threshold_low": 2.0,
        },
    ),
    (
        f"{CORRECTION}.rollout_rs_threshold",
        {f"{CORRECTION}.rollout_rs": "geometric", f"{CORRECTION}.rollout_rs_threshold": 0.9},
    ),
    (f"{CORRECTION}.rollout_rs_threshold", {f"{CORRECTION}.rollout_rs": "seq_mean_k1"}),
    ("reward.overlong_buffer.len", {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 4096}),
    ("reward.overlong_buffer.len", {"reward.overlong_buffer.len": 8}),
    ("reward.overlong_buffer.penalty_factor", {"reward.overlong_buffer.penalty_factor": 2.0}),
    ("algorithm.norm_adv_by_std_in_grpo", {"algorithm.norm_adv_by_std_in_grpo": False, **RLOO}),
    ("algorithm.gamma", {"algorithm.gamma": 0.9}),
    ("algorithm.lam", {"algorithm.lam": 0.9, **RLOO}),
    ("algorithm.clip_ratio_low", {"algorithm.clip_ratio_low": 0.1, "algorithm.policy_loss": "reinforce"}),
    ("algorithm.clip_ratio_high", {"algorithm.clip_ratio_high": 0.1, "algorithm.policy_loss": "reinforce"}),
    ("algorithm.clip_ratio_c", {"algorithm.clip_ratio_c": 5.0, "algorithm.policy_loss": "cispo"}),
    ("algorithm.loss_scale_factor", {"algorithm.loss_scale_factor": 100.0}),
    ("algorithm.kl_penalty", {"algorithm.kl_penalty": "k2"}),
    ("algorithm.kl_ctrl.type", {"algorithm.kl_ctrl.type": "adaptive"}),
    ("algorithm.kl_ctrl.kl_coef", {"algorithm.kl_ctrl.kl_coef": 0.1}),
    ("algorithm.kl_ctrl.target_kl", {"algorithm.kl_ctrl.target_kl": 6.0, "algorithm.use_kl_in_reward": True}),
    ("algorithm.kl_ctrl.horizon", {"algorithm.kl_ctrl.horizon": 100, "algorithm.use_kl_in_reward": True}),
    ("algorithm.filter_groups.max_consecutive", {"algorithm.filter_groups.max_consecutive": 8}),
    (f"{CORRECTION}.rollout_is_mode", {f"{CORRECTION}.rollout_is_mode": "mask"}),
    (f"{CORRECTION}.rollout_is_threshold", {f"{CORRECTION}.rollout_is_threshold": 3.0}),
    (f"{CORRECTION}.rollout_is_threshold_low", {f"{CORRECTION}.rollout_is_threshold_low": 0.5}),
    (f"{CORRECTION}.rollout_is_batch_normalize", {f"{CORRECTION}.rollout_is_batch_normalize": True}),
    (f"{CORRECTION}.rollout_rs_threshold", {f"{CORRECTION}.rollout_rs_threshold": 2.0}),
    (
        f"{CORRECTION}.rollout_rs_threshold_low",
        {
            f"{CORRECTION}.rollout_rs": "token_k1",
            f"{CORRECTION}.rollout_rs_threshold": 0.1,
            f"{CORRECTION}.rollout_rs_threshold_low": 0.5,
        },
    ),
    ("reward.max_errors", {"reward.max_errors": 3}),
    ("trainer.optim.min_lr_ratio", {"trainer.optim.min_lr_ratio": 0.1}),
    ("ray.object_store_memory_bytes", {"ray.object_store_memory_bytes": 10**9, "ray.address": "auto"}),
    ("trainer.total_training_steps", {"trainer.ppo_epochs": 7}),
    ("critic.warmup_steps", GAE | {"critic.warmup_steps": 1000}),
    ("critic.optim.betas", GAE | {"critic.optim.betas": [1.0, 0.9]}),
    ("critic.dtype", GAE | {"critic.dtype": "float16"}),
    ("critic.ppo_max_token_len", GAE | {"critic.ppo_max_token_len": 191}),
    ("trainer.num_workers", {"trainer.num_workers": 2, "trainer.strategy": "local"}),
    ("critic.strategy", GAE | {"critic.strategy": "local", "trainer.num_workers": 2, "trainer.strategy": "ddp"}),
    (
        "critic.num_workers",
        GAE | {"critic.placement": "own", "critic.num_workers": 2, "trainer.strategy": "local"},
    ),
    (
        "trainer.ulysses_sequence_parallel_size",
        ULYSSES | {"trainer.num_workers": 4, "trainer.use_remove_padding": False},
    ),
    ("reward_model.path", {"reward_model.placement": "serve"}),
    ("reward_model.placement", REMAX | {"reward_model.placement": "worker", "reward_model.path": "rm"}),
    ("ref.dtype", {"ref.dtype": "bfloat16"}),
    ("ref.dtype", {"ref.dtype": "bfloat16", "algorithm.use_kl_loss": True, "model.lora_rank": 4}),
    ("ref.num_workers", {"ref.num_workers": 2, "algorithm.use_kl_loss": True}),
    ("critic.path", {"critic.path": "model"}),
    ("critic.cpu_threads", GAE | {"critic.cpu_threads": 2}),
    ("critic.optim.min_lr_ratio", GAE | {"critic.optim.min_lr_ratio": 0.5}),
    ("critic.optim.min_lr_ratio", {"critic.optim.min_lr_ratio": 0.5}),
    ("reward_model.weight", {"reward_model.weight": 0.5}),
    ("reward_model.worker.dtype", SCORED | {"reward_model.worker.dtype": "bfloat16"}),
    ("reward_model.max_batch_size", SCORED | {"reward_model.placement": "worker", "reward_model.max_batch_size": 2}),
    ("model.lora_alpha", {"model.lora_alpha": 32.0}),
    ("model.target_modules", {"model.target_modules": ["q_proj"]}),
    ("trainer.param_offload", {"trainer.param_offload": True, "trainer.device": "cpu"}),
    ("trainer.use_liger", {"trainer.use_liger": True, "trainer.device": "cpu"}),
    ("rollout.engine_kwargs.dtype", {"rollout.engine_kwargs": {"dtype": "half"}}),
    ("rollout.engine_kwargs.load_format", {"rollout.engine_kwargs": {"load_format": "pt"}}),
    ("rollout.engine_kwargs.worker_cls", {"rollout.engine_kwargs": {"worker_cls": "mine.Worker"}}),
    ("rollout.engine_kwargs.pipeline_parallel_size", {"rollout.engine_kwargs": {"pipeline_parallel_size": 2}}),
    ("rollout.engine_kwargs.data_parallel_size", {"rollout.engine_kwargs": {"data_parallel_size": 2}}),
    ("reward.weight", {"reward.weight": 0}),
    ("reward.weight", SCORED | {"reward.weight": 0, "reward_model.weight": 0}),
    (
        "algorithm.filter_groups.enable",
        SCORED | {"reward_model.placement": "worker", "algorithm.filter_groups.enable": True},
    ),
    ("rollout.engine_kwargs.quantization", {"rollout.engine_kwargs": {"quantization": "fp8"}}),
    ("recovery.window_s", {"recovery.window_s": 60.0, "recovery.max_restarts": 0}),
    ("serve.host", {"serve.host": "0.0.0.0"}),
]

SURPRISING: list[tuple[str, dict[str, Any]]] = [
    ("rollout.sampling.top_p", {"rollout.sampling.top_p": 0.9}),
    ("rollout.sampling.top_k", {"rollout.sampling.top_k": 20}),
    ("rollout.sampling.min_p", {"rollout.sampling.min_p": 0.1}),
    ("rollout.val.n", {"rollout.val.n": 4}),
    ("trainer.optim.warmup_steps", {"trainer.optim.warmup_steps": 10_000}),
    ("trainer.test_freq", {"trainer.test_freq": 5, "data.val_files": []}),
    ("trainer.dtype", {"trainer.dtype": "bfloat16", "trainer.device": "cpu"}),
    ("async_training.max_staleness", {"async_training.max_staleness": 1, "async_training.staleness_threshold": 3}),
    ("trainer.num_workers", {"trainer.num_workers": 64, "trainer.strategy": "ddp", "trainer.ppo_mini_batch_size": 2}),
    ("trainer.ppo_epochs", {"trainer.ppo_epochs": 2, "algorithm.policy_loss": "reinforce"}),
    ("critic.dtype", GAE | {"critic.dtype": "bfloat16", "trainer.device": "cpu"}),
    ("ref.placement", {"ref.placement": "own", "algorithm.use_kl_loss": True, "model.lora_rank": 4}),
    ("algorithm.kl_loss_coef", {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.0}),
    ("algorithm.filter_groups.enable", GAE | {"algorithm.filter_groups.enable": True}),
    ("rollout.max_num_seqs", {"rollout.max_num_seqs": 2}),
    ("algorithm.clip_ratio_high", {"algorithm.policy_loss": "gspo", "algorithm.loss_agg_mode": "seq-mean-token-mean"}),
    (
        "algorithm.loss_agg_mode",
        {"algorithm.policy_loss": "gspo", "algorithm.clip_ratio_low": 3e-4, "algorithm.clip_ratio_high": 4e-4},
    ),
    ("algorithm.use_kl_in_reward", {"algorithm.use_kl_loss": True, "algorithm.use_kl_in_reward": True}),
    ("critic.warmup_steps", GAE | {"critic.warmup_steps": 41, "trainer.total_training_steps": 80}),
    ("timeouts.watchdog_s", {"timeouts.watchdog_s": 5}),
    ("timeouts.watchdog_s", {"timeouts.generate_s": 900}),
    ("timeouts.watchdog_s", {"reward.timeout_s": 900}),
    ("timeouts.watchdog_s", {"timeouts.engine_s": 900}),
    ("timeouts.sample_s", {"timeouts.sample_s": 599}),
    ("timeouts.probe_s", {"timeouts.probe_s": 61}),
    ("trainer.save_freq", {"trainer.total_training_steps": 100_000, "rollout.response_length": 1024}),
    ("critic.optim.warmup_steps", GAE | {"critic.optim.warmup_steps": 10_000}),
    ("trainer.optim.warmup_steps", GAE | {"critic.warmup_steps": 75}),
    ("reward_model.weight", SCORED | {"reward_model.weight": 0}),
    (f"{CORRECTION}.rollout_is", REINFORCE),
    (f"{CORRECTION}.rollout_is", ON_POLICY | REINFORCE | {"async_training.trigger_parameter_sync_step": 2}),
    (f"{CORRECTION}.rollout_is", ON_POLICY | REINFORCE | {"async_training.require_batches": 2}),
    ("algorithm.kl_ctrl.horizon", ADAPTIVE | {"algorithm.kl_ctrl.horizon": 127}),
]


@pytest.mark.parametrize(("key", "changes"), BROKEN, ids=[f"{k}-{i}" for i, (k, _) in enumerate(BROKEN)])
def test_a_combination_that_cannot_work(key: str, changes: dict[str, Any]) -> None:
    found = [problem for problem in ruled(changes) if problem.key == key]
    assert len(errors(found)) == 1
    assert found[0].consequence
    assert found[0].fix


@pytest.mark.parametrize(("key", "changes"), SURPRISING, ids=[key for key, _ in SURPRISING])
def test_a_combination_that_surprises(key: str, changes: dict[str, Any]) -> None:
    found = [problem for problem in ruled(changes) if problem.key == key]
    assert [problem.severity for problem in found] == ["warning"]
    assert errors(ruled(changes)) == []


def test_the_quickstart_and_its_four_modes_obey_every_rule() -> None:
    assert ruled({}) == []


@pytest.mark.parametrize(
    "changes",
    [
        # Their calls are watched as long as they may take.
        {"timeouts.train_s": 7200, "timeouts.collective_s": 3600, "timeouts.apply_s": 900},
        REINFORCE | ON_POLICY,
        REINFORCE | {f"{CORRECTION}.rollout_is": "token"},
        ADAPTIVE | {"algorithm.kl_ctrl.horizon": 128},
        {f"{CORRECTION}.rollout_rs": "geometric"},
        SCORED | {"reward.weight": 0},
        SCORED | {"algorithm.filter_groups.enable": True},
        {"reward.weight": 0, "reward.overlong_buffer.enable": True},
    ],
    ids=lambda changes: " ".join(key.rpartition(".")[2] for key in changes),
)
def test_what_is_fine(changes: dict[str, Any]) -> None:
    assert ruled(changes) == []


EPOCHS = {"trainer.total_training_steps": None, "trainer.total_epochs": 1, "data.max_train_samples": 50}
"""Three steps of 16 samples, and one of 2 unless it is left out."""


def test_warm_ups_are_held_against_a_length_that_the_data_gives() -> None:
    assert looked(EPOCHS | {"trainer.optim.warmup_steps": 3}) == []
    assert "4 steps" in only(looked(EPOCHS | {"trainer.optim.warmup_steps": 4})).consequence
    whole = EPOCHS | {"trainer.partial_final_batch": "drop"}
    assert looked(whole | {"trainer.optim.warmup_steps": 2}) == []
    found = only(looked(whole | {"trainer.optim.warmup_steps": 3}))
    assert (found.key, found.severity, "3 steps" in found.consequence) == (
        "trainer.optim.warmup_steps",
        "warning",
        True,
    )
    later = whole | GAE | {"trainer.optim.warmup_steps": 0}
    assert looked(later | {"critic.warmup_steps": 1}) == []
    assert only(looked(later | {"critic.warmup_steps": 2})).severity == "warning"  # most of the run
    assert (found := only(looked(later | {"critic.warmup_steps": 3}))).key == "critic.warmup_steps"
    assert found.severity == "error"
    assert only(looked(later | {"critic.optim.warmup_steps": 3})).key == "critic.optim.warmup_steps"
    assert looked(later | {"critic.optim.warmup_steps": 3, "critic.ppo_epochs": 2}) == []
    assert looked(EPOCHS | {"data.max_train_samples": 15, "trainer.optim.warmup_steps": 0}) == []
    assert only(looked(whole | {"data.max_train_samples": 15})).key == "trainer.partial_final_batch"


def test_a_key_that_is_given_with_its_default_value_is_not_told_to_have_no_effect() -> None:
    assert examine(None, ["algorithm.kl_loss_coef=0.001"]).problems == ()


def test_sync_takes_the_overrides_of_an_asynchronous_run() -> None:
    assert examine(None, ["async_training.partial_mode=abort"], mode="sync").problems == ()
    (problem,) = examine(None, ["async_training.trigger_parameter_sync_step=3"], mode="sync").problems
    assert "require_batches x trigger_parameter_sync_step" in problem.consequence


def test_serving_needs_no_training_data() -> None:
    assert examine(None, ["data.train_files=[]"], serve_only=True).problems == ()


# ------------------------------------------------------------------------------------------------ surroundings


def test_missing_files_are_named_with_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    problem = only(looked({"data.train_files": [str(tmp_path / "trian.jsonl")]}))
    assert problem.key == "data.train_files"
    assert str(tmp_path / "train.jsonl") in problem.fix
    assert "there is no directory" in only(looked({"data.val_files": ["no/such/val.jsonl"]})).fix
    assert "asyncrl://quickstart" in only(looked({"data.val_files": ["asyncrl://quickstrat/val.jsonl"]})).fix
    assert only(looked({"model.chat_template": str(tmp_path / "no.jinja")})).key == "model.chat_template"


def test_data_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n")
    assert ".parquet" in only(looked({"data.train_files": [str(tmp_path / "train.csv")]})).fix


def test_reward_functions(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response): return 1.0\n")
    assert looked({"reward.function": f"{file}:score"}) == []
    assert looked({"reward.function": "math:sqrt"}) == []
    assert "did you mean exact_match?" in only(looked({"reward.function": "exact_mach"})).fix
    assert "did you mean score?" in only(looked({"reward.function": f"{file}:scor"})).fix
    assert "mine.py" in only(looked({"reward.function": f"{tmp_path}/mien.py:score"})).fix
    assert "no module" in only(looked({"reward.function": "no_such_module:score"})).consequence
    file.write_text("def score(\n")
    assert "not Python" in only(looked({"reward.function": f"{file}:score"})).consequence


def test_the_api_key_variable_must_hold_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    assert only(looked({"serve.api_key_env": "MY_KEY"})).key == "serve.api_key_env"
    monkeypatch.setenv("MY_KEY", "secret")
    assert looked({"serve.api_key_env": "MY_KEY"}) == []


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert only(looked({"serve.port": taken.getsockname()[1]}, serve_only=True)).key == "serve.port"


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    assert looked({"run_dir": str(used)}) == []
    (used / "summary.json").write_text("{}")
    problem = only(looked({"run_dir": str(used)}))
    assert (problem.key, "resume=auto" in problem.fix) == ("run_dir", True)
    assert looked({"run_dir": str(used), "resume": "auto"}) == []
    (tmp_path / "file").write_text("")
    assert "not a directory" in only(looked({"run_dir": str(tmp_path / "file" / "run")})).consequence


def test_resume_from_what_is_not_there(tmp_path: Path) -> None:
    assert looked({"resume": str(tmp_path)}) == []
    assert "did you mean auto?" in only(looked({"resume": "autp"})).fix
    problem = only(looked({"resume": str(tmp_path / "none")}))
    assert (problem.key, "did you mean" in problem.fix) == ("resume", False)  # a path is no misspelt `none`


def test_on_a_cluster_files_may_be_elsewhere() -> None:
    assert only(looked({"ray.address": "auto", "data.val_files": ["no.jsonl"]})).severity == "warning"

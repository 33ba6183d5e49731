"""Engines whose models NeMo Automodel or VeOmni shards: the calls of the libraries, with fakes in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from asyncrl.core.failures import ConfigError
from tests.fakes.trainer_model import make_spec, write_model
from trainer.engines import dist
from trainer.engines.base import Layout
from trainer.engines.registry import new_engine

Install = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a module with these attributes in the place of a library's."""

    def add(name: str, attributes: dict[str, Any]) -> None:
        for parent in [name[:end] for end, mark in enumerate(name) if mark == "."]:
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return add


def shard(model: nn.Module) -> nn.Module:
    """Shard `model` over the only rank, as the libraries do over several."""
    mesh = DeviceMesh("cpu", [0])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def new() -> Iterator[Callable[..., Any]]:
    """Return a function that makes an engine, which is closed after the test."""
    with ExitStack() as stack:

        def make(path: Path, strategy: str, **settings: Any) -> Any:
            engine = new_engine(make_spec(path, strategy=strategy, **settings))
            stack.callback(engine.close)
            return engine

        yield make


def of_ranks(engine: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine), "layout", property(lambda _: Layout(0, ranks, 0, ranks, True)))


def sums(model: nn.Module) -> bool:
    """Whether every part of a sharded model sums its gradients over the ranks."""
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in model.modules() if isinstance(unit, FSDPModule)]
    assert len(groups) == 3
    return all(group.gradient_divide_factor == 1.0 and group.force_sum_reduction_for_comms for group in groups)


class AutomodelCalls:
    def __init__(self, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meshes: list[dict[str, int]] = []
        self.configs: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        root = "nemo_automodel.components.distributed"
        style = type("ReplicatedWithGradAllReduce", (), {})
        self.style = style()
        install(f"{root}.config", {"FSDP2Config": lambda **settings: settings})
        install(f"{root}.mesh", {"MeshContext": SimpleNamespace(from_meshes=self.context)})
        install(f"{root}.model_parallelizer", {"parallelize_model": self.parallelize})
        install(f"{root}.parallel_styles", {"ReplicatedWithGradAllReduce": style})
        plans = {"transformers.models.llama.modeling_llama.LlamaForCausalLM": self.plan}
        install(f"{root}.optimized_tp_plans", {"PARALLELIZE_FUNCTIONS": plans})
        monkeypatch.setattr(dist, "make_mesh", self.make_mesh)

    def make_mesh(self, device: torch.device, sizes: dict[str, int], *, timeout_s: float) -> Any:
        assert (device.type, timeout_s) == ("cpu", 300.0)
        self.meshes.append(sizes)
        if sizes == {"fsdp": 1}:
            return DeviceMesh("cpu", [0])
        return {"tp": SimpleNamespace(get_group=lambda: "the tensor group")}

    def context(self, mesh: Any, *, strategy_config: dict[str, Any]) -> dict[str, Any]:
        assert "tp" in mesh
        return strategy_config

    def plan(self, model: nn.Module, sequence_parallel: bool) -> dict[str, Any]:
        assert isinstance(model, LlamaForCausalLM) and not sequence_parallel
        shared = {"model.layers.*.mlp.up_proj": "columns", "model.layers.*.input_layernorm": self.style}
        return shared | {"model.embed_tokens": "rows", "lm_head": "columns"}

    def parallelize(self, model: nn.Module, context: dict[str, Any], /) -> nn.Module:
        if self.failure is not None:
            raise self.failure
        self.configs.append(context)
        return shard(model)


@pytest.fixture
def automodel(install: Install, monkeypatch: pytest.MonkeyPatch) -> AutomodelCalls:
    return AutomodelCalls(install, monkeypatch)


def wrap(engine: Any, path: Path) -> nn.Module:
    return engine._wrap(AutoModelForCausalLM.from_pretrained(path))


def test_automodel_shards_over_all_ranks(
    automodel: AutomodelCalls, new: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path)
    engine = new(path, "nemo_automodel")
    assert automodel.configs == [] and automodel.meshes == [{"fsdp": 1}], "one rank is not Automodel's"
    of_ranks(engine, 2, monkeypatch)
    assert sums(wrap(engine, path))
    assert automodel.meshes[1:] == [{"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}]
    assert automodel.configs == [{"mp_policy": MixedPrecisionPolicy(), "reshard_after_forward": False, "tp_plan": None}]


def test_automodel_gets_the_sizes_and_types_of_the_configuration(
    automodel: AutomodelCalls, new: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path)
    engine = new(path, "nemo_automodel", dtype="bfloat16")
    of_ranks(engine, 8, monkeypatch)
    settings = {"tensor_parallel_size": 2, "fsdp_size": 2}
    engine.spec = make_spec(path, strategy="nemo_automodel", dtype="bfloat16", **settings)
    assert sums(wrap(engine, path))
    assert automodel.meshes[1:] == [{"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}]
    (config,) = automodel.configs
    assert config["mp_policy"] == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = ["model.layers.*.mlp.up_proj", "model.layers.*.input_layernorm"]
    assert list(config["tp_plan"]) == names, "the head and the embedding stay whole"
    norms = [f"model.layers.{number}.input_layernorm" for number in (0, 1)]
    assert (engine._partial, engine._tensor_group) == (norms, "the tensor group")


def test_what_automodel_cannot_divide_is_refused(
    automodel: AutomodelCalls, new: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path)
    engine = new(path, "nemo_automodel")
    of_ranks(engine, 2, monkeypatch)
    automodel.failure = ValueError("num_key_value_heads (1) must be divisible by TP size (2)")
    with pytest.raises(ConfigError, match=r"nemo_automodel cannot share the layers \(num_key_value_heads"):
        wrap(engine, path)
    engine.spec = make_spec(path, strategy="nemo_automodel", tensor_parallel_size=2)
    other = AutoModelForCausalLM.from_pretrained(path)
    other.config.model_type = "mistral"
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 with .*, qwen3 without adapters, not mistral; set"):
        engine._wrap(other)


class VeomniCalls:
    def __init__(self, install: Install) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.device = "cpu"
        install("veomni.ops", {"apply_ops_config": lambda settings: self.calls.append(("ops", settings))})
        settings = {"OpsImplementationConfig": dict, "MixedPrecisionConfig": dict}
        install("veomni.arguments", settings)
        install("veomni.models", {"build_foundation_model": self.build})
        state = {
            "clear_parallel_state": lambda: self.calls.append(("clear", {})),
            "init_parallel_state": lambda **sizes: self.calls.append(("state", sizes)),
        }
        install("veomni.distributed.parallel_state", state)
        install("veomni.distributed.torch_parallelize", {"build_parallelize_model": self.parallelize})
        install("veomni.utils.device", {"get_device_type": lambda: self.device})

    def build(self, config: Any, **settings: Any) -> nn.Module:
        assert config.architectures == ["LlamaForCausalLM"]
        self.calls.append(("build", settings))
        config.encoder_data_balance = False
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(config, attn_implementation=settings["attn_implementation"])
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # VeOmni leaves only parameters out
        return model

    def parallelize(self, model: nn.Module, **settings: Any) -> nn.Module:
        self.calls.append(("parallelize", settings))
        sharded = shard(model)
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.fill_(torch.nan)  # in VeOmni's, they are in fresh memory
        return sharded


@pytest.fixture
def veomni(install: Install, monkeypatch: pytest.MonkeyPatch) -> VeomniCalls:
    monkeypatch.delenv("VEOMNI_VERBOSITY", raising=False)
    return VeomniCalls(install)


def test_veomni_builds_and_shards_the_model(
    veomni: VeomniCalls, new: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path)
    engine = new(path, "veomni", dtype="bfloat16")
    (ops, kernels), build = veomni.calls[0], veomni.calls[1]
    assert ops == "ops" and kernels.pop("attn_implementation") == "sdpa" and len(kernels) == 9
    assert set(kernels.values()) == {"eager"}
    expected = {"torch_dtype": "float32", "attn_implementation": "sdpa", "init_device": "meta"}
    assert build == ("build", expected) and len(veomni.calls) == 2, "one rank is not VeOmni's to shard"
    assert not hasattr(engine.model.config, "encoder_data_balance"), "exported files would have it"

    of_ranks(engine, 2, monkeypatch)
    model = engine._load()
    source = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wrapped = engine._wrap(model)
    assert sums(wrapped)
    for name, parameter in source.named_parameters():
        assert torch.equal(wrapped.get_parameter(name).full_tensor(), parameter), name
    mixed = {"enable": True, "param_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert veomni.calls[4:] == [
        ("clear", {}),
        ("state", {"dp_size": 2, "dp_shard_size": 2, "dp_mode": "fsdp2", "device_type": "cpu"}),
        (
            "parallelize",
            {
                "init_device": "meta",
                "should_skip_hf_weight_load": True,
                "enable_reshard_after_forward": False,
                "enable_gradient_checkpointing": False,
                "mixed_precision": mixed,
            },
        ),
    ]


def test_veomni_refuses_other_models_devices_and_kernels(
    veomni: VeomniCalls, new: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"use_liger=true with trainer\.strategy=veomni"):
        new(path, "veomni", use_liger=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: strategy veomni does not have it"):
        new(path, "veomni", tensor_parallel_size=2)
    engine = new(path, "veomni")
    of_ranks(engine, 2, monkeypatch)
    veomni.device = "cuda"
    with pytest.raises(ConfigError, match=r"trainer\.device=cpu with .*VeOmni uses the cuda of this machine"):
        engine._wrap(engine._load())
    config = path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "mistral"'))
    with pytest.raises(ConfigError, match=r"runs models of type llama, qwen2, qwen3, not mistral"):
        engine._load()

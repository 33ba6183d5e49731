"""Models and training engines that a configuration names: each mistake is told before anything starts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.assets import resolve
from asyncrl.config import engine_checks, model_checks
from asyncrl.config.compose import examine
from tests.fakes.configurations import looked, only

GAE = {"algorithm.adv_estimator": "gae"}
ULYSSES = "trainer.ulysses_sequence_parallel_size"


def write_files(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]) -> str:
    """A model's config.json and the header of its weights, which are all that is read."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    header = json.dumps({name: {"dtype": "F32", "shape": list(shape)} for name, shape in tensors.items()}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(path)


# ------------------------------------------------------------------------------------------------ models


def test_a_model_directory_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not there" in only(looked({"model.path": str(tmp_path / "none")})).consequence
    found = looked({"model.path": str(tmp_path)})
    assert ["config.json" in found[0].consequence, "safetensors" in found[1].consequence] == [True, True]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE" in only(looked({"model.path": "some/model"})).consequence
    (tmp_path / "models--some--model").mkdir()
    assert looked({"model.path": "some/model"}) == []


def test_a_context_longer_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert only(looked({"model.path": str(tmp_path)})).key == "rollout.max_model_len"
    assert model_checks.num_parameters(str(tmp_path)) is None  # a torn file is no traceback


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    path = write_files(tmp_path / "model", {}, {"a.weight": (3, 4), "b.bias": (5,), "c": ()})
    assert model_checks.num_parameters(path) == 3 * 4 + 5 + 1


def test_models_of_other_roles(tmp_path: Path) -> None:
    problem = only(looked({**GAE, "critic.path": str(tmp_path / "none")}))
    assert "is not there" in problem.consequence
    assert "critic.path=null starts from model.path" in problem.fix
    assert looked({"critic.path": str(tmp_path / "none")}) == []
    scored = {"reward_model.placement": "worker", "reward_model.path": str(tmp_path)}
    assert {problem.key for problem in looked(scored)} == {"reward_model.path"}
    scored["reward_model.path"] = str(tmp_path / "none")
    assert "reward_model.placement=off" in only(looked(scored)).fix


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
    ],
)
def test_an_adapter_for_a_layer_that_is_not_there(tmp_path: Path, targets: Any, wrong: str, hint: str) -> None:
    path = write_files(tmp_path / "model", {}, LAYERS)
    problem = only(looked({"model.path": path, "model.lora_rank": 4, "model.target_modules": targets}))
    assert problem.key == "model.target_modules"
    assert f"no linear layer called {wrong}," in problem.consequence
    assert hint in problem.fix


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj", "v_proj"], "self_attn.q_proj", "base_model.model.layers.0.self_attn.q_proj"],
)
def test_an_adapter_for_a_layer_that_is_there(tmp_path: Path, targets: Any) -> None:
    path = write_files(tmp_path / "model", {}, LAYERS)
    assert looked({"model.path": path, "model.lora_rank": 4, "model.target_modules": targets}) == []
    assert looked({"model.lora_rank": 0, "model.path": path, "model.target_modules": "none"}) == []


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
ONE_LABEL = CLASSIFIER | {"id2label": {"0": "LABEL_0"}}
THREE_LABELS = CLASSIFIER | {"id2label": {"0": "a", "1": "b", "2": "c"}}


@pytest.mark.parametrize(
    ("settings", "rows", "serve", "worker"),
    [
        (ONE_LABEL, 1, "", ""),
        (THREE_LABELS, 3, "3 labels", "3 labels"),
        (CLASSIFIER, 2, "2 labels", "2 labels"),  # Hugging Face leaves its default of two out
        (CLASSIFIER, 1, "2 labels", ""),  # and the Trainer asks for one, whatever the file says
        ({"architectures": ["LlamaForCausalLM"]}, None, "is a language model", "is a language model"),
        ({"architectures": ["LlamaForRewardModel"]} | {"num_labels": 1}, None, "", ""),
    ],
)
def test_a_reward_model_that_is_none(
    tmp_path: Path, settings: Mapping[str, Any], rows: int | None, serve: str, worker: str
) -> None:
    tensors = LAYERS | ({"score.weight": (rows, 4)} if rows is not None else {})
    path = write_files(tmp_path / "model", settings, tensors)
    for placement, expected in (("serve", serve), ("worker", worker)):
        found = looked({"reward_model.placement": placement, "reward_model.path": path})
        if not expected:
            assert found == []
            continue
        assert (only(found).key, only(found).severity) == ("reward_model.path", "error")
        assert expected in only(found).consequence
        assert "one label" in only(found).fix


def test_the_quickstarts_own_model_is_no_reward_model() -> None:
    assert only(looked({"reward_model.placement": "serve", "reward_model.path": "asyncrl://quickstart"})).fix


# ------------------------------------------------------------------------------------------------ engines


def announce(folder: Path, name: str, module: str) -> None:
    """A package with an entry point."""
    info = folder / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[asyncrl.engines]\n{name} = {module}\n")


def test_an_engine_that_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = only(looked({"trainer.strategy": "fdsp2"}))
    assert (problem.key, "did you mean fsdp2" in problem.fix) == ("trainer.strategy", True)
    problem = only(looked({"critic.strategy": "dpp", **GAE}))
    assert (problem.key, "did you mean ddp" in problem.fix) == ("critic.strategy", True)
    assert "did you mean" in only(looked({"trainer.strategy": "?"})).fix
    announce(tmp_path, "other_engine", "json.decoder")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert looked({"trainer.strategy": "other_engine"}) == []
    assert "other_engine" in only(looked({"trainer.strategy": "other_engin"})).fix


@pytest.mark.parametrize("name", ["fdsp", "fsdp3"])
def test_names_that_are_equally_near_are_both_offered(name: str) -> None:
    assert "did you mean fsdp or fsdp2?" in only(looked({"trainer.strategy": name})).fix


def test_a_key_without_effect_is_told_to_be_misspelt_at_once() -> None:
    found = [problem for problem in examine(None, ["ref.strategy=fdsp"]).problems if problem.key == "ref.strategy"]
    assert [("no effect" in one.consequence, "no such engine" in one.consequence) for one in found] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(("strategy", "module"), [("torchtitan", "torchtitan"), ("megatron", "megatron.core")])
def test_an_engine_whose_library_is_not_installed(strategy: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find_spec(name: str) -> None:
        asked.append(name)
        if "." in name:
            raise ModuleNotFoundError(name)  # as for a package that is missing above it

    monkeypatch.setattr(engine_checks.importlib.util, "find_spec", find_spec)
    problem = only(looked({"trainer.strategy": strategy}))
    assert (problem.key, problem.severity, asked) == ("trainer.strategy", "error", [module])
    assert f"pip install 'asyncrl[{strategy}]'" in problem.fix
    assert only(looked({"ref.strategy": strategy, "algorithm.use_kl_loss": True})).key == "ref.strategy"
    assert looked({"ref.strategy": strategy}) == []  # there is no reference
    assert only(looked({"trainer.strategy": strategy, "ray.address": "auto"})).severity == "warning"
    monkeypatch.setattr(engine_checks.importlib.util, "find_spec", lambda name: object())
    assert looked({"trainer.strategy": strategy}) == []


def test_an_engine_of_a_package_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(tmp_path, "other_engine", "no_such_package.engine")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no_such_package" in only(looked({"trainer.strategy": "other_engine"})).consequence


def test_engines_known_to_the_checks_are_those_of_the_registry() -> None:
    from trainer.engine import registry

    assert set(engine_checks.BUILTIN_STRATEGIES) == set(registry.BUILT_IN)
    assert engine_checks.STRATEGY_ENTRY_POINTS == registry.ENTRY_POINTS


@pytest.mark.parametrize(
    ("size", "ranks", "says", "fix"),
    [
        (3, 1, "4 attention heads", "set it to 1, or to 2 or 4 with trainer.num_workers a multiple of that"),
        (2, 1, "cannot be cut", "set it to 1, or trainer.num_workers to a multiple of 2"),
        (3, 6, "4 attention heads", "set it to 1 or 2, or to 4 with trainer.num_workers a multiple of that"),
        (8, 8, "4 attention heads", "set it to 1 or 2 or 4"),
    ],
)
def test_ranks_and_heads_that_cannot_be_shared_have_one_fix_for_both(
    size: int, ranks: int, says: str, fix: str
) -> None:
    assert model_checks.model_config("asyncrl://quickstart")["num_attention_heads"] == 4
    problem = only(looked({ULYSSES: size, "trainer.num_workers": ranks, "trainer.device": "cpu"}))
    assert (problem.key, problem.fix) == (ULYSSES, fix)
    assert says in problem.consequence


def test_ranks_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    problem = only([one for one in looked({ULYSSES: 3, "model.path": "some/model"}) if one.key == ULYSSES])
    assert problem.fix == "set it to 1, or trainer.num_workers to a multiple of 3"


def test_kernels_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks.importlib.util, "find_spec", lambda name: None)
    problem = next(p for p in looked({"trainer.use_liger": True}) if "liger" in p.key)
    assert "liger-kernel" in problem.consequence
    assert "pip install 'asyncrl[liger]'" in problem.fix


# ------------------------------------------------------------------------------------------------ GPUs


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("liger")
def test_keys_for_gpus_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: 0)
    found = looked({"trainer.activation_offload": True, "trainer.use_liger": True})
    assert {problem.key: problem.severity for problem in found} == {
        "trainer.activation_offload": "warning",
        "trainer.use_liger": "error",
    }
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: 1)
    assert looked({"trainer.activation_offload": True, "trainer.use_liger": True}) == []


def test_gpus_that_are_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"trainer.device": "cuda"}
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: 0)
    problem = only(looked(cuda))
    assert (problem.key, problem.severity) == ("trainer.device", "error")
    assert "trainer.device=auto or cpu" in problem.fix
    own = {"trainer.device": "cpu", **GAE, "critic.placement": "own", "critic.device": "cuda"}
    assert only(looked(own)).key == "critic.device"
    assert looked(cuda | {"ray.address": "auto"}) == []  # they may be elsewhere in the cluster
    assert looked({}) == []
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: 2)
    three = {"trainer.strategy": "ddp", "trainer.num_workers": 3}
    assert looked(cuda | three | {"trainer.num_workers": 2}) == []
    assert only(looked(three)).fix.startswith("set it to 2 or fewer")
    assert looked(three | {"trainer.device": "cpu"}) == []


def test_gpus_are_counted_by_nvidias_library_where_the_driver_shows_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(result: Any) -> int:
        result._obj.value = 3
        return 0

    library = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count, nvmlShutdown=lambda: 0)
    monkeypatch.setattr(engine_checks.Path, "is_dir", lambda path: False)
    monkeypatch.setattr(engine_checks.ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_checks.visible_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert engine_checks.visible_gpus() == 1
    monkeypatch.setattr(library, "nvmlInit_v2", lambda: 9)
    assert engine_checks.visible_gpus() == 0


def test_the_shipped_model_is_where_it_is_looked_for() -> None:
    assert model_checks.shapes("asyncrl://quickstart") == model_checks.shapes(resolve("asyncrl://quickstart")) != {}

"""Engines of other libraries: errors for missing ones, and results of installed ones, which equal transformers'."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from tests.fakes.selfcheck import SELFCHECK_S, selfcheck_document
from tests.fakes.trainer_model import make_spec
from trainer.engines import foreign
from trainer.engines.base import EngineSpec
from trainer.engines.compute.attention import enable_packing
from trainer.engines.foreign import Attention, ForeignModel, check_settings, check_weights
from trainer.engines.registry import new_engine
from trainer.engines.torchtitan import TitanModel, TorchtitanEngine
from trainer.selfcheck.checks import checks_of

LIBRARIES = {
    "torchtitan": "torchtitan",
    "megatron_layers": "megatron.core",
    "nemo_automodel": "nemo_automodel",
    "veomni": "veomni",
}
OWN_MODELS = ("torchtitan", "megatron_layers")
"""Backends whose versions of a model are not derived from transformers'."""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def has(backend: str) -> bool:
    package, _, rest = LIBRARIES[backend].partition(".")
    return find_spec(package) is not None and (not rest or find_spec(LIBRARIES[backend]) is not None)


def need(backend: str) -> None:
    if not has(backend):
        pytest.skip(f"{backend} is not installed")


def spec(backend: str, path: Path | str = "/nowhere", **engine: Any) -> EngineSpec:
    return make_spec(path, strategy=backend, **engine)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_missing_library_is_named_with_its_package(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = LIBRARIES[backend].partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing the library fails
    wanted = rf"'asyncrl\[{package}\]'" if backend in OWN_MODELS else r"[\w-]+==[\d.]+ in an environment of its own"
    with pytest.raises(ConfigError, match=rf"trainer\.strategy={backend}: it needs .*pip install {wanted}"):
        new_engine(spec(backend))


@pytest.mark.parametrize("failure", [OSError("libmissing.so: cannot open"), RuntimeError("operator exists twice")])
def test_a_broken_library_is_named(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise failure

    monkeypatch.setattr(foreign, "import_module", broken)
    with pytest.raises(ConfigError, match=rf"strategy=megatron_layers: it needs megatron-core.*\({failure}\)"):
        foreign.check_ready(spec("megatron_layers"), "megatron_layers", "megatron-core", "megatron.core")


def test_backends_are_found_without_their_library_ray_or_vllm() -> None:
    program = (
        "import sys; sys.modules.update(ray=None, vllm=None)\n"
        "import trainer.selfcheck.__main__\n"
        "from trainer.engines.registry import BUILT_IN, LIBRARY_ENGINES, engines, find_engine\n"
        "for name in BUILT_IN: find_engine(name)\n"
        f"assert {set(LIBRARIES)} == set(LIBRARY_ENGINES) <= set(engines())\n"
        "assert 'trainer.engines.torchtitan' not in sys.modules\n"
        "for name in LIBRARY_ENGINES:\n"
        "    assert find_engine(name).model_types == ('language_model',)\n"
        "assert not {'torchtitan', 'megatron', 'nemo_automodel', 'veomni'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True, timeout=100)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(SELFCHECK_S + 30)
def test_a_backend_meets_the_contract(backend: str, ranks: int) -> None:
    need(backend)
    results = selfcheck_document("--backend", backend, ranks=ranks)["results"]
    assert [result["detail"] for result in results if not result["passed"]] == []
    assert len(results) == len(checks_of(backend, "cpu", ranks))
    split = "sequence_parallel_ranks_give_the_same_step"  # by Ulysses, which is this project's
    assert (ranks > 1) == (split in {result["check"] for result in results})


@pytest.mark.slow
@pytest.mark.timeout(2 * SELFCHECK_S + 30)
@pytest.mark.parametrize("backend", ["torchtitan", "nemo_automodel"])
def test_four_ranks_meet_the_contract(backend: str) -> None:
    """FSDP2 splits what the library's tensor parallelism leaves to a rank, also in groups with copies of the model."""
    need(backend)
    results = selfcheck_document("--backend", backend, ranks=4)["results"]
    assert [result["detail"] for result in results if not result["passed"]] == []
    with_meshes = {"ranks_that_share_layers_equal_the_reference", "groups_of_ranks_with_copies_equal_the_reference"}
    assert with_meshes <= {result["check"] for result in results}


def configurations(backend: str) -> list[PretrainedConfig]:
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
    every = [
        LlamaConfig(**sizes, tie_word_embeddings=True, pad_token_id=0),
        LlamaConfig(**sizes, rope_parameters=llama3 | {"original_max_position_embeddings": 16}),
        Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        Qwen2Config(**sizes),
    ]
    return every[:-1] if backend == "torchtitan" else every


@pytest.mark.parametrize("backend", LIBRARIES)
def test_models_of_a_backend_compute_the_results_of_transformers(backend: str, tmp_path: Path) -> None:
    need(backend)
    for number, config in enumerate(configurations(backend)):
        torch.manual_seed(number)
        path = tmp_path / f"{config.model_type}_{number}"
        source = _random(config)
        source.save_pretrained(path)
        engine: Any = new_engine(spec(backend, path))
        model, ids = engine.model, torch.randint(1, 64, (3, 40))
        torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=2e-5, rtol=1e-4, msg=str(path.name))
        assert engine._current.scorer.packed
        weights = dict(engine.weights("float32"))
        assert weights.keys() == {name for name, _ in source.named_parameters()}
        for name, parameter in source.named_parameters():
            assert torch.equal(weights[name], parameter.detach()), name
        engine.close()


@pytest.mark.parametrize("backend", OWN_MODELS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "runs models of type llama"),
        ({"hidden_act": "gelu"}, "no hidden_act='gelu'"),
        ({"attention_bias": True}, "no attention_bias=True"),
    ],
)
def test_a_model_that_a_backend_would_compute_differently_is_refused(
    backend: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    need(backend)
    config = AutoConfig.for_model(**{"model_type": "llama", "num_key_value_heads": 2, **SIZES, **changes})
    _random(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        new_engine(spec(backend, tmp_path))


@pytest.mark.parametrize("backend", OWN_MODELS)
def test_kernels_for_transformers_models_are_refused(backend: str) -> None:
    need(backend)
    with pytest.raises(ConfigError, match="use_liger=true with"):
        new_engine(spec(backend, use_liger=True))


@pytest.mark.parametrize(
    ("rank", "size", "padding", "local"),
    [(0, 2, 0, 0), (1, 2, 0, None), (1, 2, 6, 2), (0, 2, None, None), (2, 3, 6, 0)],
)
def test_the_layers_of_torchtitan_are_shared_by_its_plan(
    rank: int, size: int, padding: int | None, local: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank looks the padding token, whose embedding has no gradient, up in its own rows. Logits are whole."""
    mesh: Any = SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)
    logits, weight = torch.ones(2, 7), Mock(to_local=lambda: torch.ones(7, 1).chunk(size)[rank])
    inner = Mock(enable_weight_tying=True, tok_embeddings=Mock(padding_idx=padding, num_embeddings=7))
    head = SimpleNamespace(weight=weight, forward=lambda hidden: Mock(full_tensor=lambda: hidden * logits))
    library = SimpleNamespace(ParallelDims=Mock())
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace(distributed=library))
    monkeypatch.setitem(sys.modules, "torchtitan.distributed", library)
    model: Any = SimpleNamespace(inner=inner, head=head)
    TitanModel.share_layers(model, mesh)
    inner.parallelize.assert_called_once_with(library.ParallelDims.return_value)
    sizes = {"tp": size, "world_size": size, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "ep": 1}
    library.ParallelDims.assert_called_once_with(
        **sizes, spmd_backend="partial_dtensor", _single_axis_meshes={"tp": mesh}
    )
    assert inner.tok_embeddings.weight is weight and inner.tok_embeddings.padding_idx == local
    assert torch.equal(head.forward(torch.full((2, 1), 3.0)), 3 * logits)


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [(4, {}, "does not divide the model's 2 heads"), (2, {"lora_rank": 4}, r"adapters in them \(model\.lora_rank\)")],
)
def test_what_torchtitan_cannot_share_is_refused(size: int, changes: dict[str, Any], words: str) -> None:
    engine: Any = TorchtitanEngine.__new__(TorchtitanEngine)
    engine.spec = SimpleNamespace(model=ModelConfig(path="/nowhere", **changes))
    model = TitanModel.__new__(TitanModel)
    nn.Module.__init__(model)
    model.config = LlamaConfig(**SIZES, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=rf"trainer\.tensor_parallel_size={size}: .*{words}"):
        engine._share_layers(model, SimpleNamespace(size=lambda: size))


# ----------------------------------------------------------------------------------- the interface, without any library


class Twin(ForeignModel):
    """A transformers model as a `ForeignModel`."""

    layer_class = "LlamaDecoderLayer"

    def __init__(self, source: LlamaForCausalLM) -> None:
        super().__init__(source.config)
        self.inner, self.head = source.model, source.lm_head
        for number, layer in enumerate(source.model.layers):
            layer.self_attn = _Seen(layer.self_attn, source.config, number)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.embed_tokens

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        angles = self.inner.rotary_emb(self.inner.embed_tokens(input_ids), position_ids)
        hidden = self.inner.embed_tokens(input_ids)
        for layer in self.inner.layers:
            hidden = layer(hidden, position_embeddings=angles)
        return self.inner.norm(hidden)

    def to_hf(self, weights: Any) -> dict[str, Tensor]:
        return {
            (f"model.{name}" if not name.startswith("head.") else f"lm_{name}").replace(".source.", "."): tensor
            for name, tensor in weights.items()
        }


class _Seen(Attention):
    def __init__(self, source: nn.Module, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.source = source

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> tuple[Tensor, None]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        shape = (*hidden_states.shape[:-1], -1, self.source.head_dim)
        parts = (self.source.q_proj, self.source.k_proj, self.source.v_proj)
        query, key, value = (part(hidden_states).view(shape).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.source.o_proj(self.attend(query, key, value).flatten(2)), None


@pytest.fixture
def twin() -> tuple[LlamaForCausalLM, Twin]:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa")
    source, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    other.load_state_dict(source.state_dict())
    return source, Twin(other)


def test_attention_uses_transformers_interface_and_takes_packed_rows(twin: tuple[LlamaForCausalLM, Twin]) -> None:
    source, model = twin
    ids = torch.randint(0, 64, (2, 11))
    torch.testing.assert_close(model(ids).logits, source(ids).logits)
    assert enable_packing(model)
    torch.testing.assert_close(model(ids).logits, source(ids).logits)


def test_checkpointed_layers_give_the_same_gradients(twin: tuple[LlamaForCausalLM, Twin]) -> None:
    source, model = twin
    ids = torch.randint(0, 64, (2, 11))
    source(ids).logits.logsumexp(-1).sum().backward()
    model.gradient_checkpointing_enable()
    names = [name for name, _ in model.named_parameters()]
    assert sum("_checkpoint_wrapped_module" in name for name in names) == 18
    model(ids).logits.logsumexp(-1).sum().backward()
    for (name, expected), parameter in zip(source.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


def test_weights_without_a_counterpart_and_other_settings_are_named(twin: tuple[LlamaForCausalLM, Twin]) -> None:
    source, model = twin
    check_weights(model, source, "theirs")
    model.inner.norm.register_parameter("bias", nn.Parameter(torch.zeros(32)))
    with pytest.raises(ConfigError, match=r"strategy=theirs: 1 weights of this llama .*model\.norm\.bias"):
        check_weights(model, source, "theirs")
    check_settings(source.config, "theirs", ["llama"])
    with pytest.raises(ConfigError, match=r"runs models of type qwen3, not llama"):
        check_settings(source.config, "theirs", ["qwen3"])
    source.config.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="no hidden_act='gelu'"):
        check_settings(source.config, "theirs", ["llama"])


def _random(config: PretrainedConfig) -> Any:
    """Return a model whose norms and biases differ from their neutral initial values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
    return model.eval()

"""The connection of vLLM's workers to the run's Ray cluster, and the names under which they load weights."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.model_executor import parameter

from rollouter.serving.replica import worker


def test_engines_with_the_same_seed_subscribe_under_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray draws the id from `random` (`GcsErrorSubscriber`), which vLLM seeds alike in every engine."""
    ids: list[int] = []

    def init(**_: Any) -> None:
        ids.append(random.getrandbits(224))

    monkeypatch.setattr(worker.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(worker.ray, "init", init)
    after: list[float] = []
    for _ in range(2):
        random.seed(0)
        worker.connect("address", "namespace")
        after.append(random.random())
    random.seed(0)
    assert len(set(ids)) == 2
    assert after == [random.random()] * 2, "vLLM's own draws must not change"


def test_the_experts_of_gpt_oss_are_loaded_one_by_one() -> None:
    """vLLM's loader takes them through the weight loader of the layer-wise reload only under these names."""
    stack = torch.arange(24.0).reshape(2, 3, 4)
    head = torch.ones(5)
    given = iter([("lm_head.weight", head), ("model.layers.1.mlp.experts.down_proj", stack)])
    items = dict(worker._by_expert(given))
    assert list(items) == [
        "lm_head.weight",
        "model.layers.1.mlp.experts.0.down_proj",
        "model.layers.1.mlp.experts.1.down_proj",
    ]
    assert items["lm_head.weight"] is head
    assert torch.equal(items["model.layers.1.mlp.experts.1.down_proj"], stack[1])


def test_vllms_parameters_are_dispatched_like_plain_ones() -> None:
    """The worker removes an override that does nothing in vLLM 0.32. A version in which it does more fails here."""
    assert vllm.__version__.startswith("0.32."), "read BasevLLMParameter.__torch_function__ of this version first"
    tree = ast.parse(Path(parameter.__file__).read_text(encoding="utf-8"))
    (base,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BasevLLMParameter")
    (override,) = (one for one in base.body if isinstance(one, ast.FunctionDef) and one.name == "__torch_function__")
    assert ast.unparse(override.body[-1]) == "return super().__torch_function__(func, types, args, kwargs)"
    assert parameter.BasevLLMParameter.__torch_function__ is torch.nn.Parameter.__torch_function__


def test_vllms_parameters_load_and_compute_without_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 2)
    given, inputs = torch.randn(8, 4), torch.randn(3, 4)
    weight = parameter.ModelWeightParameter(
        data=torch.zeros(4, 4), input_dim=1, output_dim=0, weight_loader=lambda *_: None
    )
    weight.load_column_parallel_weight(given)
    assert torch.equal(weight.data, given[4:])
    result = torch.nn.functional.linear(inputs, weight)
    assert type(result) is torch.Tensor and torch.equal(result.detach(), inputs @ given[4:].T)
    assert type(weight + 1) is torch.Tensor and weight.output_dim == 0


def test_on_a_gpu_all_layers_are_prepared_filled_and_rearranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, `tests/e2e/test_rearranged_weights.py` runs the same calls for the layers that vLLM rearranges."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(worker, "initialize_layerwise_reload", lambda model: calls.append(("prepare", model)))
    monkeypatch.setattr(worker, "finalize_layerwise_reload", lambda *given: calls.append(("rearrange", *given)))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append(("synchronize",)))
    monkeypatch.setattr(worker.StoreTransfer, "receive_weights", lambda self, info: calls.append(("load", info)))
    model, config = torch.nn.Linear(1, 1), SimpleNamespace(parallel_config=None, model_config="the model's")
    transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    transfer.start_weight_update()
    transfer.update_weights({"lineage": 2, "version": 7})
    transfer.finish_weight_update()
    loaded = ("load", worker.FetchedVersion(2, 7))
    assert calls == [("prepare", model), loaded, ("synchronize",), ("rearrange", model, "the model's")]

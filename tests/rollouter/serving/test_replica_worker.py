"""The connection of vLLM's workers to the run's Ray cluster, and the names under which they load weights."""

from __future__ import annotations

import ast
import random
import threading
import uuid
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.model_executor import parameter
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import a_log_weight_loader
from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import (
    default_weight_loader,
    row_parallel_weight_loader,
    sharded_weight_loader,
)
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

from asyncrl.core.ports import WeightsVersion
from asyncrl.weights.checksums import WeightChecksums, bit_sum
from asyncrl.weights.deltas import DeltaWriter
from asyncrl.weights.nccl import deadline
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


def test_a_block_that_takes_longer_than_its_deadline_is_aborted_before_it_ends() -> None:
    aborted = threading.Event()
    with deadline(0.0, aborted.set) as is_late:
        assert aborted.wait(60)
    assert is_late.is_set()
    before, calls = threading.active_count(), list[str]()
    with deadline(3600.0, lambda: calls.append("abort")) as is_late:
        pass
    assert not is_late.is_set() and not calls and threading.active_count() == before


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


def test_a_gpu_reloads_parameters_whose_loader_is_a_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    norm = torch.nn.LayerNorm(2, bias=False)
    load = partial(MiniMaxText01RMSNormTP.weight_loader, shard_world_size=2, shard_rank=1)
    set_weight_attrs(norm.weight, {"weight_loader": load})
    model, kept = torch.nn.ModuleDict({"norm": norm}), norm.weight
    record_metadata_for_reloading(model)
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=None))
    transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    for number in (1.0, 2.0):
        transfer.start_weight_update()
        norm.weight.weight_loader(norm.weight, torch.arange(4.0) * number)
        transfer.finish_weight_update()
        assert norm.weight is kept and kept.tolist() == [2 * number, 3 * number]


class Fused(torch.nn.Linear):
    """A layer whose weight consists of two tensors of the model's files, as q, k and v do in vLLM."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.weight.weight_loader = lambda param, loaded, row: param.data[row].copy_(loaded)  # type: ignore[attr-defined]


class FusedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Fused(), Fused()

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            layer, row = name.split(".")
            weight = getattr(self, layer).weight
            weight.weight_loader(weight, tensor, int(row))


@pytest.mark.parametrize("is_complete", [False, True])
def test_after_a_failed_broadcast_the_same_update_loads_the_version_from_the_store(
    monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """With vLLM's layer-wise reload, which counts the elements that each layer has received. The broadcast may have
    failed in another worker of the engine only."""
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    model = FusedModel()
    record_metadata_for_reloading(model)
    kept = model.second.weight
    config = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"), dtype=None)
    )
    transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]

    def receive(info: dict[str, Any]) -> None:
        transfer.load_weights([("first.0", torch.full((2,), 8.0)), ("first.1", torch.full((2,), 8.0))])
        transfer.load_weights([("second.0", torch.full((2,), 8.0))])
        if not is_complete:
            raise RuntimeError("a peer died")
        transfer.load_weights([("second.1", torch.full((2,), 8.0))])

    rearranged: list[torch.nn.Module] = []
    finalize = worker.finalize_layerwise_reload
    monkeypatch.setattr(
        worker, "finalize_layerwise_reload", lambda model, config: (rearranged.append(model), finalize(model, config))
    )
    monkeypatch.setattr(transfer._nccl, "update_weights", receive)
    version = {name: np.full(2, number, np.float32) for number, name in enumerate(("first.0", "first.1", "second.0"))}
    transfer._version, transfer._chunks = WeightsVersion(0, 1), Future()
    chunk = version | {"second.1": np.full(2, 3, np.float32)}
    transfer._chunks.set_result(worker.FetchedChunks([(None, chunk)], {}))
    transfer.start_weight_update()
    transfer.update_weights({"broadcast": {}, "limit_s": 60.0})
    assert transfer.failure == ("" if is_complete else "RuntimeError: a peer died")
    transfer.update_weights({"lineage": 0, "version": 1})
    transfer.finish_weight_update()
    assert transfer.failure == "" and rearranged == [model, model], "the layers begin anew once"
    assert model.first.weight.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert model.second.weight.tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert model.second.weight is kept, "CUDA graphs refer to it"


def test_chunks_that_may_get_changes_are_kept_until_the_next_version_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, handles = FusedModel(), list[Any]()
    config = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="")), quant_config=None
    )
    transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    store = SimpleNamespace(tensors=SimpleNamespace(remote=lambda version: handles))
    monkeypatch.setattr(worker, "connect", lambda *_, **__: None)
    monkeypatch.setattr(worker.ray, "get_actor", lambda *_, **__: store)
    monkeypatch.setattr(worker.ray, "get", lambda given, **_: given)
    transfer._store = worker.StoreAddress("", "", "")
    writer, weights = DeltaWriter(f"memory://{uuid.uuid4().hex}", 5), np.zeros(1000, np.float32)
    model.load_weights = lambda tensors: [one.tolist() for _, one in tensors]  # type: ignore[method-assign]
    for version in (1, 2, 3):
        weights[version] = version
        handles[:] = [writer.put({"w": weights})]
        transfer.fetch(WeightsVersion(0, version), 60.0, True)
        assert transfer.await_fetch(60.0)
        transfer.receive_weights(worker.FetchedVersion(0, version))
        copies = {path.name for path in tmp_path.glob("*/asyncrl-*")}
        assert copies == {handles[0].files[-1].name}
    assert len(handles[0].deltas) == 2
    handles[:] = [{"w": weights}]
    transfer.fetch(WeightsVersion(0, 4), 60.0, True)
    assert transfer.await_fetch(60.0)
    transfer.receive_weights(worker.FetchedVersion(0, 4))
    assert not list(tmp_path.glob("*/asyncrl-*"))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rank_and_stage", [(1, 0), (0, 1)])
def test_an_engine_that_rounds_its_weights_reports_the_checksums_of_what_it_loaded(
    monkeypatch: pytest.MonkeyPatch, rounds: bool, rank_and_stage: tuple[int, int]
) -> None:
    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="")),
        quant_config=object.__new__(worker.OnlineQuantizationConfig) if rounds else None,
    )
    weight = np.arange(4, dtype=np.float32).reshape(2, 2)
    store = SimpleNamespace(tensors=SimpleNamespace(remote=lambda version: [weight, weight[0]]))
    monkeypatch.setattr(worker, "connect", lambda *_, **__: None)
    monkeypatch.setattr(worker.ray, "get_actor", lambda *_, **__: store)
    names = {2: "layers.0.weight", 1: "norm.weight"}
    monkeypatch.setattr(
        worker.ray, "get", lambda given, **_: given if isinstance(given, list) else {names[given.ndim]: given}
    )
    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: 1)
    shares = []
    for rank, stage in ((0, 0), rank_and_stage):
        monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(worker, "get_pp_group", lambda stage=stage: SimpleNamespace(is_first_rank=stage == 0))
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])})
        model.load_weights = lambda tensors: list(tensors)
        extension: Any = worker.WorkerExtension()
        extension.model_runner = SimpleNamespace(model=model, model_config=SimpleNamespace(dtype=torch.float32))
        extension.weight_transfer_engine = transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
        transfer._store = worker.StoreAddress("", "", "")
        for version, compares in ((1, True), (2, False)):
            extension.fetch_version(0, version, 60.0, compares)
            assert transfer.await_fetch(60.0)
            transfer.receive_weights(worker.FetchedVersion(0, version))
            shares.append(extension.group_checksums(["layers.0"]))
        held = worker._bit_sum(model["layers"][0].weight)  # type: ignore[index]
        if not rounds:
            assert shares[-2:] == [{"layers.0": held}] * 2
    if rounds:
        assert shares == [{"layers.0": bit_sum(weight)}, {}, {}, {}], "only the first rank counts, and only if asked"


def test_parameters_that_the_engine_keeps_in_float32_have_the_checksums_of_the_published_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as `A_log` of Qwen3.5 and the gates of GLM-4-MoE, whatever the dtype of the engine."""
    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    layer = torch.nn.Module()
    layer.gate = torch.nn.Parameter(torch.randn(6, 4).bfloat16().float())
    layer.up_proj = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
    layer.steps = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    published = WeightChecksums()
    for name, tensor in model.named_parameters():
        array = tensor.detach().bfloat16().view(torch.uint16) if tensor.is_floating_point() else tensor
        published.add({name: array.numpy()})
    extension: Any = worker.WorkerExtension()
    extension.model_runner = SimpleNamespace(model=model, model_config=SimpleNamespace(dtype=torch.bfloat16))
    extension.weight_transfer_engine = SimpleNamespace(quantizes=False)
    assert extension.group_checksums(["layers.0"]) == published.by_group()


def test_each_rank_counts_its_own_part_and_the_first_one_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13_weight = torch.nn.Parameter(torch.zeros(2))

    def parameter(loader: Any, *shape: int) -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.zeros(*shape or (2,)))
        set_weight_attrs(made, {"weight_loader": loader})
        return made

    monkeypatch.setattr(worker, "RoutedExperts", Experts)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: 2)
    attention = torch.nn.Module()
    attention.sinks = torch.nn.Parameter(torch.zeros(2))  # of GPT-OSS, one for each head of the rank
    attention.sink = torch.nn.Parameter(torch.zeros(2))  # of Laguna
    attention.attention_sink_bias = torch.nn.Parameter(torch.zeros(2))  # of MiMo
    attention.A_log = parameter(sharded_weight_loader(0))  # of Qwen3-Next
    attention.kimi_A_log = parameter(a_log_weight_loader(0))
    norm = MiniMaxText01RMSNormTP.weight_loader
    attention.minimax_norm = parameter(partial(norm, shard_world_size=2, shard_rank=0))
    attention.cohere_q_norm = parameter(row_parallel_weight_loader, 2, 2)
    shared = torch.nn.Module()
    shared.cohere_norm = parameter(row_parallel_weight_loader, 2)
    shared.minimax_k_norm = parameter(partial(norm, shard_world_size=1, shard_rank=0))  # with one key head
    shared.weight = parameter(default_weight_loader)
    gate = torch.nn.Linear(1, 1, bias=False)
    model = torch.nn.ModuleDict({"attn": attention, "experts": Experts(), "gate": gate, "shared": shared})
    counted = []
    for rank in (0, 1):
        monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        counted.append([name for name, _ in worker._counted(model)])
    own = [*(f"attn.{name}" for name, _ in attention.named_parameters()), "experts.w13_weight"]
    first = ["gate.weight", "shared.cohere_norm", "shared.minimax_k_norm", "shared.weight"]
    assert counted == [[*own, *first], own]


@pytest.mark.parametrize("size", [1, 2])
def test_each_pipeline_stage_counts_its_layers_and_the_first_one_a_tied_embedding(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The last stage has a copy of a tied embedding, and `lm_head` is the same tensor, as in vLLM's model of Llama."""

    class Embedding(worker.VocabParallelEmbedding):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.zeros(2))

    class Head(Embedding, worker.ParallelLMHead):
        pass

    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: size)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    counted = []
    for stage, is_tied in ((0, True), (1, True), (1, False)):
        monkeypatch.setattr(worker, "get_pp_group", lambda stage=stage: SimpleNamespace(is_first_rank=stage == 0))
        layers = [torch.nn.Linear(1, 1, bias=False) if number == stage else PPMissingLayer() for number in range(2)]
        embedding = Embedding() if is_tied else PPMissingLayer()
        head: torch.nn.Module = PPMissingLayer() if stage == 0 else Head()
        if is_tied and stage == 1:
            head.weight = embedding.weight
        model = torch.nn.ModuleDict({"embed": embedding, "layers": torch.nn.ModuleList(layers), "head": head})
        counted.append([name for name, _ in worker._counted(model)])
    assert counted == [["embed.weight", "layers.0.weight"], ["layers.1.weight"], ["layers.1.weight", "head.weight"]]


class SinksModel(torch.nn.Module):
    """Loads its sinks as vLLM's model of GPT-OSS does (`_load_weights_other`), in layers of vLLM's names."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".self_attn.": ".attn."})

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.sinks = torch.nn.Parameter(torch.full((2,), 8.0), requires_grad=False)
        self.attn.o_proj = torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, tensors: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameter = parameters[name.replace("self_attn", "attn")]
            if "sinks" in name:
                parameter.data.copy_(tensor.narrow(0, 2 * worker.get_tensor_model_parallel_rank(), 2))
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def test_a_stage_leaves_out_the_sinks_of_layers_that_it_does_not_have() -> None:
    transfer: Any = object.__new__(worker.StoreTransfer)
    transfer.model = torch.nn.ModuleDict({"0": PPMissingLayer()})
    sinks, weight = ("0.attn.sinks", torch.zeros(2)), ("1.weight", torch.zeros(2))
    assert list(transfer._without_sinks([sinks, weight])) == [weight]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_attention_sinks_of_gpt_oss_are_loaded(monkeypatch: pytest.MonkeyPatch, is_cpu: bool, rank: int) -> None:
    """vLLM copies them into the parameters, which are meta tensors during the layer-wise reload of a GPU."""
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: rank)
    model = torch.nn.ModuleDict({"0": SinksModel()})
    model.hf_to_vllm_mapper, model.load_weights = SinksModel.hf_to_vllm_mapper, SinksModel.load_weights.__get__(model)
    record_metadata_for_reloading(model)
    config = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="gpt_oss"), dtype=None)
    )
    transfer = worker.StoreTransfer(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    kept = model["0"].attn.sinks
    for number in (1.0, 2.0):
        transfer.start_weight_update()
        transfer.load_weights([("0.self_attn.sinks", torch.arange(4.0) * number)])
        transfer.load_weights([("0.self_attn.o_proj.weight", torch.full((2, 2), number))])
        transfer.finish_weight_update()
        assert model["0"].attn.sinks is kept, "CUDA graphs refer to it"
        assert kept.tolist() == [2 * rank * number, (2 * rank + 1) * number]
        assert model["0"].attn.o_proj.weight.tolist() == [[number] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_layers_keep_the_weights_that_updates_are_loaded_into(dtype: torch.dtype) -> None:
    """vLLM 0.32 packs them into kernels of oneDNN and, where the CPU has AMX, into its own for small layers."""
    for size in (64, 2048):
        layer = torch.nn.Linear(size, size, dtype=dtype)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        assert layer.weight.shape == (size, size)

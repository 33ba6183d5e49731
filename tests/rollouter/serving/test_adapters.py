"""Versions that are LoRA adapters: the order of calls to vLLM, the files that it loads, and what its layers hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import (
    LoRAMapping,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import BugError, InfraError
from asyncrl.core.ports import Publication, WeightsProbe, WeightsVersion
from asyncrl.weights.checksums import WeightChecksums, differing_groups, merge
from asyncrl.weights.disk import DiskChunk
from asyncrl.weights.object_store import ServedRun
from rollouter.serving.replica import adapters, weights, worker
from rollouter.serving.replica.adapters import held_tensors
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.weights import OTHER_WEIGHTS, WeightUpdates

RANK = 3
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
PROBE = WeightsProbe(((4, 5, 6),), ((-1.0, -1.0),))


def adapter_of(version: int) -> dict[str, Any]:
    """Return the published tensors of a version."""
    random = np.random.default_rng(version)
    return {
        f"{LAYER}.lora_A.weight": random.standard_normal((RANK, 8), np.float32),
        f"{LAYER}.lora_B.weight": random.standard_normal((6, RANK), np.float32),
    }


def group_checksums(tensors: dict[str, Any]) -> dict[str, int]:
    checksums = WeightChecksums()
    checksums.add(tensors)
    return checksums.by_group()


def load_with_vllm(adapter: LoRARequest) -> LoRAModel:
    """Load the files as vLLM's workers do."""
    helper = PEFTHelper.from_local_dir(adapter.lora_path, None)
    helper.validate_legal(LoRAConfig(max_lora_rank=8))
    return LoRAModel.from_local_checkpoint(
        adapter.lora_path, {"q_proj"}, peft_helper=helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )


class Engine:
    """Records the calls to vLLM, loads the files of adapters with its code, and fails at `fails_at`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_at = ""
        self.serves: dict[str, Any] = {}
        self.log_prob = -1.0
        self.is_full = False
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.output_processor = SimpleNamespace(
            get_num_unfinished_requests=lambda: 2, propagate_error=lambda error: None
        )

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split(" ", maxsplit=1)[0] == self.fails_at:
            raise RuntimeError(f"{name} failed")

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        self._call(f"pause {mode} {clear_cache}")

    async def add_lora(self, request: LoRARequest) -> bool:
        self._call(f"add_lora {request.lora_name} {request.lora_int_id} {request.load_inplace}")
        (layer,) = load_with_vllm(request).loras.values()
        assert (layer.rank, layer.scaling) == (RANK, 1.0)
        self.serves = {f"{LAYER}.lora_A.weight": layer.lora_a.numpy(), f"{LAYER}.lora_B.weight": layer.lora_b.numpy()}
        return True

    async def update_weight_version(self, version: str) -> None:
        self._call(f"version {version}")

    async def resume_generation(self) -> None:
        self._call("resume")

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        self._call(method)
        assert method == "adapter_checksums"
        return [group_checksums(self.serves)]

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: LoRARequest
    ) -> AsyncIterator[Any]:
        self._call(f"probe {lora_request.lora_name} {lora_request.load_inplace}")
        if self.is_full:
            await asyncio.sleep(3600)
        rows = [{token: SimpleNamespace(logprob=self.log_prob)} for token in prompt["prompt_token_ids"]]
        yield SimpleNamespace(prompt_logprobs=[None, *rows[1:]])


class Replica:
    """The updates of a replica whose run publishes adapters, its engine and the published versions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = Engine()
        self.health = ReplicaHealth(replica="one", node_id="node", engine_s=30.0)
        self.health.weights_version = OTHER_WEIGHTS
        gauges = SimpleNamespace(clear=lambda held: None)
        started: Any = SimpleNamespace(client=self.engine, gauges=gauges)
        self.updates = WeightUpdates(started, self.health, "run", TimeoutsConfig())
        self.updates._store = SimpleNamespace(tensors=SimpleNamespace(remote=self._tensors))
        self.updates.run = ServedRun(adapters=True, max_mismatch_kl=1e-3)

    async def _tensors(self, weights_version: WeightsVersion) -> list[DiskChunk]:
        self.engine._call("fetch")
        chunks = [{name: array} for name, array in adapter_of(weights_version.version).items()]
        return [DiskChunk.put(str(self.directory / "published"), chunk) for chunk in chunks]

    async def apply(
        self, version: int, mode: Any = "keep", *, probe: WeightsProbe | None = None, lineage: int = 0
    ) -> Any:
        checksums = group_checksums(adapter_of(version))
        publication = Publication(version, version, 0, checksums, probe=probe, lineage=lineage)
        return await self.updates.apply(publication, mode, False)


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(adapters, "_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return Replica(tmp_path)


async def test_an_adapter_is_loaded_in_the_pause_and_verified_after_it(replica: Replica, tmp_path: Path) -> None:
    report = await replica.apply(7, probe=PROBE)
    assert replica.engine.calls == [
        "fetch", "pause keep False", "add_lora weights-0-7 1 True", "version 7", "resume",
        "adapter_checksums", "probe weights-0-7 False",
    ]  # fmt: skip
    assert (report.version, report.verified, report.mismatch_kl) == (7, True, 0.0)
    assert not list((tmp_path / "memory").iterdir()), "vLLM does not read the files again"


async def test_requests_name_the_newest_adapter_under_the_same_number(replica: Replica) -> None:
    """Requests in flight continue with the new adapter, and the prefix cache separates the versions by name and
    path."""
    assert replica.updates.adapter is None
    found = []
    for version in (1, 2):
        await replica.apply(version, "abort")
        assert replica.updates.adapter is not None
        found.append(replica.updates.adapter)
    assert [(one.lora_name, one.lora_int_id, one.load_inplace) for one in found] == [
        ("weights-0-1", 1, False),
        ("weights-0-2", 1, False),
    ]
    assert found[0].lora_path != found[1].lora_path


async def test_an_engine_with_another_adapter_is_given_up(replica: Replica) -> None:
    with pytest.raises(BugError, match=r"version 3 is not what was published: checksums differ in layers\.0"):
        await replica.updates.apply(Publication(3, 3, 0, {"layers.0": 1}), "keep", False)
    assert replica.health.broken


async def test_other_files_at_the_models_path_are_noticed_by_the_probe(replica: Replica) -> None:
    replica.engine.log_prob = -3.0
    with pytest.raises(BugError, match=r"unless the files at model\.path differ from the Trainer's"):
        await replica.apply(3, probe=PROBE)


async def test_log_probs_are_compared_at_the_next_version_if_the_engine_was_too_full(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lineage is compared until that has happened once (`weight_sync.verify: first`)."""

    def compared() -> list[str]:
        calls = [call.split()[0] for call in replica.engine.calls]
        replica.engine.calls.clear()
        return [call for call in calls if call in ("adapter_checksums", "probe")]

    both = ["adapter_checksums", "probe"]
    replica.updates.run = ServedRun(adapters=True, verify="first", max_mismatch_kl=1e-3)
    assert (await replica.apply(1)).verified, "the initial version has no log-probs"
    assert compared() == ["adapter_checksums"]
    replica.engine.is_full = True
    for version, expected in ((2, ["probe"]), (3, both)):
        with monkeypatch.context() as patch:
            patch.setattr(weights, "PROBE_LIMIT_S", 0.01)
            report = await replica.apply(version, probe=PROBE)
        assert (report.verified, report.mismatch_kl, compared()) == (False, None, expected)
    replica.engine.is_full = False
    assert replica.health._describe().num_uncompared == 2
    report = await replica.apply(4, probe=PROBE)
    assert (report.verified, report.mismatch_kl, compared()) == (True, 0.0, both)
    assert replica.health._describe().num_uncompared == 0
    report = await replica.apply(5, probe=PROBE)
    assert (report.verified, report.mismatch_kl, compared()) == (True, None, [])
    replica.engine.log_prob = -3.0
    with pytest.raises(BugError, match="computes other log-probs"):
        await replica.apply(5, probe=PROBE, lineage=1)


def test_full_weights_are_not_written_as_an_adapter(tmp_path: Path) -> None:
    chunk = DiskChunk.put(str(tmp_path), {"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(BugError, match=r"LoRA adapters of one rank .* has 1 tensors, such as model\.norm\.weight"):
        adapters.write_adapter(LoRARequest("one", 1, str(tmp_path / "files")), [chunk], 1.0)


def test_an_adapter_that_was_read_too_late_leaves_no_files(tmp_path: Path) -> None:
    """The update has been given up by then, and has deleted its files."""
    chunk = DiskChunk.put(str(tmp_path), adapter_of(1))
    with pytest.raises(TimeoutError, match="was not read within 0 s"):
        adapters.write_adapter(LoRARequest("one", 1, str(tmp_path / "files")), [chunk], 0.0)
    assert not (tmp_path / "files").exists()


def test_files_of_killed_replicas_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_MEMORY", tmp_path)
    chunk = DiskChunk.put(str(tmp_path), adapter_of(1))
    left, used = (adapters.new_adapter(WeightsVersion(0, version)) for version in (1, 2))
    for one in (left, used):
        adapters.write_adapter(one, [chunk], 1.0)
    os.utime(left.lora_path, times=(0, time.time() - 101.0))
    adapters.delete_leftovers(100.0)
    assert {path.name for path in tmp_path.iterdir()} == {Path(used.lora_path).name, Path(chunk.url).name}


STEPS = ("fetch", "pause", "add_lora", "version", "resume", "adapter_checksums")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(("", "", *STEPS))), max_size=5))
def test_a_replica_serves_a_whole_version_or_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: list[tuple[int, str]]
) -> None:
    """Each update raises the version by a number, and one call to the engine may fail."""
    (tmp_path / "memory").mkdir(exist_ok=True)
    monkeypatch.setattr(adapters, "_MEMORY", tmp_path / "memory")
    asyncio.run(_serve(Replica(tmp_path), updates))
    assert not list((tmp_path / "memory").iterdir())


async def _serve(replica: Replica, updates: list[tuple[int, str]]) -> None:
    version, served = 0, 0
    for increase, fails_at in updates:
        version += increase
        replica.engine.fails_at = fails_at
        with contextlib.suppress(InfraError):
            await replica.apply(version)
            served = version
        if replica.health.broken:
            assert fails_at in STEPS[2:]
            return
        assert fails_at in STEPS[:2] or served == version
        if served:
            assert replica.updates.adapter is not None
            assert replica.updates.adapter.lora_name == f"weights-0-{served}"
            assert replica.health.weights_version == WeightsVersion(0, served)
            published = adapter_of(served)
            assert all(np.array_equal(replica.engine.serves[name], array) for name, array in published.items())
        assert replica.updates.gate.is_set()


# ------------------------------------------------------------------------------------------------ vLLM's layers

HEAD = 4
HIDDEN = 8
Q, KV = 4 * HEAD, 2 * HEAD


class Layers(torch.nn.Module):
    """vLLM's own layers of one decoder layer on a rank, with adapters of random values."""

    def __init__(self, rank: int, size: int, published: Mapping[str, torch.Tensor], *, fused: bool) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"bias": False, "params_dtype": torch.float32}
        qkv: Any = linear.QKVParallelLinear(HIDDEN, HEAD, 4, 2, **kwargs)
        qkv = QKVParallelLinearWithLoRA(qkv) if fused else MergedQKVParallelLinearWithLoRA(qkv)
        gate_up = MergedColumnParallelLinearWithLoRA(linear.MergedColumnParallelLinear(HIDDEN, [8, 8], **kwargs))
        down = RowParallelLinearWithLoRA(linear.RowParallelLinear(8, HIDDEN, **kwargs))
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"qkv": qkv, "gate_up": gate_up, "down": down})])
        parts = {"qkv": ["qkv"] if fused else ["q", "k", "v"], "gate_up": ["gate", "up"], "down": ["down"]}
        config = LoRAConfig(max_lora_rank=8, lora_dtype=torch.float32)
        for name, layer in self.layers[0].items():
            layer.create_lora_weights(1, config)
            a, b = ([published[f"layers.0.{part}.lora_{letter}.weight"] for part in parts[name]] for letter in "AB")
            layer.set_lora(0, *((a[0], b[0]) if len(a) == 1 else (a, b)))


def adapters_of_a_layer(seed: int, rank: int, *, fused: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = {"qkv": Q + 2 * KV} if fused else {"q": Q, "k": KV, "v": KV}
    outputs |= {"gate": 8, "up": 8, "down": HIDDEN}
    tensors = {}
    for name, size in outputs.items():
        tensors[f"layers.0.{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
        tensors[f"layers.0.{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    return tensors


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_the_ranks_of_an_engine_count_each_number_of_the_adapter_once(
    monkeypatch: pytest.MonkeyPatch, size: int, fused: bool
) -> None:
    """On 4 ranks, two of them have the same keys and values."""
    published = adapters_of_a_layer(size, RANK, fused=fused)
    wanted = group_checksums({name: tensor.numpy() for name, tensor in published.items()})
    with set_current_vllm_config(VllmConfig()):
        shares, parts = [], []
        for rank in range(size):
            on_rank(monkeypatch, rank, size)
            model = Layers(rank, size, published, fused=fused)
            monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            extension = worker.WorkerExtension()
            extension.model_runner = SimpleNamespace(model=model)
            shares.append(extension.adapter_checksums())
            parts += [part for _, part in held_tensors(model, rank)]
    assert differing_groups(wanted, merge(shares)) == []
    held = torch.cat([part.flatten() for part in parts])
    assert sorted(held[held != 0].tolist()) == sorted(torch.cat([one.flatten() for one in published.values()]).tolist())


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 6))
def test_vllms_layers_on_cpu_add_the_adapter_to_the_weights(seed: int, rank: int, tokens: int) -> None:
    """All tokens of a step have the adapter. vLLM's CPU kernels would give it to tokens without one, too, if others
    had it."""
    published = adapters_of_a_layer(seed, rank, fused=False)
    with pytest.MonkeyPatch.context() as patched, set_current_vllm_config(VllmConfig()):
        on_rank(patched, 0, 1)
        layer: Any = Layers(0, 1, published, fused=False).layers[0]["qkv"]
    base = layer.base_layer
    torch.nn.init.normal_(base.weight)
    base.quant_method.process_weights_after_loading(base)
    punica = PunicaWrapperCPU(64, 8, "cpu")
    layer.set_mapping(punica)
    punica.update_metadata(LoRAMapping((1,) * tokens, (1,), is_prefill=True), [1], 2, 32)
    inputs = torch.randn(tokens, HIDDEN)
    merged = base.weight.clone()
    for rows, part in ((slice(0, Q), "q"), (slice(Q, Q + KV), "k"), (slice(Q + KV, Q + 2 * KV), "v")):
        a, b = (published[f"layers.0.{part}.lora_{letter}.weight"] for letter in "AB")
        merged[rows] += b @ a
    torch.testing.assert_close(layer.apply(inputs), inputs @ merged.T, rtol=1e-4, atol=1e-4)

"""Tests of engines beyond the contract suite: early refusals, gradients that are not finite, and metrics."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.trainer import OptimConfig
from asyncrl.core.failures import BugError, ConfigError, DataError, DivergenceError, InfraError
from tests.fakes.trainer_model import make_spec, write_model
from trainer.algorithms.objective import PolicyLoss
from trainer.engines import dist, torch_engine
from trainer.engines.registry import new_engine
from trainer.engines.replicated import DdpEngine, LocalEngine
from trainer.engines.sharded import Fsdp2Engine
from trainer.engines.state import checkpoint as state
from trainer.selfcheck.setting import make_batch

LOSS = PolicyLoss(AlgorithmConfig(), 20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_local_engine_refuses_several_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"strategy=local with 2 ranks: .*use trainer\.strategy=fsdp2"):
        LocalEngine(make_spec(path, num_workers=2))
    monkeypatch.setattr(dist, "world_size", lambda: 3)
    with pytest.raises(ConfigError, match="with 3 ranks"):
        LocalEngine(make_spec(path))


def test_the_sequence_parallel_size_must_divide_the_number_of_ranks(path: Path) -> None:
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2 does not divide the 1 ranks"):
        LocalEngine(make_spec(path, ulysses_sequence_parallel_size=2))


def test_a_missing_gpu_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda: torch sees no GPU"):
        new_engine(make_spec(path, device="cuda"))
    engine = new_engine(make_spec(path, device="auto"))
    with pytest.raises(ConfigError, match="cannot move to cuda"):
        engine.to("cuda")


def test_a_forward_only_engine_does_not_train(path: Path) -> None:
    engine = LocalEngine(make_spec(path, lr=None))
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    for call in (lambda: engine.forward_backward(make_batch(2, 1), LOSS), lambda: engine.optim_step(0.0)):
        with pytest.raises(BugError, match="cannot train"):
            call()


def test_a_default_of_bfloat16_on_a_gpu_does_not_apply_on_cpu(path: Path) -> None:
    engine = LocalEngine(replace(make_spec(path, lr=None), bfloat16_on_gpu=True))
    assert engine._compute_dtype() is None
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    engine.device = torch.device("cuda")
    assert engine._compute_dtype() is torch.bfloat16


def test_the_learning_rate_decays_until_the_planned_step(path: Path) -> None:
    engine, batch = LocalEngine(replace(make_spec(path), optim=OptimConfig(lr=1.0, decay="linear"))), make_batch(2, 1)

    def rate() -> float:
        engine.forward_backward(batch, LOSS)
        return engine.optim_step(0.0).lr

    with pytest.raises(BugError, match="total steps"):
        rate()
    engine.plan(4)
    assert [rate() for _ in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert engine.step == 4


def test_a_gradient_that_is_not_finite_is_not_applied(path: Path) -> None:
    engine, batch = LocalEngine(make_spec(path)), make_batch(4, 1)
    engine.optim_step(engine.forward_backward(batch, LOSS)["loss"])
    before = {name: tensor.clone() for name, tensor in engine.weights("float32")}
    weight = next(engine.model.parameters())
    handle = weight.register_hook(lambda gradient: gradient * math.nan)
    figures = engine.forward_backward(batch, LOSS)
    handle.remove()
    assert math.isfinite(figures["loss"])
    with pytest.raises(DivergenceError, match=r"step 2: .*gradient norm nan.*trainer\.optim\.lr.*\(now 0\.01\)"):
        engine.optim_step(figures["loss"])
    for name, tensor in engine.weights("float32"):
        assert torch.equal(tensor, before[name]), name
    assert math.isfinite(engine.optim_step(engine.forward_backward(batch, LOSS)["loss"]).grad_norm)
    assert engine.step == 2


def test_metrics_are_sums_and_means_over_tokens(path: Path) -> None:
    engine, batch = LocalEngine(make_spec(path, ppo_max_token_len=30)), make_batch(6, 1)
    entropy = engine.infer(batch)["entropy"][batch["loss_mask"]]
    figures = engine.forward_backward(batch, LOSS)
    assert figures["tokens"] == int(batch["loss_mask"].sum())
    assert figures["actor/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert figures["actor/pg_loss"] == figures["loss"]


def test_a_failed_construction_leaves_no_process_group(path: Path) -> None:
    two_ranks = make_spec(path, strategy="fsdp2", ulysses_sequence_parallel_size=2)
    for broken in (two_ranks, make_spec("/nowhere", strategy="fsdp2")):
        with pytest.raises(ConfigError):
            new_engine(broken)
        assert not torch.distributed.is_initialized()


def test_close_raises_a_failed_checkpoint_and_leaves_the_group(path: Path, tmp_path: Path) -> None:
    engine = new_engine(make_spec(path, strategy="fsdp2"))
    (tmp_path / "engine.json").symlink_to("/dev/full")
    engine.save(tmp_path)
    with pytest.raises(InfraError, match="disk is full"):
        engine.close()
    assert not torch.distributed.is_initialized()


def test_reset_frees_the_old_model_before_loading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(make_spec(path))
    engine.optim_step(engine.forward_backward(make_batch(4, 1), LOSS)["loss"])
    old = [weakref.ref(parameter) for parameter in engine.model.parameters()]
    load, alive = LocalEngine._load, []

    def counting(self: LocalEngine) -> PreTrainedModel:
        alive.append(sum(parameter() is not None for parameter in old))
        return load(self)

    monkeypatch.setattr(LocalEngine, "_load", counting)
    engine.reset()
    assert alive == [0]


def test_a_failed_reset_can_be_repeated(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = LocalEngine(make_spec(path)), make_batch(4, 1)
    expected = engine.forward_backward(batch, LOSS)

    def gone(self: LocalEngine) -> PreTrainedModel:
        raise ConfigError("the model's directory is gone")

    with monkeypatch.context() as broken:
        broken.setattr(LocalEngine, "_load", gone)
        with pytest.raises(ConfigError, match="is gone"):
            engine.reset()
    calls: list[Callable[[], object]] = [
        lambda: engine.forward_backward(batch, LOSS),
        lambda: engine.optim_step(0.0),
        lambda: engine.infer(batch),
        lambda: list(engine.weights("float32")),
        lambda: engine.save(tmp_path),
        lambda: engine.load(tmp_path),
        lambda: engine.adapters_off(),
    ]
    for call in calls:
        with pytest.raises(InfraError, match="a reset failed"):
            call()
    engine.reset()
    assert engine.forward_backward(batch, LOSS) == expected


def test_offloaded_state_returns_to_the_device_for_collectives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is sharded. The CPU stands in for the GPU, and `meta` for the offload target."""
    engine = Fsdp2Engine(make_spec(path, strategy="fsdp2"))
    away, seen = torch.device("meta"), []
    try:
        monkeypatch.setattr(engine, "_move_model", lambda device: None)
        monkeypatch.setattr(torch_engine, "move_optimizer", lambda optimizer, device: None)

        def recording(call: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                seen.append(dict(engine._places))
                return call(*args, **kwargs)

            return record

        monkeypatch.setattr(torch_engine, "full_weights", recording(torch_engine.full_weights))
        monkeypatch.setattr(state, "begin_save", recording(state.begin_save))
        engine._places |= {"model": away, "optimizer": away}
        list(engine.weights("float32"))
        assert engine._places["model"] == engine._places["optimizer"] == away
        engine.save(tmp_path)
        assert engine._places["model"] == engine._places["optimizer"] == away
        engine.finish_save()
        here = engine.device
        assert [(places["model"], places["optimizer"]) for places in seen] == [(here, away), (here, here)]
    finally:
        engine.close()


def test_the_optimizer_has_the_sharded_parameters(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several GPUs, a forward pass leaves embeddings, last norm and head gathered."""
    monkeypatch.setattr(Fsdp2Engine, "_frugal", True)
    engine = Fsdp2Engine(make_spec(path, strategy="fsdp2"))
    try:
        (group,) = engine.optimizer.param_groups
        assert {id(one) for one in group["params"]} == {id(one) for one in engine.model.parameters()}
        assert all(isinstance(one, DTensor) for one in group["params"])
    finally:
        engine.close()


def test_offloaded_parts_move_back_after_a_failure(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rests = LocalEngine(make_spec(path)), []
    monkeypatch.setattr(engine, "_offload", lambda: rests.append("rest"))
    odd = make_batch(2, 1)
    odd["input_ids"][0, 0] = 10**6
    with pytest.raises(DataError):
        engine.infer(odd)
    assert rests == ["rest"]
    with pytest.raises(ConfigError):
        engine.load(tmp_path)
    assert rests == ["rest", "rest"]


def test_ddp_does_not_broadcast_buffers(path: Path) -> None:
    engine = DdpEngine(make_spec(path, strategy="ddp"))
    try:
        assert isinstance(engine.model, DistributedDataParallel)
        assert not engine.model.will_sync_module_buffers()
    finally:
        engine.close()


def test_torch_has_the_internals_of_fsdp1_by_which_a_model_moves_to_another_device() -> None:
    used = {
        _runtime_utils: {"_lazy_init"},
        _flat_param.FlatParamHandle: {"flat_param_to", "_use_sharded_views", "reshard"},
    }
    missing = sorted(name for owner, names in used.items() for name in names if not hasattr(owner, name))
    assert not missing, f"torch {torch.__version__} lacks {missing}, which trainer/engines/sharded.py uses"

"""What the contract suite does not reach: refusals before anything runs, gradients that go wrong, figures."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from asyncrl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimConfig
from asyncrl.failures import BugError, ConfigError, DataError, DivergenceError, InfraError
from tests.fakes.trainer_model import write_model
from trainer.algorithms.objective import PolicyLoss
from trainer.engine import dist, export, offload, state
from trainer.engine.base import EngineSpec
from trainer.engine.contract.reference import make_batch
from trainer.engine.ddp import DdpEngine
from trainer.engine.fsdp2 import Fsdp2Engine
from trainer.engine.local import LocalEngine
from trainer.engine.registry import EngineRegistry

LOSS = PolicyLoss(AlgorithmConfig(), 20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def spec(path: Path, *, optim: OptimConfig | None = OptimConfig(lr=1e-2), **engine: Any) -> EngineSpec:  # noqa: B008
    config = EngineConfig(**({"strategy": "local", "device": "cpu"} | engine))
    return EngineSpec("language_model", ModelConfig(path=str(path)), config, optim)


def test_local_is_one_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"strategy=local with 2 ranks: .*use trainer\.strategy=fsdp2"):
        LocalEngine(spec(path, num_workers=2))
    monkeypatch.setattr(dist, "world_size", lambda: 3)
    with pytest.raises(ConfigError, match="with 3 ranks"):
        LocalEngine(spec(path))


def test_ranks_that_share_sequences_have_to_divide_all_ranks(path: Path) -> None:
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2 does not divide the 1 ranks"):
        LocalEngine(spec(path, ulysses_sequence_parallel_size=2))


def test_a_gpu_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda: torch sees no GPU"):
        EngineRegistry.new(spec(path, device="cuda"))
    engine = EngineRegistry.new(spec(path, device="auto"))
    with pytest.raises(ConfigError, match="cannot move to cuda"):
        engine.to("cuda")


def test_a_forward_only_engine_does_not_train(path: Path) -> None:
    engine = LocalEngine(spec(path, optim=None))
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    for call in (lambda: engine.forward_backward(make_batch(2, 1), LOSS), lambda: engine.optim_step(0.0)):
        with pytest.raises(BugError, match="cannot train"):
            call()


def test_the_decay_ends_where_the_plan_says(path: Path) -> None:
    engine, batch = LocalEngine(spec(path, optim=OptimConfig(lr=1.0, decay="linear"))), make_batch(2, 1)

    def rate() -> float:
        engine.forward_backward(batch, LOSS)
        return engine.optim_step(0.0).lr

    with pytest.raises(BugError, match="total steps"):
        rate()
    engine.plan(4)
    assert [rate() for _ in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert engine.step == 4


def test_a_gradient_that_is_not_finite_is_not_applied(path: Path) -> None:
    engine, batch = LocalEngine(spec(path)), make_batch(4, 1)
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


def test_figures_are_sums_and_means_over_tokens(path: Path) -> None:
    engine, batch = LocalEngine(spec(path, ppo_max_token_len=30)), make_batch(6, 1)
    entropy = engine.infer(batch)["entropy"][batch["loss_mask"]]
    figures = engine.forward_backward(batch, LOSS)
    assert figures["tokens"] == int(batch["loss_mask"].sum())
    assert figures["actor/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert figures["actor/pg_loss"] == figures["loss"]


def test_a_construction_that_fails_leaves_no_process_group(path: Path) -> None:
    two_ranks = spec(path, strategy="fsdp2", ulysses_sequence_parallel_size=2)
    for broken in (two_ranks, spec(Path("/nowhere"), strategy="fsdp2")):
        with pytest.raises(ConfigError):
            EngineRegistry.new(broken)
        assert not torch.distributed.is_initialized()


def test_a_checkpoint_that_was_not_written_is_said_on_closing_and_the_group_is_left(path: Path, tmp_path: Path) -> None:
    engine = EngineRegistry.new(spec(path, strategy="fsdp2"))
    (tmp_path / "engine.json").symlink_to("/dev/full")
    engine.save(tmp_path)
    with pytest.raises(InfraError, match="disk is full"):
        engine.close()
    assert not torch.distributed.is_initialized()


def test_nothing_of_the_old_model_is_left_when_a_reset_loads_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(spec(path))
    engine.optim_step(engine.forward_backward(make_batch(4, 1), LOSS)["loss"])
    old = [weakref.ref(parameter) for parameter in engine.model.parameters()]
    load, alive = LocalEngine._load, []

    def counting(self: LocalEngine) -> PreTrainedModel:
        alive.append(sum(parameter() is not None for parameter in old))
        return load(self)

    monkeypatch.setattr(LocalEngine, "_load", counting)
    engine.reset()
    assert alive == [0]


def test_an_engine_whose_reset_failed_says_so_and_can_be_reset_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = LocalEngine(spec(path)), make_batch(4, 1)
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


def test_weights_and_state_are_at_hand_for_collectives_and_go_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sharded model: the device stands for a GPU, `meta` for where its parts were moved to."""
    engine = Fsdp2Engine(spec(path, strategy="fsdp2"))
    away, seen = torch.device("meta"), []
    try:
        monkeypatch.setattr(engine, "_move_model", lambda device: None)
        monkeypatch.setattr(offload, "move_optimizer", lambda optimizer, device: None)
        export_weights, begin_save = export.full_weights, state.begin_save

        def seen_export(*args: Any, **kwargs: Any) -> Any:
            seen.append(dict(engine._places))
            return export_weights(*args, **kwargs)

        def seen_save(*args: Any, **kwargs: Any) -> Any:
            seen.append(dict(engine._places))
            return begin_save(*args, **kwargs)

        monkeypatch.setattr(export, "full_weights", seen_export)
        monkeypatch.setattr(state, "begin_save", seen_save)
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


def test_what_is_offloaded_goes_back_after_a_failure(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rests = LocalEngine(spec(path)), []
    monkeypatch.setattr(engine, "_rest", lambda: rests.append("rest"))
    odd = make_batch(2, 1)
    odd["input_ids"][0, 0] = 10**6
    with pytest.raises(DataError):
        engine.infer(odd)
    assert rests == ["rest"]
    with pytest.raises(ConfigError):
        engine.load(tmp_path)
    assert rests == ["rest", "rest"]


def test_ddp_does_not_send_buffers_around(path: Path) -> None:
    engine = DdpEngine(spec(path, strategy="ddp"))
    try:
        assert isinstance(engine.model, DistributedDataParallel)
        assert not engine.model.will_sync_module_buffers()
    finally:
        engine.close()

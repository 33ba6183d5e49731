"""What the contract suite does not reach: refusals before anything runs, gradients that go wrong, figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimConfig
from asyncrl.failures import BugError, ConfigError, DivergenceError
from tests.fakes.trainer_model import write_model
from trainer.algorithms.objective import PolicyLoss
from trainer.engine import dist
from trainer.engine.base import EngineSpec
from trainer.engine.contract.reference import make_batch
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

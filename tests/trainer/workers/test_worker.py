"""One rank on a tiny model: the behaviour that a worker adds to its engine. The contract suite tests the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.core.failures import BugError, ConfigError, DataError, DivergenceError
from tests.fakes.losses import Likelihood, NotFinite
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB
from trainer.engines.base import EngineSpec
from trainer.workers.worker import TrainingWorker

BATCH = make_batch([3, 5, 1, 4, 2], [4, 2, 6, 1, 5], vocab=VOCAB)


def make_worker(spec: EngineSpec) -> TrainingWorker:
    worker = TrainingWorker(spec)
    worker.plan(10)
    worker.set_loss_fn(Likelihood())
    return worker


@pytest.fixture
def worker(spec: EngineSpec) -> Iterator[TrainingWorker]:
    worker = make_worker(spec)
    yield worker
    worker.close()


def state(worker: TrainingWorker) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in worker.weights("float32")}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_a_step_equals_a_pass_and_an_update(spec: EngineSpec, worker: TrainingWorker) -> None:
    metrics = worker.train_batch(BATCH)
    other = make_worker(spec)
    assert metrics == other.forward_backward(BATCH) | other.optim_step()
    assert worker.step() == other.step() == 1
    assert same(state(worker), state(other))
    assert metrics["tokens"] == float(BATCH["loss_mask"].sum())
    assert metrics["loss"] == pytest.approx(metrics["nll"], rel=1e-12)
    assert metrics["grad_norm"] > 0
    assert metrics["lr"] == 1e-2


def test_a_batch_without_trained_tokens_is_refused_before_any_step(worker: TrainingWorker) -> None:
    before = state(worker)
    batch = BATCH.clone()
    batch["loss_mask"][:] = False
    for call in (worker.train_batch, worker.forward_backward):
        with pytest.raises(DataError, match="a batch without a single trained token"):
            call(batch)
    assert worker.step() == 0
    assert same(state(worker), before)
    assert worker.infer_batch(batch)["log_probs"].shape == batch["loss_mask"].shape, "inference needs no trained tokens"


def test_incomplete_batches_are_refused(worker: TrainingWorker) -> None:
    with pytest.raises(DataError, match="rank 0: a batch lacks prompt_lens, loss_mask"):
        worker.train_batch(BATCH.exclude("loss_mask", "prompt_lens"))
    with pytest.raises(DataError, match="a batch without rows"):
        worker.infer_batch(BATCH[:0])


def test_a_failed_step_changes_no_state(spec: EngineSpec, worker: TrainingWorker) -> None:
    worker.train_batch(BATCH)
    before = state(worker)
    worker.set_loss_fn(NotFinite())
    with pytest.raises(DivergenceError, match="loss nan"):
        worker.train_batch(BATCH)
    assert same(state(worker), before)
    worker.set_loss_fn(Raises())
    with pytest.raises(ZeroDivisionError):
        worker.train_batch(BATCH)
    worker.set_loss_fn(Likelihood())
    after = worker.train_batch(BATCH)
    untroubled = make_worker(spec)
    untroubled.train_batch(BATCH)
    assert after == untroubled.train_batch(BATCH)
    assert same(state(worker), state(untroubled))


class Raises(Likelihood):
    """Raises after a part of the gradient has accumulated."""

    def __call__(self, scores: Any, tokens: Any) -> Any:
        parts = super().__call__(scores, tokens)
        parts.loss.backward()
        raise ZeroDivisionError


def test_a_load_discards_the_gradient(spec: EngineSpec, worker: TrainingWorker, tmp_path: Path) -> None:
    worker.train_batch(BATCH)
    worker.save_checkpoint(tmp_path)
    worker.finish_checkpoint()
    expected = worker.train_batch(BATCH)
    for loss in (Likelihood(), NotFinite()):
        worker.set_loss_fn(loss)
        worker.forward_backward(BATCH)
        worker.load_checkpoint(tmp_path)
        worker.set_loss_fn(Likelihood())
        assert worker.train_batch(BATCH) == expected
    worker.forward_backward(BATCH)
    with pytest.raises(ConfigError):
        worker.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(BugError, match="optim_step without a forward_backward"):
        worker.optim_step()


def test_training_needs_a_loss_and_an_optimizer(spec: EngineSpec) -> None:
    actor, reference = TrainingWorker(spec), TrainingWorker(replace(spec, optim=None))
    with pytest.raises(BugError, match="before set_loss_fn"):
        actor.train_batch(BATCH)
    reference.set_loss_fn(Likelihood())
    with pytest.raises(BugError, match="forward only"):
        reference.train_batch(BATCH)
    torch.testing.assert_close(
        reference.infer_batch(BATCH)["log_probs"], actor.infer_batch(BATCH)["log_probs"], rtol=0, atol=0
    )


def test_bfloat16_weights_are_sent_as_bits(worker: TrainingWorker) -> None:
    full, half = dict(worker.weights("float32")), dict(worker.weights("bfloat16"))
    assert full.keys() == half.keys()
    for name, array in half.items():
        assert array.dtype == np.uint16
        restored = torch.from_numpy(array.copy()).view(torch.bfloat16)
        assert torch.equal(restored, torch.from_numpy(full[name].copy()).bfloat16())

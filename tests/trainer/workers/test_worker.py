"""One rank on a real (tiny) model. What the engines compute is checked with the engines; here: what a worker adds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import ModelConfig
from asyncrl.failures import BugError, ConfigError, DataError, DivergenceError
from tests.fakes.losses import Likelihood, NotFinite
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB, make_config, write_model
from trainer.placement import plan_groups
from trainer.worker import TrainingWorker, engine_spec

BATCH = make_batch([3, 5, 1, 4, 2], [4, 2, 6, 1, 5], vocab=VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_a_spec_knows_the_key_that_its_model_was_given_under(model: Path) -> None:
    config = make_config(model, algorithm={"adv_estimator": "gae"}, critic={"path": str(model)})
    specs = [engine_spec(plan, device="cpu", collective_s=10) for plan in plan_groups(config)[0].roles]
    assert [spec.path_key for spec in specs] == ["model.path", "critic.path"]


def make_worker(path: Path, **sections: Any) -> TrainingWorker:
    config = make_config(path, trainer={"strategy": "local", "optim": {"lr": 1e-2}}).model_copy(update=sections)
    worker = TrainingWorker(engine_spec(plan_groups(config)[0].roles[0], device="cpu", collective_s=10))
    worker.plan(10)
    worker.set_loss_fn(Likelihood())
    return worker


@pytest.fixture
def worker(model: Path) -> Iterator[TrainingWorker]:
    worker = make_worker(model)
    yield worker
    worker.close()


def state(worker: TrainingWorker) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in worker.weights("float32").items()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_a_step_for_each_mini_batch_in_order(model: Path, worker: TrainingWorker) -> None:
    mini_batches = [[3, 0], [4], [1, 2, 0]]
    metrics = worker.train_mini_batch(BATCH, mini_batches)
    one_by_one = make_worker(model)
    expected = [one_by_one.train_batch(BATCH[rows]) for rows in mini_batches]
    assert metrics == expected
    assert worker.step() == one_by_one.step() == 3
    assert same(state(worker), state(one_by_one))
    assert [part["tokens"] for part in metrics] == [float(BATCH[rows]["loss_mask"].sum()) for rows in mini_batches]
    for part in metrics:
        assert part["loss"] == pytest.approx(part["nll"], rel=1e-12)
        assert part["grad_norm"] > 0
        assert part["lr"] == 1e-2


def test_a_training_step_is_its_two_halves(model: Path, worker: TrainingWorker) -> None:
    halves = worker.forward_backward(BATCH) | worker.optim_step()
    whole = make_worker(model)
    assert halves == whole.train_batch(BATCH)
    assert same(state(worker), state(whole))


def test_gradients_add_up_until_the_step(model: Path, worker: TrainingWorker) -> None:
    """Twice the same batch is twice the gradient. AdamW's first step does not see its scale; its norm does."""
    worker.forward_backward(BATCH)
    worker.forward_backward(BATCH)
    twice = worker.optim_step()["grad_norm"]
    once = make_worker(model).train_batch(BATCH)["grad_norm"]
    assert twice == pytest.approx(2 * once, rel=1e-5)


def test_a_step_without_a_gradient_is_refused(worker: TrainingWorker) -> None:
    """It would move the weights all the same: AdamW has its momentum."""
    with pytest.raises(BugError, match="optim_step without a forward_backward"):
        worker.optim_step()
    worker.train_batch(BATCH)
    before = state(worker)
    with pytest.raises(BugError, match="optim_step without a forward_backward"):
        worker.optim_step()
    assert worker.step() == 1
    assert same(state(worker), before)


def test_nothing_trained_is_refused_before_any_step(worker: TrainingWorker) -> None:
    before = state(worker)
    batch = BATCH.clone()
    batch["loss_mask"][2] = False
    with pytest.raises(DataError, match="mini-batch 1 without a single trained token"):
        worker.train_mini_batch(batch, [[0, 1], [2]])
    batch["loss_mask"][:] = False
    for call in (worker.train_batch, worker.forward_backward):
        with pytest.raises(DataError, match="a batch without a single trained token"):
            call(batch)
    assert worker.step() == 0
    assert same(state(worker), before)
    assert worker.infer_batch(batch)["log_probs"].shape == batch["loss_mask"].shape, "it may be asked all the same"


def test_batches_that_lack_something_are_refused(worker: TrainingWorker) -> None:
    with pytest.raises(DataError, match="rank 0: a batch lacks prompt_lens, loss_mask"):
        worker.train_batch(BATCH.exclude("loss_mask", "prompt_lens"))
    with pytest.raises(DataError, match="a batch without rows"):
        worker.infer_batch(BATCH[:0])


def test_a_failed_step_leaves_no_trace(model: Path, worker: TrainingWorker) -> None:
    """Neither in the weights nor in the gradient of the next step."""
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
    untroubled = make_worker(model)
    untroubled.train_batch(BATCH)
    assert after == untroubled.train_batch(BATCH)
    assert same(state(worker), state(untroubled))


class Raises(Likelihood):
    """In the second micro-batch at the latest: a part of the gradient is there already."""

    def __call__(self, scores: Any, tokens: Any) -> Any:
        parts = super().__call__(scores, tokens)
        parts.loss.backward()
        raise ZeroDivisionError


def test_reset_is_a_new_worker(model: Path, worker: TrainingWorker) -> None:
    fresh = state(worker)
    first = worker.train_batch(BATCH)
    assert not same(state(worker), fresh)
    worker.reset()
    assert worker.step() == 0
    assert same(state(worker), fresh)
    assert worker.train_batch(BATCH) == first


def test_checkpoints_go_on_where_they_were(model: Path, worker: TrainingWorker, tmp_path: Path) -> None:
    worker.train_batch(BATCH)
    (tmp_path / "actor").mkdir()
    worker.save_checkpoint(tmp_path / "actor", hf=tmp_path / "hf")
    saved = state(worker)
    expected = worker.train_batch(BATCH)
    worker.finish_checkpoint()
    other = make_worker(model)
    other.load_checkpoint(tmp_path / "actor")
    assert other.step() == 1
    assert same(state(other), saved), "what was saved is not what came after"
    assert other.train_batch(BATCH) == expected


def test_a_gradient_of_before_does_not_outlive_a_load(model: Path, worker: TrainingWorker, tmp_path: Path) -> None:
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


def test_training_needs_a_loss_and_an_optimizer(model: Path) -> None:
    config = make_config(model, trainer={"strategy": "local"}, algorithm={"use_kl_loss": True})
    roles = {plan.role: plan for plan in plan_groups(config)[0].roles}
    actor, reference = (
        TrainingWorker(engine_spec(roles[role], device="cpu", collective_s=10)) for role in ("actor", "ref")
    )
    with pytest.raises(BugError, match="before set_loss_fn"):
        actor.train_batch(BATCH)
    reference.set_loss_fn(Likelihood())
    with pytest.raises(BugError, match="forward only"):
        reference.train_batch(BATCH)
    torch.testing.assert_close(
        reference.infer_batch(BATCH)["log_probs"], actor.infer_batch(BATCH)["log_probs"], rtol=0, atol=0
    )


def test_without_adapters_it_is_the_model_it_started_from(model: Path) -> None:
    worker = make_worker(model, model=ModelConfig(path=str(model), lora_rank=4))
    start = worker.infer_batch(BATCH)["log_probs"]
    worker.train_batch(BATCH)
    worker.train_batch(BATCH)
    assert (worker.infer_batch(BATCH)["log_probs"] - start).abs().max() > 1e-3
    torch.testing.assert_close(worker.infer_batch(BATCH, adapters=False)["log_probs"], start)
    with pytest.raises(ConfigError, match="lora_rank=0"):
        make_worker(model).infer_batch(BATCH, adapters=False)


def test_weights_in_half_precision_travel_as_bits(worker: TrainingWorker) -> None:
    full, half = worker.weights("float32"), worker.weights("bfloat16")
    assert full.keys() == half.keys()
    for name, array in half.items():
        assert array.dtype == np.uint16
        restored = torch.from_numpy(array.copy()).view(torch.bfloat16)
        assert torch.equal(restored, torch.from_numpy(full[name].copy()).bfloat16())

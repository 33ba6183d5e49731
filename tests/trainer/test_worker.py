"""The training worker on a real (tiny) model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from asyncrl.failures import BugError, ConfigError, DataError, DivergenceError
from asyncrl.ports import TrainRow
from tests.fakes.trainer_model import make_config, make_rows, write_model
from trainer.engine import local
from trainer.engine.optim import optimizer_tensors
from trainer.worker import LocalTrainingWorker


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make_worker(model_dir: Path, **sections: Any) -> LocalTrainingWorker:
    worker = LocalTrainingWorker(make_config(model_dir, **sections))
    worker.plan(10)
    return worker


def snapshot(worker: LocalTrainingWorker) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in worker.weights("float32")}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def reference_log_probs(model: torch.nn.Module, row: TrainRow, temperature: float = 1.0) -> torch.Tensor:
    """Of the response tokens, float64, all logits, one row, no padding."""
    tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits = model.double()(tokens).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, len(row.prompt_ids) :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_models_own(model_dir: Path, temperature: float) -> None:
    worker = make_worker(model_dir, rollout={"sampling": {"temperature": temperature}})
    rows = make_rows(12)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    for row, log_probs in zip(rows, worker.infer_batch(rows), strict=True):
        assert log_probs.dtype == np.float32
        expected = reference_log_probs(model, row, temperature).detach().numpy()
        np.testing.assert_allclose(log_probs, expected, atol=2e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_the_step_is_the_one_of_a_plain_reference(model_dir: Path, mode: str, use_kl_loss: bool) -> None:
    """Loss, metrics and gradient of two steps, against one row at a time in float64."""
    algorithm = {"loss_agg_mode": mode, "use_kl_loss": use_kl_loss, "kl_loss_coef": 0.1, "clip_ratio_high": 0.3}
    worker = make_worker(model_dir, algorithm=algorithm, trainer={"optim": {"lr": 1e-2, "clip_grad": 1e9}})
    rows = make_rows(9)
    worker.train_mini_batch(rows)  # moves the policy away from its reference
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    frozen = copy.deepcopy(model)
    model.load_state_dict(worker.engine.model.state_dict())
    model.float()

    total = sum(int(row.response_mask.sum()) for row in rows)
    pg_loss = kl = torch.zeros((), dtype=torch.float64)
    clipped = ratio_sum = 0.0
    for row in rows:
        mask = torch.tensor(row.response_mask)
        log_probs = reference_log_probs(model, row)[mask]
        ratio = torch.exp(log_probs - torch.tensor(row.rollout_log_probs, dtype=torch.float64)[mask])
        advantage = float(row.advantages[0])
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        difference = reference_log_probs(frozen, row)[mask].detach() - log_probs
        tokens = int(mask.sum())
        weight = {
            "token-mean": 1 / total,
            "seq-mean-token-mean": 1 / (len(rows) * tokens),
            "seq-mean-token-sum": 1 / len(rows),
        }[mode]
        pg_loss = pg_loss - weight * objective.sum()
        kl = kl + weight * (difference.exp() - 1 - difference).sum()
        clipped += float((ratio * advantage > ratio.clamp(0.8, 1.3) * advantage).sum()) / total
        ratio_sum += ratio.sum().item() / total
    loss = pg_loss + 0.1 * kl if use_kl_loss else pg_loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    metrics = worker.train_mini_batch(rows)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=2e-6, abs=1e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(pg_loss.item(), rel=2e-6, abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.item() if use_kl_loss else 0.0, rel=1e-5, abs=1e-6)
    assert metrics["actor/clip_fraction"] == pytest.approx(clipped)
    assert metrics["actor/ratio_mean"] == pytest.approx(ratio_sum, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_entropy_is_that_of_the_trained_positions(model_dir: Path) -> None:
    worker, rows = make_worker(model_dir), make_rows(6)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    entropies = []
    for row in rows:
        tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logits = model(tokens).logits[0, len(row.prompt_ids) - 1 : -1].double()
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        entropies += entropy[torch.tensor(row.response_mask)].tolist()
    assert worker.train_mini_batch(rows)["actor/entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 80, 100_000])
def test_the_step_does_not_depend_on_the_cut_into_micro_batches(model_dir: Path, budget: int) -> None:
    rows = make_rows(16)
    whole, cut = make_worker(model_dir), make_worker(model_dir, trainer={"ppo_max_token_len": budget})
    expected, metrics = whole.train_mini_batch(rows), cut.train_mini_batch(rows)
    assert metrics == pytest.approx(expected, rel=5e-6, abs=1e-6)
    gradients = [optimizer_tensors(worker.engine.model, worker.engine.optimizer) for worker in (whole, cut)]
    for name, moment in gradients[0].items():  # after one step the first moment is a tenth of the gradient
        torch.testing.assert_close(gradients[1][name], moment, rtol=0, atol=1e-6, msg=name)


def test_zero_advantage_rows_change_nothing_by_skipping_their_backward_pass(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(16, zero_share=0.5)
    skipping, plain = make_worker(model_dir), make_worker(model_dir)
    monkeypatch.setattr(plain, "_by_gradient", lambda rows: [(True, list(range(len(rows))))])
    for _ in range(3):
        assert skipping.train_mini_batch(rows) == pytest.approx(plain.train_mini_batch(rows), rel=1e-5, abs=1e-6)
    for name, array in plain.weights("float32"):
        np.testing.assert_allclose(dict(skipping.weights("float32"))[name], array, atol=1e-5, err_msg=name)


def test_without_any_advantage_momentum_still_moves_the_weights(model_dir: Path) -> None:
    worker = make_worker(model_dir)
    worker.train_mini_batch(make_rows(4))
    before = snapshot(worker)
    metrics = worker.train_mini_batch(make_rows(4, zero_share=1.0))
    assert metrics["actor/grad_norm"] == 0.0
    assert any((array != before[name]).any() for name, array in worker.weights("float32"))


def test_gradient_checkpointing_gives_the_same_step(model_dir: Path) -> None:
    rows = make_rows(8)
    plain, saving = make_worker(model_dir), make_worker(model_dir, trainer={"gradient_checkpointing": True})
    assert saving.train_mini_batch(rows) == pytest.approx(plain.train_mini_batch(rows), abs=1e-6)


def test_bfloat16_computes_near_float32_and_keeps_float32_masters(model_dir: Path) -> None:
    rows = make_rows(8)
    full, half = make_worker(model_dir), make_worker(model_dir, trainer={"dtype": "bfloat16"})
    for left, right in zip(full.infer_batch(rows), half.infer_batch(rows), strict=True):
        assert 0 < np.abs(left - right).max() < 0.2
    half.train_mini_batch(rows)
    assert all(parameter.dtype == torch.float32 for parameter in half.engine.model.parameters())


def test_a_row_without_trained_tokens_counts_nowhere(model_dir: Path) -> None:
    rows = make_rows(4)
    ghost = replace(rows[0], response_mask=np.zeros_like(rows[0].response_mask))
    expected = make_worker(model_dir, algorithm={"loss_agg_mode": "seq-mean-token-mean"}).train_mini_batch(rows)
    worker = make_worker(model_dir, algorithm={"loss_agg_mode": "seq-mean-token-mean"})
    assert worker.train_mini_batch([*rows, ghost]) == pytest.approx(expected, abs=1e-7)
    before = snapshot(worker)
    with pytest.raises(DataError, match="without a single trained token"):
        worker.train_mini_batch([ghost])
    assert_same(snapshot(worker), before)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_is_not_taken(model_dir: Path, where: str) -> None:
    worker, rows = make_worker(model_dir), make_rows(4)
    worker.train_mini_batch(rows)
    before, moments = snapshot(worker), copy.deepcopy(worker.engine.optimizer.state_dict())
    embedding = worker.engine.model.get_input_embeddings()
    poison = float("nan")
    if where == "loss":
        handle = embedding.register_forward_hook(lambda module, inputs, output: output * poison)
    else:
        handle = embedding.weight.register_hook(lambda gradient: gradient * poison)
    with pytest.raises(DivergenceError, match=r"step 2: .*trainer\.optim\.lr"):
        worker.train_mini_batch(rows)
    handle.remove()
    assert_same(snapshot(worker), before)
    assert worker.engine.step == 1
    for key, state in worker.engine.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, moments["state"][key][name], rtol=0, atol=0)
    assert np.isfinite(worker.train_mini_batch(rows)["actor/loss"])


def test_an_underflowing_ratio_of_a_masked_token_is_harmless(model_dir: Path) -> None:
    row = make_rows(1, mask_share=0.0)[0]
    far = np.full_like(row.rollout_log_probs, -1e6)
    far[0] = row.rollout_log_probs[0]
    mask = np.zeros_like(row.response_mask)
    mask[0] = True
    outcome = make_worker(model_dir).train_mini_batch([replace(row, rollout_log_probs=far, response_mask=mask)])
    assert np.isfinite(list(outcome.values())).all()


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_and_values_of_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    source = write_model(tmp_path / "model", tied=tied)
    exported = dict(make_worker(source).weights("float32"))
    assert_same(exported, load_file(source / "model.safetensors"))
    assert ("lm_head.weight" in exported) is not tied
    assert all(array.flags.c_contiguous for array in exported.values())


def test_bfloat16_weights_travel_as_bits(model_dir: Path) -> None:
    worker = make_worker(model_dir)
    full = dict(worker.weights("float32"))
    for name, bits in worker.weights("bfloat16"):
        assert bits.dtype == np.uint16
        back = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
        np.testing.assert_allclose(back, full[name], rtol=2**-8)


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_two_and_two_steps_over_a_checkpoint_are_four(model_dir: Path, tmp_path: Path, use_kl_loss: bool) -> None:
    sections: dict[str, Any] = {
        "algorithm": {"use_kl_loss": use_kl_loss},
        "trainer": {"optim": {"lr": 1e-2, "warmup_steps": 3, "decay": "cosine"}},
    }
    batches = [make_rows(6, seed=seed) for seed in range(4)]
    through = make_worker(model_dir, **sections)
    records = [through.train_mini_batch(rows) for rows in batches]

    first = make_worker(model_dir, **sections)
    for rows in batches[:2]:
        first.train_mini_batch(rows)
    first.save_checkpoint(tmp_path)
    second = make_worker(model_dir, **sections)
    torch.rand(5)
    second.load_checkpoint(tmp_path)
    resumed = [second.train_mini_batch(rows) for rows in batches[2:]]

    assert resumed == records[2:]
    assert_same(snapshot(second), snapshot(through))


def test_a_checkpoint_before_the_first_step(model_dir: Path, tmp_path: Path) -> None:
    make_worker(model_dir).save_checkpoint(tmp_path)
    worker = make_worker(model_dir)
    worker.load_checkpoint(tmp_path)
    assert worker.engine.step == 0
    worker.train_mini_batch(make_rows(2))


def test_a_checkpoint_holds_a_model_directory_and_no_pickle(model_dir: Path, tmp_path: Path) -> None:
    worker = make_worker(model_dir)
    worker.train_mini_batch(make_rows(4))
    worker.save_checkpoint(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), snapshot(worker)[name])
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = make_worker(write_model(tmp_path / "other", hidden=32))
    (tmp_path / "checkpoint").mkdir()
    other.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="weights of another model"):
        make_worker(model_dir).load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["engine.json", "optimizer.safetensors", "rng.safetensors", "hf/model.safetensors"])
def test_a_damaged_file_is_named(model_dir: Path, tmp_path: Path, name: str) -> None:
    worker = make_worker(model_dir)
    worker.train_mini_batch(make_rows(2))
    worker.save_checkpoint(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:3])
    with pytest.raises(ConfigError, match=str(tmp_path)):
        make_worker(model_dir).load_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------------ configuration


def test_what_cannot_be_trained_is_refused(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.dtype=float16"):
        make_worker(model_dir, trainer={"dtype": "float16"})
    with pytest.raises(ConfigError, match="temperature=0"):
        make_worker(model_dir, rollout={"sampling": {"temperature": 0}})
    with pytest.raises(ConfigError, match=r"model\.path="):
        make_worker(tmp_path / "nothing")
    monkeypatch.setattr(local.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda"):
        make_worker(model_dir, trainer={"device": "cuda"})


def test_a_decay_needs_its_end(model_dir: Path) -> None:
    worker = LocalTrainingWorker(make_config(model_dir, trainer={"optim": {"decay": "linear"}}))
    with pytest.raises(BugError, match="total steps"):
        worker.train_mini_batch(make_rows(2))

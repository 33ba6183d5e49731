"""The training benchmark compares like with like: same loss, same step, tokens counted once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.trainer import OptimConfig
from benchmarks.models import TransformerShape, make_llama
from benchmarks.plain_trainer import SIGMAS, PlainTrainer, Workload, make_rows
from benchmarks.trainer import _row
from benchmarks.updates import VARIANTS, UpdateCase, UpdateTimes, _Runner, update_flops

SHAPE = TransformerShape(
    hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, vocab_size=40, max_positions=256
)
WORKLOAD = Workload(rows=8, prompt_tokens=4, mean_tokens=12, longest_tokens=60, micro_batch_tokens=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.mark.parametrize("lengths", SIGMAS)
def test_every_variant_makes_the_same_update(model: Path, lengths: str) -> None:
    rows = make_rows(WORKLOAD.lengths(SIGMAS[lengths]), WORKLOAD.prompt_tokens, SHAPE.vocab_size)
    runner = _Runner(0, UpdateCase("tiny", "cpu", 1, lengths, WORKLOAD, rounds=1), model, rows)
    variants = {name: runner._build(name) for name in VARIANTS}
    # The second loss is computed with the weights after the first update.
    losses = {name: [variant.update(), variant.update()] for name, variant in variants.items()}
    assert losses["padded"] == pytest.approx(losses["plain"], abs=1e-6)
    assert losses["packed"] == pytest.approx(losses["plain"], abs=1e-6)
    assert losses["plain"][0] != losses["plain"][1]


def test_a_variant_with_another_loss_is_not_measured(model: Path) -> None:
    runner = _Runner(0, UpdateCase("tiny", "cpu", 1, "equal", WORKLOAD, rounds=1), model, [])
    runner._compare({"plain": 0.5, "padded": 0.5, "packed": math.nan})  # nan: this rank has no loss
    with pytest.raises(SystemExit, match="different work"):
        runner._compare({"plain": 0.5, "padded": 0.5, "packed": 0.6})


def test_the_plain_loop_takes_the_step_of_a_float64_reference(model: Path) -> None:
    optim, algorithm = OptimConfig(lr=1e-2), AlgorithmConfig()
    rows = make_rows([5, 9, 3], 4, SHAPE.vocab_size)
    advantages = [0.5, -1.0, 0.25]
    plain = PlainTrainer(model, optim, algorithm, "cpu", torch.float32)
    loss = plain.update(rows, advantages, micro_batch_tokens=20)

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, advantages, strict=True):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
        log_probs = torch.log_softmax(reference(ids).logits[0, :-1], dim=-1).gather(-1, ids[0, 1:, None])[3:, 0]
        ratio = torch.exp(log_probs - torch.from_numpy(row.rollout_log_probs).double())
        total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
    (total / 17).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), optim.clip_grad)
    stepped = torch.optim.AdamW(
        reference.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    stepped.step()

    assert loss == pytest.approx(float(total.detach()) / 17, abs=1e-6)
    for (name, got), wanted in zip(plain.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.detach().double(), wanted.detach(), atol=2e-4, rtol=0, msg=name)


def test_length_mixes_share_a_mean_and_differ_in_their_tail() -> None:
    workload = Workload(rows=400, prompt_tokens=4, mean_tokens=100, longest_tokens=100_000, micro_batch_tokens=100)
    equal, tailed = (np.array(workload.lengths(sigma)) for sigma in (0.0, 0.9))
    assert set(equal) == {100}
    assert tailed.mean() == pytest.approx(100, rel=0.02)
    assert tailed.max() > 600
    assert np.median(tailed) == pytest.approx(100 * math.exp(-(0.9**2) / 2), rel=0.15)


def test_the_operations_of_an_update_are_counted(model: Path) -> None:
    rows = make_rows([6, 2], 4, SHAPE.vocab_size)
    module = AutoModelForCausalLM.from_pretrained(model)
    # Norms do not count because they multiply no matrices. The tied embedding counts once, as the head.
    parameters = sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)
    assert update_flops(model, rows) == 6 * parameters * 16 + 6 * 2 * 16 * (10**2 + 6**2)


def test_a_row_of_the_table_has_speed_and_memory() -> None:
    case = UpdateCase("1.5B", "cuda", 1, "equal", WORKLOAD, rounds=3)
    measured = UpdateTimes(
        tokens=1000,
        flops=2e12,
        times_s={"plain": [2.0, 9.0, 1.0], "padded": [1.0, 1.0, 5.0], "packed": [0.5, 0.1, 4.0]},
        peak_bytes={"plain": 30 * 10**9, "padded": 10**10, "packed": 2 * 10**10},
    )
    row = _row(case, "packed", measured, peak_tflops=8.0)
    assert (row["tokens_per_s"], row["plain_tokens_per_s"], row["ratio"]) == (2000.0, 500.0, 4.0)
    assert (row["mfu"], row["peak_GB"], row["plain_peak_GB"]) == (0.5, 20.0, 30.0)
    without = measured._replace(times_s=measured.times_s | {"plain": []})
    assert _row(case, "packed", without, peak_tflops=None)["ratio"] is None

"""Supervised training: the order of rows, the layout of a batch, the gradient in float64, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from asyncrl.config.schema import Config
from asyncrl.core.records import Metrics
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import Demonstration
from asyncrl.core.waits import WaitBoard
from asyncrl.observe.metrics.registry import describe
from asyncrl.queue.core import QueueOptions
from asyncrl.queue.sample_queue import LocalSampleQueue
from asyncrl.storage.checkpoint_manifest import Progress, checkpoint_steps, load_manifest
from tests.fakes.inline_group import InlineGroup
from tests.fakes.trainer_model import SHAPE, VOCAB, make_spec, write_model
from trainer.algorithms.objective import SupervisedLoss
from trainer.checkpoints import EXPORT_EVERY, CheckpointDirectory, HfExportSettings, RoleCheckpoints
from trainer.schedule import RowOrder
from trainer.supervised import SupervisedLoop
from trainer.workers.tensors import demonstration_batch

SIZES = st.integers(1, 20)


@given(num_rows=SIZES, size=SIZES, epochs=st.integers(1, 4), drop=st.booleans(), seed=st.integers(0, 3))
def test_every_epoch_has_every_row_once(num_rows: int, size: int, epochs: int, drop: bool, seed: int) -> None:
    trainer = {
        "ppo_mini_batch_size": size,
        "total_epochs": epochs,
        "partial_final_batch": "drop" if drop else "train",
    }
    order = RowOrder.from_config(Config.model_validate({"seed": seed, "trainer": trainer}), num_rows)
    steps = [order.rows(step) for step in range(1, order.total_steps + 1)]
    assert all(len(rows) == size for rows in steps[:-1]) and all(steps)
    flat = [row for rows in steps for row in rows]
    assert len(flat) == (num_rows * epochs // size * size if drop else num_rows * epochs)
    for epoch in range(len(flat) // num_rows):
        assert sorted(flat[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    # A resumed run asks for later steps only, and gets the same rows.
    resumed = RowOrder.from_config(Config.model_validate({"seed": seed, "trainer": trainer}), num_rows)
    assert [resumed.rows(step) for step in range(len(steps), 0, -1)] == steps[::-1]


def test_a_number_of_steps_repeats_the_rows_as_often_as_needed() -> None:
    trainer = {"ppo_mini_batch_size": 4, "total_training_steps": 5}
    config = Config.model_validate({"data": {"shuffle": False}, "trainer": trainer})
    order = RowOrder.from_config(config, 6)
    assert order.total_steps == 5
    assert [order.rows(step) for step in (1, 2, 5)] == [[0, 1, 2, 3], [4, 5, 0, 1], [4, 5, 0, 1]]


def demonstrations(number: int, seed: int = 0) -> list[Demonstration]:
    """Return random conversations with one or two trained turns."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        length = int(generator.integers(4, 14))
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        made.append(Demonstration(generator.integers(0, VOCAB, length).astype(np.int32), mask))
    return made


def plain_loss(model: torch.nn.Module, rows: Sequence[Demonstration]) -> torch.Tensor:
    """Return the cross-entropy over all trained tokens, one token at a time."""
    losses = []
    for row in rows:
        scores = model(torch.tensor(row.token_ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        losses += [-scores[place - 1, int(row.token_ids[place])] for place in np.flatnonzero(row.mask)]
    return torch.stack(losses).mean()


def test_a_batch_has_the_tokens_and_the_mask_of_its_rows() -> None:
    rows = demonstrations(6)
    batch = demonstration_batch(rows)
    for number, row in enumerate(rows):
        start, length = int(batch["prompt_lens"][number]), int(batch["response_lens"][number])
        assert start + length == len(row.token_ids) and start >= 1
        assert batch["input_ids"][number, : start + length].tolist() == row.token_ids.tolist()
        assert batch["loss_mask"][number, :length].tolist() == row.mask[start:].tolist()
        assert not row.mask[:start].any() and not batch["loss_mask"][number, length:].any()


@pytest.mark.parametrize("packed", [True, False])
async def test_the_gradient_is_that_of_a_plain_loop(tmp_path: Path, packed: bool) -> None:
    path, rows = write_model(tmp_path), demonstrations(7)
    spec = make_spec(path, use_remove_padding=packed, ppo_max_token_len=32)
    actor = await InlineGroup.start(replace(spec, float64=True))
    await actor.set_loss_fn(SupervisedLoss())
    measured = await actor.forward_backward(demonstration_batch(rows))
    model = actor._rank._workers["actor"].engine.model  # type: ignore[attr-defined]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    await actor.close()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    loss = plain_loss(plain, rows)
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-10, msg=name)


class Records:
    """Keeps what a loop reports; `after` is called after each row."""

    def __init__(self, after: Callable[[str, int], None] = lambda kind, step: None) -> None:
        self.rows: list[tuple[str, int, Metrics]] = []
        self._after = after

    async def put(self, kind: str, step: int, metrics: Metrics) -> None:
        for name in metrics:
            describe(name)
        self.rows.append((kind, step, metrics))
        self._after(kind, step)

    def named(self, kind: str, name: str) -> dict[int, float]:
        return {step: metrics[name] for of, step, metrics in self.rows if of == kind}


def loop_of(
    actor: InlineGroup,
    directory: Path,
    progress: Progress,
    *,
    steps: int,
    save_freq: int = -1,
    export: HfExportSettings = EXPORT_EVERY,
) -> SupervisedLoop:
    checkpoints = RoleCheckpoints(
        CheckpointDirectory(directory, identity={"seed": 0}, keep=2),
        {"actor": actor},
        LocalSampleQueue(QueueOptions(1, Pacing(1, 0.0))),
        step=progress.step,
        save_freq=save_freq,
        export=export,
        call_limit_s=60.0,
        waits=WaitBoard(),
    )
    return SupervisedLoop(
        actor,
        checkpoints,
        rows=demonstrations(12),
        order=RowOrder(12, 4, 4 * steps, 0, shuffle=True),
        validation=demonstrations(5, seed=1),
        progress=progress,
        test_freq=4,
    )


async def test_experts_are_balanced_and_the_reported_loss_is_the_cross_entropy(tmp_path: Path) -> None:
    shape = SHAPE | {"num_hidden_layers": 1}
    MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4)).save_pretrained(tmp_path / "model")
    rows, found = Records(), {}
    for coef in (0.0, 0.5):
        actor = await InlineGroup.start(replace(make_spec(tmp_path / "model"), router_aux_loss_coef=coef))
        await actor.set_loss_fn(SupervisedLoss())
        await actor.plan(10)
        await loop_of(actor, tmp_path / str(coef), Progress(), steps=1).run(rows.put)
        await actor.close()
        found[coef] = next(metrics for kind, _, metrics in rows.rows[::-1] if kind == "step")
    plain, balanced = found[0.0], found[0.5]
    assert balanced["sft/loss"] == pytest.approx(plain["sft/loss"]) == pytest.approx(plain["actor/loss"])
    weighted = 0.5 * balanced["actor/router_aux_loss"]
    assert balanced["actor/loss"] == pytest.approx(balanced["sft/loss"] + weighted)
    assert balanced["actor/grad_norm"] != plain["actor/grad_norm"]
    assert "actor/router_aux_loss" not in plain


async def start(path: Path) -> InlineGroup:
    actor = await InlineGroup.start(make_spec(path))
    await actor.set_loss_fn(SupervisedLoss())
    await actor.plan(10)
    return actor


async def test_the_loss_falls_and_an_interrupted_run_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    whole, actor = Records(), await start(path)
    await loop_of(actor, tmp_path / "whole", Progress(), steps=10).run(whole.put)
    await actor.close()
    losses = whole.named("step", "sft/loss")
    assert list(losses) == list(range(1, 11))
    assert losses[10] < 0.8 * losses[1]
    validations = whole.named("validation", "validation/loss")
    assert list(validations) == [0, 4, 8, 10]
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert validations[0] == pytest.approx(plain_loss(plain, demonstrations(5, seed=1)).item(), rel=1e-5)
    assert list(checkpoint_steps(tmp_path / "whole")) == [10]

    progress, first, actor = (
        Progress(),
        Records(lambda kind, step: loop.stop() if step == 6 else None),
        await start(path),
    )
    loop = loop_of(actor, tmp_path / "parts", progress, steps=10, save_freq=3)
    await loop.run(first.put)
    await actor.close()
    steps = checkpoint_steps(tmp_path / "parts")
    assert list(steps) == [3, 6] and progress.step == 6
    manifest = load_manifest(steps[6])
    assert (manifest.progress.trained_samples, manifest.queue.counts.fed) == (24, 0)
    assert (steps[6] / "hf" / "config.json").is_file()

    second, actor = Records(), await start(path)
    await actor.load_checkpoint(steps[6] / "actor")
    await loop_of(actor, tmp_path / "parts", replace(manifest.progress), steps=10).run(second.put)
    await actor.close()
    both = first.named("step", "sft/loss") | second.named("step", "sft/loss")
    assert both == pytest.approx(losses, rel=1e-5)
    assert list(second.named("validation", "validation/loss")) == [8, 10]
    assert list(checkpoint_steps(tmp_path / "parts")) == [6, 10]


@pytest.mark.parametrize(("save_freq", "exported"), [(2, [False, True]), (3, [False, True]), (-1, [True])])
async def test_only_the_last_checkpoint_is_exported_if_asked(
    tmp_path: Path, save_freq: int, exported: list[bool]
) -> None:
    actor = await start(write_model(tmp_path / "model"))
    settings = HfExportSettings("last")
    loop = loop_of(actor, tmp_path / "saved", Progress(), steps=4, save_freq=save_freq, export=settings)
    await loop.run(Records().put)
    await actor.close()
    found = [(path / "hf" / "config.json").is_file() for path in checkpoint_steps(tmp_path / "saved").values()]
    assert found == exported

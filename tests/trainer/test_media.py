"""Rows with images in the Trainer: images reach the model, and sampled placeholders are plain tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.types import FinishReason, Media, Row, Sample, SampleId, Span
from asyncrl.storage.media import join, split
from tests.fakes.losses import Likelihood
from tests.fakes.trainer_model import make_spec, write_model
from tests.fakes.vision_model import picture, png, write_vision_model
from trainer.batches import RowRules, TrainRow, prepare_sample
from trainer.engines.base import BaseEngine
from trainer.engines.registry import new_engine
from trainer.workers.tensors import to_batch

STRATEGIES = ("ddp", "fsdp", "fsdp2")
ONE, TWO = Media("image", png(1)), Media("image", png(2))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"))


def prompt_ids(path: Path, *seeds: int) -> np.ndarray:
    """Return a prompt with the placeholders that transformers writes for the images of `seeds`."""
    processor = AutoProcessor.from_pretrained(path)
    text = "<|im_start|>user\nlook: " + " and ".join(["<image>"] * len(seeds)) + "<|im_end|>\n<|im_start|>assistant\n"
    images = {"images": [[picture(seed) for seed in seeds]]} if seeds else {}
    ids = processor(text=[text], add_special_tokens=False, **images)["input_ids"][0]
    return np.array(ids, dtype=np.int32)


def rows_of(
    path: Path, *, response: Sequence[int] = (40, 41, 42, 43), media: Sequence[Media] = (ONE,)
) -> list[TrainRow]:
    seeds = [1 if one == ONE else 2 for one in media]
    row = Row(
        prompt_ids=prompt_ids(path, *seeds),
        response_ids=np.array(response, dtype=np.int32),
        response_mask=np.ones(len(response), dtype=np.bool_),
        rollout_log_probs=np.full(len(response), -1.0, dtype=np.float32),
        spans=(Span(0, 0),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )
    sample = Sample(SampleId(0, 1), (row,), media=tuple(media))
    rules = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)
    return list(prepare_sample(sample, lease_id=1, trainer_version=0, rules=rules).rows)


def make_engine(path: Path, **settings: Any) -> BaseEngine:
    return new_engine(make_spec(path, **settings))


@torch.no_grad()
def expected(path: Path, row: TrainRow, *seeds: int) -> torch.Tensor:
    """Return the log-probs of the response from a plain call of the model with one row and the processor's pixels."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
    seen = {}
    if seeds:
        inputs = processor(text=["<image>" * len(seeds)], images=[[picture(s) for s in seeds]], return_tensors="pt")
        seen = {key: value for key, value in inputs.items() if key.startswith("pixel")}
    log_p = model(input_ids=ids, **seen).logits[0].log_softmax(-1)
    places = torch.arange(len(row.prompt_ids), ids.shape[1])
    return log_p[places - 1, ids[0, places]]


# ------------------------------------------------------------------------------------------------ batches


def test_media_of_a_batch_are_unchanged(path: Path) -> None:
    rows = [*rows_of(path, media=(ONE, TWO)), *rows_of(path, media=()), *rows_of(path)]
    batch = to_batch(rows)
    assert batch["media"].dtype == torch.uint8
    assert [split(row.numpy().tobytes()) for row in batch["media"]] == [(ONE, TWO), (), (ONE,)]


def test_a_batch_without_media_has_no_column_for_them(path: Path) -> None:
    assert "media" not in to_batch(rows_of(path, media=()))


def test_joined_media_can_be_split() -> None:
    media = (ONE, Media("video", b"\0frames\0"), TWO)
    assert split(join(media) + b"\0\0\0") == media
    assert split(join(())) == split(b"\0" * 9) == ()


# ------------------------------------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_are_those_of_the_plain_model(path: Path, packing: bool) -> None:
    """The batch has rows with two, one and no images. The last row is alone in a micro-batch, which has no image."""
    rows = [*rows_of(path, media=(ONE, TWO)), *rows_of(path, response=(7, 8)), *rows_of(path, media=(), response=(9,))]
    engine = make_engine(path, use_remove_padding=packing, ppo_max_token_len=64)
    got = engine.infer(to_batch(rows))["log_probs"]
    for place, (row, seeds) in enumerate(zip(rows, [(1, 2), (1,), ()], strict=True)):
        torch.testing.assert_close(
            got[place, : len(row.response_ids)], expected(path, row, *seeds), rtol=1e-5, atol=1e-5
        )


def test_the_image_changes_the_log_probs(path: Path) -> None:
    first, second = rows_of(path), rows_of(path, media=(TWO,))
    assert (first[0].prompt_ids == second[0].prompt_ids).all()
    got = make_engine(path).infer(to_batch([*first, *second]))["log_probs"]
    assert (got[0] - got[1]).abs().max() > 1e-3


def test_a_sampled_placeholder_is_a_plain_token_to_the_model(path: Path) -> None:
    token = AutoProcessor.from_pretrained(path).image_token_id
    plain = rows_of(path, media=(), response=(40, token, 42, 43))
    seen = rows_of(path, response=(40, token, 42, 43))
    engine = make_engine(path)
    alone, beside = engine.infer(to_batch(plain))["log_probs"], engine.infer(to_batch(seen))["log_probs"]
    torch.testing.assert_close(alone[0], expected(path, plain[0]), rtol=1e-5, atol=1e-5)
    other = engine.infer(to_batch(rows_of(path, response=(40, 0, 42, 43))))["log_probs"]
    torch.testing.assert_close(beside[0, 0], other[0, 0])
    assert (beside[0, 2:] - other[0, 2:]).abs().max() > 1e-3, "the placeholder was embedded as another token"


def test_training_reaches_the_vision_weights(path: Path) -> None:
    engine = make_engine(path)
    engine.plan(2)
    batch = to_batch(rows_of(path))
    batch["old_log_probs"] = batch["rollout_log_probs"]
    before = {name: tensor.clone() for name, tensor in engine.weights("float32")}
    losses = []
    for _ in range(2):
        losses.append(engine.forward_backward(batch, Likelihood())["loss"])
        engine.optim_step(losses[-1])
    after = dict(engine.weights("float32"))
    assert losses[1] < losses[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vision" in name for name in moved) and any("text_model" in name for name in moved)


def test_ddp_takes_steps_without_images(path: Path) -> None:
    batch, norms = to_batch(rows_of(path, media=())), []
    for strategy in ("local", "ddp"):
        engine = make_engine(path, strategy=strategy)
        losses = (engine.forward_backward(batch, Likelihood())["loss"] for _ in range(2))
        norms.append([engine.optim_step(loss).grad_norm for loss in losses])
        engine.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_media_for_a_text_model_are_refused(tmp_path: Path, path: Path) -> None:
    batch = to_batch(rows_of(path))
    batch["input_ids"] = torch.zeros_like(batch["input_ids"])
    engine = make_engine(write_model(tmp_path / "text"))
    with pytest.raises(ConfigError, match="takes text only"):
        engine.infer(batch)


def test_critics_refuse_media(tmp_path: Path, path: Path) -> None:
    batch = to_batch(rows_of(path))
    batch["input_ids"] = torch.zeros_like(batch["input_ids"])
    critic = make_engine(write_model(tmp_path / "critic"), model_type="value_model", lr=None)
    with pytest.raises(DataError, match="value model takes no images"):
        critic.infer(batch)


# ------------------------------------------------------------------------------------------------ on several ranks


def a_step(engine: BaseEngine, rows: list[TrainRow], share: slice) -> dict[str, torch.Tensor]:
    """Take a step on this rank's share of the batch, and return the weights, which only rank 0 has."""
    engine.plan(1)
    engine.optim_step(engine.forward_backward(to_batch(rows)[share], Likelihood())["loss"])
    return {name: tensor.clone() for name, tensor in engine.weights("float32") if tensor.numel()}


def on_rank(rank: int, directory: str, rows: list[TrainRow]) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{directory}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        for strategy in STRATEGIES:
            engine = make_engine(Path(directory) / "model", strategy=strategy)
            weights = a_step(engine, rows, slice(rank, rank + 1))
            if rank == 0:
                torch.save(weights, f"{directory}/{strategy}.pt")
            engine.close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_without_an_image_run_the_vision_layers_too(tmp_path: Path) -> None:
    """Rank 0 has an image and rank 1 has none. Both must run the vision layers, or rank 0 waits in a collective."""
    model = write_vision_model(tmp_path / "model")
    rows = [*rows_of(model), *rows_of(model, media=(), response=(9, 10))]
    expected = a_step(make_engine(model), rows, slice(None))
    context = multiprocessing.spawn(on_rank, args=(str(tmp_path), rows), nprocs=2, join=False)
    try:
        limit = time.monotonic() + 120
        while not context.join(timeout=max(0.1, limit - time.monotonic())):
            assert time.monotonic() < limit, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    for strategy in STRATEGIES:
        weights = torch.load(tmp_path / f"{strategy}.pt")
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-4, msg=f"{strategy} {name}")

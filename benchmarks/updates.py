"""Time updates of the engine and of the plain loop on one batch, in separate processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from benchmarks.plain_trainer import GROUP, SIGMAS, PlainTrainer, Workload, make_rows
from trainer.algorithms.objective import PolicyLoss
from trainer.batches import TrainRow
from trainer.engines.base import BaseEngine, EngineSpec
from trainer.engines.compute.packing import balance, input_lengths
from trainer.engines.registry import new_engine
from trainer.workers.tensors import to_batch

VARIANTS = ("plain", "padded", "packed")
LR = 1e-6
ALGORITHM = AlgorithmConfig(clip_ratio_c=None)
"""Plain PPO with a single clip."""
GATHER_S = 600
"""Timeout of the collectives: rank 1 waits while rank 0 runs the plain loop."""
LOSS_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}
"""Methods whose first losses differ by more do not do the same work."""


@dataclass(frozen=True)
class UpdateCase:
    """A model, a batch and a device on which the methods are compared."""

    model: str
    device: str
    ranks: int
    lengths: str
    workload: Workload
    rounds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the engine, such as `use_liger`."""


class UpdateTimes(NamedTuple):
    tokens: int
    """Prompt and response tokens of the batch."""
    flops: float
    """Floating point operations of one update, without recomputation."""
    times_s: dict[str, list[float]]
    """Seconds of each round, by method; empty if the GPU's memory was too small."""
    peak_bytes: dict[str, int]
    """Peak GPU memory, by method."""


class UpdateMethod(NamedTuple):
    update: Callable[[], float]
    """Takes one optimizer step and returns the loss."""
    close: Callable[[], None]


def take_turns(case: UpdateCase, path: Path, directory: Path) -> UpdateTimes:
    """Run the case on the model at `path`; the processes exchange files in `directory`, which is created."""
    directory.mkdir()
    mp.start_processes(_run_rank, (case, path, directory), nprocs=case.ranks, start_method="spawn")
    return UpdateTimes(**json.loads((directory / "result.json").read_text(encoding="utf-8")))


def _run_rank(rank: int, case: UpdateCase, path: Path, directory: Path) -> None:
    if case.ranks > 1:
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'store'}",
            rank=rank,
            world_size=case.ranks,
            timeout=timedelta(seconds=GATHER_S),
        )
    vocab_size = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rows = make_rows(case.workload.lengths(SIGMAS[case.lengths]), case.workload.prompt_tokens, vocab_size)
    runner = _Runner(rank, case, path, rows)
    times_s, peak_bytes = runner.alone() if case.device == "cuda" else runner.in_turns()
    if rank == 0:
        measured = UpdateTimes(
            tokens=sum(len(row.prompt_ids) + len(row.response_ids) for row in rows),
            flops=update_flops(path, rows),
            times_s=times_s,
            peak_bytes=peak_bytes,
        )
        (directory / "result.json").write_text(json.dumps(measured._asdict()), encoding="utf-8")
    if case.ranks > 1:
        dist.destroy_process_group()


class _Runner:
    """Runs the three methods on this rank."""

    def __init__(self, rank: int, case: UpdateCase, path: Path, rows: list[TrainRow]) -> None:
        self._rank, self._case, self._path, self._rows = rank, case, path, rows
        self._advantages = [(number % GROUP - (GROUP - 1) / 2) / GROUP for number in range(len(rows))]

    def in_turns(self) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Set up all methods and run each of them once in every round."""
        variants = {name: self._build(name) for name in VARIANTS}
        self._compare({name: variant.update() for name, variant in variants.items()})
        times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(self._case.rounds):
            for name, variant in variants.items():
                times_s[name].append(self._timed(variant))
        for variant in variants.values():
            variant.close()
        return times_s, dict.fromkeys(VARIANTS, 0)

    def alone(self) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Run one method after another, each with the whole GPU memory."""
        times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
        peak_bytes = dict.fromkeys(VARIANTS, 0)
        losses = {}
        for name in VARIANTS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            variant = self._build(name)
            try:
                losses[name] = variant.update()
                times_s[name] = [self._timed(variant) for _ in range(self._case.rounds)]
            except torch.OutOfMemoryError:
                times_s[name] = []
            peak_bytes[name] = torch.cuda.max_memory_allocated()
            variant.close()
            del variant
        self._compare(losses)
        return times_s, peak_bytes

    def _timed(self, variant: UpdateMethod) -> float:
        self._meet()
        started = time.perf_counter()
        variant.update()
        self._meet()
        return time.perf_counter() - started

    def _meet(self) -> None:
        if self._case.ranks > 1:
            dist.barrier()
        if self._case.device == "cuda":
            torch.cuda.synchronize()

    def _compare(self, losses: dict[str, float]) -> None:
        known = [loss for loss in losses.values() if loss == loss]
        if max(known) - min(known) > LOSS_TOLERANCE[self._case.device]:
            raise SystemExit(
                f"{self._case.model}: the methods disagree on the loss, so they do different work: {losses}"
            )

    def _build(self, name: str) -> UpdateMethod:
        if name != "plain":
            return self._engine(packed=name == "packed")
        if self._rank != 0:
            return UpdateMethod(lambda: float("nan"), lambda: None)
        return self._plain()

    def _plain(self) -> UpdateMethod:
        case = self._case
        dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
        loop = PlainTrainer(self._path, OptimConfig(lr=LR), ALGORITHM, case.device, dtype)

        def update() -> float:
            torch.set_num_threads(case.ranks)
            return loop.update(self._rows, self._advantages, case.workload.micro_batch_tokens)

        return UpdateMethod(update, lambda: None)

    def _engine(self, *, packed: bool) -> UpdateMethod:
        case = self._case
        settings = EngineConfig(
            strategy="local" if case.ranks == 1 else "fsdp2",
            num_workers=case.ranks,
            device=case.device,
            dtype="bfloat16" if case.device == "cuda" else "float32",
            ppo_max_token_len=case.workload.micro_batch_tokens,
            use_remove_padding=packed,
            **case.settings,
        )
        model, optim = ModelConfig(path=str(self._path)), OptimConfig(lr=LR)
        engine = new_engine(EngineSpec("language_model", model, settings, optim))
        loss = PolicyLoss(ALGORITHM, response_length=case.workload.longest_tokens)

        def update() -> float:
            torch.set_num_threads(1)
            figures = engine.forward_backward(self._share(engine), loss)
            engine.optim_step(figures["loss"])
            return figures["loss"]

        return UpdateMethod(update, engine.close)

    def _share(self, engine: BaseEngine) -> object:
        """Lay out the rows of this rank as the Trainer does before every update."""
        batch = to_batch(self._rows)
        batch["old_log_probs"] = batch["rollout_log_probs"]
        batch["advantages"] = torch.tensor(self._advantages)[:, None].expand_as(batch["rollout_log_probs"]).contiguous()
        layout = engine.layout
        return batch[torch.tensor(balance(input_lengths(batch), layout.data_size)[layout.data_rank])]


def update_flops(path: Path, rows: list[TrainRow]) -> float:
    """Return `6 · parameters · tokens` without input embeddings, plus `6 · layers · width · length²` for attention.

    PaLM (https://arxiv.org/abs/2204.02311) appendix B, with half of the attention scores masked.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config["num_key_value_heads"])
    parameters = layers * (attention + 3 * hidden * config["intermediate_size"]) + hidden * config["vocab_size"]
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    return 6.0 * parameters * sum(lengths) + 6.0 * layers * heads * head_dim * sum(length**2 for length in lengths)

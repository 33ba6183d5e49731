"""Show where the time of a training update on CPU goes, and what compilation and bfloat16 change.

An update is that of `benchmarks.compare` with responses of equal lengths: 64 of them, GRPO, packed rows, one thread.
The variants are set up together and alternate:

    float32     as configured by default
    compiled    `trainer.torch_compile=true`, which needs a C++ compiler
    bfloat16    `trainer.dtype=bfloat16`: the passes under autocast, with float32 weights and optimizer state

`of_matmul_rate` is the share of the rate that this machine reaches in one product of large float32 matrices: 6
operations for each parameter (without input embeddings) and token, and those of attention. `mismatch_kl` is the KL
divergence (k3, nats per token) between the variant's log-probs and those of `float32`. The second table splits the time
of a float32 update by kind of operation, from torch's profiler; `python` is what no operation accounts for.

    python -m benchmarks.update_costs --json FILE
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from benchmarks.compare.workloads import GROUP, PROMPT_TOKENS, SIZES, make_model
from benchmarks.plain_trainer import Workload, make_rows
from benchmarks.report import Table, arguments, positive, report_tables
from benchmarks.running import print_progress
from benchmarks.updates import ALGORITHM, LR, update_flops
from trainer.algorithms.objective import PolicyLoss
from trainer.engines.base import BaseEngine, EngineSpec
from trainer.engines.registry import new_engine
from trainer.workers.tensors import to_batch

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "compiled": {"torch_compile": True},
    "bfloat16": {"dtype": "bfloat16"},
}
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("attention",),
    "loss": ("softmax", "gather", "scatter", "logsumexp", "cross_entropy", "nll_loss"),
    "optimizer": ("adam", "norm_for_clip", "_foreach", "linalg_vector_norm"),
}
"""Parts of the names of torch's operations; all others with `aten::` are element-wise ones, reductions and copies."""
ELEMENT_WISE = "element-wise and copies"
MATRIX = 2048
"""Rows and columns of the matrices that measure the machine's rate."""


class Variant(NamedTuple):
    engine: BaseEngine
    update: Callable[[], None]
    log_probs: torch.Tensor
    """`[responses, tokens]`, with the initial weights."""


def main() -> None:
    parser = arguments(__doc__, "update_costs")
    known = [name for name in SIZES if name != "135M"]
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=known, help=f"default: {' '.join(known)}")
    parser.add_argument("--rounds", type=positive, default=5, help="measured updates of each variant (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = matmul_rate()
    updates: Table = []
    shares: Table = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            rows, share = measure(name, Path(scratch) / name, options.rounds, rate)
            updates += rows
            shares.append(share)
    aims = {"updates": "the largest share of the matmul rate", "shares": "matrix products"}
    tables = {"updates": updates, "shares": shares}
    report_tables("update_costs", tables, options.json, aims=aims, matmul_gflops=rate / 1e9)


def measure(name: str, path: Path, rounds: int, rate: float) -> tuple[Table, dict[str, Any]]:
    """Return a row for each variant, and the shares of a float32 update's time."""
    size = SIZES[name]
    make_model(path, size.shape, -math.log(size.shape.vocab_size))  # random rows have the end of a response, too
    work = Workload(size.prompts * GROUP, PROMPT_TOKENS, size.tokens, size.tokens, size.micro_batch * 2 * size.tokens)
    rows = make_rows(work.lengths(0.0), work.prompt_tokens, size.shape.vocab_size)
    batch = to_batch(rows)
    batch["old_log_probs"] = batch["rollout_log_probs"]
    batch["advantages"] = torch.linspace(-1, 1, len(rows))[:, None].expand_as(batch["old_log_probs"]).contiguous()
    variants = {}
    for variant, settings in VARIANTS.items():
        print_progress(f"{name}: {variant} is set up")
        variants[variant] = _set_up(path, work, batch, settings)
    times_s: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, one in variants.items():
            started = time.perf_counter()
            one.update()
            times_s[variant].append(time.perf_counter() - started)
    share = {"model": name, **split(variants["float32"].update)}
    flops, tokens = update_flops(path, rows), sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    table = [
        {
            "model": name,
            "variant": variant,
            "update_s": (median := statistics.median(times_s[variant])),
            "tokens_per_s": tokens / median,
            "of_matmul_rate": flops / median / rate,
            "speedup": statistics.median(times_s["float32"]) / median,
            "mismatch_kl": mismatch(variants["float32"].log_probs, one.log_probs),
        }
        for variant, one in variants.items()
    ]
    for one in variants.values():
        one.engine.close()
    return table, share


def _set_up(path: Path, work: Workload, batch: Any, settings: Mapping[str, Any]) -> Variant:
    """Build the engine of a variant, and run a first update, which compiles."""
    config = EngineConfig(strategy="local", device="cpu", ppo_max_token_len=work.micro_batch_tokens, **settings)
    spec = EngineSpec("language_model", ModelConfig(path=str(path)), config, OptimConfig(lr=LR))
    engine = new_engine(spec)
    loss = PolicyLoss(ALGORITHM, response_length=work.longest_tokens)

    def update() -> None:
        figures = engine.forward_backward(batch, loss)
        engine.optim_step(figures["loss"])

    log_probs = engine.infer(batch)["log_probs"]
    update()
    return Variant(engine, update, log_probs)


def split(update: Callable[[], None]) -> dict[str, float]:
    """Return the shares of an update's time by kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        update()
        total_us = 1e6 * (time.perf_counter() - started)
    shares = dict.fromkeys((*KINDS, ELEMENT_WISE), 0.0)
    for event in profiler.key_averages():
        name = event.key.lower()
        if "::" not in name:  # a Python function of autograd, around the operations
            continue
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), ELEMENT_WISE)
        shares[kind] += event.self_cpu_time_total / total_us
    return shares | {"python": 1 - sum(shares.values())}


def mismatch(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the mean of the estimator k3 (http://joschu.net/blog/kl-approx.html) of KL(ours ‖ theirs)."""
    difference = (theirs - ours).double()
    return (difference.exp() - 1 - difference).mean().item()


def matmul_rate() -> float:
    """Return the float32 operations per second of a product of large matrices with this process's threads."""
    left, right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    times_s = []
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(left, right)
        times_s.append(time.perf_counter() - started)
    return 2.0 * MATRIX**3 / min(times_s)


if __name__ == "__main__":
    main()

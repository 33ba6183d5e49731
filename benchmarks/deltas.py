"""Measure which share of a version's bytes `weight_sync.max_deltas` sends, by learning rate and published dtype.

The quickstart's model takes AdamW steps on a policy gradient of random texts with random advantages, in float32 on the
CPU. After each step its weights are published in bfloat16 and in float32, as changes to the version before. `first` is
the share of the bytes after the first step, which moves each weight by about the learning rate; `later` is the mean of
the second half of the steps. `weights` is the share of weights that differ then, and `blocks` the share of blocks of 64
weights that contain one. `ms` is the time for a version of this model, of `mb` megabytes.

    python -m benchmarks.deltas --json deltas.json
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.assets import resolve
from asyncrl.config.sections.base import Dtype
from asyncrl.weights.deltas import DeltaWriter
from benchmarks.report import arguments, positive, report

LEARNING_RATES = (1e-6, 1e-5, 5e-4)
"""A usual one for large models, a higher one, and the quickstart's."""
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
BLOCK = 64
TEXTS, TOKENS = 16, 64


def main() -> None:
    parser = arguments(__doc__, "deltas")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps of each learning rate (default 20)")
    options = parser.parse_args()
    rows = [row for lr in LEARNING_RATES for row in measure(lr, options.steps)]
    report("versions as changes", rows, options.json)


def measure(lr: float, steps: int) -> list[dict[str, Any]]:
    """Train with a learning rate and return the table row of each dtype."""
    figures: dict[Dtype, list[dict[str, float]]] = {dtype: [] for dtype in DTYPES}
    writers = {dtype: DeltaWriter(f"memory://{uuid.uuid4().hex}", steps) for dtype in DTYPES}
    last: dict[Dtype, NDArray[Any]] = {}
    for weights in _trained(lr, steps):
        for dtype, writer in writers.items():
            arrays = {name: _array(tensor, dtype) for name, tensor in weights.items()}
            started = time.perf_counter()
            sent = writer.put(arrays).sent_bytes
            took_s = time.perf_counter() - started
            flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
            if dtype in last:
                changed = flat != last[dtype]
                blocks = np.logical_or.reduceat(changed, np.arange(0, len(changed), BLOCK))
                figures[dtype].append(
                    {"sent": sent / flat.nbytes, "weights": changed.mean(), "blocks": blocks.mean(), "ms": 1e3 * took_s}
                )
            last[dtype] = flat
    rows = []
    for dtype, versions in figures.items():
        later = {key: float(np.mean([one[key] for one in versions[len(versions) // 2 :]])) for key in versions[0]}
        row = {"lr": lr, "dtype": dtype, "mb": last[dtype].nbytes / 1e6, "first": versions[0]["sent"]}
        rows.append(row | {"later": later.pop("sent")} | later)
    return rows


def _trained(lr: float, steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights before the first step and after each one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(resolve("asyncrl://quickstart"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    yield dict(model.named_parameters())
    for _ in range(steps):
        tokens, advantages = torch.randint(model.config.vocab_size, (TEXTS, TOKENS)), torch.randn(TEXTS, 1)
        log_probs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-(advantages * log_probs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield dict(model.named_parameters())


def _array(tensor: Tensor, dtype: Dtype) -> NDArray[Any]:
    """Return the tensor as the Trainer publishes it, bfloat16 as uint16."""
    return (tensor.to(torch.bfloat16).view(torch.uint16) if dtype == "bfloat16" else tensor).detach().numpy()


if __name__ == "__main__":
    main()

"""Direct preference optimization (DPO) with the training engines of asyncrl, in a self-contained loop.

    torchrun --nproc_per_node 2 examples/custom_loop/train.py
    python examples/custom_loop/train.py --strategy local

The loop uses no Ray, no rollouts and no queue. Its data are pairs of answers to the quickstart's sums: the chosen one
shows the steps, and the rejected one has only the result. The loop calls these methods of `TrainingWorker`:

    infer_batch       log-probs of all responses, by the reference once and by the policy in each step
    forward_backward  gradient of a custom loss, with micro-batches and ranks handled by the worker
    optim_step        gradient clipping, AdamW and the learning rate schedule
    save_checkpoint   a checkpoint, written in the background, also in Hugging Face format
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from asyncrl.core.failures import ConfigError
from asyncrl.core.types import SampleId
from trainer.batches import TrainRow
from trainer.engines.base import EngineSpec, LossParts, Tokens, TokenScores
from trainer.engines.registry import BUILT_IN
from trainer.workers.tensors import to_batch
from trainer.workers.worker import TrainingWorker

log = logging.getLogger("custom_loop")

MODEL = "asyncrl://quickstart"


class Pair(NamedTuple):
    prompt: str
    chosen: str
    rejected: str


class WeightedLogLikelihood:
    """`trainer.engines.base.Loss`: minus the sum of `advantages` x log-probs over the tokens of a row, mean over rows.

    The gradient of DPO is that of this loss, with weights that depend on both rows of a pair. The engine splits a batch
    into micro-batches by their number of tokens, so a loss cannot access both rows of a pair; the weights are therefore
    computed beforehand.
    """

    agg_mode: str = "seq-mean-token-sum"
    agg_scale = 1.0
    entropy_gradient = False

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        return batch["loss_mask"].any(dim=1)

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        loss = -(tokens.weight * tokens.fields["advantages"] * scores.log_probs).sum()
        return LossParts(loss, sums={"loss": loss.detach()}, means={"log_prob": scores.log_probs.detach()})


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Return sums of three to six terms, with an answer such as `17+5=22;22+8=30;#30` preferred to `#30`."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        terms = [rng.randint(1, 19) for _ in range(rng.randint(3, 6))]
        total, working = terms[0], ""
        for term in terms[1:]:
            working += f"{total}+{term}={total + term};"
            total += term
        pairs.append(Pair("+".join(map(str, terms)) + "=", f"{working}#{total}", f"#{total}"))
    return pairs


def rows_of(pairs: Sequence[Pair], tokenizer: Any) -> TensorDict:
    """Return the batch with two rows for each pair, the chosen one first."""
    rows = []
    for number, pair in enumerate(pairs, start=1):
        message = [{"role": "user", "content": pair.prompt}]
        prompt_ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        for trajectory, response in enumerate((pair.chosen, pair.rejected)):
            ids = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            mask = np.ones(len(ids), dtype=np.bool_)
            rows.append(
                TrainRow(
                    sample_id=SampleId(0, number),
                    prompt_ids=np.array(prompt_ids, dtype=np.int32),
                    response_ids=np.array(ids, dtype=np.int32),
                    response_mask=mask,
                    loss_mask=mask,
                    rollout_log_probs=np.zeros(len(ids), dtype=np.float32),
                    versions=np.zeros(len(ids), dtype=np.int64),
                    reward=0.0,
                    trajectory=trajectory,
                )
            )
    return to_batch(rows)


def likelihoods(worker: TrainingWorker, batch: TensorDict) -> Tensor:
    """Return the log-probs of whole responses, `[pairs, 2]`: chosen and rejected."""
    log_probs = worker.infer_batch(batch)["log_probs"]
    return (log_probs * batch["response_mask"]).sum(dim=1).view(-1, 2)


def margins(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return DPO's reward margins, `[pairs]`: beta times the log-ratio of chosen minus that of rejected."""
    gained = policy - reference
    return beta * (gained[:, 0] - gained[:, 1])


def with_gradient(batch: TensorDict, margin: Tensor, beta: float) -> TensorDict:
    """Return the batch with the weights for which `WeightedLogLikelihood` has the gradient of DPO's loss.

    d/dθ of -log σ(m) is -σ(-m) beta (d log π(chosen) - d log π(rejected)); the factor 2
    compensates for the mean over rows, of which a pair has two.
    """
    weight = 2 * beta * torch.sigmoid(-margin)
    rows = torch.stack([weight, -weight], dim=1).flatten()
    return batch.copy().update({"advantages": rows[:, None].expand(batch["response_mask"].shape).contiguous()})


def train(worker: TrainingWorker, pairs: Sequence[Pair], *, steps: int, beta: float) -> list[dict[str, float]]:
    """Train on all pairs in each step, distributed over the ranks; return the metrics of each step over all ranks."""
    layout = worker.layout
    batch = rows_of(pairs[layout.data_rank :: layout.data_size], AutoTokenizer.from_pretrained(resolve(MODEL)))
    reference = likelihoods(worker, batch)
    worker.set_loss_fn(WeightedLogLikelihood())
    worker.plan(steps)
    history = []
    for step in range(1, steps + 1):
        margin = margins(likelihoods(worker, batch), reference, beta)
        worker.forward_backward(with_gradient(batch, margin, beta))
        stepped = worker.optim_step()
        figures = mean_over_ranks({"loss": -logsigmoid(margin).sum(), "accuracy": (margin > 0).sum()}, len(pairs))
        history.append({"step": step, **figures, **stepped})
        if layout.rank == 0:
            log.info("step %(step)2d  loss %(loss).4f  accuracy %(accuracy).2f  |g| %(grad_norm).2f", history[-1])
    return history


def mean_over_ranks(sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
    values = torch.stack([value.double() for value in sums.values()])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return dict(zip(sums, (values / count).tolist(), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help=f"one of {', '.join(BUILT_IN)}, or an import path")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="a new directory for figures, checkpoint and trained model")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    spec = EngineSpec(
        model_type="language_model",
        model=ModelConfig(path=MODEL),
        engine=EngineConfig(strategy=options.strategy),
        optim=OptimConfig(lr=options.lr, weight_decay=0.0),
    )
    try:
        worker = TrainingWorker(spec)
    except ConfigError as error:
        parser.exit(2, f"{error.message}\n")
    history = train(worker, make_pairs(options.pairs, seed=0), steps=options.steps, beta=options.beta)
    if options.out is not None:
        checkpoint = options.out / "checkpoint"
        checkpoint.mkdir(parents=True, exist_ok=True)
        worker.save_checkpoint(checkpoint, hf=options.out / "hf")
        worker.finish_checkpoint()
        if worker.layout.rank == 0:
            (options.out / "figures.json").write_text(json.dumps(history), encoding="utf-8")
    worker.close()


if __name__ == "__main__":
    main()

"""Two ranks that share every sequence, compared with one rank with whole sequences, in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.core.failures import ConfigError
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import random_model
from trainer.engines.base import ModelType
from trainer.engines.compute import scorer
from trainer.engines.compute.attention import NAME, Shard, check_heads, enable_packing, spread_kv
from trainer.engines.compute.scorer import Scorer

VOCAB = 24
DEADLINE_S = 120.0
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "2 kv heads": LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2),
    "1 kv head": LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=1),
    "3 kv heads": LlamaConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=3),
    "windows": MistralConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, sliding_window=4),
}
BATCHES = {
    "many": make_batch([3, 1, 5, 2, 4], [9, 12, 1, 3, 10], vocab=VOCAB),
    "scored by one rank only": make_batch([20], [4], vocab=VOCAB),
}


def make_model(config: PreTrainedConfig, kind: ModelType, checkpointing: bool) -> PreTrainedModel:
    model = random_model(config, kind).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run(
    model: PreTrainedModel, batch: TensorDict, kind: ModelType, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, entropies, and this rank's gradients of a loss of both."""
    score = Scorer(
        model,
        model_type=kind,
        device=torch.device("cpu"),
        autocast=None,
        packed=model.config._attn_implementation == NAME,
        sp_group=group,
    )
    micro = score.lay_out(batch, range(len(batch)), batch["loss_mask"])
    scores = score(micro, entropy_gradient=True)
    factors = torch.linspace(-1.0, 1.0, len(scores.log_probs), dtype=torch.float64)
    ((scores.log_probs * factors).square().sum() + (scores.entropy * factors).sum()).backward()
    gradients = torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None])
    return scores.log_probs.detach(), scores.entropy.detach(), gradients


def cases() -> Iterator[tuple[PreTrainedConfig, TensorDict, ModelType, bool, int]]:
    """Return the cases: configuration, batch, kind, checkpointed layers, and maximum number of logits at once."""
    for config in CONFIGS.values():
        yield config, BATCHES["many"], "language_model", False, 2**28
    for kind in get_args(ModelType):
        for batch in BATCHES.values():
            yield CONFIGS["1 kv head"], batch, kind, kind == "language_model", 5 * VOCAB


def on_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=DEADLINE_S / 2)
    )
    group = dist.new_group([0, 1])
    for config, batch, kind, checkpointing, most in cases():
        scorer.MAX_LOGITS["cpu"] = most
        expected = run(make_model(config, kind, checkpointing), batch, kind, None)
        model = make_model(config, kind, checkpointing)
        assert enable_packing(model)
        log_probs, entropy, gradients = run(model, batch, kind, group)
        alone = gradients.clone()
        dist.all_reduce(gradients)
        assert not torch.allclose(alone, gradients)  # each rank has only a part
        for got, wanted in zip([log_probs, entropy, gradients], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    dist.destroy_process_group()


@pytest.mark.timeout(DEADLINE_S + 60)
def test_two_ranks_give_the_scores_of_one_and_gradients_that_add_up(tmp_path: Path) -> None:
    context = mp.spawn(on_rank, args=(str(tmp_path / "store"),), nprocs=2, join=False)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not context.join(timeout=DEADLINE_S):  # `join` returns when a process ends, and raises its error
            assert time.monotonic() < deadline, f"ranks have not ended within {DEADLINE_S} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    model = make_model(CONFIGS["3 kv heads"], "language_model", False)
    check_heads(model, 3)
    with pytest.raises(
        ConfigError, match=r"ulysses_sequence_parallel_size=4: .* 6 attention heads.* use one of 1, 2, 3, 6"
    ):
        check_heads(model, 4)


class Ranks:
    """A stand-in for a process group that has only a size and a rank."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())


def test_padded_rows_cannot_be_shared(counted: None) -> None:
    model = make_model(CONFIGS["2 kv heads"], "language_model", False)
    with pytest.raises(ConfigError, match="use_remove_padding"):
        Scorer(
            model,
            model_type="language_model",
            device=torch.device("cpu"),
            autocast=None,
            packed=False,
            sp_group=Ranks(2),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_each_rank_gets_the_kv_heads_of_its_query_heads(heads: int, ranks: int, counted: None) -> None:
    num_query = 12
    group: Any = Ranks(ranks)
    states = torch.arange(heads, dtype=torch.float64).reshape(1, heads, 1, 1)
    spread = spread_kv(states, num_query, group).flatten()
    assert len(spread) % ranks == 0 and num_query % len(spread) == 0
    # query head i, counted over all ranks, belongs to kv head i // (num_query / heads)
    served = spread.repeat_interleave(num_query // len(spread))
    assert torch.equal(served, torch.arange(heads).repeat_interleave(num_query // heads).double())


def test_scored_positions_are_split_in_order(counted: None) -> None:
    positions = torch.tensor([0, 3, 4, 5, 11])
    dealt = []
    for rank in range(4):
        group: Any = Ranks(4, rank)
        shard = Shard(12, group)
        mine, counts = shard.scored(positions)
        assert counts == [1, 3, 0, 1]
        assert shard.cut(torch.arange(12)[None]).tolist() == [list(range(3 * rank, 3 * rank + 3))]
        dealt += (positions[mine] - shard.start).tolist()
    assert dealt == [0, 0, 1, 2, 2]

"""The connection of vLLM's workers to the run's Ray cluster, and the names under which they load weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rollouter.serving.replica import worker


def test_engines_with_the_same_seed_subscribe_under_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray draws the id from `random` (`GcsErrorSubscriber`), which vLLM seeds alike in every engine."""
    ids: list[int] = []

    def init(**_: Any) -> None:
        ids.append(random.getrandbits(224))

    monkeypatch.setattr(worker.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(worker.ray, "init", init)
    after: list[float] = []
    for _ in range(2):
        random.seed(0)
        worker.connect("address", "namespace")
        after.append(random.random())
    random.seed(0)
    assert len(set(ids)) == 2
    assert after == [random.random()] * 2, "vLLM's own draws must not change"


def test_the_experts_of_gpt_oss_are_loaded_one_by_one() -> None:
    """vLLM's loader takes them through the weight loader of the layer-wise reload only under these names."""
    stack = torch.arange(24.0).reshape(2, 3, 4)
    head = torch.ones(5)
    given = iter([("lm_head.weight", head), ("model.layers.1.mlp.experts.down_proj", stack)])
    items = dict(worker._by_expert(given))
    assert list(items) == [
        "lm_head.weight",
        "model.layers.1.mlp.experts.0.down_proj",
        "model.layers.1.mlp.experts.1.down_proj",
    ]
    assert items["lm_head.weight"] is head
    assert torch.equal(items["model.layers.1.mlp.experts.1.down_proj"], stack[1])

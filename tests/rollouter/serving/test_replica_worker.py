"""The connection of vLLM's workers to the run's Ray cluster."""

from __future__ import annotations

import random
from typing import Any

import pytest

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

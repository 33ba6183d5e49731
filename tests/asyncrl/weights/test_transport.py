"""A class of the user's that stores weights and does not return in time, without Ray."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from asyncrl.core.failures import DeadlineError
from asyncrl.weights.object_store import ObjectStorePublisher
from asyncrl.weights.transport import OwnChunk

BACKEND = "weights.py:Bucket"


@pytest.mark.parametrize(
    ("method", "problem"), [("put", "did not take 8 bytes of version 0"), ("drop", "did not free")]
)
async def test_a_call_that_does_not_end_is_a_deadline_error(
    monkeypatch: pytest.MonkeyPatch, method: str, problem: str
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(OwnChunk, method, lambda *_: let_go.wait(30))
    publisher = ObjectStorePublisher(None, call_s=0.05, backend=BACKEND)  # type: ignore[arg-type]
    try:
        with pytest.raises(DeadlineError, match=rf"{BACKEND} {problem}.* within timeouts\.call_s = 0\.05 s"):
            for version in range(10):  # old versions are freed only after some publications
                if method == "put":
                    await publisher.put({"a": np.zeros(2, np.float32)}, version)
                await publisher._drop_old([OwnChunk(BACKEND, version)])
    finally:
        let_go.set()

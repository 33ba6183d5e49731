"""How tensors are divided into buckets, and a class of the user's that does not return in time, without Ray."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import DeadlineError
from asyncrl.weights.object_store import ObjectStorePublisher
from asyncrl.weights.transport import OwnChunk, in_buckets

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


@given(st.lists(st.integers(0, 12)), st.integers(1, 40))
def test_buckets_have_all_tensors_in_order_and_no_more_than_their_size(sizes: list[int], num_bytes: int) -> None:
    tensors = [(str(number), np.full(size, number, np.float32)) for number, size in enumerate(sizes)]
    buckets = list(in_buckets(tensors, num_bytes))
    assert [name for bucket in buckets for name in bucket] == [name for name, _ in tensors]
    for bucket in buckets:
        assert len(bucket) == 1 or sum(array.nbytes for array in bucket.values()) <= num_bytes
    for bucket, following in pairwise(buckets):
        first = next(iter(following.values()))
        assert sum(array.nbytes for array in bucket.values()) + first.nbytes > num_bytes or first.nbytes == 0

"""Changes between versions: applied to the old tensors, they give the new ones, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.weights.changes import GAPS, MAX_GAP, apply_changes, find_changes

DTYPES = (np.float32, np.uint16, np.float16, np.float64, np.int64, np.int8, np.bool_)


def applied(base: dict[str, NDArray[Any]], changes: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    tensors = {name: array.copy() for name, array in base.items()}
    apply_changes(tensors, changes)
    return tensors


def num_bytes(arrays: dict[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


@st.composite
def versions(draw: st.DrawFn) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Draw a version, and one in which some of the bits differ: NaN, infinities and zeros of both signs are likely."""
    base, new = {}, {}
    for index in range(draw(st.integers(1, 3))):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.sampled_from([(), (0, 3), (7,), (5, 40), (MAX_GAP,), (2, MAX_GAP), (3 * MAX_GAP + 5,)]))
        size = int(np.prod(shape))
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        old = random.integers(0, 2 if dtype == np.bool_ else 256, size * dtype.itemsize).astype(np.uint8)
        bits = old.copy().reshape(-1, dtype.itemsize)
        places = random.integers(0, max(size, 1), int(size * draw(st.sampled_from([0, 1e-5, 0.01, 0.2, 1.0]))))
        bits[places, 0] ^= 1
        base[f"t{index}"] = old.view(dtype).reshape(shape)
        new[f"t{index}"] = bits.reshape(-1).view(dtype).reshape(shape)
    return base, new


@given(versions())
def test_changes_give_the_new_version_and_are_never_larger(
    pair: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]],
) -> None:
    base, new = pair
    changes = find_changes(base, new)
    result = applied(base, changes)
    assert list(result) == list(new)
    for name, array in new.items():
        assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape)
        assert result[name].tobytes() == array.tobytes()
    assert num_bytes(changes) <= num_bytes(new)
    assert not find_changes(new, result)


def test_one_percent_of_bfloat16_weights_takes_two_percent_of_the_bytes() -> None:
    base = {"w": np.zeros((1000, 1000), np.uint16)}
    new = {"w": base["w"].copy()}
    new["w"].reshape(-1)[::100] = 1
    changes = find_changes(base, new)
    assert set(changes) == {"w", f"w{GAPS}"} and num_bytes(changes) == pytest.approx(0.02 * num_bytes(new), rel=0.01)


def test_a_tensor_without_changes_is_left_out_and_one_with_many_is_whole() -> None:
    base = {"same": np.ones(9, np.float32), "other": np.ones(9, np.float32)}
    new = base | {"other": np.full(9, 2, np.float32)}
    changes = find_changes(base, new)
    assert list(changes) == ["other"] and changes["other"] is new["other"]
    assert find_changes({"w": np.array(0.0)}, {"w": np.array(-0.0)}), "the bits count, not the values"

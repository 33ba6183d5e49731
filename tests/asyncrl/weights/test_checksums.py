"""Checksums of weights: which differences they must detect, and which they must ignore."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.checksums import WeightChecksums, bit_sum, differing_groups, layer_group, merge

DTYPES = [np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16)]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    layers = {
        f"model.layers.{layer}.{name}": draw(8, 4)
        for layer in range(3)
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight")
    }
    return {"model.embed_tokens.weight": draw(16, 4), "model.norm.weight": draw(4), **layers}


def group_checksums(weights: dict[str, np.ndarray]) -> dict[str, int]:
    checksums = WeightChecksums()
    checksums.add(weights)
    return checksums.by_group()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.12.mlp.up_proj.weight", "layers.12"),
        ("layers.0.norm.weight", "layers.0"),
        ("model.embed_tokens.weight", "other"),
        ("lm_head.weight", "other"),
    ],
)
def test_a_parameter_belongs_to_the_group_of_its_layer(name: str, group: str) -> None:
    assert layer_group(name) == group


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 40))
def test_bit_sums_of_parts_add_up_to_the_bit_sum_of_the_whole(
    seed: int, dtype: np.dtype, left: int, right: int
) -> None:
    bits = np.random.default_rng(seed).integers(0, 256, (left + right) * dtype.itemsize, dtype=np.uint8)
    whole = bits.view(dtype)
    parts = merge([{"g": bit_sum(whole[:left])}, {"g": bit_sum(whole[left:])}])
    assert parts["g"] == bit_sum(whole) == bit_sum(np.concatenate([whole, np.zeros(7, dtype)]))


def test_bit_sum_adds_the_bits_as_integers() -> None:
    array = np.array([1.5, -0.0, 3e38, -2.0], dtype=np.float32)
    plain = sum(int(bits) for bits in array.view(np.int32).tolist()) % 2**64
    assert bit_sum(array) == plain


def test_fusing_matrices_does_not_change_the_checksums() -> None:
    published = tensors()
    fused: dict[str, np.ndarray] = {}
    for layer in range(3):
        parts = [published[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qk"]
        fused[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
    rest = {name: array for name, array in published.items() if "self_attn" not in name}
    assert group_checksums(published) == group_checksums(rest | fused)


@pytest.mark.parametrize("name", sorted(tensors()))
def test_one_changed_element_is_found_in_its_group(name: str) -> None:
    published = tensors()
    served = {key: array.copy() for key, array in published.items()}
    served[name].flat[0] = np.nextafter(served[name].flat[0], np.float32(9))
    assert differing_groups(group_checksums(published), group_checksums(served)) == [layer_group(name)]


def test_a_missing_group_is_found() -> None:
    published = group_checksums(tensors())
    served = {group: value for group, value in published.items() if group != "layers.2"}
    assert differing_groups(published, served) == ["layers.2"]


def test_a_tied_head_counts_once() -> None:
    published = tensors()
    plain = group_checksums(published)
    embeddings = published["model.embed_tokens.weight"]
    assert group_checksums(published | {"lm_head.weight": embeddings}) == plain
    assert group_checksums(published | {"lm_head.weight": embeddings.copy()}) == plain
    assert group_checksums(published | {"lm_head.weight": embeddings + 1}) != plain
    # A permutation has the same sum of bits, but is another head.
    assert group_checksums(published | {"lm_head.weight": embeddings[::-1]}) != plain


@settings(deadline=None)
@given(st.permutations(sorted(tensors())), st.sampled_from(["tied", "equal", "other"]), st.integers(1, 9))
def test_checksums_do_not_depend_on_the_order_of_tensors_and_their_buckets(
    names: list[str], head: str, size: int
) -> None:
    weights = tensors()
    embeddings = weights["model.embed_tokens.weight"]
    if head != "tied":
        weights["lm_head.weight"] = embeddings.copy() if head == "equal" else embeddings + 1
        names = [*names[:3], "lm_head.weight", *names[3:]]
    checksums = WeightChecksums()
    for begin in range(0, len(names), size):
        checksums.add({name: weights[name] for name in names[begin : begin + size]})
    assert checksums.by_group() == group_checksums(weights)

"""Names of requests: what the Rollouter makes, a replica reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.types import SampleId
from rollouter.request_ids import BASELINE, Whose, call_id, number_of, parse, trajectory_id, turn_id

GROUPS = st.builds(SampleId, st.integers(0, 99), st.integers(1, 10**6)).map(str) | st.sampled_from(
    ["val_3_17", "val_2_3_17_ask_2", "val_3_17_try_2"]
)
KEYS = st.integers(0, 500).map(str) | st.just(BASELINE)


@given(GROUPS, KEYS, st.integers(0, 100), st.integers(1, 20))
def test_what_is_made_is_read_again(group: str, key: str, turn: int, call: int) -> None:
    request = turn_id(trajectory_id(group, key), turn)
    assert parse(request) == parse(call_id(request, call)) == Whose(group, number_of(key), turn)


@pytest.mark.parametrize(
    ("request_id", "whose"),
    [
        ("sample_0_42/3", Whose("sample_0_42", 3, 0)),
        ("sample_0_42/3.1-2", Whose("sample_0_42", 3, 1)),
        ("sample_0_42/baseline-1", Whose("sample_0_42", -1, 0)),
        ("a/b/7.12", Whose("a/b", 7, 12)),
        ("r0-1", Whose()),
        ("sample_0_42", Whose()),
        ("sample_0_42/x", Whose()),
        ("", Whose()),
    ],
)
def test_examples(request_id: str, whose: Whose) -> None:
    assert parse(request_id) == whose

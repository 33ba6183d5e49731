"""Names of requests, which the Rollouter makes and replicas parse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.types import SampleId
from rollouter.requests import BASELINE, RequestOrigin, call_id, number_of, parse_request_id, trajectory_id, turn_id

GROUPS = st.builds(SampleId, st.integers(0, 99), st.integers(1, 10**6)).map(str) | st.sampled_from(
    ["val_3_17", "val_2_3_17_ask_2", "val_3_17_try_2"]
)
KEYS = st.integers(0, 500).map(str) | st.just(BASELINE)


@given(GROUPS, KEYS, st.integers(0, 100), st.integers(1, 20))
def test_parsing_reverses_the_names_of_requests(group: str, key: str, turn: int, call: int) -> None:
    request = turn_id(trajectory_id(group, key), turn)
    assert (
        parse_request_id(request)
        == parse_request_id(call_id(request, call))
        == RequestOrigin(group, number_of(key), turn)
    )


@pytest.mark.parametrize(
    ("request_id", "origin"),
    [
        ("sample_0_42/3", RequestOrigin("sample_0_42", 3, 0)),
        ("sample_0_42/3.1-2", RequestOrigin("sample_0_42", 3, 1)),
        ("sample_0_42/baseline-1", RequestOrigin("sample_0_42", -1, 0)),
        ("a/b/7.12", RequestOrigin("a/b", 7, 12)),
        ("r0-1", RequestOrigin()),
        ("sample_0_42", RequestOrigin()),
        ("sample_0_42/x", RequestOrigin()),
        ("", RequestOrigin()),
    ],
)
def test_names_of_requests_are_parsed(request_id: str, origin: RequestOrigin) -> None:
    assert parse_request_id(request_id) == origin

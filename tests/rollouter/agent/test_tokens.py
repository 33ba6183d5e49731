"""Rows of a growing conversation: masks, log-probs, spans, and where each turn is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.types import FinishReason, Span, Turn, versions_per_token
from rollouter.agent.tokens import ConversationTokens


def turn(ids: list[int], *spans: tuple[int, int]) -> Turn:
    return Turn(
        np.array(ids, dtype=np.int32),
        -np.arange(1, len(ids) + 1, dtype=np.float32),
        tuple(Span(*span) for span in spans),
        FinishReason.STOP,
    )


def test_turns_and_what_is_said_between_them_make_one_row() -> None:
    tokens = ConversationTokens(np.array([1, 2], dtype=np.int32))
    assert tokens.add_turn(turn([3, 4], (0, 7))) == (0, 0)
    tokens.add_told([5, 6, 7])
    assert tokens.context.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tokens.add_turn(turn([8, 9], (0, 7), (1, 8))) == (0, 5)
    (row,) = tokens.rows()
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert row.response_mask.tolist() == [True, True, False, False, False, True, True]
    assert row.rollout_log_probs.tolist() == [-1, -2, 0, 0, 0, -1, -2]
    assert row.spans == (Span(0, 7), Span(6, 8))
    assert (row.response_ids.dtype, row.response_mask.dtype, row.rollout_log_probs.dtype) == ("int32", "bool", "f4")


def test_a_row_ends_with_its_last_turn() -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    tokens.add_turn(turn([2], (0, 0)))
    tokens.add_told([3, 4])
    (row,) = tokens.rows()
    assert row.response_ids.tolist() == [2]


def test_rewritten_history_begins_another_row() -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    tokens.add_turn(turn([2, 3], (0, 4)))
    tokens.fork([1, 9])
    assert tokens.context.tolist() == [1, 9]
    assert tokens.add_turn(turn([5], (0, 6))) == (1, 0)
    first, second = tokens.rows()
    assert (first.prompt_ids.tolist(), first.response_ids.tolist(), first.spans) == ([1], [2, 3], (Span(0, 4),))
    assert (second.prompt_ids.tolist(), second.response_ids.tolist(), second.spans) == ([1, 9], [5], (Span(0, 6),))


def test_a_row_in_which_nothing_was_sampled_is_none() -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    tokens.add_turn(turn([2], (0, 0)))
    tokens.fork([1, 9])
    assert len(tokens.rows()) == 1


pieces = st.tuples(st.sampled_from(["turn", "told", "fork"]), st.lists(st.integers(0, 99), min_size=1, max_size=5))


@given(st.lists(pieces, max_size=8))
def test_every_sampled_token_is_found_where_it_was_said_to_be(course: list[tuple[str, list[int]]]) -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    places = []
    for version, (what, ids) in enumerate([("turn", [0]), *course]):
        match what:
            case "turn":
                places.append((tokens.add_turn(turn(ids, (0, version))), ids, version))
            case "told":
                tokens.add_told(ids)
            case "fork" if places[-1][0][0] == len(tokens._rows) - 1:  # a turn lies between two of them
                tokens.fork(ids)
    rows = tokens.rows()
    assert sum(int(row.response_mask.sum()) for row in rows) == sum(len(ids) for _, ids, _ in places)
    for (row, first), ids, version in places:
        here = slice(first, first + len(ids))
        assert rows[row].response_ids[here].tolist() == ids
        assert rows[row].response_mask[here].all()
        assert set(versions_per_token(rows[row].spans, len(rows[row].response_ids))[here]) == {version}
    for row in rows:
        assert row.response_mask[-1]
        assert not row.rollout_log_probs[~row.response_mask].any()

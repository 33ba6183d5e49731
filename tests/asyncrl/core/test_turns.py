"""Turns in parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.types import FinishReason, Span, Turn, join_turns, rest_of_turn, versions_per_token


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=12), st.data())
def test_a_turn_is_what_was_known_and_the_rest(tokens: list[tuple[int, int]], data: st.DataObject) -> None:
    """`tokens`: each with the version that sampled it."""
    versions = [version for _, version in tokens]
    starts = [first for first, version in enumerate(versions) if first == 0 or versions[first - 1] != version]
    turn = Turn(
        response_ids=np.array([token for token, _ in tokens], np.int32),
        rollout_log_probs=np.array([-token / 10 for token, _ in tokens], np.float32),
        spans=tuple(Span(first, versions[first]) for first in starts),
        finish_reason=FinishReason.STOP,
    )
    known = None
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3))):
        seen = 0 if known is None else len(known.response_ids)
        known = join_turns(known, rest_of_turn(cut(turn, end), seen))
        assert versions_per_token(known.spans, end).tolist() == versions[:end]
    whole = join_turns(known, rest_of_turn(turn, 0 if known is None else len(known.response_ids)))
    assert whole.response_ids.tolist() == turn.response_ids.tolist()
    assert whole.rollout_log_probs.tolist() == turn.rollout_log_probs.tolist()
    assert (whole.spans, whole.finish_reason) == (turn.spans, turn.finish_reason)


def cut(turn: Turn, end: int) -> Turn:
    """Return the turn as it was when it had `end` tokens."""
    spans = tuple(span for span in turn.spans if span.first_token < end)
    return Turn(turn.response_ids[:end], turn.rollout_log_probs[:end], spans, FinishReason.ABORTED)

"""Which checkpoints are of the surviving line."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.storage.checkpoint_manifest import NO_REWINDS, LineageHistory, LineageStart


def test_a_checkpoint_that_training_went_back_behind_is_another_future() -> None:
    history = NO_REWINDS.after_rewind(3).after_rewind(5)
    assert history.lineage == 2
    survivors = {(step, lineage) for step in range(1, 8) for lineage in range(3) if history.contains(step, lineage)}
    ours = {(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2), (7, 2)}
    never_written = {(step, lineage) for step, lineage in survivors if (step, lineage) not in ours}
    assert survivors >= ours
    assert all(step <= (0, 3, 5)[lineage] for step, lineage in never_written), "a lineage begins behind its rewind"
    assert history.abandoned_by(4, 0) == LineageStart(1, 3)
    assert history.abandoned_by(6, 1) == LineageStart(2, 5)
    assert NO_REWINDS.contains(100, 0)


def test_lineages_may_be_left_out() -> None:
    history = NO_REWINDS.after_rewind(3, 7)
    assert (history.lineage, history.contains(4, 0), history.contains(4, 7), history.after_rewind(4).lineage) == (
        7,
        False,
        True,
        8,
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Steps that are checkpointed, and ways back to one of the surviving checkpoints or the start."""
    steps: list[tuple[str, int]] = []
    path, at = [0], 0
    for _ in range(draw(st.integers(0, 20))):
        if draw(st.booleans()):
            at += draw(st.integers(1, 3))
            path.append(at)
            steps.append(("save", at))
        else:
            at = draw(st.sampled_from(path))
            path = [step for step in path if step <= at]
            steps.append(("back", at))
    return steps


@given(events=histories())
def test_whatever_was_written_survives_exactly_if_no_way_back_went_behind_it(events: list[tuple[str, int]]) -> None:
    history, written, surviving = NO_REWINDS, set[tuple[int, int]](), set[tuple[int, int]]()
    for kind, step in events:
        if kind == "save":
            written.add((step, history.lineage))
            surviving.add((step, history.lineage))
        else:
            history = history.after_rewind(step)
            surviving = {(saved, lineage) for saved, lineage in surviving if saved <= step}
        assert {checkpoint for checkpoint in written if history.contains(*checkpoint)} == surviving
        assert LineageHistory.load(json.loads(json.dumps(history.dump()))) == history
    steps = [rewind.step for rewind in history.starts]
    assert steps == sorted(set(steps)), "a way back that went further has taken the place of those before"

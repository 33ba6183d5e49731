"""The lineage history determines which checkpoints survive rewinds."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.storage.checkpoint_manifest import NO_REWINDS, LineageHistory, LineageStart


def test_the_rewind_that_abandoned_a_checkpoint_is_found() -> None:
    history = NO_REWINDS.after_rewind(3).after_rewind(5)
    assert history.lineage == 2
    assert history.abandoned_by(4, 0) == LineageStart(1, 3)
    assert history.abandoned_by(6, 1) == LineageStart(2, 5)
    assert history.abandoned_by(6, 2) is None


def test_numbers_of_lineages_may_be_skipped() -> None:
    history = NO_REWINDS.after_rewind(3, 7)
    assert (history.lineage, history.after_rewind(4).lineage) == (7, 8)
    assert history.contains(4, 7) and not history.contains(4, 0)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Draw checkpoints, and rewinds to a surviving checkpoint or the start."""
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
def test_a_checkpoint_survives_unless_a_rewind_went_to_an_earlier_step(events: list[tuple[str, int]]) -> None:
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
    assert steps == sorted(set(steps)), "a rewind to an earlier step replaces earlier rewinds to later steps"

"""Which checkpoints are of the surviving line."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.lineage import NO_REWINDS, Line, Rewind


def test_a_checkpoint_that_training_went_back_behind_is_another_future() -> None:
    line = NO_REWINDS.rewound(3).rewound(5)
    assert line.lineage == 2
    survivors = {(step, lineage) for step in range(1, 8) for lineage in range(3) if line.holds(step, lineage)}
    ours = {(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2), (7, 2)}
    never_written = {(step, lineage) for step, lineage in survivors if (step, lineage) not in ours}
    assert survivors >= ours
    assert all(step <= (0, 3, 5)[lineage] for step, lineage in never_written), "a lineage begins behind its rewind"
    assert line.left(4, 0) == Rewind(1, 3)
    assert line.left(6, 1) == Rewind(2, 5)
    assert NO_REWINDS.holds(100, 0)


def test_lineages_may_be_left_out() -> None:
    line = NO_REWINDS.rewound(3, 7)
    assert (line.lineage, line.holds(4, 0), line.holds(4, 7), line.rewound(4).lineage) == (7, False, True, 8)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Steps that are checkpointed, and ways back to one of the surviving checkpoints or the start."""
    steps: list[tuple[str, int]] = []
    line, at = [0], 0
    for _ in range(draw(st.integers(0, 20))):
        if draw(st.booleans()):
            at += draw(st.integers(1, 3))
            line.append(at)
            steps.append(("save", at))
        else:
            at = draw(st.sampled_from(line))
            line = [step for step in line if step <= at]
            steps.append(("back", at))
    return steps


@given(history=histories())
def test_whatever_was_written_survives_exactly_if_no_way_back_went_behind_it(history: list[tuple[str, int]]) -> None:
    line, written, surviving = NO_REWINDS, set[tuple[int, int]](), set[tuple[int, int]]()
    for kind, step in history:
        if kind == "save":
            written.add((step, line.lineage))
            surviving.add((step, line.lineage))
        else:
            line = line.rewound(step)
            surviving = {(saved, lineage) for saved, lineage in surviving if saved <= step}
        assert {checkpoint for checkpoint in written if line.holds(*checkpoint)} == surviving
        assert Line.load(json.loads(json.dumps(line.dump()))) == line
    steps = [rewind.step for rewind in line.rewinds]
    assert steps == sorted(set(steps)), "a way back that went further has taken the place of those before"

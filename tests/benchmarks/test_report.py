"""The table that a benchmark prints."""

from __future__ import annotations

import pytest

from benchmarks.report import report


def test_a_table_in_a_file_has_every_column_whole(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"figure_number_{number}" for number in range(16)]
    report("wide", [dict.fromkeys(names, 1.25)], None)
    out = capsys.readouterr().out
    assert all(name in out for name in names) and out.count("1.25") == 16

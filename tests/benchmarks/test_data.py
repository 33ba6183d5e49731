"""The benchmark of data: its files have the same rows in every format, and a measurement reads all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.storage.data_cache import DataCache
from benchmarks import data
from rollouter.prompts.dataset import FileRows

pytestmark = pytest.mark.timeout(300)  # the first test imports transformers


def test_files_of_all_formats_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_BATCH", 10)
    cache, expected = DataCache(tmp_path / "cache"), list(data.make_rows(25))
    for suffix in data.FORMATS:
        path = tmp_path / f"rows.{suffix}"
        data.write_rows(path, 25)
        rows = FileRows.open([str(path)], key="data.train_files", cache=cache)
        assert [dict(rows.row(index)) for index in range(len(rows))] == expected, suffix


def test_a_measurement_tokenizes_all_rows_and_then_finds_them_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    data.write_rows(path, 60)
    found = data.measure(str(path), str(tmp_path / "cache"), 0)
    assert (found["format"], found["processes"], found["rows"]) == ("jsonl", 1, 60)
    assert found["tokens_per_row"] > 250
    assert found["peak_mb"] >= found["base_mb"] > 0
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1

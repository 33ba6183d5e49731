"""docs/config.md is current and complete."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.docs import render, with_tables
from asyncrl.config.keys import all_keys

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "docs/config.md is stale: run `make docs`"


def test_the_tables_of_other_systems_are_current() -> None:
    page = PAGE.with_name("coming-from.md").read_text(encoding="utf-8")
    assert page == with_tables(page), "docs/coming-from.md is stale: run `make docs`"


def test_every_key_is_explained() -> None:
    assert [key.name for key in all_keys().values() if not key.doc and key.section is None] == []

"""Garbage collections while large libraries are imported."""

from __future__ import annotations

import gc

import pytest

from asyncrl.core.imports import collection_paused


def test_collections_continue_after_the_imports_and_only_if_they_ran_before() -> None:
    with pytest.raises(ImportError), collection_paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()

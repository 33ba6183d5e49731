"""A run directory for the tests of observation."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.storage.run_dir import RunDir, create_run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(Config(), datetime(2026, 1, 2), root=tmp_path)

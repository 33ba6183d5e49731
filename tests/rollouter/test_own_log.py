"""A message of a process names the file where its other words are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouter.serving.own_log import own_log


@pytest.mark.skipif(sys.platform != "linux", reason="file descriptors are looked up as Linux has them")
def test_the_files_of_a_worker_of_ray(tmp_path: Path) -> None:
    for name, expected in (
        ("worker-1-2.err", "worker-1-2.out and .err"),
        ("all.log", "all.log"),
    ):
        with (tmp_path / name).open("w") as file:
            assert own_log(file.fileno()) == f"{tmp_path}/{expected}"


def test_output_that_goes_to_no_file() -> None:
    with open("/dev/null", "w") as file:
        assert "logs/ of the Ray session" in own_log(file.fileno())

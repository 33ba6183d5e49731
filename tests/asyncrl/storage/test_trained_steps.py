"""The log of trained steps, and its state after a killed process or a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import ConfigError, DiskFullError
from asyncrl.core.types import SampleId
from asyncrl.storage.run_dir import TRAINED
from asyncrl.storage.trained_steps import TrainedStepsFile, _remove_partial_line, read_trained


async def test_each_step_and_each_rewind_has_a_line(tmp_path: Path) -> None:
    assert list(read_trained(tmp_path)) == []
    first = TrainedStepsFile(tmp_path, 0)
    await first.append(1, 0, [SampleId(0, 1), SampleId(0, 2)])
    await first.append(2, 0, [])
    second = TrainedStepsFile(tmp_path, 1)
    await second.append_rewind(1)
    await second.append(2, 1, [SampleId(1, 3)])
    assert list(read_trained(tmp_path)) == [
        {"lineage": 0, "step": 1, "version": 0, "samples": ["sample_0_1", "sample_0_2"]},
        {"lineage": 0, "step": 2, "version": 0, "samples": []},
        {"lineage": 1, "rewound_to_step": 1},
        {"lineage": 1, "step": 2, "version": 1, "samples": ["sample_1_3"]},
    ]


@given(cut=st.integers(1, 200), read_bytes=st.integers(1, 200))
def test_a_partial_line_of_a_killed_process_is_removed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, read_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("run") / TRAINED
    lines = [b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 3, "samples": ["' + b"x" * 100 + b'"]}\n']
    whole = b"".join(lines)
    torn = whole[: max(0, len(whole) - cut)]
    path.write_bytes(torn)
    complete = [line for number, line in enumerate(lines) if len(b"".join(lines[: number + 1])) <= len(torn)]
    assert len(list(read_trained(path.parent))) == len(complete)
    with patch("asyncrl.storage.trained_steps.READ_BYTES", read_bytes):
        _remove_partial_line(path)
    assert path.read_bytes() == b"".join(complete)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    for damaged in (b'{"step": 2\n', b"7\n", b"\xff\n"):
        (tmp_path / TRAINED).write_bytes(b'{"step": 1}\n' + damaged + b'{"step": 3}\n')
        with pytest.raises(ConfigError, match=r"line 2 of .*trained\.jsonl is damaged.* the journal"):
            list(read_trained(tmp_path))


async def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = TrainedStepsFile(tmp_path, 0)
    await record.append(1, 0, [SampleId(0, 1)])
    before = (tmp_path / TRAINED).read_bytes()
    opened = Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(self, *args, **kwargs)

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *exc: object) -> None:
                file.close()

            def write(self, line: bytes) -> int:
                file.write(line[:10])
                raise OSError(errno.ENOSPC, "No space left on device")

            tell, truncate = file.tell, file.truncate

        return Full()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(DiskFullError, match=r"the disk is full: cannot write .*trained\.jsonl"):
            await record.append(2, 0, [SampleId(0, 2)])
    assert (tmp_path / TRAINED).read_bytes() == before
    with pytest.raises(ConfigError):
        (tmp_path / "file").touch()
        await TrainedStepsFile(tmp_path / "file", 0).append(1, 0, [])

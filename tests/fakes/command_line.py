"""The `asyncrl` command in the process of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from asyncrl.cli.main import main


class Printed(NamedTuple):
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> Printed:
        """Run a command and return its output; the test fails unless the command ends with `code`."""
        assert main([str(argument) for argument in arguments]) == code
        return Printed(*self._capsys.readouterr())


def in_subprocess(*arguments: str) -> tuple[int, set[str]]:
    """Return the exit code and the loaded modules of the command in a separate process."""
    code = (
        "import sys; from asyncrl.cli.main import main; code = main(sys.argv[1:]); print(); print(*sys.modules);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, set(done.stdout.splitlines()[-1].split())

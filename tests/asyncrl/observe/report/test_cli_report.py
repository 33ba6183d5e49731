"""`asyncrl report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.cli.inspect import Standing
from asyncrl.cli.main import BAD_CONFIG, main
from asyncrl.profiling.files import DIRECTORY, EventFiles, Line, step_dir
from asyncrl.report import plots
from asyncrl.report.words import FIGURES
from benchmarks.profiling.synthetic import START, Faults, Plan, write_run

SMALL = Plan(steps=6, samples=4, n=3)
_LOADED = {"href", "src", "srcset", "poster", "data", "action", "background", "xlink:href"}


class Links(HTMLParser):
    """Whatever a page refers to, and all ids and text of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br"):
            self.unclosed.append(tag)
        for name, value in attrs:
            if name in _LOADED:
                self.targets.append(value or "")
            elif name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time; not every test looks at figures."""

    def draw(report: Any, directory: Path, done: Any) -> None:
        for each in report["figures"]:
            (directory / each["png"]).touch()
            done(each["title"])

    monkeypatch.setattr(plots, "draw", draw)


def made(run_dir: Path, *arguments: str) -> dict[str, Any]:
    assert main(["report", str(run_dir), *arguments]) == 0
    return json.loads((run_dir / "report" / "report.json").read_text())


def test_it_writes_a_page_its_data_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, replace(SMALL, level="full", faults=Faults(tool_hang_s=30, tool_hangs=1)))
    found = made(tmp_path)
    told = capsys.readouterr().out
    there = {path.name for path in (tmp_path / "report").iterdir()}
    assert there == {"index.html", "report.json", *(each["png"] for each in found["figures"])}
    assert {each["id"] for each in found["figures"]} == {each.id for each in FIGURES}
    for each in found["figures"]:
        assert (tmp_path / "report" / each["png"]).read_bytes().startswith(b"\x89PNG")
    assert "1. alarm tool search" in told
    assert str(tmp_path / "report" / "index.html") in told.replace("\n", "")


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    write_run(tmp_path, replace(SMALL, steps=16, ahead=0, faults=Faults(tool_hang_s=60, tool_hangs=1)))
    # Neither the time before the first step nor a replica without requests has a row to link to.
    files = EventFiles(tmp_path / DIRECTORY)
    files.write(
        [
            Line("rollouter", {"timestamp": START, "event": "loop.stall", "duration_s": 9.0, "part": "rollouter"}),
            Line("replica-new", {"timestamp": START, "event": "sync.load", "duration_s": 30.0, "replica": "new"}),
        ]
    )
    files.close()
    found = made(tmp_path)
    text = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    page = Links(text)
    assert page.unclosed == []
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    for style in ("url(", "@import"):
        assert style not in text
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in page.targets)
    assert sum(target.startswith("data:") for target in page.targets) == len(found["figures"])
    anchors = {target[1:] for target in page.targets if target.startswith("#")}
    assert anchors <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    # What stands out is linked to its rows.
    outlier = found["steps"]["outliers"][0]
    assert f"step-{outlier['step']}" in anchors
    assert any(each.startswith("request-sample_0_") for each in anchors)


@pytest.mark.usefixtures("undrawn")
def test_json_is_the_same_data_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SMALL)
    assert main(["report", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "report").exists()
    assert made(tmp_path) == printed


@pytest.mark.usefixtures("undrawn")
def test_out_is_where_it_goes(tmp_path: Path) -> None:
    write_run(tmp_path / "run", SMALL)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "a" / "b" / "index.html").exists()
    assert not (tmp_path / "run" / "report").exists()


@pytest.mark.usefixtures("undrawn")
def test_figures_that_a_new_report_does_not_draw_go_and_files_of_others_stay(tmp_path: Path) -> None:
    write_run(tmp_path, SMALL)
    found = made(tmp_path)
    report = tmp_path / "report"
    found["figures"] += [{"png": "of_another_version.png"}, {"png": "../outside.png"}]
    (report / "report.json").write_text(json.dumps(found))
    others = [report / "of_another_version.png", tmp_path / "outside.png", report / "mine.png", report / "mine.txt"]
    for path in others:
        path.touch()
    made(tmp_path)
    assert [path.exists() for path in others] == [False, True, True, True]
    assert not list(report.glob(".*"))


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", replace(SMALL, steps=1))
    out = tmp_path / "site"
    out.mkdir()
    (out / "index.html").write_text("mine")
    for data in (None, "[]", '{"format": "theirs", "figures": []}'):
        if data is not None:
            (out / "report.json").write_text(data)
        assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == BAD_CONFIG
        assert f"--out={out} holds" in capsys.readouterr().err
    assert (out / "index.html").read_text() == "mine"


def test_a_report_that_cannot_be_finished_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(report: Any, directory: Path, done: Any) -> None:
        (directory / "steps.png").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "draw", fails)
    write_run(tmp_path / "run", replace(SMALL, steps=1))
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text('{"format": 1, "figures": []}')
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == BAD_CONFIG
    assert f"--out={out} cannot be written: No space left" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["report.json"]
    assert (out / "report.json").read_text() == '{"format": 1, "figures": []}'


def test_json_and_out_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--json", "--out", str(tmp_path / "out")]) == BAD_CONFIG
    assert "leave --out out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "missing"),
    [
        pytest.param(replace(SMALL, steps=1), {"event_shares_by_step"}, id="one step", marks=pytest.mark.slow),
        pytest.param(
            replace(SMALL, replicas=1, n=1, samples=1, steps=2, dropped=0, aborted=0), {"thrown_away"},
            id="one of everything", marks=pytest.mark.slow,
        ),
        pytest.param(replace(SMALL, turns=1, tools=()), set(), id="no tools", marks=pytest.mark.slow),
        pytest.param(
            replace(SMALL, back_from=4, until_s=20.0), set(), id="went back, and was killed", marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(SMALL, steps=230, samples=1, n=1, turns=1, validation_every=0), set(),
            id="many steps", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_runs_of_many_kinds(tmp_path: Path, plan: Plan, missing: set[str]) -> None:
    write_run(tmp_path, plan)
    found = made(tmp_path)
    assert {each.id for each in FIGURES} - {each["id"] for each in found["figures"]} == missing
    Links((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SMALL)
    for path in (tmp_path / DIRECTORY).glob("step_000006/*.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    found = made(tmp_path)
    assert found["run"]["torn_lines"] >= 1
    assert "damaged line" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_half_a_line_at_the_end_of_a_run_that_lives_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.cli.report.standing", lambda _run_dir: Standing("live", "running", None))
    write_run(tmp_path, SMALL)
    path = step_dir(tmp_path / DIRECTORY, 6) / "rollouter.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = made(tmp_path)
    assert found["run"]["torn_lines"] == 1
    assert found["run"]["status"] == "running"
    assert not any("damaged" in note for note in found["notes"])
    assert any("The run lives" in note for note in found["notes"])
    path.write_bytes(b"torn\n" + path.read_bytes())
    assert any("1 damaged line was" in note for note in made(tmp_path)["notes"])


@pytest.mark.usefixtures("undrawn")
def test_how_the_run_is_is_told(tmp_path: Path) -> None:
    """One of two recoveries is among the events: the other adds to it."""
    write_run(tmp_path, replace(SMALL, replica_replaced_after=3))
    recovery = [
        {"part": "replica", "cause": "killed", "recovered_s": 5.0},
        {"part": "rollouter", "cause": "lost", "recovered_s": 12.5},
        {"part": "queue", "cause": "not back yet", "recovered_s": None},
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "recovery": recovery}))
    found = made(tmp_path)
    assert found["run"]["status"] == "failed"
    restarts = next(each for each in found["findings"] if each["kind"] == "restarts")
    assert (restarts["seconds_lost"], restarts["name"]) == (17.5, "replica")


@pytest.mark.usefixtures("undrawn")
def test_names_from_outside_are_text_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, replace(SMALL, tools=("<script>alert(1)</script>",)))
    made(tmp_path)
    page = Links((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags


def config(run_dir: Path, level: str) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"profiler": {"level": level}}))


@pytest.mark.parametrize("level", ["off", "'off'"])
def test_without_events_it_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str) -> None:
    (tmp_path / "config.yaml").write_text(f"profiler:\n  level: {level}\n")  # YAML reads a bare `off` as false
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    assert main(["report", str(tmp_path)]) == BAD_CONFIG
    told = capsys.readouterr().err
    assert "profiler.level was off" in told
    assert "profiler.level=summary" in told
    assert not (tmp_path / "report").exists()


def test_a_run_that_ended_before_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, "summary")
    assert main(["report", str(tmp_path)]) == BAD_CONFIG
    assert "ended before it began" in capsys.readouterr().err


def test_a_run_that_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path, "summary")
    monkeypatch.setattr("asyncrl.cli.report.standing", lambda run_dir: Standing("live", "starting", None))
    assert main(["report", str(tmp_path)]) == BAD_CONFIG
    assert "the run lives, and is starting. Ask again" in capsys.readouterr().err


def test_files_without_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, "summary")
    directory = tmp_path / DIRECTORY / "step_000000"
    directory.mkdir(parents=True)
    (directory / "driver.jsonl").write_text('{"timest')
    assert main(["report", str(tmp_path)]) == BAD_CONFIG
    assert "its 1 files hold no readable events" in capsys.readouterr().err


def test_no_such_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "nobody"]) == BAD_CONFIG
    assert "there is no run 'nobody'" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", replace(SMALL, steps=1))
    assert main(["report", str(tmp_path / "run"), "--out", "/dev/null/x"]) == BAD_CONFIG
    told = capsys.readouterr().err
    assert "--out=/dev/null/x cannot be written: Not a directory" in told
    assert "run_dir" not in told


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from asyncrl.cli.main import main; main(['report', '--help']); "
        "sys.exit(bool({'pandas', 'matplotlib', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "asyncrl report quickstart" in done.stdout

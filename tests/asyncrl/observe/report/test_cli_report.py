"""`asyncrl report`: the files that it writes, its output, and the arguments that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import BAD_CONFIG, main
from asyncrl.observe.report import plots
from asyncrl.observe.report.plots import PLOTS
from asyncrl.observe.status.run_files import RunLiveness
from asyncrl.profiling.files import EVENTS_DIRECTORY, step_dir
from asyncrl.profiling.rotation import NEWEST_STEPS, EventRotation
from benchmarks.synthetic_run import PlantedFaults, RunPlan, write_run
from tests.fakes.events import write_events

SMALL = RunPlan(steps=6, samples=4, n=3)
_LOADED = {"href", "src", "srcset", "poster", "data", "action", "background", "xlink:href"}


class Links(HTMLParser):
    """All references, ids and tags of a page."""

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
    """Skip the drawing of figures, which takes most of the time."""

    def draw(report: Any, directory: Path, done: Any) -> None:
        for each in report["figures"]:
            (directory / each["png"]).touch()
            done(each["title"])

    monkeypatch.setattr(plots, "draw", draw)


def make_report(run_dir: Path, *arguments: str) -> dict[str, Any]:
    assert main(["report", str(run_dir), *arguments]) == 0
    return json.loads((run_dir / "report" / "report.json").read_text())


def test_report_writes_the_page_its_data_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, replace(SMALL, level="full", faults=PlantedFaults(tool_hang_s=30, tool_hangs=1)))
    found = make_report(tmp_path)
    printed = capsys.readouterr().out
    there = {path.name for path in (tmp_path / "report").iterdir()}
    assert there == {"index.html", "report.json", *(each["png"] for each in found["figures"])}
    assert {each["id"] for each in found["figures"]} == {each.id for each in PLOTS}
    for each in found["figures"]:
        assert (tmp_path / "report" / each["png"]).read_bytes().startswith(b"\x89PNG")
    assert "1. alarm tool search" in printed
    assert str(tmp_path / "report" / "index.html") in printed.replace("\n", "")


def test_the_page_needs_no_other_file_or_server(tmp_path: Path) -> None:
    write_run(tmp_path, replace(SMALL, steps=16, ahead=0, faults=PlantedFaults(tool_hang_s=60, tool_hangs=1)))
    # Findings about the time before the first step, or a replica without requests, have no row to link to.
    write_events(tmp_path, ("loop.stall", 0.0, 9.0, {"part": "rollouter"}), part="rollouter")
    write_events(tmp_path, ("sync.load", 0.0, 30.0, {"replica": "new"}), part="replica-new")
    found = make_report(tmp_path)
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
    # Outliers link to their rows.
    outlier = found["steps"]["outliers"][0]
    assert f"step-{outlier['step']}" in anchors
    assert any(each.startswith("request-sample_0_") for each in anchors)


@pytest.mark.usefixtures("undrawn")
def test_json_prints_the_data_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SMALL)
    assert main(["report", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "report").exists()
    assert make_report(tmp_path) == printed


@pytest.mark.usefixtures("undrawn")
def test_the_out_option_sets_the_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run", SMALL)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "a" / "b" / "index.html").exists()
    assert not (tmp_path / "run" / "report").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_new_report_removes_only_plots_of_the_earlier_one(tmp_path: Path) -> None:
    write_run(tmp_path, SMALL)
    found = make_report(tmp_path)
    report = tmp_path / "report"
    found["figures"] += [{"png": name} for name in ("of_another_version.png", "../outside.png", "\0.png", "mine.txt")]
    (report / "report.json").write_text(json.dumps(found))
    others = [report / "of_another_version.png", tmp_path / "outside.png", report / "mine.png", report / "mine.txt"]
    for path in others:
        path.touch()
    make_report(tmp_path)
    assert [path.exists() for path in others] == [False, True, True, True]
    assert not list(report.glob(".*"))


def test_a_report_is_not_written_through_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_run(run_dir, SMALL)
    (run_dir / "report").symlink_to(elsewhere)
    assert main(["report", str(run_dir)]) == BAD_CONFIG
    assert f"report is a link to {elsewhere}" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_a_directory_with_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_failed_report_leaves_the_earlier_one(
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "missing"),
    [
        (replace(SMALL, steps=1), {"event_shares_by_step", "turns_by_step"}),
        (replace(SMALL, replicas=1, n=1, samples=1, steps=2, dropped=0, aborted=0), {"waste"}),
        (replace(SMALL, turns=1, tools=()), {"time_by_turns"}),
        (replace(SMALL, back_from=4, until_s=20.0), set()),
        (replace(SMALL, steps=230, samples=1, n=1, turns=1, validation_every=0), {"time_by_turns"}),
    ],
    ids=["one step", "one of everything", "no tools", "rewound and killed", "many steps"],
)
def test_figures_without_data_are_left_out(tmp_path: Path, plan: RunPlan, missing: set[str]) -> None:
    write_run(tmp_path, plan)
    found = make_report(tmp_path)
    assert {each.id for each in PLOTS} - {each["id"] for each in found["figures"]} == missing
    Links((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("undrawn")
def test_an_incomplete_last_line_of_a_live_run_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.cli.report.read_liveness", lambda _run_dir: RunLiveness("live", "running", None))
    write_run(tmp_path, SMALL)
    path = step_dir(tmp_path / EVENTS_DIRECTORY, 6) / "rollouter.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = make_report(tmp_path)
    assert found["run"]["torn_lines"] == 1
    assert found["run"]["status"] == "running"
    assert not any("damaged" in note for note in found["notes"])
    assert any("The run is live" in note for note in found["notes"])
    path.write_bytes(b"torn\n" + path.read_bytes())
    assert any("1 damaged line was" in note for note in make_report(tmp_path)["notes"])
    assert "1 damaged line was left out" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_recoveries_without_an_event_are_added_from_the_summary(tmp_path: Path) -> None:
    """Only one of the two recoveries in the summary has an event."""
    write_run(tmp_path, replace(SMALL, replica_replaced_after=3))
    recovery = [
        {"part": "replica", "cause": "killed", "recovered_s": 5.0},
        {"part": "rollouter", "cause": "lost", "recovered_s": 12.5},
        {"part": "queue", "cause": "not back yet", "recovered_s": None},
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "recovery": recovery}))
    found = make_report(tmp_path)
    assert found["run"]["status"] == "failed"
    restarts = next(each for each in found["findings"] if each["kind"] == "restarts")
    assert (restarts["seconds_lost"], restarts["name"]) == (17.5, "replica")


@pytest.mark.usefixtures("undrawn")
def test_steps_whose_events_were_deleted_have_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, replace(SMALL, steps=NEWEST_STEPS + 5))
    whole = make_report(tmp_path)
    assert whole["folded"] is None
    rotation = EventRotation(tmp_path / EVENTS_DIRECTORY, 1)
    while rotation.work():
        pass
    kept = make_report(tmp_path)
    assert "The events of steps 1 to 5 were replaced by sums" in capsys.readouterr().out
    folded = kept["folded"]
    assert (folded["first_step"], folded["last_step"]) == (1, 5)
    assert kept["run"]["events"] + folded["events"] == whole["run"]["events"]
    for row, span in zip(whole["steps"]["by_step"], folded["spans"], strict=False):
        assert (span["first_step"], span["samples"], span["tokens"]) == (row["step"], row["samples"], row["tokens"])
        assert span["reward"] == pytest.approx(row["reward"])
        assert span["step_s"] == pytest.approx(row["duration_s"])
    page = (tmp_path / "report" / "index.html").read_text()
    assert "folded" in Links(page).ids and "<td>5</td>" in page


@pytest.mark.usefixtures("undrawn")
def test_the_page_escapes_names(tmp_path: Path) -> None:
    write_run(tmp_path, replace(SMALL, tools=("<script>alert(1)</script>",)))
    make_report(tmp_path)
    page = Links((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags


@pytest.mark.parametrize(
    ("level", "file", "live", "reason"),
    [
        ("off", None, False, "profiler.level was off"),
        ("'off'", None, False, "profiler.level was off"),  # YAML reads a bare `off` as false
        ("summary", None, False, "ended before its first one"),
        ("summary", None, True, "Try again"),
        ("summary", '{"timest', False, "its 1 files hold no readable events"),
    ],
)
def test_a_run_without_events_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    level: str, file: str | None, live: bool, reason: str,
) -> None:  # fmt: skip
    (tmp_path / "config.yaml").write_text(f"profiler:\n  level: {level}\n")
    if file is not None:
        path = step_dir(tmp_path / EVENTS_DIRECTORY, 0) / "driver.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(file)
    if live:
        monkeypatch.setattr(
            "asyncrl.observe.status.run_files.read_liveness", lambda _: RunLiveness("live", "starting", None)
        )
    assert main(["report", str(tmp_path)]) == BAD_CONFIG
    printed = capsys.readouterr().err
    assert reason in printed
    assert live or "profiler.level=summary" in printed
    assert not (tmp_path / "report").exists()


def test_bad_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    write_run(run_dir, replace(SMALL, steps=1))
    for arguments, message in (
        (["nobody"], "there is no run 'nobody'"),
        ([str(run_dir), "--json", "--out", "out"], "cannot be combined with --out"),
        ([str(run_dir), "--out", "/dev/null/x"], "--out=/dev/null/x cannot be written: Not a directory"),
    ):
        assert main(["report", *arguments]) == BAD_CONFIG
        assert message in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from asyncrl.cli.main import main; main(['report', '--help']); "
        "sys.exit(bool({'pandas', 'matplotlib', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "asyncrl report quickstart" in done.stdout

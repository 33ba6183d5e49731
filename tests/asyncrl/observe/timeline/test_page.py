"""The page of `asyncrl timeline` in a real browser, from a server like the command's."""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
import uvicorn
import yaml
from playwright.sync_api import Browser, Page, expect

from asyncrl.observe.status.run_files import read_liveness
from asyncrl.observe.timeline.details import conversation_of
from asyncrl.observe.timeline.layout import PHASES
from asyncrl.observe.timeline.reader import EventChunk, EventReader
from asyncrl.observe.timeline.server import Timeline, create_app
from asyncrl.storage.trajectory_files import file_name
from rollouter.trajectory_dump import TrajectoryDump
from tests.browser.chromium import Tab, chromium  # noqa: F401
from tests.fakes.dumped import SCORES, decode, group, prompt, sample
from tests.fakes.timeline_run import FakeRun

RECORDED = 4
"""The feed index of the sample whose conversation is recorded."""
_SOURCE = "Bokeh.documents[0].get_model_by_name('bars').data"
_LABELS = "Bokeh.documents[0].get_model_by_name('groups').major_label_overrides.size"
_GROUPS = "fetch('api/view?start=0&end=60000&pixels=1000').then(a => a.json()).then(view => view.groups.length)"
_WHERE = """bar => {
  const plot = Bokeh.documents[0].get_model_by_name('timeline'), view = Bokeh.index.find_one(plot);
  const data = Bokeh.documents[0].get_model_by_name('bars').data, range = plot.x_range;
  const box = document.getElementById('plot').getBoundingClientRect();
  let best = -1;
  for (let n = 0; n < data.left.length; n++)
    if (data.description[n].includes(bar.description) && data.title[n].startsWith(bar.title) &&
        (best < 0 || data.right[n] - data.left[n] > data.right[best] - data.left[best])) best = n;
  const middle = (Math.max(data.left[best], range.start) + Math.min(data.right[best], range.end)) / 2;
  return [box.x + view.frame.x_scale.compute(middle),
          box.y + view.frame.y_scale.compute((data.top[best] + data.bottom[best]) / 2)];
}"""
"""JavaScript that returns the position of the longest matching bar on the screen."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """A completed run with the recorded conversation of one sample."""
    path = tmp_path_factory.mktemp("runs") / "fake" / "20260101-000000"
    fake = FakeRun(path)
    fake.write(6)
    fake.state("completed", 6)
    dump_dir = path / "dump"
    config = {"profiler": {"level": "full"}, "rollout": {"dump_dir": str(dump_dir)}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    dump = TrajectoryDump(dump_dir, path, decode, lambda: 0.5)
    with ThreadPoolExecutor() as elsewhere:  # Playwright runs an event loop in this thread
        elsewhere.submit(anyio.run, dump.write, sample(RECORDED, group()), prompt(), group(), SCORES).result()
    assert (dump_dir / file_name(RECORDED)).exists()
    return fake


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    fake = FakeRun(tmp_path_factory.mktemp("runs") / "live" / "20260101-000000")
    fake.write(2)
    fake.state("running", 2)
    return fake


def served(run: FakeRun) -> Iterator[str]:
    """Serve a run, and yield the address of its page."""
    timeline = Timeline(run.path, partial(read_liveness, run.path))
    app = create_app(f"{run.path.parent.name}/{run.path.name}", timeline, partial(conversation_of, run.path))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def url(run: FakeRun) -> Iterator[str]:
    yield from served(run)


@pytest.fixture(scope="module")
def slow_start_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a run whose parts took 90 seconds to start, and which then had many concurrent requests."""
    fake = FakeRun(tmp_path_factory.mktemp("runs") / "slow" / "20260101-000000", samples=40, trajectories=8)
    for at in range(0, 80, 5):
        fake.add("rollouter", "loop.stall", at, 2)
    fake.write(2, at=90.0)
    fake.state("completed", 2)
    yield from served(fake)


@pytest.fixture(scope="module")
def live_url(live: FakeRun) -> Iterator[str]:
    yield from served(live)


def drawn(page: Page) -> int:
    """Return how often the page has been drawn."""
    return int(page.evaluate("Number(document.body.dataset.drawn || 0)"))


def wait(page: Page, condition: str) -> None:
    """Wait until the page has been drawn and `condition` holds. The condition may use `data`, the columns of the
    bars."""
    page.wait_for_function(f"() => document.body.dataset.drawn && (data => {condition})({_SOURCE})")


@contextmanager
def opened(browser: Browser, url: str, until: str = "data.left.length > 100") -> Iterator[tuple[Page, Tab]]:
    """Open a page and wait for its bars. On exit, its console must have no errors."""
    with Tab.opened(browser, url) as tab:
        wait(tab.page, until)
        yield tab.page, tab
        assert tab.errors == []


def place(page: Page, description: str = "", title: str = "") -> tuple[float, float]:
    found = page.evaluate(_WHERE, {"description": description, "title": title})
    return found[0], found[1]


def test_the_page_of_a_finished_run(chromium: Browser, run: FakeRun, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as (page, tab):
        # All states of requests, tools, users and rewards are drawn.
        states = set(page.evaluate(f"Array.from({_SOURCE}.state)"))
        assert {*PHASES, "tool", "user", "reward", "wait", "experience", "update", "weights"} <= states
        versions = page.evaluate("Array.from(Bokeh.documents[0].get_model_by_name('versions').data.label)")
        assert versions == ["v0", "v1", "v2", "v3", "v4", "v5"]
        expect(page.locator("h1")).to_have_text("fake/20260101-000000")
        expect(page.locator("#phase")).to_have_text("completed")
        expect(page.locator("#step")).to_have_text("step 6 of 8 · version 6")
        expect(page.locator("#legend")).to_contain_text("queued")
        blocks = page.evaluate(
            "Array.from(Bokeh.documents[0].get_model_by_name('blocks').major_label_overrides.values())"
        )
        assert blocks[:4] == ["trainer", "rank-actor-0", "rank-actor-1", "rollouter"]
        assert tab.overflow() <= 0
        assert page.evaluate("document.documentElement.scrollHeight - window.innerHeight") <= 0
        assert tab.external(url) == []
        assert len(tab.requests) >= 3


def test_zooming_fetches_finer_bars_and_blocks_can_be_hidden(chromium: Browser, url: str) -> None:  # noqa: F811
    with opened(chromium, url, "data.left.length > 100 && data.event.includes(-1)") as (page, _):
        wide = page.evaluate("document.getElementById('summary').textContent")
        page.mouse.move(*place(page, title="trainer.update"))
        for _ in range(12):
            page.mouse.wheel(0, -240)
        wait(page, "data.left.length > 0 && data.left.length < 200 && !data.event.includes(-1)")
        assert page.evaluate("document.getElementById('summary').textContent") != wide
        page.keyboard.press("0")
        wait(page, "data.event.includes(-1)")
        # Over the names of the tracks, the mouse wheel makes the tracks taller and does not change the visible time.
        model = "Bokeh.documents[0].get_model_by_name('timeline')"
        window = f"(({{x_range: x, y_range: y}}) => [x.start, x.end, y.start - y.end])({model})"
        start, end, rows = page.evaluate(window)
        page.mouse.move(20, place(page, title="trainer.update")[1])
        page.mouse.wheel(0, -240)
        page.wait_for_function(f"rows => {window}[2] < 0.9 * rows", arg=rows)
        assert page.evaluate(window)[:2] == [start, end]
        page.click("#rows")
        page.wait_for_function(f"rows => {window}[2] === rows", arg=rows)
        page.click("#parts summary")
        page.get_by_label("rollouter").uncheck()
        wait(page, "!data.state.includes('tool') && data.state.includes('decode')")


def test_a_tooltip_and_the_conversation_of_a_request(chromium: Browser, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as (page, tab):
        where = place(page, f"sample_0_{RECORDED}/0", "request · decode")
        page.mouse.move(where[0] - 3, where[1])
        page.mouse.move(*where)
        expect(page.locator(".bk-Tooltip").first).to_contain_text(f"sample_0_{RECORDED}")
        expect(page.locator(".bk-Tooltip").first).to_contain_text("request · decode")
        page.mouse.click(*where)
        panel = page.locator("#panel")
        expect(panel.locator("pre.conversation")).to_contain_text("It is 42.")
        expect(panel.locator("pre.conversation")).to_contain_text("calculator")
        expect(panel).to_contain_text(re.compile(r"\d+ events of sample_0_4 and its trajectory 0"))
        expect(panel.locator("tr.this")).to_contain_text("request")
        assert tab.overflow() <= 0
        page.keyboard.press("Escape")
        expect(panel).to_be_hidden()


def test_details_of_an_unrecorded_sample_explain_how_to_record_it(chromium: Browser, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as (page, _):
        page.mouse.click(*place(page, "sample_0_9<", "trajectory"))
        expect(page.locator("#panel")).to_contain_text("rollout.dump_dir")


def test_the_page_of_a_live_run_shows_new_events(chromium: Browser, live: FakeRun, live_url: str) -> None:  # noqa: F811
    with opened(chromium, live_url) as (page, _):
        expect(page.locator("#phase")).to_have_text("live · running")
        expect(page.locator("#follow")).to_be_checked()
        before = page.evaluate(f"Math.max(...{_SOURCE}.right)")
        live.write(1, first=3, at=12.0)
        live.state("running", 3)
        wait(page, f"Math.max(...data.right) > {before} + 5000")
        lines = "Bokeh.documents[0].get_model_by_name('versions').data"
        assert page.evaluate(f"Array.from({lines}.label).at(-1)") == "v2"
        assert page.evaluate("Bokeh.documents[0].get_model_by_name('time').end") >= 18_000
        expect(page.locator("#step")).to_have_text("step 3 of 8 · version 3")
        page.uncheck("#follow")
        page.click("#zoom-in")
        count, end = drawn(page), page.evaluate("Bokeh.documents[0].get_model_by_name('time').end")
        live.write(1, first=4, at=18.0)
        page.wait_for_function(f"() => Number(document.body.dataset.drawn) > {count + 1}")
        assert page.evaluate("Bokeh.documents[0].get_model_by_name('time').end") == end


def test_the_first_view_begins_with_the_first_sample_and_a_click_shows_the_whole_run(
    chromium: Browser,  # noqa: F811
    slow_start_url: str,
) -> None:
    start = "Bokeh.documents[0].get_model_by_name('time').start"
    with opened(chromium, slow_start_url) as (page, _):
        assert 85_000 < page.evaluate(start) < 90_000
        assert page.evaluate(_LABELS) == page.evaluate(_GROUPS) > 20, "no row is without its label"
        assert "trouble" not in page.evaluate(f"Array.from({_SOURCE}.state)")
        page.click("#whole")
        wait(page, "data.state.includes('trouble')")
        assert page.evaluate(start) < 0


def test_a_click_zooms_into_tracks_that_are_too_thin_to_see(chromium: Browser, slow_start_url: str) -> None:  # noqa: F811
    with opened(chromium, slow_start_url, "data.title.some(title => title.startsWith('requests: '))") as (page, _):
        expect(page.locator("#rows")).to_be_hidden()
        page.mouse.click(*place(page, title="requests: "))
        wait(page, "data.title.some(title => title.startsWith('request · decode'))")
        assert "sample" not in page.evaluate(f"Array.from({_SOURCE}.state)")
        page.click("#rows")
        wait(page, "data.title.some(title => title.startsWith('requests: '))")
        expect(page.locator("#rows")).to_be_hidden()


def test_the_page_reports_unreadable_files(
    chromium: Browser,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FakeRun(tmp_path / "fake" / "20260101-000000")
    run.write(1)
    run.state("completed", 1)
    (run.path / "events/step_000001/queue.jsonl").write_text("{}\n")
    read = EventReader._read_file

    def read_some(self: EventReader, number: int, size: int) -> Iterator[EventChunk]:
        if self._files[number].path.name == "queue.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(self, number, size)

    monkeypatch.setattr(EventReader, "_read_file", read_some)
    for url in served(run):
        with Tab.opened(chromium, url) as tab:
            trouble = tab.page.locator("#trouble")
            expect(trouble).to_have_text(re.compile(r"cannot be read: /.*queue\.jsonl: Permission denied"))
            wait(tab.page, "data.left.length > 100")
            assert tab.overflow() <= 0

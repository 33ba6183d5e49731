"""A headless Chromium for tests of pages: the one that is installed on the machine. Import `chromium` into a test
module:

    from tests.browser.chromium import Tab, chromium  # noqa: F401

    def test_it(chromium: Browser, tmp_path: Path) -> None:
        with Tab.opened(chromium, (tmp_path / "report.html").as_uri()) as tab:
            ...

Without a browser such tests are skipped; with CI=true in the environment they fail, so that CI cannot skip them
unnoticed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LAPTOP = {"width": 1366, "height": 768}
"""Pixels of a small laptop's screen."""
TIMEOUT_MS = 20_000
"""Timeout of actions on a page, which are slow on a busy machine."""
EXIT_TIMEOUT_S = 10.0
"""Grace period for the browser's processes to end."""
_OWN = ("data", "blob", "about")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser that the tests of a module share."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = f"there is no browser on this machine (none of {', '.join(NAMES)} is on PATH)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and with CI=true the tests of pages must run")
        pytest.skip(reason)
    with browsing(path) as browser:
        yield browser


@contextmanager
def browsing(path: str) -> Iterator[Browser]:
    """Start a browser. On exit, end its processes and those of Playwright."""
    me = psutil.Process()
    others = set(me.children(recursive=True))
    started: set[psutil.Process] = set()

    def record_children() -> None:
        # These are Playwright's driver with its children and, where orphans are adopted, the browser's crash handlers.
        # The test may have started other processes.
        for child in me.children():
            if child not in others and _is_ours(child):
                with suppress(psutil.NoSuchProcess):
                    started.update([child, *child.children(recursive=True)])

    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
            record_children()
            yield browser
            record_children()
            browser.close()
    finally:
        record_children()
        _, remaining = psutil.wait_procs(started, timeout=EXIT_TIMEOUT_S)
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(remaining, timeout=EXIT_TIMEOUT_S)


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("chrom") or any("playwright" in part for part in process.cmdline())
    except psutil.Error:
        return False


@dataclass
class Tab:
    """A page with its errors and requests."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Errors and warnings on the page's console, and uncaught exceptions."""
    requests: list[str] = field(default_factory=list)
    """Addresses of all requests, in order."""

    @classmethod
    @contextmanager
    def opened(cls, browser: Browser, url: str) -> Iterator[Self]:
        """Open a page. Requests to other origins, or to other files if the page is a file, are blocked."""
        context = browser.new_context(viewport=LAPTOP)  # type: ignore[arg-type]
        tab = cls(context.new_page())
        tab.page.set_default_timeout(TIMEOUT_MS)
        context.route(lambda requested: not _is_own(requested, url), lambda route: route.abort())
        tab.page.on("request", tab._record_request)
        tab.page.on("console", tab._record_message)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.goto(url)
        try:
            yield tab
        finally:
            context.close()

    def external(self, url: str) -> list[str]:
        """Return the requests to origins other than that of `url`."""
        return [requested for requested in self.requests if not _is_own(requested, url)]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def _record_request(self, request: Request) -> None:
        self.requests.append(request.url)

    def _record_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")


def _is_own(requested: str, url: str) -> bool:
    mine, theirs = urlsplit(url), urlsplit(requested)
    if theirs.scheme in _OWN:
        return True
    if mine.scheme == "file":
        return theirs.scheme == "file" and theirs.path == mine.path
    return (mine.scheme, mine.netloc) == (theirs.scheme, theirs.netloc)

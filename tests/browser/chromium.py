"""The machine's own Chromium, headless, for pages that the project makes. Import `chromium` into a test module:

    from tests.browser.chromium import Tab, chromium  # noqa: F401

    def test_it(chromium: Browser, tmp_path: Path) -> None:
        with Tab.opened(chromium, (tmp_path / "report.html").as_uri()) as tab:
            ...

Without a browser such tests are skipped; with CI=true in the environment they fail, so that nobody goes without them
unknowingly.
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
PATIENCE_MS = 20_000
"""For what a page has to do by itself; a machine under load is slow."""
GONE_S = 10.0
"""For the browser's processes to end by themselves."""
_OWN = ("data", "blob", "about")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for a module."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        told = f"there is no browser on this machine (none of {', '.join(NAMES)} is on PATH)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{told}, and CI=true: pages have to be tested there")
        pytest.skip(told)
    with browsing(path) as browser:
        yield browser


@contextmanager
def browsing(path: str) -> Iterator[Browser]:
    """A browser, whose processes are gone afterwards, and so are those of Playwright."""
    me = psutil.Process()
    others = set(me.children(recursive=True))
    started: set[psutil.Process] = set()

    def look() -> None:
        # Playwright's driver with all below it, and where orphans are adopted the browser's crash handlers. A test may
        # have started something of its own.
        for child in me.children():
            if child not in others and _is_ours(child):
                with suppress(psutil.NoSuchProcess):
                    started.update([child, *child.children(recursive=True)])

    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
            look()
            yield browser
            look()
            browser.close()
    finally:
        look()
        _, left = psutil.wait_procs(started, timeout=GONE_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GONE_S)


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("chrom") or any("playwright" in part for part in process.cmdline())
    except psutil.Error:
        return False


@dataclass
class Tab:
    """A page, and what it complained of and asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Errors and warnings on its console, and exceptions that nobody caught."""
    requests: list[str] = field(default_factory=list)
    """Addresses, in order."""

    @classmethod
    @contextmanager
    def opened(cls, browser: Browser, url: str) -> Iterator[Self]:
        """Nothing but `url`'s own origin (of a file: that file) is let through."""
        context = browser.new_context(viewport=LAPTOP)  # type: ignore[arg-type]
        tab = cls(context.new_page())
        tab.page.set_default_timeout(PATIENCE_MS)
        context.route(lambda asked: not _is_own(asked, url), lambda route: route.abort())
        tab.page.on("request", tab._requested)
        tab.page.on("console", tab._said)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.goto(url)
        try:
            yield tab
        finally:
            context.close()

    def external(self, url: str) -> list[str]:
        """What it asked of anything but `url`'s own origin."""
        return [asked for asked in self.requests if not _is_own(asked, url)]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")


def _is_own(asked: str, url: str) -> bool:
    mine, theirs = urlsplit(url), urlsplit(asked)
    if theirs.scheme in _OWN:
        return True
    if mine.scheme == "file":
        return theirs.scheme == "file" and theirs.path == mine.path
    return (mine.scheme, mine.netloc) == (theirs.scheme, theirs.netloc)

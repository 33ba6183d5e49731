"""The page of a run and what it asks for, over HTTP on loopback.

    /               the page               /api/view     what a window of time looks like
    /api/status     how the run stands     /details/N    one event, its sample's others, the conversation

Whoever asks by another name than this machine's own is refused: a page elsewhere that has its name point here would
read the run through its visitor's browser.
"""

from __future__ import annotations

import html
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.timeline.details import MAX_EVENTS, Conversation, Conversations, Listed, details, trajectory_of
from asyncrl.timeline.index import Index, sample_of
from asyncrl.timeline.page import page
from asyncrl.timeline.reading import EventReader
from asyncrl.timeline.view import Window, look, view

HOSTS = ("127.0.0.1", "localhost", "[::1]")
LOOK_EVERY_S = 1.0
"""For new events: the parts write theirs twice as often."""
_MAX_PIXELS = 20_000
_HEADERS = {
    # Bokeh makes functions of text, hence unsafe-eval; nothing is loaded from, or sent to, anywhere else.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Standing(NamedTuple):
    """How the run is."""

    phase: str
    live: bool
    step: int | None = None
    total_steps: int | None = None
    version: int | None = None
    started_at: float | None = None
    """Unix seconds; None: not known."""


class Timeline:
    """The events of one run. Its methods block, and may be called from any thread."""

    def __init__(self, run_dir: Path) -> None:
        self._reader = EventReader(run_dir)
        self._index = Index()
        self._lock = threading.Lock()
        self._origin: int | None = None
        self._complete = False
        """What was there at the start has been read."""
        self._settled = False
        """The run is over, and a look at everything has found nothing new."""
        self._trouble = ""

    def read(self, *, everything: bool = False) -> bool:
        """What has come since, a piece at a time: others get their turn in between; see `EventReader.new`.

        Returns:
            Whether anything has come.
        """
        found = False
        for chunk in self._reader.new(everything=everything):
            found = True
            with self._lock:
                try:
                    self._index.add(chunk)
                except Exception:
                    self._reader.damaged += len(chunk.events)  # the next look gets past them
                    raise
        self._complete = True
        return found

    def keep_up(self, standing: Callable[[], Standing]) -> None:
        """`read`, unless nothing can have come. What fails is told by `status`, and the next call tries again."""
        try:
            live = standing().live
            if self._settled and not live:
                return
            # A file that cannot be read is tried again with the full looks of the reader.
            everything = not live and not self._reader.unread
            found = self.read(everything=everything)
            self._settled = everything and not found and not self._reader.unread
        except Exception as error:  # noqa: BLE001  whatever it is, the page is to say it
            self._trouble = f"reading stopped: {type(error).__name__}: {error}"
            return
        unread = self._reader.unread
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        self._trouble = f"cannot be read: {unread[0]}{more}" if unread else ""

    def status(self, standing: Standing) -> dict[str, Any]:
        with self._lock:
            origin = self._started(standing)
            first, last, admitted = self._index.first, self._index.last, self._index.admitted
            total = self._reader.total_bytes
            return {
                "events": self._index.num_events,
                "oldest_ms": 0.0 if first is None else (first - origin) / 1000,
                "newest_ms": 0.0 if last is None else (last - origin) / 1000,
                "admitted_ms": None if admitted is None else (admitted - origin) / 1000,
                "trouble": self._trouble,
                "read": 1.0 if self._complete or not total else self._reader.read_bytes / total,
                "phase": standing.phase,
                "live": standing.live,
                "step": standing.step,
                "total_steps": standing.total_steps,
                "version": standing.version,
            }

    def view(self, standing: Standing, window: Window) -> dict[str, Any]:
        with self._lock:
            seen = look(self._index, self._started(standing), window)
            places = self._index.places_of(seen.events)
            told = {
                "events": self._index.num_events,
                "damaged": self._reader.damaged,
                "all_blocks": list(dict.fromkeys(group.block for group in self._index.groups())),
            }
        return view(seen, self._reader.read_lines(places)) | told

    def details(self, standing: Standing, number: int, conversations: Conversations) -> str:
        """HTML. Raises `IndexError`: there is no such event."""
        with self._lock:
            place = self._index.places_of(np.array([number]))
            origin = self._started(standing)
        fields = self._reader.read_lines(place)[number]
        sample = sample_of(fields)
        if sample is None:
            return details(number, fields, [], Conversation(), origin)
        with self._lock:
            places = self._index.places_of(self._index.events_of(sample)[: 4 * MAX_EVENTS])
        listed = [Listed(other, found) for other, found in self._reader.read_lines(places).items()]
        return details(number, fields, listed, conversations(sample, trajectory_of(fields)), origin)

    def _started(self, standing: Standing) -> int:
        """When the run began, in Unix microseconds: it does not change once there are events."""
        known = [] if standing.started_at is None else [round(standing.started_at * 1_000_000)]
        if self._index.first is None:
            return known[0] if known else 0
        if self._origin is None:
            self._origin = min([self._index.first, *known])
        return self._origin


def app(run: str, timeline: Timeline, standing: Callable[[], Standing], conversations: Conversations) -> Starlette:
    """The ASGI app, which reads new events for as long as it runs.

    Args:
        run: the run's name.
        standing: how it is now. Blocking.
    """
    whole = page(run)

    async def get_page(_: Request) -> Response:
        return HTMLResponse(whole, headers=_HEADERS)

    async def get_status(_: Request) -> Response:
        return JSONResponse(await to_thread.run_sync(lambda: timeline.status(standing())))

    async def get_view(request: Request) -> Response:
        try:
            window = _window(request)
        except ValueError as error:
            return PlainTextResponse(f"no such window: {error}", 400)
        return JSONResponse(await to_thread.run_sync(lambda: timeline.view(standing(), window)))

    async def get_details(request: Request) -> Response:
        number = request.path_params["number"]
        try:
            found = await to_thread.run_sync(lambda: timeline.details(standing(), number, conversations))
        except IndexError as error:
            return HTMLResponse(f'<p class="note">{html.escape(str(error))}</p>', 404, headers=_HEADERS)
        return HTMLResponse(found, headers=_HEADERS)

    @asynccontextmanager
    async def reading(_: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(_read_on, timeline, standing))
            yield
            group.cancel_scope.cancel()

    return Starlette(
        routes=[
            Route("/", get_page),
            Route("/api/status", get_status),
            Route("/api/view", get_view),
            Route("/details/{number:int}", get_details),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)],
        lifespan=reading,
    )


async def _read_on(timeline: Timeline, standing: Callable[[], Standing]) -> None:
    while True:
        await to_thread.run_sync(timeline.keep_up, standing, abandon_on_cancel=True)
        await anyio.sleep(LOOK_EVERY_S)


def _window(request: Request) -> Window:
    """Raises `ValueError`: it makes no sense."""
    query = request.query_params
    start, end = float(query.get("start", "nan")), float(query.get("end", "nan"))
    if not (math.isfinite(start) and math.isfinite(end) and start < end and max(abs(start), abs(end)) < 1e14):
        raise ValueError("start and end are to be milliseconds, and start comes first")
    pixels, high = (min(max(1, int(query.get(name, "1000"))), _MAX_PIXELS) for name in ("pixels", "pixels_high"))
    top, bottom = float(query.get("top", "-inf")), float(query.get("bottom", "inf"))
    return Window(start, end, pixels, high, top, bottom, frozenset(query.getlist("hide")))

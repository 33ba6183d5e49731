"""The page of a run and its data, over HTTP on loopback.

    /               the page               /api/view     what a window of time shows
    /api/status     the status of the run  /details/N    one event, the others of its sample, the conversation

Requests for host names other than this machine's own are refused. Otherwise, a web page whose host name resolves to
this machine could read the run through the browser of its visitor.
"""

from __future__ import annotations

import errno
import html
import math
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.core.failures import ConfigError
from asyncrl.core.tasks import Interrupts
from asyncrl.observe.status.run_files import RunLiveness
from asyncrl.observe.timeline.details import (
    MAX_EVENTS,
    Conversation,
    Conversations,
    details,
    sample_of,
    trajectory_of,
)
from asyncrl.observe.timeline.index import Index
from asyncrl.observe.timeline.page import page
from asyncrl.observe.timeline.reader import ALL_STEPS, EventReader, StepRange
from asyncrl.observe.timeline.view import Window, select_bars, view

_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_BYTES = 64 << 20
"""Size of the events that are read at the start, about 250,000 events. Reading them takes some seconds."""
_READ_EVERY_S = 1.0
_MAX_PIXELS = 20_000
_STOP_S = 1
"""Time limit for requests in progress at Ctrl-C."""
_HEADERS = {
    # Bokeh compiles functions from text, hence unsafe-eval; nothing is loaded from or sent to any other server.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Timeline:
    """The events of one run. Its methods block, and may be called from any thread."""

    def __init__(self, run_dir: Path, liveness: Callable[[], RunLiveness], steps: StepRange = ALL_STEPS) -> None:
        """
        Args:
            liveness: returns whether the run is live, and its state. Blocking.
            steps: the steps to show; of these, the newest ones with about `MAX_BYTES` of events are shown.
        """
        self._liveness = liveness
        self._reader = EventReader(run_dir, steps=steps, max_bytes=MAX_BYTES)
        self._index = Index()
        self._lock = threading.Lock()
        self._origin: int | None = None
        self._has_caught_up = False
        """All events that existed at the start have been read."""
        self._is_final = False
        """The run is over, and reading everything again found nothing new."""
        self._trouble = ""

    def read(self, *, everything: bool = False) -> bool:
        """Read new events, and return whether there were any; see `EventReader.read_new`."""
        has_new = False
        for chunk in self._reader.read_new(everything=everything):
            has_new = True
            with self._lock:  # other calls may run between chunks
                try:
                    self._index.add(chunk)
                except Exception:
                    self._reader.num_damaged += len(chunk.events)  # the next read continues after them
                    raise
        self._has_caught_up = True
        return has_new

    def keep_up(self) -> None:
        """Read new events, unless there can be none. `status` reports a failure, and the next call tries again."""
        try:
            live = self._liveness().how == "live"
            if self._is_final and not live:
                return
            # The reader's full scans try unreadable files again.
            everything = not live and not self._reader.unreadable
            has_new = self.read(everything=everything)
            self._is_final = everything and not has_new and not self._reader.unreadable
        except Exception as error:  # noqa: BLE001  the page has to show any failure
            self._trouble = f"reading stopped: {type(error).__name__}: {error}"
            return
        unreadable = self._reader.unreadable
        more = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        self._trouble = f"cannot be read: {unreadable[0]}{more}" if unreadable else ""

    def status(self) -> dict[str, Any]:
        liveness = self._liveness()
        state = liveness.state
        with self._lock:
            origin = self._began_at(liveness)
            first, last, admitted = self._index.first, self._index.last, self._index.admitted
            return {
                "events": self._index.num_events,
                "oldest_ms": 0.0 if first is None else (first - origin) / 1000,
                "newest_ms": 0.0 if last is None else (last - origin) / 1000,
                "admitted_ms": None if admitted is None else (admitted - origin) / 1000,
                "trouble": self._trouble,
                "read": 1.0 if self._has_caught_up else self._reader.read_share,
                "left_out_before": self._reader.left_out_before,
                "phase": "state not known" if liveness.how == "unknown" else liveness.phase,
                "live": liveness.how == "live",
                **{name: getattr(state, name, None) for name in ("step", "total_steps", "version")},
            }

    def view(self, window: Window) -> dict[str, Any]:
        liveness = self._liveness()
        with self._lock:
            selection = select_bars(self._index, self._began_at(liveness), window)
            positions = self._index.positions(selection.events)
            totals = {
                "events": self._index.num_events,
                "damaged": self._reader.num_damaged,
                "all_blocks": list(dict.fromkeys(group.block for group in self._index.groups())),
            }
        return view(selection, self._reader.read_lines(positions)) | totals

    def details(self, number: int, conversations: Conversations) -> str:
        """Return the details of an event as HTML. Raises `IndexError`: there is no such event."""
        liveness = self._liveness()
        with self._lock:
            positions = self._index.positions(np.array([number]))
            origin = self._began_at(liveness)
        events = self._reader.read_lines(positions)
        sample, conversation = sample_of(events[number]), Conversation()
        if sample is not None:
            with self._lock:
                positions |= self._index.positions(self._index.events_of(sample)[: 4 * MAX_EVENTS])
            conversation = conversations(sample, trajectory_of(events[number]))
            events = self._reader.read_lines(positions) | events
        return details(number, events, conversation, origin)

    def _began_at(self, liveness: RunLiveness) -> int:
        """Return when the run began, in Unix microseconds; constant once there are events."""
        known = [] if liveness.state is None else [round(liveness.state.started_at * 1_000_000)]
        if self._index.first is None:
            return known[0] if known else 0
        if self._origin is None:
            self._origin = min([self._index.first, *known])
        return self._origin


def create_app(run: str, timeline: Timeline, conversations: Conversations) -> Starlette:
    """Create the ASGI app for the run with this name. The app reads new events as long as it runs."""
    content = page(run)

    async def get_page(_: Request) -> Response:
        return HTMLResponse(content, headers=_HEADERS)

    async def get_status(_: Request) -> Response:
        return JSONResponse(await to_thread.run_sync(timeline.status))

    async def get_view(request: Request) -> Response:
        try:
            window = _parse_window(request)
        except ValueError as error:
            return PlainTextResponse(f"no such window: {error}", 400)
        return JSONResponse(await to_thread.run_sync(timeline.view, window))

    async def get_details(request: Request) -> Response:
        number = request.path_params["number"]
        try:
            text = await to_thread.run_sync(timeline.details, number, conversations)
        except IndexError as error:
            return HTMLResponse(f'<p class="note">{html.escape(str(error))}</p>', 404, headers=_HEADERS)
        return HTMLResponse(text, headers=_HEADERS)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(_keep_up, timeline)
            yield
            group.cancel_scope.cancel()

    return Starlette(
        routes=[
            Route("/", get_page),
            Route("/api/status", get_status),
            Route("/api/view", get_view),
            Route("/details/{number:int}", get_details),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS), www_redirect=False)],
        lifespan=lifespan,
    )


async def _keep_up(timeline: Timeline) -> None:
    while True:
        await to_thread.run_sync(timeline.keep_up, abandon_on_cancel=True)
        await anyio.sleep(_READ_EVERY_S)


def _parse_window(request: Request) -> Window:
    """Raises `ValueError`: the query is invalid."""
    query = request.query_params
    start, end = float(query.get("start", "nan")), float(query.get("end", "nan"))
    if not (math.isfinite(start) and math.isfinite(end) and start < end and max(abs(start), abs(end)) < 1e14):
        raise ValueError("start and end are milliseconds, and start comes first")
    width, height = (min(max(1, int(query.get(name, "1000"))), _MAX_PIXELS) for name in ("pixels", "pixels_high"))
    top, bottom = float(query.get("top", "-inf")), float(query.get("bottom", "inf"))
    return Window(start, end, width, height, top, bottom, frozenset(query.getlist("hide")))


def listen(port: int) -> socket.socket:
    """Listen on loopback; with port 0 on a free one. Raises `ConfigError`: the port is not available."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
        raise ConfigError(
            f"--port={port} {why}: the page cannot be served there. Leave out --port to use a free one, or name another"
        ) from None


class _Server(uvicorn.Server):
    """A server that leaves signals to `Interrupts`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: Starlette, listening: socket.socket, url: str | None) -> None:
    """Serve the app until SIGINT or SIGTERM, and open `url`, if there is one, in a browser."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_STOP_S)
    server = _Server(config)

    async def stop() -> None:
        server.should_exit = True

    interrupts = Interrupts()
    interrupts.on_first = stop
    with interrupts.scope:
        async with anyio.create_task_group() as group:
            await group.start(interrupts.listen)
            if url is not None:
                group.start_soon(_open, url)
            await server.serve(sockets=[listening])
            group.cancel_scope.cancel()


async def _open(url: str) -> None:
    await to_thread.run_sync(webbrowser.open, url)

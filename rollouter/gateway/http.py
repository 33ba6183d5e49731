"""ASGI middleware that routes requests with a trajectory's key to the Rollouter.

Authorization: Bearer asyncrl-1-…   ──▶ the Rollouter that issued the key     recorded
anything else                       ──▶ the inner app (`ray.serve.llm`)       not recorded

The key is checked before the body is read, and the body within limits before anything else sees it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import anyio
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncrl.core.text import parse_json
from rollouter.gateway.protocol import FIELDS, GatewayResponse, RequestError
from rollouter.gateway.session import BODY_THREADS, TURN_PATHS, incarnation_of
from rollouter.gateway.streaming import error_event

T = TypeVar("T")


class Calls(Protocol):
    """The calls to the Rollouter that issued a key. `path` is the part after `/v1/`."""

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """See `AgentGateway.answer`.

        Raises:
            RequestError: the Rollouter has ended, or cannot be reached.
        """

    def stream(self, key: str, path: str, body: Mapping[str, Any]) -> AsyncGenerator[GatewayResponse | bytes, None]:
        """See `AgentGateway.stream`. Raises as `answer`."""


MAX_BODY_BYTES = 32 << 20
BODY_S = 60.0
"""How long a client may take to send a body."""
MAX_VALUES = 1_000_000
"""Limit for the values in a body. Without it, 32 MiB could have 17 million, which take seconds and 1 GiB to parse. A
prompt may have almost as many token ids."""
_VALUE_MARKS = (b",", b"[", b"{", b"\\u00")
"""What JSON has at least once for each value but one. It is counted in texts too, where `\\u002c` is a comma, because
the arguments of calls are texts of JSON."""
INLINE_BYTES = 64 << 10
"""Bodies up to this length take milliseconds, and are parsed without a thread."""
MAX_DIGITS = 18
"""Limit for the digits of an integer in a body, which therefore fits into 64 bits."""
MAX_KNOWN_KEYS = 10_000
_FINAL = {"x-should-retry": "false"}
"""Stops the official clients from retrying requests that would be refused again."""
_POSTED = TURN_PATHS | {"reward"}


class TrajectoryKeyMiddleware:
    """ASGI middleware, which must be the outermost one, because trajectory keys are not valid as API keys."""

    def __init__(self, app: ASGIApp, calls: Calls) -> None:
        self._app = app
        self._calls = calls
        self._threads = anyio.CapacityLimiter(BODY_THREADS)
        self._known: OrderedDict[str, None] = OrderedDict()
        """Keys that the Rollouter has accepted, the latest last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _bearer(scope) if scope["type"] == "http" else ""
        if incarnation_of(key) is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._respond(key, request)
        except RequestError as refusal:
            response = refused(refusal)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _respond(self, key: str, request: Request) -> Response:
        path = path_of(request.scope).removeprefix("/v1/").strip("/")
        method = "POST" if path in _POSTED else "GET" if path.split("/")[0] == "models" else request.method
        if request.method != method:
            raise RequestError(f"/v1/{path} takes {method} requests", status=405, code="method_not_allowed")
        if key not in self._known and (refusal := await self._calls.answer(key, "models", {})).status >= 400:
            return _error(refusal)
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN_KEYS:
            self._known.popitem(last=False)
        body = await parsed(await read_body(request), _object, self._threads) if request.method == "POST" else {}
        streams = path in TURN_PATHS and body.get("stream") is True
        try:
            if streams:
                items = self._calls.stream(key, path, body)
                answer = await anext(items)
                assert isinstance(answer, GatewayResponse)
            else:
                answer = await self._calls.answer(key, path, body)
        except RequestError:
            self._known.pop(key, None)  # its Rollouter has ended, or cannot be reached
            raise
        if answer.status in (401, 409):
            self._known.pop(key, None)  # the trajectory is over
        if streams:
            if answer.status < 400:
                return _EventStream(items)
            await items.aclose()
        return _error(answer) if answer.status >= 400 else JSONResponse(answer.body)


class _EventStream(StreamingResponse):
    """The response of server-sent events. It closes their iterator, and with it the call, if the client disconnects."""

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        super().__init__(_events(items), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._items):
            try:
                await super().__call__(scope, receive, send)
            except ClientDisconnect:
                return


async def _events(items: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            yield item
    except RequestError as failure:
        yield error_event(failure)


def refused(refusal: RequestError) -> JSONResponse:
    """Return the response for a refused request. Clients repeat it only if the cause is here (status 5xx)."""
    return JSONResponse(refusal.body, refusal.status, headers=_FINAL if refusal.status < 500 else None)


async def read_body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        RequestError: the body is longer than `MAX_BODY_BYTES`, or takes longer than `BODY_S`.
        ClientDisconnect: the client has gone.
    """
    data = bytearray()
    try:
        with anyio.fail_after(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise RequestError(f"the body has more than {MAX_BODY_BYTES >> 20} MiB", status=413)
    except TimeoutError:
        raise RequestError(f"the body was not complete within {BODY_S:g} s", status=408) from None
    return bytes(data)


async def parsed(data: bytes, parse: Callable[[bytes], T], threads: anyio.CapacityLimiter) -> T:
    """Return `parse(data)`, which runs in a thread if the body is long."""
    return parse(data) if len(data) <= INLINE_BYTES else await to_thread.run_sync(parse, data, limiter=threads)


def check_json(data: bytes) -> Any:
    """Return the JSON in a body.

    Raises:
        RequestError: it may have more than `MAX_VALUES` values; or see `parse_json`.
    """
    if sum(map(data.count, _VALUE_MARKS)) > MAX_VALUES:
        raise RequestError(
            f"the body has more than {MAX_VALUES:,} commas, opening brackets and escapes \\u00…, in texts too; "
            "send fewer tokens, messages or prompts in one request",
            status=413,
        )
    try:
        return parse_json(data, finite=True, max_digits=MAX_DIGITS)
    except ValueError as error:
        raise RequestError(f"the body cannot be used: {error}") from None


def _object(data: bytes) -> dict[str, Any]:
    """Return the fields that the Rollouter reads."""
    body = check_json(data)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return {name: body[name] for name in FIELDS & body.keys()}


def _error(answer: GatewayResponse) -> JSONResponse:
    return JSONResponse(answer.body, answer.status, headers=_FINAL if answer.status < 500 else None)


def _bearer(scope: Scope) -> str:
    kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def path_of(scope: Scope) -> str:
    """Return the path of a request, wherever the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

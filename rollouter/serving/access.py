"""Decides which HTTP requests reach the engines' OpenAI API: by address, host name, API key, and the body's form.

Each check needs only what comes before the next one on the wire: a request with a wrong host name or key is refused
before its body is read.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from asyncrl.config.sections.run import LOOPBACK, ServeConfig
from asyncrl.core.failures import ConfigError
from rollouter.gateway.http import check_json, parsed, path_of, read_body, refused
from rollouter.gateway.protocol import RequestError
from rollouter.gateway.session import BODY_THREADS

HEALTH = "/health"
"""The path that load balancers probe. They have no API key, and its answer says only whether an engine is ready."""
_HOST = re.compile(r"(?:\w+://)?(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d+)?")
"""The value of `Host`, or of `Origin`, in lower case."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Which requests are answered."""

    api_key: str | None
    """The key that clients must send; None: only requests that arrive at a loopback address are answered."""
    hosts: frozenset[str] | None
    """The host names that requests may be addressed to; None allows all."""


def http_access(serve: ServeConfig) -> HttpAccess:
    """Return the checks for an address.

    On loopback only the names of loopback and `serve.allowed_hosts` are accepted: the name of a web page may resolve to
    127.0.0.1, and the page could then use the API through its visitor's browser. At other addresses an API key is
    required, which no such page has.

    Raises:
        ConfigError: the environment variable is empty, or none is configured and the address is not loopback.
    """
    hosts = None
    if serve.host in LOOPBACK:
        hosts = frozenset({"localhost", "127.0.0.1", "[::1]", *(name.lower() for name in serve.allowed_hosts)})
    if serve.api_key_env is None:
        if hosts is None:
            raise ConfigError(
                f"serve.host={serve.host!r} is reachable from outside and serve.api_key_env is not set: "
                "every client that reaches it could use the model; set serve.api_key_env, or serve.host=127.0.0.1"
            )
        return HttpAccess(None, hosts)
    key = os.environ.get(serve.api_key_env, "")
    if not key:
        raise ConfigError(
            f"serve.api_key_env={serve.api_key_env!r}: the environment variable is empty or not set; "
            f"export {serve.api_key_env}=…"
        )
    return HttpAccess(key, hosts)


def checked_app(app: ASGIApp, access: HttpAccess) -> ASGIApp:
    """Return an ASGI app that passes the requests to `app` that `access` allows and whose bodies are within limits."""
    threads = anyio.CapacityLimiter(BODY_THREADS)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)  # the API has none
            return
        headers, request = Headers(scope=scope), Request(scope, receive)
        try:
            _check_host(headers, access.hosts)
            if path_of(scope) == HEALTH:
                await app(scope, receive, send)
                return
            _check_key(headers, access.api_key)
            if access.api_key is None:
                _check_address(scope)
            body = await read_body(request)
            if body and "json" in headers.get("content-type", "json").lower():
                await parsed(body, check_json, threads)
        except RequestError as refusal:
            await refused(refusal)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await app(scope, _replay(body, receive), send)

    return checked


def _check_host(headers: Headers, allowed: frozenset[str] | None) -> None:
    if allowed is None:
        return
    for name in ("host", "origin"):
        value = headers.get(name)
        if value is None and name == "origin":
            continue  # only browsers send it
        match = _HOST.fullmatch((value or "").lower())
        if match is None or match[1] not in allowed:
            known = ", ".join(sorted(allowed))
            raise RequestError(
                f"this address answers only requests for {known}, and the request's {name.title()} is "
                f"{(value or 'missing')[:200]!r}; if it may be used, add its name to serve.allowed_hosts",
                status=421 if name == "host" else 403,
                code="host_not_allowed",
            )


def _check_key(headers: Headers, key: str | None) -> None:
    if key is None:
        return
    given = headers.get("authorization", "").encode()
    if not secrets.compare_digest(given, f"Bearer {key}".encode()):
        raise RequestError("missing or wrong API key", status=401, kind="authentication_error", code="invalid_api_key")


def _check_address(scope: Scope) -> None:
    """Require that the request has arrived at a loopback address: Ray Serve's own options (`http_options`), not
    `serve.host`, decide where a deployed application listens.

    The server's address is checked and not the client's, which is a proxy's claim (`X-Forwarded-For`)."""
    host = (scope.get("server") or ("an unknown address",))[0]
    with suppress(ValueError):
        address = ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        if (mapped or address).is_loopback:
            return
    raise RequestError(
        f"this API has no key (serve.api_key_env), so it answers on loopback only, and the request has arrived at "
        f"{host}; set serve.api_key_env, or let Ray Serve listen on 127.0.0.1 (http_options)",
        status=403,
        kind="authentication_error",
        code="api_key_required",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body, which has been read, and then what follows it."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return rest.pop() if rest else await receive()

    return replay

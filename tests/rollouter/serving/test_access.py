"""Which HTTP requests reach the engines' OpenAI API. The tests run no Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from asyncrl.config.sections.run import ServeConfig
from asyncrl.core.failures import ConfigError
from rollouter.gateway import http as http_module
from rollouter.serving.access import HttpAccess, checked_app, http_access

OPEN = HttpAccess(None, None)
LOOPBACK = http_access(ServeConfig())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers with the body it receives."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"served {body.decode()}")(scope, receive, send)


async def post(
    access: HttpAccess, headers: Mapping[str, str], content: str | bytes = "{}", url: str = "http://127.0.0.1"
) -> httpx.Response:
    """Send a request that arrives at the address of `url`."""
    transport = httpx.ASGITransport(app=checked_app(echo, access))
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        return await client.post("/v1/chat/completions", headers=dict(headers), content=content)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("proxy.example", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("evil.example@localhost", 421),
        ("127.0.0.1.evil.example", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
async def test_on_loopback_the_host_header_names_this_machine(host: str, status: int) -> None:
    access = http_access(ServeConfig(allowed_hosts=("Proxy.Example",)))
    answer = await post(access, {"host": host})
    assert answer.status_code == status
    if status != 200:
        assert "serve.allowed_hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:3000", 200), ("http://[::1]", 200), ("https://evil.example", 403), ("null", 403)],
)
async def test_on_loopback_web_pages_of_other_hosts_are_refused(origin: str, status: int) -> None:
    assert (await post(LOOPBACK, {"origin": origin})).status_code == status


def test_web_sockets_are_closed() -> None:
    client = TestClient(checked_app(echo, LOOPBACK), base_url="http://localhost")
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass


async def test_other_addresses_need_a_key_and_accept_every_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reachable from outside"):
        http_access(ServeConfig(host="0.0.0.0"))
    serve = ServeConfig(host="0.0.0.0", api_key_env="SERVE_TEST_KEY")
    monkeypatch.setenv("SERVE_TEST_KEY", "")
    with pytest.raises(ConfigError, match="export SERVE_TEST_KEY="):
        http_access(serve)
    monkeypatch.setenv("SERVE_TEST_KEY", "secret")
    access = http_access(serve)
    assert access == HttpAccess("secret", None)
    answer = await post(access, {"host": "node-7", "authorization": "Bearer secret"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.2", 200),
        ("[::1]", 200),
        ("[::ffff:127.0.0.1]", 200),
        ("10.0.0.1", 403),
        ("[::ffff:10.0.0.1]", 403),
        ("[fe80::1%25eth0]", 403),
    ],
)
async def test_without_a_key_requests_from_elsewhere_are_refused_wherever_serve_listens(
    address: str, status: int
) -> None:
    headers = {"host": "localhost", "x-forwarded-for": "127.0.0.1"}
    answer = await post(LOOPBACK, headers, url=f"http://{address}")
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["code"] == "api_key_required"
    keyed = HttpAccess("secret", LOOPBACK.hosts)
    assert (await post(keyed, headers | {"authorization": "Bearer secret"}, url=f"http://{address}")).status_code == 200


def client_that_must_not_be_read() -> Receive:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    return receive


@pytest.mark.parametrize(
    ("access", "headers", "status"),
    [
        (HttpAccess("secret", None), {}, 401),
        (HttpAccess("secret", None), {"authorization": "Bearer wrong"}, 401),
        (HttpAccess("secret", None), {"authorization": "secret"}, 401),
        (HttpAccess("é", None), {"authorization": "Bearer \xff"}, 401),
        (LOOPBACK, {"host": "evil.example"}, 421),
    ],
)
async def test_key_and_host_are_checked_before_the_body_is_read(
    access: HttpAccess, headers: Mapping[str, str], status: int
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": pairs}
    await checked_app(echo, access)(scope, client_that_must_not_be_read(), send)
    assert sent[0]["status"] == status and "secret" not in str(sent)


@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {}], ids=["JSON", "no content type"])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (json.dumps({"a": "é"}), 200),
        ("[" * 100_000, 400),
        ('{"max_tokens": ' + "9" * 5000 + "}", 400),
        ('{"temperature": NaN}', 400),
        (b'{"a": "\xff"}', 400),
        (" " * 2001, 413),
    ],
)
async def test_bodies_are_checked_and_passed_on(
    content: str | bytes, status: int, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_BYTES", 150_000 if content != " " * 2001 else 2000)
    answer = await post(OPEN, headers, content)
    assert answer.status_code == status
    if status == 200:
        assert answer.text == f"served {content!s}"
    else:
        assert "the body" in answer.json()["error"]["message"]


async def test_bodies_of_too_many_values_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    long = json.dumps({"prompt": [1] * 2**18, "image": "data:image/png;base64," + "A" * 2**20})
    assert (await post(OPEN, {}, long)).text == f"served {long}"
    monkeypatch.setattr(http_module, "parse_json", Mock(side_effect=AssertionError("parsed")))
    answer = await post(OPEN, {}, f"[{'{},' * 500_001}1]")
    assert answer.status_code == 413 and "more than 1,000,000 commas" in answer.json()["error"]["message"]


async def test_the_app_hears_of_a_client_that_disconnects_after_its_body() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"[1", "more_body": True},
        {"type": "http.request", "body": b"]", "more_body": False},
        {"type": "http.disconnect"},
    ]
    heard: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([await receive(), await receive()])

    async def send(message: Message) -> None: ...

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    scope["server"] = ("127.0.0.1", 8000)
    await checked_app(app, OPEN)(scope, receive, send)
    assert heard == [{"type": "http.request", "body": b"[1]", "more_body": False}, {"type": "http.disconnect"}]

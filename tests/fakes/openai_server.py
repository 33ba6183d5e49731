"""A local HTTP server that plays an OpenAI-compatible endpoint from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from tests.fakes.hostile import dumps


@dataclass(frozen=True)
class ServerAnswer:
    """Status and body of one response; a body that is text is sent unchanged."""

    body: Mapping[str, Any] | str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = "application/json"


class Hang:
    """No response at all; the server waits until the client disconnects."""


class HangUp:
    """The server closes the connection instead of responding."""


Script = ServerAnswer | Hang | HangUp
Handler = Callable[[Mapping[str, Any]], Script]


def chat_answer(content: str | None, *, finish_reason: str = "stop", refusal: str | None = None) -> ServerAnswer:
    message = {"role": "assistant", "content": content, "refusal": refusal}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return ServerAnswer({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def error_answer(status: int, message: str = "no", **headers: str) -> ServerAnswer:
    return ServerAnswer(
        {"error": {"message": message}}, status, {name.replace("_", "-"): v for name, v in headers.items()}
    )


class OpenAIServer:
    """Records requests, and answers with those of the script in order or with those of a handler."""

    def __init__(self, script: Sequence[Script] | Handler) -> None:
        self._script = script
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.open = 0
        """Number of requests that are not answered yet."""
        self.most_open = 0
        self.base_url = ""
        self.hanging = anyio.Event()
        """Set once a request hangs."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head.splitlines()[1:])
            }
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.keys.append(headers.get("authorization", ""))
            self.requests.append(body)
            answer = self._script(body) if callable(self._script) else self._script[len(self.requests) - 1]
            if isinstance(answer, Hang):
                self.hanging.set()
                await reader.read()
            elif isinstance(answer, ServerAnswer):
                writer.write(_response(answer))
                await writer.drain()
        finally:
            self.open -= 1
            writer.close()


def _response(answer: ServerAnswer) -> bytes:
    text = answer.body if isinstance(answer.body, str) else dumps(answer.body)
    lines = [
        f"HTTP/1.1 {answer.status} X",
        f"content-type: {answer.kind}",
        f"content-length: {len(text.encode())}",
        "connection: close",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
    ]
    return "\r\n".join([*lines, "", text]).encode()


@asynccontextmanager
async def openai_server(script: Sequence[Script] | Handler) -> AsyncIterator[OpenAIServer]:
    played = OpenAIServer(script)
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    played.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield played
    finally:
        server.close()
        await server.wait_closed()

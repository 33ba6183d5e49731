"""Servers of the Model Context Protocol as tools: one session per server and run, held by a task of its own.

    attempt ─▶ enter the client ─▶ list its tools ─▶ calls, from any task ─▶ lost, or closed ─▶ leave the client
       ▲                                                        │
       └────────────── a call that finds it lost asks for another one

The client's cancel scopes must be left in the task that entered them, so that task does nothing else. A server that
has died is started, or connected to, once more by the next call; calls that were lost with it share that attempt.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

import anyio
from anyio import to_thread
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from mcp_types import Tool as ServedTool

from asyncrl.config.schema import McpServerConfig
from asyncrl.failures import AsyncRLError, ConfigError, InfraError, first_failure
from rollouter.tools.base import BaseTool, ToolError
from rollouter.tools.last_words import LastWords
from rollouter.user_code import nearest

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Until a server that is told to end is left alone. A process is killed well before."""
MAX_PAGES = 100
"""Of a server's list of tools."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class Offered(NamedTuple):
    """A tool of a server."""

    name: str
    """As the model has it; the server may use letters that a function's name has not."""
    schema: Mapping[str, Any]
    tool: BaseTool[None]


class McpServer:
    """One server of the configuration. `run` holds its session; everything else may be called from any task."""

    def __init__(self, config: McpServerConfig, key: str) -> None:
        """`key`: where it is configured, for errors."""
        self._config = config
        self._key = key
        self._attempt = _Attempt()
        self._wanted = anyio.Event()
        self._closing = False
        self._over = anyio.CancelScope()

    async def run(self) -> None:
        """Hold a session, and another one when somebody asks for it, until `close`."""
        with self._over:
            while not self._closing:
                attempt = self._attempt
                await self._hold(attempt)
                attempt.settle(_Lost("the session has ended"))
                if not self._closing:
                    await self._wanted.wait()
                    self._wanted = anyio.Event()

    def close(self) -> None:
        """Let `run` end, and the server with it."""
        self._closing = True
        self._over.deadline = anyio.current_time() + CLOSE_S
        self._attempt.left.set()
        self._wanted.set()

    async def offered(self) -> list[Offered]:
        """The tools that it offers, once it has told.

        Raises:
            ConfigError: it cannot be started, or has none of the tools that are named.
            InfraError: it ended, or did not tell in `start_s`.
        """
        await self._attempt.settled.wait()
        if isinstance(self._attempt.error, AsyncRLError):
            raise self._attempt.error
        if (error := self._attempt.error) is not None:
            raise InfraError(f"{self._key}: {self} failed: {error or type(error).__name__}{self._attempt.words}")
        served = {tool.name: tool for tool in self._attempt.tools}
        for name in self._config.tools:
            if name not in served:
                raise ConfigError(f"{self._key}.tools: {self} has no tool {name!r}{nearest(name, list(served))}")
        return [self._offer(served[name]) for name in self._config.tools or served]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the server's tool answers.

        Raises:
            ToolError: the server says that the call was wrong.
            Exception: it is gone, and another attempt did not help; or it does not answer as the protocol has it.
        """
        attempt = self._attempt
        try:
            return _text(await attempt.call(name, arguments))
        except _Lost:
            return _text(await (await self._another(attempt)).call(name, arguments))

    def __str__(self) -> str:
        return f"the server at {self._config.url}" if self._config.url else f"server `{' '.join(self._config.command)}`"

    def _offer(self, served: ServedTool) -> Offered:
        name = _NOT_IN_NAMES.sub("_", served.name)[:64]
        function = {"name": name, "description": served.description or "", "parameters": served.input_schema}
        return Offered(name, {"type": "function", "function": function}, McpTool(self, served.name))

    async def _another(self, lost: _Attempt) -> _Attempt:
        """The attempt after `lost`, begun by whoever asks first."""
        if self._closing:
            raise _Lost(f"{self} is closed")
        if self._attempt is lost:
            logger.warning("%s: %s is gone; it is started or connected to once more", self._key, self)
            self._attempt = _Attempt()
            lost.left.set()
            self._wanted.set()
        attempt = self._attempt
        await attempt.settled.wait()
        if attempt.error is not None:
            raise _Lost(f"{self} is gone, and could not be reached again: {attempt.error}") from attempt.error
        return attempt

    async def _hold(self, attempt: _Attempt) -> None:
        """Enter the client, and leave it when the attempt is left. What goes wrong before is the attempt's error."""
        config = self._config
        # The deadline is lifted once the server has told, not left: the client's own scopes are inside this one.
        words = LastWords()
        with anyio.CancelScope(deadline=anyio.current_time() + config.start_s) as scope:
            try:
                async with self._client(words.file) as client:
                    words.close()
                    tools = await _all_tools(client)
                    scope.deadline = math.inf
                    attempt.settle(client=client, tools=tools)
                    await attempt.left.wait()
            except Exception as failures:  # noqa: BLE001  whatever a transport raises ends this attempt, and nothing else
                error = first_failure(failures)
                if attempt.settled.is_set():
                    logger.warning("%s: leaving %s failed: %s", self._key, self, error)
                elif isinstance(error, OSError) and config.command:
                    attempt.settle(
                        ConfigError(f"{self._key}.command: {config.command[0]!r} cannot be started: {error.strerror}")
                    )
                else:
                    attempt.words = await _ending(words)
                    attempt.settle(error)
            finally:
                words.close()
        if scope.cancelled_caught:
            told = await _ending(words) if not attempt.settled.is_set() else ""
            attempt.settle(
                InfraError(f"{self._key}: {self} has not told of its tools within start_s = {config.start_s:g} s{told}")
            )

    def _client(self, errors: TextIO) -> Client:
        if self._config.url is not None:
            return Client(self._config.url, cache=None)
        program, *arguments = self._config.command
        parameters = StdioServerParameters(command=program, args=arguments, env=self._config.env)
        return Client(stdio_client(parameters, errlog=errors), cache=None)


async def _ending(words: LastWords) -> str:
    """The end of a message about a server, with what it said last."""
    words.close()
    told = await to_thread.run_sync(words.told)
    return f"; the last that it said:\n{told}" if told else ""


class McpTool(BaseTool[None]):
    """One tool of a server."""

    def __init__(self, server: McpServer, name: str) -> None:
        """`name`: the server's."""
        self._server = server
        self._name = name

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]  # a row has nothing to add
        return await self._server.call(self._name, arguments)


class _Lost(Exception):
    """The session has ended, or never was."""


class _Attempt:
    """One session, from the wish for it to its end."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        """It has told of its tools, or failed."""
        self.left = anyio.Event()
        """Nobody wants it any more."""
        self.error: Exception | BaseException | None = None
        self.words = ""
        """What a server that failed said last."""
        self.tools: list[ServedTool] = []
        self._client: Client | None = None

    def settle(
        self, error: BaseException | None = None, *, client: Client | None = None, tools: list[ServedTool] | None = None
    ) -> None:
        """Say how it went; what is said later counts for nothing."""
        if not self.settled.is_set():
            self.error, self._client, self.tools = error, client, tools or []
            self.settled.set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        await self.settled.wait()
        if self._client is None or self.left.is_set():
            raise _Lost(str(self.error or "the session has ended"))
        try:
            return await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise _Lost(str(error)) from error
            raise
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError) as error:
            raise _Lost(f"{type(error).__name__}: {error}") from error


async def _all_tools(client: Client) -> list[ServedTool]:
    tools: list[ServedTool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools


def _text(result: CallToolResult) -> str:
    """The texts of a result, one below the other; what is none is named.

    Raises:
        ToolError: it is an error, with that text.
    """
    parts: list[str] = []
    for content in result.content:
        if isinstance(content, TextContent):
            parts.append(content.text)
        elif isinstance(content, EmbeddedResource) and isinstance(content.resource, TextResourceContents):
            parts.append(content.resource.text)
        else:
            parts.append(f"[{content.type} left out]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text or "the call failed")
    return text

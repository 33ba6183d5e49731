"""Tools of Model Context Protocol servers. Each server has one connection per run, which is one task.

    connect ─▶ enter the client ─▶ list its tools ─▶ calls, from any task ─▶ lost, or closed ─▶ leave the client
       ▲                                                        │
       └────────────── a call that finds it lost requests another connection

The client's cancel scopes must be exited in the task that entered them, so this task does nothing else. If a server has
died, the next call restarts it or reconnects to it. All calls that were lost with it use the new connection.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from mcp_types import Tool as ServedTool

from asyncrl.config.import_path import nearest
from asyncrl.config.interpolation import reveal
from asyncrl.config.sections.rollout import McpServerConfig
from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError, conceal, first_failure
from rollouter.tools.base import BaseTool, ToolError

MAX_LINES = 20
MAX_LINE_CHARS = 500
END_S = 1.0
"""Time to wait for the last lines of a process that has ended."""


class StderrTail:
    """Forwards a process's standard error to this process's, and keeps the last lines for error messages. It replaces
    secrets that this process has read.

    A thread reads the pipe until the process and `close` have closed their ends.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")
        """The file to use as the process's standard error."""
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True, name="stderr-tail")
        self._thread.start()

    def close(self) -> None:
        """Close `file` in this process, once the other process has inherited it."""
        self.file.close()

    def read(self) -> str:
        """Return the last lines. Blocks for at most `END_S` if the process has not ended."""
        self._thread.join(END_S)
        return "\n".join(self._lines)

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as lines:
            for line in lines:
                line = conceal(line)
                self._lines.append(line.rstrip()[:MAX_LINE_CHARS])
                if sys.__stderr__ is not None:
                    sys.__stderr__.write(line)


logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Deadline for leaving a client that is no longer needed. The client kills its process well before that."""
MAX_PAGES = 100
"""Maximum number of pages of a server's list of tools."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class McpServer:
    """A configured server. Its connections are tasks of `group`; all methods may be called from any task."""

    def __init__(self, config: McpServerConfig, key: str, group: TaskGroup) -> None:
        """Begin to connect. `key` is the server's configuration key, for errors."""
        self._config = config
        self._key = key
        self._group = group
        self._closing = False
        self._connection = self._connect()

    def close(self) -> None:
        """Begin to end the connection, and the server with it."""
        self._closing = True
        self._connection.end()

    def _connect(self) -> _Connection:
        connection = _Connection()
        self._group.start_soon(self._keep, connection)
        return connection

    async def offered(self) -> list[McpTool]:
        """Return the server's tools, once it has listed them.

        Raises:
            ConfigError: the server cannot be started, or lacks a configured tool.
            InfraError: the server ended, or did not list its tools within `start_s`.
        """
        connection = self._connection
        await connection.settled.wait()
        if isinstance(connection.error, AsyncRLError):
            raise connection.error
        if (error := connection.error) is not None:
            raise InfraError(f"{self._key}: {self} failed: {error or type(error).__name__}{connection.stderr}")
        served = {tool.name: tool for tool in connection.tools}
        for name in self._config.tools:
            if name not in served:
                raise ConfigError(f"{self._key}.tools: {self} has no tool {name!r}{nearest(name, list(served))}")
        return [McpTool(self, served[name]) for name in self._config.tools or served]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call the server's tool and return the text of its answer.

        Raises:
            ToolError: the server reports an error.
            Exception: the connection is lost and cannot be restored, or the server's answer violates the protocol.
        """
        connection = self._connection
        try:
            return _text(await connection.call(name, arguments))
        except _ConnectionLost:
            return _text(await (await self._reconnected(connection)).call(name, arguments))

    def __str__(self) -> str:
        return f"the server at {self._config.url}" if self._config.url else f"server `{' '.join(self._config.command)}`"

    async def _reconnected(self, lost: _Connection) -> _Connection:
        """Return the connection that replaces `lost`. The first caller opens it."""
        if self._closing:
            raise _ConnectionLost(f"{self} is closed")
        if self._connection is lost:
            logger.warning("%s: the connection to %s is lost; connecting again", self._key, self)
            lost.end()
            self._connection = self._connect()
        connection = self._connection
        await connection.settled.wait()
        if connection.error is not None:
            # The model sees the first 200 characters, and the server's name may be a long path.
            message = f"the server could not be reached again: {connection.error}; it is {self}"
            raise _ConnectionLost(message) from connection.error
        return connection

    async def _keep(self, connection: _Connection) -> None:
        """Enter the client, and leave it when `connection.leave` is set. A failure to connect becomes the connection's
        error."""
        config = self._config
        # The scope stays open after the start, without a deadline: the client's own scopes are inside it.
        connection.scope.deadline = min(connection.scope.deadline, anyio.current_time() + config.start_s)
        tail = StderrTail()
        with connection.scope:
            try:
                async with self._client(tail.file) as client:
                    tail.close()
                    tools = await _all_tools(client)
                    if not connection.leave.is_set():
                        connection.scope.deadline = math.inf
                    connection.settle(client=client, tools=tools)
                    await connection.leave.wait()
            except Exception as failures:  # noqa: BLE001  an exception of a transport ends only this connection
                error = first_failure(failures)
                if connection.settled.is_set():
                    logger.warning("%s: leaving %s failed: %s", self._key, self, conceal(str(error)))
                elif isinstance(error, OSError) and config.command:
                    connection.settle(
                        ConfigError(f"{self._key}.command: {config.command[0]!r} cannot be started: {error.strerror}")
                    )
                else:
                    connection.stderr = await _stderr_note(tail)
                    connection.settle(error)
            finally:
                tail.close()
        if connection.scope.cancelled_caught and not connection.settled.is_set():
            message = f"{self._key}: {self} did not list its tools within start_s = {config.start_s:g} s"
            connection.settle(InfraError(message + await _stderr_note(tail)))

    def _client(self, errors: TextIO) -> Client:
        if self._config.url is not None:
            return Client(reveal(self._config.url, f"{self._key}.url"), cache=None)
        program, *arguments = self._config.command
        env = reveal(self._config.env, f"{self._key}.env")
        parameters = StdioServerParameters(command=program, args=arguments, env=env)
        return Client(stdio_client(parameters, errlog=errors), cache=None)


async def _stderr_note(tail: StderrTail) -> str:
    """Return the end of an error message, with the last lines of the server's standard error."""
    tail.close()
    lines = await to_thread.run_sync(tail.read)
    return f"; its standard error ends with:\n{lines}" if lines else ""


class McpTool(BaseTool[None]):
    """One tool of a server."""

    def __init__(self, server: McpServer, served: ServedTool) -> None:
        self._server = server
        self._served = served

    def function_schema(self) -> Mapping[str, Any]:
        """Return the schema. Characters of the server's tool name that function names cannot contain are replaced."""
        name = _NOT_IN_NAMES.sub("_", self._served.name)[:64]
        description, parameters = self._served.description or "", self._served.input_schema
        return {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]  # no kwargs of a row
        return await self._server.call(self._served.name, arguments)


class _ConnectionLost(Exception):
    """The connection has ended, or was never established."""


class _Connection:
    """One connection to a server, from the request for it to its end."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        """Set when the server has listed its tools, or failed."""
        self.leave = anyio.Event()
        """Set when the connection is no longer needed."""
        self.scope = anyio.CancelScope()
        self.error: BaseException | None = None
        self.stderr = ""
        """The last lines of the server's standard error, as the end of an error message; set if connecting failed."""
        self.tools: list[ServedTool] = []
        self._client: Client | None = None

    def end(self) -> None:
        """Leave the client, within `CLOSE_S`."""
        self.leave.set()
        self.scope.deadline = anyio.current_time() + CLOSE_S

    def settle(
        self, error: BaseException | None = None, *, client: Client | None = None, tools: list[ServedTool] | None = None
    ) -> None:
        """Store the result of connecting; later results are ignored."""
        if not self.settled.is_set():
            self.error, self._client, self.tools = error, client, tools or []
            self.settled.set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        await self.settled.wait()
        if self._client is None or self.leave.is_set():
            raise _ConnectionLost(str(self.error or "the session has ended"))
        try:
            return await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise _ConnectionLost(str(error)) from error
            raise
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError) as error:
            raise _ConnectionLost(f"{type(error).__name__}: {error}") from error


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
    """Return the texts of a result, one per line. Of other content, only the type is returned.

    Raises:
        ToolError: the result is an error.
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

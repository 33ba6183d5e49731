"""Servers of tools: real ones, as processes over their standard streams and over HTTP on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from asyncrl.config.schema import ToolConfig
from asyncrl.failures import ConfigError, InfraError
from rollouter.drops import ToolFailedError
from rollouter.tools import ToolContext
from rollouter.tools.box import ToolBox
from rollouter.tools.loading import load_tools

SERVER = '''
import sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

@server.tool(name="fail.now", structured_output=False)
def fail() -> str:
    """Fails."""
    raise ToolError("not today")

@server.tool(structured_output=False)
def draw() -> list:
    """Draws."""
    return [TextContent(type="text", text="a line"), ImageContent(type="image", data="AAAA", mime_type="image/png")]

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''

QUICK = """
import json, os, sys

schema = {"type": "object", "properties": {}}
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params", {})
    answer = {"error": {"code": -32601, "message": "there is no such method"}}
    if method == "initialize":
        info = {"name": "quick", "version": "1"}
        told = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        answer = {"result": told}
    elif method == "tools/list" and not params.get("cursor"):
        answer = {"result": {"tools": [{"name": "who.is", "inputSchema": schema}], "nextCursor": "more"}}
    elif method == "tools/list":
        answer = {"result": {"tools": [{"name": name, "inputSchema": schema} for name in ("die", "wait", "break")]}}
    elif method == "tools/call" and params["name"] == "who.is":
        text = f"{os.getpid()} {os.environ.get('COLOUR')}"
        answer = {"result": {"content": [{"type": "text", "text": text}]}}
    elif method == "tools/call" and params["name"] == "die":
        os._exit(3)
    elif method == "tools/call" and params["name"] == "wait":
        continue
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
"""The same over the same protocol, by hand: it starts in no time, and knows of nothing new."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "quick.py"
    path.write_text(QUICK)
    return str(path)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


def box_of(server: Mapping[str, Any], **settings: Any) -> ToolBox:
    return ToolBox(load_tools([ToolConfig.model_validate({"mcp": server, **settings})]))


def stdio(program: str, **server: Any) -> dict[str, Any]:
    return {"command": [sys.executable, program], "env": {"COLOUR": "green"}, **server}


async def call(box: ToolBox, name: str, /, **arguments: Any) -> tuple[str, str]:
    async with box.session(ToolContext("val", 0)) as tools:
        called = (await tools.call(name, json.dumps(arguments), turn=0)).call
    return called.status, called.result


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def names(box: ToolBox) -> Sequence[str]:
    return [schema["function"]["name"] for schema in box.schemas]


async def who(box: ToolBox) -> int:
    """The server's process."""
    status, text = await call(box, "who_is")
    assert status == "ok"
    return int(text.split()[0])


async def test_a_server_offers_its_tools_to_many_trajectories(program: str) -> None:
    async with box_of(stdio(program), max_concurrency=4) as box:
        assert names(box) == ["add", "fail_now", "draw"]
        function = box.schemas[0]["function"]
        assert function["description"] == "Adds." and function["parameters"]["required"] == ["a", "b"]
        assert (await call(box, "add", a=2))[0] == "bad_arguments"
        status, text = await call(box, "fail_now")
        assert status == "refused" and "not today" in text
        assert await call(box, "draw") == ("ok", "a line\n[image left out]")
        found: dict[int, str] = {}

        async def one(number: int) -> None:
            found[number] = (await call(box, "add", a=number, b=1))[1]

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, number)
        assert found == {number: str(number + 1) for number in range(40)}


async def test_a_process_has_its_environment_and_is_gone_with_the_box(quick: str) -> None:
    before = children()
    async with box_of(stdio(quick)) as box:
        assert names(box) == ["who_is", "die", "wait", "break"]
        assert await who(box) in children()
        assert (await call(box, "who_is"))[1].endswith(" green")
        status, text = await call(box, "break")
        assert status == "raised" and "there is no such method" in text
    assert children() == before


async def test_only_the_tools_that_are_named_are_offered(quick: str) -> None:
    async with box_of(stdio(quick, tools=["wait", "who.is"])) as box:
        assert names(box) == ["wait", "who_is"]
        assert (await call(box, "die"))[0] == "unknown_tool"


async def test_a_server_that_dies_while_nobody_calls_is_started_once_more(quick: str) -> None:
    before = children()
    async with box_of(stdio(quick)) as box:
        first = await who(box)
        os.kill(first, signal.SIGKILL)
        second = await who(box)
        assert first != second == await who(box)
    assert children() == before


@pytest.mark.parametrize("on_error", ["message", "drop"])
async def test_a_call_that_kills_every_server_fails_as_on_error_says(quick: str, on_error: Any) -> None:
    before = children()
    async with box_of(stdio(quick), on_error=on_error) as box:
        if on_error == "drop":
            with pytest.raises(ToolFailedError, match="tool die failed"):
                await call(box, "die")
        else:
            status, text = await call(box, "die")
            assert status == "raised" and "die failed" in text
        assert await who(box), "the next call has another server"
    assert children() == before


async def test_calls_that_a_death_has_lost_share_one_attempt(quick: str) -> None:
    async with box_of(stdio(quick)) as box:
        first = await who(box)
        waiting: list[tuple[str, str]] = []
        pids: set[int] = set()

        async def wait() -> None:
            waiting.append(await call(box, "wait"))

        async def ask() -> None:
            pids.add(await who(box))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            os.kill(first, signal.SIGKILL)
            async with anyio.create_task_group() as asking:
                for _ in range(8):
                    asking.start_soon(ask)
            assert len(pids) == 1 and first not in pids and not waiting
            group.cancel_scope.cancel()


async def test_a_call_that_takes_too_long_leaves_the_session_whole(quick: str) -> None:
    async with box_of(stdio(quick), timeout_s=0.3) as box:
        pid = await who(box)
        assert await call(box, "wait") == ("timeout", "Error: wait did not answer within 0.3 s")
        with anyio.move_on_after(0.1):
            await call(box, "wait")
        assert await who(box) == pid


async def test_a_server_that_cannot_be_started_again_is_told_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "server.py"
    path.write_text(QUICK)
    async with box_of(stdio(str(path))) as box:
        pid = await who(box)
        path.write_text("raise SystemExit(1)")
        os.kill(pid, signal.SIGKILL)
        status, text = await call(box, "who_is")
        assert status == "raised" and "could not be reached again" in text
        path.write_text(QUICK)
        assert await who(box), "each call tries once"


async def test_nothing_is_left_when_the_run_is_cancelled_or_fails(quick: str) -> None:
    before = children()
    with anyio.CancelScope() as scope:
        async with box_of(stdio(quick)) as box, anyio.create_task_group() as group:
            group.start_soon(call, box, "wait")
            assert len(children()) == len(before) + 1
            scope.cancel()
    assert children() == before
    with pytest.raises(ZeroDivisionError):
        async with box_of(stdio(quick)):
            raise ZeroDivisionError
    assert children() == before


@pytest.mark.parametrize(
    ("server", "kind", "told"),
    [
        ({"command": ["no-such-program-anywhere"]}, ConfigError, r"tools\.0\.mcp\.command: 'no-such-program-anywhere'"),
        (
            {"command": [sys.executable, "-c", "raise SystemExit('no such library')"]},
            InfraError,
            r"tools\.0\.mcp: .* failed: .*; the last that it said:\nno such library$",
        ),
        (
            {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_s": 0.5},
            InfraError,
            r"has not told of its tools within start_s = 0\.5 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, InfraError, "the server at http://127.0.0.1:9/mcp"),
    ],
    ids=["unknown", "ends", "hangs", "nobody"],
)
async def test_a_server_that_does_not_start_is_told_at_once(
    server: dict[str, Any], kind: type[Exception], told: str
) -> None:
    before = children()
    with pytest.raises(kind, match=told):
        async with box_of(server):
            raise AssertionError("it is open")
    assert children() == before


async def test_a_tool_that_the_server_has_not_is_a_mistake(quick: str) -> None:
    with pytest.raises(ConfigError, match=r"tools\.0\.mcp\.tools: .* has no tool 'whois'; did you mean 'who\.is'"):
        async with box_of(stdio(quick, tools=["whois"])):
            raise AssertionError("it is open")


async def test_a_name_that_another_tool_has_is_a_mistake(quick: str) -> None:
    configs = [{"class_name": "calculator", "config": {"name": "who_is"}}, {"mcp": stdio(quick)}]
    before = children()
    with pytest.raises(ConfigError, match=r"tools\.1: its tool is called 'who_is', as is that of .*tools\.0"):
        async with ToolBox(load_tools([ToolConfig.model_validate(config) for config in configs])):
            raise AssertionError("it is open")
    assert children() == before


# ------------------------------------------------------------------------------------------------ HTTP


@asynccontextmanager
async def serving(program: str, port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The server on a port of this machine, once it listens."""
    process = subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        with anyio.fail_after(30):
            while not await _listens(port):  # noqa: ASYNC110  another process has no events
                await anyio.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


async def _listens(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_server_over_http_is_reached_and_reached_again(program: str) -> None:
    port = free_port()
    url = {"url": f"http://127.0.0.1:{port}/mcp"}
    async with serving(program, port) as process, box_of(url) as box:
        assert await call(box, "add", a=2, b=3) == ("ok", "5")
        process.kill()
        process.wait()
        status, text = await call(box, "add", a=2, b=3)
        assert status == "raised" and "could not be reached again" in text
        async with serving(program, port):
            assert await call(box, "add", a=2, b=4) == ("ok", "6")

"""Real tool servers: processes with standard streams, and servers over HTTP on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core.failures import ConfigError, InfraError
from rollouter.drop_policy import ToolFailedError
from rollouter.tools import ToolContext
from rollouter.tools.loading import load_tools
from rollouter.tools.toolbox import Toolbox

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
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        answer = {"result": result}
    elif method == "tools/list" and not params.get("cursor"):
        answer = {"result": {"tools": [{"name": "who.is", "inputSchema": schema}], "nextCursor": "more"}}
    elif method == "tools/list":
        names = ("die", "wait", "break", "odd")
        answer = {"result": {"tools": [{"name": name, "inputSchema": schema} for name in names]}}
    elif method == "tools/call" and params["name"] == "who.is":
        text = f"{os.getpid()} {os.environ.get('COLOUR')}"
        answer = {"result": {"content": [{"type": "text", "text": text}]}}
    elif method == "tools/call" and params["name"] == "die":
        os._exit(3)
    elif method == "tools/call" and params["name"] == "wait":
        continue
    elif method == "tools/call" and params["name"] == "odd":
        content = params["arguments"]["content"]
        print(f'{{"jsonrpc": "2.0", "id": {asked["id"]}, "result": {{"content": [{content}]}}}}', flush=True)
        continue
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
"""A hand-written server of the protocol, which starts in milliseconds."""


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


def box_of(server: Mapping[str, Any], **settings: Any) -> Toolbox:
    return Toolbox(load_tools([ToolConfig.model_validate({"mcp": server, **settings})]))


def stdio(program: str, **server: Any) -> dict[str, Any]:
    return {"command": [sys.executable, program], "env": {"COLOUR": "green"}, **server}


async def call(toolbox: Toolbox, name: str, /, **arguments: Any) -> tuple[str, str]:
    async with toolbox.session(ToolContext("val", 0)) as tools:
        called = (await tools.call(name, json.dumps(arguments), turn=0)).call
    return called.status, called.result


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def no_process_remains() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def names(toolbox: Toolbox) -> Sequence[str]:
    return [schema["function"]["name"] for schema in toolbox.schemas]


async def server_pid(toolbox: Toolbox) -> int:
    """Return the pid of the server's process."""
    status, text = await call(toolbox, "who_is")
    assert status == "ok"
    return int(text.split()[0])


async def test_a_server_offers_its_tools_to_many_trajectories(program: str) -> None:
    async with box_of(stdio(program), max_concurrency=4) as toolbox:
        assert names(toolbox) == ["add", "fail_now", "draw"]
        function = toolbox.schemas[0]["function"]
        assert function["description"] == "Adds." and function["parameters"]["required"] == ["a", "b"]
        assert (await call(toolbox, "add", a=2))[0] == "bad_arguments"
        status, text = await call(toolbox, "fail_now")
        assert status == "refused" and "not today" in text
        assert await call(toolbox, "draw") == ("ok", "a line\n[image left out]")
        found: dict[int, str] = {}

        async def one(number: int) -> None:
            found[number] = (await call(toolbox, "add", a=number, b=1))[1]

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, number)
        assert found == {number: str(number + 1) for number in range(40)}


async def test_a_server_process_gets_its_environment_and_ends_with_the_toolbox(quick: str) -> None:
    async with box_of(stdio(quick)) as toolbox:
        assert names(toolbox) == ["who_is", "die", "wait", "break", "odd"]
        assert await server_pid(toolbox) in children()
        assert (await call(toolbox, "who_is"))[1].endswith(" green")
        status, text = await call(toolbox, "break")
        assert status == "raised" and "there is no such method" in text


async def test_only_configured_tools_are_offered(quick: str) -> None:
    async with box_of(stdio(quick, tools=["wait", "who.is"])) as toolbox:
        assert names(toolbox) == ["wait", "who_is"]
        assert (await call(toolbox, "die"))[0] == "unknown_tool"


@pytest.mark.parametrize("on_error", ["message", "drop"])
async def test_on_error_decides_how_a_call_that_kills_every_server_fails(quick: str, on_error: Any) -> None:
    async with box_of(stdio(quick), on_error=on_error) as toolbox:
        if on_error == "drop":
            with pytest.raises(ToolFailedError, match="tool die failed"):
                await call(toolbox, "die")
        else:
            status, text = await call(toolbox, "die")
            assert status == "raised" and "die failed" in text
        assert await server_pid(toolbox), "the next call starts another server"


async def test_calls_lost_with_a_server_share_one_reconnection(quick: str) -> None:
    async with box_of(stdio(quick)) as toolbox:
        first = await server_pid(toolbox)
        waiting: list[tuple[str, str]] = []
        pids: set[int] = set()

        async def wait() -> None:
            waiting.append(await call(toolbox, "wait"))

        async def ask() -> None:
            pids.add(await server_pid(toolbox))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            os.kill(first, signal.SIGKILL)
            async with anyio.create_task_group() as asking:
                for _ in range(8):
                    asking.start_soon(ask)
            assert len(pids) == 1 and first not in pids and not waiting
            group.cancel_scope.cancel()


async def test_a_call_timeout_keeps_the_connection(quick: str) -> None:
    async with box_of(stdio(quick), timeout_s=0.3) as toolbox:
        pid = await server_pid(toolbox)
        assert await call(toolbox, "wait") == ("timeout", "Error: wait did not answer within 0.3 s")
        with anyio.move_on_after(0.1):
            await call(toolbox, "wait")
        assert await server_pid(toolbox) == pid


async def test_a_failed_restart_of_a_server_is_reported_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 50) / "server.py"
    path.parent.mkdir()
    path.write_text(QUICK)
    async with box_of(stdio(str(path))) as toolbox:
        pid = await server_pid(toolbox)
        path.write_text("raise SystemExit(1)")
        os.kill(pid, signal.SIGKILL)
        status, text = await call(toolbox, "who_is")
        assert status == "raised" and "could not be reached again" in text
        path.write_text(QUICK)
        assert await server_pid(toolbox), "each call tries once to restart the server"


async def test_no_process_remains_when_the_run_is_cancelled_or_fails(quick: str) -> None:
    first = children()
    with anyio.CancelScope() as scope:
        async with box_of(stdio(quick)) as toolbox, anyio.create_task_group() as group:
            group.start_soon(call, toolbox, "wait")
            assert len(children()) == len(first) + 1
            scope.cancel()
    assert children() == first
    with pytest.raises(ZeroDivisionError):
        async with box_of(stdio(quick)):
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        ({"command": ["no-such-program-anywhere"]}, ConfigError, r"tools\.0\.mcp\.command: 'no-such-program-anywhere'"),
        (
            {"command": [sys.executable, "-c", "raise SystemExit('no such library')"]},
            InfraError,
            r"tools\.0\.mcp: .* failed: .*; its standard error ends with:\nno such library$",
        ),
        (
            {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_s": 0.5},
            InfraError,
            r"did not list its tools within start_s = 0\.5 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, InfraError, "the server at http://127.0.0.1:9/mcp"),
    ],
    ids=["unknown", "ends", "hangs", "unreachable"],
)
async def test_a_server_that_does_not_start_is_reported_at_once(
    server: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        async with box_of(server):
            raise AssertionError("the server has started")


async def test_a_configured_tool_that_the_server_lacks_is_an_error(quick: str) -> None:
    with pytest.raises(ConfigError, match=r"tools\.0\.mcp\.tools: .* has no tool 'whois'; did you mean 'who\.is'"):
        async with box_of(stdio(quick, tools=["whois"])):
            raise AssertionError("the server has started")


async def test_two_tools_with_the_same_name_are_an_error(quick: str) -> None:
    configs = [{"class_name": "calculator", "config": {"name": "who_is"}}, {"mcp": stdio(quick)}]
    with pytest.raises(ConfigError, match=r"tools\.1: its tool is called 'who_is', like that of .*tools\.0"):
        async with Toolbox(load_tools([ToolConfig.model_validate(config) for config in configs])):
            raise AssertionError("the server has started")


# ------------------------------------------------------------------------------------------------ HTTP


@asynccontextmanager
async def serving(program: str, port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Start the server on a port of this machine, and wait until it listens."""
    process = subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        with anyio.fail_after(30):
            while not await _listens(port):  # noqa: ASYNC110  another process sends no event
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


async def test_calls_reconnect_to_a_restarted_server_over_http(program: str) -> None:
    port = free_port()
    url = {"url": f"http://127.0.0.1:{port}/mcp"}
    async with serving(program, port) as process, box_of(url) as toolbox:
        assert await call(toolbox, "add", a=2, b=3) == ("ok", "5")
        process.kill()
        process.wait()
        status, text = await call(toolbox, "add", a=2, b=3)
        assert status == "raised" and "could not be reached again" in text
        async with serving(program, port):
            assert await call(toolbox, "add", a=2, b=4) == ("ok", "6")


ODD_CONTENTS = {
    "surrogate": '{"type": "text", "text": "\\ud83d"}',
    "deep": "[" * 100_000,
    "long integer": "7" * 5000,
    "type": '{"type": 7}',
    "text": '{"type": "text", "text": {}}',
    "nul": "\0",
}


@pytest.mark.parametrize("content", ODD_CONTENTS.values(), ids=ODD_CONTENTS)
async def test_answers_of_any_shape_become_messages_for_the_model(quick: str, content: str) -> None:
    async with box_of(stdio(quick, tools=["odd", "who.is"]), timeout_s=3) as toolbox:
        status, text = await call(toolbox, "odd", content=content)
        assert status in ("ok", "raised", "timeout") and text.encode()
        assert await server_pid(toolbox)


async def test_arguments_with_a_lone_surrogate_reach_the_server(quick: str) -> None:
    async with box_of(stdio(quick, tools=["odd"])) as toolbox:
        assert await call(toolbox, "odd", content='{"type": "text", "text": "\ud83d"}') == ("ok", "?")


# ------------------------------------------------------------------------------------------------ secrets


async def test_a_server_gets_its_secrets_and_no_text_from_it_has_them(
    quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR_SECRET", "c4n4ry-yellow")
    async with box_of(stdio(quick, env={"COLOUR": "${secret:COLOUR_SECRET}"})) as toolbox:
        status, text = await call(toolbox, "who_is")
    assert (status, text.split()[1]) == ("ok", "${secret:COLOUR_SECRET}"), "the model sees the name of the secret"


async def test_the_error_of_a_server_that_prints_its_secrets_does_not_have_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLOUR_SECRET", "c4n4ry-orange")
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    program = "import os; raise SystemExit(f'no colour {os.environ[\"COLOUR\"]}')"
    server = {"command": [sys.executable, "-c", program], "env": {"COLOUR": "${secret:COLOUR_SECRET}"}}
    with pytest.raises(InfraError, match=r"no colour \$\{secret:COLOUR_SECRET\}"):
        async with box_of(server):
            raise AssertionError("the server has started")
    printed = capfd.readouterr()
    assert "no colour ${secret:COLOUR_SECRET}" in printed.err
    assert "c4n4ry-orange" not in printed.out + printed.err


async def test_no_line_of_a_secret_with_several_lines_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Programs print a key with its line breaks, or with a prefix for each line, or quoted on one line."""
    key = "-----BEGIN KEY-----\nc4n4ry-mauve\nc4n4ry-ochre\n-----END KEY-----\n"
    monkeypatch.setenv("COLOUR_SECRET", key)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    program = (
        "import os, sys; colour = os.environ['COLOUR']; print(colour, file=sys.stderr); print(repr(colour), "
        "file=sys.stderr); raise SystemExit(''.join(f'  no colour> {line}\\n' for line in colour.splitlines()))"
    )
    server = {"command": [sys.executable, "-c", program], "env": {"COLOUR": "${secret:COLOUR_SECRET}"}}
    with pytest.raises(InfraError, match=r"no colour> \$\{secret:COLOUR_SECRET\}") as raised:
        async with box_of(server):
            raise AssertionError("the server has started")
    printed = capfd.readouterr()
    assert "no colour> ${secret:COLOUR_SECRET}" in printed.err
    assert "c4n4ry" not in printed.out + printed.err + str(raised.value)


@pytest.mark.parametrize(
    ("server", "key"),
    [
        ({"command": ["cat"], "env": {"COLOUR": "${secret:NO_COLOUR}"}}, r"tools\.0\.mcp\.env\.COLOUR"),
        ({"url": "http://127.0.0.1:9/${secret:NO_COLOUR}"}, r"tools\.0\.mcp\.url"),
    ],
)
async def test_a_secret_that_this_process_lacks_is_an_error_of_the_configuration(
    server: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOUR", raising=False)
    with pytest.raises(ConfigError, match=rf"{key} has \$\{{secret:NO_COLOUR\}}: .* no variable NO_COLOUR"):
        async with box_of(server):
            raise AssertionError("the server has started")


async def test_the_error_of_an_unreachable_server_has_no_secret_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR_SECRET", "c4n4ry-violet")
    with pytest.raises(InfraError, match=r"the server at http://127\.0\.0\.1:9/\$\{secret:COLOUR_SECRET\}") as raised:
        async with box_of({"url": "http://127.0.0.1:9/${secret:COLOUR_SECRET}"}):
            raise AssertionError("the server has answered")
    assert "c4n4ry-violet" not in str(raised.value)

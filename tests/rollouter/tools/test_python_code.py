"""Code of a model in real processes: its output, its limits, and its confinement."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core.failures import ConfigError, InfraError
from rollouter.tools import ToolContext, ToolResponse
from rollouter.tools.loading import load_tools
from rollouter.tools.python_code import PythonTool
from rollouter.tools.sandbox.confined import kernel
from rollouter.tools.sandbox.confined.walls import MECHANISMS
from rollouter.tools.sandbox.pool import CodeLimits, CodeOutcome, CodeSandbox
from rollouter.tools.toolbox import Toolbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is confined on Linux only")

CONTEXT = ToolContext("row 1", 0)
LEVELS = {
    "every mechanism": MECHANISMS,
    "namespaces": ("namespaces", "root", "user"),
    "filters": ("landlock", "seccomp"),
}
AMPLE_S = 60.0
"""A wall time that ends no code of these tests: on a busy machine, a second of processor time takes many seconds."""
FAST = CodeLimits(wall_s=AMPLE_S, cpu_s=2, memory_mib=256, file_mib=1, disk_mib=4, threads=8)


@pytest.fixture(scope="module", params=list(LEVELS))
def level(request: pytest.FixtureRequest) -> CodeSandbox:
    """A sandbox with some of the mechanisms; the test is skipped where the machine lacks them."""
    if request.param == "every mechanism":
        return CodeSandbox(FAST)
    return sandbox_or_skip(FAST, *LEVELS[request.param])


def sandbox_or_skip(limits: CodeLimits, *mechanisms: str) -> CodeSandbox:
    try:
        return CodeSandbox(limits, mechanisms=mechanisms)
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(wall_s=AMPLE_S, cpu_s=1, memory_mib=256, output_bytes=2000)


@pytest.fixture(scope="module")
def session_tool() -> PythonTool:
    return PythonTool(session=True, wall_s=AMPLE_S, cpu_s=1, memory_mib=256)


async def run(sandbox: CodeSandbox, code: str) -> CodeOutcome:
    process = await sandbox.start()
    try:
        return await process.run(code)
    finally:
        await process.close()


async def call(tool: PythonTool, code: str) -> ToolResponse:
    state = tool.create(CONTEXT)
    try:
        return await tool.execute(state, {"code": code})
    finally:
        await tool.release(state)


def names(directory: Path | str, pattern: str = "*") -> set[str]:
    return {path.name for path in Path(directory).glob(pattern)}


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_OTHERS: set[int] = set()
"""Processes of earlier tests, such as Ray's workers and the resource tracker of multiprocessing."""


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Make this process the parent of orphans while a test runs, so that the test can find them."""
    before = ctypes.c_int()
    kernel.LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _OTHERS.update(descendants())
    yield
    _OTHERS.clear()
    kernel.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


async def gone(before: Set[int] = frozenset()) -> bool:
    """Wait until killed processes have ended, and return whether only `before` is left."""
    with anyio.move_on_after(5):
        while descendants() - before:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return descendants() == before


def descendants() -> set[int]:
    """Return the pids of all descendants, except those of earlier tests."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            # Orphans that have ended stay zombies, because this process does not reap them.
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {os.getpid()}} - found - _OTHERS:
        found |= more
    return found


# ------------------------------------------------------------------------------------------------ notebook output


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("print('a', end='')\n'b'", "a'b'"),
        ("x = 3\nx", "3"),
        ("x = 3", "(no output)"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
        ("import sys\nsys.stderr.write('e' * 3)\nprint('o')", "eeeo"),
        ("for i in range(3):\n    i", "(no output)"),
        ("print('caf\u00e9 \u2603')", "caf\u00e9 \u2603"),
        ("import sys\nsys.exit()", "(no output)"),
        ("import sys\nsys.exit('bye')", "bye"),
        ("import asyncio\nasync def f():\n    return 5\nasyncio.run(f())", "5"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'"),
        ("open('a.txt', 'w').write('hi')\nopen('a.txt').read()", "'hi'"),
        ("open('mine.py', 'w').write('x = 7')\nimport mine\nmine.x", "7"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')", "(no output)"),
    ],
)
async def test_output_is_as_in_a_notebook(tool: PythonTool, code: str, text: str) -> None:
    response = await call(tool, code)
    assert response.text == text
    assert response.metrics["stopped"] == 0.0


async def test_the_traceback_of_an_exception_has_only_frames_of_the_code(tool: PythonTool) -> None:
    response = await call(tool, "print('before')\ndef f(x):\n    return 1 / x\nf(0)")
    assert response.text.startswith(
        'before\nTraceback (most recent call last):\n  File "<cell 1>", line 4, in <module>'
    )
    assert response.text.endswith("ZeroDivisionError: division by zero")
    assert "return 1 / x" in response.text
    assert "confined" not in response.text
    assert response.metrics == {"error": 1.0, "stopped": 0.0}
    syntax = await call(tool, "1 +")
    assert syntax.text.startswith('  File "<cell 1>", line 1') and "SyntaxError" in syntax.text
    shown = await call(tool, "class A:\n    def __repr__(self): raise ValueError('mine')\nA()")
    assert shown.text.endswith("ValueError: mine") and "confined" not in shown.text
    assert "EOFError" in (await call(tool, "input()")).text


async def test_only_the_standard_library_is_available_unless_packages_are_enabled(tool: PythonTool) -> None:
    assert "ModuleNotFoundError" in (await call(tool, "import numpy")).text
    packaged = PythonTool(packages=True, memory_mib=1024)
    assert (await call(packaged, "import numpy\nint(numpy.ones(3) @ numpy.ones(3))")).text == "3"


async def test_a_session_keeps_its_variables(session_tool: PythonTool) -> None:
    state, other = session_tool.create(CONTEXT), session_tool.create(CONTEXT)
    try:
        await session_tool.execute(state, {"code": "x = 1"})
        assert "NameError" in (await session_tool.execute(other, {"code": "x"})).text
        assert (await session_tool.execute(state, {"code": "x += 1\n_ = None\nx"})).text == "2"
        assert (await session_tool.execute(state, {"code": "_ * 10"})).text == "20"
        failed = await session_tool.execute(state, {"code": "\n1 / 0"})
        assert '"<cell 4>", line 2' in failed.text
        assert (await session_tool.execute(state, {"code": "x"})).text == "2"
        # Concurrent calls of a session run one after another.
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(
                    session_tool.execute, state, {"code": "y = x\nimport time; time.sleep(0.01)\nx = y + 1"}
                )
        assert (await session_tool.execute(state, {"code": "x"})).text == "5"
        stopped = await session_tool.execute(state, {"code": "print('so far')\nwhile True: pass"})
        assert stopped.text.startswith("so far\nStopped: ")
        assert stopped.text.endswith("The variables of earlier calls are gone.")
        assert "NameError" in (await session_tool.execute(state, {"code": "x"})).text
    finally:
        await session_tool.release(state)
        await session_tool.release(other)
    assert await gone()


# ------------------------------------------------------------------------------------------------ limits


async def test_time_is_bounded(tool: PythonTool) -> None:
    spins = await call(tool, "print('spins')\nwhile True: pass")
    assert spins.text == "spins\nStopped: the code used more than 1 s of processor time."
    assert spins.metrics == {"error": 0.0, "stopped": 1.0}
    slow = PythonTool(wall_s=0.5)
    sleeps = await call(slow, "import time\ntime.sleep(60)")
    assert sleeps.text == "Stopped: the code took longer than 0.5 s."


async def test_memory_is_bounded(level: CodeSandbox) -> None:
    outcome = await run(level, "x = bytearray(10 ** 12)")
    assert outcome.ending == "error"
    assert outcome.output.endswith("MemoryError\nThe code may use at most 256 MiB of memory.\n")
    grows = await run(level, "x = []\nwhile True: x.append(bytearray(1 << 24))")
    assert "MemoryError\n" in grows.output
    hidden = await run(level, "import os\nf = os.memfd_create('a')\nos.write(f, b'x')")
    assert hidden.ending == ("error" if "seccomp" in level.walls.mechanisms["processes"] else "ok")


async def test_files_are_bounded(level: CodeSandbox) -> None:
    large = await run(level, "with open('a', 'wb') as f:\n    while True: f.write(b'x' * 65536)")
    assert "OSError: [Errno 27] File too large" in large.output
    many = await run(level, "for i in range(40):\n    open(str(i), 'wb').write(b'x' * 500_000)")
    if "root" in level.walls.mechanisms["files"]:
        assert "OSError: [Errno 28] No space left on device" in many.output
    opens = await run(level, "files = [open('/dev/null') for _ in range(100)]")
    assert "OSError: [Errno 24] Too many open files" in opens.output


async def test_output_is_bounded(tool: PythonTool) -> None:
    prints = await call(tool, "for _ in range(100_000): print('x' * 99)\n1 / 0")
    assert prints.text.startswith("x" * 99 + "\n")
    assert prints.text.endswith("ZeroDivisionError: division by zero\n\n[9998000 bytes of output left out]")
    assert len(prints.text) < 3000
    floods = await call(tool, "import os\nwhile True: os.write(1, b'x' * 65536)")
    assert floods.text.endswith("Stopped: the code wrote more than 2000 bytes of output.")
    assert len(floods.text) < 3000
    raises = await call(tool, "raise ValueError('x' * 10 ** 6)")
    assert "[…]" in raises.text and len(raises.text) < 5000


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os\nos._exit(3)", "The process of the code ended with exit code 3."),
        ("import os\nos.abort()", "The process of the code ended by signal SIGABRT."),
        ("import ctypes\nctypes.string_at(0)", "The process of the code ended by signal SIGSEGV."),
        ("import os\nos.close(1)\nos._exit(0)", "The process of the code ended with exit code 0."),
    ],
)
async def test_a_process_that_dies_is_reported(tool: PythonTool, code: str, text: str) -> None:
    assert (await call(tool, code)).text == text


async def test_processes_are_refused_and_threads_work(level: CodeSandbox) -> None:
    before = descendants()
    filtered = "seccomp" in level.walls.mechanisms["processes"]
    if filtered or os.geteuid() != 0 or "user" not in level.walls.missing:  # else only the time limit ends the bomb
        bomb = await run(level, "import os\nfor _ in range(10_000):\n    os.fork()")
        assert ("PermissionError" if filtered else "BlockingIOError") in bomb.output
    if filtered:
        shell = await run(level, "import subprocess\nsubprocess.run(['true'])")
        assert "Error" in shell.output
        assert "PermissionError" in (await run(level, "import os\nos.execv('/bin/true', ['true'])")).output
        assert "PermissionError" in (await run(level, "import os\nos.setsid()")).output
    assert await gone(before)
    threads = await run(
        level, "import threading\nt = threading.Thread(target=lambda: print('in'))\nt.start(); t.join()"
    )
    assert threads.output == "in\n"


async def test_no_process_of_a_fork_bomb_remains() -> None:
    sandbox = sandbox_or_skip(CodeLimits(wall_s=0.5), "namespaces", "root")
    before = descendants()
    code = """
import os, time
for _ in range(4):
    os.fork()
    try: os.setsid()
    except OSError: pass
time.sleep(60)
"""
    outcome = await run(sandbox, code)
    assert outcome.ending == "timeout"
    assert await gone(before)


# ------------------------------------------------------------------------------------------------ confinement


async def test_code_cannot_read_the_environment_of_the_parent(
    level: CodeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "do-not-tell")
    code = f"""
import os
print(dict(os.environ))
for pid in ("self", os.getppid(), 1, {os.getpid()}, {os.getppid()}):
    for name in ("environ", "cmdline", "mem", "maps", "cwd/secret"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "rb") as file: print("GOT", pid, name, file.read(10_000))
        except OSError as error:
            pass
"""
    outcome = await run(level, code)
    assert outcome.ending == "ok", outcome.output
    assert "do-not-tell" not in outcome.output
    assert "GOT" not in outcome.output
    assert "'LANG'" in outcome.output


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


async def test_code_cannot_reach_other_processes(level: CodeSandbox, victim: subprocess.Popen[bytes]) -> None:
    code = f"""
import ctypes, fcntl, os, resource, signal
libc = ctypes.CDLL(None)
def send_on_input():
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, PID); fcntl.fcntl(r, 10, signal.SIGKILL)
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b"x")
for PID in ({victim.pid}, {os.getpid()}):
    for attempt in (
        lambda: os.kill(PID, signal.SIGKILL),
        lambda: os.killpg(PID, signal.SIGKILL),
        lambda: resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0)),
        lambda: signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGKILL),
        lambda: os.sched_setaffinity(PID, {{0}}),
        lambda: libc.ptrace(16, PID, 0, 0) == 0 or os.listdir("/nowhere"),
        send_on_input,
    ):
        try:
            attempt()
        except OSError:
            continue
        print("REACHED", PID, attempt)
"""
    outcome = await run(level, code)
    if "seccomp" in level.walls.mechanisms["processes"]:
        assert outcome.output == ""
    assert victim.poll() is None
    own = await run(level, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert (own.ending, own.exit_code) == ("died", -15)
    everybody = await run(level, "import os\nos.kill(-1, 9)")
    assert everybody.ending in ("error", "died")
    assert victim.poll() is None


async def test_code_cannot_reach_files_outside_of_its_directory(level: CodeSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do-not-tell")
    os.chmod(secret, 0o666)
    os.chmod(tmp_path, 0o777)
    code = f"""
import os
path, folder = {str(secret)!r}, {str(tmp_path)!r}
os.chdir("/")
for attempt in (
    lambda: print(open(path).read()),
    lambda: open(path, "w"),
    lambda: open(path, "a"),
    lambda: os.truncate(path, 0),
    lambda: os.unlink(path),
    lambda: os.rename(path, folder + "/other"),
    lambda: os.chmod(path, 0),
    lambda: os.utime(path, (0, 0)),
    lambda: os.setxattr(path, "user.x", b"1"),
    lambda: open(folder + "/new", "w"),
    lambda: os.mkdir(folder + "/new"),
    lambda: os.symlink("/", folder + "/new"),
    lambda: os.link(path, os.environ["HOME"] + "/link"),
    lambda: os.listdir(folder),
    lambda: os.listdir("/home"),
    lambda: open("/etc/passwd").read(),
    lambda: open("/etc/shadow").read(),
    lambda: open(os.__file__, "a"),
    lambda: os.chmod(os.__file__, 0o644),
    lambda: os.chmod("/dev/null", 0o666),
    lambda: open("/proc/sys/kernel/core_pattern", "w"),
    lambda: open("/dev/shm/asyncrl-new", "w"),
    lambda: open("/var/tmp/asyncrl-new", "w"),
):
    try:
        attempt()
    except OSError:
        continue
    print("REACHED", attempt.__code__.co_firstlineno)
open("/dev/null", "w").write("x")
len(open("/dev/urandom", "rb").read(4))
"""
    before = secret.stat()
    outcome = await run(level, code)
    assert outcome.output == "4\n"
    after = secret.stat()
    assert secret.read_text() == "do-not-tell"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert names(tmp_path) == {"secret.txt"}


async def test_read_paths_are_read_only(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("42")
    tool = PythonTool(read_paths=[str(tmp_path)])
    assert (await call(tool, f"open({str(data)!r}).read()")).text == "'42'"
    assert "Error" in (await call(tool, f"open({str(data)!r}, 'a')")).text
    assert (await call(tool, "open('/tmp/mine', 'w') if False else 1")).text == "1"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A port on the loopback interface and a socket in the file system, which accept all connections."""
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        path = str(tmp_path / "s")
        unix.bind(path)
        unix.listen()
        tmp_path.chmod(0o777)
        yield inet.getsockname()[1], path


CONNECT = """
import ctypes, os, socket
for family, kind, address in ((2, 1, ("127.0.0.1", {port})), (1, 1, {path!r}), (2, 2, ("127.0.0.1", {port}))):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(1)
            s.connect(address)
            s.send(b"x")
            print("REACHED", address)
    except OSError as error:
        pass
"""


async def test_code_cannot_reach_the_network(level: CodeSandbox, servers: tuple[int, str]) -> None:
    port, path = servers
    outcome = await run(level, CONNECT.format(port=port, path=path))
    assert (outcome.output, outcome.ending) == ("", "ok")
    raw = "import ctypes\nlibc = ctypes.CDLL(None)\n[libc.socket(family, 1, 0) >= 0 for family in (1, 2, 10, 16, 17)]"
    if "seccomp" in level.walls.mechanisms["network"]:
        assert (await run(level, raw)).output == "[False, False, False, False, False]\n"
        uring = f"ctypes.CDLL(None).syscall({kernel.number('io_uring_setup')}, 1, None)"
        assert (await run(level, f"import ctypes\n{uring}\n")).output == "-1\n"


async def test_network_can_be_allowed(servers: tuple[int, str]) -> None:
    port, path = servers
    response = await call(PythonTool(network="allowed"), CONNECT.format(port=port, path=path))
    assert "REACHED ('127.0.0.1'" in response.text
    assert path not in response.text  # the socket represents other services of the machine


@pytest.mark.skipif(kernel.ARCHITECTURE != "x86_64", reason="the architecture has no second set of system calls")
async def test_system_calls_of_another_architecture_end_the_process(tool: PythonTool) -> None:
    # The numbers of the x32 ABI would pass a filter that compares only plain numbers.
    response = await call(tool, "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)")
    assert response.text == "The process of the code ended by signal SIGSYS."


# ------------------------------------------------------------------------------------------------ end of processes


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


async def test_no_process_or_directory_remains_after_a_cancelled_call(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descendants()
    directories: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda *args, **kwargs: directories.append(make(*args, **kwargs)) or directories[-1]
    )
    started = time.monotonic()
    with anyio.move_on_after(0.5):
        await call(tool, "import time\ntime.sleep(60)")
    for delay in (0.0, 0.005, 0.02):
        with anyio.move_on_after(delay):
            await call(tool, "1")
    assert time.monotonic() - started < 5
    assert await gone(before)
    assert directories and not existing(directories)


async def test_the_working_directory_is_removed_with_unusual_entries() -> None:
    process = await sandbox_or_skip(FAST, "landlock", "seccomp").start()
    code = """
import os
print(os.getcwd())
os.mkdir('d', 0)
os.mkdir('e')
os.symlink('/', 'link')
open('e/f', 'w').close()
"""
    directory = (await process.run(code)).output.strip()
    assert names(directory) == {"d", "e", "link"}
    await process.close()
    assert Path(directory).name not in names(tempfile.gettempdir())


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    script = """
import anyio
from rollouter.tools.sandbox.pool import CodeLimits
from rollouter.tools.sandbox.pool import CodeSandbox
async def main():
    process = await CodeSandbox(CodeLimits()).start()
    print(process._process.pid, flush=True)
    await process.run("import time; time.sleep(60)")
anyio.run(main)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        ended = select.poll()
        ended.register(os.pidfd_open(int(parent.stdout.readline())), select.POLLIN)
        parent.kill()
        assert ended.poll(10_000)


async def test_many_processes_do_not_block_the_event_loop(tool: PythonTool) -> None:
    texts = []

    async def one(number: int) -> None:
        texts.append((await call(tool, f"{number} + 1")).text)

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        async with anyio.create_task_group() as calls:
            for number in range(16):
                calls.start_soon(one, number)
        group.cancel_scope.cancel()
    assert sorted(texts, key=int) == [str(number + 1) for number in range(16)]
    assert ticks >= 5


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": "on"}, "network: 'on' cannot be used: .*'denied' or 'allowed'"),
        ({"files": True}, "files: True cannot be used: .*'private' or 'shared'"),
        ({"memory_mb": 1}, r"memory_mb: there is no such key.*; did you mean 'memory_mib'\?"),
        ({"cpu_s": 0}, "cpu_s: 0 cannot be used: .* greater than 0"),
        ({"cpu_s": 0.5}, r"cpu_s: 0\.5 cannot be used: .* integer"),
        ({"wall_s": "five"}, "wall_s: 'five' cannot be used: .* number"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PythonTool(**settings)


async def test_the_tool_is_configured_by_its_short_name() -> None:
    config = ToolConfig(class_name="python", config={"session": True, "wall_s": 5})
    async with Toolbox(load_tools([config])) as toolbox, toolbox.session(CONTEXT) as tools:
        for code, text in (("x = 20", "(no output)"), ("x + 1", "21")):
            called = await tools.call("python", json.dumps({"code": code}), turn=0)
            assert (called.call.status, called.call.result) == ("ok", text)
        assert descendants()
    assert await gone()


@pytest.mark.parametrize(
    ("mechanisms", "message"),
    [
        ((), "network and files and processes"),
        (("seccomp",), r"files of this machine: .*config: \{files: shared\} allows"),
        (("landlock",), r"network and files and processes"),
        (("namespaces",), r"network and files of this machine: .*config: \{network: allowed\} allows"),
    ],
)
def test_a_sandbox_without_enough_mechanisms_is_refused(mechanisms: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodeSandbox(CodeLimits(), mechanisms=mechanisms)


async def test_shared_files_can_be_accepted() -> None:
    sandbox = CodeSandbox(FAST, mechanisms=("seccomp",), shared_files=True)
    assert sandbox.walls.mechanisms["files"] == []
    assert (await run(sandbox, "len(open('/etc/passwd').read()) > 0")).output == "True\n"


async def test_a_process_without_its_confinement_gets_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = CodeSandbox(FAST)
    sandbox._mechanisms = []  # as if the machine had lost the mechanisms after the check
    before = descendants()
    with pytest.raises(InfraError, match="started without its walls: network, files, processes"):
        await sandbox.start()
    assert await gone(before)

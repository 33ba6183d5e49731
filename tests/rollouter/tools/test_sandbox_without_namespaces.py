"""Attacks on a sandbox that has no namespaces and no root directory of its own, as in most containers."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from asyncrl.core.failures import ConfigError
from rollouter.tools.sandbox import work_dir
from rollouter.tools.sandbox.confined import kernel
from rollouter.tools.sandbox.confined.walls import MECHANISMS
from rollouter.tools.sandbox.pool import CodeLimits, CodeOutcome, CodeSandbox, ConfinedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is confined on Linux only")

LIMITS = CodeLimits(wall_s=30.0, cpu_s=10, memory_mib=256, file_mib=1, disk_mib=4, threads=8)
FILTERS = ("landlock", "seccomp")


def filtered(*, keep: bool = False, network: bool = False) -> CodeSandbox:
    """A sandbox of filters alone. Without Landlock the files are shared, which no test of this module minds."""
    return CodeSandbox(LIMITS, mechanisms=FILTERS, shared_files=True, keep=keep, network=network)


def with_namespaces(mechanisms: tuple[str, ...]) -> CodeSandbox:
    sandbox = CodeSandbox(LIMITS, mechanisms=mechanisms, shared_files=True, keep=True)
    if "namespaces" in sandbox.walls.missing:
        pytest.skip(sandbox.walls.missing["namespaces"])
    return sandbox


async def run(sandbox: CodeSandbox, code: str) -> CodeOutcome:
    process = await sandbox.start()
    try:
        return await process.run(code)
    finally:
        await process.close()


@pytest.fixture
async def session() -> AsyncIterator[ConfinedProcess]:
    """A process that runs several pieces of code."""
    process = await filtered(keep=True).start()
    yield process
    await process.close()


# ------------------------------------------------------------------------------------------------ memory

FILL_BUFFERS = """
import fcntl, os, resource, socket, threading

held, chunk, kept = [], b"x" * 65536, []

def fill(send):
    try:
        while True: held.append(send(chunk))
    except BlockingIOError: pass

def in_descriptors(make, *, send=False):
    try:
        while True: make(send)
    except OSError as error:
        refused.append(error)

def sockets(kind):
    def make(send):
        pair = socket.socketpair(socket.AF_UNIX, kind)
        for end in pair:
            for name in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
                try: end.setsockopt(socket.SOL_SOCKET, name, 1 << 30)
                except OSError: pass
            end.setblocking(False)
            fill(end.send)
        if send:
            socket.send_fds(carrier, [b"x"], [end.fileno() for end in pair])
            for end in pair: end.close()
        else:
            kept.append(pair)
    return make

def pipes(send):
    read, write = os.pipe()
    try: fcntl.fcntl(write, 1031, 1 << 20)
    except OSError: pass
    os.set_blocking(write, False)
    fill(lambda data: os.write(write, data))
    os.close(write)
    kept.append(os.fdopen(read, "rb"))

def with_descriptors_of_its_own():
    ctypes.CDLL(None).close_range(1000, 1000, 2)
    in_descriptors(pipes)
    filled.release()
    done.wait()

import ctypes
refused, filled, done = [], threading.Semaphore(0), threading.Event()
"""

ATTACKS = {
    "large stream sockets": "in_descriptors(sockets(socket.SOCK_STREAM))",
    "datagram sockets": "in_descriptors(sockets(socket.SOCK_DGRAM))",
    "sequenced packet sockets": "in_descriptors(sockets(socket.SOCK_SEQPACKET))",
    "descriptors in flight": """
carrier, other = socket.socketpair()
in_descriptors(sockets(socket.SOCK_STREAM), send=True)
in_descriptors(sockets(socket.SOCK_STREAM))
""",
    "large pipes": "in_descriptors(pipes)",
    "descriptors of threads": """
threading.stack_size(65536)
for _ in range(8): threading.Thread(target=with_descriptors_of_its_own, daemon=True).start()
for _ in range(8): filled.acquire()
""",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_buffers_of_pipes_and_sockets_count_as_memory(session: ConfinedProcess, attack: str) -> None:
    report = "\nprint(sum(held), resource.getrlimit(resource.RLIMIT_AS)[0])"
    # Without free descriptors, only what is imported already can run.
    outcome = await session.run("import linecache, traceback\n" + FILL_BUFFERS + attack + report)
    assert outcome.ending == "ok", outcome.output
    held, address_space = map(int, outcome.output.split())
    assert held + address_space <= LIMITS.memory_mib << 20
    assert held < 64 << 20


PREPARE = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
read, write = os.pipe()
"""

CALLS = {
    "a page of this process in a pipe": "vmsplice, write, 0, 0, 0",
    "a page of a file in a pipe": "splice, 0, 0, write, 0, 1, 0",
    "a page of a pipe in another": "tee, read, write, 1, 0",
    "a page of a file in a socket": "sendfile, write, 0, 0, 1",
    "events of files": "inotify_init1, 0",
    "asynchronous requests": "io_setup, 1, ctypes.byref(ctypes.c_ulong())",
    "rules for files": "landlock_create_ruleset, 0, 0, 1",
    "filters of a thread": "seccomp, 1, 0, 0",
    "filters of a thread, by prctl": "prctl, 22, 2, 0, 0, 0",
    "the size of what a socket sends": "setsockopt, write, 1, 7, 0, 0",
    "the size of what a socket receives": "setsockopt, write, 1, 8, 0, 0",
    "any size of what a socket sends": "setsockopt, write, 1, 32, 0, 0",
    "any size of what a socket receives": "setsockopt, write, 1, 33, 0, 0",
    "messages with descriptors": "sendmsg, write, 0, 0",
    "many messages with descriptors": "sendmmsg, write, 0, 0, 0",
    "a timer that sends SIGCONT": "timer_create, 0, 0, ctypes.byref(ctypes.c_int())",
    "SIGCONT to the group": "kill, 0, 18",
    "SIGCONT to itself": "kill, os.getpid(), 18",
    "SIGCONT to a thread": "tgkill, os.getpid(), os.getpid(), 18",
    "SIGCONT to any thread": "tkill, os.getpid(), 18",
    "SIGCONT with a value": "rt_sigqueueinfo, os.getpid(), 18, 0",
    "SIGCONT with a value to a thread": "rt_tgsigqueueinfo, os.getpid(), os.getpid(), 18, 0",
    "SIGCONT of a terminal that is given up": "ioctl, read, 0x5422, 0",
    "SIGCONT of a terminal whose other end is closed": "ioctl, read, 0x40045431, 0",
    "another parent signal": "prctl, 1, 0, 0, 0, 0",
    "descriptors that the parent cannot see": "prctl, 4, 0, 0, 0, 0",
    "a signal of choice for input": "fcntl, read, 10, 18",
    "a lease of a file": "fcntl, read, 1024, 1",
    "signals of directories": "fcntl, read, 1026, 1",
    "a lock of a descriptor": "fcntl, read, 37, 0",
    "a wait for a lock of a descriptor": "fcntl, read, 38, 0",
    "a larger pipe": "fcntl, write, 1031, 1 << 20",
    "separate descriptors": "close_range, 1000, 1000, 2",
    "a pair of datagram sockets": "socketpair, 1, 2, 0, 0",
    "a pair of raw sockets": "socketpair, 1, 3 | 0x80000, 0, 0",
    "a pair of another family": "socketpair, 30, 1, 0, 0",
    "an address of a socket": "bind, write, 0, 0",
    "a connection": "connect, write, 0, 0",
    "a new shared segment": "shmget, 0, 4096, 0o1600",
    "a shared segment": "shmat, -1, 0, 0",
    "the end of a shared segment": "shmdt, 0",
    "the owner of a shared segment": "shmctl, -1, 0, 0",
    "new semaphores": "semget, 0, 1, 0o1600",
    "semaphores": "semop, -1, 0, 0",
    "semaphores with a timeout": "semtimedop, -1, 0, 0, 0",
    "the owner of semaphores": "semctl, -1, 0, 0, 0",
    "a new queue": "msgget, 0, 0o1600",
    "a message to a queue": "msgsnd, -1, 0, 0, 0",
    "a message from a queue": "msgrcv, -1, 0, 0, 0, 0",
    "the owner of a queue": "msgctl, -1, 0, 0",
    "a queue with a name": "mq_open, b'', 0, 0, 0",
    "the end of a queue with a name": "mq_unlink, b''",
    "a message to a queue with a name": "mq_timedsend, -1, 0, 0, 0, 0",
    "a message from a queue with a name": "mq_timedreceive, -1, 0, 0, 0, 0",
    "signals of a queue with a name": "mq_notify, -1, 0",
    "the size of a queue with a name": "mq_getsetattr, -1, 0, 0",
}
ALLOWED_WITH_NETWORK = ("bind", "connect", "sendmsg", "sendmmsg")


@pytest.mark.parametrize("network", [False, True], ids=["without network", "with network"])
async def test_calls_that_pass_a_limit_are_refused(network: bool) -> None:
    code = PREPARE
    for title, call in CALLS.items():
        name, arguments = call.split(", ", 1)
        if not (network and name in ALLOWED_WITH_NETWORK):
            code += f"result = libc.syscall({kernel.number(name)}, {arguments}), ctypes.get_errno()\n"
            code += f"if result != (-1, 1): print({title!r}, result)\n"  # EPERM
    outcome = await run(filtered(network=network), code)
    assert (outcome.output, outcome.ending) == ("", "ok")


@pytest.fixture
def segment() -> Iterator[tuple[int, ctypes.Array[ctypes.c_char]]]:
    """The number and the content of a shared segment that belongs to this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, 4096, 0o1600)
    if number < 0:
        pytest.skip("no System V IPC: " + os.strerror(ctypes.get_errno()))
    address = libc.shmat(number, None, 0)
    libc.shmctl(number, 0, None)  # IPC_RMID: the segment ends when nothing has it mapped
    yield number, (ctypes.c_char * 4096).from_address(address)
    libc.shmdt(ctypes.c_void_p(address))


async def test_shared_memory_of_other_processes_is_out_of_reach(
    segment: tuple[int, ctypes.Array[ctypes.c_char]],
) -> None:
    number, content = segment
    content.value = b"secret"
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat({number}, None, 0)
if address != ctypes.c_void_p(-1).value:
    print(ctypes.string_at(address))
    ctypes.memmove(address, b"broken", 6)
ctypes.get_errno(), libc.shmctl(0, 13, ctypes.create_string_buffer(4096)), ctypes.get_errno()  # SHM_STAT
"""
    assert (await run(filtered(), code)).output == "(1, -1, 1)\n"
    assert content.value == b"secret"


async def test_files_in_memory_have_no_long_lists_of_access_rights() -> None:
    code = """
import os, struct
users = [(1, 6, -1)] + [(2, 6, os.getuid())] * 8000 + [(4, 4, -1), (16, 6, -1), (32, 4, -1)]
rights = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *user) for user in users)
os.mkdir("a")
os.setxattr("a", "system.posix_acl_access", rights)
"""
    outcome = await run(with_namespaces(MECHANISMS), code)
    assert "PermissionError" in outcome.output


async def test_threads_share_their_descriptors() -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
stack = ctypes.create_string_buffer(65536)
CLONE_VM, CLONE_FS, CLONE_SIGHAND, CLONE_THREAD, CLONE_SYSVSEM = 0x100, 0x200, 0x800, 0x10000, 0x40000
top = (ctypes.addressof(stack) + 65536) & ~15
flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM
libc.clone(libc.pause, ctypes.c_void_p(top), flags, None), ctypes.get_errno()
"""
    assert (await run(filtered(), code)).output == "(-1, 1)\n"


@pytest.mark.parametrize("network", [False, True], ids=["without network", "with network"])
async def test_standard_modules_work_without_the_refused_calls(network: bool) -> None:
    code = """
import asyncio, shutil, socket, sqlite3, tempfile
open("a", "w").write("x" * 100_000)
shutil.copyfile("a", "b")
one, other = socket.socketpair()
one.sendall(b"hello")
with sqlite3.connect("db") as db: db.execute("create table t(x)"); db.execute("insert into t values (1)")
async def stream():
    reader, writer = await asyncio.open_connection(sock=other)
    return await reader.readexactly(5)
print(len(open("b").read()), asyncio.run(stream()), db.execute("select x from t").fetchall())
"""
    assert (await run(filtered(network=network), code)).output == "100000 b'hello' [(1,)]\n"


def test_memory_that_buffers_can_use_up_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"memory_mib: 40 is too little: .* open_files: 64 .*set memory_mib to at least"
    ):
        CodeSandbox(CodeLimits(memory_mib=40), mechanisms=FILTERS, shared_files=True)


# ------------------------------------------------------------------------------------------------ end with the parent


EXIT = {"x86_64": 60, "aarch64": 93}.get(kernel.ARCHITECTURE)
"""Number of the call that ends only the calling thread."""


@pytest.mark.parametrize(
    ("code", "condition"),
    [
        ("libc.prctl(1, 0)\nprint('ready', flush=True)\ntime.sleep(60)", "b'ready' in process._unread"),
        (
            f"threading.Thread(target=time.sleep, args=(60,)).start()\nlibc.syscall({EXIT}, 0)",
            "') Z' in stat.read_text()",
        ),
        ("libc.prctl(1, 0)", "') T' in stat.read_text()"),
    ],
    ids=["resets the signal", "ends the main thread", "is stopped between calls"],
)
def test_code_ends_with_its_parent(code: str, condition: str, tmp_path: Path) -> None:
    code = f"import ctypes, threading, time\nlibc = ctypes.CDLL(None)\n{code}"
    script = f"""
import pathlib, anyio
from rollouter.tools.sandbox.pool import CodeLimits, CodeSandbox

async def main():
    sandbox = CodeSandbox(CodeLimits(wall_s=60), mechanisms={FILTERS!r}, shared_files=True, keep=True)
    process = await sandbox.start()
    pid = process._process.pid
    stat = pathlib.Path(f"/proc/{{pid}}/task/{{pid}}/stat")
    async with anyio.create_task_group() as group:
        group.start_soon(process.run, {code!r})
        with anyio.fail_after(60):
            while not ({condition}):
                await anyio.sleep(0.01)
        print(pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        confined = int(parent.stdout.readline())
        handle = os.pidfd_open(confined)
        try:
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            parent.kill()
            assert ended.poll(10_000)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


# ------------------------------------------------------------------------------------------------ sockets outside


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A datagram socket in the file system that receives from everyone."""
    tmp_path.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        path = str(tmp_path / "s")
        server.bind(path)
        os.chmod(path, 0o777)
        server.setblocking(False)
        yield server, path


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_code_with_network_has_no_unix_socket_that_could_hold_descriptors(uvloop: bool) -> None:
    if uvloop:
        pytest.importorskip("uvloop")  # Ray's actors use it where it is installed
    code = """
import ctypes, os, stat
libc, pair = ctypes.CDLL(None), (ctypes.c_int * 2)()
for kind in (1, 2, 3, 5): libc.socket(1, kind, 0), libc.socketpair(1, kind, 0, pair)
for number in range(1000):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode): print(number)
    except OSError: pass
"""
    with socket.socket(socket.AF_UNIX) as inherited:
        inherited.set_inheritable(True)
        outcome = anyio.run(run, filtered(network=True), code, backend_options={"use_uvloop": uvloop})
    assert (outcome.output, outcome.ending) == ("", "ok")


async def test_a_pair_of_sockets_reaches_no_other_socket(outside: tuple[socket.socket, str]) -> None:
    server, path = outside
    code = f"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    for attempt in (
        lambda s: s.sendto(b"reached", {path!r}),
        lambda s: s.sendmsg([b"reached"], [], 0, {path!r}),
        lambda s: (s.connect({path!r}), s.send(b"reached")),
    ):
        try:
            pair = socket.socketpair(socket.AF_UNIX, kind)
            attempt(pair[0])
        except OSError: pass
"""
    outcome = await run(filtered(), code)
    assert outcome.ending == "ok", outcome.output
    with pytest.raises(BlockingIOError):
        server.recv(100)


# ------------------------------------------------------------------------------------------------ time between calls


def running_threads(group: int) -> list[str]:
    """Return the states of the threads of a process group that are not stopped."""
    states = []
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "T":
                states.append(state)
    return states


async def stopped(group: int) -> None:
    with anyio.fail_after(10):
        while running_threads(group):  # noqa: ASYNC110  a signal takes effect when a thread gets a processor
            await anyio.sleep(0.01)


def processor_ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


async def test_a_session_uses_no_processor_time_between_calls(session: ConfinedProcess) -> None:
    code = """
import ctypes, signal, threading
def spin():
    global turns
    while True: turns += 1
turns = 0
threading.Thread(target=spin, daemon=True).start()
for number in (signal.SIGCONT, signal.SIGALRM): signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
# struct sigevent: value, signal, kind
event, timer = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0), ctypes.c_void_p()
libc = ctypes.CDLL(None)
if not libc.timer_create(1, event, ctypes.byref(timer)):
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000), None)
"""
    pid = session._process.pid
    outcome = await session.run(code)
    assert outcome.ending == "ok", outcome.output
    for _ in range(2):
        await stopped(pid)
        before = processor_ticks(pid)
        for _ in range(20):
            await anyio.sleep(0.01)
            assert not running_threads(pid)
        assert processor_ticks(pid) == before
        # The session continues as if it had not been stopped.
        continued = await session.run("before = turns\nwhile turns == before: pass\nturns > before")
        assert continued.output == "True\n"


@pytest.mark.parametrize("mechanisms", [("namespaces", *FILTERS), MECHANISMS], ids=["without a root", "with all"])
async def test_processes_in_namespaces_are_stopped_too(mechanisms: tuple[str, ...]) -> None:
    process = await with_namespaces(mechanisms).start()
    try:
        for turn in range(2):
            code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
            assert (await process.run(f"{code}\n{turn}")).output == f"{turn}\n"
            await stopped(process._process.pid)
    finally:
        await process.close()


async def test_a_session_can_be_closed_while_it_is_stopped(session: ConfinedProcess) -> None:
    await session.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    with anyio.fail_after(5):
        await session.close()
    assert session._process.returncode == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------ disk

FILL_DISK = {
    "many files": "for i in range(12): open(str(i), 'wb').write(bytes(1_000_000))",
    "many directories": "for i in range(12): os.mkdir(f'd{i}'); open(f'd{i}/f', 'wb').write(bytes(1_000_000))",
    "deleted files": """
files = []
for i in range(12):
    files.append(open(str(i), 'wb'))
    files[-1].write(bytes(1_000_000)); files[-1].flush()
    os.unlink(str(i))
""",
    "deleted files that are only mapped": """
import ctypes
mmap = ctypes.CDLL(None).mmap
mmap.restype = ctypes.c_void_p
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for i in range(12):
    with open(str(i), 'w+b') as file:
        file.write(bytes(1_000_000)); file.flush()
        mmap(None, 4096, 1, 2, file.fileno(), 0)
    os.unlink(str(i))
""",
    "empty files": "for i in range(5000): open(str(i), 'w').close()",
    "deep directories": """
for i in range(3000):
    os.mkdir('d'); os.chdir('d')
""",
}


@pytest.mark.parametrize("code", FILL_DISK.values(), ids=FILL_DISK)
async def test_files_of_a_session_are_bounded(session: ConfinedProcess, code: str) -> None:
    fits = await session.run("import os\nfor i in range(3): open(f'fits {i}', 'wb').write(bytes(1_000_000))")
    assert fits.ending == "ok" and session.alive
    outcome = await session.run(code)
    assert outcome.ending == "disk"
    assert not session.alive
    await session.close()
    assert not await anyio.Path(session._directory).exists()


@pytest.mark.parametrize("code", ["deleted files", "deleted files that are only mapped"])
async def test_deleted_files_of_a_process_namespace_are_found(code: str) -> None:
    outcome = await run(with_namespaces(("namespaces", *FILTERS)), f"import os\n{FILL_DISK[code]}")
    assert outcome.ending == "disk"


async def test_files_are_bounded_while_the_code_runs(session: ConfinedProcess) -> None:
    outcome = await session.run("""
import os
def fill():
    for i in range(12): open(str(i), 'wb').write(bytes(1_000_000))
fill()
while True: os.sched_yield()
""")
    assert outcome.ending == "disk"


async def test_a_deleted_file_that_is_mapped_counts_once(session: ConfinedProcess) -> None:
    code = """
import mmap, os
kept = []
for i in range(3):
    with open(str(i), 'w+b') as file:
        file.write(bytes(1_000_000)); file.flush()
        kept.append(mmap.mmap(file.fileno(), 0))
    os.unlink(str(i))
"""
    for _ in range(2):
        assert (await session.run(code)).ending == "ok"


async def test_files_that_were_deleted_do_not_count(session: ConfinedProcess) -> None:
    for _ in range(3):
        outcome = await session.run("import os\nfor i in range(3): open(str(i), 'wb').write(bytes(1_000_000))")
        assert outcome.ending == "ok"
        assert (await session.run("for i in range(3): os.unlink(str(i))")).ending == "ok"


def test_a_directory_that_cannot_be_listed_counts_as_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not work_dir.exceeds(str(tmp_path), os.getpid(), 1 << 30, 1 << 20)
    (tmp_path / "hidden").mkdir()
    listed = os.scandir

    def scandir(path: str) -> object:  # as a user other than root sees a directory of mode 0o300
        if path.endswith("hidden"):
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert work_dir.exceeds(str(tmp_path), os.getpid(), 1 << 30, 1 << 20)


def test_nothing_outside_of_a_working_directory_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(0o755)
    (outside / "kept").touch()
    directory = tmp_path / "work"
    (directory / "a" / "b").mkdir(parents=True)
    for place in (directory, directory / "a", directory / "a" / "b"):
        (place / "link").symlink_to(outside)
        (place / "hard").hardlink_to(outside / "kept")
    work_dir.remove(str(directory))
    assert not directory.exists()
    assert (outside / "kept").exists() and outside.stat().st_mode & 0o777 == 0o755

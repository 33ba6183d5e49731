"""A sandbox for untrusted code: starts isolated processes and controls them from the event loop.

    start ─▶ all walls in place? ─▶ run ─▶ (run …) ─▶ close: the process group is killed, the directory removed

The walls of a process isolate it from the machine. `rollouter.tools.sandbox.confined` sets them up inside the process:

| wall | how |
|---|---|
| network | no socket can be opened (seccomp), and there is no interface (network namespace) |
| files | a root directory in memory with Python's files, read-only; Landlock; capabilities dropped |
| processes | none can be started (seccomp); others cannot be signalled or traced (seccomp, process namespace) |
| environment | no variables of the parent; an empty working directory, removed afterwards |
| resources | processor and wall time, memory, size of each file and of all, open files, threads, output |

All mechanisms that the machine supports are used together, and each required wall needs at least one of them (table in
`confined.walls`). If the run is started as root, the code runs as a separate user, provided that all users can read
Python's files. Without a separate root directory (in most containers), the working directory is in the file system.
Then its size is checked every 0.1 s and after each call, and a process that exceeds the limit is ended. Between the
calls of a session, the process group is stopped. A process takes 30 to 40 ms to start on one core, 1 ms of which
blocks the event loop.
"""

from __future__ import annotations

import ast
import logging
import math
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

import anyio
from anyio import to_thread
from anyio.abc import Process

from asyncrl.config.sections.base import ConfigSection, Positive, Seconds
from asyncrl.core.failures import BugError, ConfigError, DeadlineError, InfraError
from asyncrl.core.tasks import task_group
from rollouter.tools.sandbox import work_dir
from rollouter.tools.sandbox.confined.walls import MECHANISMS, ConfinementReport, ConfinementSettings

log = logging.getLogger(__name__)

CodeEnding = Literal["ok", "error", "timeout", "cpu", "output", "disk", "died"]
"""How code ended: it ran to its end; it raised; it was stopped because of its wall time, its processor time, output
that bypasses `sys.stdout`, or its files; or its process ended by itself or by a signal."""

START_S = 20.0
"""Deadline for a process to start and report its walls."""
_CLOSE_S = 10.0
_DISK_CHECK_S = 0.1
"""Time between two checks of the working directory, which bounds what code can write beyond the limit."""
_PYTHON_MIB = 32
"""Memory that Python itself needs."""
_PIPE_PAGES = 16
"""Capacity of a pipe on Linux."""
_BEYOND_BYTES = 64 << 10
"""Allowance for a traceback and the like after the output. Only code that bypasses `sys.stdout` writes more."""


class CodeLimits(ConfigSection):
    """Limits of one run of code. The limits of memory, threads and files apply to its process."""

    wall_s: Seconds = 10.0
    cpu_s: Positive = 5
    memory_mib: Positive = 512
    """Address space, including 32 MiB for Python, and the buffers of pipes and sockets."""
    file_mib: Positive = 16
    """Size of the largest file."""
    disk_mib: Positive = 64
    """Size of all files."""
    open_files: Positive = 64
    threads: Positive = 32
    """Enforced if the kernel can count the processes of the code alone; otherwise only memory bounds the threads."""
    output_bytes: Positive = 32 << 10


@dataclass(frozen=True, slots=True)
class CodeOutcome:
    """The result of running code."""

    output: str
    """Standard output and standard error, including the value of the last expression or the traceback."""
    ending: CodeEnding
    exit_code: int | None = None
    """The exit code if `ending` is `died`; a negative number is a signal."""


class ConfinedProcess:
    """An isolated process that runs pieces of code one after the other."""

    def __init__(
        self,
        process: Process,
        stdin: FileIO,
        stdout: FileIO,
        directory: str,
        limits: CodeLimits,
        threads: anyio.CapacityLimiter,
        *,
        check_disk: bool,
    ) -> None:
        self._process = process
        self._stdin, self._stdout = stdin, stdout
        self._directory = directory
        self._limits = limits
        self._threads = threads
        self._check_disk = check_disk
        self._disk_exceeded = False
        self._unread = bytearray()
        self.alive = True
        """Whether the process can run more code."""

    async def greeting(self) -> str:
        """Return the `ConfinementReport` that the process writes before it receives any code.

        Raises:
            InfraError: the process did not start.
        """
        with anyio.move_on_after(START_S):
            report = await self._read_until(b"\n\n", most=_BEYOND_BYTES)
            if report is None:
                raise InfraError("a process for code ended before it was ready", self._unread.decode(errors="replace"))
            return report.decode(errors="replace")
        raise DeadlineError(f"a process for code was not up within {START_S:g} s")

    async def run(self, code: str) -> CodeOutcome:
        """Run `code` until it ends or exceeds a limit, which also ends the process.

        The process group is stopped until the next call, so that threads of the code use no processor time.
        """
        mark = secrets.token_hex(8)
        data = code.encode(errors="replace")
        output: bytearray | None = None
        ending: CodeEnding | None = None
        self._signal(signal.SIGCONT)
        with anyio.move_on_after(self._limits.wall_s) as deadline:
            async with task_group() as group:
                if self._check_disk:
                    group.start_soon(self._watch_disk, deadline)
                try:
                    await self._send(f"{mark} {len(data)}\n".encode() + data)
                    output = await self._read_until(
                        f"\0{mark} ".encode(), most=self._limits.output_bytes + _BEYOND_BYTES
                    )
                    if output is not None:
                        status = await self._read_until(b"\n", most=_BEYOND_BYTES)
                        ending = "ok" if status is not None and bytes(status) == b"ok" else "error"
                except (BrokenPipeError, anyio.ClosedResourceError):
                    pass  # the process has ended
                group.cancel_scope.cancel()
        if ending is not None:
            self._signal(signal.SIGSTOP)
            if self._check_disk and (self._disk_exceeded or await self._exceeds_disk()):
                ending, self._disk_exceeded = None, True
        if ending is None:
            ending = await self._stop(timed_out=deadline.cancelled_caught)
            output = self._unread if output is None else output
        assert output is not None
        if ending == "output":
            del output[self._limits.output_bytes :]
        exit_code = self._process.returncode if ending == "died" else None
        return CodeOutcome(output.decode(errors="replace"), ending, exit_code)

    async def _watch_disk(self, call: anyio.CancelScope) -> None:
        """Cancel the call as soon as the files of the code exceed their limit."""
        while True:
            await anyio.sleep(_DISK_CHECK_S)
            if await self._exceeds_disk():
                self._disk_exceeded = True
                call.cancel()

    async def _exceeds_disk(self) -> bool:
        """Return whether the files exceed their limit, or cannot be counted within 10 s."""
        with anyio.move_on_after(_CLOSE_S):
            return await to_thread.run_sync(
                work_dir.exceeds,
                self._directory,
                self._process.pid,
                self._limits.disk_mib << 20,
                self._limits.file_mib << 20,
                abandon_on_cancel=True,
                limiter=self._threads,
            )
        return True

    async def _stop(self, *, timed_out: bool) -> CodeEnding:
        """End the process if it has not ended by itself, and return how the code ended."""
        self.alive = False
        flooded = len(self._unread) > self._limits.output_bytes + _BEYOND_BYTES
        if not (timed_out or flooded or self._disk_exceeded):
            with anyio.move_on_after(_CLOSE_S):
                await self._process.wait()
        await self._kill()
        if self._disk_exceeded:
            return "disk"
        if timed_out:
            return "timeout"
        if flooded:
            return "output"
        return "cpu" if self._process.returncode == -signal.SIGXCPU else "died"

    async def _send(self, data: bytes) -> None:
        while data:
            if self._stdin.closed:
                raise anyio.ClosedResourceError
            await anyio.wait_writable(self._stdin)
            data = data[self._stdin.write(data) or 0 :]

    async def _read_until(self, end: bytes, *, most: int) -> bytearray | None:
        """Consume the output up to and including `end`, and return it without `end`. Return None if the stream ends
        first or exceeds `most` bytes."""
        looked = 0
        while (at := self._unread.find(end, looked)) < 0:
            looked = max(0, len(self._unread) - len(end) + 1)
            if len(self._unread) > most:
                return None
            await anyio.wait_readable(self._stdout)
            data = self._stdout.read(1 << 16)
            if data == b"":
                return None
            self._unread += data or b""
        before = self._unread[:at]
        del self._unread[: at + len(end)]
        return before

    async def close(self) -> None:
        """End the process group and remove its directory. Shielded; takes at most 10 s."""
        self.alive = False
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_CLOSE_S) as deadline:
                await self._kill()
                for pipe in (self._stdin, self._stdout):
                    if not pipe.closed:
                        anyio.notify_closing(pipe)
                        pipe.close()
                await self._process.aclose()
                await to_thread.run_sync(
                    work_dir.remove, self._directory, abandon_on_cancel=True, limiter=self._threads
                )
            if deadline.cancelled_caught:
                log.warning("a process for code could not be ended within %g s: pid %d", _CLOSE_S, self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        # The process is reaped only when its exit code is known, so its pid cannot have been reused.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _kill(self) -> None:
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
                await self._process.wait()


_BOOT = "import sys; sys.path.append({here!r}); from confined.cell import main; sys.path.remove({here!r}); main()"


class CodeSandbox:
    """Starts confined processes with the same settings."""

    def __init__(
        self,
        limits: CodeLimits,
        *,
        network: bool = False,
        shared_files: bool = False,
        import_paths: Sequence[str] = (),
        read_paths: Sequence[str] = (),
        keep: bool = False,
        mechanisms: Collection[str] = MECHANISMS,
    ) -> None:
        """Check which walls this machine supports. Blocks for about 0.1 s.

        Args:
            network: Allow the network.
            shared_files: Accept that the code can access the files of the run's user if this machine cannot prevent it.
            import_paths: Directories of packages, searched after the standard library.
            read_paths: Files and directories that the code may read.
            keep: Let a process run several pieces of code, which share their variables.
            mechanisms: The items of `MECHANISMS` to use.

        Raises:
            ConfigError: this machine does not support a required wall, and the message says what is missing; or pipes
                and sockets may need all of the memory.
        """
        self.limits = limits
        self._address_mib = _address_mib(limits)
        self._network = network
        self._import_paths = [os.path.abspath(path) for path in import_paths]
        self._read_paths = [os.path.abspath(path) for path in read_paths]
        self._keep = keep
        self._required = [
            wall for wall, waived in (("network", network), ("files", shared_files), ("processes", False)) if not waived
        ]
        # The process uses no virtual environment, only the standard library and `import_paths`.
        self._python = os.path.realpath(sys.executable)
        self._threads = anyio.CapacityLimiter(math.inf)
        # Each start uses a core, and the event loop for a moment: more concurrent starts would only block the loop.
        self._starts = anyio.CapacityLimiter(os.cpu_count() or 1)
        self._mechanisms, self.walls = self._find(mechanisms)

    def _find(self, mechanisms: Collection[str]) -> tuple[list[str], ConfinementReport]:
        """Return the mechanisms that work, with the walls that they provide.

        Mechanisms that fail are left out of the next probe, because a namespace that is only partly set up is unsafe.
        """
        if sys.platform != "linux":
            raise ConfigError(f"code of a model can only be confined on Linux, but this is {sys.platform}")
        usable, missing = list(mechanisms), dict[str, str]()
        while True:
            walls = self._probe(usable)
            missing.update(walls.missing)
            if not walls.missing:
                break
            usable = [name for name in usable if name not in walls.missing]
        if unwalled := self._unwalled(walls):
            reasons = "".join(f"\n    {name}: {reason}" for name, reason in missing.items())
            raise ConfigError(
                f"code of a model cannot be kept from the {' and '.join(unwalled)} of this machine: "
                f"{_lacking(unwalled)}{reasons}"
            )
        return usable, ConfinementReport(walls.mechanisms, missing)

    def _unwalled(self, walls: ConfinementReport) -> list[str]:
        return [wall for wall in self._required if not walls.mechanisms.get(wall)]

    def _probe(self, mechanisms: list[str]) -> ConfinementReport:
        with tempfile.TemporaryDirectory(prefix="asyncrl-code-") as directory:
            try:
                done = subprocess.run(
                    self._command(directory, mechanisms),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=directory,
                    env=_environment(directory),
                    start_new_session=True,
                    timeout=START_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise InfraError.wrap(f"a process for code did not start within {START_S:g} s", error) from error
        report, ended, _ = done.stdout.decode(errors="replace").partition("\n\n")
        if not ended:
            raise BugError(f"a process for code ended with {done.returncode} before it was ready", report)
        return _parsed(report)

    def _command(self, directory: str, mechanisms: list[str]) -> list[str]:
        settings = ConfinementSettings(
            **{name: getattr(self.limits, name) for name in CodeLimits.model_fields},
            address_mib=self._address_mib,
            work_dir=directory,
            read_paths=self._read_paths,
            import_paths=self._import_paths,
            mechanisms=mechanisms,
            network=self._network,
            keep=self._keep,
        )
        boot = _BOOT.format(here=str(Path(__file__).parent))
        return [self._python, "-I", "-S", "-X", "utf8", "-c", boot, settings.encode()]

    async def start(self) -> ConfinedProcess:
        """Start a process that waits for code; the caller must close it.

        Raises:
            InfraError: the process did not start, or lacks a required wall.
        """
        async with self._starts:
            with anyio.CancelScope(shield=True):  # a cancelled start would leave a process behind
                directory = await to_thread.run_sync(work_dir.make, limiter=self._threads)
                # For `subprocess.PIPE`, uvloop uses Unix sockets, through which the code could send descriptors.
                (its_input, stdin), (stdout, its_output) = os.pipe(), os.pipe()
                os.set_blocking(stdin, False)
                os.set_blocking(stdout, False)
                pipes = FileIO(stdin, "wb"), FileIO(stdout)
                try:
                    process = await anyio.open_process(
                        self._command(directory, self._mechanisms),
                        stdin=its_input,
                        stdout=its_output,
                        stderr=subprocess.STDOUT,
                        cwd=directory,
                        env=_environment(directory),
                        start_new_session=True,
                    )
                except OSError as error:
                    for pipe in pipes:
                        pipe.close()
                    os.rmdir(directory)
                    raise InfraError(f"a process for code could not be started: {error}") from error
                finally:
                    os.close(its_input)
                    os.close(its_output)
            # From outside of a separate root directory, which has a limit itself, the directory looks empty.
            check_disk = "root" not in self.walls.mechanisms["files"]
            confined = ConfinedProcess(process, *pipes, directory, self.limits, self._threads, check_disk=check_disk)
            try:
                walls = _parsed(await confined.greeting())
                if missing := self._unwalled(walls):
                    problem = f"{', '.join(missing)}: {dict(walls.missing)}"
                    raise InfraError(f"a process for code started without its walls: {problem}")
            except BaseException:
                await confined.close()
                raise
        return confined


def _address_mib(limits: CodeLimits) -> int:
    """Return the memory that remains for the address space, in MiB, if all descriptors hold as much as they can.

    A socket sends while its buffer is not full, at most half a buffer at once. The code cannot enlarge buffers.

    Raises:
        ConfigError: too little remains for Python.
    """
    with socket.socket(socket.AF_UNIX) as example:
        socket_bytes = 2 * example.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    pipe_bytes = _PIPE_PAGES * resource.getpagesize()
    buffers_mib = math.ceil(limits.open_files * max(socket_bytes, pipe_bytes) / (1 << 20))
    if limits.memory_mib < buffers_mib + _PYTHON_MIB:
        raise ConfigError(
            f"memory_mib: {limits.memory_mib} is too little: Python needs {_PYTHON_MIB} MiB, and open_files: "
            f"{limits.open_files} lets pipes and sockets hold {buffers_mib} MiB (net.core.wmem_default sets the size "
            f"of their buffers); set memory_mib to at least {buffers_mib + _PYTHON_MIB}, or lower open_files"
        )
    return limits.memory_mib - buffers_mib


def _parsed(report: str) -> ConfinementReport:
    """Parse the report of a confined process; see `ConfinementReport.__repr__`."""
    return ConfinementReport(*ast.literal_eval(report))


def _lacking(walls: list[str]) -> str:
    """Return advice about missing walls."""
    waivers = {"network": "{network: allowed}", "files": "{files: shared}"}
    advice = "this requires Linux with seccomp, and Landlock (Linux 6.2 or newer) or namespaces"
    return "; ".join([advice, *(f"config: {waivers[wall]} allows this access" for wall in walls if wall in waivers)])


def _environment(directory: str) -> dict[str, str]:
    """Return a new environment with the path of the interpreter's libraries. The parent's may contain secrets."""
    environment = {"LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory, "OPENBLAS_NUM_THREADS": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = libraries
    return environment

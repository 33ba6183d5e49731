"""One confined process, seen from outside: what it is sent, what it says, how it is ended."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from asyncrl.failures import DeadlineError, InfraError

log = logging.getLogger(__name__)

Ending = Literal["ok", "error", "timeout", "cpu", "output", "died"]
"""Of a piece of code: it ran to its end; it raised; it was stopped for its wall time, its processor time, or what it
wrote past its standard output; its process ended by itself or by a signal."""

START_S = 20.0
"""From the start of a process until it has said what walls it is in."""
_CLOSE_S = 10.0
_BEYOND_BYTES = 64 << 10
"""A traceback and the like, behind the output. What writes more goes around `sys.stdout`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one piece of code; of memory, threads and files: of one process."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mib: int = 512
    """Of address space, Python's own 30 MiB included."""
    file_mib: int = 16
    """The largest file."""
    disk_mib: int = 64
    """All files."""
    open_files: int = 64
    threads: int = 32
    """Counted where users or their processes can be told apart; else only memory bounds them."""
    output_bytes: int = 32 << 10

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}; expected a positive number")
            if name != "wall_s" and value != int(value):
                raise ValueError(f"{name} = {value!r}; expected a whole number")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a piece of code."""

    output: str
    """Standard output and standard error, the value of the last expression, the traceback."""
    ending: Ending
    exit_code: int | None = None
    """With `died`; negative: the signal."""
    wall_s: float = 0.0


class ConfinedProcess:
    """One process, in walls, and the codes that it runs one after the other."""

    def __init__(self, process: Process, directory: str, limits: Limits, threads: anyio.CapacityLimiter) -> None:
        self._process = process
        self._directory = directory
        self._limits = limits
        self._threads = threads
        self._unread = bytearray()
        self.alive = True
        """It can run more code."""

    async def greeting(self) -> str:
        """What it says before it sees any code: the report of `confined.cell.describe`.

        Raises:
            InfraError: it did not come up.
        """
        with anyio.move_on_after(START_S):
            report = await self._read_until(b"\n\n", most=_BEYOND_BYTES)
            if report is None:
                raise InfraError("a process for code ended before it began", self._unread.decode(errors="replace"))
            return report.decode(errors="replace")
        raise DeadlineError(f"a process for code was not up within {START_S:g} s")

    async def run(self, code: str) -> Outcome:
        """Run `code` to its end, or to one of its limits; then the process is over."""
        started = time.monotonic()
        mark = secrets.token_hex(8)
        data = code.encode(errors="replace")
        output: bytearray | None = None
        ending: Ending | None = None
        with anyio.move_on_after(self._limits.wall_s) as deadline:
            try:
                await self._stdin.send(f"{mark} {len(data)}\n".encode() + data)
                output = await self._read_until(f"\0{mark} ".encode(), most=self._limits.output_bytes + _BEYOND_BYTES)
                if output is not None:
                    status = await self._read_until(b"\n", most=_BEYOND_BYTES)
                    ending = "ok" if status is not None and bytes(status) == b"ok" else "error"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # it has ended
        if ending is None:
            ending = await self._stop(timed_out=deadline.cancelled_caught)
            output = self._unread
        assert output is not None
        if ending == "output":
            del output[self._limits.output_bytes :]
        exit_code = self._process.returncode if ending == "died" else None
        return Outcome(output.decode(errors="replace"), ending, exit_code, time.monotonic() - started)

    async def _stop(self, *, timed_out: bool) -> Ending:
        """The process is over, or has to be. Why?"""
        self.alive = False
        flooded = len(self._unread) > self._limits.output_bytes + _BEYOND_BYTES
        if not (timed_out or flooded):
            with anyio.move_on_after(_CLOSE_S):
                await self._process.wait()
        await self._kill()
        if timed_out:
            return "timeout"
        if flooded:
            return "output"
        return "cpu" if self._process.returncode == -signal.SIGXCPU else "died"

    async def _read_until(self, end: bytes, *, most: int) -> bytearray | None:
        """What comes before `end`, which is consumed; None if the stream ends first, or is longer than `most`."""
        looked = 0
        while (at := self._unread.find(end, looked)) < 0:
            looked = max(0, len(self._unread) - len(end) + 1)
            if len(self._unread) > most:
                return None
            try:
                self._unread += await self._stdout.receive(1 << 16)
            except anyio.EndOfStream:
                return None
        before = self._unread[:at]
        del self._unread[: at + len(end)]
        return before

    async def close(self) -> None:
        """End it and whatever it has started, and remove its directory. Shielded; takes at most 10 s."""
        self.alive = False
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_CLOSE_S) as deadline:
                await self._kill()
                await self._process.aclose()
                await to_thread.run_sync(_remove, self._directory, abandon_on_cancel=True, limiter=self._threads)
            if deadline.cancelled_caught:
                log.warning("a process for code could not be ended within %g s: pid %d", _CLOSE_S, self._process.pid)

    async def _kill(self) -> None:
        # The leader is not reaped before its exit code is known, so its number is nobody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
                await self._process.wait()

    @property
    def _stdin(self) -> ByteSendStream:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> ByteReceiveStream:
        assert self._process.stdout is not None
        return self._process.stdout


def _remove(directory: str) -> None:
    """Whatever the code has made of it. Its process is dead: nothing changes meanwhile."""
    try:
        for parent, names, _ in os.walk(directory):
            for name in names:
                if not os.path.islink(path := os.path.join(parent, name)):
                    os.chmod(path, 0o700)
        shutil.rmtree(directory)
    except (OSError, RecursionError) as error:
        log.warning("the working directory of a code could not be removed: %s: %s", directory, error)

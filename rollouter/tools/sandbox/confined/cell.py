"""Entry point of the confined process: executes code from standard input like cells of a notebook.

    in   <mark> <length>\n<code, UTF-8>
    out  the report of the walls, an empty line; then for each piece of code: its output, \0<mark> <ok|error>\n

Standard output and standard error of the code are one stream. Output beyond `output_bytes` is dropped here. The reader
of the stream bounds the output of code that bypasses `sys.stdout`.
"""

from __future__ import annotations

import _ast
import io
import os
import resource
import sys
from types import ModuleType

from .walls import ConfinementSettings, confine

_STDERR = 2
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
_TRACEBACK_CHARS = 4000
_RESERVE_BYTES = 8 << 20
"""Memory that is reserved for the traceback of code that has used up all other memory."""


def main() -> None:
    # Under uvloop, a process inherits descriptors of its parent.
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > _STDERR:
            os.closerange(number, number + 1)
    settings = ConfinementSettings.decode(sys.argv[1])
    report = confine(settings)
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [""]
    sys.path[:] = ["", *sys.path, *settings.import_paths]
    if settings.network:
        _pair_internet_sockets()
    _write(f"{report!r}\n\n".encode())
    cell = CodeCell(settings)
    while header := requests.readline():
        mark, length = header.decode().split()
        status = cell.run(requests.read(int(length)).decode(errors="replace"))
        _write(f"\0{mark} {status}\n".encode())
        if not settings.keep:
            break
    os._exit(0)  # do not wait for threads of the code


def _pair_internet_sockets() -> None:
    """Let `socket.socketpair`, and thus asyncio, connect two internet sockets, as on systems without Unix sockets."""
    import _socket

    del _socket.socketpair


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


class BoundedOutput(io.RawIOBase):
    """Standard output that drops everything beyond a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self.left_out = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        _write(bytes(view[: self._left]))
        self.left_out += max(0, len(view) - self._left)
        self._left = max(0, self._left - len(view))
        return len(view)


class CodeCell:
    """Runs all code of a process in one module `__main__`."""

    def __init__(self, settings: ConfinementSettings) -> None:
        self._settings = settings
        self._module = ModuleType("__main__")
        self._count = 0

    def run(self, code: str) -> str:
        """Run `code`, print the value of its last expression or its traceback, and return `ok` or `error`."""
        self._count += 1
        name = f"<cell {self._count}>"
        sys.modules["__main__"] = self._module
        output = BoundedOutput(self._settings.output_bytes)
        # Write through, so that no output is lost, however the process ends.
        sys.stdout = sys.stderr = io.TextIOWrapper(
            output,
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        if self._settings.keep:
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime) + 1 + self._settings.cpu_s
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        reserve = bytearray(_RESERVE_BYTES)
        try:
            execute(code, name, self._module.__dict__)
            status = "ok"
        except SystemExit as leaving:
            if isinstance(leaving.code, str):
                print(leaving.code)  # noqa: T201
            status = "ok" if not leaving.code else "error"
        except BaseException as error:  # noqa: BLE001  any exception of the code is its outcome
            del reserve
            text = format_traceback(error, code, name, self._settings.memory_mib)
            status = "error"
            _write(text.encode(errors="backslashreplace"))
        if output.left_out:
            _write(f"\n[{output.left_out} bytes of output left out]\n".encode())
        return status


def execute(code: str, name: str, variables: dict[str, object]) -> None:
    """Run `code`; if it ends in an expression, print its value unless it is None."""
    # `dont_inherit`: the future statements of this module must not affect the code.
    tree = compile(code, name, "exec", flags=_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), variables)
    if last is not None:
        value = eval(compile(_ast.Expression(body=last.value), name, "eval", dont_inherit=True), variables)
        if value is not None:
            variables["_"] = value
            print(repr(value))  # noqa: T201


def format_traceback(error: BaseException, code: str, name: str, memory_mib: int) -> str:
    """Format the traceback without the frames of this module. The middle of a long traceback is cut."""
    import linecache
    import traceback

    linecache.cache[name] = (len(code), None, [line + "\n" for line in code.splitlines()], name)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > _TRACEBACK_CHARS:
        text = f"{text[: _TRACEBACK_CHARS // 4]}\n[…]\n{text[-_TRACEBACK_CHARS * 3 // 4 :]}"
    if isinstance(error, MemoryError):
        text += f"The code may use at most {memory_mib} MiB of memory.\n"
    return text

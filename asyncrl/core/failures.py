"""The failure classes of docs/design.md §6, as exceptions that can be pickled between processes.

Each one carries plain strings only, so it can be pickled no matter which library raised the original, and the part
that decides what to do (retry, drop, stop) never has to import that library.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Self
from urllib.parse import quote

from asyncrl.core.text import encodable

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Warning|Exit|Interrupt)\b(:|$)")
"""Matches the start of the line that names the exception; its message may span several lines."""


_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>\S+)(?:\n +(?P<code>.*))?', re.MULTILINE)
_ROOT = Path(__file__).parents[2]
_NOT_THE_USERS = (
    *(f"{_ROOT / package}{os.sep}" for package in ("asyncrl", "rollouter", "trainer", "skip")),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    "<",
)
"""Beginnings of the paths of files that are not the user's."""
_hidden: dict[str, str] = {}
"""References by the secrets that this process has read."""
SHORTEST_HIDDEN = 4
"""Minimum length of a value that texts hide. Shorter ones are parts of other words."""


def hide(secret: str, reference: str) -> None:
    """Make `conceal`, and all errors that this process raises from now on, show `reference` instead of `secret`, also
    where it is quoted as a literal of Python, in JSON or in a URL, and instead of each of its lines, since programs
    indent and prefix the lines that they print."""
    for part in dict.fromkeys((secret, *map(str.strip, secret.splitlines()))):
        if len(part) >= SHORTEST_HIDDEN:
            quoted = (repr(part)[1:-1], json.dumps(part)[1:-1], quote(part), quote(part, safe=""))
            _hidden.update(dict.fromkeys((part, *quoted), reference))


def conceal(text: str) -> str:
    """Return `text` with the secrets that this process has read replaced by their references."""
    for secret in sorted(_hidden, key=len, reverse=True):
        text = text.replace(secret, _hidden[secret])
    return text


class AsyncRLError(Exception):
    """Base of every error this project raises on purpose. Its texts have no secret that this process has read.

    `cause` is the original traceback as text, empty if there is none; it is shown below the message. Both may quote a
    model or a tool, so lone surrogates in them are replaced.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        self.message = encodable(conceal(message))
        self.cause = encodable(conceal(cause))
        super().__init__(self.message, self.cause)

    def __str__(self) -> str:
        return f"{self.message}\n{self.cause}".rstrip() if self.cause else self.message

    @property
    def brief(self) -> str:
        """Return the message and the exception line of the cause, without frames. A line that the message contains
        is omitted."""
        reason = last_exception_line(self.cause)
        is_in_message = (reason.partition(": ")[2] or reason) in self.message
        return self.message if is_in_message else f"{self.message}\n    because: {reason}"

    @classmethod
    def wrap(cls, message: str, error: BaseException) -> Self:
        """Return an error of this class that keeps the traceback of `error` as text."""
        return cls(message, "".join(traceback.format_exception(error)))


class ConfigError(AsyncRLError):
    """A key, value or combination in the configuration that cannot work. Exit code 2."""


class InfraError(AsyncRLError):
    """An engine, replica, node or connection failed. A retry elsewhere may succeed, within a budget."""


class DeadlineError(InfraError):
    """An external call did not answer within its configured deadline."""


class EngineCrashError(InfraError):
    """An engine, or its replica, exited or hung while it had requests. Any of them may be the cause."""

    replica: str = ""
    """The replica's name, the same in the errors of all affected requests; empty: not known yet."""


class ReplicaLeftError(InfraError):
    """A replica left as planned: it was scaled down, or its node was preempted. No request is the cause, and a call to
    another replica is no further attempt."""


class FencedError(InfraError):
    """This process is an old incarnation of a part that has been replaced: its calls are refused."""


class DiskFullError(InfraError):
    """The disk of the run directory is full. A restart would fail the same way, so the run stops."""


class DataError(AsyncRLError):
    """A prompt or row that cannot be used. The sample is DROPPED with a reason."""


class PoisonError(DataError):
    """A prompt that repeatedly crashed engines. The sample is DROPPED(failed); the message has the evidence."""


class UserCodeError(AsyncRLError):
    """The user's reward function, tool or data set raised an error. `cause` is the original traceback."""


class DivergenceError(AsyncRLError):
    """The loss or the gradient is not finite. The optimizer did not step; the run stops."""


class BugError(AsyncRLError):
    """A bug in asyncrl: an illegal transition, or inconsistent sample counts. The run stops at once."""


def last_exception_line(cause: str) -> str:
    """Return the first line of the last exception in the traceback `cause`; empty for no cause."""
    lines = [line for line in cause.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [""])[-1].strip()


def users_frame(cause: str) -> str:
    """Return the last frame of the traceback `cause` that is in the user's code, as `FILE line N, in NAME: CODE`.

    Empty if there is none: frames of this project, of Python and of installed packages do not count.
    """
    found = [match for match in _FRAME.finditer(cause) if not match["file"].startswith(_NOT_THE_USERS)]
    own = [match for match in found if "site-packages" not in match["file"]]
    if not own:
        return ""
    frame = own[-1]
    code = f": {frame['code'].strip()}" if frame["code"] else ""
    return f"{frame['file']} line {frame['line']}, in {frame['name']}{code}"


def first_failure(error: BaseException) -> BaseException:
    """Return the first exception inside an exception group, at any depth; `error` itself if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

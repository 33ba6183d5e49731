"""The failure classes of docs/design.md §6, as exceptions that survive a trip between processes.

Every one carries plain strings only, so it pickles whatever library raised the original, and the part that decides
what to do (retry, drop, stop) never has to import that library.
"""

from __future__ import annotations

import re
import traceback
from typing import Self

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Warning|Exit|Interrupt)\b(:|$)")
"""How a traceback's last line begins, which a message of several lines may follow."""


class AsyncRLError(Exception):
    """Base of every error this project raises on purpose.

    `cause` is the original traceback as text, empty if there is none; it is shown below the message.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message, cause)
        self.message = message
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.message}\n{self.cause}".rstrip() if self.cause else self.message

    @property
    def brief(self) -> str:
        """The message, and what the cause says in its last line unless that is in it: no frames."""
        reason = last_words(self.cause)
        told = (reason.partition(": ")[2] or reason) in self.message
        return self.message if told else f"{self.message}\n    because: {reason}"

    @classmethod
    def wrap(cls, message: str, error: BaseException) -> Self:
        """An error of this class about `error`, its traceback kept as text."""
        return cls(message, "".join(traceback.format_exception(error)))


class ConfigError(AsyncRLError):
    """A key, value or combination in the configuration that cannot work. Exit code 2."""


class InfraError(AsyncRLError):
    """An engine, replica, node or connection failed. Worth a retry elsewhere, within a budget."""


class DeadlineError(InfraError):
    """An external call did not answer within its configured deadline."""


class EngineCrashError(InfraError):
    """An engine, or the replica around it, ended or hung while it had requests. Each of them may be what ended it."""

    replica: str = ""
    """Its name, the same for all whose requests were there; empty: not known yet."""


class FencedError(InfraError):
    """This process is an old incarnation of a part that has been replaced: nothing it does counts any more."""


class DiskFullError(InfraError):
    """No space is left where the run keeps its records. A restart would meet it again: the run stops."""


class DataError(AsyncRLError):
    """A prompt or row that cannot be used. The sample is DROPPED with a reason."""


class PoisonError(DataError):
    """A prompt in whose presence engines crash. The sample is DROPPED(failed); the message has the evidence."""


class UserCodeError(AsyncRLError):
    """A reward function, tool or data set of the user raised. `cause` is the original traceback."""


class DivergenceError(AsyncRLError):
    """The loss or the gradient is not finite. No step was taken on it; the run stops."""


class BugError(AsyncRLError):
    """An illegal transition or books that don't balance: ours to fix. The run stops at once."""


def last_words(cause: str) -> str:
    """What the traceback `cause` ends with: the first line of the last exception in it; empty for no cause."""
    lines = [line for line in cause.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [""])[-1].strip()


def first_failure(error: BaseException) -> BaseException:
    """What a task group failed of: the first exception inside its group, at any depth; else `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

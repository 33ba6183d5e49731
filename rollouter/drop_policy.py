"""Which failure drops a sample and which stops the run. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from asyncrl.failures import AsyncRLError, DataError, PoisonError, UserCodeError
from asyncrl.trajectory import CallStatus
from asyncrl.types import DropReason, SampleId


class OverlongError(DataError):
    """The prompt leaves no room for a response in the model's context."""


class ToolFailedError(UserCodeError):
    """A tool, a user or an environment failed, and was not to be told to the model."""

    status: CallStatus = "raised"
    """What became of a tool's call."""

    def __init__(self, message: str, cause: str = "", on_error: Literal["stop", "drop"] = "stop") -> None:
        super().__init__(message, cause)
        self.on_error: Literal["stop", "drop"] = on_error


class MismatchError(DataError):
    """A finished conversation has other tokens than the chat template gives it, and that is not to be trained on."""


class TooLongError(DataError):
    """The sample was not generated within its time."""


def lasts(error: DataError | UserCodeError) -> bool:
    """It is the prompt's own, and would be the same another time."""
    return isinstance(error, DataError) and not isinstance(error, TooLongError | PoisonError | MismatchError)


class Drop(NamedTuple):
    reason: DropReason
    kind: str
    """What went wrong, in words that are the same for all samples of one kind."""
    first: bool
    """The first of its kind: worth a line in the log."""


class DropRule:
    """Data errors drop, errors of user code as `reward.on_error` says; nothing drops for ever."""

    def __init__(self, *, on_error: Literal["stop", "drop"], max_errors: int, num_prompts: int) -> None:
        self._on_error = on_error
        self._max_errors = max_errors
        self._num_prompts = num_prompts
        self._in_a_row = 0
        self._user_errors = 0
        self._kinds: Counter[str] = Counter()
        self.messages: list[str] = []
        """Of the first sample of each kind, why it was dropped: for whoever runs it."""

    @property
    def counts(self) -> dict[str, int]:
        """Samples dropped, by kind."""
        return dict(self._kinds)

    def passed(self) -> None:
        """A sample got through."""
        self._in_a_row = 0

    def failed(self, sample_id: SampleId | str, error: DataError | UserCodeError) -> Drop:
        """Decide about a sample that failed.

        Raises:
            UserCodeError: user code failed and the run must stop: `on_error` is `stop`, or `max_errors` are exceeded.
            DataError: as many samples in a row as an epoch has prompts were dropped, so no prompt can get through.
        """
        self._in_a_row += 1
        if isinstance(error, UserCodeError):
            self._user_errors += 1
            on_error = error.on_error if isinstance(error, ToolFailedError) else self._on_error
            if on_error == "stop":
                raise UserCodeError(f"{sample_id}: {error.message}", error.cause)
            if self._user_errors > self._max_errors:
                raise UserCodeError(
                    f"{sample_id}: {error.message}\nThis is failure {self._user_errors} of user code, more than "
                    f"reward.max_errors = {self._max_errors}",
                    error.cause,
                )
            return self._drop(sample_id, DropReason.FAILED, "user code failed", error)
        if self._in_a_row >= self._num_prompts:
            raise DataError(
                f"{self._in_a_row} samples in a row were dropped, a whole epoch: no prompt gets through. The last one, "
                f"{sample_id}: {error.message}",
                error.cause,
            )
        if isinstance(error, OverlongError):
            return self._drop(sample_id, DropReason.OVERLONG, "prompt over length", error)
        if isinstance(error, TooLongError):
            return self._drop(sample_id, DropReason.FAILED, "took too long", error)
        if isinstance(error, MismatchError):
            return self._drop(sample_id, DropReason.FAILED, "other tokens than the chat template's", error)
        if isinstance(error, PoisonError):
            return self._drop(sample_id, DropReason.FAILED, "crashed engines", error)
        return self._drop(sample_id, DropReason.FAILED, "unusable prompt", error)

    def _drop(self, sample_id: SampleId | str, reason: DropReason, kind: str, error: AsyncRLError) -> Drop:
        self._kinds[kind] += 1
        if self._kinds[kind] == 1:
            self.messages.append(f"{sample_id} was dropped ({reason}), {kind}: {error.brief}; others are counted")
        return Drop(reason, kind, first=self._kinds[kind] == 1)

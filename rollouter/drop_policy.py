"""Decides whether a failure drops a sample or stops the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

import anyio

from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import AsyncRLError, DataError, PoisonError, UserCodeError
from asyncrl.core.trajectory import CallStatus
from asyncrl.core.types import DropReason, SampleId


class OverlongError(DataError):
    """The prompt leaves no room for a response in the model's context."""


class ToolFailedError(UserCodeError):
    """A tool, a simulated user or an environment failed, and the error must not be shown to the model."""

    status: CallStatus = "raised"
    """The status of the tool call."""

    def __init__(self, message: str, cause: str = "", on_error: Literal["stop", "drop"] = "stop") -> None:
        super().__init__(message, cause)
        self.on_error: Literal["stop", "drop"] = on_error


class MismatchError(DataError):
    """The tokens of a finished conversation differ from the chat template's, so it must not be trained on."""


class TooLongError(DataError):
    """The sample was not generated within its time limit."""


def is_permanent(error: DataError | UserCodeError) -> bool:
    """Return whether the prompt causes the error, so that it would occur again."""
    return isinstance(error, DataError) and not isinstance(error, TooLongError | PoisonError | MismatchError)


class DropDecision(NamedTuple):
    reason: DropReason
    kind: str
    """The kind of failure, by which drops are counted."""
    first: bool
    """Whether this is the first drop of its kind, which is logged as a warning."""


_DROPS: tuple[tuple[type[DataError], DropReason, str], ...] = (
    (OverlongError, DropReason.OVERLONG, "prompt over length"),
    (TooLongError, DropReason.FAILED, "took too long"),
    (MismatchError, DropReason.FAILED, "tokens differ from the chat template's"),
    (PoisonError, DropReason.FAILED, "crashed engines"),
    (DataError, DropReason.FAILED, "unusable prompt"),
)


class DropPolicy:
    """Drops samples for data errors and, depending on `reward.on_error`, for errors of user code; limits both."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        num_prompts: int,
        sample_s: float,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._sample_s = sample_s
        self._clock = clock
        self._consecutive_drops = 0
        self._first_drop_at = 0.0
        """When the first of the consecutive drops occurred."""
        self._user_errors = 0
        self._kinds: Counter[str] = Counter()
        self.messages: list[str] = []
        """Messages for the user, which say why the first sample of each kind of failure was dropped."""

    @property
    def counts(self) -> dict[str, int]:
        """Dropped samples by kind."""
        return dict(self._kinds)

    def note_success(self) -> None:
        self._consecutive_drops = 0

    def decide(self, sample_id: SampleId | str, error: DataError | UserCodeError) -> DropDecision:
        """Return why a failed sample is dropped.

        Raises:
            UserCodeError: user code failed and the run must stop: `on_error` is `stop`, or `max_errors` is exceeded.
            DataError: as many samples in a row were dropped as an epoch has prompts. Samples that were generated at the
                same time can all take too long for one cause, such as a lost connection, so such errors must also go on
                for the time limit of a sample.
        """
        self._consecutive_drops += 1
        if self._consecutive_drops == 1:
            self._first_drop_at = self._clock()
        if isinstance(error, UserCodeError):
            self._user_errors += 1
            on_error = error.on_error if isinstance(error, ToolFailedError) else self._config.on_error
            if on_error == "stop":
                raise UserCodeError(f"{sample_id}: {error.message}", error.cause)
            if self._user_errors > self._config.max_errors:
                raise UserCodeError(
                    f"{sample_id}: {error.message}\nThis is failure {self._user_errors} of user code, more than "
                    f"reward.max_errors = {self._config.max_errors}",
                    error.cause,
                )
            return self._drop(sample_id, DropReason.FAILED, "user code failed", error)
        shares_a_cause = isinstance(error, TooLongError) and self._clock() - self._first_drop_at < self._sample_s
        if self._consecutive_drops >= self._num_prompts and not shares_a_cause:
            raise DataError(
                f"{self._consecutive_drops} samples in a row were dropped, and an epoch has {self._num_prompts}: no "
                f"prompt gets through. The last one was {sample_id}: {error.message}",
                error.cause,
            )
        for error_class, reason, kind in _DROPS:
            if isinstance(error, error_class):
                return self._drop(sample_id, reason, kind, error)
        raise AssertionError("DataError is the last class")

    def _drop(self, sample_id: SampleId | str, reason: DropReason, kind: str, error: AsyncRLError) -> DropDecision:
        self._kinds[kind] += 1
        if self._kinds[kind] == 1:
            self.messages.append(f"{sample_id} was dropped ({reason}), {kind}: {error.brief}; others are only counted")
        return DropDecision(reason, kind, first=self._kinds[kind] == 1)

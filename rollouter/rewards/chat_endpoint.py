"""A client of one model behind an OpenAI-compatible endpoint, with deadlines and retries.

ask ─▶ limiter ─▶ one try, within timeout_s ─▶ text
          ▲              │ no connection, no answer in time, 408, 409, 429, 5xx
          └── 1 s, 2 s, … (or Retry-After) ◀──┘   max_attempts tries in all
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from asyncrl.core.failures import ConfigError, DataError, DeadlineError, InfraError
from asyncrl.core.text import encodable, safe_repr
from rollouter.user_code import shorten

FIRST_BACKOFF_S = 1.0
LONGEST_RETRY_AFTER_S = 60.0
"""Upper bound on the wait that a `Retry-After` header may ask for."""
CLOSE_S = 5.0
_RESERVED_FIELDS = ("model", "messages", "stream", "n")
_MISCONFIGURED = (401, 403, 404)
_LONGEST_REPLY = 300
"""Maximum number of characters of a server's message that an error quotes."""


class ChatEndpoint:
    """One model of one endpoint. Simulated users and judges use this class."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None,
        timeout_s: float,
        max_concurrency: int,
        max_attempts: int = 3,
        params: Mapping[str, Any] = {},
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """Check the arguments; nothing is sent yet.

        Args:
            api_key_env: The environment variable that contains the key; None if the endpoint needs no key.
            timeout_s: Deadline of one try in seconds; the time starts when the limiter lets the try run.
            params: Further fields of the request's body: `temperature`, `max_tokens`, ….

        Raises:
            ConfigError: `base_url` is not an http(s) address, the environment variable is not set, a number is not
                positive, or `params` has a field that this class sets.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url: {base_url!r} is not an address; write http://host:port/v1")
        if not (timeout_s > 0 and max_concurrency >= 1 and max_attempts >= 1):
            raise ConfigError(
                f"timeout_s = {timeout_s}, max_concurrency = {max_concurrency}, max_attempts = {max_attempts}: all "
                "three must be positive"
            )
        if reserved := [name for name in _RESERVED_FIELDS if name in params]:
            raise ConfigError(f"params.{reserved[0]}: it is set for every request; leave it out")
        from openai import AsyncOpenAI

        self._about = f"model {model!r} at {base_url}"
        self._model = model
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._params = dict(params)
        self._sleep = sleep
        self._tries = anyio.CapacityLimiter(max_concurrency)
        # The retries and timeouts of the package are off, because `ask` implements both.
        self._client = AsyncOpenAI(base_url=base_url, api_key=_key(api_key_env), max_retries=0, timeout=None)

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the model's answer to the conversation. The answer is not empty.

        Raises:
            InfraError: all tries failed; `DeadlineError` if the last one took too long.
            ConfigError: the endpoint has no such model or address, refuses the key, or is not a chat endpoint.
            DataError: the endpoint refuses this conversation, or answers without a text.
        """
        for attempt in range(1, self._max_attempts + 1):
            try:
                return await self._try(messages)
            except _RetryableError as failure:
                if attempt == self._max_attempts:
                    kind = DeadlineError if failure.late else InfraError
                    times = "once" if attempt == 1 else f"{attempt} times"
                    message = f"{self._about} failed {times}, the last time: {failure}"
                    raise kind.wrap(message, failure.__cause__ or failure) from failure
                await self._sleep(max(FIRST_BACKOFF_S * 2 ** (attempt - 1), failure.after_s))
        raise AssertionError("max_attempts is positive")

    async def aclose(self) -> None:
        """Close the connections."""
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self._client.close()

    async def _try(self, messages: Sequence[Mapping[str, Any]]) -> str:
        import openai

        async with self._tries:
            with anyio.move_on_after(self._timeout_s) as deadline:
                try:
                    # `extra_body` allows fields that the client's signature lacks.
                    answer = await self._client.chat.completions.create(
                        model=self._model,
                        messages=[dict(message) for message in messages],  # type: ignore[misc]
                        extra_body=self._params,
                    )
                except openai.APIStatusError as error:
                    raise self._status_error(error) from error
                except (openai.APIConnectionError, ValueError, RecursionError) as error:  # the body is not JSON
                    raise _RetryableError(f"{type(error).__name__}: {error.__cause__ or error}") from error
                return self._text(answer)
            assert deadline.cancelled_caught
        raise _RetryableError(f"no answer within timeout_s = {self._timeout_s:g} s", late=True)

    def _status_error(self, error: Any) -> Exception:
        """Convert an `openai.APIStatusError` to a `_RetryableError` or an `AsyncRLError`."""
        status: int = error.status_code
        reason = f"status {status}, {_cut(error.message)}"
        if status in (408, 409, 429) or status >= 500:
            return _RetryableError(reason, after_s=_retry_after_s(error.response.headers))
        if status in _MISCONFIGURED:
            fix = "check base_url and the model's name" if status == 404 else "check the key"
            return ConfigError.wrap(f"{self._about} cannot be asked: {reason}; {fix}", error)
        return DataError.wrap(f"{self._about} refuses the conversation: {reason}", error)

    def _text(self, answer: Any) -> str:
        if not hasattr(answer, "choices"):
            raise ConfigError(
                f"{self._about} answers with something other than a chat completion: {_cut(safe_repr(answer))}; most "
                "base_urls end in /v1"
            )
        if not answer.choices:
            raise DataError(f"{self._about} answered without a choice: {_cut(safe_repr(answer))}")
        try:
            choice = answer.choices[0]
            finish_reason, refusal, text = choice.finish_reason, choice.message.refusal, choice.message.content
        except (AttributeError, TypeError, LookupError) as error:
            # The client does not check the types of an answer.
            raise DataError(f"{self._about} answered with a malformed choice: {_cut(safe_repr(answer))}") from error
        if refusal or finish_reason == "content_filter":
            reason = f": {_cut(str(refusal))}" if refusal else ""
            raise DataError(f"{self._about} refused to answer{reason}")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{self._about} answered without a text, finish_reason {finish_reason!r}")
        return encodable(text)


class _RetryableError(Exception):
    """A failed try that may succeed when repeated."""

    def __init__(self, message: str, *, late: bool = False, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.late = late
        self.after_s = after_s


def _key(variable: str | None) -> str:
    if variable is None:
        return "none"  # the client requires a key
    if not (key := os.environ.get(variable)):
        raise ConfigError(
            f"api_key_env: the environment variable {variable!r} is not set, so the endpoint would refuse every "
            "request; export it where the run is started, or leave api_key_env out if no key is needed"
        )
    return key


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds of the header. A date, its other form, is ignored: it would need synchronized clocks."""
    try:
        seconds = float(headers.get("retry-after", 0.0))
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else 0.0


def _cut(text: str) -> str:
    return shorten(text, _LONGEST_REPLY)

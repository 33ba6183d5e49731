"""What the endpoint says to a request that it does not serve, as the OpenAI API says it. Pure."""

from __future__ import annotations

from typing import Any

NO_ROOM = "context_length_exceeded"


class RequestError(Exception):
    """A request that is refused. Nothing is recorded of it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unknown_key() -> RequestError:
    return RequestError(
        "no trajectory has this key: the Rollouter that gave it may have been replaced, or it is long over",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def closed() -> RequestError:
    return RequestError(
        "the trajectory of this key is over: its agent has ended, was out of time, or said that it was done",
        status=409,
        kind="conflict_error",
        code="trajectory_over",
    )


def engines_failed() -> RequestError:
    return RequestError(
        "the turn could not be made; why is in the run's own log",
        status=503,
        kind="server_error",
        code="engines_failed",
    )


def no_room(context_tokens: int, max_model_len: int, response_length: int) -> RequestError:
    return RequestError(
        f"there is no room for another turn behind these {context_tokens} tokens: a conversation may have "
        f"{max_model_len} (rollout.max_model_len), and {response_length} of them behind what it began with "
        "(rollout.response_length)",
        code=NO_ROOM,
        param="messages",
    )

"""The ASGI app of the engines' OpenAI API, built on Ray's ingress for LLMs.

    GET /health       200 if a replica can be sent requests, else 503
    GET /metrics      for Prometheus: requests of this API, and vLLM's own metrics by replica
    GET /v1/models    and what the ingress offers: chat, completions, embeddings, score, tokenize, detokenize

Errors have the form of the OpenAI API. Their texts are this project's or vLLM's about the request; those of Ray and of
failed engines are logged instead. Importing this module imports vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import ray
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from ray.serve.exceptions import RayServeException
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollouter.gateway.http import refused
from rollouter.gateway.protocol import NO_ROOM, RequestError, engines_failed, model_card, models_response
from rollouter.serving import ray_internals
from rollouter.serving.http_metrics import CONTENT_TYPE, HttpMetrics
from rollouter.serving.ray_internals import OpenAiIngress
from rollouter.serving.replica.deployment import OPENAI_METHODS
from rollouter.user_code import shorten

logger = logging.getLogger(__name__)

RETRY_S = 5
"""Seconds after which clients should repeat a request that no replica could take."""
MAX_MESSAGE = 1_000
_REQUEST_FIELDS = ("body", "query", "path", "header")
"""Where a value is in a request, as FastAPI names it."""
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "timeout"}


class ReplicaFleet(Protocol):
    """The calls of the app to its replicas, besides requests of clients."""

    def count(self) -> int:
        """Return how many replicas can be sent requests now."""

    async def metrics(self) -> Sequence[str]:
        """Return the metrics of each replica that answers, see `http_metrics.engine_metrics`."""


def kind_of(status: int) -> str:
    """Return the type of the OpenAI API's errors for an HTTP status."""
    if status in (401, 403):
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def unready() -> RequestError:
    """Return the refusal of a request that no replica can take."""
    return RequestError(
        "no engine is ready: they are starting, or being replaced; try again in a moment",
        status=503,
        kind=kind_of(503),
        code="engines_unavailable",
    )


def engine_refusal(error: Any) -> RequestError:
    """Convert vLLM's error (`ErrorInfo`) about a request. Errors of the engine itself are logged and not shown."""
    status = int(error.code)
    if status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
        logger.error("an engine failed at a request: %s", error.message)
        return engines_failed()
    too_long = "maximum context length" in error.message
    return RequestError(
        shorten(error.message, MAX_MESSAGE),
        status=400 if status == HTTPStatus.NOT_IMPLEMENTED else status,
        kind=kind_of(400),
        code=NO_ROOM if too_long else _CODES.get(status),
        param=error.param,
    )


def invalid_body(problems: Sequence[Any]) -> RequestError:
    """Convert pydantic's list of problems. Only the first one is shown: one wrong value has one for each type that the
    field may have."""
    first = problems[0] if problems else {"msg": "it has another form than this endpoint takes", "loc": ()}
    place = [str(part) for part in first["loc"] if part not in _REQUEST_FIELDS]
    param = ".".join(place) or None
    where = f"{param}: " if param else "the body cannot be used: "
    return RequestError(shorten(where + str(first["msg"]), MAX_MESSAGE), param=param, code="invalid_value")


def failure_of(error: Exception) -> RequestError:
    """Convert any other exception of a request. Only texts of mistakes in the request are shown."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, RequestError):
        return cause
    if isinstance(error, ValidationError):
        return invalid_body(error.errors())
    # Ray's ingress reads the parts of a content late, and raises a ValueError for those of a wrong form.
    if isinstance(cause, ray_internals.VLLM_CLIENT_ERRORS) or (cause is error and isinstance(error, ValueError)):
        return RequestError(shorten(str(cause), MAX_MESSAGE))
    logger.error("a request failed", exc_info=error)
    if isinstance(error, ray.exceptions.RayError | RayServeException):
        return engines_failed()
    return RequestError(
        "the request failed because of an error in the server, whose log has the reason",
        status=500,
        kind=kind_of(500),
        code="internal_error",
    )


class OpenAIApi(OpenAiIngress):
    """Ray's ingress with errors in the form of the OpenAI API."""

    def __init__(self, model: str, replicas: Any, fleet: ReplicaFleet) -> None:
        super().__init__(llm_deployments={model: replicas}, model_cards={model: model_card(model)})
        self._model = model
        self._fleet = fleet

    async def _get_model_id(self, model: str | None) -> str:
        return self.check_model(model)

    def check_model(self, model: str | None) -> str:
        """Return the name of the model.

        Raises:
            RequestError: the request is for another one.
        """
        if model not in (None, self._model):
            raise RequestError(
                f"there is no model {shorten(model, 80)!r}; this server has {self._model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return self._model

    async def _get_response(self, **request: Any) -> AsyncGenerator[Any, None]:
        """Yield the replica's answer. An error after the first item of a stream becomes its last event."""
        request["raw_request"].state.body_was_read = True
        if not self._fleet.count():
            raise unready()
        begun = False
        try:
            async for item in super()._get_response(**request):
                first = item[0] if isinstance(item, list) and item else item
                if isinstance(first, ray_internals.ErrorResponse):
                    raise engine_refusal(first.error)
                yield item
                begun = True
        except Exception as error:
            failure = failure_of(error)
            if not begun:
                raise failure from error
            yield f"data: {json.dumps(failure.body)}\n\n"


def openai_app(model: str, replicas: Any, fleet: ReplicaFleet) -> ASGIApp:
    """Return the ASGI app for these replicas of `model`.

    The app does not use Ray's development ingress, which would expose pause, sleep and weight updates over HTTP. It
    sends no CORS headers, so that a web page in the user's browser cannot reach a server on loopback.
    """
    api = OpenAIApi(model, replicas, fleet)
    metrics = HttpMetrics()
    app = FastAPI(title="asyncrl", exception_handlers={
        RequestError: _answer_refusal, RequestValidationError: _answer_invalid, HTTPException: _answer_http,
        ray_internals.OpenAIHTTPException: _answer_http,
    })  # fmt: skip
    for name in OPENAI_METHODS:
        ray_internals.DEFAULT_ENDPOINTS[name](app)(getattr(api, name))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(models_response(model))

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JSONResponse(model_card(api.check_model(name)))

    @app.get("/health")
    async def health() -> Response:
        if not (count := fleet.count()):
            raise unready()
        return JSONResponse({"status": "ok", "replicas": count})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(fleet.count(), await fleet.metrics()), media_type=CONTENT_TYPE)

    # The middleware that was added last runs first.
    app.add_middleware(_LastResort)
    app.add_middleware(ray_internals.SetRequestIdMiddleware)
    return metrics.counting(app)


async def _answer_refusal(request: Request, error: RequestError) -> Response:
    response = refused(error)
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["retry-after"] = str(RETRY_S)
    return response


async def _answer_invalid(request: Request, error: RequestValidationError) -> Response:
    return refused(invalid_body(error.errors()))


async def _answer_http(request: Request, error: Any) -> Response:
    """Answer an unknown path, a wrong method, or a refusal of Ray's ingress."""
    status = error.status_code
    message = {
        404: f"there is no {shorten(request.url.path, 200)} here; docs/serving.md lists the paths",
        405: f"{shorten(request.url.path, 200)} does not take {request.method} requests",
        408: "the request took too long",
    }.get(status, HTTPStatus(status).phrase)
    response = refused(RequestError(message, status=status, kind=kind_of(status), code=_CODES.get(status)))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


class _LastResort:
    """ASGI middleware that answers exceptions that no handler knows. Starlette's own would also raise them again.

    vLLM's validators raise a TypeError, for example, for some fields of a wrong type: while a body is read, every
    exception is about the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise
            await refused(_failure_at(scope, error))(scope, receive, send)


def _failure_at(scope: Scope, error: Exception) -> RequestError:
    known = isinstance(error, (ValueError, RequestError, *ray_internals.VLLM_CLIENT_ERRORS))
    if known or scope["method"] != "POST" or scope.get("state", {}).get("body_was_read"):
        return failure_of(error)
    logger.info("a body cannot be read", exc_info=error)
    return RequestError("the body cannot be used: a field has a wrong type", code="invalid_value")

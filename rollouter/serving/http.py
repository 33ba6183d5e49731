"""The OpenAI-compatible side of `asyncrl serve`: Ray's own ingress in front of the same replicas.

Not Ray's development ingress, which would put pause, sleep and weight updates on HTTP; and no CORS headers, so that a
web page in the user's browser cannot reach a server on loopback.
"""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress, make_fastapi_ingress
from ray.llm._internal.serve.core.ingress.middleware import SetRequestIdMiddleware, add_exception_handling_middleware
from ray.serve.llm import LLMConfig
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollouter.serving.engine import OpenAIEngine
from rollouter.serving.options import DEPLOYMENT_NAME, ServingOptions, deployment_options
from rollouter.serving.server import RolloutServer


class RequireKey:
    """ASGI middleware: every request must carry `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode()
            if not secrets.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": {"message": "missing or wrong API key", "code": 401}}, status_code=401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_http_app(options: ServingOptions, api_key: str | None) -> serve.Application:
    """Replicas behind the OpenAI-compatible ingress; `api_key` None: open to whoever reaches the address."""
    llm_config = LLMConfig(**options.llm_config)
    replicas = serve.deployment(RolloutServer, name=DEPLOYMENT_NAME, **deployment_options(options)).bind(
        llm_config, options=options, engine_cls=OpenAIEngine
    )
    ingress: Any = make_fastapi_ingress(OpenAiIngress, app=_web_app(api_key))
    return serve.deployment(
        ingress, name="openai", max_ongoing_requests=1_000_000, ray_actor_options={"num_cpus": 0}
    ).bind(
        llm_deployments={llm_config.model_id: replicas},
        model_cards={llm_config.model_id: to_model_metadata(llm_config.model_id, llm_config)},
    )


def _web_app(api_key: str | None) -> FastAPI:
    app = FastAPI(title="asyncrl serve")
    # Middleware runs from the last added to the first.
    add_exception_handling_middleware(app)
    app.add_middleware(SetRequestIdMiddleware)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    return app

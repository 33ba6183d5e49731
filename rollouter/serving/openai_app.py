"""The OpenAI API over the run's replicas, as the HTTP side's own process builds it: Ray's ingress for LLMs.

Not Ray's development ingress, which would put pause, sleep and weight updates on HTTP; and no CORS headers, so that a
web page in the user's browser cannot reach a server on loopback.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS, OpenAiIngress
from ray.llm._internal.serve.core.ingress.middleware import SetRequestIdMiddleware, add_exception_handling_middleware
from ray.serve.llm import LLMConfig

from rollouter.serving.options import ServingOptions


def openai_app(options: ServingOptions, replicas: Any) -> FastAPI:
    """`replicas`: a handle to the deployment of `OpenAIReplica`."""
    llm_config = LLMConfig(**options.llm_config)
    model = llm_config.model_id
    ingress = OpenAiIngress(
        llm_deployments={model: replicas}, model_cards={model: to_model_metadata(model, llm_config)}
    )
    app = FastAPI(title="asyncrl")
    for name, endpoint in DEFAULT_ENDPOINTS.items():
        endpoint(app)(getattr(ingress, name))
    # Middleware runs from the last added to the first.
    add_exception_handling_middleware(app)
    app.add_middleware(SetRequestIdMiddleware)
    return app

"""The HTTP side of `asyncrl serve`, and of a launch with agents of the user's: who is let in, and where requests go.

    trajectory's key ──▶ the Rollouter that gave it (`rollouter.gateway`)    recorded
    everybody else ───▶ the API key, if there is one ──▶ `openai_app` ──▶ replicas

`ray.serve.llm` imports vLLM when it is imported (7 s on CPU, and its messages on the terminal). The driver binds this
without it; only the processes that Serve starts pay.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncrl.failures import AsyncRLError, InfraError
from rollouter.agent.parsing import NO_TOOLS, check_format
from rollouter.gateway.asgi import TrajectoryKeys
from rollouter.serving.agents import RolloutCalls
from rollouter.serving.options import DEPLOYMENT_NAME, ServingOptions, deployment_options
from rollouter.serving.replica import RolloutReplica


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


class OpenAIReplica(RolloutReplica):
    """A replica whose engine has vLLM's OpenAI front end. What Ray's ingress calls is `LLMServer`'s."""

    async def __init__(self, options: ServingOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine.

        Raises:
            InfraError: it does not start; the engine's own error is the cause.
        """
        try:
            from ray.serve.llm import LLMConfig

            from rollouter.serving.engine import OpenAIEngine
            from rollouter.serving.server import RolloutServer

            self._server = RolloutServer.__new__(RolloutServer)
            made = self._server.__init__(LLMConfig(**options.llm_config), options=options, engine_cls=OpenAIEngine)  # type: ignore[misc]
            await made  # Serve awaits asynchronous constructors; plain Python does not
        except AsyncRLError:
            raise
        except Exception as error:  # noqa: BLE001  of any library, and typed here before it leaves the process
            model = options.llm_config["model_loading_config"]["model_source"]
            raise InfraError.wrap(f"the engine for {model} did not start", error) from None

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.chat(request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.completions(request, raw_request_info)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.embeddings(request, raw_request_info)

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.score(request, raw_request_info)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.tokenize(request, raw_request_info)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return await self._server.detokenize(request, raw_request_info)


class Front:
    """The HTTP side itself; Serve starts one."""

    def __init__(
        self, replicas: DeploymentHandle[Any], options: ServingOptions, api_key: str | None, trajectories: bool
    ) -> None:
        self._replicas = replicas
        self._options = options
        self._api_key = api_key
        self._trajectories = trajectories

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve, once, in the process that serves it."""
        from rollouter.serving.openai_app import openai_app

        app: ASGIApp = openai_app(self._options, self._replicas)
        if self._api_key is not None:
            app = RequireKey(app, key=self._api_key)
        return TrajectoryKeys(app, call=RolloutCalls(self._options.namespace)) if self._trajectories else app


def build_http_app(
    options: ServingOptions, api_key: str | None, *, call_format: str, trajectories: bool = False
) -> serve.Application:
    """Replicas behind the OpenAI API.

    Args:
        options: Of the replicas.
        api_key: None: open to whoever reaches the address.
        call_format: The name of vLLM's tool parser.
        trajectories: Requests with a trajectory's key are the Rollouter's.

    Raises:
        ConfigError: there is no such parser.
    """
    kwargs = dict(options.llm_config["engine_kwargs"])
    if call_format != NO_TOOLS:
        check_format(call_format)
        kwargs = {"enable_auto_tool_choice": True, "tool_call_parser": call_format, **kwargs}
    options = replace(options, llm_config={**options.llm_config, "engine_kwargs": kwargs})
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(OpenAIReplica)
    front = serve.deployment(name="openai", max_ongoing_requests=1_000_000, ray_actor_options={"num_cpus": 0})
    return front(serve.ingress()(Front)).bind(deployment.bind(options), options, api_key, trajectories)

"""The deployment of the engines: a `RolloutServer` behind a class that the driver can bind without importing vLLM.

Importing `ray.serve.llm` imports vLLM, which takes 7 s on CPU. Only the replicas need it, so only they import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from asyncrl.config.sections.base import ConfigSection
from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError
from asyncrl.core.imports import collection_paused
from rollouter.serving.options import ServingOptions
from rollouter.serving.ray_internals import import_llm_library, serve_log_stays_open

METHODS = (
    "generate_tokens",
    "apply_version",
    "broadcast_member",
    "sleep_engine",
    "wake_engine",
    "attach",
    "check_health",
    "record_autoscaling_stats",
)
OPENAI_METHODS = ("chat", "completions", "embeddings", "score", "tokenize", "detokenize")
"""The methods of `LLMServer` that Ray's ingress calls."""
HTTP_METHODS = (*OPENAI_METHODS, "engine_metrics")
"""The methods that only replicas behind the HTTP API offer."""


class _UserConfig(ConfigSection):
    """What `user_config` may change while the engine runs."""

    timeouts: dict[Literal["apply_s", "engine_s", "start_s"], float] = Field(default_factory=dict)
    """The time limits that a replica reads. The others belong to runs."""


class RolloutReplica:
    """Starts a `RolloutServer` and offers those of its methods that other processes call."""

    async def __init__(self, options: ServingOptions, *, openai: bool = False) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine, with vLLM's OpenAI front end if `openai`.

        Raises:
            InfraError: the engine does not start; its error is the cause.
        """
        # `ray_actor_options` of a Serve configuration replace the deployment's own, which have these variables.
        for name, value in options.env_vars.items():
            os.environ.setdefault(name, value)
        try:
            with collection_paused():
                import rollouter.serving.replica.vllm_imports  # noqa: F401  before Ray's LLM library imports vLLM

                import_llm_library()
                from rollouter.serving.replica.server import start_server

            with serve_log_stays_open():
                server: Any = await start_server(options, openai=openai)
        except AsyncRLError:
            raise
        except Exception as error:  # noqa: BLE001  an error of any library, which becomes a typed error
            model = options.llm_config["model_loading_config"]["model_source"]
            raise InfraError.wrap(f"the engine for {model} did not start", error) from None
        self._server, self._timeouts = server, options.timeouts
        for method in METHODS + HTTP_METHODS * openai:
            setattr(self, method, getattr(server, method))

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply Serve's `user_config` without a restart of the engine: `timeouts`, see `_UserConfig`.

        Raises:
            ConfigError: a key is unknown or a value is invalid.
        """
        try:
            wanted = _UserConfig.model_validate(user_config)
            timeouts = self._timeouts.model_validate(self._timeouts.model_dump() | dict(wanted.timeouts))
        except ValidationError as error:
            raise ConfigError(
                f"user_config={dict(user_config)}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}; it may have "
                "`timeouts` with apply_s, engine_s and start_s (docs/config.md), e.g. {timeouts: {engine_s: 120}}"
            ) from None
        await self._server.reconfigure(timeouts)

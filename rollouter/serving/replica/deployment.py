"""The deployment of the engines: a `RolloutServer` behind a class that the driver can bind without importing vLLM.

Importing `ray.serve.llm` imports vLLM, which takes 7 s on CPU. Only the replicas need it, so only they import it.
"""

from __future__ import annotations

from typing import Any

from asyncrl.core.failures import AsyncRLError, InfraError
from rollouter.serving.options import ServingOptions

METHODS = ("generate_tokens", "apply_version", "check_health")
OPENAI_METHODS = ("chat", "completions", "embeddings", "score", "tokenize", "detokenize")
"""The methods of `LLMServer` that Ray's ingress calls."""


class RolloutReplica:
    """Starts a `RolloutServer` and offers those of its methods that other processes call."""

    async def __init__(self, options: ServingOptions, *, openai: bool = False) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine, with vLLM's OpenAI front end if `openai`.

        Raises:
            InfraError: the engine does not start; its error is the cause.
        """
        try:
            from rollouter.serving.replica.server import start_server

            server: Any = await start_server(options, openai=openai)
        except AsyncRLError:
            raise
        except Exception as error:  # noqa: BLE001  an error of any library, which becomes a typed error
            model = options.llm_config["model_loading_config"]["model_source"]
            raise InfraError.wrap(f"the engine for {model} did not start", error) from None
        for method in METHODS + OPENAI_METHODS * openai:
            setattr(self, method, getattr(server, method))

"""Builds the agent of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.config.schema import Config
from rollouter.agent.chat import ChatTokenizer
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import NO_TOOLS, ToolCallParser
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.program import load_program
from rollouter.gateway.session import ChatCache
from rollouter.interactions.loading import load_interactions
from rollouter.prompts.chat_template import end_token_ids
from rollouter.serving.options import serving_options
from rollouter.tools.loading import LoadedMcpServer, LoadedTool, load_tools
from rollouter.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_agent(config: Config, tokenizer: PreTrainedTokenizerBase) -> BuiltInAgent | ExternalAgent | None:
    """Return the agent that runs the conversations, or None if each response is a single turn. Blocks.

    A tool server is started to learn which tools it has, and stopped; it runs again while the agent is open.

    Raises:
        ConfigError, UserCodeError, InfraError: a problem with tools, interactions, call format or agent.
    """
    if config.rollout.agent.enabled:
        return _external(config, tokenizer)
    settings = config.rollout.multi_turn
    if not settings.enable:
        return None
    tools = load_tools(settings.tools)
    interactions = load_interactions(settings.interactions) if settings.interactions else None
    schemas = _schemas(tools)
    end_ids = end_token_ids(config.model, tokenizer)
    chat = ChatTokenizer(tokenizer, tools=schemas, template_kwargs=config.model.chat_template_kwargs, end_ids=end_ids)
    return BuiltInAgent(
        config,
        chat=chat,
        parser=ToolCallParser(settings.format if tools else NO_TOOLS, tokenizer, schemas, end_ids=chat.end_ids),
        schemas=schemas,
        tools=Toolbox(tools) if tools else None,
        interactions=interactions,
    )


def _external(config: Config, tokenizer: PreTrainedTokenizerBase) -> ExternalAgent:
    program = load_program(config.rollout.agent)
    cache = ChatCache(
        tokenizer,
        format=config.rollout.multi_turn.format,
        template_kwargs=config.model.chat_template_kwargs,
        end_ids=end_token_ids(config.model, tokenizer),
    )
    return ExternalAgent(config, program, cache, model=_model_id(config))


def _model_id(config: Config) -> str:
    """Return the model's name at the endpoint."""
    loading = serving_options(config, namespace="", gpus=False).llm_config["model_loading_config"]
    return str(loading["model_id"])


def _schemas(tools: Sequence[LoadedTool | LoadedMcpServer]) -> tuple[Mapping[str, Any], ...]:
    if not any(isinstance(one, LoadedMcpServer) for one in tools):
        return Toolbox(tools).schemas

    async def ask() -> tuple[Mapping[str, Any], ...]:
        async with Toolbox(tools) as toolbox:
            return toolbox.schemas

    return anyio.run(ask)

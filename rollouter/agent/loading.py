"""The agent of a run, as it is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.config.schema import Config
from rollouter.agent.chat import Chat
from rollouter.agent.loop import Agent
from rollouter.agent.parsing import NO_TOOLS, CallParser
from rollouter.gateway.chats import ChatBook
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.program import load_program
from rollouter.interactions.loading import load_interactions
from rollouter.serving.options import serving_options
from rollouter.template import end_token_ids
from rollouter.tools.box import ToolBox
from rollouter.tools.loading import LoadedServer, LoadedTool, load_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_agent(config: Config, tokenizer: PreTrainedTokenizerBase) -> Agent | ExternalAgent | None:
    """What holds the run's conversations, the built-in loop or an agent of the user's; None: each is one turn. Blocks.

    A server of tools is started to learn what it offers, and ended: it runs again while the agent is open.

    Raises:
        ConfigError, UserCodeError, InfraError: what is wrong with tools, interactions, format of calls or agent.
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
    chat = Chat(tokenizer, tools=schemas, template_kwargs=config.model.chat_template_kwargs, end_ids=end_ids)
    return Agent(
        config,
        chat=chat,
        parser=CallParser(settings.format if tools else NO_TOOLS, tokenizer, schemas, end_ids=chat.end_ids),
        schemas=schemas,
        tools=ToolBox(tools) if tools else None,
        interactions=interactions,
    )


def _external(config: Config, tokenizer: PreTrainedTokenizerBase) -> ExternalAgent:
    program = load_program(config.rollout.agent)
    book = ChatBook(
        tokenizer,
        format=config.rollout.multi_turn.format,
        template_kwargs=config.model.chat_template_kwargs,
        end_ids=end_token_ids(config.model, tokenizer),
    )
    return ExternalAgent(config, program, book, model=_model_id(config))


def _model_id(config: Config) -> str:
    """The model's name at the endpoint."""
    loading = serving_options(config, namespace="", gpus=False).llm_config["model_loading_config"]
    return str(loading["model_id"])


def _schemas(tools: Sequence[LoadedTool | LoadedServer]) -> tuple[Mapping[str, Any], ...]:
    if not any(isinstance(one, LoadedServer) for one in tools):
        return ToolBox(tools).schemas

    async def ask() -> tuple[Mapping[str, Any], ...]:
        async with ToolBox(tools) as box:
            return box.schemas

    return anyio.run(ask)

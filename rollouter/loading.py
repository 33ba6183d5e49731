"""Loads what a Rollouter needs from disk: data, tokenizer, reward functions, and the agent of the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.ports import PromptSource
from rollouter.agent.chat import ChatTokenizer
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import NO_TOOLS, ToolCallParser, resolve_format
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.program import load_program
from rollouter.gateway.session import ChatCache
from rollouter.interactions.loading import load_interactions
from rollouter.prompts.chat_template import Decode, decoder, end_token_ids, load_tokenizer
from rollouter.prompts.files import Report
from rollouter.prompts.source import ValidationPrompts, load_prompts
from rollouter.rewards.functions import load_reward_functions
from rollouter.rewards.scorer import ScoreSource, load_scorer
from rollouter.serving.options import serving_options
from rollouter.tools.loading import LoadedMcpServer, LoadedTool, load_tools
from rollouter.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class RolloutTask(NamedTuple):
    """Prompts, scoring and agent: everything that the Rollouter loads from disk."""

    prompts: PromptSource
    val_prompts: ValidationPrompts | None
    scorer: ScoreSource
    """The reward function; `rewards.scorer.CombinedScorer` computes the whole reward."""
    decode: Decode
    agent: BuiltInAgent | ExternalAgent | None = None
    """Holds conversations of several turns; None if every trajectory is a single turn."""
    num_filtered: int = 0
    num_val_filtered: int = 0


def load_task(config: Config, cache_dir: Path | None = None, report: Report = logger.info) -> RolloutTask:
    """Load reward functions, tokenizer and data, in an order that finds cheap errors first. Blocking.

    Args:
        cache_dir: instead of `data.cache_dir`.
        report: gets lines about the progress.

    Raises:
        ConfigError, DataError, UserCodeError: a reward function, the tokenizer or the data is unusable.
    """
    scorer, decode, agent, tokenizer = load_scoring(config)
    cache_dir = Path(config.data.cache_dir).expanduser() if cache_dir is None else cache_dir
    loaded = load_prompts(config, tokenizer, cache_dir, tools=agent.schemas if agent else (), report=report)
    return RolloutTask(loaded.train, loaded.val, scorer, decode, agent, loaded.num_filtered, loaded.num_val_filtered)


class Scoring(NamedTuple):
    """What a process needs in order to hold and score conversations."""

    scorer: ScoreSource
    decode: Decode
    agent: BuiltInAgent | ExternalAgent | None
    tokenizer: PreTrainedTokenizerBase


def load_scoring(config: Config) -> Scoring:
    """Load reward functions, tokenizer and agent. Blocking; raises as `load_task`."""
    functions = load_reward_functions(config.reward)
    tokenizer = load_tokenizer(config.model)
    agent = load_agent(config, tokenizer)
    decode = decoder(tokenizer)
    return Scoring(load_scorer(config, functions, decode), decode, agent, tokenizer)


def load_agent(config: Config, tokenizer: PreTrainedTokenizerBase) -> BuiltInAgent | ExternalAgent | None:
    """Return the agent that runs the conversations, or None if each response is a single turn. Blocks.

    Each tool server is started once to list its tools and then stopped; it runs again while the agent is open.

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
    format = resolve_format(settings.format, config.model) if tools else NO_TOOLS
    return BuiltInAgent(
        config,
        chat=chat,
        parser=ToolCallParser(format, tokenizer, schemas, end_ids=chat.end_ids),
        schemas=schemas,
        tools=Toolbox(tools, settings.create) if tools else None,
        interactions=interactions,
    )


def _external(config: Config, tokenizer: PreTrainedTokenizerBase) -> ExternalAgent:
    program = load_program(config.rollout.agent)
    cache = ChatCache(
        tokenizer,
        format=resolve_format(config.rollout.multi_turn.format, config.model),
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

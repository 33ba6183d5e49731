"""Rules about conversations and over-sampling: `rollout.multi_turn`, `rollout.agent`, `rollout.over_sample`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config
from asyncrl.config.sections.multi_turn import MultiTurnConfig

_TURNS = "rollout.multi_turn"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_AGENTS_TOO = ("format", "tokenization_sanity_check_mode")
"""Settings of conversations that count for agents of the user's own as well."""
_LOOP_ONLY = tuple(f"{name}*" for name in MultiTurnConfig.model_fields if name not in (*_AGENTS_TOO, "enable"))


def _conversations(config: Config, given: Given) -> Iterator[Problem]:
    turns = config.rollout.multi_turn
    if not turns.enable:
        return
    if not turns.tools and not turns.interactions:
        yield Problem(
            f"{_TURNS}.enable",
            True,
            "the model has no tool to call and nobody answers it, so every trajectory would be one turn",
            f"set {_TURNS}.tools or {_TURNS}.interactions, or {_TURNS}.enable=false",
        )
    if turns.tools and turns.max_assistant_turns == 1:
        yield Problem(
            f"{_TURNS}.max_assistant_turns",
            1,
            "a call of the only turn would not be made: the model has no turn left to read its result",
            "raise it to 2 or more",
        )
    if turns.timeout_s is not None and turns.timeout_s >= config.timeouts.sample_s:
        yield Problem(
            f"{_TURNS}.timeout_s",
            turns.timeout_s,
            f"the whole sample is dropped after timeouts.sample_s = {config.timeouts.sample_s:g} s, so no trajectory "
            "would end by this",
            f"lower it, or raise timeouts.sample_s above {turns.timeout_s:g}",
        )
    for number, tool in enumerate(turns.tools):
        if tool.timeout_s >= config.timeouts.sample_s:
            yield Problem(
                f"{_TURNS}.tools.{number}.timeout_s",
                tool.timeout_s,
                f"the sample is dropped after timeouts.sample_s = {config.timeouts.sample_s:g} s, before a call that "
                "hangs is given up",
                "lower it, or raise timeouts.sample_s",
            )
    if turns.tools and turns.max_tool_response_length >= config.rollout.response_length:
        yield warning(
            f"{_TURNS}.max_tool_response_length",
            turns.max_tool_response_length,
            f"one answer of a tool may fill rollout.response_length = {config.rollout.response_length}, which counts "
            "all turns and what is said between them, and end the trajectory",
            "raise rollout.response_length, or lower this",
        )


def _agents(config: Config, given: Given) -> Iterator[Problem]:
    agent = config.rollout.agent
    if agent.program is not None and agent.command:
        yield Problem(
            "rollout.agent.command",
            list(agent.command),
            "rollout.agent.program is set as well, and a trajectory is made by one of them",
            "leave one of the two out",
        )
    if agent.enabled and config.rollout.multi_turn.enable:
        yield Problem(
            "rollout.agent",
            agent.program or list(agent.command),
            f"{_TURNS}.enable is true as well, and a trajectory is made by one of them",
            f"set {_TURNS}.enable=false: your agent has its own tools",
        )
    if agent.enabled and agent.timeout_s > config.timeouts.sample_s:
        yield Problem(
            "rollout.agent.timeout_s",
            agent.timeout_s,
            f"the sample is dropped after timeouts.sample_s = {config.timeouts.sample_s:g} s, so no agent is given "
            "that long",
            f"lower it, or raise timeouts.sample_s to {agent.timeout_s:g} or more",
        )


def _endpoint(config: Config, given: Given) -> Iterator[Problem]:
    if config.rollout.agent.enabled and config.serve.host not in _LOOPBACK and not config.serve.api_key_env:
        yield Problem(
            "serve.host",
            config.serve.host,
            "agents are served at this address, and anybody who reaches it could use the model",
            "set serve.api_key_env to the environment variable that holds an API key, or serve.host=127.0.0.1; the "
            "agents themselves have keys of their trajectories",
        )


def _over_sampling(config: Config, given: Given) -> Iterator[Problem]:
    over = config.rollout.over_sample
    key = "rollout.over_sample.samples"
    if not over.samples:
        return
    if config.async_training.deterministic:
        yield Problem(
            key,
            over.samples,
            "async_training.deterministic trains samples in the order in which they were fed, and over-sampling drops "
            "those that are slow",
            f"set {key}=0 or async_training.deterministic=false",
        )
    if config.skip.rollout.enable:
        yield Problem(
            key,
            over.samples,
            "skip.rollout records a version's samples as one batch, and which of them count depends on their speed",
            f"set {key}=0, or record single samples: skip.async_rollout",
        )


def _no_conversation(config: Config) -> bool:
    return not config.rollout.multi_turn.enable and not config.rollout.agent.enabled


Idle = tuple[str, Callable[[Config], bool], str, str]

IDLE: tuple[Idle, ...] = (
    *((f"{_TURNS}.{name}", lambda c: c.rollout.agent.enabled,
       "your agent (rollout.agent) has its own tools and limits", "set them there")
      for name in _LOOP_ONLY),
    (f"{_TURNS}.interactions*", lambda c: not c.rollout.multi_turn.enable,
     f"{_TURNS}.enable is false", f"set {_TURNS}.enable=true"),
    (f"{_TURNS}.max_user_turns", lambda c: c.rollout.multi_turn.enable and not c.rollout.multi_turn.interactions,
     "nobody answers the model", f"set {_TURNS}.interactions"),
    *((f"{_TURNS}.{name}", lambda c: c.rollout.multi_turn.enable and not c.rollout.multi_turn.tools,
       "the model has no tools", f"set {_TURNS}.tools")
      for name in ("format", "max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")),
    *((f"{_TURNS}.{name}", _no_conversation,
       f"{_TURNS}.enable is false, and there is no agent of your own (rollout.agent)", f"set {_TURNS}.enable=true")
      for name in _AGENTS_TOO),
    *((f"{_TURNS}.{name}", lambda c: not c.rollout.multi_turn.enable,
       f"{_TURNS}.enable is false", f"set {_TURNS}.enable=true")
      for name in _LOOP_ONLY),
    ("rollout.agent.timeout_s", lambda c: not c.rollout.agent.enabled,
     "there is no agent of your own", "set rollout.agent.program or rollout.agent.command"),
    ("rollout.agent.max_concurrency", lambda c: not c.rollout.agent.enabled,
     "there is no agent of your own", "set rollout.agent.program or rollout.agent.command"),
    ("rollout.over_sample.unfinished",
     lambda c: not c.rollout.over_sample.samples and not c.rollout.over_sample.trajectories,
     "nothing is over-sampled", "set rollout.over_sample.samples or rollout.over_sample.trajectories"),
)  # fmt: skip
RULES: tuple[Rule, ...] = (_conversations, _agents, _endpoint, _over_sampling)

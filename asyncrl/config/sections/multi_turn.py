"""`rollout.multi_turn`, `rollout.over_sample`, `rollout.agent`: conversations with tools, users and agents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import NonNegative, Positive, Seconds, Section, Share


class McpServerConfig(Section):
    """A Model Context Protocol server whose tools the model may call: a `command` to start, or the `url` of one."""

    command: tuple[str, ...] = ()
    """Program and arguments; it is started once per run and speaks over its standard input and output."""
    url: str | None = None
    """Of a server that speaks streamable HTTP."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`, besides PATH and the like."""
    tools: tuple[str, ...] = ()
    """Names of the server's tools to offer; none: all."""
    start_s: Seconds = 30.0
    """Until it has told of its tools."""


class ToolConfig(Section):
    """A tool: exactly one of `class_name`, `function` and `mcp`."""

    class_name: str | None = None
    """`calculator`, `python`, `search`, `gsm8k`, or your own `rollouter.tools.BaseTool`: `module:Class` or
    `path/file.py:Class`."""
    function: str | None = None
    """`module:function` or `path/file.py:function`, a typed function with a docstring."""
    mcp: McpServerConfig | None = None
    """A server of tools."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    tool_schema: dict[str, Any] | None = None
    """OpenAI function schema that the model is shown; null: the tool's own."""
    timeout_s: Seconds = 30.0
    """Deadline of one call, of `create`, and of `calc_reward`."""
    max_concurrency: Positive = 64
    """Calls at once, over all trajectories."""
    max_per_s: Annotated[float, Field(gt=0)] | None = None
    """Calls a second, over all trajectories; null: any number."""
    on_error: Literal["message", "drop", "stop"] = "message"
    """A call that raises or takes too long: tell the model; drop the sample, within reward.max_errors; stop the run."""


class InteractionConfig(Section):
    """Who answers the assistant when it calls no tool: a simulated user, or an environment."""

    name: str = "default"
    """Rows choose by it: `extra_info.interaction_kwargs.name`; the first one is for those that do not."""
    class_name: str
    """`scripted`, `model`, `retry`, `reasoning_gym`, `verifiers`, or your own `rollouter.interactions.Environment`:
    `module:Class` or `path/file.py:Class`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    timeout_s: Seconds = 60.0
    """Deadline of one `reset`, `step` or `score`."""
    max_concurrency: Positive = 64
    """Of these at once, over all trajectories."""
    on_error: Literal["drop", "stop"] = "stop"
    """One that raises or takes too long: drop the sample, within reward.max_errors; or stop the run."""


class MultiTurnConfig(Section):
    """Conversations of several turns. docs/agents.md shows how they are set up."""

    enable: bool = False
    """Let the model call tools, and users or environments answer it."""
    tools: tuple[ToolConfig, ...] = ()
    """What the model may call."""
    interactions: tuple[InteractionConfig, ...] = ()
    """Who answers it."""
    format: str = "hermes"
    """How the model writes its calls: the name of one of vLLM's tool parsers (`hermes` for Qwen and Hermes models,
    `llama3_json`, `mistral`, `pythonic`, …)."""
    max_assistant_turns: Positive = 8
    """Turns of the model in one trajectory."""
    max_user_turns: NonNegative = 8
    """Answers of a user or environment in one trajectory."""
    max_parallel_calls: Positive = 4
    """Calls of one turn that are made, all at once; those beyond are refused in a message to the model."""
    max_tool_response_length: Positive = 256
    """Tokens of one tool's answer; a longer one is cut to as many."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where it is cut: `left` keeps the end."""
    tokenization_sanity_check_mode: Literal["off", "warn", "strict"] = "warn"
    """Compare a finished trajectory with the chat template's own tokens of the same messages: `warn` tells of
    differences, `strict` drops the sample."""
    timeout_s: Seconds | None = None
    """A trajectory older than this, waits after a crashed engine included, ends with the turns it has, and is scored;
    null: only timeouts.sample_s counts, and drops the sample."""


class OverSampleConfig(Section):
    """Ask for more than is needed, and abort what is left when enough is done (docs/agents.md)."""

    samples: Share = 0.0
    """More samples than a version is allowed, as a share of the samples that one consumes; 0: none."""
    trajectories: NonNegative = 0
    """More trajectories per prompt than rollout.n."""
    unfinished: Literal["drop", "keep_finished", "keep_partial"] = "drop"
    """Of samples that are aborted: drop them; or go on with them under the next version, from their complete turns, or
    from all tokens there are. Of trajectories beyond rollout.n, `drop` drops all, the others only those that are
    unfinished."""


class AgentConfig(Section):
    """Your own agent in place of the built-in loop, at the run's OpenAI-compatible endpoint (docs/agents-openai.md)."""

    program: str | None = None
    """`module:function` or `path/file.py:function`, called once per trajectory with an `AgentTask`; async or not."""
    command: tuple[str, ...] = ()
    """Or a program and its arguments, started once per trajectory."""
    timeout_s: Seconds = 600.0
    """Deadline of one trajectory; what it has is scored then, if a reward was posted or reward.function gives one."""
    max_concurrency: Positive = 64
    """Trajectories at once."""

    @property
    def enabled(self) -> bool:
        return self.program is not None or bool(self.command)

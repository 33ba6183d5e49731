"""`rollout`: engines, sampling, conversations with tools, users and agents, and the checks of their keys."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from asyncrl.config.environment import check_code, is_importable, model_config
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect, only_with
from asyncrl.config.sections import quantization as quantized
from asyncrl.config.sections.base import (
    ConfigSection,
    Device,
    Dtype,
    NodePool,
    NonNegative,
    Positive,
    Seconds,
    Share,
    Threads,
)
from asyncrl.config.sections.engine_arguments import (
    check_argument_names,
    check_engine_arguments,
    check_expert_parallel,
    check_pipeline_parallel,
)
from asyncrl.config.sections.trainer_rules import check_pool, shared_parts
from asyncrl.core.autoscaling import AutoscalingPolicy

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

BUILTIN_TOOLS = ("calculator", "python", "search", "gsm8k")
BUILTIN_INTERACTIONS = ("scripted", "model", "retry", "reasoning_gym", "verifiers")
_TURNS = "rollout.multi_turn"


def _check_top_k(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("no token could be drawn; give a count of 1 or more, or -1 for off")
    return value


class SamplingConfig(ConfigSection):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off. Below 1, the recorded log-probs are still those of the full distribution."""
    top_k: Annotated[int, AfterValidator(_check_top_k)] = -1
    """Number of most likely tokens to sample from; -1: off."""
    min_p: Share = 0.0
    """Minimum probability relative to the most likely token; 0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""


class ValSamplingConfig(SamplingConfig):
    """Sampling for validation."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0: greedy decoding."""
    n: Positive = 1
    """Number of responses per validation prompt."""
    pass_reward: float = 1.0
    """Lowest reward of a correct response, for pass@k and maj@k. A reward function that returns `acc` decides
    itself."""


class McpServerConfig(ConfigSection):
    """A Model Context Protocol server whose tools the model may call: a `command` that starts one, or the `url` of a
    running one."""

    command: tuple[str, ...] = ()
    """Program and arguments; it is started once per run and speaks over its standard input and output."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`, in addition to basic ones such as PATH. A secret is written
    `${secret:NAME}`."""
    tools: tuple[str, ...] = ()
    """Names of the server's tools that the model may call; empty: all."""
    start_s: Seconds = 30.0
    """Deadline for the server to start and list its tools."""


class ToolConfig(ConfigSection):
    """A tool: exactly one of `class_name`, `function` and `mcp`."""

    class_name: str | None = None
    """`calculator`, `python`, `search`, `gsm8k`, or your own `rollouter.tools.BaseTool`: `module:Class` or
    `path/file.py:Class`."""
    function: str | None = None
    """`module:function` or `path/file.py:function`, a typed function with a docstring."""
    mcp: McpServerConfig | None = None
    """A server whose tools the model may call."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    tool_schema: dict[str, Any] | None = None
    """OpenAI function schema that the model receives; null: the schema that the tool defines."""
    timeout_s: Seconds = 30.0
    """Deadline of one call, of `create`, and of `calc_reward`."""
    max_concurrency: Positive = 64
    """Maximum number of concurrent calls, over all trajectories."""
    max_per_s: Annotated[float, Field(gt=0)] | None = None
    """Maximum number of calls per second, over all trajectories; null: no limit."""
    on_error: Literal["message", "drop", "stop"] = "message"
    """Treatment of a call that fails or times out: report it to the model; drop the sample, up to reward.max_errors
    times; or stop the run."""


class InteractionConfig(ConfigSection):
    """A simulated user or an environment, which answers the assistant when it calls no tool."""

    name: str = "default"
    """A row selects an interaction by this name, in `extra_info.interaction_kwargs.name`; a row without a name gets the
    first interaction."""
    class_name: str
    """`scripted`, `model`, `retry`, `reasoning_gym`, `verifiers`, or your own `rollouter.interactions.Environment`:
    `module:Class` or `path/file.py:Class`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    timeout_s: Seconds = 60.0
    """Deadline of one `reset`, `step` or `score`."""
    max_concurrency: Positive = 64
    """Maximum number of concurrent calls, over all trajectories."""
    on_error: Literal["drop", "stop"] = "stop"
    """Treatment of a call that raises or times out: drop the sample, up to reward.max_errors times, or stop the run."""


class MultiTurnConfig(ConfigSection):
    """Conversations of several turns (docs/agents.md)."""

    enable: bool = False
    """Let the model call tools, and let users or environments answer it."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools that the model may call."""
    interactions: tuple[InteractionConfig, ...] = ()
    """Simulated users and environments that answer the model."""
    tool_config_path: str | None = None
    """YAML file with a list `tools`, such as verl's files. The launch adds its entries to `tools`, and the key is null
    from then on."""
    create: Literal["auto", "eager", "lazy"] = "auto"
    """When the state of a tool is created: `eager`: before the first turn, and `calc_reward` is called for it even if
    the model never calls the tool; `lazy`: before its first call. `auto`: `eager` for the tools that a row names in
    `tools_kwargs`."""
    format: str = "hermes"
    """Format of the model's tool calls: the name of one of vLLM's tool parsers (`hermes` for Qwen and Hermes models,
    `llama3_json`, `mistral`, `pythonic`, …), or `auto`: the parser that reads the calls of the chat template."""
    max_assistant_turns: Positive = 8
    """Maximum number of turns of the model in one trajectory."""
    max_user_turns: NonNegative = 8
    """Maximum number of answers of a user or environment in one trajectory."""
    max_parallel_calls: Positive = 4
    """Maximum number of tool calls in one turn, which run concurrently; a message to the model refuses further ones."""
    max_tool_response_length: Positive = 256
    """Maximum number of tokens in one answer of a tool; a longer one is cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a long answer of a tool is cut: `left` keeps the end."""
    tokenization_sanity_check_mode: Literal["off", "warn", "strict"] = "warn"
    """Compare a finished trajectory with the chat template's own tokens of the same messages: `warn` reports
    differences, `strict` drops the sample."""
    timeout_s: Seconds | None = None
    """Time limit of one trajectory, including waits after an engine crash. At the limit, the trajectory ends with its
    complete turns and is scored. null: only timeouts.sample_s limits it, which drops the sample."""


class OverSampleConfig(ConfigSection):
    """Generate more samples or trajectories than needed, and abort the rest once enough are finished
    (docs/agents.md)."""

    samples: Share = 0.0
    """Surplus samples, as a share of the samples that one version consumes; 0: none."""
    trajectories: NonNegative = 0
    """Surplus trajectories per prompt, besides rollout.n."""
    unfinished: Literal["drop", "keep_finished", "keep_partial"] = "drop"
    """Treatment of aborted samples: `drop` drops them; under the next version, `keep_finished` continues them from
    their complete turns, and `keep_partial` from all their tokens. Of the trajectories beyond rollout.n, `drop` drops
    all, and the other two drop only unfinished ones."""


class AgentConfig(ConfigSection):
    """An agent of your own, which replaces the built-in loop and calls the run's OpenAI-compatible endpoint
    (docs/agents-openai.md)."""

    program: str | None = None
    """`module:function` or `path/file.py:function`, called once per trajectory with an `AgentTask`; async or not."""
    command: tuple[str, ...] = ()
    """A program and its arguments, started once per trajectory; an alternative to `program`."""
    timeout_s: Seconds = 600.0
    """Deadline of one trajectory. At the deadline, its turns are scored if the agent has posted a reward or
    reward.function computes one."""
    max_concurrency: Positive = 64
    """Maximum number of concurrent trajectories."""

    @property
    def enabled(self) -> bool:
        return self.program is not None or bool(self.command)


class AutoscalingConfig(ConfigSection):
    """Let the number of engines follow the run: more while the Trainer waits for samples, fewer while generation may
    not run further ahead (docs/deploy.md)."""

    enable: bool = False
    """Change the number of replicas during the run; it begins with rollout.num_replicas."""
    min_replicas: Positive = 1
    """Minimum number of replicas."""
    max_replicas: Positive = 1
    """Maximum number of replicas."""
    target_trainer_wait: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of time for which the Trainer may wait for samples before replicas are added."""
    spare_capacity: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the remaining replicas' capacity that must stay free when replicas are removed: the hysteresis."""
    up_after_s: Seconds = 30.0
    """Period with too few replicas after which some are added."""
    down_after_s: Seconds = 120.0
    """Period with too many replicas after which some are removed."""

    @property
    def policy(self) -> AutoscalingPolicy:
        return AutoscalingPolicy(
            self.min_replicas,
            self.max_replicas,
            self.target_trainer_wait,
            self.spare_capacity,
            self.up_after_s,
            self.down_after_s,
        )


class RolloutConfig(NodePool):
    """Generation: the engines and their requests."""

    attach: str | None = None
    """Name of a Ray Serve application of rollout servers that was deployed separately (docs/deploy.md) and that the run
    uses instead of engines of its own. It keeps serving the run's last version afterwards."""
    n: Positive = 8
    """Number of responses per prompt (the GRPO group)."""
    response_length: Positive = 256
    """Maximum number of tokens in a response: all its turns, and the messages of tools and users between them."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn for training."""
    val: ValSamplingConfig = ValSamplingConfig()
    """How tokens are drawn for validation."""
    num_replicas: Positive = 1
    """Number of vLLM engines behind Ray Serve."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    tensor_parallel_size: Positive = 1
    """Number of GPUs (or CPU processes) of one engine that share each layer."""
    pipeline_parallel_size: Positive = 1
    """Number of stages of one engine, each with some of the layers and `tensor_parallel_size` GPUs of its own. GPUs
    only."""
    num_workers: NonNegative = 0
    """Number of worker processes, on any node, that hold the conversations, run tools, your code and rewards, and call
    the engines. 0: all of this runs in the Rollouter's process, and its event loop limits the responses per second.
    Limits of concurrent calls (`max_concurrency`, `max_per_s`) hold in each worker."""
    max_concurrent_samples: Positive = 64
    """Maximum number of samples in generation at the same time, over all replicas."""
    max_num_seqs: Positive = 256
    """Maximum number of sequences that one engine decodes together."""
    max_model_len: Positive | None = None
    """Context length of the engine in tokens; null: data.max_prompt_length + rollout.response_length."""
    device: Device = "auto"
    """Device of the engines; auto: GPUs if the machine or the cluster has any when they are deployed. cuda: engines
    on a cluster also wait for GPUs of nodes that have yet to join (docs/deploy.md). cpu: needs vLLM's build for
    CPUs."""
    dtype: Dtype = "float32"
    """Data type of weights and activations in the engine. Use float32 on CPUs without AVX-512, bfloat16 on GPUs."""
    quantization: quantized.Quantization | None = None
    """Format to which engines round the weights of linear layers and experts when they load them, so that they need
    less memory and, with kernels for it, decode faster (vLLM's online quantization); null: none. Tokens then come from
    another distribution than the Trainer's, so this also sets `algorithm.rollout_correction` and
    `weight_sync.max_mismatch_kl`, unless you do (docs/gpu.md). It needs `dtype` bfloat16 or float16; on CPUs engines
    can only use `fp8_per_channel`."""
    enforce_eager: bool = True
    """Run without CUDA graphs; false: use CUDA graphs on GPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory for one engine."""
    cpu_kv_cache_gib: Positive = 1
    """Memory for the KV cache of an engine on CPU, in GiB."""
    cpu_threads: Threads = 1
    """Threads of an engine on CPU; auto: its share of this machine's CPUs (docs/training.md)."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as `speculative_config`. Names that vLLM does not have,
    arguments that other keys set, and those with which samples would not be the policy's own are refused."""
    max_attempts: Positive = 3
    """Maximum number of attempts of a generate call, or of a call to the reward model, while replicas fail. Aborts by a
    weight sync do not count."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    over_sample: OverSampleConfig = OverSampleConfig()
    agent: AgentConfig = AgentConfig()
    dump_dir: str | None = None
    """Directory of a JSONL dump of all trajectories: messages, tokens, masks, versions, times, rewards. null: none.
    Its files are appended to, so it may be a mounted shared directory, but no URL."""
    kept_samples: NonNegative = 200
    """Maximum number of samples that the run directory keeps for `asyncrl show`, 20 MB at most: the newest ones,
    and up to 10 each with the lowest, highest and oddest rewards (furthest from the mean of its group). 0: none."""

    @property
    def max_replicas(self) -> int:
        """The most engines that a run has at the same time."""
        return self.autoscaling.max_replicas if self.autoscaling.enable else self.num_replicas

    @property
    def replica_size(self) -> int:
        """The number of GPUs (or CPU processes) of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def spans_nodes(self) -> bool:
        """Whether a replica has more GPUs than a node of the pool."""
        return self.n_gpus_per_node is not None and self.replica_size > self.n_gpus_per_node


def _pool(config: Config) -> Iterator[ConfigProblem]:
    rollout = config.rollout
    per_replica, per_node, size = rollout.replica_size, rollout.n_gpus_per_node, rollout.num_processes
    yield from check_pool(config, "rollout")
    if per_node is None or size is None:
        return
    sizes = (per_replica, rollout.tensor_parallel_size)  # the GPUs of a stage are on one node, or have whole nodes
    if any(max(each, per_node) % min(each, per_node) for each in sizes) or size % per_replica:
        yield ConfigProblem(
            "rollout.tensor_parallel_size",
            rollout.tensor_parallel_size,
            f"replicas of {per_replica} GPUs do not fill {rollout.nnodes} nodes with {per_node} GPUs each "
            "(rollout.nnodes, rollout.n_gpus_per_node)",
            "set it, times rollout.pipeline_parallel_size, to a divisor or, if replicas span nodes, to a multiple "
            "of rollout.n_gpus_per_node",
        )
    elif rollout.max_replicas * per_replica != size:
        yield ConfigProblem(
            f"rollout.{'autoscaling.max_replicas' if rollout.autoscaling.enable else 'num_replicas'}",
            rollout.max_replicas,
            f"rollout.nnodes x rollout.n_gpus_per_node is {size} GPUs, enough for {size // per_replica} replicas of "
            f"{per_replica} (rollout.tensor_parallel_size x rollout.pipeline_parallel_size)",
            f"leave it out, or set it to {size // per_replica}",
        )


def _shared_heads(config: Config) -> Iterator[ConfigProblem]:
    """Check that the GPUs of an engine can share the model's heads, as vLLM demands."""
    key, size, path = "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size, config.model.path
    parts = shared_parts(path)
    heads = parts.get("attention heads", 0)
    # With latent attention (MLA), every GPU has the one key-value head.
    shared = 0 if "kv_lora_rank" in model_config(path) else parts.get("key-value heads", 0)

    def fits(number: int) -> bool:
        return heads % number == 0 and (shared == 0 or shared % number == 0 or number % shared == 0)

    if config.rollout.attach is not None or fits(size):
        return
    has = " and ".join(f"{number} {name}" for name, number in parts.items() if name != "experts")
    consequence = f"the model at {path} has {has}, which {size} processes of an engine cannot share"
    sizes = [str(number) for number in range(1, (heads or shared) + 1) if fits(number)]
    yield ConfigProblem(key, size, consequence, f"set it to {' or '.join(sizes)}")


def _untruncated(key: str, off: float) -> ConfigRule:
    return ConfigRule(
        f"rollout.sampling.{key}",
        lambda config: getattr(config.rollout.sampling, key) != off,
        "tokens come from a truncated distribution while recorded log-probs and the loss are of the full one, which "
        "biases the policy ratio",
        f"set it to {off} for training unless you intend this",
        "warning",
    )


def _entries(config: Config) -> Iterator[ConfigProblem]:
    """Check tools and interactions, which are entries of lists."""
    turns, limit = config.rollout.multi_turn, config.timeouts.sample_s
    if not turns.enable:
        return
    for number, tool in enumerate(turns.tools):
        key = f"{_TURNS}.tools.{number}"
        kinds = [name for name in ("class_name", "function", "mcp") if getattr(tool, name) is not None]
        if len(kinds) != 1:
            consequence = "a tool is a class, a function or a server, and this entry is "
            consequence += "more than one" if kinds else "none of them"
            fix = "set exactly one of class_name, function and mcp"
            yield ConfigProblem(key, ", ".join(kinds), consequence, fix)
        elif tool.mcp is not None and bool(tool.mcp.command) == (tool.mcp.url is not None):
            which = "both are set" if tool.mcp.command else "neither is set"
            consequence = f"a server is a command or a url, and {which}"
            yield ConfigProblem(f"{key}.mcp", tool.mcp.url or "", consequence, "set exactly one")
        elif tool.mcp is not None and not (tool.mcp.url or "http://").startswith(("http://", "https://")):
            consequence = "servers are called over HTTP"
            yield ConfigProblem(f"{key}.mcp.url", tool.mcp.url, consequence, "give http://... or https://...")
        if tool.timeout_s >= limit:
            consequence = f"timeouts.sample_s = {limit:g} s drops the sample before a call that hangs times out"
            fix = "lower it, or raise timeouts.sample_s"
            yield ConfigProblem(f"{key}.timeout_s", tool.timeout_s, consequence, fix)
    names = Counter(interaction.name for interaction in turns.interactions)
    for name in (name for name, count in names.items() if count > 1):
        consequence = "two interactions have this name, so a row could choose neither"
        yield ConfigProblem(f"{_TURNS}.interactions", name, consequence, "give each a different name")


def _conversations(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of the code of tools, interactions and agents."""
    turns, agent = config.rollout.multi_turn, config.rollout.agent
    if turns.enable:
        for number, tool in enumerate(turns.tools):
            yield from _tool(f"{_TURNS}.tools.{number}", tool)
        for number, interaction in enumerate(turns.interactions):
            key = f"{_TURNS}.interactions.{number}.class_name"
            yield from check_code(key, interaction.class_name, BUILTIN_INTERACTIONS, "interaction")
    if agent.program is not None:
        yield from check_code("rollout.agent.program", agent.program, (), "function")
    yield from _program("rollout.agent.command", agent.command)


def _tool(key: str, tool: ToolConfig) -> Iterator[ConfigProblem]:
    if tool.function is not None:
        yield from check_code(f"{key}.function", tool.function, (), "function")
    if tool.class_name is not None:
        module = tool.class_name.rpartition(".")[0]
        if ":" in tool.class_name or not module or not is_importable(module):
            yield from check_code(f"{key}.class_name", tool.class_name, BUILTIN_TOOLS, "tool")
    if tool.mcp is not None:
        yield from _program(f"{key}.mcp.command", tool.mcp.command)


def _program(key: str, command: Sequence[str]) -> Iterator[ConfigProblem]:
    if command and shutil.which(command[0]) is None:
        fix = "check the name, or give a path"
        fix = "give a list, the program first and then its arguments" if " " in command[0] else fix
        yield ConfigProblem(key, command[0], "there is no such program on the PATH", fix)


ENGINE_RULES: tuple[RuleFunction, ...] = (
    ConfigRule("rollout.max_model_len",
               lambda c: c.rollout.max_model_len is not None and c.rollout.max_model_len < c.longest_trajectory,
               "a prompt of {c.data.max_prompt_length} tokens (data.max_prompt_length) and a response of "
               "{c.rollout.response_length} (rollout.response_length) do not fit the engine's context",
               "set it to null or at least {c.longest_trajectory}"),
    check_engine_arguments,
    *quantized.ENGINE_RULES,
    _pool,
    ConfigRule("rollout.max_num_seqs", lambda c: c.rollout.max_num_seqs < c.rollout.n,
               "a group of {c.rollout.n} responses (rollout.n) is decoded in several rounds",
               "set it to {c.rollout.n} or more", "warning"),
)  # fmt: skip
"""Rules for engines of any kind."""

SERVER_RULES: tuple[RuleFunction, ...] = (
    *ENGINE_RULES,
    ConfigRule("rollout.autoscaling.enable", lambda c: c.rollout.autoscaling.enable,
               "it follows the Trainer of a run that starts its own engines, and these servers have none",
               "set it to false; deployed servers take Ray Serve's own autoscaling_config (docs/deploy.md)"),
)  # fmt: skip
"""Rules for `asyncrl serve` and for rollout servers of their own."""

RULES: tuple[RuleFunction, ...] = (
    *ENGINE_RULES,
    *quantized.RULES,
    ConfigRule("rollout.autoscaling.max_replicas",
               lambda c: c.rollout.autoscaling.enable
               and c.rollout.autoscaling.max_replicas <= c.rollout.autoscaling.min_replicas,
               "it leaves no other number of replicas than rollout.autoscaling.min_replicas = "
               "{c.rollout.autoscaling.min_replicas}",
               "raise it, or set rollout.autoscaling.enable=false and rollout.num_replicas"),
    ConfigRule("rollout.num_replicas",
               lambda c: c.rollout.autoscaling.enable and not c.rollout.autoscaling.min_replicas
               <= c.rollout.num_replicas <= max(c.rollout.autoscaling.min_replicas, c.rollout.autoscaling.max_replicas),
               "the run begins with this number, and rollout.autoscaling allows {c.rollout.autoscaling.min_replicas} "
               "to {c.rollout.autoscaling.max_replicas}", "set a number within these bounds"),
    ConfigRule("rollout.attach", lambda c: c.rollout.attach is not None and c.ray.address is None,
               "ray.address is null, so the run would start a cluster of its own, on which no application runs",
               "set ray.address to the cluster of the application, or to auto"),
    ConfigRule("rollout.sampling.temperature", lambda c: c.rollout.sampling.temperature == 0,
               "greedy decoding always gives a prompt the same response: nothing is explored, and no response is "
               "better than another", "set it above 0, usually 1.0; rollout.val.temperature is the one for validation"),
    ConfigRule("rollout.val.n", lambda c: c.rollout.val.temperature == 0 and c.rollout.val.n > 1,
               "greedy validation gives equal responses, so all but the first are wasted",
               "set rollout.val.n=1 or rollout.val.temperature above 0", "warning"),
    _untruncated("top_p", 1.0),
    _untruncated("top_k", -1),
    _untruncated("min_p", 0.0),
    ConfigRule(f"{_TURNS}.enable", lambda c: c.rollout.multi_turn.enable and not c.rollout.multi_turn.tools
               and not c.rollout.multi_turn.interactions,
               "the model has no tool to call and no user to answer it, so every trajectory would be one turn",
               f"set {_TURNS}.tools or {_TURNS}.interactions, or {_TURNS}.enable=false"),
    ConfigRule(f"{_TURNS}.max_assistant_turns", lambda c: c.rollout.multi_turn.enable and c.rollout.multi_turn.tools
               and c.rollout.multi_turn.max_assistant_turns == 1,
               "a tool call in the only turn would not run: the model has no turn left to read its result",
               "raise it to 2 or more"),
    ConfigRule(f"{_TURNS}.timeout_s",
               lambda c: c.rollout.multi_turn.enable and (c.rollout.multi_turn.timeout_s or 0) >= c.timeouts.sample_s,
               "timeouts.sample_s = {c.timeouts.sample_s:g} s drops the whole sample first, so no trajectory would "
               "reach this limit", "lower it, or raise timeouts.sample_s above {c.rollout.multi_turn.timeout_s:g}"),
    ConfigRule(f"{_TURNS}.max_tool_response_length", lambda c: c.rollout.multi_turn.enable
               and c.rollout.multi_turn.tools
               and c.rollout.multi_turn.max_tool_response_length >= c.rollout.response_length,
               "one answer of a tool may fill rollout.response_length = {c.rollout.response_length}, which counts all "
               "turns and the messages between them, and end the trajectory",
               "raise rollout.response_length, or lower this", "warning"),
    _entries,
    ConfigRule("rollout.agent.command", lambda c: c.rollout.agent.program is not None and c.rollout.agent.command,
               "rollout.agent.program is set as well, and only one of them can produce a trajectory",
               "leave out one of them"),
    ConfigRule("rollout.agent", lambda c: c.rollout.agent.enabled and c.rollout.multi_turn.enable,
               f"{_TURNS}.enable is true as well, and only one of them can produce a trajectory",
               f"set {_TURNS}.enable=false: your agent has its own tools"),
    ConfigRule("rollout.agent.timeout_s",
               lambda c: c.rollout.agent.enabled and c.rollout.agent.timeout_s > c.timeouts.sample_s,
               "timeouts.sample_s = {c.timeouts.sample_s:g} s drops the sample first, so no agent gets that long",
               "lower it, or raise timeouts.sample_s to {c.rollout.agent.timeout_s:g} or more"),
    ConfigRule("rollout.num_workers", lambda c: c.rollout.num_workers and c.rollout.agent.enabled,
               "requests of your agent (rollout.agent) reach the Rollouter's process only, and its conversations would "
               "be in the workers", "set it to 0"),
    ConfigRule("rollout.num_workers", lambda c: c.rollout.num_workers and c.skip.tool.enable,
               "tools run in the workers, and the records of skip.tool belong to the Rollouter's process",
               "set it to 0, or skip.tool.enable=false"),
    ConfigRule("rollout.num_workers", lambda c: c.rollout.num_workers and c.skip.reward.enable,
               "workers score what they generate at once, and the records of skip.reward belong to the Rollouter's "
               "process", "set it to 0, or skip.reward.enable=false"),
    ConfigRule("rollout.num_workers",
               lambda c: c.rollout.num_workers and any(role.enable for role in c.skip.roles.values()),
               "stages of your own (skip.roles) that tools or reward functions call run in the workers, where nothing "
               "is recorded or replayed", "set it to 0, or enable=false for these roles"),
    ConfigRule("rollout.over_sample.samples",
               lambda c: c.rollout.over_sample.samples and c.async_training.deterministic,
               "async_training.deterministic trains samples in feed order, and over-sampling drops the slow ones",
               "set rollout.over_sample.samples=0 or async_training.deterministic=false"),
    ConfigRule("rollout.over_sample.samples", lambda c: c.rollout.over_sample.samples and c.skip.rollout.enable,
               "skip.rollout records a version's samples as one batch, and over-sampling selects them by their speed",
               "set rollout.over_sample.samples=0, or record single samples: skip.async_rollout"),
)  # fmt: skip

ENGINE_ENVIRONMENT: tuple[RuleFunction, ...] = (check_argument_names, _shared_heads)
ENVIRONMENT: tuple[RuleFunction, ...] = (
    *ENGINE_ENVIRONMENT,
    check_expert_parallel,
    check_pipeline_parallel,
    quantized.check_kernels,
    _conversations,
)

_LOOP_KEYS = " ".join(
    f"{_TURNS}.{name}*"
    for name in MultiTurnConfig.model_fields
    if name not in ("enable", "format", "tokenization_sanity_check_mode")
)
"""Keys that only the built-in loop reads; the other keys also apply to an agent of the user's own."""

_ENGINE_KEYS = (
    "num_replicas autoscaling* nnodes n_gpus_per_node node_labels* tensor_parallel_size "
    "pipeline_parallel_size max_num_seqs enforce_eager "
    "gpu_memory_utilization cpu_kv_cache_gib cpu_threads engine_kwargs*"
)
"""Keys of `rollout` that only the start of engines reads."""

NO_EFFECT = (
    no_effect(" ".join(f"rollout.{key}" for key in _ENGINE_KEYS.split()), lambda c: c.rollout.attach is not None,
              "the run attaches to engines that are deployed already (rollout.attach)",
              "set it where they are deployed"),
    no_effect("rollout.device",
              lambda c: c.rollout.attach is not None and c.reward_model.placement != "serve",
              "the run attaches to engines that are deployed already (rollout.attach)",
              "set it where they are deployed"),
    no_effect("rollout.gpu_memory_utilization", lambda c: c.rollout.device == "cpu",
              "engines are on CPUs (rollout.device)", "set rollout.cpu_kv_cache_gib"),
    only_with(" ".join(f"rollout.autoscaling.{name}" for name in AutoscalingConfig.model_fields if name != "enable"),
              "rollout.autoscaling.enable", True),
    no_effect(_LOOP_KEYS, lambda c: c.rollout.agent.enabled, "your agent (rollout.agent) has its own tools and limits",
              "set them there"),
    no_effect(f"{_TURNS}.format {_TURNS}.tokenization_sanity_check_mode",
              lambda c: not c.rollout.multi_turn.enable and not c.rollout.agent.enabled,
              f"{_TURNS}.enable is false, and there is no agent of your own (rollout.agent)",
              f"set {_TURNS}.enable=true"),
    only_with(_LOOP_KEYS, f"{_TURNS}.enable", True),
    no_effect(f"{_TURNS}.max_user_turns", lambda c: not c.rollout.multi_turn.interactions,
              "no user answers the model", f"set {_TURNS}.interactions"),
    no_effect(f"{_TURNS}.format {_TURNS}.create {_TURNS}.max_parallel_calls {_TURNS}.*tool_response*",
              lambda c: c.rollout.multi_turn.enable and not c.rollout.multi_turn.tools,
              "the model has no tools", f"set {_TURNS}.tools"),
    no_effect("rollout.agent.timeout_s rollout.agent.max_concurrency", lambda c: not c.rollout.agent.enabled,
              "there is no agent of your own", "set rollout.agent.program or rollout.agent.command"),
    no_effect("rollout.over_sample.unfinished",
              lambda c: not c.rollout.over_sample.samples and not c.rollout.over_sample.trajectories,
              "nothing is over-sampled", "set rollout.over_sample.samples or rollout.over_sample.trajectories"),
)  # fmt: skip

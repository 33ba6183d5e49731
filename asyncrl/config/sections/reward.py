"""`reward`: the score of trajectories, its parts, and the checks of its keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.environment import check_api_key, check_code
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect, only_with, warning
from asyncrl.config.sections.base import ConfigSection, ImportPath, NonNegative, Positive, Seconds

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

BUILTIN_REWARDS = ("exact_match", "math_verify", "reasoning_gym")
COMPARING_REWARDS = ("exact_match", "math_verify")
"""Built-in functions that compare a response with the correct answer of its row."""
_BUILTIN_PARTS = ("rule", "tools", "turns", "judge", "model")
"""Names of parts that every reward may have."""
_JUDGE_FIELDS = ("question", "response", "conversation", "ground_truth")
_FIXED_PARAMS = ("model", "messages", "stream", "n")
_PART_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

JUDGE_PROMPT = """\
You rate what an assistant said.

Question:
{question}

Correct answer: {ground_truth}

The assistant's response:
{response}

How good is this response, from 0 (wrong or useless) to 10 (correct and complete)? Give your reasons in two sentences \
at most, then end with a line like this one:
score: 7
"""


class OverlongBufferConfig(ConfigSection):
    """Soft punishment of overlong responses (DAPO, https://arxiv.org/abs/2503.14476, eq. 13)."""

    enable: bool = False
    """Lower the reward of responses that reach into the last `len` tokens before rollout.response_length."""
    len: Positive = 64
    """Tokens over which the punishment rises from 0 to `penalty_factor`."""
    penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """Punishment of a response of full length."""


class RewardFunctionConfig(ConfigSection):
    """A further reward function."""

    name: str
    """Name of the function's score among extras and metrics: `reward/extra/<name>`."""
    function: str
    """A function in the form of reward.function, except `none`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    batch: bool = False
    """See reward.batch."""
    weight: float = 1.0
    """Weight of its score in the reward."""


class JudgeConfig(ConfigSection):
    """A language model that rates trajectories, behind an OpenAI-compatible endpoint (docs/rewards.md)."""

    model: str | None = None
    """Name of the judge's model at the endpoint; null: no judge."""
    base_url: str | None = None
    """Address of the endpoint, with its `/v1`."""
    api_key_env: str | None = None
    """Environment variable with the API key; null: requests have none."""
    prompt: str | None = None
    """Prompt of the judge. Placeholders: `{question}` is the last user message of the sample's prompt, `{response}` the
    last turn, `{conversation}` all messages, `{ground_truth}` the ground truth of the row. null: a prompt that asks for
    a rating from 0 to 10."""
    pattern: str = r"(?i)score\W*?(-?\d*\.?\d+)"
    """Regular expression; group 1 of its last match in the judge's answer is the number."""
    min: float = 0.0
    """The rating that counts as 0."""
    max: float = 10.0
    """The rating that counts as 1. An answer with a number outside `min` and `max` is refused."""
    weight: float = 1.0
    """Weight of its rating, from 0 to 1, in the reward."""
    timeout_s: Seconds = 60.0
    """Deadline of one request."""
    max_concurrency: Positive = 16
    """Maximum number of concurrent requests."""
    max_attempts: Positive = 3
    """Maximum number of requests until the endpoint answers, and maximum number of answers until one has a valid
    number."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, e.g. `temperature`, `max_tokens`."""

    @property
    def template(self) -> str:
        return JUDGE_PROMPT if self.prompt is None else self.prompt


class RewardConfig(ConfigSection):
    """The reward of a trajectory: the weighted sum of the parts set here and of the reward model (docs/rewards.md)."""

    function: str = "exact_match"
    """`exact_match`, `math_verify`, `reasoning_gym`, or your own: `module:function` or `path/file.py:function`. `none`:
    no function."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    batch: bool = False
    """The function takes lists with a whole group at a time, and returns a list of scores."""
    weight: float = 1.0
    """Weight of the function's score in the reward."""
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Further functions, each as {name, function, kwargs, batch, weight}."""
    manager: ImportPath | None = None
    """Your own class that scores trajectories with the functions, instead of their weighted sum (docs/extending.md)."""
    tool_weight: float = 1.0
    """Weight of the rewards that tools (`calc_reward`) and environments (`score`) give a whole trajectory."""
    turn_weight: float = 1.0
    """Weight of the rewards that tools and environments give single turns."""
    judge: JudgeConfig = JudgeConfig()
    on_error: Literal["stop", "drop"] = "stop"
    """Treatment of a function that raises or a judge that fails: stop the run, or drop the sample, up to `max_errors`
    times."""
    max_errors: NonNegative = 16
    """With `on_error: drop`: the run stops once errors have dropped more samples than this."""
    timeout_s: Seconds = 60.0
    """Deadline of one call to a function, or to the Serve deployment of the reward model."""
    max_concurrency: Positive = 8
    """Maximum number of concurrent calls, of all functions together."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


def has_conversations(config: Config) -> bool:
    """Whether tools, simulated users or external agents take part in trajectories and may reward them."""
    return config.rollout.multi_turn.enable or config.rollout.agent.enabled


def part_weights(config: Config) -> dict[str, float]:
    """Return the weight of every part of the run's rewards, by the part's name."""
    reward = config.reward
    parts: dict[str, float] = {}
    if reward.function != "none" or reward.manager is not None:
        parts["rule"] = reward.weight
    parts |= {function.name: function.weight for function in reward.functions}
    if has_conversations(config):
        parts |= {"tools": reward.tool_weight, "turns": reward.turn_weight}
    if reward.judge.model is not None:
        parts["judge"] = reward.judge.weight
    if config.reward_model.placement != "off":
        parts["model"] = config.reward_model.weight
    return parts


def _is_constant(config: Config) -> bool:
    """Whether every response gets the reward 0."""
    return not any(part_weights(config).values()) and not config.reward.overlong_buffer.enable


def _functions(config: Config) -> Iterator[ConfigProblem]:
    names = [function.name for function in config.reward.functions]
    for name, count in Counter(names).items():
        if not _PART_NAME.fullmatch(name):
            consequence = "it cannot name a metric"
            fix = "begin with a letter, and use letters, digits, '_', '-', '.'"
        elif name in _BUILTIN_PARTS:
            consequence = f"the reward may have a part {name!r} already, and one would overwrite the other"
            fix = f"give it another name than {', '.join(_BUILTIN_PARTS)}"
        elif count > 1:
            consequence, fix = f"{count} functions have this name, and share one part", "give each a different name"
        else:
            continue
        yield ConfigProblem("reward.functions.name", name, consequence, fix)
    for function in config.reward.functions:
        if function.function == "none":
            consequence, fix = f"the entry {function.name!r} would score nothing", "name a function, or leave it out"
            yield ConfigProblem("reward.functions.function", "none", consequence, fix)


def _has_judge(config: Config) -> bool:
    return config.reward.judge.model is not None


def _judge(config: Config) -> Iterator[ConfigProblem]:
    judge = config.reward.judge
    if not _has_judge(config):
        return
    for name in sorted(judge.params.keys() & set(_FIXED_PARAMS)):
        key = f"reward.judge.params.{name}"
        yield ConfigProblem(key, judge.params[name], "it is set for every request", "leave it out")
    fields = set(_PLACEHOLDER.findall(judge.template))
    if not fields & {"response", "conversation"}:
        consequence, fix = "the judge would not see what it judges", "put {response} or {conversation} into it"
        yield ConfigProblem("reward.judge.prompt", judge.prompt, consequence, fix)
    known = ", ".join(f"{{{name}}}" for name in _JUDGE_FIELDS)
    for field in sorted(fields - set(_JUDGE_FIELDS)):
        consequence = "it is no placeholder and stays unchanged in the prompt"
        yield warning("reward.judge.prompt", f"{{{field}}}", consequence, f"placeholders are {known}")
    try:
        has_group = re.compile(judge.pattern).groups > 0
    except re.error as error:
        consequence = f"it is no regular expression: {error}"
        yield ConfigProblem("reward.judge.pattern", judge.pattern, consequence, "correct it")
    else:
        if not has_group:
            consequence, fix = "it has no group that captures the number", "put the number in parentheses"
            yield ConfigProblem("reward.judge.pattern", judge.pattern, consequence, fix)


def _code(config: Config) -> Iterator[ConfigProblem]:
    reward = config.reward
    names = [("reward.function", reward.function)]
    names += [("reward.functions.function", function.function) for function in reward.functions]
    for key, name in names:
        if name != "none":
            yield from check_code(key, name, BUILTIN_REWARDS, "reward")
    if reward.manager is not None:
        yield from check_code("reward.manager", reward.manager, (), "class")
    if reward.judge.model is not None:
        yield from check_api_key("reward.judge", reward.judge.api_key_env)


RULES: tuple[RuleFunction, ...] = (
    ConfigRule("reward.function", lambda c: _is_constant(c) and c.reward.function == "none" and not c.needs_teacher,
               "nothing else counts in the reward, so every response would be worth 0 and nothing would be learned",
               "name a function, a judge (reward.judge) or a reward model (reward_model), use tools that give "
               "rewards, or learn from a teacher (teacher.path)"),
    ConfigRule("reward.weight", lambda c: _is_constant(c) and c.reward.function != "none" and not c.needs_teacher,
               "no other score counts in the reward, so every response would be worth 0 and nothing would be learned",
               "set it to another number, or let a reward model score (reward_model.placement, reward_model.weight)"),
    _functions,
    ConfigRule("reward.judge.base_url", lambda c: _has_judge(c) and not (c.reward.judge.base_url
               or "").startswith(("http://", "https://")), "the judge has no endpoint",
               "give its address, e.g. http://127.0.0.1:8000/v1"),
    ConfigRule("reward.judge.min", lambda c: _has_judge(c) and c.reward.judge.min >= c.reward.judge.max,
               "ratings lie between it and reward.judge.max = {c.reward.judge.max:g}, and there is no number between "
               "them", "set it below {c.reward.judge.max:g}"),
    ConfigRule("reward.judge.weight", lambda c: _has_judge(c) and c.reward.judge.weight == 0,
               "the judge is called, and its rating changes no reward",
               "set it to another number, or reward.judge.model=null, unless you only want to watch it", "warning"),
    _judge,
    ConfigRule("reward.overlong_buffer.len",
               lambda c: c.reward.overlong_buffer.enable and c.reward.overlong_buffer.len > c.rollout.response_length,
               "it is longer than a response may be (rollout.response_length = {c.rollout.response_length}): every "
               "response would be punished", "set it to a fraction of {c.rollout.response_length}"),
)  # fmt: skip

ENVIRONMENT: tuple[RuleFunction, ...] = (_code,)

NO_EFFECT = (
    no_effect("reward.kwargs reward.batch reward.weight",
              lambda c: c.reward.function == "none" and c.reward.manager is None,
              "reward.function is none", "name a function in reward.function"),
    no_effect("reward.tool_weight reward.turn_weight", lambda c: not has_conversations(c),
              "there are no tools, users or agents (rollout.multi_turn.enable, rollout.agent)",
              "set rollout.multi_turn.enable=true"),
    no_effect("reward.judge.*", lambda c: not _has_judge(c),
              "reward.judge.model is null", "set reward.judge.model and reward.judge.base_url"),
    no_effect("reward.max_errors", lambda c: c.reward.on_error == "stop" and not has_conversations(c),
              "reward.on_error is stop, so the first error ends the run", "set reward.on_error=drop"),
    no_effect("reward.max_concurrency", lambda c: c.reward.function == "none" and not c.reward.functions,
              "there is no reward function to call", "name a function in reward.function"),
    only_with("reward.overlong_buffer.len reward.overlong_buffer.penalty_factor",
              "reward.overlong_buffer.enable", True),
)  # fmt: skip

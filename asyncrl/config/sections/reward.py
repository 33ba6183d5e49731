"""`reward`: what trajectories are worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import NonNegative, Positive, Seconds, Section

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


class OverlongBufferConfig(Section):
    """Soft punishment of overlong responses (DAPO, https://arxiv.org/abs/2503.14476, eq. 13)."""

    enable: bool = False
    """Subtract from the reward of responses that reach into the last `len` tokens before rollout.response_length."""
    len: Positive = 64
    """Tokens over which the punishment rises from 0 to `penalty_factor`."""
    penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """Punishment of a response of full length."""


class RewardFunctionConfig(Section):
    """One more function."""

    name: str
    """Of its part among the extras and metrics: `reward/extra/<name>`."""
    function: str
    """As reward.function, but for `none`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to every call."""
    batch: bool = False
    """As reward.batch."""
    weight: float = 1.0
    """Of its score in the reward."""


class JudgeConfig(Section):
    """A language model that rates trajectories, behind an OpenAI-compatible endpoint (docs/rewards.md)."""

    model: str | None = None
    """Its name at the endpoint; null: there is no judge."""
    base_url: str | None = None
    """Of the endpoint, with its `/v1`."""
    api_key_env: str | None = None
    """Environment variable with the key; null: none is sent."""
    prompt: str | None = None
    """What it is asked: `{question}` is the prompt's last user message, `{response}` the last turn, `{conversation}`
    everything that was said, `{ground_truth}` the row's. null: for a rating from 0 to 10."""
    pattern: str = r"(?i)score\W*?(-?\d*\.?\d+)"
    """Regular expression; group 1 of its last match in the judge's answer is the number."""
    min: float = 0.0
    """Number that is worth 0."""
    max: float = 10.0
    """Number that is worth 1. An answer with a number outside of the two is none."""
    weight: float = 1.0
    """Of its rating, from 0 to 1, in the reward."""
    timeout_s: Seconds = 60.0
    """Deadline of one request."""
    max_concurrency: Positive = 16
    """Requests at once."""
    max_attempts: Positive = 3
    """Requests over failures of the endpoint; and answers over those without a number."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, e.g. `temperature`, `max_tokens`."""

    @property
    def template(self) -> str:
        return JUDGE_PROMPT if self.prompt is None else self.prompt


class RewardConfig(Section):
    """What a trajectory is worth: the weighted sum of what is set here and of the reward model (docs/rewards.md)."""

    function: str = "exact_match"
    """`exact_match`, `math_verify`, `reasoning_gym`, or your own: `module:function` or `path/file.py:function`. `none`:
    no function."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to every call."""
    batch: bool = False
    """The function takes lists, a whole group at a time, and returns a list."""
    weight: float = 1.0
    """Of the function's score in the reward."""
    functions: tuple[RewardFunctionConfig, ...] = ()
    """More functions: {name, function, kwargs, batch, weight}."""
    tool_weight: float = 1.0
    """Of what tools (`calc_reward`) and environments (`score`) give a whole trajectory."""
    turn_weight: float = 1.0
    """Of what tools and environments give single turns."""
    judge: JudgeConfig = JudgeConfig()
    on_error: Literal["stop", "drop"] = "stop"
    """A function that raises, or a judge that fails, stops the run, or drops the sample within `max_errors`."""
    max_errors: NonNegative = 16
    """With `on_error: drop`: the run stops when more samples than this were dropped for it."""
    timeout_s: Seconds = 60.0
    """Deadline of one call, of a function or of the reward model's Serve deployment."""
    max_concurrency: Positive = 8
    """Calls of functions at once, all of them together."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

"""What a run's rewards are made of, and rules between the keys of `reward`; `rules` runs them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config

OWN_PARTS = ("rule", "tools", "turns", "judge", "model")
"""Names of parts that every run may have."""
JUDGE_FIELDS = ("question", "response", "conversation", "ground_truth")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_BRACES = re.compile(r"\{(\w+)\}")
_NOT_PARAMS = ("model", "messages", "stream", "n")


def part_weights(config: Config) -> dict[str, float]:
    """Every source of the run's rewards, by the name of its part, with its weight."""
    reward = config.reward
    parts: dict[str, float] = {}
    if reward.function != "none":
        parts["rule"] = reward.weight
    parts |= {function.name: function.weight for function in reward.functions}
    if has_conversations(config):
        parts |= {"tools": reward.tool_weight, "turns": reward.turn_weight}
    if reward.judge.model is not None:
        parts["judge"] = reward.judge.weight
    if config.reward_model.placement != "off":
        parts["model"] = config.reward_model.weight
    return parts


def has_conversations(config: Config) -> bool:
    """Somebody besides the policy takes part in trajectories, and may reward it."""
    return config.rollout.multi_turn.enable or config.rollout.agent.enabled


def _sources(config: Config, given: Given) -> Iterator[Problem]:
    weights = part_weights(config)
    if any(weights.values()) or config.reward.overlong_buffer.enable:
        return
    consequence = "so every response would be worth 0 and nothing would be learned"
    if config.reward.function == "none":
        yield Problem(
            "reward.function",
            "none",
            f"nothing else counts in the reward, {consequence}",
            "name a function, a judge (reward.judge) or a reward model (reward_model), or use tools that give rewards",
        )
    else:
        yield Problem(
            "reward.weight",
            0,
            f"no other score counts in the reward, {consequence}",
            "set it to another number, or let a reward model score (reward_model.placement, reward_model.weight)",
        )


def _functions(config: Config, given: Given) -> Iterator[Problem]:
    names = [function.name for function in config.reward.functions]
    for name, count in Counter(names).items():
        if not _NAME.fullmatch(name):
            consequence, fix = "it could name no metric", "begin with a letter, and use letters, digits, '_', '-', '.'"
        elif name in OWN_PARTS:
            consequence = f"the reward may have a part {name!r} already, and one would overwrite the other"
            fix = f"give it another name than {', '.join(OWN_PARTS)}"
        elif count > 1:
            consequence, fix = f"{count} functions have this name, and share one part", "give each a name of its own"
        else:
            continue
        yield Problem("reward.functions.name", name, consequence, fix)
    for function in config.reward.functions:
        if function.function == "none":
            yield Problem(
                "reward.functions.function",
                "none",
                f"the entry {function.name!r} would score nothing",
                "name a function, or leave the entry out",
            )


def _judge(config: Config, given: Given) -> Iterator[Problem]:
    judge = config.reward.judge
    if judge.model is None:
        return
    if judge.base_url is None or not judge.base_url.startswith(("http://", "https://")):
        yield Problem(
            "reward.judge.base_url",
            judge.base_url,
            "there is no endpoint to ask the judge at",
            "give its address, e.g. http://127.0.0.1:8000/v1",
        )
    if judge.min >= judge.max:
        yield Problem(
            "reward.judge.min",
            judge.min,
            f"ratings lie between it and reward.judge.max = {judge.max:g}, and there is nothing between them",
            f"set it below {judge.max:g}",
        )
    for name in sorted(judge.params.keys() & set(_NOT_PARAMS)):
        yield Problem(f"reward.judge.params.{name}", judge.params[name], "it is set for every request", "leave it out")
    if judge.weight == 0:
        yield warning(
            "reward.judge.weight",
            0,
            "the judge is asked, and what it says changes no reward",
            "set it to another number, or reward.judge.model=null, unless you only want to watch it",
        )
    yield from _judge_texts(config)


def _judge_texts(config: Config) -> Iterator[Problem]:
    judge = config.reward.judge
    fields = set(_BRACES.findall(judge.template))
    if not fields & {"response", "conversation"}:
        yield Problem(
            "reward.judge.prompt",
            judge.prompt,
            "the judge would not see what it judges",
            "put {response} or {conversation} into it",
        )
    for field in sorted(fields - set(JUDGE_FIELDS)):
        yield warning(
            "reward.judge.prompt",
            f"{{{field}}}",
            "it stands for nothing and stays as it is",
            f"there is {', '.join(f'{{{name}}}' for name in JUDGE_FIELDS)}",
        )
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        yield Problem("reward.judge.pattern", judge.pattern, f"it is no regular expression: {error}", "mend it")
    else:
        if groups < 1:
            yield Problem(
                "reward.judge.pattern", judge.pattern, "it has no group, so no number", "put the number in parentheses"
            )


RULES: tuple[Rule, ...] = (_sources, _functions, _judge)

_NO_FUNCTION = (
    lambda c: c.reward.function == "none", "reward.function is none", "name a function in reward.function",
)  # fmt: skip
_NO_CONVERSATIONS = (
    lambda c: not has_conversations(c),
    "there are no tools, users or agents (rollout.multi_turn.enable, rollout.agent)",
    "set rollout.multi_turn.enable=true",
)

IDLE: tuple[tuple[str, Callable[[Config], bool], str, str], ...] = (
    ("reward.kwargs", *_NO_FUNCTION),
    ("reward.batch", *_NO_FUNCTION),
    ("reward.weight", *_NO_FUNCTION),
    ("reward.tool_weight", *_NO_CONVERSATIONS),
    ("reward.turn_weight", *_NO_CONVERSATIONS),
    ("reward.judge.*", lambda c: c.reward.judge.model is None,
     "reward.judge.model is null", "set reward.judge.model and reward.judge.base_url"),
    ("reward.max_errors", lambda c: c.reward.on_error == "stop" and not has_conversations(c),
     "reward.on_error is stop, so the first error ends the run", "set reward.on_error=drop"),
    ("reward.max_concurrency", lambda c: c.reward.function == "none" and not c.reward.functions,
     "there is no reward function to call", "name a function in reward.function"),
)  # fmt: skip
"""Keys that a run may ignore: key, when it does, because, what to do."""

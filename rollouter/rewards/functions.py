"""Defines the built-in reward functions, loads and calls the configured functions, and checks their results."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import anyio
from anyio import to_process, to_thread

from asyncrl.config.import_path import call_problem, defined_at, load_registered, signature_of
from asyncrl.config.interpolation import reveal
from asyncrl.config.sections.reward import RewardConfig, RewardFunctionConfig
from asyncrl.core.failures import ConfigError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.text import encodable
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import Prompt
from rollouter.rewards.expressions import confine
from rollouter.user_code import LARGEST, finite, is_async, name_of, shown


def exact_match(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    pattern: str | None = None,
) -> list[dict[str, Any]]:
    """Score 1.0 if the answer equals the ground truth as text, else 0.0. Surrounding white space does not count.

    `pattern` is a regular expression: the answer is group 1 of its last match, and a response without a match scores
    0.0. Without a pattern, both the whole response and the text after its last `#`, as in `#### 42` (GSM8K), count as
    answers.
    """
    truths = [_text(truth) for truth in ground_truths]
    if pattern is not None:
        answers: list[tuple[str | None, ...]] = [(_last_group(pattern, text),) for text in solution_strs]
    else:
        answers = [(text.strip(), text.rpartition("#")[2].strip()) for text in solution_strs]
    return [
        {"score": float(truth in answer), "pred": answer[-1]} for answer, truth in zip(answers, truths, strict=True)
    ]


def _last_group(pattern: str, text: str) -> str | None:
    groups = [match[1] for match in re.finditer(pattern, text)]
    return groups[-1].strip() if groups and groups[-1] is not None else None


def math_verify(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], timeout_s: int = 5
) -> dict[str, Any]:
    """Score 1.0 if math-verify finds the response's last answer equal to the ground truth, else 0.0.

    The ground truth is LaTeX or a plain expression. `timeout_s` bounds each parse and the comparison. A response that
    takes longer scores 0.0, for example one with 9^9^9^9. The timeout uses a signal, so the function runs only in the
    main thread of a process.

    Raises:
        ValueError: the ground truth itself cannot be parsed.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # unparsable responses are normal
    truth = _parsed_truth(_text(ground_truth), timeout_s)
    answer = parse(solution_str, parsing_timeout=timeout_s)
    score = float(verify(truth, answer, timeout_seconds=timeout_s))
    return {"score": score, "pred": str(answer[-1]) if answer else None}  # the last one is the answer as text


@lru_cache(maxsize=1024)
def _parsed_truth(truth: str, timeout_s: int) -> Any:
    from math_verify import parse

    # Bare LaTeX is only recognized between dollar signs.
    parsed = parse(truth, parsing_timeout=timeout_s) or parse(f"${truth}$", parsing_timeout=timeout_s)
    if not parsed:
        raise ValueError(f"math_verify cannot parse the ground truth {truth!r}")
    return parsed


def reasoning_gym(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    tag: str = "answer",
) -> list[dict[str, Any]]:
    """Score the text in the last `<tag>…</tag>`, or else the whole response, with the task's `score_answer`.

    Of what a task evaluates, only numbers, lists, arithmetic and, in algebra, symbols and common functions count.

    Raises:
        ValueError: a row has no `extra_info.entry` with the task's name in its metadata.
    """
    from reasoning_gym.utils import extract_answer

    scores = []
    for text, info in zip(solution_strs, extra_infos, strict=True):
        entry = info.get("entry")
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise ValueError(
                "the row has no extra_info.entry with metadata.source_dataset; the reasoning_gym reward scores prompts "
                "made by data.reasoning_gym, or rows that contain the task's entry"
            )
        extracted = extract_answer(text, tag_name=tag)
        answer = text.strip() if extracted is None else extracted
        scores.append({"score": _score_entry(answer, entry), "pred": str(answer)})
    return scores


def _score_entry(answer: str, entry: Any) -> float:
    """Return the task's score of an answer: 0 if it raises for this answer, but not for the right one."""
    score = _score_answer(entry["metadata"]["source_dataset"])
    try:
        return float(score(answer, entry))
    except Exception:  # noqa: BLE001  some tasks convert answers without a check
        score(entry.get("answer"), entry)
        return 0.0


@cache
def _score_answer(task: str) -> Any:
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS

    if task in DATASETS:
        confine(sys.modules[DATASETS[task][0].__module__])
    return gym.get_score_answer_fn(task)


def _text(truth: Any) -> str:
    if truth is None:
        raise UserCodeError("the row has no reward_model.ground_truth to compare with")
    return str(truth).strip()


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
BATCH = frozenset({"exact_match", "reasoning_gym"})
"""Built-in functions that score a whole group in one call, because a response takes them only microseconds."""
IN_PROCESS = frozenset({"math_verify"})
"""Built-in functions that run in a worker process: math_verify needs a main thread, and sympy can block Python."""


CHEAP_S = 0.001
"""A function that takes less for a response is cheap: handing it to a thread costs a tenth of this or more."""
TOGETHER_S = 0.1
"""Time limit for the calls that one thread makes one after another; each of the remaining ones gets its own thread."""
_NEWEST_COST = 0.1
"""Weight of the newest call in the average cost."""

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
NO_FUNCTION = "none"
MAX_ANSWER = 1000
"""Longest answer (`pred`) that is kept, in characters."""


class CallCost:
    """The average time that a function takes for one response, over its recent calls."""

    def __init__(self) -> None:
        self._mean_s = math.inf

    @property
    def is_cheap(self) -> bool:
        """Whether it is below `CHEAP_S`; False before the first call."""
        return self._mean_s < CHEAP_S

    def add(self, seconds: float, responses: int) -> None:
        each_s = seconds / max(responses, 1)
        known = math.isfinite(self._mean_s)
        self._mean_s = (1 - _NEWEST_COST) * self._mean_s + _NEWEST_COST * each_s if known else each_s


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the way it is called. All arguments are passed by name, with verl's names.

    A single function, `f(data_source, solution_str, ground_truth, extra_info, **kwargs)`, returns a number, or a
    mapping with `score`, further numbers, and perhaps the answer that it found in the response as `pred`. A batch
    function, `f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`, receives lists with one item per
    trajectory of a group, and returns a list of such results. A function that has a parameter `trajectory` (or, with
    batch, `trajectories`) receives these as well.
    """

    name: str
    call: Callable[..., Any]
    kwargs: Mapping[str, Any]
    batch: bool

    @property
    def whole_group(self) -> bool:
        """Whether one call must receive all trajectories of a prompt: a user's batch function may compare them."""
        return self.batch and self.name not in BUILT_IN

    @cached_property
    def arguments(self) -> Mapping[str, str]:
        """The names of the function's arguments besides `kwargs`, by the names that `row_of` uses."""
        names = {name: f"{name}s" if self.batch else name for name in ROW_ARGUMENTS}
        trajectory = "trajectories" if self.batch else "trajectory"
        signature = signature_of(self.call)
        takes_it = signature is not None and trajectory in signature.parameters
        return {**names, "trajectory": trajectory} if takes_it else names

    @cached_property
    def is_async(self) -> bool:
        return is_async(self.call)

    @cached_property
    def slots(self) -> AbstractAsyncContextManager[Any]:
        """A context to enter around `invoke`. It limits the number of worker processes, but not of threads: a deadline
        kills a process, but cannot kill a thread."""
        return anyio.CapacityLimiter(os.cpu_count() or 1) if self.name in IN_PROCESS else nullcontext()

    @cached_property
    def cost(self) -> CallCost:
        """What calls in threads cost; an async function and one in a worker process are never cheap."""
        return CallCost()

    @cached_property
    def threads(self) -> anyio.CapacityLimiter:
        """A limiter without a limit: callers bound the calls, and an abandoned thread must not occupy capacity."""
        return anyio.CapacityLimiter(math.inf)

    async def invoke(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """Call the function, off the event loop unless it is async. Return its result, or raise its exception.

        Args:
            rows: The arguments by name, see `row_of`, of one trajectory or, with `batch`, of several. They are iterated
                over in a thread.
        """
        in_thread = partial(to_thread.run_sync, abandon_on_cancel=True, limiter=self.threads)
        if self.is_async:
            return await (await in_thread(self._bound, rows))()
        if self.name in IN_PROCESS:
            bound = await in_thread(self._bound, rows)
            return await to_process.run_sync(bound, cancellable=True, limiter=self.threads)
        return await in_thread(self._timed, rows)

    async def invoke_each(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Call a function without `batch` for one row after another in one thread, and return the results. There are
        fewer than rows if `TOGETHER_S` is over."""

        def run() -> list[Any]:
            results, until = [], time.monotonic() + TOGETHER_S
            for row in rows:
                results.append(self._timed([row]))
                if time.monotonic() > until:
                    break
            return results

        return await to_thread.run_sync(run, abandon_on_cancel=True, limiter=self.threads)

    def _timed(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        started, rows = time.perf_counter(), list(rows)
        result = self._bound(rows)()
        self.cost.add(time.perf_counter() - started, len(rows))
        return result

    def _bound(self, rows: Iterable[Mapping[str, Any]]) -> Callable[[], Any]:
        rows = list(rows)
        given = {own: [row[name] for row in rows] for name, own in self.arguments.items()}
        arguments = given if self.batch else {own: values[0] for own, values in given.items()}
        return partial(self.call, **arguments, **self.kwargs)


def load_reward_functions(config: RewardConfig) -> dict[str, RewardFunction]:
    """Return all functions of a run by the names of their parts; `rule` is `reward.function`.

    Raises:
        ConfigError, UserCodeError: see `load_reward_function`.
    """
    functions = {} if config.function == NO_FUNCTION else {"rule": load_reward_function(config)}
    for number, entry in enumerate(config.functions):
        functions[entry.name] = load_reward_function(entry, f"reward.functions[{number}]")
    return functions


def load_reward_function(config: RewardConfig | RewardFunctionConfig, key: str = "reward") -> RewardFunction:
    """Load the function and check that it can be called. `key` is the function's configuration section, for errors.

    Raises:
        ConfigError: the function does not exist, is not callable, or does not accept the arguments.
        UserCodeError: the module raised when it was imported.
    """
    name, kwargs = config.function, reveal(config.kwargs, f"{key}.kwargs")
    target = load_registered(name, f"{key}.function", BUILT_IN, "function")
    if not callable(target):
        raise ConfigError(f"{key}.function: {name} is a {type(target).__name__}, not a function")
    function = RewardFunction(name, target, kwargs, batch=name in BATCH if name in BUILT_IN else config.batch)
    names = list(function.arguments.values())
    for given in kwargs:
        if given in names:
            raise ConfigError(f"{key}.kwargs.{given}: each call sets this argument; leave it out")
    if problem := call_problem(target, **dict.fromkeys(names), **kwargs):
        subject = name if name in BUILT_IN else f"{defined_at(target)}: it"
        raise ConfigError(
            f"{key}.function: {subject} cannot be called with {', '.join(names)} (by name, since {key}.batch is "
            f"{str(function.batch).lower()}) and {key}.kwargs ({', '.join(kwargs) or 'none'}): {problem}. Write "
            f"def {getattr(target, '__name__', 'score')}({', '.join([*names, *kwargs])}): ... (docs/rewards.md)"
        )
    if name in BUILT_IN and kwargs.get("pattern") is not None:
        _check_pattern(kwargs["pattern"], f"{key}.kwargs.pattern")
    return function


def _check_pattern(pattern: Any, key: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, TypeError) as error:
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression: {error}") from error
    if groups < 1:
        raise ConfigError(f"{key}: {pattern!r} has no group; put the answer in parentheses")


def row_of(prompt: Prompt, trajectory: Trajectory, text: str) -> Mapping[str, Any]:
    """Return the arguments for one trajectory; `text` is the assistant's last turn."""
    return {
        "data_source": prompt.data_source,
        "solution_str": text,
        "ground_truth": prompt.ground_truth,
        "extra_info": extra_info(prompt, trajectory),
        "trajectory": trajectory,
    }


def extra_info(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """Return a copy of the row's `extra_info` and, for a conversation, its messages, counts, scores and rewards."""
    columns = dict(prompt.extra_info)
    if not trajectory.messages:
        return columns
    return columns | {
        "messages": [dict(message) for message in trajectory.messages],
        "num_turns": len(trajectory.turns),
        "num_tool_calls": trajectory.num_calls,
        "finish_reason": str(trajectory.finish_reason),
        "tool_scores": dict(trajectory.scores),
        "turn_rewards": [turn.reward for turn in trajectory.turns],
    }


def score_of(result: Any, about: Callable[[], str], *, num_turns: int) -> Score:
    """Read the score of one trajectory with `num_turns` turns. Extras that are not finite numbers are dropped, except a
    text `pred`.

    `about` returns a description of the call, for errors.

    Raises:
        UserCodeError: `result` is not a score.
    """
    if not isinstance(result, Mapping):
        return Score(_score(result, about))
    if "score" not in result:
        raise UserCodeError(f"{about()} returned a mapping without 'score': {shown(result)}")
    turns = _turn_scores(result.get("turn_scores"), about, num_turns)
    extras = {name_of(key): finite(item) for key, item in result.items() if key not in ("score", "turn_scores")}
    extra = {key: item for key, item in extras.items() if item is not None}
    return Score(_score(result["score"], about) + sum(turns), extra, turns, _answer(result.get("pred"), about))


def listed(results: Any, about: Callable[[], str], *, length: int) -> Sequence[Any]:
    """Return the result of a batch function as a sequence: a list, or an array or tensor of one dimension.

    Raises:
        UserCodeError: the result is not a sequence of that length.
    """
    items = _sequence(results)
    if items is None or len(items) != length:
        raise UserCodeError(f"{about()} returned {shown(results)}; expected a list of {length} scores")
    return items


def _score(value: Any, about: Callable[[], str]) -> float:
    number = finite(value)
    if number is None:
        raise UserCodeError(
            f"{about()} returned {shown(value)}; expected a finite number of at most {LARGEST:g}, or a mapping with "
            "one under 'score'"
        )
    return number


def _answer(value: Any, about: Callable[[], str]) -> str | None:
    try:
        return None if value is None else encodable(str(value))[:MAX_ANSWER]
    except Exception as error:  # an integer may be too long, and the class may be a user's
        raise UserCodeError.wrap(f"{about()} returned 'pred' = {shown(value)}, which is no text", error) from error


def _turn_scores(value: Any, about: Callable[[], str], num_turns: int) -> tuple[float, ...]:
    if value is None:
        return ()
    items = _sequence(value)
    numbers = [finite(item) for item in items or ()]
    scores = tuple(number for number in numbers if number is not None)
    if items is None or len(scores) != len(numbers) or len(scores) != num_turns:
        raise UserCodeError(
            f"{about()} returned turn_scores {shown(value)}; expected a list of {num_turns} finite numbers, one for "
            "each turn of the assistant"
        )
    return scores


def _sequence(value: Any) -> Sequence[Any] | None:
    if not isinstance(value, Sequence) and hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None

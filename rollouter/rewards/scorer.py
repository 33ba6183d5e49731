"""Combines the scores of reward functions, tools, users, judge and reward model into one weighted reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
from anyio import to_thread

from asyncrl.config.import_path import call_problem, defined_at, load_function, raised_at, source_of
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import has_conversations, part_weights
from asyncrl.core.failures import AsyncRLError, ConfigError, UserCodeError
from asyncrl.core.ports import RewardScorer, Score
from asyncrl.core.tasks import gather
from asyncrl.core.trajectory import Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn
from rollouter.prompts.chat_template import Decode
from rollouter.rewards.conversation import ScoredConversation, conversation
from rollouter.rewards.functions import RewardFunction, listed, load_reward_functions, row_of, score_of
from rollouter.rewards.judge import JudgeScorer
from rollouter.user_code import LARGEST, describe, finite, is_async, shown


class ScoreSource(RewardScorer, Protocol):
    """A `RewardScorer` that is a part of a run's reward."""

    @property
    def is_cheap(self) -> bool:
        """Whether a call costs less than an own task and thread for it, as far as is known from earlier calls."""


class FunctionScorer:
    """A `ScoreSource` that calls one reward function.

    A sync function runs in a worker thread; a cheap one scores the responses of a call there, one after another. A
    thread cannot be killed: if the call exceeds its deadline, the sample fails and the thread is abandoned. Async
    functions run on the event loop and must not block it.
    """

    def __init__(
        self, function: RewardFunction, decode: Decode, *, timeout_s: float, capacity: anyio.CapacityLimiter
    ) -> None:
        """`timeout_s` is the deadline of one call, which starts once `capacity` lets the call run."""
        self._function = function
        self._decode = decode
        self._timeout_s = timeout_s
        self._capacity = capacity

    @property
    def whole_group(self) -> bool:
        return self._function.whole_group

    @property
    def is_cheap(self) -> bool:
        return self._function.cost.is_cheap

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        if self._function.batch and trajectories:
            about = partial(self._about, prompt, trajectories[0])
            results = listed(await self._call(prompt, trajectories), about, length=len(trajectories))
        else:
            together = len(trajectories) > 1 and self.is_cheap
            results = await self._call(prompt, trajectories, one_by_one=True) if together else []
            rest = trajectories[len(results) :]
            results = [*results, *await gather(lambda trajectory: self._call(prompt, [trajectory]), rest)]
        return [
            score_of(result, partial(self._about, prompt, trajectory), num_turns=len(trajectory.turns))
            for result, trajectory in zip(results, trajectories, strict=True)
        ]

    async def _call(self, prompt: Prompt, trajectories: Sequence[Trajectory], *, one_by_one: bool = False) -> Any:
        """Call the function once, or `one_by_one` for several trajectories in one thread (`invoke_each`)."""
        current = trajectories[0]

        def rows() -> Iterator[Mapping[str, Any]]:
            # In the thread of the function, which so decodes the responses.
            nonlocal current
            for trajectory in trajectories:
                current = trajectory if one_by_one else current
                yield row_of(prompt, trajectory, self._text(trajectory))

        function = self._function
        async with function.slots, self._capacity:
            with anyio.move_on_after(self._timeout_s) as deadline:
                try:
                    return await (function.invoke_each if one_by_one else function.invoke)(rows())
                except Exception as error:
                    about = self._about(prompt, current)
                    raise UserCodeError.wrap(f"{about} raised {describe(error)}", error) from error
            assert deadline.cancelled_caught
        raise UserCodeError(
            f"{self._about(prompt, current)} did not return within reward.timeout_s = {self._timeout_s:g} s; "
            "raise the limit, or bound the function's work"
        )

    def _text(self, trajectory: Trajectory) -> str:
        return self._decode(trajectory.turn_ids())

    def _about(self, prompt: Prompt, trajectory: Trajectory) -> str:
        index = prompt.extra_info.get("index")
        row = f"{prompt.data_source!r}" if index is None else f"{prompt.data_source!r}, row {index}"
        return f"reward function {self._function.name} on a response to {row} ({shown(self._text(trajectory))})"


class ToolScorer:
    """A `ScoreSource` that sums `Trajectory.scores`: the scores of tools, environments and agents."""

    whole_group = False
    is_cheap = True

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(sum(_checked(trajectory.scores), 0.0)) for trajectory in trajectories]


class TurnRewardScorer:
    """A `ScoreSource` that returns the rewards that tools and environments gave to turns."""

    whole_group = False
    is_cheap = True

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        turns = [{f"turn {n}": turn.reward for n, turn in enumerate(one.turns)} for one in trajectories]
        return [Score(sum(rewards, 0.0), turn_rewards=rewards) for rewards in map(_checked, turns)]


def _checked(given: Mapping[str, float]) -> tuple[float, ...]:
    for name, value in given.items():
        if finite(value) is None:
            raise UserCodeError(f"the reward from {name} is {value}; expected a finite number of at most {LARGEST:g}")
    return tuple(float(value) for value in given.values())


class RewardModelPort(Protocol):
    """A reward model."""

    async def score(self, conversations: Sequence[ScoredConversation]) -> list[float]:
        """Return one finite number per conversation."""


class ModelRewardScorer:
    """A `ScoreSource` that calls a reward model. It raises the model's InfraError or DataError."""

    whole_group = False
    is_cheap = False

    def __init__(self, model: RewardModelPort, decode: Decode) -> None:
        self._model = model
        self._decode = decode

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        conversations = await to_thread.run_sync(
            lambda: [conversation(prompt, one, self._decode(one.turn_ids())) for one in trajectories]
        )
        return [Score(value) for value in await self._model.score(conversations)]


class WeightedSource(NamedTuple):
    """One part of a reward."""

    name: str | None
    """The part's name in `Score.extra`; None if the scorer adds the names of its parts."""
    weight: float
    scorer: ScoreSource


class WeightedScorer:
    """A `ScoreSource` that sums the weighted scores and turn rewards of several sources, which run concurrently."""

    def __init__(self, sources: Sequence[WeightedSource], *, report_parts: bool) -> None:
        """With `report_parts`, `Score.extra` contains each source's score before its weight, by the source's name."""
        self._sources = tuple(sources)
        self._report_parts = report_parts

    @property
    def whole_group(self) -> bool:
        return any(source.scorer.whole_group for source in self._sources)

    @property
    def is_cheap(self) -> bool:
        return all(source.scorer.is_cheap for source in self._sources)

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory.

        Raises:
            UserCodeError: two sources use the same name for an extra; or a function, a tool or the judge failed.
            InfraError, DataError: the reward model failed. Only the first failure of any source is raised.
        """
        by_source = await gather(lambda source: source.scorer.score(prompt, trajectories), self._sources)
        return [self._sum([scores[number] for scores in by_source]) for number in range(len(trajectories))]

    def _sum(self, scores: Sequence[Score]) -> Score:
        reward = 0.0
        extra: dict[str, float] = {}
        turns: list[float] = []
        answer: str | None = None
        for source, score in zip(self._sources, scores, strict=True):
            answer = score.answer if answer is None else answer
            reward += source.weight * score.reward
            _add_extras(extra, score.extra)
            if self._report_parts and source.name is not None:
                _add_extras(extra, {source.name: score.reward})
            if score.turn_rewards:
                own = [source.weight * value for value in score.turn_rewards]
                turns = [one + other for one, other in zip(turns, own, strict=True)] if turns else own
        return Score(reward, extra, tuple(turns) if any(turns) else (), answer)


def _add_extras(extra: dict[str, float], more: Mapping[str, float]) -> None:
    if clash := extra.keys() & more.keys():
        name = min(clash)
        raise UserCodeError(
            f"two numbers of one response are called {name!r}: parts of the reward (reward.functions.name) and the "
            "extras that functions return with 'score' need different names; rename one"
        )
    extra.update(more)


def function_scorer(config: Config, functions: Mapping[str, RewardFunction], decode: Decode) -> WeightedScorer:
    """Return one scorer for all functions of the run. `functions` is the result of `load_reward_functions`."""
    weights, reward = part_weights(config), config.reward
    capacity = anyio.CapacityLimiter(reward.max_concurrency)
    sources = [
        WeightedSource(
            name, weights[name], FunctionScorer(function, decode, timeout_s=reward.timeout_s, capacity=capacity)
        )
        for name, function in functions.items()
    ]
    return WeightedScorer(sources, report_parts=len(weights) > 1)


def load_scorer(config: Config, functions: Mapping[str, RewardFunction], decode: Decode) -> WeightedScorer:
    """Return the scorer of all functions of the run: `reward.manager`, or their weighted sum.

    Raises:
        ConfigError: the manager does not take the arguments, or has no async `score`.
        UserCodeError: it raised when it was made.
    """
    key, name = "reward.manager", config.reward.manager
    if name is None:
        return function_scorer(config, functions, decode)
    kind = load_function(name, key, {})
    if problem := call_problem(kind, functions, config, decode):
        raise ConfigError(f"{key}: {defined_at(kind)}: it is made with (functions, config, decode): {problem}")
    manager: Any = kind(functions, config, decode)
    score = getattr(manager, "score", None)
    if score is None or not is_async(score) or not isinstance(getattr(manager, "whole_group", None), bool):
        raise ConfigError(
            f"{key}: {defined_at(kind)}: it needs `async def score(self, prompt, trajectories)`, which returns a list "
            "of asyncrl.core.ports.Score, and `whole_group`, True if a call needs all trajectories of a prompt"
        )
    return WeightedScorer(
        [WeightedSource(None, config.reward.weight, ManagedScorer(manager, key, config.reward.timeout_s))],
        report_parts=False,
    )


def check_own_manager(config: Config) -> Iterator[ConfigProblem]:
    """Let the user's `reward.manager` score two toy responses."""
    if config.reward.manager is None:
        return
    prompt = Prompt(np.zeros(2, np.int32), ({"role": "user", "content": "What is 1 + 2?"},), ground_truth="3")
    turn = Turn(np.zeros(2, np.int32), np.zeros(2, np.float32), (Span(0, 0),), FinishReason.STOP)
    try:
        scorer = load_scorer(config, load_reward_functions(config.reward), lambda ids: "3")
        anyio.run(scorer.score, prompt, [single_turn(prompt, turn)] * 2)
    except AsyncRLError as error:
        fix = "correct the class; docs/extending.md has an example"
        yield ConfigProblem(
            "reward.manager", config.reward.manager, error.message.removeprefix("reward.manager: "), fix
        )


class ManagedScorer:
    """A `ScoreSource` that calls the user's `reward.manager` within its deadline, and checks the answer."""

    is_cheap = False

    def __init__(self, manager: RewardScorer, key: str, timeout_s: float) -> None:
        self._manager, self._key, self._timeout_s = manager, key, timeout_s

    @property
    def whole_group(self) -> bool:
        return self._manager.whole_group

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        kind = type(self._manager)
        try:
            with anyio.fail_after(self._timeout_s):
                scores = await self._manager.score(prompt, trajectories)
        except AsyncRLError:
            raise
        except Exception as error:
            place = raised_at(error, source_of(kind)) or kind.__name__
            raise UserCodeError.wrap(f"{self._key}: {place}: {describe(error)}", error) from error
        if not isinstance(scores, list) or len(scores) != len(trajectories):
            raise UserCodeError(
                f"{self._key}: {defined_at(kind)}: score returned {shown(scores)}; expected a list of "
                f"{len(trajectories)} Score"
            )
        for score in scores:
            if not isinstance(score, Score) or finite(score.reward) is None:
                raise UserCodeError(
                    f"{self._key}: {defined_at(kind)}: {shown(score)} is no Score with a finite reward of at most "
                    f"{LARGEST:g}"
                )
        return scores


class CombinedScorer(WeightedScorer):
    """The `RewardScorer` of a whole run, for training and validation: reward functions and all other sources.

    If a run has more than one source, `Score.extra` contains each part before its weight: `rule`, the names of further
    functions, `tools`, `turns`, `judge`, `model`. With `reward_model.placement: worker` the Trainer adds the model's
    part to the rewards it trains on; this scorer, and so validation, lacks it.
    """

    def __init__(self, functions: ScoreSource, config: Config, decode: Decode, model: RewardModelPort | None) -> None:
        """`functions` is the result of `function_scorer`, already weighted. `model` is the served reward model, if any.

        Raises:
            ConfigError: the endpoint of `reward.judge` cannot be used.
        """
        weights = part_weights(config)
        others: dict[str, ScoreSource] = {}
        if has_conversations(config):
            others |= {"tools": ToolScorer(), "turns": TurnRewardScorer()}
        self._judge = JudgeScorer(config.reward.judge, decode) if config.reward.judge.model is not None else None
        if self._judge is not None:
            others["judge"] = self._judge
        if model is not None:
            others["model"] = ModelRewardScorer(model, decode)
        sources = [WeightedSource(None, 1.0, functions)]
        sources += [WeightedSource(name, weights[name], scorer) for name, scorer in others.items()]
        super().__init__(sources, report_parts=len(weights) > 1)

    @property
    def whole_group(self) -> bool:
        """Whether a source needs the whole group, or all are cheap: then one call for the group costs less than early
        calls for its trajectories, and takes no noticeable time."""
        return self.is_cheap or super().whole_group

    async def aclose(self) -> None:
        """Close the connections to the judge."""
        if self._judge is not None:
            await self._judge.aclose()

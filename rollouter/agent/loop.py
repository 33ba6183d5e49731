"""One conversation: the policy's turns, and what tools and users say between them.

    reset ─▶ ask for a turn ─▶ parse ─┬─ calls ─▶ tools, all at once ─▶ their answers as tokens ──┐
             ▲                        ├─ none, and there is an environment ─▶ step ─▶ its reply ──┤
             │                        └─ none ─▶ the end                                          │
             └────────────────────────────────────────────────────────────────────────────────────┘

Each conversation is one task, so a slow tool holds up its own conversation only. What happens next is decided by
`rollouter.agent.state`; which tokens that makes, by `rollouter.agent.chat`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import numpy as np
from anyio import to_thread

from asyncrl.config.schema import Config, MultiTurnConfig
from asyncrl.failures import BugError, DataError, first_failure
from asyncrl.profiling import profile
from asyncrl.trajectory import ToolCall, Trajectory, TurnInfo
from asyncrl.types import FinishReason, Prompt, SampleId, Turn
from rollouter.agent.asking import AskTurn, TurnRequest
from rollouter.agent.chat import Chat
from rollouter.agent.parsing import CallParser, Parsed, assistant_message, call_id, tool_message
from rollouter.agent.state import Limits, Machine, Phase
from rollouter.agent.tokens import ConversationTokens
from rollouter.drops import MismatchError, TooLongError
from rollouter.interactions.base import EpisodeContext, Message
from rollouter.interactions.loading import Interactions
from rollouter.interactions.session import InteractionSession
from rollouter.tools.base import ToolContext
from rollouter.tools.box import ToolBox, ToolSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_TOKENS = 2_000
"""Texts of so many tokens take milliseconds to template and tokenize, which the event loop has not."""
CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class AgentCounts:
    """Cumulative, of this process."""

    turns: int = 0
    rewrites: int = 0
    """Conversations that the template's rewriting has forked into rows."""
    mismatches: int = 0
    """Conversations that differ from a full re-tokenization."""
    ended: Counter[str] = field(default_factory=Counter)
    """Conversations by finish reason; `failed`: something raised."""


@dataclass(slots=True)
class _Course:
    """What has happened in one conversation so far."""

    messages: list[Message]
    tokens: ConversationTokens
    turns: list[TurnInfo] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    forks: int = 0
    has_media: bool = False
    """Its tokens are those of a processor, which the chat template alone does not give."""

    def add(self, source: str, metrics: Mapping[str, float]) -> None:
        """As `<source>/<name>`; of several calls, the sum counts."""
        for metric, value in metrics.items():
            name = f"{source}/{metric}"
            self.metrics[name] = self.metrics.get(name, 0.0) + value


class Agent:
    """Holds conversations, any number at a time. Its tools are open while it is used."""

    def __init__(
        self,
        config: Config,
        *,
        chat: Chat,
        parser: CallParser,
        schemas: Sequence[Mapping[str, Any]] = (),
        tools: ToolBox | None,
        interactions: Interactions | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            schemas: Of the tools.
            tools: None: the model has none.
            interactions: None: nobody answers the model.
        """
        self._settings: MultiTurnConfig = config.rollout.multi_turn
        self._limits = Limits(
            max_assistant_turns=self._settings.max_assistant_turns,
            max_user_turns=self._settings.max_user_turns,
            max_model_len=config.max_model_len,
            max_response_tokens=config.rollout.response_length,
            has_environment=interactions is not None,
        )
        self._template_kwargs = config.model.chat_template_kwargs
        self._chat = chat
        self._parser = parser
        self.schemas = tuple(schemas)
        self._tools = tools
        self._interactions = interactions
        self._clock = clock
        self._waiting: Callable[[str], AbstractContextManager[None]] = lambda edge: nullcontext()
        self._told_mismatch = False
        self._texts = anyio.CapacityLimiter(1)
        self.counts = AgentCounts()

    async def __aenter__(self) -> Self:
        """Conversations are held while it is open. Raises as the tools do."""
        if self._tools is not None:
            await self._tools.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._interactions is not None:
                await self._interactions.aclose()
        finally:
            if self._tools is not None:
                await self._tools.__aexit__(kind, error, trace)

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """See `Converser.watch`."""
        self._waiting = waiting

    def status(self) -> Mapping[str, float]:
        """Cumulative counts of this process, by the names of their metrics (`rollouter/…`)."""
        told: dict[str, float] = {
            "turns": self.counts.turns,
            "rewrites": self.counts.rewrites,
            "token_mismatches": self.counts.mismatches,
        }
        told |= {f"trajectories/{reason}": count for reason, count in self.counts.ended.items()}
        if self._tools is not None:
            counts = dict(self._tools.counts())
            told |= {"tool_calls": counts.pop("calls", 0), "tool_s": self._tools.tool_s}
            told |= {f"tool_calls/{status}": count for status, count in counts.items()}
        return told

    def identity(self) -> Mapping[str, Any]:
        """What its conversations depend on besides prompt and sampling, as JSON values by name."""
        settings = self._settings.model_dump(mode="json", exclude={"tools", "interactions", "enable", "timeout_s"})
        return {
            **settings,
            "tools": list(self.schemas),
            "chat_template_kwargs": self._template_kwargs,
            "interactions": [one.model_dump(mode="json") for one in self._settings.interactions],
        }

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """One trajectory, from the prompt to its end.

        Args:
            sample_id: Of training; of validation, its name.
            number: The trajectory's, within the sample.
            ask: Gets a turn from the engines.

        Raises:
            ToolFailedError: a tool or an environment failed, and the model was not to be told.
            TooLongError: no turn was completed in `multi_turn.timeout_s`.
            MismatchError: see `tokenization_sanity_check_mode`.
            DataError: the template refuses a message, or the prompt leaves no room; what `ask` raises.
        """
        machine = Machine(self._limits)
        course = _Course(list(prompt.messages), ConversationTokens(prompt.prompt_ids), has_media=bool(prompt.media))
        try:
            trajectory = await self._hold(machine, course, sample_id, number, prompt, ask)
        except anyio.get_cancelled_exc_class():
            machine.abort()
            raise
        except BaseException:
            machine.fail()
            raise
        finally:
            self.counts.ended[str(machine.finish_reason or "failed")] += 1
        return trajectory

    async def _hold(
        self,
        machine: Machine,
        course: _Course,
        sample_id: SampleId | str,
        number: int,
        prompt: Prompt,
        ask: AskTurn,
    ) -> Trajectory:
        about = (sample_id, number, prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        async with AsyncExitStack() as stack:
            tools = await stack.enter_async_context(self._tools.session(ToolContext(*about))) if self._tools else None
            user = None
            if self._interactions is not None:
                user = await stack.enter_async_context(self._interactions.session(EpisodeContext(*about)))
            with anyio.move_on_after(self._settings.timeout_s) as scope:
                await self._begin(machine, course, prompt, user)
                while machine.phase is Phase.RUNNING:
                    with profile.context(turn=machine.assistant_turns):
                        await self._turn(machine, course, ask, tools, user)
            if scope.cancelled_caught:
                machine.time_out()
            if machine.phase is Phase.FAILED:
                raise TooLongError(
                    f"{sample_id}, trajectory {number}: no turn was complete within rollout.multi_turn.timeout_s = "
                    f"{self._settings.timeout_s:g} s; raise it, or lower rollout.response_length"
                )
            scores: dict[str, float] = dict(await tools.scores()) if tools else {}
            if user is not None and (score := await user.score()) is not None:
                scores["environment"] = score
        return await self._finished(machine, course, scores)

    async def _begin(self, machine: Machine, course: _Course, prompt: Prompt, user: InteractionSession | None) -> None:
        prompt_ids = prompt.prompt_ids
        said = await user.reset() if user is not None else ()
        if said:
            _refuse_media(course, "an environment that speaks first makes the prompt anew")
            course.messages += said
            with profile.span("turn.tokenize") as span:
                ids = await self._off_loop(len(prompt_ids), lambda: self._chat.prompt(course.messages))
                span.add(tokens=len(ids))
            prompt_ids = np.asarray(ids, dtype=np.int32)
            course.tokens = ConversationTokens(prompt_ids)
        machine.start(len(prompt_ids))
        if machine.room < 1:
            raise DataError(
                f"the conversation begins with {len(prompt_ids)} tokens and the model's context is "
                f"{self._limits.max_model_len} (rollout.max_model_len): there is no room for a turn"
            )

    async def _turn(
        self,
        machine: Machine,
        course: _Course,
        ask: AskTurn,
        tools: ToolSession | None,
        user: InteractionSession | None,
    ) -> None:
        """One turn of the policy, and what is said to it."""
        number, started = machine.assistant_turns, self._clock()
        turn = await ask(TurnRequest(number, course.tokens.context, machine.room))
        generate_s = self._clock() - started
        ids = turn.response_ids.tolist()
        with profile.span("turn.parse", tokens=len(ids)):
            parsed = await self._off_loop(len(ids), lambda: self._parser.parse(ids))
        # From here on without an await: a conversation that runs out of time has all of a turn, or nothing.
        row, first = course.tokens.add_turn(turn)
        course.messages.append(assistant_message(parsed, turn=number))
        machine.sampled(len(turn.response_ids), turn.finish_reason, num_calls=len(parsed.calls) + parsed.malformed)
        calls = machine.phase is Phase.TOOL_CALLING
        reason = FinishReason.TOOL_CALL if calls else turn.finish_reason
        course.turns.append(TurnInfo(row, first, len(turn.response_ids), reason, generate_s))
        self.counts.turns += 1
        if calls:
            assert tools is not None  # whoever has no tools has no parser that finds calls
            await self._call_tools(machine, course, parsed, tools, turn)
        elif machine.phase is Phase.INTERACTING:
            assert user is not None  # `Limits.has_environment`
            await self._step(machine, course, parsed, user, turn)

    async def _call_tools(
        self, machine: Machine, course: _Course, parsed: Parsed, tools: ToolSession, turn: Turn
    ) -> None:
        number = len(course.turns) - 1
        outcomes: list[ToolCall] = []
        done = False
        if parsed.malformed:
            outcomes.append(tools.malformed(parsed.content))
        limit = self._settings.max_parallel_calls
        made: list[Any] = [None] * len(parsed.calls)

        async def call(place: int) -> None:
            one = parsed.calls[place]
            with self._waiting("tool"):
                made[place] = await tools.call(one.name, one.arguments_json, turn=number)

        try:
            async with anyio.create_task_group() as group:
                for place in range(min(limit, len(parsed.calls))):
                    group.start_soon(call, place)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        for place, one in enumerate(parsed.calls):
            if place < limit:
                outcomes.append(made[place].call)
                done = done or made[place].done
            else:
                outcomes.append(tools.refused(one.name, one.arguments_json, limit))
        outcomes = [replace(outcome, result=await self._cut(outcome.result)) for outcome in outcomes]
        reward = course.turns[-1].reward + sum(outcome.reward for outcome in outcomes)
        course.turns[-1] = replace(course.turns[-1], calls=tuple(outcomes), reward=reward)
        for outcome in outcomes:
            course.add(outcome.name, outcome.metrics)
        ids = [call_id(number, place) for place in range(len(outcomes))]
        answers = [tool_message(each, told.name, told.result) for each, told in zip(ids, outcomes, strict=True)]
        await self._say(machine, course, answers, turn, done=done)

    async def _step(
        self, machine: Machine, course: _Course, parsed: Parsed, user: InteractionSession, turn: Turn
    ) -> None:
        started = self._clock()
        with self._waiting("user"), profile.span("user.step", interaction=user.name):
            reply = await user.step(parsed.content, tuple(course.messages))
        course.turns[-1] = replace(
            course.turns[-1], reward=course.turns[-1].reward + reply.reward, user_s=self._clock() - started
        )
        course.add("environment", reply.metrics)
        await self._say(machine, course, [{"role": "user", "content": reply.text}], turn, done=reply.done)

    async def _say(self, machine: Machine, course: _Course, new: Sequence[Message], turn: Turn, *, done: bool) -> None:
        """Put what was answered before the policy, if it has a turn left to read it."""
        if done:
            machine.end()
            return
        ids = turn.response_ids.tolist()
        with profile.span("turn.tokenize") as span:
            before = machine.context_tokens
            extension = await self._off_loop(before, lambda: self._chat.extend(course.messages, new, ids))
            span.add(tokens=len(extension.ids))
        rewritten = len(extension.ids) if extension.rewritten else None
        if not machine.answered(0 if extension.rewritten else len(extension.ids), context_tokens=rewritten):
            return
        course.messages += new
        if extension.rewritten:
            _refuse_media(course, "the chat template rewrites history, which makes the prompt anew")
            course.tokens.fork(extension.ids)
            course.forks += 1
        else:
            course.tokens.add_told(extension.ids)

    async def _cut(self, text: str) -> str:
        limit, side = self._settings.max_tool_response_length, self._settings.tool_response_truncate_side
        return await self._off_loop(len(text) // CHARACTERS_PER_TOKEN, lambda: self._chat.cut(text, limit, side))

    async def _off_loop(self, num_tokens: int, work: Callable[[], T]) -> T:
        """Work on texts: here, or if they are long in a thread, one at a time."""
        if num_tokens < LONG_TOKENS:
            return work()
        return await to_thread.run_sync(work, limiter=self._texts)

    async def _finished(self, machine: Machine, course: _Course, scores: Mapping[str, float]) -> Trajectory:
        reason = machine.finish_reason
        if reason is None or machine.phase is not Phase.COMPLETED:
            raise BugError(f"a conversation ended while it was {machine.phase}")
        rows = course.tokens.rows()
        self.counts.rewrites += course.forks > 0
        trajectory = Trajectory(rows, tuple(course.turns), reason, tuple(course.messages), scores, dict(course.metrics))
        # Of what was sampled last, the messages may hold no more than a part: a turn cut short by its length.
        checked = self._settings.tokenization_sanity_check_mode != "off" and not course.has_media
        if checked and reason is not FinishReason.LENGTH:
            await self._check(trajectory)
        return trajectory

    async def _check(self, trajectory: Trajectory) -> None:
        row = trajectory.rows[-1]
        ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
        messages = _up_to_last_turn(trajectory.messages)
        difference = await self._off_loop(len(ids), lambda: self._chat.difference(ids, messages))
        if difference is None:
            return
        self.counts.mismatches += 1
        told = f"a conversation has other tokens than the chat template gives it: {difference}"
        if self._settings.tokenization_sanity_check_mode == "strict":
            raise MismatchError(f"{told} (rollout.multi_turn.tokenization_sanity_check_mode=strict)")
        log = logger.debug if self._told_mismatch else logger.warning
        self._told_mismatch = True
        log("%s. What is trained on are the tokens that were sampled; such conversations are counted", told)


def _refuse_media(course: _Course, why: str) -> None:
    """
    Raises:
        DataError: there are images or videos in the prompt.
    """
    if course.has_media:
        raise DataError(f"a conversation about images or videos: {why}, and that is done for text only")


def _up_to_last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Rows end with the last turn of the assistant."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]

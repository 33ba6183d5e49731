"""The built-in agent: alternates turns of the policy with answers of tools, users and environments.

    reset ─▶ ask for a turn ─▶ parse ─┬─ calls ─▶ tools, all at once ─▶ their answers as tokens ──┐
             ▲                        ├─ no calls, but an environment ─▶ step ─▶ its reply ───────┤
             │                        └─ neither ─▶ the end                                       │
             └────────────────────────────────────────────────────────────────────────────────────┘

Each conversation is one task, so a slow tool delays its own conversation only. `rollouter.agent.conversation` decides
what happens next, and `rollouter.agent.chat` converts messages to tokens.
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

from asyncrl.config.schema import Config
from asyncrl.config.sections.rollout import MultiTurnConfig
from asyncrl.core.failures import BugError, DataError
from asyncrl.core.tasks import gather
from asyncrl.core.trajectory import Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, Prompt, SampleId
from asyncrl.profiling import profile
from rollouter.agent.chat import ChatTokenizer, exceeds
from rollouter.agent.conversation import (
    AskTurn,
    ConversationTokens,
    TrajectoryLimits,
    TrajectoryPhase,
    TrajectoryStateMachine,
    TurnRequest,
)
from rollouter.agent.parsing import ParsedCall, ParsedTurn, ToolCallParser, assistant_message, call_id, tool_message
from rollouter.drop_policy import MismatchError, TooLongError
from rollouter.interactions.base import Message
from rollouter.interactions.loading import InteractionSet
from rollouter.interactions.session import InteractionSession
from rollouter.prompts.chat_template import chosen_tools
from rollouter.tools.toolbox import Toolbox, ToolCallResult, ToolSession
from rollouter.user_code import TrajectoryContext

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_TOKENS = 2_000
"""Texts of this many tokens take milliseconds to template and tokenize, so a thread handles them."""
CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class AgentCounts:
    """Cumulative counts of this process."""

    turns: int = 0
    rewrites: int = 0
    """Conversations that were forked into rows because the template rewrote history."""
    mismatches: int = 0
    """Conversations whose tokens differ from a full re-tokenization."""
    ended: Counter[str] = field(default_factory=Counter)
    """Conversations by finish reason, or by `failed` if an exception ended them."""


class BuiltInAgent:
    """Runs any number of conversations at a time. Use it as an async context manager: its tools are open inside."""

    def __init__(
        self,
        config: Config,
        *,
        chat: ChatTokenizer,
        parser: ToolCallParser,
        schemas: Sequence[Mapping[str, Any]] = (),
        tools: Toolbox | None,
        interactions: InteractionSet | None,
    ) -> None:
        """`schemas` describe `tools`. Without `interactions`, a turn that calls no tool ends its conversation."""
        self.settings: MultiTurnConfig = config.rollout.multi_turn
        self._values = config.identity_values()
        self.limits = TrajectoryLimits(
            max_assistant_turns=self.settings.max_assistant_turns,
            max_user_turns=self.settings.max_user_turns,
            max_model_len=config.max_model_len,
            max_response_tokens=config.rollout.response_length,
            has_environment=interactions is not None,
        )
        self.chat = chat
        self._chats: dict[tuple[str, ...], ChatTokenizer] = {}
        self.parser = parser
        self.schemas = tuple(schemas)
        self.counts = AgentCounts()
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self._tools = tools
        self._interactions = interactions
        self._mismatch_reported = False
        self._text_thread = anyio.CapacityLimiter(1)

    async def __aenter__(self) -> Self:
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

    @property
    def call_format(self) -> str:
        """The name of the parser of tool calls."""
        return self.parser.format

    def chat_of(self, prompt: Prompt) -> ChatTokenizer:
        """Return the chat template with the tools of a row."""
        schemas = {str(schema["function"]["name"]): schema for schema in self.schemas}
        chosen = chosen_tools(prompt.extra_info, list(schemas))
        if len(chosen) == len(schemas):
            return self.chat
        if chosen not in self._chats:
            self._chats[chosen] = self.chat.with_tools([schemas[name] for name in chosen])
        return self._chats[chosen]

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """See `ConversationAgent.watch`."""
        self.waiting = waiting

    def status(self) -> Mapping[str, float]:
        """See `ConversationAgent.status`."""
        status: dict[str, float] = {
            "turns": self.counts.turns,
            "rewrites": self.counts.rewrites,
            "token_mismatches": self.counts.mismatches,
        }
        status |= {f"trajectories/{reason}": count for reason, count in self.counts.ended.items()}
        if self._tools is not None:
            counts = dict(self._tools.counts())
            status |= {"tool_calls": counts.pop("calls", 0), "tool_s": self._tools.tool_s}
            status |= {f"tool_calls/{outcome}": count for outcome, count in counts.items()}
        return status

    def identity(self) -> Mapping[str, Any]:
        """See `ConversationAgent.identity`."""
        settings = self._values["rollout"]["multi_turn"]
        return {
            **{name: value for name, value in settings.items() if name not in ("enable", "timeout_s")},
            "tools": list(self.schemas),
            "chat_template_kwargs": self._values["model"]["chat_template_kwargs"],
        }

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """Run one conversation, see `ConversationAgent.converse`.

        Raises:
            ToolFailedError: a tool or an environment failed, and its `on_error` is `drop` or `stop`.
            TooLongError: no turn was completed in `multi_turn.timeout_s`.
            MismatchError: see `tokenization_sanity_check_mode`.
            DataError: the template refuses a message, or the prompt leaves no room.
            Others: whatever `ask` raises.
        """
        context = TrajectoryContext(
            sample_id, number, prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info
        )
        conversation = _Conversation(self, prompt, ask)
        machine = conversation.machine
        try:
            async with AsyncExitStack() as stack:
                if self._tools is not None:
                    conversation.tools = await stack.enter_async_context(self._tools.session(context))
                if self._interactions is not None:
                    conversation.user = await stack.enter_async_context(self._interactions.session(context))
                with anyio.move_on_after(self.settings.timeout_s) as scope:
                    await conversation.begin()
                    while machine.phase is TrajectoryPhase.RUNNING:
                        with profile.context(turn=machine.assistant_turns):
                            await conversation.take_turn()
                if scope.cancelled_caught:
                    machine.time_out()
                if machine.phase is TrajectoryPhase.FAILED:
                    raise TooLongError(
                        f"{sample_id}, trajectory {number}: no turn was complete within rollout.multi_turn.timeout_s = "
                        f"{self.settings.timeout_s:g} s; raise it, or lower rollout.response_length"
                    )
                scores = await conversation.scores()
            return await self._finished(conversation, scores)
        except anyio.get_cancelled_exc_class():
            machine.abort()
            raise
        except BaseException:
            machine.fail()
            raise
        finally:
            self.counts.ended[str(machine.finish_reason or "failed")] += 1

    async def off_loop(self, num_tokens: int, work: Callable[[], T]) -> T:
        """Call `work` directly, or, for texts of `LONG_TOKENS` or more, in the one thread that handles long texts."""
        if num_tokens < LONG_TOKENS:
            return work()
        return await to_thread.run_sync(work, limiter=self._text_thread)

    async def _finished(self, conversation: _Conversation, scores: Mapping[str, float]) -> Trajectory:
        machine = conversation.machine
        reason = machine.finish_reason
        if reason is None or machine.phase is not TrajectoryPhase.COMPLETED:
            raise BugError(f"a conversation ended while it was {machine.phase}")
        self.counts.rewrites += conversation.forks > 0
        trajectory = Trajectory(
            conversation.tokens.rows(),
            tuple(conversation.turns),
            reason,
            tuple(conversation.messages),
            scores,
            dict(conversation.metrics),
        )
        # A turn that was truncated at its token limit is only partly in the messages, so its tokens cannot be compared.
        comparable = reason is not FinishReason.LENGTH and not conversation.has_media
        if comparable and self.settings.tokenization_sanity_check_mode != "off":
            await self._check_tokens(trajectory, conversation.chat)
        return trajectory

    async def _check_tokens(self, trajectory: Trajectory, chat: ChatTokenizer) -> None:
        row = trajectory.rows[-1]
        ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
        # A row ends with the last turn of the assistant.
        last = max(place for place, message in enumerate(trajectory.messages) if message["role"] == "assistant")
        messages = trajectory.messages[: last + 1]
        difference = await self.off_loop(len(ids), lambda: chat.difference(ids, messages))
        if difference is not None:
            self.counts.mismatches += 1
            self._mismatch_reported = report_mismatch(self.settings, difference, reported=self._mismatch_reported)


def report_mismatch(settings: MultiTurnConfig, difference: str, *, name: str = "", reported: bool) -> bool:
    """Log that a conversation's tokens differ from the chat template's; only the first report is a warning.

    Raises:
        MismatchError: `tokenization_sanity_check_mode` is `strict`.
    """
    text = f"{name}a conversation's tokens differ from those that the chat template gives: {difference}"
    if settings.tokenization_sanity_check_mode == "strict":
        raise MismatchError(f"{text} (rollout.multi_turn.tokenization_sanity_check_mode=strict)")
    log = logger.debug if reported else logger.warning
    log("%s. The sampled tokens are trained on; such conversations are counted", text)
    return True


class _Conversation:
    """One running conversation of the built-in agent."""

    def __init__(self, agent: BuiltInAgent, prompt: Prompt, ask: AskTurn) -> None:
        self.machine = TrajectoryStateMachine(agent.limits)
        self.messages: list[Message] = list(prompt.messages)
        self.tokens = ConversationTokens(prompt.prompt_ids)
        self.turns: list[TurnInfo] = []
        self.metrics: dict[str, float] = {}
        self.forks = 0
        self.has_media = bool(prompt.media)
        """Whether the prompt has images or videos, so that the chat template alone cannot reproduce its tokens."""
        self.tools: ToolSession | None = None
        self.user: InteractionSession | None = None
        self._agent = agent
        self.chat = agent.chat_of(prompt)
        self._prompt_ids = prompt.prompt_ids
        self._ask = ask

    async def begin(self) -> None:
        prompt_ids = self._prompt_ids
        opening = await self.user.reset() if self.user is not None else ()
        if opening:
            self._refuse_media("the environment's opening messages require a new prompt")
            self.messages += opening
            if exceeds(self.messages, self.machine.limits.max_model_len):
                raise DataError(
                    f"the environment's opening messages do not fit the model's context of "
                    f"{self.machine.limits.max_model_len} tokens (rollout.max_model_len)"
                )
            with profile.span("turn.tokenize") as span:
                ids = await self._agent.off_loop(len(prompt_ids), lambda: self.chat.prompt(self.messages))
                span.add(tokens=len(ids))
            prompt_ids = np.asarray(ids, dtype=np.int32)
            self.tokens = ConversationTokens(prompt_ids)
        self.machine.start(len(prompt_ids))
        if self.machine.room < 1:
            raise DataError(
                f"the conversation begins with {len(prompt_ids)} tokens and the model's context is "
                f"{self.machine.limits.max_model_len} (rollout.max_model_len): there is no room for a turn"
            )

    async def take_turn(self) -> None:
        """Ask for one turn of the policy, and let tools or the user answer it."""
        agent, machine = self._agent, self.machine
        number, started = machine.assistant_turns, time.monotonic()
        turn = await self._ask(TurnRequest(number, self.tokens.context, machine.room))
        generate_s = time.monotonic() - started
        ids = turn.response_ids.tolist()
        with profile.span("turn.parse", tokens=len(ids)):
            parsed = await agent.off_loop(len(ids), lambda: agent.parser.parse(ids))
        # No await from here on: a conversation that runs out of time contains a whole turn or none.
        row, first = self.tokens.add_turn(turn)
        self.messages.append(assistant_message(parsed, turn=number))
        machine.sampled(len(ids), turn.finish_reason, num_calls=len(parsed.calls) + parsed.malformed)
        calls = machine.phase is TrajectoryPhase.TOOL_CALLING
        reason = FinishReason.TOOL_CALL if calls else turn.finish_reason
        self.turns.append(TurnInfo(row, first, len(ids), reason, generate_s))
        agent.counts.turns += 1
        if calls:
            assert self.tools is not None, "the parser of a run without tools finds no calls"
            await self._call_tools(self.tools, parsed, ids)
        elif machine.phase is TrajectoryPhase.INTERACTING:
            assert self.user is not None, "`TrajectoryLimits.has_environment`"
            await self._step(self.user, parsed, ids)

    async def scores(self) -> dict[str, float]:
        scores = dict(await self.tools.scores()) if self.tools else {}
        if self.user is not None and (score := await self.user.score()) is not None:
            scores["environment"] = score
        return scores

    async def _call_tools(self, tools: ToolSession, parsed: ParsedTurn, sampled: Sequence[int]) -> None:
        number, limit = len(self.turns) - 1, self._agent.settings.max_parallel_calls

        async def call(one: ParsedCall) -> ToolCallResult:
            with self._agent.waiting("tool"):
                return await tools.call(one.name, one.arguments_json, turn=number)

        results = await gather(call, parsed.calls[:limit])
        calls = [tools.malformed(parsed.content)] if parsed.malformed else []
        calls += [result.call for result in results]
        calls += [tools.refused(one.name, one.arguments_json, limit) for one in parsed.calls[limit:]]
        calls = [replace(one, result=await self._cut(one.result)) for one in calls]
        reward = self.turns[-1].reward + sum(one.reward for one in calls)
        self.turns[-1] = replace(self.turns[-1], calls=tuple(calls), reward=reward)
        for one in calls:
            self._add_metrics(one.name, one.metrics)
        answers = [tool_message(call_id(number, place), one.name, one.result) for place, one in enumerate(calls)]
        await self._answer(answers, sampled, done=any(result.done for result in results))

    async def _step(self, user: InteractionSession, parsed: ParsedTurn, sampled: Sequence[int]) -> None:
        started = time.monotonic()
        with self._agent.waiting("user"), profile.span("user.step", interaction=user.name):
            reply = await user.step(parsed.content, tuple(self.messages))
        last, user_s = self.turns[-1], time.monotonic() - started
        self.turns[-1] = replace(last, reward=last.reward + reply.reward, user_s=user_s)
        self._add_metrics("environment", reply.metrics)
        await self._answer([{"role": "user", "content": reply.text}], sampled, done=reply.done)

    async def _answer(self, new: Sequence[Message], sampled: Sequence[int], *, done: bool) -> None:
        """Append `new` messages for the policy, if it has a turn left to read them."""
        machine, chat = self.machine, self.chat
        if done:
            machine.end()
            return
        if exceeds(new, machine.limits.max_model_len):
            machine.answered(machine.limits.max_model_len)
            return
        with profile.span("turn.tokenize") as span:
            context_tokens = machine.context_tokens
            more = await self._agent.off_loop(context_tokens, lambda: chat.extend(self.messages, new, sampled))
            span.add(tokens=len(more.ids))
        if not machine.answered(len(more.ids), rewritten=more.rewritten):
            return
        self.messages += new
        if more.rewritten:
            self._refuse_media("the chat template rewrites history, which requires a new prompt")
            self.tokens.fork(more.ids)
            self.forks += 1
        else:
            self.tokens.add_unsampled(more.ids)

    async def _cut(self, text: str) -> str:
        limit, side = self._agent.settings.max_tool_response_length, self._agent.settings.tool_response_truncate_side
        estimate = len(text) // CHARACTERS_PER_TOKEN
        return await self._agent.off_loop(estimate, lambda: self.chat.cut(text, limit, side))

    def _add_metrics(self, source: str, metrics: Mapping[str, float]) -> None:
        """Add `<source>/<name>` metrics; those of several calls are summed."""
        for metric, value in metrics.items():
            name = f"{source}/{metric}"
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def _refuse_media(self, why: str) -> None:
        if self.has_media:
            raise DataError(f"a conversation about images or videos: {why}, which is supported for text only")

"""External agents: each trajectory is one run of the user's program, with a key that identifies its requests.

capacity ─▶ key, session ─▶ the program runs, its requests are turns ─▶ session closed ─▶ Trajectory
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import part_weights
from asyncrl.core.failures import BugError, UserCodeError
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import FinishReason, Prompt, SampleId
from asyncrl.profiling import profile
from rollouter.agent.conversation import AskTurn
from rollouter.agent.loop import AgentCounts, report_mismatch
from rollouter.drop_policy import TooLongError
from rollouter.gateway.program import AgentProgram, read_result
from rollouter.gateway.protocol import RequestError, RequestReader, checked_reward
from rollouter.gateway.session import AgentGateway, ChatCache, GatewaySession, TokenBudget
from rollouter.gateway.task import AgentTask, PostReward

SCORE = "agent"
"""Name of the posted reward among `Trajectory.scores`."""
AFTER_DONE_S = 5.0
"""How long a program may continue after it has reported `done`, before it is ended."""


class ExternalAgent:
    """A `ConversationAgent` that runs the user's program. The program sends its requests to the URL of `serve_at`."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    """Empty, because the program defines its tools itself."""

    def __init__(self, config: Config, program: AgentProgram, cache: ChatCache, *, model: str) -> None:
        """`model` is the model's name at the endpoint."""
        self._config = config
        self._values = config.identity_values()
        self._settings = config.rollout.agent
        self._program = program
        self._cache = cache
        self._model = model
        self._budget = TokenBudget(config.max_model_len, config.rollout.response_length)
        self._programs = anyio.CapacityLimiter(self._settings.max_concurrency)
        others = {name: weight for name, weight in part_weights(config).items() if name not in ("tools", "turns")}
        self._needs_reward = not any(others.values())
        self._base_url = ""
        self._mismatch_reported = False
        self._tool_calls = 0
        self.counts = AgentCounts()
        self.gateway = AgentGateway()
        self._waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

    @property
    def call_format(self) -> str:
        """The name of the parser of tool calls."""
        return self._cache.format

    def serve_at(self, base_url: str, incarnation: int) -> None:
        """Set the URL of the endpoint and the Rollouter's incarnation; to be called before any trajectory."""
        self._base_url = base_url
        self.gateway = AgentGateway(incarnation)

    def identity(self) -> Mapping[str, Any]:
        """See `ConversationAgent`. A program is identified by its name only: rename it if its behaviour has changed."""
        return {
            "program": self._values["rollout"]["agent"]["program"],
            "command": self._values["rollout"]["agent"]["command"],
            "format": self._config.rollout.multi_turn.format,
            "chat_template_kwargs": self._values["model"]["chat_template_kwargs"],
        }

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """See `ConversationAgent`."""
        self._waiting = waiting

    def status(self) -> Mapping[str, float]:
        """See `ConversationAgent`."""
        return {
            "turns": self.counts.turns,
            "rewrites": self.counts.rewrites,
            "token_mismatches": self.counts.mismatches,
            "tool_calls": self._tool_calls,
        }

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """Run the program once, see `ConversationAgent.converse`.

        Raises:
            UserCodeError: the program failed, requested no turn, or gave no reward although nothing else gives one.
            TooLongError: no turn was complete, or no reward posted, within `rollout.agent.timeout_s`.
            MismatchError: see `tokenization_sanity_check_mode`.
            Others: whatever `ask` raises.
        """
        name = f"{sample_id}, trajectory {number}"
        training = isinstance(sample_id, SampleId)
        session = GatewaySession(
            f"chatcmpl-{sample_id}-{number}",
            model=self._model,
            ask=ask,
            cache=self._cache,
            reader=RequestReader(
                self._model,
                self._config.rollout.sampling if training else None,
                self._config.model.chat_template_kwargs.keys(),
            ),
            budget=self._budget,
        )
        async with self._programs:
            failure, late = await self._run(session, sample_id, number, prompt)
        return self._finished(name, session, failure, late=late)

    async def _run(
        self, session: GatewaySession, sample_id: SampleId | str, number: int, prompt: Prompt
    ) -> tuple[UserCodeError | None, bool]:
        """Run the program to its end. Return its failure, and whether it ran out of time."""
        if not self._base_url:
            raise BugError("an agent runs before its endpoint is up")
        key = self.gateway.open(session)
        task = AgentTask(
            base_url=self._base_url,
            api_key=key,
            model=self._model,
            messages=prompt.messages,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
            data_source=prompt.data_source,
            sample_id=str(sample_id),
            trajectory=number,
            post=_poster(session),
        )
        failure: UserCodeError | None = None
        try:
            with anyio.move_on_after(self._settings.timeout_s) as deadline:
                async with task_group() as group:
                    session.begin(group)
                    group.start_soon(_end_after_done, session, group.cancel_scope)
                    try:
                        with self._waiting("agent"), profile.span("agent.run"):
                            returned = read_result(await self._program.run(task))
                        if not session.done.is_set():
                            session.post(returned)
                    except UserCodeError as error:
                        failure = error
                    except RequestError as refusal:
                        failure = UserCodeError(f"rollout.agent: the agent's result is refused: {refusal.message}")
                    group.cancel_scope.cancel()
        finally:
            self.gateway.close(key)
        return failure, deadline.cancelled_caught

    def _finished(self, name: str, session: GatewaySession, failure: UserCodeError | None, *, late: bool) -> Trajectory:
        recording = session.recording
        over = session.done.is_set()
        if failure is not None and not over and not (session.full and recording.completed):
            raise failure
        if not recording.completed and late:
            raise TooLongError(
                f"{name}: no turn was complete within rollout.agent.timeout_s = {self._settings.timeout_s:g} s; "
                "raise the limit"
            )
        if not recording.completed:
            raise UserCodeError(
                f"{name}: the agent ended without a turn of the model, so there is nothing to train on; the agent has "
                "to call the endpoint at AgentTask.base_url with AgentTask.api_key"
            )
        if session.reward is None and self._needs_reward:
            self._no_reward(name, failure, late=late)
        reason = FinishReason.STOP
        if late and not over:
            reason = FinishReason.TIMEOUT
        elif recording.ended_by_length() or (failure is not None and session.full):
            reason = FinishReason.LENGTH
        turns = recording.turns()
        self.counts.turns += len(turns)
        self.counts.rewrites += recording.forks > 0
        self._tool_calls += sum(len(turn.calls) for turn in turns)
        settings = self._config.rollout.multi_turn
        for difference in session.differences() if settings.tokenization_sanity_check_mode != "off" else ():
            self.counts.mismatches += 1
            self._mismatch_reported = report_mismatch(
                settings, difference, name=f"{name}: ", reported=self._mismatch_reported
            )
        return Trajectory(
            rows=recording.rows(),
            turns=turns,
            finish_reason=reason,
            messages=recording.main()[-1].messages,
            scores={} if session.reward is None else {SCORE: session.reward},
            metrics=dict(session.metrics),
        )

    def _no_reward(self, name: str, failure: UserCodeError | None, *, late: bool) -> None:
        if late:
            raise TooLongError(
                f"{name}: no reward was posted within rollout.agent.timeout_s = {self._settings.timeout_s:g} s, and "
                "nothing else scores it; raise the limit, or set reward.function"
            )
        after = ""
        if failure is not None:
            after = (
                ": it failed when the endpoint refused a turn for lack of room. Catch this error in the agent "
                "(openai.BadRequestError, code context_length_exceeded), then return or post the trajectory's reward"
            )
        raise UserCodeError(
            f"{name}: the agent gave no reward, and nothing else in the run scores trajectories{after}. Return or post "
            "a reward, or set reward.function",
            failure.cause if failure is not None else "",
        )


async def _end_after_done(session: GatewaySession, scope: anyio.CancelScope) -> None:
    """Cancel `scope` some seconds after the agent has reported that it is done."""
    await session.done.wait()
    await anyio.sleep(AFTER_DONE_S)
    scope.cancel()


def _poster(session: GatewaySession) -> PostReward:
    """Return the `AgentTask.post` of a program in this process; it may be called from any thread."""
    loop_thread, token = threading.get_ident(), current_token()

    def post(reward: float | None, metrics: Mapping[str, float], done: bool) -> None:
        posted = checked_reward(reward, metrics, done)
        try:
            if threading.get_ident() == loop_thread:
                session.post(posted)
            else:
                anyio.from_thread.run_sync(session.post, posted, token=token)
        except RequestError as refusal:
            raise RuntimeError(refusal.message) from None

    return post

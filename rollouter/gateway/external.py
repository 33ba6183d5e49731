"""An agent of the user's in place of the built-in loop: each trajectory is one run of a program that has its own key.

a place ─▶ key, session ─▶ the program runs, its requests are turns ─▶ session closed ─▶ Trajectory
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

from asyncrl.config.reward_rules import part_weights
from asyncrl.config.schema import Config
from asyncrl.failures import BugError, UserCodeError, first_failure
from asyncrl.profiling import profile
from asyncrl.trajectory import Trajectory
from asyncrl.types import FinishReason, Prompt, SampleId
from rollouter.agent.asking import AskTurn
from rollouter.agent.loop import AgentCounts, MismatchError
from rollouter.drops import TooLongError
from rollouter.gateway.chats import ChatBook
from rollouter.gateway.errors import RequestError
from rollouter.gateway.gateway import Gateway
from rollouter.gateway.program import Program, read_result
from rollouter.gateway.requests import Reader, checked_reward
from rollouter.gateway.session import Room, Session, ended_by_length
from rollouter.gateway.task import AgentTask, Post

SCORE = "agent"
"""Name of the posted reward among `Trajectory.scores`."""
AFTER_DONE_S = 5.0
"""A program that has said it is done may end by itself so long."""

logger = logging.getLogger(__name__)


class ExternalAgent:
    """`Converser`. Reached over HTTP at the address that `serve_at` was told."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    """Agents have tools of their own."""

    def __init__(self, config: Config, program: Program, book: ChatBook, *, model: str) -> None:
        """`model`: its name at the endpoint."""
        self._config = config
        self._settings = config.rollout.agent
        self._program = program
        self._book = book
        self._model = model
        self._room = Room(config.max_model_len, config.rollout.response_length)
        self._places = anyio.CapacityLimiter(self._settings.max_concurrency)
        others = {name: weight for name, weight in part_weights(config).items() if name not in ("tools", "turns")}
        self._needs_reward = not any(others.values())
        self._base_url = ""
        self._told_mismatch = False
        self._tool_calls = 0
        self.counts = AgentCounts()
        self.gateway = Gateway()
        self._waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

    def serve_at(self, base_url: str, incarnation: int) -> None:
        """Where requests come in, and which Rollouter they are for. Before any trajectory."""
        self._base_url = base_url
        self.gateway = Gateway(incarnation)

    async def __aenter__(self) -> Self:
        """Conversations are held while it is open."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def identity(self) -> Mapping[str, Any]:
        """See `Converser`: the program by its name, so one that was changed should get another."""
        return {
            "program": self._settings.program,
            "command": list(self._settings.command),
            "format": self._config.rollout.multi_turn.format,
            "chat_template_kwargs": self._config.model.chat_template_kwargs,
        }

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """See `Converser`."""
        self._waiting = waiting

    def status(self) -> Mapping[str, float]:
        """See `Converser`."""
        return {
            "turns": self.counts.turns,
            "rewrites": self.counts.rewrites,
            "token_mismatches": self.counts.mismatches,
            "tool_calls": self._tool_calls,
        }

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """One run of the program. See `Converser`.

        Raises:
            UserCodeError: the program failed, asked for no turn, or gave no reward where nothing else gives one.
            TooLongError: no turn was complete, or no reward posted, within `rollout.agent.timeout_s`.
            MismatchError: see `tokenization_sanity_check_mode`.
            What `ask` raises.
        """
        name = f"{sample_id}, trajectory {number}"
        training = isinstance(sample_id, SampleId)
        session = Session(
            f"chatcmpl-{sample_id}-{number}",
            model=self._model,
            ask=ask,
            book=self._book,
            reader=Reader(self._model, self._config.rollout.sampling if training else None),
            room=self._room,
        )
        async with self._places:
            failure, late = await self._run(session, sample_id, number, prompt)
        return self._finished(name, session, failure, late=late)

    async def _run(
        self, session: Session, sample_id: SampleId | str, number: int, prompt: Prompt
    ) -> tuple[UserCodeError | None, bool]:
        """The program to its end: what it failed of, and whether it was out of time."""
        if not self._base_url:
            raise BugError("an agent is run before its endpoint is up")
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
                async with anyio.create_task_group() as group:
                    session.begin(group)
                    group.start_soon(_end_soon, session, group.cancel_scope)
                    try:
                        with self._waiting("agent"), profile.span("agent.run"):
                            returned = read_result(await self._program.run(task))
                        if not session.done.is_set():
                            session.keep(returned)
                    except UserCodeError as error:
                        failure = error
                    group.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self.gateway.close(key)
        return failure, deadline.cancelled_caught

    def _finished(self, name: str, session: Session, failure: UserCodeError | None, *, late: bool) -> Trajectory:
        recording = session.recording
        key = "rollout.agent.timeout_s"
        over = session.done.is_set()
        if failure is not None and not over and not (session.full and recording.said):
            raise failure
        if not recording.said and late:
            raise TooLongError(f"{name}: no turn was complete within {key} = {self._settings.timeout_s:g} s; raise it")
        if not recording.said:
            raise UserCodeError(
                f"{name}: the agent ended without a turn of the model, so there is nothing to train on; it has to call "
                "the endpoint at AgentTask.base_url with AgentTask.api_key"
            )
        if session.reward is None and self._needs_reward:
            self._no_reward(name, failure, late=late)
        reason = FinishReason.STOP
        if late and not over:
            reason = FinishReason.TIMEOUT
        elif ended_by_length(recording) or (failure is not None and session.full):
            reason = FinishReason.LENGTH
        turns = recording.turns()
        self.counts.turns += len(turns)
        self.counts.rewrites += recording.forks > 0
        self._tool_calls += sum(len(turn.calls) for turn in turns)
        if self._config.rollout.multi_turn.tokenization_sanity_check_mode != "off":
            self._check(name, session)
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
                ": it failed when it was refused a turn for lack of room. Let it catch that (openai.BadRequestError, "
                "code context_length_exceeded) and say what the trajectory is worth then"
            )
        raise UserCodeError(
            f"{name}: the agent gave no reward, and nothing else in the run scores trajectories{after}. Return or post "
            "a reward, or set reward.function",
            failure.cause if failure is not None else "",
        )

    def _check(self, name: str, session: Session) -> None:
        """Compare each row with the template's own tokens of its conversation."""
        for difference in session.differences():
            self.counts.mismatches += 1
            told = f"{name}: a conversation has other tokens than the chat template gives it: {difference}"
            if self._config.rollout.multi_turn.tokenization_sanity_check_mode == "strict":
                raise MismatchError(f"{told} (rollout.multi_turn.tokenization_sanity_check_mode=strict)")
            log = logger.debug if self._told_mismatch else logger.warning
            self._told_mismatch = True
            log("%s. What is trained on are the tokens that were sampled; such conversations are counted", told)


async def _end_soon(session: Session, scope: anyio.CancelScope) -> None:
    """Once the agent has said that it is done."""
    await session.done.wait()
    await anyio.sleep(AFTER_DONE_S)
    scope.cancel()


def _poster(session: Session) -> Post:
    """`AgentTask.post` for a program of this process, whichever thread it is in."""
    loop_thread, token = threading.get_ident(), current_token()

    def post(reward: float | None, metrics: Mapping[str, float], done: bool) -> None:
        posted = checked_reward(reward, metrics, done)
        try:
            if threading.get_ident() == loop_thread:
                session.keep(posted)
            else:
                anyio.from_thread.run_sync(session.keep, posted, token=token)
        except RequestError as refusal:
            raise RuntimeError(refusal.message) from None

    return post

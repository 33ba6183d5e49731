"""One trajectory's agent at the endpoint: its requests become turns, which are recorded; its reward is kept.

Turns are asked for inside the trajectory's own task group (`begin`), so that its deadline, its cancellation and the
failures of engines hold for them, whoever has sent the request. A client that goes away cancels its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.failures import AsyncRLError, ConfigError, DataError
from asyncrl.trajectory import TurnInfo
from asyncrl.types import FinishReason, Turn
from rollouter.agent.asking import AskTurn, TurnRequest
from rollouter.agent.chat import Chat
from rollouter.agent.parsing import assistant_message
from rollouter.gateway.chats import ChatBook, Reading
from rollouter.gateway.errors import RequestError, closed, engines_failed, no_room
from rollouter.gateway.messages import Message
from rollouter.gateway.recording import Place, Recording, calls_of
from rollouter.gateway.requests import ChatRequest, PostedReward, Reader, Wanted, read_reward
from rollouter.gateway.responses import (
    Answer,
    Body,
    Told,
    chat_response,
    completion_response,
    model_card,
    models_response,
)
from rollouter.gateway.stopping import cut_at, text_before


@dataclass(frozen=True, slots=True)
class Room:
    """What a row may hold, in tokens."""

    max_model_len: int
    response_length: int


class Session:
    """See `Gateway.open`. Open until `close`; then its recording does not change any more."""

    def __init__(
        self,
        name: str,
        *,
        model: str,
        ask: AskTurn,
        book: ChatBook,
        reader: Reader,
        room: Room,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`name`: of the trajectory, for ids of responses."""
        self.name = name
        self.recording = Recording()
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.done = anyio.Event()
        """The agent has said that the trajectory is over."""
        self.full = False
        """A request was refused because there was no room for a turn."""
        self._model = model
        self._ask_turn = ask
        self._book = book
        self._reader = reader
        self._room = room
        self._clock = clock
        self._wall_clock = wall_clock
        self._group: TaskGroup | None = None
        self._asked = 0
        self._chats: dict[str, Chat] = {}
        """By scheme."""

    def begin(self, group: TaskGroup) -> None:
        """Turns are asked for in `group` from now on; it must be left only after `close`."""
        self._group = group

    def close(self) -> None:
        """No request is served any more."""
        self._group = None

    def keep(self, posted: PostedReward) -> None:
        """
        Raises:
            RequestError: the trajectory is over.
        """
        if self._group is None or self.done.is_set():
            raise closed()
        if posted.reward is not None:
            self.reward = posted.reward
        self.metrics |= posted.metrics
        if posted.done:
            self.done.set()

    def differences(self) -> list[str]:
        """Where rows are not the chat template's own tokens of what was said, in words."""
        found = []
        for said in self.recording.ends():
            if said.scheme is not None and said.whole:
                difference = self._chats[said.scheme].difference(said.tokens.tolist(), said.messages)
                found += [difference] if difference is not None else []
        return found

    async def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """What the request gets, refusals included. `path`: what stands behind `/v1/`."""
        try:
            return Answer(200, await self._serve(path, body))
        except RequestError as refusal:
            return Answer(refusal.status, refusal.body)

    async def _serve(self, path: str, body: Mapping[str, Any]) -> Body:
        if self._group is None or self.done.is_set():
            raise closed()
        match path:
            case "chat/completions":
                return await self._chat(self._reader.chat(body))
            case "completions":
                return await self._completion(body)
            case "reward":
                self.keep(read_reward(body))
                return {"object": "reward", "reward": self.reward, "metrics": dict(self.metrics)}
            case "models":
                return models_response(self._model)
            case _ if path == f"models/{self._model}":
                return model_card(self._model)
        raise RequestError(
            f"/v1/{path} is not served with a trajectory's key; there are chat/completions, completions, models and "
            "reward", status=404, code="not_found",
        )  # fmt: skip

    async def _chat(self, request: ChatRequest) -> Body:
        try:
            reading = await self._book.reading(request)
        except ConfigError as error:
            raise self._fail(error) from error
        self._chats[request.scheme] = reading.chat
        place = self._find(reading, request)

        def finish(turn: Turn, info: TurnInfo) -> Body:
            message, whole = self._message(reading, request, turn)
            calls = calls_of(message)
            reason = FinishReason.TOOL_CALL if calls else turn.finish_reason
            told = replace(info, calls=calls, finish_reason=reason)
            self.recording.add(place, turn, told, message, whole=whole)
            return chat_response(self._told(place), turn, message, self._pieces(request.wanted, turn))

        return await self._turn(place, request.wanted, finish)

    async def _completion(self, body: Mapping[str, Any]) -> Body:
        request = self._reader.completion(body)
        ids = list(request.ids) if request.ids is not None else self._book.tokens(request.text or "")
        prompt = request.text if request.text is not None else self._book.text(ids)
        context = np.asarray(ids, dtype=np.int32)
        place = Place(None, ({"role": "user", "content": prompt},), None, None, context)

        def finish(turn: Turn, info: TurnInfo) -> Body:
            text = text_before(self._book.text(turn.response_ids.tolist()), request.wanted.stop)
            self.recording.add(place, turn, info, {"role": "assistant", "content": text})
            return completion_response(self._told(place), turn, text, self._pieces(request.wanted, turn))

        return await self._turn(place, request.wanted, finish)

    def _find(self, reading: Reading, request: ChatRequest) -> Place:
        """Where the turn that `request` asks for will stand."""
        chat, messages = reading.chat, request.messages
        parent = self.recording.find(request.scheme, messages)
        try:
            if parent is None:
                context = np.asarray(chat.prompt(messages), dtype=np.int32)
                return Place(request.scheme, messages, None, None, context)
            new = messages[len(parent.messages) :]
            more = chat.extend(parent.messages, new, parent.ids.tolist())
        except DataError as error:
            raise RequestError(error.message, param="messages") from error
        before = (*parent.messages, *new)
        if more.rewritten:
            self.recording.forks += 1
            return Place(request.scheme, before, parent, None, np.asarray(more.ids, dtype=np.int32))
        context = np.concatenate([parent.tokens, np.asarray(more.ids, dtype=np.int32)], dtype=np.int32)
        return Place(request.scheme, before, parent, tuple(more.ids), context)

    def _message(self, reading: Reading, request: ChatRequest, turn: Turn) -> tuple[Message, bool]:
        """The turn as the agent is told of it, and whether that is all of it."""
        parsed = reading.parser.parse(turn.response_ids.tolist())
        whole = turn.finish_reason is not FinishReason.LENGTH
        if request.one_call and len(parsed.calls) > 1:
            parsed, whole = replace(parsed, calls=parsed.calls[:1]), False
        message = assistant_message(parsed, turn=len(self.recording.said))
        for key in ("content", "text"):
            if key in message and (shown := text_before(message[key], request.wanted.stop)) != message[key]:
                message[key], whole = shown, False
        return message, whole

    async def _turn(self, place: Place, wanted: Wanted, finish: Callable[[Turn, TurnInfo], Body]) -> Body:
        """Ask for a turn at `place`, in the trajectory's task group; `finish` records it and makes the response."""
        limit = min(
            self._room.max_model_len - len(place.context), self.recording.room_in_row(place, self._room.response_length)
        )
        if limit < 1:
            self.full = True
            raise no_room(len(place.context), self._room.max_model_len, self._room.response_length)
        if wanted.max_tokens is not None:
            limit = min(limit, wanted.max_tokens)
        request = TurnRequest(self._asked, place.context, limit, wanted.stop)
        self._asked += 1
        made: list[Body] = []
        failed: list[BaseException] = []
        ended, scope = anyio.Event(), anyio.CancelScope()

        async def make() -> None:
            try:
                with scope:
                    started = self._clock()
                    turn = await self._ask_turn(request)
                    turn = cut_at(turn, wanted.stop, self._text)
                    info = TurnInfo(0, 0, 0, turn.finish_reason, self._clock() - started)
                    made.append(finish(turn, info))
            except Exception as error:
                failed.append(error)
                raise
            finally:
                ended.set()

        if self._group is None:
            raise closed()
        self._group.start_soon(make)
        try:
            await ended.wait()
        finally:
            scope.cancel()
        if made:
            return made[0]
        raise engines_failed() if failed else closed()

    def _fail(self, error: AsyncRLError) -> RequestError:
        """The whole trajectory fails of it."""

        async def fail() -> None:
            raise error

        if self._group is not None:
            self._group.start_soon(fail)
        return RequestError(error.message, status=500, kind="server_error")

    def _told(self, place: Place) -> Told:
        number = len(self.recording.said) - 1
        return Told(f"{self.name}-{number}", self._model, int(self._wall_clock()), len(place.context))

    def _pieces(self, wanted: Wanted, turn: Turn) -> list[str] | None:
        return self._book.pieces(turn.response_ids.tolist()) if wanted.log_probs else None

    def _text(self, ids: Any) -> str:
        return self._book.text(ids)


def ended_by_length(recording: Recording) -> bool:
    """The turn that was complete last was cut short."""
    turns = recording.turns()
    return bool(turns) and turns[-1].finish_reason is FinishReason.LENGTH

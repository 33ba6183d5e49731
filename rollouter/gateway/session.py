"""The sessions of the endpoint. A session answers the requests of one trajectory's agent and records its turns.

A session requests turns from the engines in the trajectory's task group (`begin`), so that the trajectory's deadline,
cancellation and engine failures also apply to them. A client that disconnects cancels its turn.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import numpy as np
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.core.failures import AsyncRLError, ConfigError, DataError
from asyncrl.core.text import encodable_values
from asyncrl.core.trajectory import TurnInfo
from asyncrl.core.types import FinishReason, Turn
from rollouter.agent.chat import ChatTokenizer, exceeds
from rollouter.agent.conversation import AskTurn, TurnRequest
from rollouter.agent.parsing import NO_TOOLS, ToolCallParser, assistant_message
from rollouter.gateway.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    GatewayResponse,
    Message,
    PostedReward,
    RequestError,
    RequestReader,
    ResponseHeader,
    TurnOptions,
    chat_response,
    closed,
    completion_response,
    engines_failed,
    model_card,
    models_response,
    no_room,
    read_reward,
    unknown_key,
)
from rollouter.gateway.recording import TrajectoryRecording, TurnPosition, calls_of
from rollouter.gateway.streaming import SettledText, TurnEvents, error_event
from rollouter.user_code import check_extras, describe, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


def cut_at(turn: Turn, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Turn:
    """Return `turn` up to the token that completes the first of `stops`, with the finish reason `stop`.

    Engines usually stop there themselves. Turns that were read from the turn log, and turns of engines that decode
    differently, may be longer. The log-probs of the remaining tokens stay valid.
    """
    ids = turn.response_ids.tolist()

    def found(number: int) -> bool:
        text = decode(ids[:number])
        return any(stop in text for stop in stops)

    if not stops or not found(len(ids)):
        return turn
    fewest, most = 1, len(ids)
    while fewest < most:
        middle = (fewest + most) // 2
        if found(middle):
            most = middle
        else:
            fewest = middle + 1
    return Turn(
        response_ids=np.asarray(ids[:most], dtype=np.int32),
        rollout_log_probs=turn.rollout_log_probs[:most],
        spans=tuple(span for span in turn.spans if span.first_token < most),
        finish_reason=FinishReason.STOP,
    )


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop, which is what clients see."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


TURN_PATHS = frozenset({"chat/completions", "completions"})
"""The paths of requests for a turn, after `/v1/`."""
OPENING_TOKENS = 16
"""Number of tokens at the end of a prompt in which `<think>` is searched."""
BODY_THREADS = 4
"""Number of bodies that are parsed or read at the same time. Threads do this, because long bodies take seconds."""
MAX_CHATS = 256
"""Number of formats in the cache; an evicted format is built again when a request needs it."""


class ChatFormat(NamedTuple):
    """The template and the parser for requests with the same tools and template arguments."""

    chat: ChatTokenizer
    parser: ToolCallParser


class ChatCache:
    """The chat formats that the requests of a run use, shared by all trajectories."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: str,
        template_kwargs: Mapping[str, object],
        end_ids: Collection[int],
    ) -> None:
        """Load the parser of `format`, so that the first request need not wait for vLLM. Blocks for some seconds.

        If the parser does not fit the tokenizer, requests with tools fail, but not this call: a run may have no tools.
        """
        self._tokenizer = tokenizer
        self.format = format
        self._template_kwargs = template_kwargs
        self._end_ids = end_ids
        self._known: OrderedDict[str, ChatFormat] = OrderedDict()
        self._making = anyio.Lock()
        self.body_threads = anyio.CapacityLimiter(BODY_THREADS)
        self._unfit: ConfigError | None = None
        try:
            ToolCallParser(format, tokenizer, end_ids=end_ids)
        except ConfigError as error:
            self._unfit = error

    async def get(self, request: ChatRequest) -> ChatFormat:
        """Return the format of a request, and build it if necessary.

        Raises:
            ConfigError: the request has tools, and `rollout.multi_turn.format` does not fit the model.
            RequestError: template or parser refuse the request's tools.
        """
        key = json.dumps([request.scheme, request.parse_calls])
        if key not in self._known:
            async with self._making:
                if key not in self._known:
                    self._known[key] = await to_thread.run_sync(self._make, request)
            while len(self._known) > MAX_CHATS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return self._known[key]

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens. With `special`, the text includes the names of special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        assert isinstance(text, str)
        return text

    def tokens(self, text: str) -> list[int]:
        """Encode a prompt that is not a conversation, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Decode each token by itself."""
        return [self.text([token], special=True) for token in ids]

    def _make(self, request: ChatRequest) -> ChatFormat:
        if request.parse_calls and self._unfit is not None:
            raise self._unfit
        format = self.format if request.parse_calls else NO_TOOLS
        try:
            chat = ChatTokenizer(
                self._tokenizer,
                tools=request.tools,
                template_kwargs={**self._template_kwargs, **request.template_kwargs},
                end_ids=self._end_ids,
            )
            return ChatFormat(chat, ToolCallParser(format, self._tokenizer, request.tools, end_ids=chat.end_ids))
        except Exception as error:
            if isinstance(error, ConfigError) and not (request.tools or request.template_kwargs):
                raise  # the model's template is the cause
            why = shorten(describe(error), 500)
            raise RequestError(
                f"the chat template or the tool parser refuses the request's tools: {why}", param="tools"
            ) from error


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The limits of one row, in tokens."""

    max_model_len: int
    response_length: int


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn that a request asks for."""

    request: TurnRequest
    position: TurnPosition
    options: TurnOptions
    finish: Callable[[Turn, TurnInfo], Body]
    """Records the complete turn, and returns the response."""
    events: TurnEvents | None
    """Encodes the stream; None if the client asks for one response."""


class GatewaySession:
    """The requests of one trajectory, see `AgentGateway.open`. Its recording does not change after `close`."""

    def __init__(
        self,
        name: str,
        *,
        model: str,
        ask: AskTurn,
        cache: ChatCache,
        reader: RequestReader,
        budget: TokenBudget,
    ) -> None:
        """`name` identifies the trajectory in the ids of responses."""
        self.name = name
        self.recording = TrajectoryRecording()
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.done = anyio.Event()
        """Set when the agent has reported that the trajectory is over."""
        self.full = False
        """Whether a request was refused because there was no room for a turn."""
        self._model = model
        self._ask_turn = ask
        self._cache = cache
        self._reader = reader
        self._budget = budget
        self._group: TaskGroup | None = None
        self._asked = 0
        self._chats: dict[str, ChatTokenizer] = {}
        """Chat tokenizers by `ChatRequest.scheme`."""

    def begin(self, group: TaskGroup) -> None:
        """Request turns in `group` from now on; the group must outlive the session."""
        self._group = group

    def close(self) -> None:
        """Refuse all further requests."""
        self._group = None

    def post(self, posted: PostedReward) -> None:
        """Store a reward and metrics; the last reward counts.

        Raises:
            RequestError: the trajectory is over, or its metrics have names that cannot be reported.
        """
        if self._group is None or self.done.is_set():
            raise closed()
        metrics = {**self.metrics, **posted.metrics}
        try:
            check_extras(metrics)
        except ValueError as error:
            raise RequestError(f"the metrics cannot be used: {error}", param="metrics") from None
        if posted.reward is not None:
            self.reward = posted.reward
        self.metrics = metrics
        if posted.done:
            self.done.set()

    def differences(self) -> list[str]:
        """Describe where rows differ from the tokens that the chat template gives the same messages."""
        ends = [turn for turn in self.recording.ends() if turn.faithful]
        found = [
            self._chats[turn.scheme].difference(turn.tokens.tolist(), turn.messages)
            for turn in ends
            if turn.scheme is not None
        ]
        return [difference for difference in found if difference is not None]

    async def answer(self, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """Answer one request; a refusal is an answer too. `path` is the part after `/v1/`."""
        try:
            return GatewayResponse(200, await self._serve(path, body))
        except RequestError as refusal:
            return GatewayResponse(refusal.status, refusal.body)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[GatewayResponse | bytes, None]:
        """Answer a request for a turn with `stream: true`.

        The first item is a refusal, or the status 200 without a body as soon as the turn has text. Server-sent events
        follow. A failure after the first item is the last event. Closing the iterator cancels the turn.
        """
        begun = False
        try:
            planned = await self._plan(path, body)
            events = planned.events
            assert events is not None
            async with aclosing(self._turn(planned)) as parts:
                async for part in parts:
                    if data := events.progress(part) if isinstance(part, Turn) else events.end(part):
                        if not begun:
                            begun = True
                            yield GatewayResponse(200, {})
                        yield data
        except RequestError as refusal:
            yield error_event(refusal) if begun else GatewayResponse(refusal.status, refusal.body)

    async def _serve(self, path: str, body: Mapping[str, Any]) -> Body:
        if path in TURN_PATHS:
            async with aclosing(self._turn(await self._plan(path, body))) as parts:
                (response,) = [part async for part in parts if not isinstance(part, Turn)]
            return response
        self._check_open()
        match path:
            case "reward":
                self.post(await self._read(read_reward, body))
                return {"object": "reward", "reward": self.reward, "metrics": dict(self.metrics)}
            case "models":
                return models_response(self._model)
            case _ if path == f"models/{self._model}":
                return model_card(self._model)
        raise RequestError(
            f"/v1/{path} is not served with a trajectory's key; available are chat/completions, completions, models "
            "and reward", status=404, code="not_found",
        )  # fmt: skip

    def _check_open(self) -> None:
        if self._group is None or self.done.is_set():
            raise closed()

    async def _plan(self, path: str, body: Mapping[str, Any]) -> PlannedTurn:
        self._check_open()
        if path == "completions":
            return await self._plan_completion(await self._read(self._reader.completion, body))
        return await self._plan_chat(await self._read(self._reader.chat, body))

    async def _read(self, read: Callable[[Mapping[str, Any]], T], body: Mapping[str, Any]) -> T:
        return await to_thread.run_sync(lambda: read(_encodable(body)), limiter=self._cache.body_threads)

    async def _plan_chat(self, request: ChatRequest) -> PlannedTurn:
        await self._check_room([*request.messages, *request.tools])
        try:
            chat_format = await self._cache.get(request)
        except ConfigError as error:
            raise self._fail(error) from error
        self._chats[request.scheme] = chat_format.chat
        position = self._find(chat_format, request)
        turn_request, header = self._request(position, request.options)
        events = self._chat_events(chat_format.parser, position, header, request.options)

        def finish(turn: Turn, info: TurnInfo) -> Body:
            message, faithful = self._message(chat_format, request, turn)
            if events is not None:
                faithful = events.settle(message) and faithful
            calls = calls_of(message)
            reason = FinishReason.TOOL_CALL if calls else turn.finish_reason
            info = replace(info, calls=calls, finish_reason=reason)
            self.recording.add(position, turn, info, message, faithful=faithful)
            return chat_response(header, turn, message, self._pieces(request.options, turn))

        return PlannedTurn(turn_request, position, request.options, finish, events)

    def _chat_events(
        self, parser: ToolCallParser, position: TurnPosition, header: ResponseHeader, options: TurnOptions
    ) -> TurnEvents | None:
        if not options.stream:
            return None
        opened = self._text(position.context[-OPENING_TOKENS:], special=True).rstrip().endswith("<think>")
        text = SettledText(
            parser.decode, split=partial(parser.settled, opened=opened), end_ids=parser.end_ids, stop=options.stop
        )
        return TurnEvents(header, text, options, self._cache.pieces, chat=True)

    async def _plan_completion(self, request: CompletionRequest) -> PlannedTurn:
        await self._check_room([{"content": request.text}])
        ids = list(request.ids) if request.ids is not None else self._cache.tokens(request.text or "")
        if len(ids) >= self._budget.max_model_len:
            raise self._no_room(len(ids))
        prompt = request.text if request.text is not None else self._cache.text(ids)
        context = np.asarray(ids, dtype=np.int32)
        position = TurnPosition(None, ({"role": "user", "content": prompt},), None, None, context)
        turn_request, header = self._request(position, request.options)
        events = None
        if request.options.stream:
            settled = SettledText(self._cache.text, stop=request.options.stop)
            events = TurnEvents(header, settled, request.options, self._cache.pieces, chat=False)

        def finish(turn: Turn, info: TurnInfo) -> Body:
            text = text_before(self._cache.text(turn.response_ids.tolist()), request.options.stop)
            message = {"role": "assistant", "content": text}
            if events is not None:
                events.settle(message)
            self.recording.add(position, turn, info, message)
            return completion_response(header, turn, message["content"], self._pieces(request.options, turn))

        return PlannedTurn(turn_request, position, request.options, finish, events)

    async def _check_room(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse messages or tools that are far too long, because tokenizing them would take seconds of the event
        loop."""
        limit, threads = self._budget.max_model_len, self._cache.body_threads
        if await to_thread.run_sync(exceeds, messages, limit, limiter=threads):
            raise self._no_room(f"more than {limit}")

    def _no_room(self, context_tokens: int | str) -> RequestError:
        """Return the refusal of a turn after these tokens, and remember that there was no room."""
        self.full = True
        return no_room(context_tokens, self._budget.max_model_len, self._budget.response_length)

    def _find(self, chat_format: ChatFormat, request: ChatRequest) -> TurnPosition:
        """Return the position of the turn that `request` asks for."""
        chat, messages = chat_format.chat, request.messages
        parent = self.recording.find(request.scheme, messages)
        try:
            if parent is None:
                context = np.asarray(chat.prompt(messages), dtype=np.int32)
                return TurnPosition(request.scheme, messages, None, None, context)
            new = messages[len(parent.messages) :]
            more = chat.extend(parent.messages, new, parent.ids.tolist())
        except DataError as error:
            raise RequestError(error.message, param="messages") from error
        before = (*parent.messages, *new)
        if more.rewritten:
            self.recording.forks += 1
            return TurnPosition(request.scheme, before, parent, None, np.asarray(more.ids, dtype=np.int32))
        context = np.concatenate([parent.tokens, np.asarray(more.ids, dtype=np.int32)], dtype=np.int32)
        return TurnPosition(request.scheme, before, parent, tuple(more.ids), context)

    def _message(self, chat_format: ChatFormat, request: ChatRequest, turn: Turn) -> tuple[Message, bool]:
        """Return the message that the agent receives, and whether it contains everything that was sampled."""
        parsed = chat_format.parser.parse(turn.response_ids.tolist())
        faithful = turn.finish_reason is not FinishReason.LENGTH
        if request.one_call and len(parsed.calls) > 1:
            parsed, faithful = replace(parsed, calls=parsed.calls[:1]), False
        message = assistant_message(parsed, turn=len(self.recording.completed))
        for key in ("content", "text"):
            if key in message and (shown := text_before(message[key], request.options.stop)) != message[key]:
                message[key], faithful = shown, False
        return message, faithful

    def _request(self, position: TurnPosition, options: TurnOptions) -> tuple[TurnRequest, ResponseHeader]:
        """Return the request for a turn at `position`, and the fields of its response.

        Raises:
            RequestError: there is no room for a token.
        """
        context = position.context
        limit = min(
            self._budget.max_model_len - len(context),
            self.recording.tokens_left(position, self._budget.response_length),
        )
        if limit < 1:
            raise self._no_room(len(context))
        if options.max_tokens is not None:
            limit = min(limit, options.max_tokens)
        number = self._asked
        self._asked += 1
        header = ResponseHeader(f"{self.name}-{number}", self._model, int(time.time()), len(context))
        return TurnRequest(number, context, limit, options.stop), header

    async def _turn(self, planned: PlannedTurn) -> AsyncGenerator[Turn | Body, None]:
        """Ask for a turn in the trajectory's task group. Yield the unfinished turn when it has grown, if the client
        streams it, and at last the response, once the turn is recorded. A slow consumer gets fewer and longer parts.
        Closing the iterator cancels the turn."""
        request, options = planned.request, planned.options
        scope, changed = anyio.CancelScope(), anyio.Event()
        newest: Turn | Body | None = None
        failure: RequestError | None = closed()
        ended = False

        def report(part: Turn | Body) -> None:
            nonlocal newest
            newest = part
            changed.set()

        async def make() -> None:
            nonlocal ended, failure
            try:
                with scope:
                    started = time.monotonic()
                    turn = await self._ask_turn(request._replace(progress=report) if options.stream else request)
                    turn = cut_at(turn, options.stop, self._text)
                    info = TurnInfo(0, 0, 0, turn.finish_reason, time.monotonic() - started)
                    report(planned.finish(turn, info))
                    failure = None
            except Exception:
                failure = engines_failed()
                raise
            finally:
                ended = True
                changed.set()

        if self._group is None:
            raise closed()
        self._group.start_soon(make)
        try:
            while not (ended and newest is None):
                await changed.wait()
                changed = anyio.Event()
                part, newest = newest, None
                if part is not None:
                    yield part
        finally:
            scope.cancel()
        if failure is not None:
            raise failure

    def _fail(self, error: AsyncRLError) -> RequestError:
        """Let the whole trajectory fail with `error`."""

        async def fail() -> None:
            raise error

        if self._group is not None:
            self._group.start_soon(fail)
        return RequestError(error.message, status=500, kind="server_error")

    def _pieces(self, options: TurnOptions, turn: Turn) -> list[str] | None:
        return self._cache.pieces(turn.response_ids.tolist()) if options.log_probs else None

    def _text(self, ids: Any, *, special: bool = False) -> str:
        return self._cache.text(ids, special=special)


def _encodable(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with texts that can be encoded.

    Raises:
        RequestError: its values are nested too deeply.
    """
    try:
        return dict(encodable_values(body))
    except ValueError as error:
        raise RequestError(f"the body cannot be used: {error}") from None


_KEY = re.compile(r"asyncrl-(\d{1,18})-[A-Za-z0-9_-]{43}")
REMEMBERED = 10_000
"""Number of finished trajectories whose keys are kept, to refuse late requests with the right reason."""


def incarnation_of(key: str) -> int | None:
    """Return the incarnation of the Rollouter that issued the key, or None if it is not a trajectory's key."""
    match = _KEY.fullmatch(key)
    return int(match[1]) if match else None


class AgentGateway:
    """The sessions of one Rollouter by their keys."""

    def __init__(self, incarnation: int = 1) -> None:
        self._incarnation = incarnation
        self._sessions: dict[str, GatewaySession] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def open(self, session: GatewaySession) -> str:
        """Return a key for the session's requests. It reveals only which Rollouter has issued it."""
        key = f"asyncrl-{self._incarnation}-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Refuse requests with `key` from now on."""
        self._sessions.pop(key).close()
        self._over[key] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """Answer one request; a refusal is an answer too. `path` is the part after `/v1/`."""
        session = self._sessions.get(key)
        return self._refused(key) if session is None else await session.answer(path, body)

    async def stream(
        self, key: str, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[GatewayResponse | bytes, None]:
        """Answer a request for a turn with `stream: true`, see `GatewaySession.stream`."""
        session = self._sessions.get(key)
        if session is None:
            yield self._refused(key)
            return
        async with aclosing(session.stream(path, body)) as items:
            async for item in items:
                yield item

    def _refused(self, key: str) -> GatewayResponse:
        refusal = closed() if key in self._over else unknown_key()
        return GatewayResponse(refusal.status, refusal.body)

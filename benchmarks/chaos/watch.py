"""Written down between the client and the replicas: what was told of each response when a call failed, and what became
of it. The reward module loads this into the Rollouter's process; the run itself knows nothing of it.

    a call fails            {"request": name, "at": wall clock, "told": tokens}
    it is asked for again   {"request": name, "asked": tokens sent along}
    it is complete          {"request": name, "turn": tokens}
    it is given up          {"request": name, "turn": null}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import Accepted, GenerateRequest, GenerationEvent, TurnFinished
from asyncrl.core.types import Turn
from benchmarks.chaos.accounts import BrokenCall
from rollouter.serving.client import EventBatch, ReplicaStream

Line = Mapping[str, Any]
"""See the module."""


def install(directory: Path) -> None:
    """Watch every call that this process makes to replicas from now on."""
    from rollouter.serving.fleet import ServeFleet

    path = directory / f"{os.getpid()}.jsonl"
    path.touch()  # so that it can be seen that somebody watches

    def put(line: Line) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    watch = CallWatch(put)
    call, generate = ServeFleet._call, ServeFleet.generate

    def watched_call(fleet: ServeFleet, requests: Sequence[GenerateRequest], **options: Any) -> ReplicaStream:
        return watch.calling(call(fleet, requests, **options), requests)

    def watched_generate(
        fleet: ServeFleet, requests: Sequence[GenerateRequest], **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        return watch.generating(generate(fleet, requests, **options), requests)

    ServeFleet._call = watched_call  # type: ignore[method-assign, assignment]
    ServeFleet.generate = watched_generate  # type: ignore[method-assign, assignment]


class CallWatch:
    """Of one process."""

    def __init__(self, put: Callable[[Line], None]) -> None:
        """`put`: writes down a line; they are of responses only of which a call has failed."""
        self._put = put
        self._broken: set[str] = set()
        """Responses that are not complete since a call failed."""

    async def calling(self, call: ReplicaStream, requests: Sequence[GenerateRequest]) -> ReplicaStream:
        """`call`, with what it tells noted."""
        # The client gives every try an id of its own.
        names = [request.request_id.rpartition("-")[0] for request in requests]
        have = [_tokens(request.so_far) for request in requests]
        for name, ids in zip(names, have, strict=True):
            if name in self._broken:
                self._put({"request": name, "asked": list(ids)})
        async with aclosing(call):
            try:
                async for news in call:
                    for piece in () if isinstance(news, (Accepted, EventBatch)) else news:
                        have[piece.number] += _tokens(piece.turn)
                    yield news
            except InfraError:
                at = time.time()
                for name, ids in zip(names, have, strict=True):
                    self._put({"request": name, "at": at, "told": ids})
                self._broken.update(names)
                raise

    async def generating(
        self, events: AsyncGenerator[GenerationEvent, None], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """`events` of a whole generate call, with its turns noted, or that it was given up."""
        turns: dict[str, list[int] | None] = {
            request.request_id: None if request.so_far is None else _tokens(request.so_far) for request in requests
        }
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TurnFinished):
                        turns[requests[event.number].request_id] = _tokens(event.turn)
                    yield event
        except BaseException:
            self._end(dict.fromkeys(turns))
            raise
        self._end(turns)

    def _end(self, turns: Mapping[str, list[int] | None]) -> None:
        for name, ids in turns.items():
            if name in self._broken:
                self._put({"request": name, "turn": ids})
        self._broken.difference_update(turns)


def read_broken_calls(directory: Path) -> list[BrokenCall]:
    """What the watches of all Rollouters have written down. Blocking."""
    found: list[BrokenCall] = []
    for path in sorted(directory.glob("*.jsonl")):
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line is not whole if its process was killed while it wrote.
        found += broken_calls(json.loads(text) for text in texts if text.endswith("\n"))
    return found


def broken_calls(lines: Iterable[Line]) -> list[BrokenCall]:
    """What one watch has seen. A response that was hit twice is there twice."""
    found: list[BrokenCall] = []
    hits: dict[str, list[int]] = {}
    for line in lines:
        of = hits.setdefault(line["request"], [])
        if "told" in line:
            of.append(len(found))
            found.append(BrokenCall(line["request"], tuple(line["told"]), at=line["at"]))
        elif "asked" in line:
            # Of a later try, which no crash preceded (a weight sync), there may be more tokens.
            if of and found[of[-1]].asked is None:
                found[of[-1]] = found[of[-1]]._replace(asked=tuple(line["asked"]))
        else:
            for number in hits.pop(line["request"]):
                turn = None if line["turn"] is None else tuple(line["turn"])
                found[number] = found[number]._replace(turn=turn)
    return found


def _tokens(turn: Turn | None) -> list[int]:
    return [] if turn is None else turn.response_ids.tolist()

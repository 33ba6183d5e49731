"""Record the tokens of each response whose call to a replica failed, and the response's outcome.

The reward module loads this module into the Rollouter's process, where it wraps the calls between the client and the
replicas without changing the run.

    a call fails               {"request": name, "at": wall clock, "received": tokens}
    the next attempt begins    {"request": name, "resumed": tokens that were sent with it}
    the response is complete   {"request": name, "turn": tokens}
    the response is abandoned  {"request": name, "turn": null}
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
from benchmarks.chaos.promises import BrokenCall
from rollouter.serving.client import EventBatch, ReplicaStream

Line = Mapping[str, Any]
"""A line as in the module's docstring."""


def install(directory: Path) -> None:
    """Watch every call that this process makes to replicas from now on."""
    from rollouter.serving.fleet import ServeFleet

    path = directory / f"{os.getpid()}.jsonl"
    path.touch()  # shows that this process is watched

    def write(line: Line) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    watch = CallWatch(write)
    call, generate = ServeFleet._call, ServeFleet.generate

    def watched_call(fleet: ServeFleet, requests: Sequence[GenerateRequest], **options: Any) -> ReplicaStream:
        return watch.record_failures(call(fleet, requests, **options), requests)

    def watched_generate(
        fleet: ServeFleet, requests: Sequence[GenerateRequest], **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        return watch.record_turns(generate(fleet, requests, **options), requests)

    ServeFleet._call = watched_call  # type: ignore[method-assign, assignment]
    ServeFleet.generate = watched_generate  # type: ignore[method-assign, assignment]


class CallWatch:
    """Watches the calls of one process."""

    def __init__(self, write: Callable[[Line], None]) -> None:
        """`write` records a line. Only responses with a failed call get lines."""
        self._write = write
        self._broken: set[str] = set()
        """Responses with a failed call that are not complete yet."""

    async def record_failures(self, call: ReplicaStream, requests: Sequence[GenerateRequest]) -> ReplicaStream:
        """Return the events of `call`, and record a failure."""
        # The client gives every attempt its own id.
        names = [request.request_id.rpartition("-")[0] for request in requests]
        received = [_tokens(request.so_far) for request in requests]
        for name, ids in zip(names, received, strict=True):
            if name in self._broken:
                self._write({"request": name, "resumed": list(ids)})
        async with aclosing(call):
            try:
                async for event in call:
                    for delta in () if isinstance(event, (Accepted, EventBatch)) else event:
                        received[delta.number] += _tokens(delta.turn)
                    yield event
            except InfraError:
                at = time.time()
                for name, ids in zip(names, received, strict=True):
                    self._write({"request": name, "at": at, "received": ids})
                self._broken.update(names)
                raise

    async def record_turns(
        self, events: AsyncGenerator[GenerationEvent, None], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Return the events of a whole generate call, and record its turns, or that it was abandoned."""
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
                self._write({"request": name, "turn": ids})
        self._broken.difference_update(turns)


def read_broken_calls(directory: Path) -> list[BrokenCall]:
    """Return the records of all Rollouters. Blocking."""
    calls: list[BrokenCall] = []
    for path in sorted(directory.glob("*.jsonl")):
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line is torn if its process was killed while it wrote.
        calls += broken_calls(json.loads(text) for text in texts if text.endswith("\n"))
    return calls


def broken_calls(lines: Iterable[Line]) -> list[BrokenCall]:
    """Return the broken calls of one process; a response with two failures appears twice."""
    calls: list[BrokenCall] = []
    open_calls: dict[str, list[int]] = {}
    for line in lines:
        numbers = open_calls.setdefault(line["request"], [])
        if "received" in line:
            numbers.append(len(calls))
            calls.append(BrokenCall(line["request"], tuple(line["received"]), at=line["at"]))
        elif "resumed" in line:
            # A later attempt after a weight sync, without a crash, may have more tokens.
            if numbers and calls[numbers[-1]].resumed is None:
                calls[numbers[-1]] = calls[numbers[-1]]._replace(resumed=tuple(line["resumed"]))
        else:
            for number in open_calls.pop(line["request"]):
                turn = None if line["turn"] is None else tuple(line["turn"])
                calls[number] = calls[number]._replace(turn=turn)
    return calls


def _tokens(turn: Turn | None) -> list[int]:
    return [] if turn is None else turn.response_ids.tolist()

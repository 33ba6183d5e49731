"""Records of a part's run, as the stream that an actor's method yields."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from asyncrl.failures import AsyncRLError, BugError
from asyncrl.records import RecordSink, RunRecord


class StreamSink:
    """`RecordSink` into a memory stream. Unbounded: records are few, and nobody must wait on their reader."""

    def __init__(self, send: MemoryObjectSendStream[RunRecord]) -> None:
        self._send = send

    async def put(self, record: RunRecord) -> None:
        self._send.send_nowait(record)


async def stream_records(part: str, run: Callable[[RecordSink], Awaitable[None]]) -> AsyncIterator[RunRecord]:
    """What `run` puts into its sink, and then its failure if it has one.

    The run is a task of its own: a task group must not stand open across the yields of a generator, whose consumer
    may never come back. A consumer that goes away cancels it and waits for its end.

    Raises:
        AsyncRLError: what `run` raised; anything else as a `BugError` of `part`.
    """
    send, records = anyio.create_memory_object_stream[RunRecord](math.inf)

    async def drive() -> None:
        with send:
            await run(StreamSink(send))

    task = asyncio.create_task(drive(), name=part)
    try:
        with records:
            async for record in records:
                yield record
        await task
    except AsyncRLError:
        raise
    except Exception as error:
        raise BugError.wrap(f"the {part} failed: {type(error).__name__}: {error}", error) from error
    finally:
        task.cancel()
        await asyncio.wait([task])

"""Records of a run's steps, versions and validations, and their stream from a part's actor to the driver."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from asyncrl.core.failures import AsyncRLError, BugError
from asyncrl.core.ports import ApplyReport
from asyncrl.core.worker_threads import keep_worker_threads

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as the Trainer reports it."""

    step: int
    version: int
    """Newest published version after this step."""
    metrics: Metrics
    rewards: tuple[float, ...]
    """Mean reward of each sample trained in this step."""
    staleness: tuple[int, ...]
    """Staleness of each of those samples: versions from its oldest token to the trainer's version."""
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class ApplyRecord:
    """A version that every replica has applied."""

    version: int
    reports: tuple[ApplyReport, ...]
    publish_to_applied_s: float
    lineage: int = 0
    num_bytes: int = 0
    """See `Publication`; 0: not recorded."""
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """The results of one version on the validation set."""

    version: int
    step: int
    metrics: Metrics
    """`reward/mean` and `reward/mean/<data_source>`, `response_tokens/mean`, …"""
    examples: tuple[Mapping[str, Any], ...]
    """A few rows for users: `prompt, response, ground_truth, reward`."""
    lineage: int = 0


RunRecord = StepRecord | ApplyRecord | ValidationRecord


class RecordSink(Protocol):
    async def put(self, record: RunRecord) -> None: ...


class StreamSink:
    """A `RecordSink` into a memory stream. Unbounded: records are few, and their writer must not wait."""

    def __init__(self, send: MemoryObjectSendStream[RunRecord]) -> None:
        self._send = send

    async def put(self, record: RunRecord) -> None:
        self._send.send_nowait(record)


async def stream_records(part: str, run: Callable[[RecordSink], Awaitable[None]]) -> AsyncIterator[list[RunRecord]]:
    """Yield the records that `run` puts into its sink, all that wait at a time, and raise its failure if it has one.

    `run` is called in a separate task, because a task group must not stay open across the yields of a generator whose
    consumer may abandon it. Closing the generator cancels `run` and waits for it to end.

    Raises:
        AsyncRLError: `run` raised it; any other exception is converted to a `BugError` of `part`.
    """
    send, records = anyio.create_memory_object_stream[RunRecord](math.inf)

    async def drive() -> None:
        with send:
            await run(StreamSink(send))

    keep_worker_threads()
    task = asyncio.create_task(drive(), name=part)
    try:
        with records:
            async for record in records:
                num_waiting = records.statistics().current_buffer_used
                yield [record, *(records.receive_nowait() for _ in range(num_waiting))]
        await task
    except AsyncRLError:
        raise
    except Exception as error:
        raise BugError.wrap(f"the {part} failed: {type(error).__name__}: {error}", error) from error
    finally:
        task.cancel()
        await asyncio.wait([task])

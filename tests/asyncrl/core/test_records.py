"""The record stream of a part yields all records, in batches, and then its end or its failure."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from asyncrl.core.failures import BugError, InfraError
from asyncrl.core.records import RecordSink, StepRecord, stream_records


def record(step: int) -> StepRecord:
    return StepRecord(step, 0, {}, (), ())


async def test_a_stream_yields_every_record_and_then_ends() -> None:
    async def run(sink: RecordSink) -> None:
        await sink.put(record(1))
        await anyio.lowlevel.checkpoint()
        await sink.put(record(2))
        await sink.put(record(3))

    assert [item async for item in stream_records("trainer", run)] == [[record(1)], [record(2), record(3)]]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InfraError("gone"), InfraError, "^gone$"),
        (ValueError("a bug of ours"), BugError, "the rollouter failed: ValueError: a bug of ours"),
    ],
)
async def test_a_stream_yields_every_record_before_it_raises_the_failure(
    error: Exception, kind: type[Exception], message: str
) -> None:
    async def run(sink: RecordSink) -> None:
        await sink.put(record(1))
        raise error

    records = stream_records("rollouter", run)
    assert await anext(records) == [record(1)]
    with pytest.raises(kind, match=message):
        await anext(records)


async def test_closing_the_stream_cancels_the_run_and_waits_for_its_end() -> None:
    events: list[str] = []

    async def run(sink: RecordSink) -> None:
        await sink.put(record(1))
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            events.append("released")

    records = stream_records("trainer", run)
    await anext(records)
    await records.aclose()  # type: ignore[attr-defined]
    assert events == ["released"]

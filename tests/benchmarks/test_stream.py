"""Tests of the benchmark of streams: workloads, statistics, and one run against a small server."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import anyio
import numpy as np
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from asyncrl.core.ports import ApplyReport
from asyncrl.driver.cluster import connection
from asyncrl.weights.object_store import ServedRun
from benchmarks.stream import __main__ as program
from benchmarks.stream import servers
from benchmarks.stream.load import Arrived, LoadGenerator
from benchmarks.stream.results import (
    LatencyBound,
    Round,
    StreamedChunk,
    StreamedResponse,
    SyncWindow,
    latency,
    speed,
    sync_cost,
    sync_summary,
)
from benchmarks.stream.servers import flags, server_config
from benchmarks.stream.workload import (
    TracedSession,
    TracedTurn,
    WorkloadShape,
    draw_sessions,
    read_trace,
    write_trace,
)
from rollouter.serving import app
from rollouter.serving.options import WEIGHT_TRANSFER, WORKER_EXTENSION

SHAPE = WorkloadShape(sessions=400, turns=3, prompt=60, output=80, longest=1000, wait_s=0.5)

# ------------------------------------------------------------------------------------------------ workload


def test_poisson_arrivals_have_the_rate_and_independent_gaps() -> None:
    at = np.array([session.at_s for session in draw_sessions(SHAPE, 4.0, seed=1)])
    gaps = np.diff(at)
    assert (gaps > 0).all() and np.mean(gaps) == pytest.approx(0.25, rel=0.2)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.2), "exponential gaps"
    assert {session.at_s for session in draw_sessions(SHAPE, None, seed=1)} == {0.0}


def test_lengths_have_a_long_tail_and_conversations_a_limit() -> None:
    sessions = draw_sessions(SHAPE, None, seed=2)
    outputs = [turn.output_tokens for session in sessions for turn in session.turns]
    assert np.median(outputs) == pytest.approx(80, rel=0.15) and max(outputs) > 5 * np.median(outputs)
    assert all(1 <= session.num_tokens <= 1000 for session in sessions)
    assert all(turn.new_tokens >= 1 and turn.output_tokens >= 1 for session in sessions for turn in session.turns)
    assert [turn.wait_s for turn in sessions[0].turns] == [0.0, 0.5, 0.5][: len(sessions[0].turns)]
    assert draw_sessions(SHAPE, None, seed=2) == sessions != draw_sessions(SHAPE, None, seed=3)


TURNS = st.builds(TracedTurn, st.integers(1, 9999), st.integers(1, 9999), st.floats(0, 1e6))
SESSIONS = st.builds(TracedSession, st.floats(0, 1e6), st.lists(TURNS, min_size=1, max_size=3).map(tuple))


@given(sessions=st.lists(SESSIONS, min_size=1, max_size=5))
def test_a_trace_is_read_as_it_was_written(sessions: list[TracedSession], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, sessions)
    assert read_trace(path) == sorted(sessions, key=lambda session: session.at_s)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "has no session"),
        ("{", "line 1"),
        ("[]", "an object with a list"),
        ('{"at_s": 1}', "'turns' is missing"),
        ('{"turns": []}', "at least one turn"),
        ('{"turns": [{"new_tokens": 1}]}', "'output_tokens' is missing"),
        ('{"turns": [{"new_tokens": 0, "output_tokens": 1}]}', "new_tokens=0"),
        ('{"turns": [{"new_tokens": true, "output_tokens": 1}]}', "new_tokens=True"),
        ('{"turns": [{"new_tokens": 1, "output_tokens": 1, "wait_s": NaN}]}', "wait_s=nan"),
        ('{"at_s": -1, "turns": [{"new_tokens": 1, "output_tokens": 1}]}', "at_s=-1"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=why) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


# ------------------------------------------------------------------------------------------------ statistics


def response(sent: float, *chunks: tuple[float, int], error: str = "") -> StreamedResponse:
    return StreamedResponse(sent, tuple(StreamedChunk(*chunk) for chunk in chunks), error)


STEADY = response(0.0, (0.5, 1), (0.6, 2), (0.9, 2))


def test_latencies_of_a_response() -> None:
    assert STEADY.first_token_s == 0.5 and STEADY.tokens == 5
    assert STEADY.token_s == pytest.approx(0.4 / 4)
    assert STEADY.gaps == pytest.approx([0.1, 0.3])
    assert response(0.0, (0.5, 3)).token_s is None, "all tokens came at once"


@pytest.mark.parametrize(
    ("bound", "holds"),
    [(LatencyBound(), True), (LatencyBound(0.5, 0.11), True), (LatencyBound(0.4, None), False),
     (LatencyBound(None, 0.09), False)],
)  # fmt: skip
def test_a_latency_bound(bound: LatencyBound, holds: bool) -> None:
    assert bound.holds(STEADY) is holds
    assert not LatencyBound().holds(response(0.0, (0.5, 1), error="reset")), "a failed response is not good"


def test_the_summary_counts_failed_and_late_responses() -> None:
    late, failed, silent = response(1.0, (2.0, 5)), response(0.0, (0.5, 2), error="reset"), response(0.0, error="no")
    rounds = [Round([STEADY, late, failed, silent], ())]
    row = speed(rounds, LatencyBound(first_token_s=0.9)) | latency(rounds)
    assert (row["requests"], row["failed"]) == (4, 2)
    assert row["tokens/s"] == pytest.approx(12 / 2.0) and row["good tokens/s"] == pytest.approx(5 / 2.0)
    assert row["good %"] == 25 and row["first token p50 ms"] == pytest.approx(750)
    assert row["gap worst ms"] == pytest.approx(300) and row["tokens a chunk"] == 10 / 4
    assert speed([Round([silent], ())], LatencyBound())["tokens/s"] == 0
    assert set(latency([Round([silent], ())]).values()) == {None}


def test_rates_are_medians_over_the_rounds_and_latencies_those_of_all() -> None:
    rounds = [Round([STEADY], ()), Round([response(0.0, (10.0, 5))], ()), Round([STEADY], ())]
    row = speed(rounds, LatencyBound())
    assert row["tokens/s"] == pytest.approx(5 / 0.9) and row["rounds"] == "0 to 6" and row["requests"] == 3
    assert latency(rounds)["first token p99 ms"] > 9_000


def test_the_cost_of_a_sync_is_the_longest_gap_of_those_in_flight() -> None:
    chunks = [(at / 10, 1) for at in range(10)] + [(1.5 + at / 10, 1) for at in range(5)]
    paused = response(0.0, *chunks)
    other = response(5.0, (5.1, 1), (5.2, 1))
    (cost,) = sync_cost([paused, other], [SyncWindow(1, 0.95, 1.4)])
    assert cost == pytest.approx(0.6 - 0.1)
    assert sync_cost([paused, other], [SyncWindow(1, 3.0, 4.0)]) == []
    row = sync_summary([Round([paused, other], [SyncWindow(1, 0.95, 1.4)]), Round([other], [])])
    assert (row["syncs"], row["responses in flight"]) == (1, 1)
    assert row["cost worst ms"] == pytest.approx(500) and row["publish to applied p50 ms"] == pytest.approx(450)


def test_engine_arguments_as_options() -> None:
    given = {"dtype": "float32", "enforce_eager": True, "trust_remote_code": False, "seed": 4, "hf_overrides": {"a": 1}}
    assert flags(given) == [
        "--dtype", "float32", "--enforce-eager", "--seed", "4", "--hf-overrides", '{"a": 1}',
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ load


class EchoClient:
    """Answers every request with the ids 7, and records contexts and the number of requests at a time."""

    def __init__(self) -> None:
        self.contexts: dict[str, list[list[int]]] = {}
        self.now = self.most = 0

    async def stream(self, context: Any, output_tokens: int, *, session: str) -> AsyncIterator[Arrived]:
        self.contexts.setdefault(session, []).append(context.tolist())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(output_tokens):
                await anyio.sleep(0.001)
                yield Arrived(1, [7])
        finally:
            self.now -= 1


async def test_a_closed_loop_keeps_the_concurrency_and_contexts_grow_by_the_turns() -> None:
    client = EchoClient()
    load = LoadGenerator(client, vocabulary=60, seed=3, timeout_s=30)  # type: ignore[arg-type]
    sessions = [TracedSession(0.0, (TracedTurn(4, 3), TracedTurn(2, 5)))] * 6
    await load.run(sessions, concurrency=2)
    assert client.most == 2 and len(load.responses) == 12
    for first, second in client.contexts.values():
        assert len(first) == 4 and second[:7] == [*first, 7, 7, 7] and len(second) == 9
    assert sum(one.tokens for one in load.responses) == 6 * 8


async def test_open_arrivals_begin_on_time_and_a_slow_request_fails_alone() -> None:
    client = EchoClient()
    load = LoadGenerator(client, vocabulary=60, seed=3, timeout_s=1.0)  # type: ignore[arg-type]
    quick, slow = TracedTurn(1, 1), TracedTurn(1, 10_000)
    await load.run([TracedSession(0.0, (slow, quick)), TracedSession(0.3, (quick,))], concurrency=None)
    good, failed = sorted(load.responses, key=lambda one: bool(one.error))
    assert good.sent >= 0.3 and good.tokens == 1
    assert failed.error.startswith("TimeoutError") and failed.tokens > 1
    assert len(load.responses) == 2 and load.in_flight == 0, "a failed turn ends its session"


# ------------------------------------------------------------------------------------------------ a run over HTTP


@contextmanager
def served(bodies: list[dict[str, Any]]) -> Iterator[str]:
    """Serve a model `m` in a thread, which streams as many tokens as requested. It fails requests for 13 tokens."""

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def completions(request: Request) -> Any:
        body = await request.json()
        bodies.append(body)
        if body["max_tokens"] == 13:
            return JSONResponse({"error": {"message": "unlucky"}}, 400)
        chat = "messages" in body

        async def events() -> AsyncIterator[str]:
            for _ in range(body["max_tokens"]):
                choice = {"delta": {"content": "x"}} if chat else {"text": "x", "token_ids": [9]}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                await anyio.sleep(0.002)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/v1/models", models)]
    routes += [Route(f"/v1/{path}", completions, methods=["POST"]) for path in ("completions", "chat/completions")]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_server_is_measured_with_a_trace(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, result, plot = (tmp_path / name for name in ("trace.jsonl", "result.json", "plot.png"))
    turns = (TracedTurn(5, 4), TracedTurn(3, 6, 0.01))
    write_trace(
        trace, [TracedSession(0.0, turns), TracedSession(0.05, turns), TracedSession(0.0, (TracedTurn(1, 13),))]
    )
    bodies: list[dict[str, Any]] = []
    with served(bodies) as url:
        arguments = [
            "--url",
            url,
            "--trace",
            str(trace),
            "--api",
            api,
            "--rate",
            "5",
            "--ttft-ms",
            "60000",
            "--rounds",
            "2",
        ]
        monkeypatch.setattr("sys.argv", ["stream", *arguments, "--json", str(result), "--plot", str(plot)])
        assert program.main() == 0
    written = json.loads(result.read_text())
    row = written["speed"][0] | written["latency"][0]
    assert (row["requests"], row["failed"], row["good %"]) == (10, 2, 80)
    assert row["tokens/s"] > 0 and row["gap p99 ms"] > 0 and row["tokens a chunk"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "unlucky" in capsys.readouterr().err
    last = bodies[-1]
    assert last["model"] == "m" and last["stream"] is True and last["ignore_eos"] is True
    if api == "completions":
        second = next(body["prompt"] for body in bodies if len(body["prompt"]) == 12)
        first = second[:5]
        assert second[5:9] == [9] * 4 and first in [body["prompt"] for body in bodies]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "host:8000/v1", "nothing"])
def test_a_server_that_does_not_answer_is_an_error_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stream", "--url", url])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert str(ended.value).startswith(f"{url}/models lists no model, so nothing is measured: ")


def test_a_server_that_answers_no_request_is_an_error_and_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:1/v1"
    monkeypatch.setattr("sys.argv", ["stream", "--url", url, "--model", "m", "--sessions", "2"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert str(ended.value).startswith(f"{url} answers no request, so nothing is measured: ConnectError: ")
    assert capsys.readouterr().out == ""


def test_an_application_that_does_not_run_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "connected", lambda *names, **options: nullcontext())
    monkeypatch.setattr(app.serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr("sys.argv", ["stream", "--app", "nothere", "--model", "asyncrl://quickstart"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert str(ended.value).startswith("--app='nothere': Ray Serve runs no rollout servers of this name")


def test_deployed_servers_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"})
    monkeypatch.setattr("sys.argv", ["stream", "--app", "rollout", "--model", "asyncrl://quickstart"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert "RAY_ADDRESS=auto: there is no Ray cluster that answers" in str(ended.value)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [([], "name a server"), (["--app", "a"], "--model DIR"), (["--app", "a", "--serve", "vllm"], "not allowed"),
     (["--url", "x", "--sync-every", "1"], "take no versions"),
     (["--url", "x", "--rate", "0"], "above 0"), (["--url", "x", "--rate", "1", "--concurrency", "2"], "not allowed")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stream", *arguments])
    with pytest.raises(SystemExit):
        program.main()
    assert why in capsys.readouterr().err


class LoadingFleet:
    """Replicas that load every version for `load_s` seconds."""

    def __init__(self, load_s: float) -> None:
        self.load_s = load_s
        self.applied: list[int] = []

    async def apply(self, publication: int) -> list[ApplyReport]:
        self.applied.append(publication)
        return [ApplyReport("one", publication, 0.0, 0.0, self.load_s, 0, True)]


@pytest.fixture
def publishes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish(publisher: Any, version: int, step: int, tensors: Any) -> int:
        return version

    monkeypatch.setattr(servers, "publish_tensors", publish)


@pytest.mark.usefixtures("publishes_numbers")
async def test_a_version_is_published_in_every_period_whatever_the_clock_does() -> None:
    """The clock goes on between any two lines, and an application may take longer than a period."""
    clock, windows, fleet = count(0.0, 0.004), list[SyncWindow](), LoadingFleet(load_s=0.1)
    publisher = servers.VersionPublisher(fleet, None, {})  # type: ignore[arg-type]
    with anyio.move_on_after(0.5):
        await publisher.publish_every(0.01, lambda: next(clock), windows)
    assert fleet.applied[:4] == [1, 2, 3, 4]
    assert [one.version for one in windows[:4]] == [1, 2, 3, 4] and all(one.end > one.begin for one in windows)


@pytest.mark.usefixtures("publishes_numbers")
async def test_a_version_that_no_replica_loads_is_no_measured_sync() -> None:
    windows: list[SyncWindow] = []
    publisher = servers.VersionPublisher(LoadingFleet(load_s=0.0), None, {})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no replica has loaded version 1"):
        await publisher.publish_every(0.01, time.monotonic, windows)
    assert windows == []


async def test_each_attachment_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas refuse the versions of a run that they do not follow, by its namespace."""
    served: list[str] = []
    calling: list[str] = []

    async def claim(namespace: str, run: ServedRun, **limits: Any) -> str:
        served.append(run.namespace)
        return f"store in {namespace}"

    monkeypatch.setattr(servers, "claim_store", claim)
    monkeypatch.setattr(servers, "attach", AsyncMock())
    monkeypatch.setattr(servers, "ServeFleet", lambda config, namespace: calling.append(namespace))
    monkeypatch.setattr(servers, "ObjectStorePublisher", lambda store, call_s: None)
    monkeypatch.setattr(servers, "ray", SimpleNamespace(kill=lambda store: None))
    for _ in range(2):
        async with servers.attached(server_config("asyncrl://quickstart", 64, "rollout")):
            pass
    assert served == calling and len(set(served)) == 2


def test_other_servers_get_no_argument_of_asyncrls_own_code() -> None:
    arguments = " ".join(flags(servers._engine_arguments(server_config("asyncrl://quickstart", 64))))
    assert "--max-model-len 64" in arguments
    assert WORKER_EXTENSION not in arguments and json.dumps({"backend": WEIGHT_TRANSFER}) not in arguments


@pytest.mark.parametrize(("in_flight", "partial"), [("keep", True), ("abort", True), ("wait", False)])
def test_requests_in_flight_are_treated_as_asked(in_flight: Any, partial: bool) -> None:
    drift = server_config("model", 64, "rollout", in_flight).async_training
    assert drift.partial_rollout == partial and (drift.partial_mode == "abort") == (in_flight == "abort")

"""Tests of the agents benchmark on fake engines: fair comparisons and complete tables."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError, InfraError
from asyncrl.core.ports import GenerateRequest
from asyncrl.core.types import FinishReason, SampleId
from benchmarks.agents import __main__ as benchmark
from benchmarks.agents import conversations
from benchmarks.agents.conversations import MODEL, N, SlowTool, SumPrompts, conversation_settings
from benchmarks.agents.cost import measure_cost
from benchmarks.agents.fleets import SHORTEST, BarrierFleet, DrawnFleet, TurnLengths
from benchmarks.agents.lag import TICK_S, lateness, measure_lag, percentiles_ms
from benchmarks.agents.over_sampling import VARIANTS, measure_over_sampling
from benchmarks.agents.rollouts import RolloutWork, take
from benchmarks.agents.tools import IN_FLIGHT, measure_tools
from rollouter.agent.parsing import NO_TOOLS
from rollouter.tools.base import ToolContext
from tests.fakes.engine import FakeFleet, finished_turns

LENGTHS = TurnLengths(median=20, sigma=0.6, longest=100, prompt_sigma=0.6)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace vLLM's parser, which takes seconds to load."""
    monkeypatch.setattr(conversations, "FORMAT", NO_TOOLS)


def fleet(**settings: Any) -> FakeFleet:
    """Return engines that answer with the maximum number of tokens."""
    return FakeFleet(answer=lambda request: [5] * request.sampling["max_tokens"], **settings)


def request(name: str, max_tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2], dtype=np.int32), {"max_tokens": max_tokens, "temperature": 1.0})


# ------------------------------------------------------------------------------------------------ fleets


def test_lengths_depend_on_the_seed_and_have_a_truncated_tail() -> None:
    lengths = TurnLengths(median=20, sigma=1.0, longest=100)
    drawn = [lengths.of(f"sample_0_1/{k}", seed=0) for k in range(2000)]
    assert drawn == [lengths.of(f"sample_0_1/{k}", seed=0) for k in range(2000)]
    assert drawn != [lengths.of(f"sample_0_1/{k}", seed=1) for k in range(2000)]
    assert 18 < np.median(drawn) < 22 and max(drawn) == 100 and min(drawn) == SHORTEST
    assert np.mean(drawn) > 1.2 * np.median(drawn)


def test_responses_to_one_prompt_have_similar_lengths() -> None:
    lengths = TurnLengths(median=50, sigma=0.0, longest=1000, prompt_sigma=1.0)
    groups = [{lengths.of(f"sample_0_{index}/{k}", seed=0) for k in range(8)} for index in range(1, 20)]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) > 10


async def test_turns_have_the_drawn_length_and_end_with_a_stop() -> None:
    drawn = DrawnFleet(fleet(), LENGTHS, seed=3)
    names = [f"sample_0_1/{k}" for k in range(3)]
    turns = await finished_turns(drawn.generate([request(name) for name in names], session="s"))
    assert [len(turn.response_ids) for turn in turns] == [LENGTHS.of(name, 3) for name in names]
    assert {turn.finish_reason for turn in turns} == {FinishReason.STOP}
    (short,) = await finished_turns(drawn.generate([request(names[0], max_tokens=2)], session="s"))
    assert len(short.response_ids) == 2


async def test_a_barrier_opens_when_all_have_arrived() -> None:
    engines = fleet()
    barrier = BarrierFleet(engines, 3)
    passed: list[str] = []

    async def ask(name: str, length: int) -> None:
        for number in range(2):
            (turn,) = await finished_turns(barrier.generate([request(f"{name}.{number}", length)], session=name))
            assert len(turn.response_ids) == length
            passed.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "a", 1)
        group.start_soon(ask, "b", 2)
        await anyio.wait_all_tasks_blocked()
        assert not passed and not engines.sessions
        group.start_soon(ask, "c", 3)
    assert engines.sessions == ["batch-1", "batch-2"]
    assert [one.request_id for one in engines.requests[:3]] == ["a.0", "b.0", "c.0"]
    assert sorted(passed[:3]) == sorted(passed[3:]) == ["a", "b", "c"]


async def test_a_failed_batch_fails_for_all_its_callers() -> None:
    engines = fleet()
    engines.fail("batch-1", InfraError("gone"))
    barrier, errors = BarrierFleet(engines, 2), list[str]()

    async def ask(name: str) -> None:
        with pytest.raises(InfraError) as caught:
            await finished_turns(barrier.generate([request(name)], session=name))
        errors.append(caught.value.message)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "a")
            group.start_soon(ask, "b")
    assert sorted(errors) == ["gone", "the batch failed: gone"]


# ------------------------------------------------------------------------------------------------ rollouts


def make_work(engines: FakeFleet, **rollout: Any) -> RolloutWork:
    config = Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {"n": 2, "response_length": 100, "max_model_len": 200, **rollout},
            "trainer": {"ppo_mini_batch_size": 3},
            "async_training": {"staleness_threshold": 0.0},
        }
    )
    return RolloutWork(config, SumPrompts(config), DrawnFleet(engines, LENGTHS, seed=0))


async def test_versions_are_consumed_in_order() -> None:
    engines = fleet()
    outcome = await take(make_work(engines), 2)
    assert len(outcome.samples) == 6 and outcome.trajectories == 12
    assert outcome.sampled_tokens == engines.generated_tokens
    assert engines.max_in_flight <= 3, "the samples of the next version still wait"
    assert {str(sample.sample_id) for sample in outcome.samples[:3]} == {f"sample_0_{k}" for k in (1, 2, 3)}


async def test_a_dropped_sample_invalidates_the_measurement() -> None:
    engines = fleet()
    engines.fail("sample_0_2", DataError("unreadable"))
    with pytest.raises(SystemExit, match=r"samples were dropped.*failed"):
        await take(make_work(engines), 1)


async def test_a_tool_takes_about_its_configured_time() -> None:
    tool = SlowTool(0.5, jitter=0.2)
    states = [await tool.create(ToolContext(SampleId(0, 1), number)) for number in (1, 1, 2)]
    one, again, other = ([tool.seconds(state) for _ in range(50)] for state in states)
    assert one == again != other
    assert all(0.4 <= seconds <= 0.6 for seconds in one) and max(one) > 0.55 and min(one) < 0.45


# ------------------------------------------------------------------------------------------------ tables


@pytest.mark.usefixtures("no_vllm")
async def test_the_barrier_makes_one_call_per_turn_and_streaming_one_per_conversation() -> None:
    engines = fleet()
    barrier, streaming = await measure_tools(engines, 1, latency_s=0.01, batches=2, lengths=LENGTHS)
    warm_up = IN_FLIGHT * conversations.TURNS
    assert sum(session.startswith("batch-") for session in engines.sessions) == 2 * conversations.TURNS
    assert len(engines.sessions) == 2 * conversations.TURNS + 2 * warm_up + warm_up
    assert (barrier["variant"], streaming["variant"], barrier["ratio"]) == ("barrier", "streaming", 1.0)
    assert barrier["trajectories"] == streaming["trajectories"] == 2 * IN_FLIGHT
    assert complete([barrier, streaming])


@pytest.mark.usefixtures("no_vllm")
async def test_conversations_that_end_early_stop_the_benchmark() -> None:
    with pytest.raises(SystemExit, match=r"conversations of .* turns"):
        await measure_tools(fleet(), 1, latency_s=0.0, batches=1, lengths=TurnLengths(500, 0.0, 500))


@pytest.mark.usefixtures("no_vllm")
async def test_event_loop_lag_is_measured_while_each_kind_of_tool_runs() -> None:
    rows = await measure_lag(fleet(pace=lambda _: anyio.sleep(0.02)), 1, load_s=0.3, warm_up_s=0.05)
    assert [row["beside"] for row in rows] == ["nothing", "async tools", "tools in threads"]
    assert rows[0]["turns/s"] == 0 and all(row["turns/s"] > 0 for row in rows[1:])
    assert all(0 <= row["p50 ms"] <= row["p99 ms"] <= row["max ms"] for row in rows)


async def test_every_timer_due_during_a_halt_counts_as_late() -> None:
    async def halt() -> None:
        await anyio.sleep(0.05)
        time.sleep(0.1)  # noqa: ASYNC251  the halt

    async with anyio.create_task_group() as group:
        group.start_soon(halt)
        late = await lateness(0.3)
    assert max(late) > 0.09
    assert sum(seconds > 0.05 for seconds in late) >= 0.8 * 0.05 / TICK_S
    assert percentiles_ms([0.001] * 99 + [0.101])["max ms"] == pytest.approx(101)


async def test_over_sampling_wastes_tokens_and_discards_the_longest_trajectories() -> None:
    engines = fleet(chunk_tokens=10, pace=lambda _: anyio.sleep(0.005))

    async def generated() -> int:
        return engines.generated_tokens

    rows = await measure_over_sampling(engines, generated, 1, samples=5, versions=2, lengths=LENGTHS)
    none, samples, trajectories = rows
    assert [row["over-sampling"] for row in rows] == list(VARIANTS)
    assert (none["wasted"], none["wasted %"], none["faster"]) == (0, 0, 1)
    for row in (samples, trajectories):
        assert row["wasted"] > 0 and 0 < row["wasted %"] < 60
    assert trajectories["tokens"] < none["tokens"], "the longest ones are discarded"


def test_the_cost_of_parsing_is_measured_on_valid_calls() -> None:
    alone, one, three = measure_cost(1, turns=(1, 3), groups=1)
    assert [(row["agent"], row["turns"]) for row in (alone, one, three)] == [("no", 1), ("yes", 1), ("yes", 3)]
    assert alone["parse"] == alone["extend"] == alone["check"] == one["extend"] == 0
    assert all(value > 0 for value in figures(three).values())
    parts = sum(three[name] for name in ("parse", "extend", "check", "rest"))
    assert parts == pytest.approx(three["ms/turn"]) and three["ms/trajectory"] == pytest.approx(3 * parts)


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}


def complete(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(math.isfinite(value) and value > 0 for row in rows for value in figures(row).values())


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the measurement, and return the arguments of its calls."""
    calls: list[Any] = []

    def measure(only: Sequence[str], *args: Any) -> dict[str, list[dict[str, Any]]]:
        calls.append((tuple(only), *args))
        print("output of a library")  # noqa: T201
        return {name: [{"variant": "one", "figure": 1.5}] for name in benchmark.ASPECTS if name in only}

    monkeypatch.setattr(benchmark, "measure", measure)
    return calls


def test_json_on_stdout_is_printed_alone(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--only", "lag,tools", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert measured == [(("lag", "tools"), 3, 0.0)]
    assert result["tools"] == result["lag"] == [{"variant": "one", "figure": 1.5}]
    assert "cost" not in result and result["aims"] == benchmark.AIMS and result["machine"]["cores"] > 0
    assert result["load_before"] >= 0
    assert logging.getLogger("rollouter.agent.loop").level == logging.NOTSET


def test_tables_are_printed_and_written_to_a_file(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deeper" / "agents.json"
    benchmark.main(["--rounds", "2", "--jitter", "0.5", "--json", str(target)])
    assert measured == [(benchmark.ASPECTS, 2, 0.5)]
    out = " ".join(capsys.readouterr().out.split())  # titles of narrow tables have two lines
    assert all(f"agents, {name}" in out for name in benchmark.ASPECTS) and "of a library" not in out
    assert set(benchmark.ASPECTS) < set(json.loads(target.read_text()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: '0' is not a number of 1 or more"),
        (["--only", "tools,legs"], "--only: 'legs' is none of tools, lag, over_sampling, cost"),
        (["--jitter", "2"], "--jitter: '2' is not a number from 0 to 1"),
        (["--jitter", "much"], "--jitter: 'much' is not a number from 0 to 1"),
        (["--json", "/proc/nowhere/x.json"], "--json: /proc/nowhere/x.json cannot be written"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(options)
    assert message in capsys.readouterr().err


def test_the_tool_configuration_loads() -> None:
    config = Config.model_validate({"model": {"path": MODEL}, "rollout": conversation_settings(latency_s=0.5)})
    assert config.rollout.n == N and config.rollout.multi_turn.max_assistant_turns == conversations.TURNS

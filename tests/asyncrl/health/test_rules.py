"""What figures mean, and which remedy is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.health.alarms import Told
from asyncrl.health.facts import EngineLoad, MachineHealth, ProcessHealth, RunHealth
from asyncrl.health.rules import GIB, GROWTH_OVER_S, Rules, Settings, Snapshot, size

ROOM = MachineHealth(64 * GIB, 40 * GIB, 0.5, 1000 * GIB, 500 * GIB)
WELL = RunHealth(
    {"driver": ProcessHealth(GIB, 0.1, 0.01), "rollouter": ProcessHealth(2 * GIB, 0.3, 0.02)},
    {"r1": EngineLoad(8, 0, 0.4, 0)},
    ROOM,
    0.2,
)
"""Nothing is wrong with it."""
USUAL = Settings()
At = Callable[[float], RunHealth]


def run(
    seconds: float,
    at: At,
    *,
    settings: Settings = USUAL,
    every_s: float = 2.0,
    **given: float,
) -> tuple[list[Told], Rules]:
    """What is told of a run in which things are so `at` each second."""
    rules, told = Rules(settings), []
    for number in range(int(seconds / every_s) + 1):
        now_s = number * every_s
        found, _ = rules.observe(Snapshot(now_s, 1e9 + now_s, at(now_s), **given))  # type: ignore[arg-type]
        told += found
    return told, rules


def with_process(name: str, **given: float) -> RunHealth:
    process = replace(ProcessHealth(GIB, 0.1, 0.01), **given)
    return replace(WELL, processes={**WELL.processes, name: process})


def with_machine(**given: float) -> RunHealth:
    return replace(WELL, machine=replace(ROOM, **given))


def test_of_a_run_that_is_well_nothing_is_told() -> None:
    told, _ = run(1200, lambda _: WELL, idle_trainer=0.1, idle_rollouter=0.2)
    assert told == []


def test_of_a_run_of_which_nothing_is_known_nothing_is_told() -> None:
    assert run(600, lambda _: RunHealth())[0] == []


@pytest.mark.parametrize(
    ("cpu", "machine_cpu", "remedy"),
    [(1.0, 0.5, "asyncio.to_thread or a process"), (0.2, 0.99, "CPUs are all busy"), (0.2, 0.3, "a network call")],
)
def test_a_blocked_loop_is_told_with_its_owner_and_cause(cpu: float, machine_cpu: float, remedy: str) -> None:
    bad = replace(with_process("trainer", cpu=cpu, lag_s=1.5), machine=replace(ROOM, cpu=machine_cpu))
    told, _ = run(180, lambda now_s: bad if now_s < 100 else WELL)
    # Of a process that is not there any more there is no good news.
    assert [each.key for each in told] == ["lag/trainer"]
    assert "event loop of trainer stands still for up to 1.5 s" in told[0].text and remedy in told[0].text


def test_it_is_told_when_a_loop_is_well_again() -> None:
    told, _ = run(180, lambda now_s: with_process("queue", lag_s=2.0 if now_s < 60 else 0.01))
    assert [(each.level, each.key) for each in told] == [("warning", "lag/queue"), ("", "lag/queue")]


def test_a_machine_almost_out_of_memory_names_who_has_it() -> None:
    told, _ = run(60, lambda _: with_machine(memory_available_bytes=2 * GIB))
    assert [each.key for each in told] == ["memory/machine"]
    assert "97% of 64.0 GiB" in told[0].text and "rollouter has 2.0 GiB" in told[0].text
    assert "rollout.max_concurrent_samples" in told[0].text


def test_memory_that_grows_steadily_is_told_and_what_settles_or_swings_is_not() -> None:
    leak, _ = run(GROWTH_OVER_S * 1.5, lambda now_s: with_process("rollouter", rss_bytes=GIB + 20e6 * now_s))
    assert [each.key for each in leak] == ["growth/rollouter"]
    assert "by 1.1 GiB a minute" in leak[0].text and "full in 36 minutes" in leak[0].text
    settles, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 20e6 * min(now_s, 300)))
    swings, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 1e8 * (now_s % 100)))
    slow, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 1e5 * now_s))
    assert settles == swings == slow == []


def test_growth_on_another_machine_is_not_judged_by_this_one() -> None:
    told, _ = run(
        GROWTH_OVER_S * 1.5,
        lambda now_s: with_process("replica-x", rss_bytes=GIB + 20e6 * now_s),
        elsewhere=frozenset({"replica-x"}),  # type: ignore[arg-type]
    )
    assert told == []


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [(Settings(), "ray.object_store_memory_bytes"), (Settings(private_cluster=False), "--object-store-memory")],
)
def test_a_full_object_store(settings: Settings, remedy: str) -> None:
    told, _ = run(60, lambda now_s: replace(WELL, object_store_share=0.9), settings=settings)
    assert [each.key for each in told] == ["object_store"] and remedy in told[0].text and "90% full" in told[0].text


def test_preemptions_are_kv_cache_pressure_and_a_full_cache_alone_is_not() -> None:
    full, _ = run(300, lambda _: replace(WELL, engines={"r1": EngineLoad(8, 0, 0.99, 7)}))
    assert full == []

    def at(now_s: float) -> RunHealth:
        return replace(WELL, engines={"r1": EngineLoad(8, 3, 0.99 if now_s < 100 else 0.3, int(min(now_s, 100)))})

    told, _ = run(400, at)
    assert [(each.level, each.key) for each in told] == [("warning", "kv_cache/r1"), ("", "kv_cache/r1")]
    assert "rollout.gpu_memory_utilization (on CPU rollout.cpu_kv_cache_gib)" in told[0].text
    assert "3 waiting" in told[0].text


def test_an_engine_that_began_anew_is_no_pressure() -> None:
    told, _ = run(300, lambda now_s: replace(WELL, engines={"r1": EngineLoad(8, 0, 0.5, 50 if now_s < 100 else 0)}))
    assert told == []


def test_a_disk_that_fills_up_tells_when_it_is_full() -> None:
    told, _ = run(600, lambda now_s: with_machine(disk_free_bytes=100 * GIB - int(0.1 * GIB * now_s)))
    assert [each.key for each in told] == ["disk"]
    minutes = re.search(r"full in (\d+) minutes", told[0].text)
    assert minutes is not None and 12 <= int(minutes[1]) <= 17
    for key in ("trainer.max_checkpoints_to_keep", "rollout.dump_dir", "profiler.level"):
        assert key in told[0].text


def test_a_disk_with_little_left_is_told_though_it_does_not_fill() -> None:
    told, _ = run(100, lambda _: with_machine(disk_free_bytes=GIB))
    assert [each.key for each in told] == ["disk"] and "has 1.0 GiB left;" in told[0].text


def test_dropped_events_are_told_at_once() -> None:
    told, _ = run(120, lambda now_s: with_process("rollouter", dropped_events=0 if now_s < 10 else 500))
    assert told[0].key == "events/rollouter" and "dropped 500" in told[0].text
    assert "profiler.buffer_events" in told[0].text


@pytest.mark.parametrize(
    ("trainer", "rollouter", "key", "remedy"),
    [
        (0.8, 0.1, "idle/trainer", "rollout.num_replicas"),
        (0.8, 0.4, "idle/trainer", "async_training.staleness_threshold"),
        (0.1, 0.9, "idle/rollouter", "async_training.staleness_threshold"),
    ],
)
def test_idle_sides_are_hints(trainer: float, rollouter: float, key: str, remedy: str) -> None:
    told, _ = run(200, lambda _: WELL, idle_trainer=trainer, idle_rollouter=rollouter)
    assert [(each.level, each.key) for each in told] == [("hint", key)] and remedy in told[0].text
    by_design, _ = run(
        200, lambda _: WELL, idle_trainer=trainer, idle_rollouter=rollouter, settings=Settings(on_policy=True)
    )
    assert by_design == []


def test_open_problems_go_with_the_health() -> None:
    _, rules = run(60, lambda _: replace(WELL, object_store_share=0.95))
    told, health = rules.observe(Snapshot(62.0, 1e9 + 62, replace(WELL, object_store_share=0.96)))
    assert told == [] and [problem.key for problem in health.problems] == ["object_store"]
    assert health.processes == WELL.processes and health.problems[0].since == 1e9


def test_memory_of_what_was_seen_stays_small() -> None:
    _, rules = run(20_000, lambda now_s: with_process("rollouter", rss_bytes=GIB + now_s))
    assert all(len(course.points) <= 210 for course in rules._trends._courses.values())


def test_every_key_that_a_remedy_names_is_one() -> None:
    """Remedies go into people's configuration files."""
    root = Path(__file__).parents[3]
    known = (root / "docs" / "config.md").read_text()
    text = (root / "asyncrl" / "health" / "rules.py").read_text()
    named = set(re.findall(r"\b(?:rollout|trainer|ray|profiler|async_training)\.[a-z_]+", text))
    assert len(named) >= 10
    assert [key for key in sorted(named) if f"`{key}`" not in known] == []


def test_sizes_for_people() -> None:
    assert [size(count) for count in (512, 2048, 3.5 * 1024**2, 2.25 * GIB)] == ["512 B", "2 KiB", "4 MiB", "2.2 GiB"]

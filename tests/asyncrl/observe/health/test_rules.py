"""Health rules: which values are reported as problems, and with which remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.process_health import EngineLoad, MachineHealth, ProcessHealth, RunHealth
from asyncrl.observe.formats import size
from asyncrl.observe.health.alarms import HealthNotice
from asyncrl.observe.health.balance import ThreadSplit
from asyncrl.observe.health.rules import GIB, GROWTH_OVER_S, HealthRules, HealthSettings, HealthSnapshot

ROOM = MachineHealth(64 * GIB, 40 * GIB, 0.5, 500 * GIB)
WELL = RunHealth(
    {"driver": ProcessHealth(GIB, 0.1, 0.01), "rollouter": ProcessHealth(2 * GIB, 0.3, 0.02)},
    {"r1": EngineLoad(8, 0, 0.4, 0)},
    ROOM,
    0.2,
)
"""A healthy run."""
WELL_WITHOUT = replace(WELL, processes={"driver": WELL.processes["driver"]})
"""A healthy run whose Rollouter does not report."""
USUAL = HealthSettings()
At = Callable[[float], RunHealth | tuple[RunHealth, dict[str, float]]]


def run(
    seconds: float,
    at: At,
    *,
    settings: HealthSettings = USUAL,
    every_s: float = 2.0,
    start_s: float = 0.0,
    rules: HealthRules | None = None,
    **given: Any,
) -> tuple[list[HealthNotice], HealthRules]:
    """Return the notices and the rules of a run. `at(now_s)` returns its health, optionally with the silent parts."""
    rules, notices = rules or HealthRules(settings), []
    for number in range(int(seconds / every_s) + 1):
        now_s = start_s + number * every_s
        health = at(now_s)
        if isinstance(health, tuple):
            health, given["silent_s"] = health
        notices += rules.observe(HealthSnapshot(now_s, 1e9 + now_s, health, **given))[0]
    return notices, rules


def changes(notices: list[HealthNotice]) -> list[tuple[str, str]]:
    return [(each.level, each.key) for each in notices]


def with_process(name: str, **given: float) -> RunHealth:
    process = replace(ProcessHealth(GIB, 0.1, 0.01), **given)
    return replace(WELL, processes={**WELL.processes, name: process})


def with_machine(**given: float) -> RunHealth:
    return replace(WELL, machine=replace(ROOM, **given))


def test_a_healthy_run_has_no_notices() -> None:
    notices, _ = run(1200, lambda _: WELL, idle_trainer=0.1, idle_rollouter=0.2)
    assert notices == []


def test_unknown_health_has_no_notices() -> None:
    assert run(600, lambda _: RunHealth())[0] == []


@pytest.mark.parametrize(
    ("name", "cpu", "machine_cpu", "remedy"),
    [
        ("rollouter", 1.0, 0.5, "asyncio.to_thread or a process"),
        ("rollouter", 0.2, 0.99, "all CPUs of the machine are busy"),
        ("rollouter", 0.2, 0.3, "a network call"),
        ("rank-actor-0", 1.0, 0.5, "lower trainer.cpu_threads"),
        ("rank-actor-0", 1.0, 0.99, "all CPUs of the machine are busy"),
        ("rank-actor-0", 0.2, 0.3, "timeouts.probe_s"),
        ("replica-r1", 1.0, 0.5, "raise rollout.num_replicas"),
        ("replica-r1", 0.2, 0.5, "vLLM"),
        ("trainer", 1.0, 0.5, "trainer.ppo_mini_batch_size"),
        ("trainer", 0.2, 0.5, "trainer.save_freq"),
        ("queue", 0.2, 0.5, "journal"),
        ("store", 1.0, 0.5, "rollout.num_replicas"),
        ("driver", 1.0, 0.5, "logging.sinks"),
    ],
)
def test_a_blocked_loop_is_reported_with_process_and_cause(
    name: str, cpu: float, machine_cpu: float, remedy: str
) -> None:
    bad = replace(with_process(name, cpu=cpu, lag_s=1.5), machine=replace(ROOM, cpu=machine_cpu))
    notices, _ = run(100, lambda _: bad)
    assert [each.key for each in notices] == [f"lag/{name}"]
    assert f"event loop of {name} is blocked for up to 1.5 s" in notices[0].text and remedy in notices[0].text
    if name != "rollouter":
        assert "rewards" not in notices[0].text or name == "trainer"
        assert "asyncio.to_thread" not in notices[0].text, "it runs no user code"


def test_a_process_on_another_machine_is_not_judged_by_this_machines_cpus() -> None:
    bad = replace(with_process("replica-x", lag_s=1.5), machine=replace(ROOM, cpu=0.99))
    notices, _ = run(60, lambda _: bad, elsewhere=frozenset({"replica-x"}))
    assert "all CPUs of the machine are busy" not in notices[0].text


def test_the_recovery_of_a_loop_is_reported() -> None:
    notices, _ = run(600, lambda now_s: with_process("queue", lag_s=1.0 if now_s < 60 else 0.01))
    assert changes(notices) == [("warning", "lag/queue"), ("", "lag/queue")]


def test_an_occasional_short_lag_is_not_reported() -> None:
    notices, _ = run(1200, lambda now_s: with_process("queue", lag_s=1.0 if now_s % 120 < 10 else 0.01))
    assert notices == []


def rarely_blocked(now_s: float, every_s: float = 120.0, for_s: float = 45.0) -> tuple[RunHealth, dict[str, float]]:
    """Return health and silent parts of a run whose Rollouter blocks for `for_s` at the end of every `every_s`. While
    it is blocked it does not answer; then it reports the lag for 10 s, the window of a process."""
    since_s = now_s % every_s - (every_s - for_s)
    if since_s > 5.0:
        return WELL_WITHOUT, {"rollouter": since_s}
    lag_s = for_s if now_s > every_s and now_s % every_s < 10.0 else 0.02
    return with_process("rollouter", lag_s=lag_s), {}


@pytest.mark.parametrize("for_s", [3.0, 8.0, 45.0])
def test_a_long_rare_lag_is_reported_once(for_s: float) -> None:
    notices, rules = run(1198, lambda now_s: rarely_blocked(now_s, for_s=for_s))
    assert changes(notices) == [("warning", "lag/rollouter")]
    notices, _ = run(398, lambda _: WELL, start_s=1200, rules=rules)
    assert changes(notices) == [("", "lag/rollouter")]


def test_a_silent_part_is_reported_while_it_is_silent() -> None:
    notices, _ = run(18, lambda now_s: (WELL_WITHOUT, {"rollouter": now_s + 0.5}))
    assert [each.key for each in notices] == ["lag/rollouter"]
    assert notices[0].text.startswith("rollouter has not answered for 12 s") and "asyncio.to_thread" in notices[0].text


def test_a_process_that_has_just_started_may_block() -> None:
    importing = with_process("rollouter", lag_s=9.0)
    assert run(60, lambda _: importing, settling=frozenset({"rollouter"}))[0] == []
    assert [each.key for each in run(60, lambda _: importing)[0]] == ["lag/rollouter"]


def test_a_machine_almost_out_of_memory_names_the_largest_processes() -> None:
    notices, _ = run(60, lambda _: with_machine(memory_available_bytes=2 * GIB))
    assert [each.key for each in notices] == ["memory/machine"]
    assert "97% of 64.0 GiB" in notices[0].text and "rollouter has 2.0 GiB" in notices[0].text
    assert "rollout.max_concurrent_samples" in notices[0].text


def test_steady_memory_growth_is_reported_and_other_growth_is_not() -> None:
    leak, _ = run(GROWTH_OVER_S * 1.5, lambda now_s: with_process("rollouter", rss_bytes=GIB + 20e6 * now_s))
    assert [each.key for each in leak] == ["growth/rollouter"]
    assert "by 1.1 GiB a minute" in leak[0].text and "full in 36 minutes" in leak[0].text
    settles, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 20e6 * min(now_s, 300)))
    swings, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 1e8 * (now_s % 100)))
    slow, _ = run(GROWTH_OVER_S * 3, lambda now_s: with_process("rollouter", rss_bytes=GIB + 1e5 * now_s))
    assert settles == swings == slow == []


def test_growth_on_another_machine_is_not_judged_by_this_one() -> None:
    def at(now_s: float) -> RunHealth:
        return with_process("replica-x", rss_bytes=GIB + 20e6 * now_s)

    assert run(GROWTH_OVER_S * 1.5, at, elsewhere=frozenset({"replica-x"}))[0] == []


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (HealthSettings(), "ray.object_store_memory_bytes"),
        (HealthSettings(private_cluster=False), "--object-store-memory"),
    ],
)
def test_a_full_object_store_is_reported_with_a_remedy(settings: HealthSettings, remedy: str) -> None:
    notices, _ = run(60, lambda now_s: replace(WELL, object_store_share=0.9), settings=settings)
    assert [each.key for each in notices] == ["object_store"]
    assert remedy in notices[0].text and "90% full" in notices[0].text


def test_versions_that_were_not_broadcast_are_a_problem_until_one_is() -> None:
    rules = HealthRules(HealthSettings())
    reasons = ["", "b is late", "b is late", "", ""]
    seen = [rules.observe(HealthSnapshot(2.0 * k, 1e9, WELL, fallback=reason)) for k, reason in enumerate(reasons)]
    assert [changes(notices) for notices, _ in seen] == [[], [("warning", "fallback")], [], [("", "fallback")], []]
    assert "instead of GPU broadcasts (weight_sync.backend=nccl): b is late" in seen[1][0][0].text
    assert [len(health.problems) for _, health in seen] == [0, 1, 1, 0, 0]


def test_a_replica_that_never_compares_its_log_probs_is_a_problem_until_it_does() -> None:
    rules = HealthRules(HealthSettings())
    seen = [
        rules.observe(HealthSnapshot(2.0 * k, 1e9, WELL, uncompared={"r1": versions}))[0]
        for k, versions in enumerate((1, 2, 3, 4, 0))
    ]
    assert [changes(notices) for notices in seen] == [
        [], [], [("warning", "uncompared/r1")], [], [("", "uncompared/r1")],
    ]  # fmt: skip
    assert "for 3 versions in a row (weight_sync.verify)" in seen[2][0].text
    assert "rollout.max_num_seqs" in seen[2][0].text


def test_preemptions_are_kv_cache_pressure_and_a_full_cache_alone_is_not() -> None:
    full, _ = run(300, lambda _: replace(WELL, engines={"r1": EngineLoad(8, 0, 0.99, 7)}))
    assert full == []

    def at(now_s: float) -> RunHealth:
        return replace(WELL, engines={"r1": EngineLoad(8, 3, 0.99 if now_s < 100 else 0.3, int(min(now_s, 100)))})

    notices, _ = run(400, at)
    assert changes(notices) == [("warning", "kv_cache/r1"), ("", "kv_cache/r1")]
    assert "rollout.gpu_memory_utilization (on CPU rollout.cpu_kv_cache_gib)" in notices[0].text
    assert "3 waiting" in notices[0].text


def test_the_restart_of_an_engine_is_not_kv_cache_pressure() -> None:
    notices, _ = run(300, lambda now_s: replace(WELL, engines={"r1": EngineLoad(8, 0, 0.5, 50 if now_s < 100 else 0)}))
    assert notices == []


def test_a_disk_that_fills_up_is_reported_with_the_time_left() -> None:
    notices, _ = run(600, lambda now_s: with_machine(disk_free_bytes=100 * GIB - int(0.1 * GIB * now_s)))
    assert [each.key for each in notices] == ["disk"]
    minutes = re.search(r"full in (\d+) minutes", notices[0].text)
    assert minutes is not None and 12 <= int(minutes[1]) <= 17
    for key in ("trainer.max_checkpoints_to_keep", "rollout.dump_dir", "profiler.level"):
        assert key in notices[0].text


def checkpoints(now_s: float, every_s: float, takes_s: float, *, kept: int = 2) -> float:
    """Return the number of checkpoints on the disk. Every `every_s` a run writes one in `takes_s` and then removes the
    oldest if there are more than `kept`."""
    done, since_s = divmod(now_s, every_s)
    writing = min(since_s / takes_s, 1.0) if done >= 1 else 0.0
    whole = max(0.0, done - 1)
    return min(whole, kept) + writing if writing < 1.0 else min(done, kept)


@pytest.mark.parametrize("free_gib", [60, 1500])
@pytest.mark.parametrize(
    ("every_s", "takes_s", "gib"),
    [(1200.0, 70.0, 10.0), (120.0, 20.0, 10.0), (60.0, 30.0, 5.0), (400.0, 60.0, 15.0), (3600.0, 600.0, 15.0)],
)
def test_checkpoints_come_in_bursts_and_do_not_fill_a_disk(
    every_s: float, takes_s: float, gib: float, free_gib: int
) -> None:
    def at(now_s: float) -> RunHealth:
        used_gib = gib * checkpoints(now_s, every_s, takes_s) + 1e-5 * now_s  # the logs grow too
        return with_machine(disk_free_bytes=int((free_gib - used_gib) * GIB))

    assert run(4 * every_s + 2400, at, save_s=every_s, every_s=5.0)[0] == []
    assert run(2700, at, save_s=math.inf, every_s=5.0)[0] == [], "also while the interval is unknown"


def test_large_checkpoints_do_not_fill_a_large_disk() -> None:
    def at(now_s: float) -> RunHealth:
        return with_machine(disk_free_bytes=int((1500 - 300 * checkpoints(now_s, 300.0, 250.0)) * GIB))

    assert run(3600, at, save_s=300.0)[0] == []


def test_a_burst_of_writes_at_the_beginning_is_not_reported() -> None:
    notices, _ = run(1200, lambda now_s: with_machine(disk_free_bytes=int((100 - min(now_s, 70.0) / 7) * GIB)))
    assert notices == []


def test_steady_growth_between_checkpoints_is_reported() -> None:
    def at(now_s: float) -> RunHealth:
        used_gib = 10 * checkpoints(now_s, 300.0, 60.0) + 0.05 * now_s
        return with_machine(disk_free_bytes=int((200 - used_gib) * GIB))

    notices, _ = run(3200, at, save_s=300.0)
    assert [each.key for each in notices] == ["disk"]
    minutes = re.search(r"full in (\d+) minutes", notices[0].text)
    assert minutes is not None and 20 <= int(minutes[1]) <= 30


def test_a_nearly_full_disk_is_reported_even_if_it_does_not_fill() -> None:
    notices, _ = run(100, lambda _: with_machine(disk_free_bytes=GIB))
    assert [each.key for each in notices] == ["disk"] and "has 1.0 GiB left;" in notices[0].text


def test_dropped_events_are_reported_at_once() -> None:
    notices, _ = run(120, lambda now_s: with_process("rollouter", dropped_events=0 if now_s < 10 else 500))
    assert notices[0].key == "events/rollouter"
    assert "500 profiling events of rollouter did not fit into a buffer or onto the disk" in notices[0].text
    assert "profiler.buffer_events" in notices[0].text


def test_a_collector_that_refuses_events_is_reported_once_for_all_processes() -> None:
    def at(now_s: float) -> RunHealth:
        lost = 0 if now_s < 10 else 40 if now_s < 30 else 100
        return RunHealth({name: ProcessHealth(1, unsent_events=lost) for name in ("driver", "rollouter")})

    notices, _ = run(200, at)
    assert [each.key for each in notices] == ["unsent_events", "unsent_events"]
    assert "did not accept 80 events in the last minute" in notices[0].text and "collector" in notices[0].text
    assert notices[1].text == "profiler.otlp_endpoint accepts all events again"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rollouter", "rewards, tools, interactions"),
        ("trainer", "trainer.ppo_mini_batch_size"),
        ("rank-actor-0", "trainer.ppo_max_token_len"),
        ("replica-r1", "rollout.max_concurrent_samples"),
        ("engine-r1", "rollout.cpu_kv_cache_gib"),
        ("queue", "async_training.staleness_threshold"),
        ("store", "asyncrl status"),
        ("driver", "logging.sinks"),
    ],
)
def test_the_remedy_against_growth_fits_the_process(name: str, remedy: str) -> None:
    notices, _ = run(GROWTH_OVER_S * 1.5, lambda now_s: with_process(name, rss_bytes=GIB + 20e6 * now_s))
    assert [each.key for each in notices] == [f"growth/{name}"]
    assert remedy in notices[0].text and "trainer.save_freq" in notices[0].text


def test_growth_is_reported_even_if_the_process_is_silent_at_times() -> None:
    def at(now_s: float) -> RunHealth:
        return with_process("rollouter", rss_bytes=GIB + 20e6 * now_s) if now_s % 120 < 75 else WELL_WITHOUT

    notices, _ = run(GROWTH_OVER_S * 1.5, at)
    assert [each.key for each in notices] == ["growth/rollouter"]


@pytest.mark.parametrize(
    ("trainer", "rollouter", "key", "remedy"),
    [
        (0.8, 0.1, "idle/trainer", "rollout.num_replicas"),
        (0.8, 0.4, "idle/trainer", "async_training.staleness_threshold"),
        (0.1, 0.9, "idle/rollouter", "async_training.staleness_threshold"),
        (0.9, 0.7, "idle/both", "reward.max_concurrency"),
    ],
)
def test_an_idle_trainer_or_rollouter_is_reported_as_a_hint(
    trainer: float, rollouter: float, key: str, remedy: str
) -> None:
    notices, _ = run(200, lambda _: WELL, idle_trainer=trainer, idle_rollouter=rollouter)
    assert changes(notices) == [("hint", key)] and remedy in notices[0].text
    on_policy = HealthSettings(on_policy=True)
    assert run(200, lambda _: WELL, idle_trainer=trainer, idle_rollouter=rollouter, settings=on_policy)[0] == []


def test_a_side_that_waits_is_told_the_faster_split_of_threads() -> None:
    uneven = HealthSettings(threads=ThreadSplit(cpus=16, engines=1, engine_threads=8, ranks=1, rank_threads=8))
    notices, _ = run(200, lambda _: WELL, idle_trainer=0.4, idle_rollouter=0.0, settings=uneven)
    assert changes(notices) == [("hint", "idle/trainer")]
    expected = "set rollout.cpu_threads=10 and trainer.cpu_threads=6, with which steps would be up to 1.2 times as fast"
    assert expected in notices[0].text
    notices, _ = run(200, lambda _: WELL, idle_trainer=0.0, idle_rollouter=0.6, settings=uneven)
    assert changes(notices) == [("hint", "idle/rollouter")]
    assert "set rollout.cpu_threads=5 and trainer.cpu_threads=11" in notices[0].text
    notices, _ = run(200, lambda _: WELL, idle_trainer=0.1, idle_rollouter=0.1, settings=uneven)
    assert notices == [], "neither side waits"


@pytest.mark.parametrize("searches", [False, True])
def test_idle_cpus_of_engines_are_offered_to_the_ranks(searches: bool) -> None:
    small = ThreadSplit(cpus=2, engines=1, engine_threads=1, ranks=1, rank_threads=1, searches=searches)
    settings = HealthSettings(threads=small)
    [notice], _ = run(200, lambda _: WELL, idle_trainer=0.0, idle_rollouter=0.9, settings=settings)
    assert ("(trainer.max_cpu_threads=2)" in notice.text) is not searches
    two = HealthSettings(threads=ThreadSplit(cpus=2, engines=1, engine_threads=1, ranks=1, rank_threads=1))
    assert run(200, lambda _: WELL, idle_trainer=0.4, idle_rollouter=0.0, settings=two)[0] == []
    notices, _ = run(200, lambda _: WELL, idle_trainer=0.6, idle_rollouter=0.0, settings=two)
    assert "rollout.num_replicas" in notices[0].text and "with 2 CPUs, no other numbers of threads" in notices[0].text


def test_open_problems_are_returned_with_the_health() -> None:
    _, rules = run(60, lambda _: replace(WELL, object_store_share=0.95))
    notices, health = rules.observe(HealthSnapshot(62.0, 1e9 + 62, replace(WELL, object_store_share=0.96)))
    assert notices == [] and [problem.key for problem in health.problems] == ["object_store"]
    assert health.processes == WELL.processes and health.problems[0].since == 1e9


def test_the_rules_remember_a_bounded_number_of_points() -> None:
    _, rules = run(20_000, lambda now_s: with_process("rollouter", rss_bytes=GIB + now_s))
    assert all(len(points) <= 210 for points in rules._trends._points.values())


def test_remedies_name_existing_configuration_keys() -> None:
    root = Path(__file__).parents[4]
    known = (root / "docs" / "config.md").read_text()
    # String literals are split over lines, some of them within a key.
    health = root / "asyncrl" / "observe" / "health"
    text = "".join((health / name).read_text() for name in ("rules.py", "balance.py"))
    text = re.sub(r'"\n\s*f?"', "", text)
    named = set(re.findall(r"\b(?:rollout|trainer|ray|profiler|async_training|logging|timeouts)\.[a-z_]+", text))
    assert len(named) >= 10
    assert [key for key in sorted(named) if f"`{key}`" not in known] == []


def test_sizes_are_readable() -> None:
    assert [size(count) for count in (512, 2048, 3.5 * 1024**2, 2.25 * GIB)] == ["512 B", "2 KiB", "4 MiB", "2.2 GiB"]

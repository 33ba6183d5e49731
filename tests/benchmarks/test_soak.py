"""Tests of the soak: the processes that it samples, the growth that it finds, and its verdicts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos.faults import KINDS
from benchmarks.chaos.outcome import ChaosOutcome
from benchmarks.chaos.promises import Violation
from benchmarks.soak import __main__ as program
from benchmarks.soak import growth, summary
from benchmarks.soak.processes import (
    PARTS,
    ProcessSample,
    Recording,
    RunSample,
    read_recording,
    role_of,
    sample_run,
)

Curve = Callable[[float], float]


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/venv/bin/python -m asyncrl launch fully_async config.yaml resume=auto", "driver"),
        ("ray::QueueActor", "queue"),
        ("ray::RolloutActor.run", "rollouter"),
        ("ray::ServeReplica:asyncrl:Replica", "replica"),
        ("VLLM::EngineCore", "engine"),
        ("ray::IDLE", "idle worker"),
        ("/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/x", "raylet"),
        ("/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "gcs"),
        ("python /ray/_private/workers/default_worker.py --raylet-name=/tmp/x/raylet", "idle worker"),
        ("python -u /ray/_private/log_monitor.py --session-dir=/tmp", "log monitor"),
        ("python -u /ray/autoscaler/_private/monitor.py --logs-dir=/tmp", "autoscaler"),
        ("", "other"),
    ],
)
def test_a_command_line_names_the_role(command: str, role: str) -> None:
    assert role_of(command) == role


def test_the_descendants_of_this_process_are_sampled(tmp_path: Path) -> None:
    with (
        open("/dev/shm/soak-test", "wb") as shared,
        subprocess.Popen(
            [sys.executable, "-c", "input()", "EngineCore"], stdin=-1, pass_fds=[shared.fileno()]
        ) as child,
    ):
        os.unlink(shared.name)
        shared.write(bytes(1 << 20))
        shared.flush()
        (tmp_path / "file").write_bytes(bytes(500_000))
        sample = sample_run(tmp_path)
        child.communicate(b"\n")
    (process,) = [one for one in sample.processes if one.pid == child.pid]
    assert process.role == "engine" and process.threads == 1 and process.descriptors >= 4
    assert 0 < process.anonymous < process.rss and 0 < process.uss <= process.pss <= process.rss
    assert (sample.run_dir_mb, sample.step) == (0.5, 0) and sample.shared_mb == pytest.approx(1.05, abs=0.01)


# ------------------------------------------------------------------------------------------------ growth


def grown(curve: Curve, minutes: float = 40.0, warm_up_s: float = 600.0) -> growth.Growth | None:
    since_s = [float(each) for each in range(0, round(60 * minutes), 10)]
    return growth.fit(1e9 + np.array(since_s), np.array([curve(each / 3600.0) for each in since_s]), 1e9 + warm_up_s)


def noise(seed: int) -> Curve:
    draw = random.Random(seed)
    return lambda _: draw.gauss(200.0, 6.0)


def test_a_steady_slope_is_found_in_percent_per_hour() -> None:
    found = grown(lambda hours: 100.0 + 5.0 * hours)
    assert found is not None and found.span_s == pytest.approx(29 * 60 + 50)
    assert found.percent_per_h == pytest.approx(5.0 / found.level * 100.0, rel=1e-6)
    assert found.low == pytest.approx(found.high) == pytest.approx(found.percent_per_h)
    assert growth.judge(found, 1.0) == "grows"


def test_growth_during_the_warm_up_and_spikes_do_not_count() -> None:
    for curve in (
        lambda hours: min(100.0, 50.0 + 400.0 * hours),
        lambda hours: 900.0 if 0.30 < hours < 0.34 else 100.0,
        lambda hours: 100.0 + 20.0 * np.sin(2000.0 * hours),
    ):
        found = grown(curve)
        assert found is not None and abs(found.percent_per_h) < 1.5
        assert growth.judge(found, 1.0) == "ok"


def test_a_leak_beneath_a_sawtooth_is_found() -> None:
    found = grown(lambda hours: 200.0 + 20.0 * hours + 5.0 * ((7.0 * hours) % 1.0))
    assert found is not None and found.low < 10.0 < found.high
    assert growth.judge(found, 1.0) == "grows"


def test_chance_is_seldom_called_growth() -> None:
    found = [grown(noise(seed)) for seed in range(20)]
    assert sum(growth.judge(one, 1.0) == "grows" for one in found) <= 1
    assert all(one is not None and one.low < one.percent_per_h < one.high for one in found)


def test_a_short_series_is_not_judged() -> None:
    assert grown(lambda _: 1.0, minutes=19.0) is None and growth.judge(None, 1.0) == "too short"
    assert grown(lambda _: 1.0, minutes=21.0) is not None


def test_growth_of_a_few_pages_or_one_descriptor_is_none() -> None:
    small = grown(lambda hours: 10.0 + 0.5 * hours)
    assert small is not None and small.percent_per_h > growth.LIMIT_PERCENT
    assert growth.judge(small, growth.MEMORY_FLOOR_MB) == "ok"
    assert growth.judge(small, 0.1) == "grows"
    assert growth.judge(small._replace(low=-1.0), 0.1) == "unclear"


# ------------------------------------------------------------------------------------------------ verdicts


def recording(minutes: int = 30, **curves: Curve) -> Recording:
    """Return an hour-long recording in which each role has one process, whose memory is given in MB by hours."""
    memory: dict[str, Curve] = {**dict.fromkeys(PARTS, lambda _: 100.0), **curves}
    samples = []
    for at in range(0, 60 * minutes, 10):
        processes = tuple(
            ProcessSample(pid, 1e9, role, round(1e6 * curve(at / 3600.0)), 0, 0, 0, 50, 4)
            for pid, (role, curve) in enumerate(memory.items())
        )
        samples.append(RunSample(1e9 + at, at // 10, 1.0, 80.0, processes))
    return Recording(samples, [(1e9 + 300.0, "queue kill")])


def judged(found: Recording, outcome: ChaosOutcome | None = None) -> list[str]:
    return summary.reasons(summary.role_growths(found, 600.0), outcome, wants_faults=True)


def test_the_table_has_the_parts_of_the_run_first() -> None:
    memory, descriptors = summary.tables(summary.role_growths(recording(gcs=lambda _: 15.0), 600.0)).values()
    assert [row["role"] for row in memory] == [*PARTS, "gcs", summary.SHARED]
    assert [row["role"] for row in descriptors] == [*PARTS, "gcs"]
    assert {row["verdict"] for row in memory + descriptors} == {"ok"}
    assert memory[0] == {
        "role": "driver", "processes": 1, "judged": 1, "MB": 100.0,
        "%/h": 0.0, "low": 0.0, "high": 0.0, "verdict": "ok",
    }  # fmt: skip
    assert (descriptors[0]["threads"], descriptors[0]["descriptors"]) == (4, 50)
    assert judged(recording()) == []


def test_a_role_is_as_bad_as_its_worst_process() -> None:
    found = recording(queue=lambda hours: 100.0 + 30.0 * hours)
    for place, sample in enumerate(found.samples):
        steady = sample.processes[1]._replace(pid=99, anonymous=100_000_000)
        found.samples[place] = sample._replace(processes=(*sample.processes, steady))
    (queue,) = [role for role in summary.role_growths(found, 600.0) if role.name == "queue"]
    assert (len(queue.lifetimes), queue.num_judged, queue.memory.verdict, queue.descriptors.verdict) == (
        2,
        2,
        "grows",
        "ok",
    )
    (reason,) = judged(found)
    assert reason.startswith("queue grows: +2") and reason.endswith("MB of memory")


def test_a_replaced_process_has_a_warm_up_of_its_own() -> None:
    found = recording(minutes=60, trainer=lambda hours: 100.0 + 60.0 * ((hours * 2.0) % 1.0))
    number = PARTS.index("trainer")
    for sample in found.samples[180:]:
        processes = list(sample.processes)
        processes[number] = processes[number]._replace(pid=99, started=1e9 + 1800.0)
        found.samples[found.samples.index(sample)] = sample._replace(processes=tuple(processes))
    (trainer,) = [role for role in summary.role_growths(found, 600.0) if role.name == "trainer"]
    assert len(trainer.lifetimes) == trainer.num_judged == 2


def test_a_slow_start_is_not_growth() -> None:
    found = recording(minutes=40, engine=lambda hours: 100.0 + min(hours, 0.3) * 1000.0)
    for place, sample in enumerate(found.samples):
        found.samples[place] = sample._replace(step=max(0, sample.step - 100))
    assert not judged(found)
    assert "too short" in judged(Recording([sample._replace(step=0) for sample in found.samples], []))[0]


def test_a_worker_counts_as_the_actor_that_it_becomes() -> None:
    found = recording()
    first = found.samples[0]
    found.samples[0] = first._replace(processes=tuple(one._replace(role="idle worker") for one in first.processes))
    assert {one.role for one in growth.lifetimes(found.samples)} == set(PARTS)


def test_the_reasons_name_all_that_failed() -> None:
    outcome = ChaosOutcome(violations=[Violation("trained once", "sample_0_2")])
    first, second, third = judged(recording(minutes=15), outcome)
    assert first == "trained once: sample_0_2"
    assert second.startswith("no fault was injected")
    assert third.startswith("too short to judge: no process of driver, queue")


def test_faults_spare_one_half_of_the_parts_in_each_half_of_the_time() -> None:
    times = iter([True] * 40 + [False] * 40)
    kinds = program.by_halves(program.KINDS, random.Random(0), lambda: next(times))
    drawn = [next(kinds) for _ in range(80)]
    assert {kind.target for kind in drawn[:40]} == set(program.FIRST_HALF)
    assert {kind.target for kind in drawn[40:]} == set(program.SECOND_HALF)
    assert not any(kind.ends_launch for kind in program.KINDS) and set(program.KINDS) < set(KINDS)


# ------------------------------------------------------------------------------------------------ the program


def write(found: Recording, path: Path) -> Path:
    lines = [json.dumps(one) for one in (*found.samples, *found.faults)]
    path.write_text("\n".join(lines) + '\n[1e9, 3, "torn', encoding="utf-8")
    return path


def test_a_recording_is_read_without_its_torn_line(tmp_path: Path) -> None:
    assert read_recording(write(recording(), tmp_path / "soak.jsonl")) == recording()


@pytest.mark.parametrize(("leak", "code"), [(0.0, 0), (20.0, 1)])
def test_a_recording_can_be_judged_and_plotted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak: float, code: int
) -> None:
    file = write(recording(minutes=60, driver=lambda hours: 100.0 + leak * hours), tmp_path / "soak.jsonl")
    result = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--plot", str(file), "--json", str(result)])
    assert program.main() == code
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    found = json.loads(result.read_text())
    assert bool(found["failed"]) == bool(code) and found["faults"] == ["5.0 min: queue kill"]
    assert found["memory"][0]["verdict"] == ("grows" if leak else "ok")


def test_ctrl_c_prints_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeHarness:
        outcome = ChaosOutcome()

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self) -> None:
            write(recording(), tmp_path / "soak.jsonl")
            raise KeyboardInterrupt

    monkeypatch.setattr(program, "ChaosHarness", FakeHarness)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["soak", "--samples", str(tmp_path / "soak.jsonl")])
    assert program.main() == 130
    assert "rollouter" in capsys.readouterr().out

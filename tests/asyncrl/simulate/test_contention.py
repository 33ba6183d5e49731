"""The slowdown of engines and Trainer is found from CPU time alone, whether a run shows both sides alone or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.status.run_status import SCHEMA_VERSION
from asyncrl.simulate.contention import CpuUse, cpu_use, fair_shares, measure_contention, read_cpu_use

WANTED = {"engine-a": 1.0, "replica-a": 0.3, "rollouter": 0.25, "rank-actor-0": 1.0, "trainer": 0.05, "queue": 0.05}
"""Processors that each process of a run uses if nothing makes it wait."""
ENGINES = ("engine-a", "replica-a", "rollouter")
TRAINER = ("rank-actor-0", "trainer")


def used(
    *, engines_s: float, both_s: float, trainer_s: float, cpus: int, other_cpus: float = 0.0
) -> tuple[CpuUse, float]:
    """Return the CPU time of a run, in which both sides had this much work side by side and alone (in seconds without
    contention), and the time that the work side by side took. `other_cpus`: what other processes want."""
    wanted = WANTED | {"others": other_cpus}
    got = fair_shares(wanted, dict.fromkeys(wanted, 1), cpus)
    slowdown = max(WANTED[name] / got[name] for name in WANTED)
    run_s = engines_s + trainer_s + both_s * slowdown
    busy_s = dict.fromkeys(ENGINES, engines_s + both_s) | dict.fromkeys(TRAINER, trainer_s + both_s) | {"queue": run_s}
    return CpuUse({name: WANTED[name] * busy_s[name] for name in WANTED}, cpus, other_cpus), both_s * slowdown


@pytest.mark.parametrize("other_cpus", [0.0, 0.3])
@pytest.mark.parametrize(("engines_s", "both_s", "trainer_s"), [(20, 30, 5), (30, 0, 15), (5, 40, 1), (10, 10, 10)])
def test_two_processors_are_too_few_however_the_run_went(
    engines_s: float, both_s: float, trainer_s: float, other_cpus: float
) -> None:
    use, together_s = used(engines_s=engines_s, both_s=both_s, trainer_s=trainer_s, cpus=2, other_cpus=other_cpus)
    run_s = engines_s + together_s + trainer_s
    found = measure_contention(
        use, engines_s=engines_s, both_s=together_s, trainer_s=trainer_s, run_s=run_s, threads=lambda name: 1
    )
    # The light processes want 0.65 of the two besides the others, the engine and the rank get half of the rest each.
    assert found.engine == pytest.approx(1 / ((2 - 0.65 - other_cpus) / 2), rel=0.02)
    assert found.trainer == pytest.approx(found.engine, rel=0.02)


@pytest.mark.parametrize("cpus", [3, 64])
def test_enough_processors_slow_nothing_down(cpus: int) -> None:
    use, together_s = used(engines_s=10, both_s=20, trainer_s=10, cpus=cpus)
    found = measure_contention(
        use, engines_s=10, both_s=together_s, trainer_s=10, run_s=20 + together_s, threads=lambda name: 1
    )
    assert (found.engine, found.trainer) == (1.0, 1.0)


def test_a_busy_process_cannot_have_wanted_more_than_its_thread() -> None:
    """Figures of a quickstart run on two processors: the rank had 31 s of CPU time in the 56 s in which it computed."""
    cpu_s = {
        "driver": 2.0, "queue": 4.5, "store": 2.1, "rollouter": 16.6, "trainer": 3.0, "replica-a": 24.5,
        "engine-a": 66.5, "rank-actor-0": 31.1,
    }  # fmt: skip
    found = measure_contention(
        CpuUse(cpu_s, 2, 0.29), engines_s=42.1, both_s=49.8, trainer_s=6.7, run_s=101.6, threads=lambda name: 1
    )
    assert found.trainer == pytest.approx(49.8 / (31.1 - 6.7), rel=0.01)
    assert found.engine == pytest.approx(49.8 / (66.5 - 42.1), rel=0.01)


@given(
    wanted=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 4), min_size=1),
    threads=st.integers(1, 4),
    cpus=st.integers(1, 8),
)
def test_shares_are_max_min_fair(wanted: dict[str, float], threads: int, cpus: int) -> None:
    got = fair_shares(wanted, dict.fromkeys(wanted, threads), cpus)
    assert sum(got.values()) == pytest.approx(min(cpus, sum(wanted.values())), abs=1e-9)
    limited = [got[name] for name in wanted if got[name] < wanted[name] - 1e-9]
    assert all(got[name] <= wanted[name] + 1e-9 for name in wanted)
    assert all(share == pytest.approx(max(got.values()), abs=1e-9) for share in limited)


def step(at_s: float, **cpu: float) -> dict[str, Any]:
    shares = {f"health/cpu/{name}": share for name, share in cpu.items()}
    return {"kind": "step", "time/monotonic_s": at_s, "health/machine_cpus": 2.0, "health/machine_cpu": 0.75, **shares}


def test_cpu_time_is_counted_from_the_first_step_on() -> None:
    found = cpu_use([step(10, rollouter=9.0), step(12, rollouter=0.5, trainer=0.1), step(16, rollouter=0.25)])
    assert found is not None and found.cpu_s == {"rollouter": 2.0, "trainer": 0.2} and found.cpus == 2
    assert found.other_cpus == pytest.approx(0.75 * 2 - 2.2 / 6)
    assert cpu_use([{"kind": "step", "time/monotonic_s": 1.0}] * 3) is None


@pytest.mark.parametrize(("nodes", "known"), [(["a", "a"], True), (["a", "b"], False)])
def test_processes_on_several_nodes_share_nothing(tmp_path: Path, nodes: list[str], known: bool) -> None:
    lines = [json.dumps(step(at_s, rollouter=0.5)) for at_s in (1.0, 2.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    processes = [{"part": "rank", "name": f"rank {n}", "pid": 1, "node_id": node} for n, node in enumerate(nodes)]
    state = {
        "schema_version": SCHEMA_VERSION, "written_at": 0.0, "started_at": 0.0, "pid": 1, "phase": "completed",
        "experiment": "e", "mode": "fully_async", "processes": processes,
    }  # fmt: skip
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert (read_cpu_use(tmp_path) is not None) == known

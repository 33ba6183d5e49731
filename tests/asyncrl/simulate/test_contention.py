"""The slowdown of engines and Trainer is found from their waits for processors, even if neither ever works alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.status.run_status import SCHEMA_VERSION
from asyncrl.simulate.contention import MAX_SLOWDOWN, CpuUse, cpu_use, measure_contention, read_cpu_use


def test_a_side_is_slower_by_the_wait_of_its_busiest_process() -> None:
    cpu_s = {"engine-a": 60.0, "replica-a": 20.0, "rollouter": 15.0, "rank-actor-0": 27.0, "trainer": 3.0}
    waited_s = {"engine-a": 10.0, "replica-a": 9.0, "rollouter": 8.0, "rank-actor-0": 30.0, "trainer": 7.0}
    found = measure_contention(CpuUse(cpu_s, waited_s), 40.0, lambda name: 2 if name == "rank-actor-0" else 1)
    assert found.engine == pytest.approx(40 / 30, abs=1e-3)
    assert found.trainer == pytest.approx(40 / 25, abs=1e-3)


@pytest.mark.parametrize(
    ("both_s", "waited_s", "factor"),
    [(40.0, {}, 1.0), (0.0, {"engine-a": 3.0}, 1.0), (1.0, {"engine-a": 3.0}, MAX_SLOWDOWN)],
    ids=["no known wait", "never side by side", "other work made it wait"],
)
def test_factors_have_limits(both_s: float, waited_s: dict[str, float], factor: float) -> None:
    found = measure_contention(CpuUse({"engine-a": 60.0}, waited_s), both_s, lambda name: 1)
    assert (found.engine, found.trainer) == (factor, 1.0)


def step(at_s: float, **cpu: float) -> dict[str, Any]:
    shares = {f"health/{kind}/{name}": share for name, share in cpu.items() for kind in ("cpu", "cpu_wait")}
    return {"kind": "step", "time/monotonic_s": at_s, "health/machine_cpus": 2.0, "health/machine_cpu": 0.75, **shares}


def test_cpu_time_is_counted_from_the_first_step_on() -> None:
    found = cpu_use([step(10, rollouter=9.0), step(12, rollouter=0.5, trainer=0.1), step(16, rollouter=0.25)])
    assert found is not None and found.cpu_s == found.waited_s == {"rollouter": 2.0, "trainer": 0.2}
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

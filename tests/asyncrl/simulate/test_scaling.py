"""The tables of docs/scaling.md are what the simulator computes, and within 20 % of the published figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.simulate.sweep import SimulatedSetting, configurations, simulate_settings
from asyncrl.simulate.trace import read_trace

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "scaling"
THRESHOLDS = ("0", "0.1", "0.3", "0.5")
PUBLISHED_H = {"0": 25 + 53 / 60, "0.1": 19 + 59 / 60, "0.3": 17 + 20 / 60, "0.5": 17 + 22 / 60}
"""Hours of 400 versions in verl's documentation."""
PUBLISHED_SYNC_H = 24 + 16 + 48 / 60


def hours(text: str) -> float:
    found = re.fullmatch(r"(\d+) h (\d\d)", text.strip())
    assert found, text
    return int(found[1]) + int(found[2]) / 60


def rows_of_table(first_cell: str) -> list[list[str]]:
    """Return the cells of the rows of the table in docs/scaling.md whose heading begins with this cell."""
    lines = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def simulated(config: str, trace: str, overrides: tuple[str, ...], *, steps: int | None = None) -> SimulatedSetting:
    speeds = read_trace(EXAMPLES / trace)
    [done] = simulate_settings([{}], configurations(str(EXAMPLES / config), overrides, [{}]), speeds, steps=steps)
    return done


@pytest.fixture(scope="module")
def published_experiment() -> dict[str, SimulatedSetting]:
    runs = {"sync": simulated("verl_7b_colocated.yaml", "verl_7b_h20.yaml", ("mode=sync",), steps=96)}
    for threshold in THRESHOLDS:
        override = f"async_training.staleness_threshold={threshold}"
        runs[threshold] = simulated("verl_7b_split.yaml", "verl_7b_h20.yaml", (override,), steps=96)
    return runs


def test_the_published_table_is_what_the_simulation_gives(published_experiment: dict[str, SimulatedSetting]) -> None:
    baseline, *rows = rows_of_table("setting")
    sync_s = published_experiment["sync"].run_s
    assert hours(baseline[1]) == pytest.approx(PUBLISHED_SYNC_H)
    assert hours(baseline[2]) == pytest.approx(sync_s / 3600, abs=0.02)
    assert [row[0] for row in rows] == [f"`staleness_threshold={one}`" for one in THRESHOLDS]
    for threshold, (_, published, simulated_h, published_ratio, ratio, difference) in zip(
        THRESHOLDS, rows, strict=True
    ):
        run_s = published_experiment[threshold].run_s
        was, now = PUBLISHED_SYNC_H / PUBLISHED_H[threshold], sync_s / run_s
        assert hours(published) == pytest.approx(PUBLISHED_H[threshold])
        assert hours(simulated_h) == pytest.approx(run_s / 3600, abs=0.02)
        assert float(published_ratio) == pytest.approx(was, abs=0.006)
        assert float(ratio) == pytest.approx(now, abs=0.006)
        assert int(difference.removesuffix(" %")) == pytest.approx(100 * (now / was - 1), abs=0.6)
        assert abs(now / was - 1) < 0.2


def test_the_times_are_within_a_fifth_of_the_published_ones(published_experiment: dict[str, SimulatedSetting]) -> None:
    assert published_experiment["sync"].run_s / 3600 == pytest.approx(PUBLISHED_SYNC_H, rel=0.2)
    for threshold, published in PUBLISHED_H.items():
        assert published_experiment[threshold].run_s / 3600 == pytest.approx(published, rel=0.2)


def test_async_loses_with_an_even_split_of_short_answers() -> None:
    splits = (
        ("mode=sync", "rollout.num_replicas=16", "trainer.num_workers=64"),
        (),
        ("rollout.num_replicas=2", "trainer.num_workers=56"),
    )
    done = [simulated("short_answers.yaml", "short_answers_speeds.yaml", split) for split in splits]
    assert done[1].run_s > 1.4 * done[0].run_s > done[0].run_s > done[2].run_s
    for one, (_, time, idle) in zip(done, rows_of_table("64 GPUs"), strict=True):
        assert hours(time) == pytest.approx(one.run_s / 3600, abs=0.02)
        assert int(idle.removesuffix(" %")) == pytest.approx(100 * one.result.engines_idle, abs=0.6)

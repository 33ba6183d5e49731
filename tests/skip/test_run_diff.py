"""Tests of `asyncrl skip diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.core.failures import ConfigError
from skip.run_diff import compare_runs
from tests.fakes import hostile


def write(run_dir: Path, *steps: dict[str, Any], tail: str = "") -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("")
    lines = [json.dumps({"kind": "apply", "version": 1})]
    lines += [json.dumps({"kind": "step", "step": number, **step}) for number, step in enumerate(steps, 1)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
    return run_dir


def step(loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"actor/loss": loss, "actor/grad_norm": 1.0, "rewards": [0.0, 1.0], "timing/step_s": loss * 7, **more}


def asked(capsys: pytest.CaptureFixture[str], one: Path, other: Path, tolerance: float = 0.0) -> tuple[int, Any]:
    code = main(["skip", "diff", str(one), str(other), f"--tolerance={tolerance}", "--json"])
    return code, json.loads(capsys.readouterr().out)["difference"]


def test_equal_runs_are_equal_although_their_timings_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", step(), step(0.25))
    other = write(tmp_path / "other", step(**{"timing/step_s": 9}), step(0.25), step(0.1), tail='{"kind": "st')
    assert asked(capsys, one, other) == (0, None)
    assert main(["skip", "diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.startswith("2 steps are equal, 1 to 2: rewards, actor/loss")


def test_the_first_different_step_is_printed_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", step(), step(0.25), step())
    other = write(tmp_path / "other", step(), step(0.26, rewards=[0.0, 0.5]), step(0.1))
    code, difference = asked(capsys, one, other)
    assert (code, difference["step"], difference["names"]) == (1, 2, ["rewards", "actor/loss"])
    assert (difference["one"]["actor/loss"], difference["other"]["actor/loss"]) == (0.25, 0.26)
    assert main(["skip", "diff", str(one), str(other)]) == 1
    assert "step 2" in capsys.readouterr().out
    assert asked(capsys, one, other, tolerance=1.0)[0] == 0


def test_a_missing_value_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "one", step(**{"critic/loss": 1.0})), write(tmp_path / "other", step())
    assert asked(capsys, one, other)[1]["names"] == ["critic/loss"]
    assert main(["skip", "diff", str(one), str(other)]) == 1
    assert "none" in capsys.readouterr().out


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    one = write(tmp_path / "one", step())
    empty = write(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty/metrics\.jsonl has no step yet"):
        compare_runs(one, empty, 0.0)
    (empty / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigError, match="is damaged"):
        compare_runs(one, empty, 0.0)
    (empty / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no jsonl"):
        compare_runs(empty, one, 0.0)
    later = write(tmp_path / "later")
    (later / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 5}) + "\n")
    with pytest.raises(ConfigError, match="no step in common: 1 to 1 and 5 to 5"):
        compare_runs(one, later, 0.0)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    hostile.damaged({"kind": "step", "step": 1, **step()}).map(hostile.dumps)
    | st.sampled_from(hostile.BROKEN_JSON)
    | st.integers(max_value=-(10**400)).map(
        lambda number: json.dumps({"kind": "step", "step": 1, "actor/loss": number})
    )
)
def test_any_line_of_a_run_is_compared_or_is_an_error(tmp_path_factory: pytest.TempPathFactory, line: str) -> None:
    root = tmp_path_factory.mktemp("runs")
    one, other = write(root / "one", step()), write(root / "other")
    (other / "metrics.jsonl").write_text(f"{line}\n", encoding="utf-8", errors="surrogatepass")
    assert main(["skip", "diff", str(one), str(other)]) in (0, 1, 2)
    assert main(["skip", "diff", str(other), str(one), "--json", "--tolerance=0.1"]) in (0, 1, 2)

"""The backend that docs/training.md gives as an example: found by its entry point, and it meets the contract."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 240


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 30)
def test_the_example_of_the_docs_passes_the_contract_on_two_ranks(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", (ROOT / "docs/training.md").read_text("utf-8"), re.DOTALL))
    (tmp_path / "allreduce_engine.py").write_text(blocks["python"], encoding="utf-8")
    project = tomllib.loads(blocks["toml"])["project"]
    installed = tmp_path / "allreduce_engine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = [f"{name} = {module}" for name, module in project["entry-points"]["asyncrl.engines"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[asyncrl.engines]", *points]) + "\n")

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "trainer.engines.selfcheck"]
    run = subprocess.run(
        [sys.executable, *launcher, "--backend", "allreduce", "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout, run.stderr[-4000:]
    results = json.loads(run.stdout)["results"]
    assert len(results) > 20
    assert [result["detail"] for result in results if not result["passed"]] == []

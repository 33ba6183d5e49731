"""The contract suite on every backend that runs without a GPU, on one rank and on two: one process group each."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainer.engine.contract import checks_of
from trainer.engine.registry import BUILT_IN

DEADLINE_S = 240
SELFCHECK = ("-m", "trainer.engine.selfcheck", "--device", "cpu")
CASES = [
    pytest.param(ranks, backend, check.name, id=f"{backend}-{ranks}-{check.name}")
    for ranks in (1, 2)
    for backend in BUILT_IN
    if ranks == 1 or backend != "local"
    for check in checks_of(backend, "cpu", ranks)
]


def selfcheck(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}") if ranks > 1 else ()
    command = [sys.executable, *launcher, *SELFCHECK, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@cache
def outcomes(ranks: int) -> dict[tuple[str, str], dict[str, Any]]:
    run = selfcheck(ranks, "--json")
    try:
        document = json.loads(run.stdout)
    except ValueError:
        pytest.fail(f"selfcheck on {ranks} ranks ended with {run.returncode}: {run.stdout}\n{run.stderr[-4000:]}")
    assert document["ranks"] == ranks
    assert run.returncode == (0 if all(result["passed"] for result in document["results"]) else 1)
    return {(result["backend"], result["check"]): result for result in document["results"]}


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(("ranks", "backend", "check"), CASES)
def test_contract(ranks: int, backend: str, check: str) -> None:
    result = outcomes(ranks)[backend, check]
    assert result["passed"], result["detail"]


def test_an_unknown_backend_ends_with_2_and_names_the_nearest() -> None:
    run = selfcheck(1, "--backend", "fsdp_2")
    assert run.returncode == 2
    assert "did you mean fsdp2?" in run.stderr


def test_engines_need_neither_ray_nor_vllm() -> None:
    program = (
        "import sys; sys.modules.update(ray=None, vllm=None)\n"
        "import trainer.engine.selfcheck as selfcheck\n"
        "from trainer.engine.registry import BUILT_IN, EngineRegistry\n"
        "for name in BUILT_IN: EngineRegistry.find(name, 'language_model', 'cpu')\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=100)

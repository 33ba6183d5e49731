"""The contract suite on every backend that runs without a GPU, on one rank and on two: one process group each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.engines import dist
from trainer.engines.contract.checks import checks_of
from trainer.engines.contract.setting import write_models
from trainer.engines.registry import BUILT_IN
from trainer.engines.selfcheck import _table, main, run

DEADLINE_S = 240
Outcomes = dict[tuple[str, str], dict[str, Any]]
SELFCHECK = ("-m", "trainer.engines.selfcheck", "--device", "cpu")
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcomes]:
    """Results of all checks by backend and name: on one rank in this process, on two under torchrun."""
    found: dict[int, Outcomes] = {}

    def run(ranks: int) -> Outcomes:
        if ranks not in found:
            results = on_one_rank(tmp_path_factory.mktemp("selfcheck")) if ranks == 1 else on_two_ranks()
            found[ranks] = {(result["backend"], result["check"]): result for result in results}
        return found[ranks]

    return run


def on_one_rank(directory: Path) -> list[dict[str, Any]]:
    write_models(directory)
    assert dist.join(torch.device("cpu"), timeout_s=60)
    try:
        return [asdict(result) for result in run(list(BUILT_IN), "cpu", directory)]
    finally:
        dist.leave()


def on_two_ranks() -> list[dict[str, Any]]:
    process = selfcheck(2, "--json")
    try:
        document = json.loads(process.stdout)
    except ValueError:
        pytest.fail(f"selfcheck ended with {process.returncode}: {process.stdout}\n{process.stderr[-4000:]}")
    assert document["ranks"] == 2
    assert list(document["skipped"]) == ["local"]
    assert process.returncode == (0 if all(result["passed"] for result in document["results"]) else 1)
    return document["results"]


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(("ranks", "backend", "check"), CASES)
def test_contract(outcomes: Callable[[int], Outcomes], ranks: int, backend: str, check: str) -> None:
    result = outcomes(ranks)[backend, check]
    assert result["passed"], result["detail"]


def test_an_unknown_backend_ends_with_2_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    assert main(["--backend", "fsdp_2", "--device", "cpu"]) == 2
    assert "did you mean fsdp2 or fsdp?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_backend_without_its_library_ends_with_2_and_one_line() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "from trainer.engines.selfcheck import main\n"
        "sys.exit(main(['--backend', 'megatron', '--device', 'cpu']))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "trainer.strategy=megatron: it needs megatron-core" in line


@pytest.mark.slow
def test_a_backend_that_cannot_run_on_two_ranks_is_reported_once() -> None:
    """torchrun has an exit code and a report of its own."""
    run = selfcheck(2, "--backend", "local")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("trainer.strategy=local with 2 ranks: it runs in one process") == 1
    assert "exitcode  : 2" in run.stderr


def test_a_missing_device_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "trainer.device=cuda: torch sees no GPU here" in capsys.readouterr().err


def test_the_table_lists_skipped_backends() -> None:
    assert "skip  local " in _table([], {"local": "it runs in one process"})

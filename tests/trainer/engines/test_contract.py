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
from trainer.engine.selfcheck import _table, main

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
    assert list(document["skipped"]) == (["local"] if ranks > 1 else [])
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
    assert "did you mean fsdp2 or fsdp?" in run.stderr


@pytest.mark.slow
def test_a_backend_without_its_library_ends_with_2_and_one_line() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "from trainer.engine.selfcheck import main\n"
        "sys.exit(main(['--backend', 'megatron', '--device', 'cpu']))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "trainer.strategy=megatron: it needs megatron-core" in line


@pytest.mark.slow
def test_what_cannot_run_on_two_ranks_is_said_once() -> None:
    """torchrun has an exit code and a report of its own."""
    run = selfcheck(2, "--backend", "local")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("trainer.strategy=local with 2 ranks: it runs in one process") == 1
    assert "exitcode  : 2" in run.stderr


def test_a_device_that_is_not_there_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "trainer.device=cuda: torch sees no GPU here" in capsys.readouterr().err


def test_what_was_left_out_has_a_line() -> None:
    assert "skip  local " in _table([], {"local": "it runs in one process"})


def test_engines_need_neither_ray_nor_vllm() -> None:
    program = (
        "import sys; sys.modules.update(ray=None, vllm=None)\n"
        "import trainer.engine.selfcheck as selfcheck\n"
        "from trainer.engine.registry import BUILT_IN, EngineRegistry\n"
        "for name in BUILT_IN: EngineRegistry.find(name, 'language_model', 'cpu')\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=100)

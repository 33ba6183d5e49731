"""The contract suite on every backend that runs without a GPU, in process groups of one, two and four ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.selfcheck import ROOT, SELFCHECK_S, selfcheck, selfcheck_document, torchrun
from trainer.engines import dist
from trainer.engines.registry import BUILT_IN
from trainer.selfcheck.__main__ import _table, main, run
from trainer.selfcheck.checks import checks_of
from trainer.selfcheck.setting import write_models

Outcomes = dict[tuple[str, str], dict[str, Any]]
CASES = [
    pytest.param(ranks, backend, check.name, id=f"{backend}-{ranks}-{check.name}")
    for ranks in (1, 2)
    for backend in BUILT_IN
    if ranks == 1 or backend != "local"
    for check in checks_of(backend, "cpu", ranks)
]
ON_SEVERAL_GPUS = (
    "policy_steps_equal_the_reference",
    "groups_of_ranks_with_copies_equal_the_reference",
    "ranks_that_share_layers_give_the_same_values",
    "balanced_experts_equal_the_reference",
    "sequence_parallel_ranks_give_the_same_step",
    "rows_without_a_gradient_may_skip_the_backward_pass",
    "gradients_in_bfloat16_add_up_in_float32",
    "a_pass_that_fails_leaves_no_gradient",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcomes]:
    """Return the results of all checks by backend and name: for one rank in this process, for two ranks under
    torchrun."""
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
    document = selfcheck_document(ranks=2)
    assert document["ranks"] == 2
    assert list(document["skipped"]) == ["local"]
    return document["results"]


@pytest.mark.slow
@pytest.mark.timeout(2 * SELFCHECK_S + 30)
@pytest.mark.parametrize("backend", ["fsdp2", "fsdp", "ddp"])
def test_four_ranks_meet_the_contract(backend: str) -> None:
    """FSDP2 splits what a rank of tensor parallelism has, and sums gradients over groups of several ranks."""
    results = selfcheck_document("--backend", backend, ranks=4)["results"]
    assert not [one for one in results if not one["passed"]]
    only_fsdp2 = {"ranks_that_share_layers_equal_the_reference", "groups_of_ranks_with_copies_equal_the_reference"}
    assert only_fsdp2 & {one["check"] for one in results} == (only_fsdp2 if backend == "fsdp2" else set())


@pytest.mark.timeout(2 * SELFCHECK_S + 30)
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, ON_SEVERAL_GPUS), pytest.param(4, (), marks=pytest.mark.slow)], ids=("2", "4")
)
def test_fsdp2_meets_the_contract_as_it_runs_on_several_gpus(ranks: int, names: tuple[str, ...]) -> None:
    run = torchrun("-m", "tests.trainer.engines.frugal_ranks", *names, ranks=ranks)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-4000:]}"
    count = len(names or checks_of("fsdp2", "cpu", ranks))
    assert f"{count} passed, 0 failed, on {ranks} rank(s)" in run.stdout


@pytest.mark.timeout(SELFCHECK_S + 30)
@pytest.mark.parametrize(("ranks", "backend", "check"), CASES)
def test_a_backend_meets_the_contract(
    outcomes: Callable[[int], Outcomes], ranks: int, backend: str, check: str
) -> None:
    result = outcomes(ranks)[backend, check]
    assert result["passed"], result["detail"]


def test_an_unknown_backend_exits_with_2_and_an_error_that_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    assert main(["--backend", "fsdp_2", "--device", "cpu"]) == 2
    assert "did you mean 'fsdp2'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_backend_without_its_library_exits_with_2_and_one_line() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "from trainer.selfcheck.__main__ import main\n"
        "sys.exit(main(['--backend', 'megatron_layers', '--device', 'cpu']))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "trainer.strategy=megatron_layers: it needs megatron-core" in line


@pytest.mark.slow
def test_a_backend_that_cannot_run_on_two_ranks_is_reported_once() -> None:
    """torchrun itself adds an exit code and a report."""
    run = selfcheck("--backend", "local", ranks=2)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("trainer.strategy=local with 2 ranks: it runs in one process") == 1
    assert "exitcode  : 2" in run.stderr


def test_a_missing_device_exits_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "trainer.device=cuda: torch sees no GPU here" in capsys.readouterr().err


def test_the_table_lists_skipped_backends() -> None:
    assert "skip  local " in _table([], {"local": "it runs in one process"})


@pytest.mark.slow
@pytest.mark.timeout(SELFCHECK_S + 30)
def test_the_backend_of_the_docs_is_found_and_meets_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", (ROOT / "docs/training.md").read_text("utf-8"), re.DOTALL))
    (tmp_path / "allreduce_engine.py").write_text(blocks["python"], encoding="utf-8")
    project = tomllib.loads(blocks["toml"])["project"]
    installed = tmp_path / "allreduce_engine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: allreduce-engine\nVersion: 1.0\n")
    points = [f"{name} = {engine}" for name, engine in project["entry-points"]["asyncrl.engines"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[asyncrl.engines]", *points]) + "\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    results = selfcheck_document("--backend", "allreduce", ranks=2)["results"]
    assert len(results) > 20
    assert [result["detail"] for result in results if not result["passed"]] == []

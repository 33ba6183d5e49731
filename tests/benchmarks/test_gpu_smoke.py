"""The table of `benchmarks.gpu_smoke`: skipped rows, rows that fail, crash and hang, and what the rows launch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.problems import errors
from asyncrl.config.resources.plan import GIB, MachineResources, make_plan
from asyncrl.config.sections import run as run_rules
from asyncrl.config.sections import trainer_rules
from benchmarks import architectures, gpu_smoke, trainer, weight_sync
from benchmarks.gpu_smoke import RowResult, SmokeMachine, SmokeRow

RUNS = SmokeRow("any", lambda gpus, directory: {})
BY_NAME = {row.name: row for row in gpu_smoke.ROWS}


@pytest.mark.parametrize(
    ("row", "machine", "reason"),
    [
        (RUNS, SmokeMachine(1), ""),
        (RUNS, SmokeMachine(0), "this machine shows no GPU"),
        (
            RUNS,
            SmokeMachine(0, "torch"),
            "the installed torch is a build for CPUs, which leaves the GPUs unused (run `make setup GPU=1`)",
        ),
        (BY_NAME["weights: nccl"], SmokeMachine(1), "needs 2 GPUs (one broadcasts, and the engine has the other)"),
        (BY_NAME["weights: nccl"], SmokeMachine(2), ""),
        (BY_NAME["several ranks"], SmokeMachine(3), "needs 4 GPUs (two ranks and two engines have one each)"),
        (
            SmokeRow("x", RUNS.measure, package="no_such_module", install="asyncrl[x]"),
            SmokeMachine(1),
            "pip install 'asyncrl[x]'",
        ),
        (BY_NAME["weights: ipc"], SmokeMachine(8), "not built: "),
        (BY_NAME["quickstart"], SmokeMachine(1, capability=(7, 0)), "CUDA 13 needs GPUs of compute capability 7.5"),
        (BY_NAME["quickstart"], SmokeMachine(1, capability=(7, 5)), ""),
        (
            BY_NAME["varlen attention"],
            SmokeMachine(1, capability=(7, 5)),
            "bfloat16 needs GPUs of compute capability 8.0 or newer, and the oldest one here has 7.5",
        ),
        (BY_NAME["bfloat16"], SmokeMachine(1, capability=(8, 0)), ""),
        (BY_NAME["FP8"], SmokeMachine(1, capability=(8, 6)), "FP8 needs GPUs of compute capability 8.9 or newer"),
        (BY_NAME["FP8"], SmokeMachine(1, capability=(10, 0)), ""),
    ],
)
def test_why_a_row_is_skipped(row: SmokeRow, machine: SmokeMachine, reason: str) -> None:
    found = gpu_smoke.skip_reason(row, machine)
    assert reason in found and bool(reason) == bool(found)


def test_the_machine_has_the_capability_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_smoke, "visible_gpus", lambda: 4)
    monkeypatch.setattr(gpu_smoke, "cpu_build", lambda: "")
    monkeypatch.setattr(gpu_smoke, "gpu_capability", lambda: (7, 5))
    assert gpu_smoke.find_machine(2) == SmokeMachine(2, capability=(7, 5))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The time limit of each row that runs, by its name. Each row takes 0.4 of its `shortest_s`, by a clock that only
    rows move."""
    found: dict[str, float] = {}
    now = 0.0

    def run_row(name: str, command: Any, scratch: Path, limit_s: float, gpus: int) -> RowResult:
        nonlocal now
        found[name] = limit_s
        now += 0.4 * BY_NAME[name].shortest_s
        return RowResult(name, "passed")

    monkeypatch.setattr(gpu_smoke, "run_row", run_row)
    monkeypatch.setattr(gpu_smoke, "is_installed", lambda package: True)
    monkeypatch.setattr(gpu_smoke.time, "monotonic", lambda: now)
    return found


def run_all(minutes: float) -> list[RowResult]:
    return list(gpu_smoke.run_rows(gpu_smoke.ROWS, SmokeMachine(8), minutes, lambda row, scratch: []))


def test_the_default_minutes_suffice_for_all_rows(limits: dict[str, float]) -> None:
    run_all(gpu_smoke._parser().parse_args([]).minutes)
    assert list(limits) == [name for name, row in BY_NAME.items() if row.measure]
    assert all(BY_NAME[name].shortest_s <= limit <= 900 for name, limit in limits.items())
    launches, large = (BY_NAME[name].shortest_s for name in ("quickstart", "torch_compile"))
    assert launches >= 240 and large >= 400, "imports of vLLM, the model's build and compilation take minutes"


def test_few_minutes_run_the_rows_for_which_they_suffice(limits: dict[str, float]) -> None:
    results = run_all(10)
    assert list(limits)[:2] == ["quickstart", "run, 0.5B"] and len(limits) > 3
    began = 0.0
    for name, limit in limits.items():
        assert BY_NAME[name].shortest_s <= limit <= 600 - began
        began += 0.4 * BY_NAME[name].shortest_s
    (last,) = [one for one in results if one.name == "run, 1.5B"]
    assert last.result == "skipped"
    assert last.reason.startswith("10 minutes are too few for it: it may need 400 s, and ")


@pytest.mark.parametrize(
    ("number", "visible", "devices"),
    [(2, None, "0,1"), (1, "3,5", "3"), (2, " GPU-a, GPU-b,GPU-c", "GPU-a,GPU-b"), (0, "", "")],
)
def test_a_row_sees_the_first_gpus(number: int, visible: str | None, devices: str) -> None:
    assert gpu_smoke.first_gpus(number, visible) == devices


PROGRAMS = {
    "passes": "write('figures', {'tokens/s': 2.5, 'visible': os.environ['CUDA_VISIBLE_DEVICES']})",
    "fails": "write('error', 'no kernel | for this GPU')",
    "crashes": "print('about to', flush=True); os.kill(os.getpid(), 11)",
    "exits": "print('CUDA error: out of memory'); sys.exit(3)",
    # The child is in a session of its own, as the processes of Ray are.
    "hangs": "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid, flush=True); "
    "child.wait()",
}
BEGIN = """
import json, os, subprocess, sys
def write(kind, value):
    with open(sys.argv[1] + "/result.json", "w") as file: json.dump({kind: value}, file)
"""


def fake(row: SmokeRow, scratch: Path) -> list[str]:
    return [sys.executable, "-c", BEGIN + PROGRAMS[row.name], str(scratch)]


def test_a_row_that_crashes_or_hangs_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    run_row = gpu_smoke.run_row

    def limited(name: str, command: list[str], scratch: Path, limit_s: float, gpus: int) -> RowResult:
        return run_row(name, command, scratch, 3.0 if name == "hangs" else limit_s, gpus)

    monkeypatch.setattr(gpu_smoke, "run_row", limited)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["fails", "crashes", "exits", "hangs", "passes"]
    rows = [SmokeRow(name, RUNS.measure) for name in names]
    rows.insert(1, SmokeRow("absent", missing="there is no such key"))
    began = time.monotonic()
    found = {one.name: one for one in gpu_smoke.run_rows(rows, SmokeMachine(2), 10, fake)}
    assert time.monotonic() - began < 60
    assert list(found) == ["fails", "absent", *names[1:]]
    assert [one.result for one in found.values()] == ["failed", "skipped", "failed", "failed", "failed", "passed"]
    assert found["fails"].reason == "no kernel | for this GPU"
    assert found["absent"].reason == "not built: there is no such key"
    assert found["crashes"].reason == "signal 11 ended its process; last line: about to"
    assert found["exits"].reason == "its process ended with exit code 3; last line: CUDA error: out of memory"
    assert found["hangs"].reason.startswith("it did not end within 3 s; last line: ")
    child = int(found["hangs"].reason.rpartition(" ")[2])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert found["passes"].figures == {"tokens/s": 2.5, "visible": "0,1"}


def test_the_table_is_markdown() -> None:
    facts = {
        "gpus": ["H100", "H100"],
        "versions": {"torch": "2.13.0", "vllm": "0.32.0"},
        "time": "2026-01-01T00:00:00Z",
    }
    results = [
        RowResult("a", "passed", {"tokens/s": 12345.6, "MFU": 0.41234, "GB": None, "checks": 3}, seconds=61.2),
        RowResult("b", "failed", reason="x | y", seconds=1.0),
        RowResult("c", "skipped", reason="no GPU"),
    ]
    assert list(gpu_smoke.markdown(results, facts)) == [
        "2 x H100; torch 2.13.0, vllm 0.32.0; 2026-01-01T00:00:00Z",
        "",
        "| check | result | figures, error or reason | seconds |",
        "|---|---|---|---|",
        "| a | passed | tokens/s 12,346, MFU 0.412, checks 3 | 61 |",
        "| b | failed | x \\| y | 1 |",
        "| c | skipped | no GPU | – |",
    ]


@pytest.mark.parametrize(("results", "code"), [(["passed", "skipped"], 0), (["skipped"], 0), (["failed", "passed"], 1)])
def test_the_exit_code_says_whether_a_row_failed(
    results: list[Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_smoke, "run_rows", lambda *args: iter([RowResult(f"{one}", one) for one in results]))
    monkeypatch.setattr(sys, "argv", ["gpu_smoke", "--json", str(tmp_path / "smoke.json")])
    assert gpu_smoke.main() == code
    assert [row["result"] for row in json.loads((tmp_path / "smoke.json").read_text())["rows"]] == results


def test_without_a_gpu_every_row_is_skipped_for_its_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_smoke", "--minutes", "1", "--json", str(tmp_path / "smoke.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "smoke.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(BY_NAME)
    for row in rows:
        reason = "this machine shows no GPU" if BY_NAME[row["name"]].measure else "not built: "
        assert row["result"] == "skipped" and row["reason"].startswith(reason)
        assert f"| {row['name']} | skipped | {row['reason']} | – |" in done.stdout
        assert f"{row['name']}: skipped: {row['reason']}\n" in done.stderr
    wrong = subprocess.run([*command, "--gpus", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2 and "'0' is not a number of 1 or more" in wrong.stderr


# ------------------------------------------------------------------------------------------------ what rows run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of all launches, each of which leaves the records of a run."""
    found: list[list[str]] = []

    def run(*arguments: str) -> None:
        found.append(list(arguments))
        (run_dir,) = (Path(one.partition("=")[2]) for one in arguments if one.startswith("run_dir="))
        run_dir.mkdir(parents=True)
        step = {"kind": "step", "timing/step_s": 2.0, "timing/wait_samples_s": 1.0, "actor/mfu": 0.25}
        lines = [
            {"kind": "apply", "weight_sync/mismatch_kl": 1e-6, "weight_sync/broadcast": 1.0},
            step | {"time/monotonic_s": 12.0, "rollout/mismatch_kl": 2e-6},
            step | {"time/monotonic_s": 20.0, "rollout/mismatch_kl": 3e-6, "actor/mfu": 0.75},
        ]
        (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        summary = {
            "idle": {"trainer": 0.5, "rollouter": 0.1}, "staleness": {"mean": 0.0}, "tokens": {"trained": 5000},
        }  # fmt: skip
        (run_dir / "summary.json").write_text(json.dumps(summary))
        (run_dir / "events").mkdir()
        (run_dir / "events" / "rollouter.jsonl").write_text('{"event": "gpus.lent"}\n{"event": "step"}\n')
        used = [{"event": "gpu.memory", "used_bytes": used} for used in (8_000_000_000, 68_000_000_000, 9_000_000_000)]
        (run_dir / "events" / "rank-actor-0.jsonl").write_text("\n".join(map(json.dumps, used)))

    monkeypatch.setattr(gpu_smoke, "run_asyncrl", run)
    for rules in (run_rules, trainer_rules):
        monkeypatch.setattr(rules, "visible_gpus", lambda: 8)
    return found


FROM_EVENTS: dict[str, dict[str, Any]] = {
    "sleep and wake": {"lowest GB in use": 8.0, "highest GB in use": 68.0},
    "lent GPUs": {"loans": 1},
}


LAUNCHES = (
    "quickstart",
    "bfloat16",
    "CUDA graphs",
    "speculative decoding",
    "FP8",
    "run, 0.5B",
    "run, 1.5B",
    "sleep and wake",
    "lent GPUs",
)


@pytest.mark.parametrize(
    ("name", "gpus"), [(name, gpus) for name in LAUNCHES for gpus in (1, 8) if gpus >= BY_NAME[name].gpus]
)
def test_rows_launch_valid_configurations(
    name: str, gpus: int, launched: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, at_size = BY_NAME[name], name.startswith("run, ")
    shared = name == "sleep and wake" or (at_size and gpus == 1)
    monkeypatch.setattr("benchmarks.models.make_qwen", lambda path, shape: "asyncrl://quickstart")
    assert row.measure is not None
    figures = row.measure(gpus, tmp_path)
    shutil.rmtree(tmp_path / "run")  # a launch refuses to overwrite it
    ((command, mode, *overrides),) = launched
    assert (command, mode) == ("launch", "sync" if shared else "fully_async")
    source = gpu_smoke.ON_POLICY if gpu_smoke.ON_POLICY in overrides else None
    outcome = check_config(source, [one for one in overrides if one != source], mode=mode)
    config = outcome.require()
    assert errors(outcome.problems) == [] and config.takes_turns == shared
    assert config.trainer.device == ("cuda" if at_size else "auto" if shared or gpus == 8 else "cpu")
    assert (config.rollout.enforce_eager, config.rollout.dtype) == {
        "quickstart": (True, "float32"),
        "sleep and wake": (True, "float32"),
        "lent GPUs": (True, "float32"),
        "bfloat16": (True, "bfloat16"),
        "speculative decoding": (True, "bfloat16"),
        "FP8": (True, "bfloat16"),
    }.get(name, (False, "bfloat16"))
    assert config.rollout.num_replicas == (7 if at_size and gpus == 8 else 1)
    assert config.rollout.quantization == ("fp8_per_channel" if name == "FP8" else None)
    computed = "FP8" if config.rollout.quantization else config.rollout.dtype
    assert row.requires == ("CUDA 13" if computed == "float32" else computed)
    on_policy = 3e-6 if source else None
    assert figures == {
        "Trainer": "on the CPU" if gpus == 1 and not shared else "on a GPU",
        "tokens/s": 500.0, "MFU": 0.5, "Trainer idle": 0.5, "engines idle": 0.1, "KL of texts": 1e-6,
        "KL of samples": on_policy, "broadcast share": 1.0, **FROM_EVENTS.get(name, {}),
    }  # fmt: skip
    assert config.lends_gpus == (name == "lent GPUs")


@pytest.mark.parametrize(
    ("name", "gpus", "used", "ranks", "backend"),
    [
        ("several ranks", 4, 4, 2, "object_store"),
        ("several ranks", 8, 8, 4, "object_store"),
        ("several ranks, nccl", 5, 4, 2, "nccl"),
        ("several ranks, nccl", 8, 8, 4, "nccl"),
        ("several ranks, colocated", 2, 2, 2, "object_store"),
        ("several ranks, colocated", 8, 2, 2, "object_store"),
    ],
)
def test_rows_launch_several_ranks(
    name: str, gpus: int, used: int, ranks: int, backend: str, launched: list[list[str]], tmp_path: Path
) -> None:
    row, shared = BY_NAME[name], name.endswith("colocated")
    assert row.measure is not None
    assert not gpu_smoke.skip_reason(row, SmokeMachine(gpus)) and gpu_smoke.skip_reason(row, SmokeMachine(row.gpus - 1))
    figures = row.measure(gpus, tmp_path)
    assert (figures["Trainer"], figures["ranks"], figures["engines"]) == ("on a GPU", ranks, ranks)
    shutil.rmtree(tmp_path / "run")
    ((_, mode, *overrides),) = launched
    outcome = check_config(None, overrides, mode=mode)
    config = outcome.require()
    assert errors(outcome.problems) == [] and config.takes_turns == shared
    assert (config.trainer.num_workers, config.rollout.num_replicas) == (ranks, ranks)
    assert (config.trainer.strategy, config.trainer.device, config.trainer.dtype) == ("fsdp2", "cuda", "bfloat16")
    assert (config.rollout.device, config.weight_sync.backend) == ("cuda", backend)
    machine = MachineResources(64, gpus, 1000 * GIB)
    assert make_plan(config, machine, num_parameters=1_000_000, num_prompts=1000).num_gpus == used


def test_a_version_without_a_broadcast_fails_the_row(
    launched: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_launch = gpu_smoke.run_asyncrl

    def run(*arguments: str) -> None:
        fake_launch(*arguments)
        file = tmp_path / "run" / "metrics.jsonl"
        file.write_text(file.read_text() + '\n{"kind": "apply", "weight_sync/broadcast": 0.5}')
        late = {"event": "sync.fallback", "version": 3, "reason": "rank 0 did not take part within 60 s"}
        (tmp_path / "run" / "events" / "rollouter-2.jsonl").write_text(json.dumps(late))

    monkeypatch.setattr(gpu_smoke, "run_asyncrl", run)
    gpu_smoke.measure_row("several ranks, nccl", tmp_path)
    (error,) = json.loads((tmp_path / "result.json").read_text()).values()
    assert error == "engines got versions without a broadcast: version 3: rank 0 did not take part within 60 s"


@pytest.mark.parametrize(
    ("name", "error"),
    [("sleep and wake", "the ranks reported no GPU memory"), ("lent GPUs", "the Trainer lent no GPU")],
)
def test_a_row_fails_without_the_events_that_it_reports(
    name: str, error: str, launched: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_smoke, "_events", lambda directory, name: [])
    measure = BY_NAME[name].measure
    assert measure is not None
    with pytest.raises(RuntimeError, match=error):
        measure(1, tmp_path)


def test_a_launch_that_fails_gives_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: str) -> None:
        raise RuntimeError(
            "asyncrl launch exited with 1:\nfailed after 0:16: step 0\nValueError: no kernel\nsamples  0"
        )

    monkeypatch.setattr(gpu_smoke, "run_asyncrl", fail)
    gpu_smoke.measure_row("quickstart", tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == {"error": "ValueError: no kernel"}


def test_rows_of_other_benchmarks_use_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def updates(cases: list[Any], peak: float) -> list[dict[str, Any]]:
        asked.append((cases[0].device, dict(cases[0].settings), peak))
        row = {"tokens_per_s": 9.0, "plain_tokens_per_s": 5.0, "mfu": 0.4, "peak_GB": 7.0}
        return [row | {"tokens_per_s": 8.0}, row]

    def synced(name: str, rounds: int, backend: str) -> dict[str, Any]:
        times = {"publish_ms": 3.0, "applied_ms": 9.0, "pause_ms": 4.0, "load_ms": 2.0, "device_copy_ms": 0.5}
        asked.append((name, backend))
        return {"MB": 100.0} | times

    def checked(name: str, size: int, directory: Path, *overrides: str, limits: tuple[float, float]) -> dict[str, Any]:
        asked.append((name, size, overrides, limits))
        return {"result": "right" if size == 1 else "wrong weights", "updates": 4, "KL of texts": 0, "KL of samples": 0}

    monkeypatch.setattr(trainer, "measure", updates)
    monkeypatch.setattr(trainer, "device_tflops", lambda: 989.4)
    monkeypatch.setattr(weight_sync, "measure", synced)
    monkeypatch.setattr(architectures, "check", checked)

    def figures(name: str) -> dict[str, Any]:
        measure = BY_NAME[name].measure
        assert measure is not None
        return measure(2, tmp_path)

    assert figures("Liger") == {
        "packed tokens/s": 9.0, "padded tokens/s": 8.0, "plain loop tokens/s": 5.0, "packed MFU": 0.4, "packed GB": 7.0,
    }  # fmt: skip
    assert figures("varlen attention") == figures("Liger")
    assert (figures("weights: disk")["load GB/s"], figures("weights: object_store")["cudaMemcpy GB/s"]) == (50.0, 200.0)
    assert figures("weights of experts (MoE)")["updates"] == 4
    assert figures("latent attention (MLA)")["updates"] == 4
    with pytest.raises(RuntimeError, match="wrong weights"):
        figures("engine with tensor parallelism")
    cuda = ("cuda", {"use_liger": True}, 989.4)
    in_bfloat16 = ("trainer.device=cpu", "rollout.dtype=bfloat16")
    assert asked == [
        cuda, ("cuda", {}, 989.4), cuda, ("0.5B", "disk"), ("0.5B", "object_store"),
        ("Qwen3Moe", 1, in_bfloat16, gpu_smoke.LIMITS), ("DeepseekV3", 1, in_bfloat16, gpu_smoke.MLA_LIMITS),
        ("Qwen2", 2, in_bfloat16, gpu_smoke.LIMITS),
    ]  # fmt: skip


def test_a_selfcheck_passes_only_if_all_its_checks_do() -> None:
    checks = [{"backend": name, "check": "c", "passed": True, "detail": ""} for name in ("ddp", "fsdp2", "fsdp2")]
    assert gpu_smoke.selfcheck_figures(json.dumps({"results": checks}), "") == {"ddp checks": 1, "fsdp2 checks": 2}
    checks[1] |= {"passed": False, "detail": "rank 0: off by 2"}
    with pytest.raises(RuntimeError, match="1 of 3 checks failed: fsdp2: c: rank 0: off by 2"):
        gpu_smoke.selfcheck_figures(json.dumps({"results": checks}), "")
    with pytest.raises(RuntimeError, match=r"^trainer\.device=cuda: torch sees no GPU here$"):
        gpu_smoke.selfcheck_figures("", "W1125 04:00 run.py\n***\ntrainer.device=cuda: torch sees no GPU here\nTrace")

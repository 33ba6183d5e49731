"""Measure tokens per second of an update of the training engine, against a plain loop on the same batch.

    engine  rows -> batch -> micro-batches -> loss -> gradient, summed over ranks -> clipping -> AdamW
    plain   rows -> padded tensors -> transformers, loss, backward -> clipping -> AdamW    (benchmarks.plain_trainer)

On CPU: random Llamas of 1M and 135M parameters, in float32. One rank is `local` with one thread. Two ranks are `fsdp2`
with one thread each; the plain loop then has two threads in one process. Both layouts of the engine (padded
micro-batches, and packed ones without padding) and the plain loop are set up together and alternate. In the first
round, a warm-up, their losses have to agree. Rates are medians over rounds; `ratio` is engine / plain.

With a GPU: Qwen-like models of 0.5B and 1.5B parameters with random weights, bfloat16 computation with float32 master
weights, and batches of 16k tokens. The methods run one after another, so that each has the whole memory. `mfu` counts 6
operations for each parameter (without input embeddings) and token, and 6 x layers x width x length^2 for causal
attention.

Lengths: `equal` gives all responses the same length, `long-tailed` draws lognormal ones with the same mean. `tokens`
are prompt and response tokens without padding, for every method.

    python -m benchmarks.trainer --json trainer.json
    python -m benchmarks.trainer --models 1M --lengths long-tailed --rounds 9
    python -m benchmarks.trainer --quick        # a smoke test with smaller batches and two rounds
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import QWEN_SHAPES, SHAPES, make_llama, make_qwen
from benchmarks.plain_trainer import SIGMAS, Workload
from benchmarks.report import arguments, report
from benchmarks.updates import UpdateCase, UpdateTimes, take_turns
from trainer.engines.compute.flops import peak_flops

CPU = {
    "1M": Workload(rows=32, prompt_tokens=32, mean_tokens=128, longest_tokens=1500, micro_batch_tokens=4096),
    "135M": Workload(rows=12, prompt_tokens=24, mean_tokens=64, longest_tokens=1000, micro_batch_tokens=2048),
}
GPU = {
    "0.5B": Workload(rows=16, prompt_tokens=256, mean_tokens=768, longest_tokens=8000, micro_batch_tokens=16384),
    "1.5B": Workload(rows=16, prompt_tokens=256, mean_tokens=768, longest_tokens=8000, micro_batch_tokens=16384),
}


def main() -> None:
    parser = arguments(__doc__, "trainer")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto (default) uses a GPU if there is one"
    )
    parser.add_argument(
        "--models", nargs="+", choices=[*CPU, *GPU], help="models to measure (default: all of the device)"
    )
    parser.add_argument("--lengths", nargs="+", choices=list(SIGMAS), default=list(SIGMAS), help="default: both")
    parser.add_argument(
        "--ranks", nargs="+", type=int, choices=(1, 2), help="number of ranks (default: 1 and 2 on CPU, 1 on a GPU)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each method (default 5)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, two rounds, the smaller model")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="peak TFLOPS of the GPU in bfloat16, for a GPU that this benchmark does not know",
    )
    options = parser.parse_args()
    device = _device(options.device)
    workloads = GPU if device == "cuda" else CPU
    if device == "cuda" and 2 in (options.ranks or ()):
        parser.error("--ranks 2: on GPUs only one rank is supported, because the plain loop uses only one GPU")
    names = options.models or list(workloads)[: 1 if options.quick else None]
    if unfit := [name for name in names if name not in workloads]:
        parser.error(f"{', '.join(unfit)}: not measured on {device}; the choices are {', '.join(workloads)}")
    cases = [
        UpdateCase(
            name,
            device,
            ranks,
            lengths,
            _smaller(workloads[name]) if options.quick else workloads[name],
            2 if options.quick else options.rounds,
        )
        for name in names
        for ranks in options.ranks or ((1,) if device == "cuda" else (1, 2))
        for lengths in options.lengths
    ]
    peak = options.peak_tflops or device_tflops() if device == "cuda" else None
    rows = measure(cases, peak)
    report("trainer", rows, options.json, aim="aim: ratio at least 1.0; packed at least 1.5 on long-tailed lengths")


def measure(cases: Sequence[UpdateCase], peak_tflops: float | None = None) -> list[dict[str, Any]]:
    """Return two table rows for each case: padded and packed."""
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for number, case in enumerate(cases):
            path = Path(directory) / case.model
            if not path.exists():
                _make(case, path)
            measured = take_turns(case, path, Path(directory) / f"case_{number}")
            table += [_row(case, layout, measured, peak_tflops) for layout in ("padded", "packed")]
    return table


def _row(case: UpdateCase, layout: str, measured: UpdateTimes, peak_tflops: float | None) -> dict[str, Any]:
    ours = measured.tokens / statistics.median(measured.times_s[layout])
    plain = measured.tokens / statistics.median(measured.times_s["plain"]) if measured.times_s["plain"] else None
    row: dict[str, Any] = {
        "model": case.model,
        "engine": f"local, {case.device}" if case.ranks == 1 else f"fsdp2 x {case.ranks}, {case.device}",
        "lengths": case.lengths,
        "layout": layout,
        "tokens": measured.tokens,
        "tokens_per_s": ours,
        "plain_tokens_per_s": plain,
        "ratio": ours / plain if plain else None,
    }
    if case.device == "cuda":
        achieved = measured.flops / measured.tokens * ours
        row["mfu"] = achieved / (1e12 * peak_tflops) if peak_tflops else None
        row["peak_GB"] = measured.peak_bytes[layout] / 1e9
        row["plain_peak_GB"] = measured.peak_bytes["plain"] / 1e9
    return row


def _make(case: UpdateCase, path: Path) -> None:
    if case.device == "cuda":
        make_qwen(path, QWEN_SHAPES[case.model])
    else:
        make_llama(path, SHAPES[case.model])


def _smaller(workload: Workload) -> Workload:
    return replace(workload, rows=workload.rows // 4)


def _device(wanted: str) -> str:
    import torch

    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def device_tflops() -> float | None:
    """Return the peak TFLOPS of the GPU in bfloat16; None if it is unknown."""
    import torch

    peak = peak_flops(torch.cuda.get_device_name())
    return None if peak is None else peak / 1e12


if __name__ == "__main__":
    main()

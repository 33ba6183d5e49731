"""Samples per second through queue and journal, at the size of the samples in `benchmarks.scale.glue`."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.queue import StreamRunner
from benchmarks.report import Table
from benchmarks.running import alternating, local_ray, print_progress

NUM_BYTES = 5_000
"""Size of the arrays of 8 responses of 60 tokens."""


def measure_queue(samples: int, rounds: int) -> Table:
    """Return a row with and one without the journal; rates are medians over rounds."""
    rates: dict[str, list[float]] = {"journal on": [], "journal off": []}
    print_progress("queue")
    with local_ray("bench-scale-queue"), tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="scale-benchmark-") as root:
        one_round = StreamRunner(Path(root))
        for counts, transport in alternating(list(rates), rounds):
            rate, _ = one_round(transport, NUM_BYTES, samples)
            if counts:
                rates[transport].append(rate)
    return [
        {"through": name, "samples/s": statistics.median(of), "min": min(of), "max": max(of)}
        for name, of in rates.items()
    ]

"""Measure replay against generation, record files against `torch.save`, and the cost of recording.

    replay     samples from real engines behind Ray Serve against the same samples from their records, with the same
               concurrency: the quickstart (its model, prompts, sampling and n), and a sample of 16 responses of 8,192
               tokens
    files      writing and reading records, from `Generated` to `Generated`, against torch.save and
               torch.load(weights_only=True) of tensors and of the same samples: called directly, and from an event
               loop through a `skip.file_thread.FileThread` as the role does it (`file thread`)
    waits      what an event loop waits for (records, turns in the turn log, the trajectory dump) through a thread of
               one's own and through aiofiles: microseconds per sample, also of CPU in the process and on the event
               loop's thread
    loop       how late a 1 ms timer is on the event loop, idle and while 64 samples are recorded continuously
    disabled   nanoseconds that `SkipManager.annotate` adds to a call while no role is enabled

The variants alternate within one run. Rates are medians over rounds, ratios are medians of the ratios of neighbouring
rounds, lateness is a percentile over all rounds. No variant calls fsync, and reads come from the page cache.

On ext4, creating a file takes 1 ms instead of 20 µs near recently deleted files, because ext4 searches their inodes for
a free one. So the benchmark deletes files only at its end, lets ext4 place the directory of each round anywhere
(`chattr +T`), and reports the time to create an empty file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Table, arguments, positive, report_tables
from benchmarks.skip.files import empty_file_us, file_system, measure_files
from benchmarks.skip.loop import measure_disabled, measure_loop
from benchmarks.skip.replay import measure_replay
from benchmarks.skip.samples import SIZES
from benchmarks.skip.waits import measure_waits

FILE_ROUNDS = 8
"""Rounds of `files` for each round of `--rounds`, because they are short."""
CALLS = 20_000
"""Number of calls of a disabled annotation in a round."""
AIMS = {
    "replay": "replay at least 50 times as fast as generation",
    "files": "at least as fast as torch.save and torch.load: 1 or more",
    "waits": "a thread where aiofiles takes more than 1.5 times as much CPU at one of the sizes, otherwise aiofiles",
    "loop": "less than 5 ms added to the 99th percentile",
    "disabled": "less than 1,000 ns added",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "skip")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="rounds of each measurement except the long generation (default 5)"
    )
    parser.add_argument(
        "--no-engine", action="store_true", help="measure only files, loop and annotation, without engines"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a directory on the disk to measure (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if not (options.dir.is_dir() and os.access(options.dir, os.W_OK)):
        parser.error(f"argument --dir: {options.dir} is not a writable directory")
    tables: dict[str, Table] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-skip-", dir=options.dir) as scratch:
        directory = Path(scratch)
        if shutil.which("chattr"):
            subprocess.run(["chattr", "+T", scratch], check=False, capture_output=True)
        facts: dict[str, Any] = {
            "directory": str(options.dir),
            "file_system": file_system(directory),
            "empty_file_us": empty_file_us(directory),
        }
        if not options.no_engine:
            tables["replay"] = measure_replay(directory, options.rounds)
        tables["files"] = measure_files(directory, SIZES, FILE_ROUNDS * options.rounds)
        tables["waits"] = measure_waits(directory, SIZES, FILE_ROUNDS * options.rounds)
        tables["loop"] = measure_loop(directory, SIZES, options.rounds)
    tables["disabled"] = measure_disabled(10 * options.rounds, CALLS)
    report_tables("skip", tables, options.json, aims=AIMS, rounds=options.rounds, **facts)


if __name__ == "__main__":
    main()

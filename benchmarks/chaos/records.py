"""What a run has left on disk, as `accounts` want it. Blocking."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from asyncrl.journal import read_books, read_head, read_samples
from asyncrl.run_dir import JOURNAL, SAMPLES
from asyncrl.turn_files import read_turns
from asyncrl.types import SampleId
from benchmarks.chaos.accounts import Accounts, Fate
from trainer.record import read_trained


class Figures(NamedTuple):
    samples: dict[str, int]
    """By state, and of the dropped by reason."""
    steps: int
    """Optimizer steps taken, those that were given up included."""
    lineages: int


class TurnKeeper:
    """Keeps turn logs that the run deletes once it does not need them: by a second name for the same file."""

    def __init__(self, run_dir: Path, keep_in: Path) -> None:
        """`keep_in`: on the same file system."""
        self._run_dir = run_dir
        self._root = keep_in
        self._kept: dict[int, str] = {}
        """By inode: a name is used again only after a new incarnation."""

    def look(self) -> None:
        """Take note of the logs that are there now."""
        target = self._root / SAMPLES
        with suppress(FileNotFoundError), os.scandir(self._run_dir / SAMPLES) as entries:
            for entry in entries:
                if entry.name.startswith("turns-") and entry.inode() not in self._kept:
                    target.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError, FileExistsError):
                        os.link(entry.path, target / entry.name)
                        self._kept[entry.inode()] = entry.name

    def turns(self) -> list[tuple[SampleId, str]]:
        """Every turn in them, in order."""
        self.look()
        return [(turn.sample_id, turn.key) for turn in read_turns(self._root)]


def read_accounts(run_dir: Path, turns: Sequence[tuple[SampleId, str]]) -> tuple[Accounts, Figures]:
    """Of a run that has ended.

    Raises:
        ConfigError: its journal is damaged, or there is none.
    """
    fates = [Fate(record.sample_id, record.state, record.reason) for record in read_samples(run_dir)]
    trained = list(read_trained(run_dir))
    books = read_books(run_dir)
    figures = Figures(
        samples={
            "fed": books.fed,
            "trained": books.trained,
            **{f"dropped {reason}": count for reason, count in books.dropped.items() if count},
        },
        steps=sum("step" in line for line in trained),
        lineages=max((line["lineage"] for line in trained), default=0) + 1,
    )
    completed = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] == "completed"
    return Accounts(fates, books, trained, turns, _generated_anew(run_dir), completed), figures


def _generated_anew(run_dir: Path) -> frozenset[SampleId]:
    """Samples that were fed again because their finished payload was gone: by `redo`, or in a `rewind`."""
    head = read_head(run_dir)
    if head is None:
        return frozenset()
    indices: set[int] = set()
    with closing(sqlite3.connect(f"file:{run_dir / JOURNAL}?mode=ro", uri=True)) as connection:
        for kind, body in connection.execute("SELECT kind, body FROM transitions WHERE kind IN ('redo', 'rewind')"):
            content = json.loads(body)
            indices.update([content[0]] if kind == "redo" else content[4])
    return frozenset(SampleId((index - 1) // head.num_prompts, index) for index in indices)

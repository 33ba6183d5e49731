"""Checkpoint manifests, and which checkpoints of a run survive. This module does not import torch.

step_000050/manifest.json             written last, before the directory gets its name
abandoned_step_000060/manifest.json   training went back to an earlier step: abandoned

They are in `<run_dir>/checkpoints`, or in `trainer.checkpoint_dir` (`RunDir.checkpoints`).

Training may go back to a checkpoint, in a new lineage:

    lineage 0   ──1──2──3──4──5          went back to step 3
    lineage 1            └──4──5──6      went back to step 5
    lineage 2                  └──6──7   surviving: 1 to 3 of lineage 0, 4 and 5 of lineage 1, 6 and 7 of lineage 2

A step alone does not identify a checkpoint: step 4 of lineage 0 was trained on other samples and then abandoned. Its
samples have been handed out again since, so resuming from it would train some of them twice and others never.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import QueueSnapshot
from asyncrl.core.text import checked_path
from asyncrl.core.types import SampleId
from asyncrl.storage.run_dir import read_json

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

SCHEMA_VERSION = 5
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
HF_DIRECTORY = "hf"
ABANDONED = "abandoned_"
"""Prefix of the names of checkpoints abandoned by a rewind to an earlier one."""

_STEP = re.compile(r"step_(\d{6,})")


class LineageStart(NamedTuple):
    """The start of a lineage: training went back to a checkpoint."""

    lineage: int
    step: int
    """Step of the checkpoint that training went back to; 0: the initial model."""


@dataclass(frozen=True, slots=True)
class LineageHistory:
    """The rewinds of a run that determine which checkpoints survive."""

    starts: tuple[LineageStart, ...] = ()
    """In ascending order of lineage and step: a rewind to a step removes the entries from that step on."""

    @property
    def lineage(self) -> int:
        return self.starts[-1].lineage if self.starts else 0

    def after_rewind(self, step: int, lineage: int | None = None) -> LineageHistory:
        """Return the history after a rewind to `step` that begins `lineage`; None: the next lineage."""
        earlier = tuple(start for start in self.starts if start.step < step)
        return LineageHistory((*earlier, LineageStart(self.lineage + 1 if lineage is None else lineage, step)))

    def contains(self, step: int, lineage: int) -> bool:
        """Return whether a checkpoint of `step` that was written in `lineage` survives."""
        return self.abandoned_by(step, lineage) is None

    def abandoned_by(self, step: int, lineage: int) -> LineageStart | None:
        """Return the rewind that abandoned the checkpoint of `step` written in `lineage`; None: it survives."""
        return next((start for start in self.starts if start.lineage > lineage and start.step < step), None)

    def dump(self) -> list[list[int]]:
        """Return the history as JSON values."""
        return [list(start) for start in self.starts]

    @classmethod
    def load(cls, raw: Sequence[Sequence[int]]) -> LineageHistory:
        """Restore the output of `dump`. Raises `TypeError` or `ValueError` for anything else."""
        return cls(tuple(LineageStart(index(lineage), index(step)) for lineage, step in raw))


NO_REWINDS = LineageHistory()


@dataclass(slots=True)
class Progress:
    """The Trainer's counters, cumulative over resumes."""

    step: int = 0
    """Optimizer steps taken."""
    version: int = 0
    """Newest published version."""
    published_step: int = 0
    """Optimizer steps that produced that version."""
    leases: int = 0
    trained_samples: int = 0
    trained_tokens: int = 0
    """Response tokens with gradient, counted once per pass of `trainer.ppo_epochs`."""
    kl_coef: float | None = None
    """Coefficient of the KL in the reward, where `algorithm.kl_ctrl` adapts it; None: `kl_ctrl.kl_coef`."""


_PROGRESS: TypeAdapter[Progress] = TypeAdapter(Progress)
_SNAPSHOT: TypeAdapter[QueueSnapshot] = TypeAdapter(QueueSnapshot)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint's contents."""

    progress: Progress
    queue: QueueSnapshot
    identity: Mapping[str, Any]
    """`run_identity` of the run that wrote it, which a run that resumes from it must share."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every other file, by path within the checkpoint."""
    lineage: int = 0
    """Lineage of the Trainer that wrote it. Each lineage reaches a step at most once."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint or the journal that a run resumes from."""

    run_dir: Path | None
    """None: it is lost (see `lost`), and the run continues in a new one."""
    checkpoint: Path | None
    """None: the run died before its first one and resumes from its journal and the initial model; `manifest` is that of
    step 0."""
    manifest: Manifest
    history: LineageHistory = NO_REWINDS
    """Ends with the rewind to `checkpoint`, which begins a new lineage."""
    incarnations: Mapping[str, int] = field(default_factory=dict)
    """Last incarnations of Rollouter and Trainer according to the journal, or to the names of files in `samples/`."""
    lost: str = ""
    """A sentence about the run directory that is lost, and what is lost with it; empty: nothing is lost."""

    @property
    def lineage(self) -> int:
        return self.history.lineage


_NOT_OF_TRAINING = ("val_files", "max_val_samples", "num_workers", "cache_dir")
"""Keys of `data` that do not change the training prompts or their order."""


def run_identity(config: Config) -> dict[str, Any]:
    """Return the settings that define feed indices and samples per version; checkpoints record them.

    How the model is spread over ranks may change: engines load checkpoints of any number of ranks. Settings that affect
    only later steps may change, too: the optimizer, the passes over a lease, and the algorithm.
    """
    data = config.identity_values()["data"]
    return {
        "seed": config.seed,
        **{f"data.{key}": value for key, value in data.items() if key not in _NOT_OF_TRAINING},
        "trainer.ppo_mini_batch_size": config.trainer.ppo_mini_batch_size,
        "samples per version": config.samples_per_version,
        **({"sft": config.sft.model_dump(mode="json")} if config.mode == "sft" else {}),
    }


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_steps(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `directory` by step, ascending. Incomplete ones have other names."""
    if not directory.is_dir():
        return {}
    found = {
        int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def find_latest(directory: Path, history: LineageHistory = NO_REWINDS) -> Path | None:
    """Return the newest checkpoint in `directory` that survives, which is the last one of the newest lineage; abandoned
    ones are skipped. A checkpoint whose lineage cannot be read is compared by its step.
    """
    found = [(read_lineage(path), step, path) for step, path in checkpoint_steps(directory).items()]
    newest = max((lineage for lineage, _, _ in found if lineage is not None), default=0)
    ours = [
        (newest if lineage is None else lineage, step, path)
        for lineage, step, path in found
        if lineage is None or history.contains(step, lineage)
    ]
    return max(ours)[2] if ours else None


def read_lineage(checkpoint: Path) -> int | None:
    """Return the lineage in which the checkpoint was written; None: its manifest is missing or damaged, see
    `load_manifest`."""
    try:
        return index(read_json(checkpoint / MANIFEST)["lineage"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def dump_manifest(manifest: Manifest) -> str:
    snapshot = manifest.queue
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "lineage": manifest.lineage,
            "progress": asdict(manifest.progress),
            "queue": asdict(snapshot) | {"outstanding": list(map(str, snapshot.outstanding))},
            "identity": manifest.identity,
            "files": manifest.files,
        },
        indent=1,
    )


def load_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest and check that its files are complete.

    Raises:
        ConfigError: it is torn, has an unknown schema, or lists a file outside of the checkpoint. The message names the
            file and the fix.
    """
    path = checkpoint / MANIFEST
    fix = _fix_for(checkpoint)
    try:
        raw = read_json(path)
        if raw["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {raw['schema_version']}, this asyncrl reads {SCHEMA_VERSION}: it cannot "
                f"interpret the checkpoint. Resume with the asyncrl that wrote it, or start anew with resume=none."
            )
        manifest = _parse(raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): the checkpoint is not complete. {fix}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}). {fix}") from None
    for name, size in manifest.files.items():
        file = checkpoint / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long"
            raise ConfigError(f"{file} is {state}; the manifest says {size} bytes: the checkpoint is torn. {fix}")
    return manifest


def _fix_for(checkpoint: Path) -> str:
    """Return what the user can do about an unusable checkpoint."""
    earlier = [path for path in checkpoint_steps(checkpoint.parent).values() if path.name < checkpoint.name]
    if not earlier:
        return "The run has no earlier one to continue from: start anew with resume=none."
    return f"Delete {checkpoint} to continue from {earlier[-1].name}, or start anew with resume=none."


def _parse(raw: Mapping[str, Any]) -> Manifest:
    outstanding = tuple(map(SampleId.parse, raw["queue"]["outstanding"]))
    snapshot = _SNAPSHOT.validate_python({**raw["queue"], "outstanding": outstanding})
    progress = _PROGRESS.validate_python(raw["progress"])
    files = {checked_path(name): index(size) for name, size in raw["files"].items()}
    return Manifest(progress, snapshot, dict(raw["identity"]), files, index(raw["lineage"]))

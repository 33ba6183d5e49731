"""What a checkpoint says about itself, and which ones a run has. Files and JSON only, so no torch is needed.

<run_dir>/checkpoints/step_000050/manifest.json             written last, before the directory gets its name
<run_dir>/checkpoints/abandoned_step_000060/manifest.json   training has gone back behind it: another future
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.failures import ConfigError
from asyncrl.lineage import NO_REWINDS, Line
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.types import SampleId

SCHEMA_VERSION = 4
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
HF_DIRECTORY = "hf"
ABANDONED = "abandoned_"
"""How the names of checkpoints begin that training has gone back behind."""

_STEP = re.compile(r"step_(\d{6,})")


@dataclass(slots=True)
class Progress:
    """The Trainer's counters, cumulative over resumes."""

    step: int = 0
    """Optimizer steps taken."""
    version: int = 0
    """Newest published version."""
    published_step: int = 0
    """Steps behind that version."""
    leases: int = 0
    trained_samples: int = 0
    trained_tokens: int = 0
    """Response tokens with gradient; one of `trainer.ppo_epochs` passes counts it once more."""
    kl_coef: float | None = None
    """Coefficient of the KL in the reward, where `algorithm.kl_ctrl` adapts it; None: `kl_ctrl.kl_coef`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint's contents."""

    progress: Progress
    queue: QueueSnapshot
    identity: Mapping[str, Any]
    """What a run that goes on from here must have in common with the one that wrote it: `resume.run_identity`."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every other file, by path within the checkpoint."""
    lineage: int = 0
    """Of the Trainer that wrote it. A step is reached once in each."""


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_steps(run_dir: Path) -> dict[int, Path]:
    """The run's complete checkpoints by step, ascending. Ones under construction have other names."""
    root = run_dir / CHECKPOINTS
    if not root.is_dir():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def find_latest(run_dir: Path, line: Line = NO_REWINDS) -> Path | None:
    """The run's newest checkpoint on the line; what is of another future is passed over.

    The newest is the last of the newest lineage. One that does not say its lineage any more counts for its step.
    """
    found = [(read_lineage(path), step, path) for step, path in checkpoint_steps(run_dir).items()]
    newest = max((lineage for lineage, _, _ in found if lineage is not None), default=0)
    ours = [
        (newest if lineage is None else lineage, step, path)
        for lineage, step, path in found
        if lineage is None or line.holds(step, lineage)
    ]
    return max(ours)[2] if ours else None


def read_lineage(checkpoint: Path) -> int | None:
    """In which lineage it was written; None: its manifest is missing or damaged, see `load_manifest`."""
    try:
        return int(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["lineage"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def dump_manifest(manifest: Manifest) -> str:
    snapshot = manifest.queue
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "lineage": manifest.lineage,
            "progress": asdict(manifest.progress),
            "queue": {
                "next_index": snapshot.next_index,
                "outstanding": [str(sample_id) for sample_id in snapshot.outstanding],
                "books": asdict(snapshot.books),
                "version": snapshot.version,
                "seq": snapshot.seq,
            },
            "identity": manifest.identity,
            "files": manifest.files,
        },
        indent=1,
    )


def load_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest and see that its files are all there, whole.

    Raises:
        ConfigError: it is torn or of an unknown schema. The message names the file and the fix.
    """
    path = checkpoint / MANIFEST
    fix = _way_on(checkpoint)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {raw['schema_version']}, this asyncrl reads {SCHEMA_VERSION}: it cannot "
                "know what the checkpoint means. Resume with the asyncrl that wrote it, or start anew with resume=none."
            )
        manifest = _parse(raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): the checkpoint is not complete. {fix}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}). {fix}") from None
    for name, size in manifest.files.items():
        file = checkpoint / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long"
            raise ConfigError(f"{file} is {state}; the manifest says {size} bytes: the checkpoint is torn. {fix}")
    return manifest


def _way_on(checkpoint: Path) -> str:
    """From a checkpoint that cannot be used."""
    earlier = [path for path in checkpoint_steps(checkpoint.parent.parent).values() if path.name < checkpoint.name]
    if not earlier:
        return "The run has no earlier one to go on from: start anew with resume=none."
    return f"Delete {checkpoint} to go on from {earlier[-1].name} before it, or start anew with resume=none."


def _parse(raw: Mapping[str, Any]) -> Manifest:
    queue = raw["queue"]
    snapshot = QueueSnapshot(
        next_index=int(queue["next_index"]),
        outstanding=tuple(SampleId.parse(text) for text in queue["outstanding"]),
        books=Books(**queue["books"]),
        version=int(queue["version"]),
        seq=int(queue["seq"]),
    )
    progress = Progress(**raw["progress"])
    return Manifest(progress, snapshot, dict(raw["identity"]), dict(raw["files"]), int(raw["lineage"]))

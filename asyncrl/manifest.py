"""What a checkpoint says about itself, and which one a run goes on from. Files and JSON only, so no torch is needed.

<run_dir>/checkpoints/step_000050/manifest.json   written last, before the directory gets its name
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import RUNS, RunDir, newest_resumable
from asyncrl.types import SampleId

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
HF_DIRECTORY = "hf"

_STEP = re.compile(r"step_(\d{6,})")
_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


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
    """What a run that goes on from here must have in common with the one that wrote it: `run_identity`."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every other file, by path within the checkpoint."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on from."""

    checkpoint: Path
    manifest: Manifest

    @property
    def run_dir(self) -> Path:
        """Of the run that wrote it."""
        return self.checkpoint.parent.parent


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_steps(run_dir: Path) -> dict[int, Path]:
    """The run's complete checkpoints by step, ascending. Ones under construction have other names."""
    root = run_dir / CHECKPOINTS
    if not root.is_dir():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def find_latest(run_dir: Path) -> Path | None:
    """The run's newest checkpoint."""
    return next(reversed(checkpoint_steps(run_dir).values()), None)


def find_resume(config: Config, *, root: Path = RUNS) -> Resume | None:
    """What `resume=` means: `none`, `auto` (nothing there is fine), or a run or checkpoint directory.

    Raises:
        ConfigError: nothing to resume from at that path, a damaged checkpoint, or one of another run or model.
    """
    if config.resume == "none":
        return None
    checkpoint = _newest(config, root) if config.resume == "auto" else _named(config.resume)
    if checkpoint is None:
        return None
    checkpoint = checkpoint.absolute()
    manifest = load_manifest(checkpoint)
    _check_identity(checkpoint, manifest.identity, run_identity(config))
    _check_architecture(checkpoint, config.model.path)
    _check_critic(checkpoint, manifest, config)
    return Resume(checkpoint, manifest)


def run_identity(config: Config) -> dict[str, Any]:
    """The settings by which a feed index names a prompt and a version counts samples.

    How the model is spread over ranks may change: engines load what any number of ranks wrote. So may whatever only
    shapes the steps to come, as the optimizer, the passes over a lease, and the algorithm.
    """
    data = config.data.model_dump(mode="json", exclude={"val_files", "max_val_samples"})
    return {
        "seed": config.seed,
        **{f"data.{key}": value for key, value in data.items()},
        "trainer.ppo_mini_batch_size": config.trainer.ppo_mini_batch_size,
        "samples per version": config.samples_per_version,
    }


def dump_manifest(manifest: Manifest) -> str:
    snapshot = manifest.queue
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "progress": asdict(manifest.progress),
            "queue": {
                "next_index": snapshot.next_index,
                "outstanding": [str(sample_id) for sample_id in snapshot.outstanding],
                "books": asdict(snapshot.books),
                "version": snapshot.version,
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
    )
    return Manifest(Progress(**raw["progress"]), snapshot, dict(raw["identity"]), dict(raw["files"]))


def _newest(config: Config, root: Path) -> Path | None:
    if config.run_dir is not None:
        return find_latest(Path(config.run_dir))
    run = newest_resumable(config.experiment_name, _has_checkpoint, root=root)
    return None if run is None else find_latest(run.path)


def _has_checkpoint(run: RunDir) -> bool:
    return find_latest(run.path) is not None


def _named(text: str) -> Path:
    path = Path(text).expanduser()
    if _STEP.fullmatch(path.absolute().name) or (path / MANIFEST).exists():
        return path
    found = find_latest(path.parent if path.name == CHECKPOINTS else path)
    if found is None:
        raise ConfigError(
            f"resume={text}: there is no checkpoint to go on from. Give none, auto, a run directory that has "
            f"{CHECKPOINTS}/step_*, or one of those"
        )
    return found


def _check_identity(checkpoint: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    for key in sorted(saved.keys() | present.keys()):
        if saved.get(key) != present.get(key):
            raise ConfigError(
                f"{checkpoint} was written with {key}={saved.get(key)!r}, this run has {present.get(key)!r}: feed "
                f"indices and versions would change their meaning. Set it back, or start anew with resume=none "
                f"(model.path={checkpoint / HF_DIRECTORY} starts from its weights)."
            )


def _check_critic(checkpoint: Path, manifest: Manifest, config: Config) -> None:
    if config.needs_critic and not any(name.startswith("critic/") for name in manifest.files):
        raise ConfigError(
            f"{checkpoint} has no critic, which algorithm.adv_estimator={config.algorithm.adv_estimator} needs: it was "
            "written with another estimator. Set that back, or start anew with resume=none "
            f"(model.path={checkpoint / HF_DIRECTORY} starts from its weights)."
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Restore it, or start anew with resume=none.") from None


def _check_architecture(checkpoint: Path, model_path: str) -> None:
    """As far as JSON can tell; the engine compares every shape. A hub name is left to the engine."""
    present_file = Path(resolve(model_path)) / "config.json"
    if not present_file.is_file():
        return
    saved_file = checkpoint / HF_DIRECTORY / "config.json"
    saved, present = _read_json(saved_file), _read_json(present_file)
    for key in _ARCHITECTURE:
        if key in saved and key in present and saved[key] != present[key]:
            raise ConfigError(
                f"{saved_file} has {key}={saved[key]!r}, model.path={model_path} has {present[key]!r}: the checkpoint "
                "is of another model. Give the model that the run trained, or start anew with resume=none."
            )

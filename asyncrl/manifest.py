"""What a checkpoint says about itself, and what a run goes on from: its newest checkpoint, its journal, or both. Files,
JSON and SQLite only, so no torch is needed.

<run_dir>/checkpoints/step_000050/manifest.json   written last, before the directory gets its name
<run_dir>/journal.db                              `asyncrl.journal`: what happened to each sample since
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from asyncrl.assets import resolve
from asyncrl.failures import ConfigError
from asyncrl.journal import read_head
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import JOURNAL, RUNS, RunDir, newest_resumable
from asyncrl.telemetry.state_file import read_state
from asyncrl.types import SampleId

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

SCHEMA_VERSION = 3
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

    run_dir: Path
    """Of the run that goes on."""
    checkpoint: Path | None
    """None: it died before its first one, and goes on from its journal and the initial model; `manifest` is that of
    step 0."""
    manifest: Manifest
    lineage: int = 0
    """The one to run in: one more than any before."""
    incarnations: Mapping[str, int] = field(default_factory=dict)
    """Of the Rollouter and the Trainer, the last ones that the journal knows of."""


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
        ConfigError: nothing to resume from at that path, a damaged checkpoint, or a run of another model or other data.
    """
    if config.resume == "none":
        return None
    found = _newest(config, root) if config.resume == "auto" else _named(config)
    return None if found is None else _resume(config, found.run_dir.absolute(), found.checkpoint)


def resume_in_run(run_dir: Path, lineage: int) -> Resume | None:
    """Where a Trainer that is replaced while its run lives on goes on from; None: from the initial model.

    Raises:
        ConfigError: the newest checkpoint is damaged.
    """
    checkpoint = find_latest(run_dir)
    if checkpoint is None:
        return None
    return Resume(run_dir, checkpoint, load_manifest(checkpoint), lineage)


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
    return Manifest(Progress(**raw["progress"]), snapshot, dict(raw["identity"]), dict(raw["files"]))


class _Found(NamedTuple):
    run_dir: Path
    checkpoint: Path | None
    """None: there is a journal to go on from."""


def _newest(config: Config, root: Path) -> _Found | None:
    if config.run_dir is not None:
        return _within(Path(config.run_dir), config)
    run = newest_resumable(config.experiment_name, lambda run: _within(run.path, config) is not None, root=root)
    return None if run is None else _within(run.path, config)


def _within(run_dir: Path, config: Config) -> _Found | None:
    """What there is in it to go on from."""
    if (checkpoint := find_latest(run_dir)) is not None:
        return _Found(run_dir, checkpoint)
    if config.journal == "off" or _is_completed(run_dir):
        return None
    head = read_head(run_dir)
    return _Found(run_dir, None) if head is not None and not head.damage else None


def _is_completed(run_dir: Path) -> bool:
    """It ended well and wanted no checkpoint: there is nothing to go on with."""
    try:
        return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] == "completed"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _named(config: Config) -> _Found:
    path = Path(config.resume).expanduser()
    if _STEP.fullmatch(path.absolute().name) or (path / MANIFEST).exists():
        return _Found(path.absolute().parent.parent, path.absolute())
    found = _within(path.parent if path.name == CHECKPOINTS else path, config)
    if found is None:
        raise ConfigError(
            f"resume={config.resume}: there is no checkpoint to go on from, and no journal of a run that died before "
            f"its first one. Give none, auto, a run directory that has {CHECKPOINTS}/step_*, or one of those"
        )
    return found


def _resume(config: Config, run_dir: Path, checkpoint: Path | None) -> Resume:
    present = run_identity(config)
    manifest = Manifest(Progress(), QueueSnapshot(1, (), Books(), 0), present)
    if checkpoint is not None:
        checkpoint = checkpoint.absolute()
        manifest = load_manifest(checkpoint)
        _check_identity(checkpoint, manifest.identity, present, weights=checkpoint)
        _check_architecture(checkpoint, config.model.path)
        _check_critic(checkpoint, manifest, config)
    head = read_head(run_dir) if config.journal == "on" else None
    if head is None:
        return Resume(run_dir, checkpoint, manifest, _next_lineage(run_dir))
    lineage = max(head.lineage + 1, _next_lineage(run_dir))
    if not head.damage:  # else only the checkpoint will do; the queue tells why when it sets the journal aside
        _check_identity(run_dir / JOURNAL, head.identity, present, weights=checkpoint)
    if checkpoint is None:
        _check_same_model(run_dir, config)
    return Resume(run_dir, checkpoint, manifest, lineage, head.incarnations)


def _next_lineage(run_dir: Path) -> int:
    """After those that the run's own state knows of, as far as it can be read."""
    try:
        state = read_state(run_dir)
    except ConfigError:
        state = None
    return 1 if state is None else state.lineage + 1


def _check_identity(file: Path, saved: Mapping[str, Any], present: Mapping[str, Any], *, weights: Path | None) -> None:
    """`weights`: the checkpoint that a new run could start from instead."""
    for key in sorted(saved.keys() | present.keys()):
        if saved.get(key) != present.get(key):
            anew = f" (model.path={weights / HF_DIRECTORY} starts from its weights)" if weights else ""
            raise ConfigError(
                f"{file} was written with {key}={saved.get(key)!r}, this run has {present.get(key)!r}: feed "
                f"indices and versions would change their meaning. Set it back, or start anew with resume=none{anew}."
            )


def _check_same_model(run_dir: Path, config: Config) -> None:
    """Without a checkpoint the initial model is trained on what it said itself."""
    try:
        earlier = yaml.safe_load(RunDir(run_dir).config.read_text(encoding="utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return
    if earlier != config.model.path:
        raise ConfigError(
            f"model.path={config.model.path}: the run in {run_dir} has no checkpoint yet, and its samples are of "
            f"{earlier}. Set it back, or start anew with resume=none and another run_dir."
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

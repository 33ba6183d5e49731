"""What a run goes on from: its newest checkpoint, its journal, or both; and what it has to have in common with them.
Files, JSON and SQLite only, so no torch is needed.

<run_dir>/checkpoints/step_000050/manifest.json   `asyncrl.manifest`
<run_dir>/journal.db                              `asyncrl.journal`: what happened to each sample since

Only a checkpoint of the surviving line (`asyncrl.lineage`) is gone on from, because the journal's books are of that
line. The journal knows where training went back. Without one there is only the checkpoint's own books, and the newest
checkpoint of the newest lineage is the run's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from asyncrl.assets import resolve
from asyncrl.failures import ConfigError
from asyncrl.journal_reader import JournalHead, incarnation_of_files, read_head
from asyncrl.lineage import NO_REWINDS, Line
from asyncrl.manifest import (
    ABANDONED,
    CHECKPOINTS,
    HF_DIRECTORY,
    MANIFEST,
    Manifest,
    Progress,
    find_latest,
    load_manifest,
    read_lineage,
)
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import JOURNAL, RUNS, RunDir, runs_of
from asyncrl.telemetry.state_file import read_state

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

MAX_TOLD = 3
"""Runs that were passed over and are told by name."""

_CHECKPOINT = re.compile(rf"({ABANDONED})?step_\d{{6,}}")
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on from."""

    run_dir: Path
    """Of the run that goes on."""
    checkpoint: Path | None
    """None: it died before its first one, and goes on from its journal and the initial model; `manifest` is that of
    step 0."""
    manifest: Manifest
    line: Line = NO_REWINDS
    """The one to run in: it ends with going back to `checkpoint`, in a lineage after any before."""
    incarnations: Mapping[str, int] = field(default_factory=dict)
    """Of the Rollouter and the Trainer, the last ones that the journal knows of, or the files in `samples/`."""

    @property
    def lineage(self) -> int:
        """The one to run in."""
        return self.line.lineage


def find_resume(config: Config, *, root: Path = RUNS, tell: Callable[[str], None] = logger.warning) -> Resume | None:
    """What `resume=` means: `none`, `auto` (nothing there is fine), or a run or checkpoint directory.

    Args:
        tell: gets what people should know of how it was chosen.

    Raises:
        ConfigError: nothing to resume from at that path; a damaged checkpoint, or one of another future than the
            run's; a run of another model, other data or other samples; `auto` with the `run_dir` of a run that is
            completed and left no checkpoint.
    """
    if config.resume == "none":
        return None
    found = _newest(config, root, tell) if config.resume == "auto" else _named(config)
    return None if found is None else _resume(config, found)


def resume_in_run(run_dir: Path, line: Line) -> Resume | None:
    """Where a Trainer that is replaced while its run lives on goes on from; None: from the initial model.

    Args:
        line: the run's, until now. What a Trainer that was replaced has written behind its successor's back is not on
            it.

    Raises:
        ConfigError: the newest checkpoint is damaged.
    """
    checkpoint = find_latest(run_dir, line)
    if checkpoint is None:
        return None
    manifest = load_manifest(checkpoint)
    return Resume(run_dir, checkpoint, manifest, line.rewound(manifest.progress.step))


def completed_at(run_dir: Path) -> int | None:
    """The step at which the run there ended well; None: it did not, or nobody knows."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return int(summary["step"]) if summary["status"] == "completed" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------ identity


def run_identity(config: Config) -> dict[str, Any]:
    """The settings by which a feed index names a prompt and a version counts samples: of every checkpoint.

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


def journal_identity(config: Config) -> dict[str, Any]:
    """`run_identity`, and the settings that finished samples were made under: what was asked of the engines, and what
    responses are worth. A journal hands out samples of before, so they may not change under it; under a checkpoint
    alone they may, since whatever it does not hold is generated again."""
    rollout, reward, model = config.rollout, config.reward, config.reward_model
    scoring = reward.model_dump(mode="json", exclude={"on_error", "max_errors", "timeout_s", "max_concurrency"})
    served = model.placement == "serve"
    return {
        **run_identity(config),
        "rollout.n": rollout.n,
        "rollout.response_length": rollout.response_length,
        **{f"rollout.sampling.{key}": value for key, value in rollout.sampling.model_dump(mode="json").items()},
        **{f"reward.{key}": value for key, value in scoring.items()},
        "reward model in the reward": [model.path, model.weight] if served else None,
        "greedy baseline": config.algorithm.adv_estimator == "remax",
        **_conversations(config),
    }


def _conversations(config: Config) -> dict[str, Any]:
    """How trajectories are held, where they are more than one turn."""
    rollout = config.rollout
    told: dict[str, Any] = {}
    if rollout.multi_turn.enable:
        # Deadlines and places in line change no conversation.
        limits = {"timeout_s", "max_concurrency", "max_per_s", "on_error"}
        turns = rollout.multi_turn.model_dump(
            mode="json",
            exclude={"timeout_s": True, "tools": {"__all__": limits}, "interactions": {"__all__": limits}},
        )
        told |= {f"rollout.multi_turn.{key}": value for key, value in turns.items()}
        told["model.chat_template_kwargs"] = config.model.chat_template_kwargs
    if rollout.agent.enabled:
        told["rollout.agent"] = [rollout.agent.program, list(rollout.agent.command)]
    return told


# ------------------------------------------------------------------------------------------------ which one


class _Found(NamedTuple):
    run_dir: Path
    checkpoint: Path | None
    """None: there is a journal to go on from."""
    head: JournalHead | None
    """Of the journal; None: there is none, or it does not count."""


class _Nothing(NamedTuple):
    """There is nothing to go on from."""

    why: str
    """In words, as something that the run has or is; empty: there is no run at all."""


def _newest(config: Config, root: Path, tell: Callable[[str], None]) -> _Found | None:
    if config.run_dir is not None:
        return _there(Path(config.run_dir), config, tell)
    passed: list[str] = []
    found: _Found | None = None
    for run in runs_of(config.experiment_name, root=root):
        within = _within(run.path, config)
        if isinstance(within, _Found):
            found = within
            break
        passed.append(f"{run.path.name} ({within.why or 'it is empty'})")
    if passed:
        onward = f"goes on with {found.run_dir}" if found is not None else "has nothing to go on with, a new run begins"
        more = f", and {len(passed) - MAX_TOLD} more" if len(passed) > MAX_TOLD else ""
        tell(f"resume=auto {onward}. Passed over, newest first: {', '.join(passed[:MAX_TOLD])}{more}")
    return found


def _there(run_dir: Path, config: Config, tell: Callable[[str], None]) -> _Found | None:
    within = _within(run_dir, config)
    if isinstance(within, _Found):
        return within
    if within.why == _COMPLETED:
        raise ConfigError(
            f"the run in {run_dir} {_COMPLETED}: there is nothing left to go on with, and starting it again would take "
            "the place of its records. For another run give another run_dir."
        )
    if within.why:
        tell(
            f"resume=auto starts the run in {run_dir} anew: it {within.why}. Its records are set aside as *-abandoned-*"
        )
    return None


_COMPLETED = "is completed and left no checkpoint"


def _within(run_dir: Path, config: Config) -> _Found | _Nothing:
    """What there is in it to go on from."""
    head = read_head(run_dir) if config.journal == "on" else None
    line = head.line if head is not None else NO_REWINDS
    if (checkpoint := find_latest(run_dir, line)) is not None:
        return _Found(run_dir, checkpoint, head)
    if completed_at(run_dir) is not None:
        return _Nothing(_COMPLETED)
    if head is not None and not head.damage:
        return _Found(run_dir, None, head)
    if not (run_dir / "config.yaml").exists():
        return _Nothing("")
    if head is not None:
        return _Nothing(f"has no checkpoint, and its journal is damaged: {head.damage}")
    return _Nothing(f"has no checkpoint, and {'journal=off' if config.journal == 'off' else 'no journal'}")


def _named(config: Config) -> _Found:
    path = Path(config.resume).expanduser()
    if _CHECKPOINT.fullmatch(path.absolute().name) or (path / MANIFEST).exists():
        return _checkpoint(path.absolute(), config)
    found = _within(path.parent if path.name == CHECKPOINTS else path, config)
    if isinstance(found, _Nothing):
        why = f": the run {found.why}" if found.why else ""
        raise ConfigError(
            f"resume={config.resume}: there is no checkpoint to go on from, and no journal of a run that died before "
            f"its first one{why}. Give none, auto, a run directory that has {CHECKPOINTS}/step_*, or one of those"
        )
    return found


def _checkpoint(path: Path, config: Config) -> _Found:
    """That one, if its run may go on from there.

    Raises:
        ConfigError: training went back behind it.
    """
    run_dir = path.parent.parent
    head = read_head(run_dir) if config.journal == "on" else None
    lineage, digits = read_lineage(path), path.name.rpartition("_")[2]
    left = None
    if head is not None and lineage is not None and digits.isdigit():
        left = head.line.left(int(digits), lineage)
    if left is not None or path.name.startswith(ABANDONED):
        where = f", to step {left.step} (lineage {left.lineage})" if left is not None else ""
        raise ConfigError(
            f"resume={config.resume}: training went back behind this checkpoint{where}, and its samples were handed "
            "out again: the run cannot go on from there. Start a new one from its weights: resume=none "
            f"model.path={path / HF_DIRECTORY}"
        )
    return _Found(run_dir, path, head)


# ------------------------------------------------------------------------------------------------ whether it fits


def _resume(config: Config, found: _Found) -> Resume:
    run_dir, head = found.run_dir.absolute(), found.head
    checkpoint = found.checkpoint.absolute() if found.checkpoint is not None else None
    manifest = Manifest(Progress(), QueueSnapshot(1, (), Books(), 0), run_identity(config))
    if checkpoint is not None:
        manifest = load_manifest(checkpoint)
        _check_identity(checkpoint, manifest.identity, run_identity(config), weights=checkpoint)
        _check_architecture(checkpoint, config.model.path)
        _check_critic(checkpoint, manifest, config)
    # Without its journal (the queue tells that it is gone) the run still has files that no other process may write to.
    line, incarnations = NO_REWINDS, {"rollouter": incarnation_of_files(run_dir)}
    if head is not None:
        line, incarnations = head.line, dict(head.incarnations)
        if not head.damage:  # else only the checkpoint will do; the queue tells why when it sets the journal aside
            _check_journal(run_dir, head, config, checkpoint)
    if checkpoint is None:
        _check_same_model(run_dir, config)
    lineage = max(line.lineage, *_lineages(run_dir)) + 1
    return Resume(run_dir, checkpoint, manifest, line.rewound(manifest.progress.step, lineage), incarnations)


def _lineages(run_dir: Path) -> list[int]:
    """Those that the run's own state and its checkpoints know of, as far as they can be read; at least 0."""
    try:
        state = read_state(run_dir)
    except ConfigError:
        state = None
    checkpoints = [read_lineage(path) or 0 for path in (run_dir / CHECKPOINTS).glob("*step_*")]
    return [0 if state is None else state.lineage, *checkpoints]


def _check_identity(file: Path, saved: Mapping[str, Any], present: Mapping[str, Any], *, weights: Path | None) -> None:
    """`weights`: the checkpoint that a new run could start from instead."""
    if (key := _differs(saved, present)) is not None:
        raise ConfigError(
            f"{file} was written with {key}={saved.get(key)!r}, this run has {present.get(key)!r}: feed "
            f"indices and versions would change their meaning. Set it back, or start anew with resume=none"
            f"{_from_weights(weights)}."
        )


def _check_journal(run_dir: Path, head: JournalHead, config: Config, checkpoint: Path | None) -> None:
    file, of_run = run_dir / JOURNAL, run_identity(config)
    _check_identity(file, {key: head.identity.get(key) for key in of_run}, of_run, weights=checkpoint)
    present = journal_identity(config)
    if (key := _differs(head.identity, present)) is not None:
        alone = f"; or go on from {checkpoint.name} alone, and have them made again: journal=off" if checkpoint else ""
        raise ConfigError(
            f"{file} has samples that were made with {key}={head.identity.get(key)!r}, this run has "
            f"{present.get(key)!r}: they would be trained as if they had been made with that. Set it back{alone}; or "
            f"start anew with resume=none{_from_weights(checkpoint)}."
        )


def _differs(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """The first setting that is not the same."""
    return next((key for key in sorted(saved.keys() | present.keys()) if saved.get(key) != present.get(key)), None)


def _from_weights(checkpoint: Path | None) -> str:
    return f" (model.path={checkpoint / HF_DIRECTORY} starts from its weights)" if checkpoint else ""


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

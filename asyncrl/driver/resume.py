"""Finds what a run resumes from: its newest checkpoint, its journal, or both, and checks that they fit its settings.
Files, JSON and SQLite only, so no torch is needed.

<run_dir>/checkpoints/step_000050/manifest.json   `asyncrl.storage.checkpoint_manifest`
<run_dir>/journal.db                              `asyncrl.queue.journal`: every operation of the sample queue
<trainer.checkpoint_dir>/run.json                 `asyncrl.storage.checkpoint_claim`: the run of the checkpoints there

A run resumes only from a checkpoint that survives (`LineageHistory`), because the journal's counts belong to it. The
journal and the claim record where training went back. Without both, a run resumes from the newest checkpoint of the
newest lineage. Without a journal it resumes with the sample counts in the checkpoint. If `trainer.checkpoint_dir` is
all that is left of a run, the run continues in a new run directory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.assets import resolve
from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.observe.status.run_status import read_readable_state
from asyncrl.observe.status.summary import read_readable_summary
from asyncrl.queue.journal_reader import JournalHead, incarnation_of_files, read_head
from asyncrl.storage.checkpoint_claim import CLAIM, Claim, pull_claim, read_claim, read_run_id
from asyncrl.storage.checkpoint_manifest import (
    ABANDONED,
    CHECKPOINTS,
    HF_DIRECTORY,
    MANIFEST,
    NO_REWINDS,
    LineageHistory,
    Manifest,
    Progress,
    Resume,
    checkpoint_steps,
    find_latest,
    load_manifest,
    read_lineage,
    run_identity,
)
from asyncrl.storage.remote_checkpoints import remote_checkpoints
from asyncrl.storage.run_dir import JOURNAL, RUNS, RunDir, SavedConfig, read_json, runs_of

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

MAX_NAMED_RUNS = 3
"""Maximum number of skipped runs that the warning names."""

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


def find_resume(config: Config, *, root: Path = RUNS, warn: Callable[[str], None] = logger.warning) -> Resume | None:
    """Resolve `resume=`: `none`, `auto` (finding nothing is fine), or a run or checkpoint directory.

    Args:
        warn: receives notices for users about the choice.

    Raises:
        ConfigError: there is nothing to resume from at that path; the checkpoint is damaged, or abandoned by a
        rewind; the run has another model, other data or other samples; `auto` with the `run_dir` of a completed run
        without a checkpoint.
    """
    if config.resume == "none":
        return None
    files = RunDir.of(Path(), config.trainer.checkpoint_dir)
    if (remote := remote_checkpoints(files, config.timeouts.call_s)) is not None:
        remote.pull()
        pull_claim(remote)
    found = _newest(config, root, warn) if config.resume == "auto" else _named(config, warn)
    return None if found is None else _resume(config, found, warn)


def resume_in_run(run_dir: RunDir, history: LineageHistory) -> Resume | None:
    """Return what a replacement of the Trainer resumes from while the run continues; None: the initial model.

    Args:
        history: the run's rewinds so far. They exclude checkpoints that a replaced Trainer wrote after its successor
            started.

    Raises:
        ConfigError: the newest checkpoint is damaged.
    """
    checkpoint = find_latest(run_dir.checkpoints, history)
    if checkpoint is None:
        return None
    manifest = load_manifest(checkpoint)
    return Resume(run_dir.path, checkpoint, manifest, history.after_rewind(manifest.progress.step))


def completed_at(run_dir: Path) -> int | None:
    """Return the step at which the run completed; None: it did not, or that is unknown."""
    summary = read_readable_summary(run_dir)
    return summary.step if summary is not None and summary.status == "completed" else None


# ------------------------------------------------------------------------------------------------ identity


def journal_identity(config: Config) -> dict[str, Any]:
    """Return `run_identity` and the settings of generation and reward, on which finished samples depend.

    A run that resumes from a journal trains on earlier samples, so these settings may not change. They may change in a
    run that resumes from a checkpoint alone, because it generates every later sample again.
    """
    values = config.identity_values()
    rollout, model = config.rollout, values["reward_model"]
    scoring = _without(values["reward"], ("on_error", "max_errors", "timeout_s", "max_concurrency"))
    served = config.reward_model.placement == "serve"
    return {
        **run_identity(config),
        "rollout.n": rollout.n,
        "rollout.response_length": rollout.response_length,
        **{f"rollout.sampling.{key}": value for key, value in values["rollout"]["sampling"].items()},
        **{f"reward.{key}": value for key, value in scoring.items()},
        "reward model in the reward": [model["path"], model["weight"]] if served else None,
        "greedy baseline": config.algorithm.adv_estimator == "remax",
        **_conversations(config, values),
    }


def _conversations(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of conversations in `values`, if trajectories have more than one turn."""
    rollout = config.rollout
    settings: dict[str, Any] = {}
    if rollout.multi_turn.enable:
        # Deadlines and concurrency limits do not change conversations.
        limits = ("timeout_s", "max_concurrency", "max_per_s", "on_error")
        turns = _without(values["rollout"]["multi_turn"], ("timeout_s",))
        turns |= {key: [_without(entry, limits) for entry in turns[key]] for key in ("tools", "interactions")}
        settings |= {f"rollout.multi_turn.{key}": value for key, value in turns.items()}
        settings["model.chat_template_kwargs"] = values["model"]["chat_template_kwargs"]
    if rollout.agent.enabled:
        agent = values["rollout"]["agent"]
        settings["rollout.agent"] = [agent["program"], agent["command"]]
    return settings


def _without(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


# ------------------------------------------------------------------------------------------------ choice


class _ResumeSource(NamedTuple):
    run_dir: Path | None
    """None: only `trainer.checkpoint_dir` is left."""
    checkpoints: Path
    """The directory that contains the run's checkpoints."""
    claim: Claim | None = None
    """None: the checkpoints are in the run directory, or their directory has no claim."""
    head: JournalHead | None = None
    """None: there is no journal, or it is not used."""
    checkpoint: Path | None = None
    """None: there is only a journal."""

    @property
    def history(self) -> LineageHistory:
        """The claim is at least as new as the journal."""
        if self.claim is not None:
            return self.claim.history
        return self.head.history if self.head is not None else NO_REWINDS


def _newest(config: Config, root: Path, warn: Callable[[str], None]) -> _ResumeSource | None:
    if (directory := RunDir.of(Path(), config.trainer.checkpoint_dir).checkpoint_dir) is not None:
        return _in_checkpoint_dir(directory, config, warn)
    if config.run_dir is not None:
        return _in_run_dir(Path(config.run_dir), config, warn)
    passed: list[str] = []
    found: _ResumeSource | None = None
    for run in runs_of(config.experiment_name, root=root):
        elsewhere = RunDir.saved(run.path).checkpoint_dir
        source = _find_in(run.path, config) if elsewhere is None else f"has trainer.checkpoint_dir={elsewhere}"
        if not isinstance(source, str):
            found = source
            break
        passed.append(f"{run.path.name} ({source or 'it is empty'})")
    if passed:
        onward = f"continues {found.run_dir}" if found is not None else "finds no run to continue and begins a new one"
        more = f", and {len(passed) - MAX_NAMED_RUNS} more" if len(passed) > MAX_NAMED_RUNS else ""
        warn(f"resume=auto {onward}. Skipped, newest first: {', '.join(passed[:MAX_NAMED_RUNS])}{more}")
    return found


def _in_run_dir(run_dir: Path, config: Config, warn: Callable[[str], None]) -> _ResumeSource | None:
    source = _find_in(run_dir, config)
    if not isinstance(source, str):
        return source
    if source == _COMPLETED:
        raise ConfigError(
            f"the run in {run_dir} {_COMPLETED}: there is nothing to continue, and starting it again would replace "
            f"its records. For another run, give another run_dir."
        )
    if source and config.run_dir is None:
        warn(f"resume=auto begins a new run: the one in {run_dir} {source}")
    elif source:
        warn(f"resume=auto starts the run in {run_dir} anew: it {source}. Its records are set aside as *-abandoned-*")
    return None


def _in_checkpoint_dir(directory: Path, config: Config, warn: Callable[[str], None]) -> _ResumeSource | None:
    """Return what the run of the checkpoints in `trainer.checkpoint_dir` continues from, in its own run directory if
    that is here; None: a new run begins."""
    source = _ResumeSource(None, directory, read_claim(directory))
    if (run_dir := _run_dir_of(source.claim, config)) is not None:
        return _in_run_dir(run_dir, config, warn)
    if (checkpoint := find_latest(directory, source.history)) is None:
        warn(f"resume=auto finds no checkpoint in trainer.checkpoint_dir={directory} and begins a new run")
        return None
    return source._replace(checkpoint=checkpoint)


def _run_dir_of(claim: Claim | None, config: Config) -> Path | None:
    """Return the directory of the run that has made the claim, or else the run in `run_dir`; None: neither is here."""
    named = [Path(config.run_dir)] if config.run_dir is not None else []
    if claim is not None:
        for path in (*named, claim.run_dir):
            if read_run_id(path) == claim.run_id:
                return path
    return next((path for path in named if RunDir(path).config.exists()), None)


_COMPLETED = "is completed and left no checkpoint"


def _find_in(run_dir: Path, config: Config) -> _ResumeSource | str:
    """Return the checkpoint and the journal in the run directory; if it has neither, the reason as a phrase whose
    subject is the run, empty if there is no run."""
    head = read_head(run_dir) if config.journal == "on" else None
    checkpoints = RunDir.of(run_dir, config.trainer.checkpoint_dir).checkpoints
    source = _ResumeSource(run_dir, checkpoints, _claim_of(run_dir, config), head)
    if (checkpoint := find_latest(checkpoints, source.history)) is not None:
        return source._replace(checkpoint=checkpoint)
    if completed_at(run_dir) is not None:
        return _COMPLETED
    if head is not None and not head.damage:
        return source
    if not (run_dir / "config.yaml").exists():
        return ""
    if head is not None:
        return f"has no checkpoint, and its journal is damaged: {head.damage}"
    return f"has no checkpoint, and {'journal=off' if config.journal == 'off' else 'no journal'}"


def _claim_of(run_dir: Path, config: Config) -> Claim | None:
    """Return the claim of `trainer.checkpoint_dir`, which must be that of the run in `run_dir`.

    Raises:
        ConfigError: the run's checkpoints are elsewhere, or those in the directory are another run's.
    """
    saved, present = RunDir.saved(run_dir), RunDir.of(run_dir, config.trainer.checkpoint_dir)
    if saved.checkpoints.resolve() != present.checkpoints.resolve() and checkpoint_steps(saved.checkpoints):
        raise ConfigError(
            f"trainer.checkpoint_dir={present.checkpoint_dir or 'null'}: the checkpoints of the run in {run_dir} are "
            f"in {saved.checkpoints}, and the run would not continue from them. Restore "
            f"trainer.checkpoint_dir={saved.checkpoint_dir or 'null'}, or move all files in that directory to "
            f"{present.checkpoints}."
        )
    if (directory := present.checkpoint_dir) is None:
        return None
    claim, run_id = read_claim(directory), read_run_id(run_dir)
    if claim is None and run_id is not None and read_readable_state(run_dir) is not None:
        raise ConfigError(
            f"trainer.checkpoint_dir={directory} has no {CLAIM}, which the run in {run_dir} has written: its "
            "checkpoints are not there, and training would go back to the initial model. Check that the disk is "
            "mounted, or start anew with resume=none and other directories."
        )
    if claim is not None and claim.run_id != run_id:
        raise ConfigError(
            f"trainer.checkpoint_dir={directory} has the checkpoints of the run in {claim.run_dir} on {claim.host}, "
            f"not of the one in {run_dir}: the records of the two would be mixed. To continue from these checkpoints, "
            f"give a run_dir that does not exist yet; to continue the run in {run_dir}, give its own "
            "trainer.checkpoint_dir."
        )
    return claim


def _named(config: Config, warn: Callable[[str], None]) -> _ResumeSource:
    path, directory = Path(config.resume).expanduser().absolute(), _checkpoint_dir(config)
    if _CHECKPOINT.fullmatch(path.name) or (path / MANIFEST).exists():
        return _checkpoint(path, config)
    _check_claimed(path, config)
    found: _ResumeSource | str | None
    if path.resolve() == directory:
        found = _in_checkpoint_dir(path, config, warn)
    else:
        found = _find_in(path.parent if path.name == CHECKPOINTS else path, config)
    if found is None or isinstance(found, str):
        why = f": the run {found}" if found else ""
        raise ConfigError(
            f"resume={config.resume}: there is no checkpoint to continue from, and no journal of a run that died "
            f"before its first checkpoint{why}. Give none, auto, a run directory that has {CHECKPOINTS}/step_*, or one "
            "of these checkpoints"
        )
    return found


def _checkpoint_dir(config: Config) -> Path | None:
    directory = RunDir.of(Path(), config.trainer.checkpoint_dir).checkpoint_dir
    return None if directory is None else directory.resolve()


def _check_claimed(directory: Path, config: Config) -> None:
    if (directory / CLAIM).exists() and directory.resolve() != _checkpoint_dir(config):
        raise ConfigError(
            f"resume={config.resume}: the run in {directory} has its checkpoints there, and its next ones would be "
            f"elsewhere. Give trainer.checkpoint_dir={directory}, too."
        )


def _checkpoint(path: Path, config: Config) -> _ResumeSource:
    """Return that checkpoint, if its run may resume from it.

    Raises:
        ConfigError: training went back to an earlier step and abandoned it; or it is not in `trainer.checkpoint_dir`.
    """
    directory = path.parent
    _check_claimed(directory, config)
    run_dir: Path | None = directory.parent
    claim = None
    if directory.resolve() == _checkpoint_dir(config):
        claim = read_claim(directory)
        run_dir = _run_dir_of(claim, config)
    if run_dir is not None:
        claim = _claim_of(run_dir, config)
    head = read_head(run_dir) if config.journal == "on" and run_dir is not None else None
    source = _ResumeSource(run_dir, directory, claim, head, path)
    lineage, digits = read_lineage(path), path.name.rpartition("_")[2]
    rewind = None
    if lineage is not None and digits.isdigit():
        rewind = source.history.abandoned_by(int(digits), lineage)
    if rewind is not None or path.name.startswith(ABANDONED):
        where = f"to step {rewind.step} (lineage {rewind.lineage})" if rewind is not None else "to an earlier step"
        raise ConfigError(
            f"resume={config.resume}: training went back {where}, and this checkpoint's samples "
            f"were handed out again: the run cannot continue from it. Start a new one: resume=none{_from_weights(path)}"
        )
    return source


# ------------------------------------------------------------------------------------------------ compatibility


def _resume(config: Config, found: _ResumeSource, warn: Callable[[str], None]) -> Resume:
    head = found.head
    checkpoint = found.checkpoint.absolute() if found.checkpoint is not None else None
    manifest = Manifest(Progress(), QueueSnapshot(1, (), SampleCounts(), 0), run_identity(config))
    if checkpoint is not None:
        manifest = load_manifest(checkpoint)
        _check_identity(checkpoint, manifest.identity, run_identity(config), checkpoint)
        _check_architecture(checkpoint, config.model.path)
        _check_critic(checkpoint, manifest, config)
    lineage = max(found.history.lineage, *_lineages(found)) + 1
    history = found.history.after_rewind(manifest.progress.step, lineage)
    if found.run_dir is None:
        lost = _loss(found, manifest.progress)
        warn(lost)
        return Resume(None, checkpoint, manifest, history, lost=lost)
    run_dir = found.run_dir.absolute()
    # Even if the journal is missing (which the queue reports), new files must not reuse the names of existing ones.
    incarnations: Mapping[str, int] = {"rollouter": incarnation_of_files(run_dir)}
    if head is not None:
        incarnations = dict(head.incarnations)
        # A damaged journal is not used; the queue reports the reason when it sets the journal aside.
        if not head.damage:
            _check_journal(run_dir, head, config, checkpoint)
    if checkpoint is None:
        _check_same_model(run_dir, config)
        if head is not None and not head.from_start:
            raise ConfigError(
                f"{run_dir / JOURNAL} does not reach back to the start of the run, and the run has no checkpoint: "
                "training cannot go back to the initial model, because the journal has forgotten which samples were "
                f"trained. Restore a checkpoint in {found.checkpoints}, or start anew with another run_dir and "
                "resume=none."
            )
    return Resume(run_dir, checkpoint, manifest, history, incarnations)


def _loss(found: _ResumeSource, at: Progress) -> str:
    """Return a notice about the lost run directory."""
    where = f", {found.claim.run_dir} on {found.claim.host}," if found.claim is not None else ""
    return (
        f"the run directory{where} is not here: the run continues in a new one from {found.checkpoint}, which is step "
        f"{at.step} (version {at.version}, {at.trained_samples} trained samples). Everything since then is lost: those "
        "samples are handed out again, and generated and trained again. Metrics and records of earlier steps are lost, "
        "too, except for the sample counts"
    )


def _lineages(found: _ResumeSource) -> list[int]:
    """Return the lineages in the run's state file and checkpoints, as far as they can be read; always includes 0."""
    state = read_readable_state(found.run_dir) if found.run_dir is not None else None
    checkpoints = [read_lineage(path) or 0 for path in found.checkpoints.glob("*step_*")]
    return [0 if state is None else state.lineage, *checkpoints]


def _check_identity(file: Path, saved: Mapping[str, Any], present: Mapping[str, Any], weights: Path | None) -> None:
    """Check the settings. `weights`: the checkpoint whose weights a new run could start from instead."""
    if (key := _differs(saved, present)) is not None:
        raise ConfigError(
            f"{file} was written with {key}={saved.get(key)!r}, this run has {present.get(key)!r}: feed indices and "
            f"versions would mean something else. Restore the setting, or start anew with resume=none"
            f"{_from_weights(weights)}."
        )


def _check_journal(run_dir: Path, head: JournalHead, config: Config, checkpoint: Path | None) -> None:
    file, of_run = run_dir / JOURNAL, run_identity(config)
    _check_identity(file, {key: head.identity.get(key) for key in of_run}, of_run, checkpoint)
    present = journal_identity(config)
    if (key := _differs(head.identity, present)) is not None:
        alone = f"; or continue from {checkpoint.name} alone and generate them again: journal=off" if checkpoint else ""
        raise ConfigError(
            f"{file} has samples that were generated with {key}={head.identity.get(key)!r}, this run has "
            f"{present.get(key)!r}: training would treat them as generated with the new setting. Restore the "
            f"setting{alone}; or start anew with resume=none{_from_weights(checkpoint)}."
        )


def _differs(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Return the first setting that differs."""
    return next((key for key in sorted(saved.keys() | present.keys()) if saved.get(key) != present.get(key)), None)


def _from_weights(checkpoint: Path | None) -> str:
    if checkpoint is None or not (checkpoint / HF_DIRECTORY).is_dir():  # trainer.hf_export
        return ""
    return f" (model.path={checkpoint / HF_DIRECTORY} starts from its weights)"


def _check_same_model(run_dir: Path, config: Config) -> None:
    """Check that a run without a checkpoint still has the initial model that generated its samples."""
    earlier = SavedConfig(run_dir).value("model", "path")
    if earlier not in (None, config.model.path):
        raise ConfigError(
            f"model.path={config.model.path}: the run in {run_dir} has no checkpoint yet, and its samples are from "
            f"{earlier}. Restore model.path, or start anew with resume=none and another run_dir."
        )


def _check_critic(checkpoint: Path, manifest: Manifest, config: Config) -> None:
    if config.needs_critic and not any(name.startswith("critic/") for name in manifest.files):
        raise ConfigError(
            f"{checkpoint} has no critic, which algorithm.adv_estimator={config.algorithm.adv_estimator} needs: it was "
            f"written with another estimator. Restore that one, or start anew with resume=none"
            f"{_from_weights(checkpoint)}."
        )


def _read_model_config(file: Path) -> dict[str, Any]:
    try:
        if not isinstance(content := read_json(file), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Restore it, or start anew with resume=none.") from None
    return content


def _check_architecture(checkpoint: Path, model_path: str) -> None:
    """Compare the models' JSON configs. The Trainer's engine compares every shape, and checks models from the hub."""
    present_file = Path(resolve(model_path)) / "config.json"
    if not present_file.is_file():
        return
    saved_file = checkpoint / HF_DIRECTORY / "config.json"
    if not saved_file.parent.is_dir():  # trainer.hf_export
        return
    saved, present = _read_model_config(saved_file), _read_model_config(present_file)
    for key in _ARCHITECTURE:
        if key in saved and key in present and saved[key] != present[key]:
            raise ConfigError(
                f"{saved_file} has {key}={saved[key]!r}, model.path={model_path} has {present[key]!r}: the "
                f"checkpoint has another model. Give the model that the run trained, or start anew with resume=none."
            )

"""The run that writes to a `trainer.checkpoint_dir`, and its rewinds. Blocking; this module does not import torch.

<run_dir>/run.id              the run's id
<checkpoint_dir>/run.json     the claim: that id, the run directory and its host, and the run's rewinds

`trainer.checkpoint_dir` survives the machine of the run directory, so `run.lock` and the journal do not protect it. A
launch claims it, and the newest claim counts: a Trainer checks before it writes or deletes a checkpoint that the
claim is its run's. A run that was continued elsewhere and then comes back to life is refused, and ends.

The claim records a rewind before the journal does. A launch that has only this directory therefore skips the
checkpoints that the rewind abandoned, even if none of them has been renamed yet.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.failures import ConfigError, FencedError, InfraError
from asyncrl.storage.checkpoint_manifest import LineageHistory, checkpoint_steps
from asyncrl.storage.remote_checkpoints import DEFAULT_CALL_S, RemoteCheckpoints, remote_checkpoints
from asyncrl.storage.run_dir import RunDir, disk_error, read_file, read_json, replace_file, sync

CLAIM = "run.json"
RUN_ID = "run.id"


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of the claim."""

    run_id: str
    run_dir: Path
    host: str
    history: LineageHistory


def read_claim(checkpoint_dir: Path) -> Claim | None:
    """Return the claim of the directory; None: there is none.

    Raises:
        ConfigError: it cannot be read; the message names the file and the fix.
    """
    path = checkpoint_dir / CLAIM
    try:
        raw = read_json(path)
        return Claim(str(raw["run_id"]), Path(raw["run_dir"]), str(raw["host"]), LineageHistory.load(raw["history"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it says which run wrote these checkpoints and "
            "which of them were abandoned. Restore it, or delete it to continue from the newest checkpoint of the "
            "newest lineage in a new run directory."
        ) from None


def read_run_id(run_dir: Path) -> str | None:
    """Return the id of a run that has claimed a directory; None: the run is not there, or has not."""
    try:
        return read_file(run_dir / RUN_ID).decode(errors="replace").strip() or None
    except OSError:
        return None


def claim_checkpoints(
    run_dir: RunDir,
    history: LineageHistory,
    *,
    new: bool,
    exclusive: bool,
    mode: int,
    call_s: float = DEFAULT_CALL_S,
) -> None:
    """Claim `trainer.checkpoint_dir`, if the run has one, for the run in `run_dir`.

    Args:
        history: includes the rewind with which this launch begins.
        new: the run begins at step 0.
        exclusive: refuse a directory that has a claim.
        mode: mode of the directory, if it does not exist.
        call_s: `timeouts.call_s`.

    Raises:
        ConfigError: the directory has a claim or, for a new run, checkpoints; or it cannot be written.
        InfraError: the disk is full.
    """
    if (root := run_dir.checkpoint_dir) is None:
        return
    where = run_dir.checkpoint_url or root
    remote = remote_checkpoints(run_dir, call_s)
    if new and (checkpoint_steps(root) if remote is None else remote.steps()):
        raise ConfigError(
            f"trainer.checkpoint_dir={where} has checkpoints, none of which this run continues from: later they could "
            "be taken for its own. Give another directory, or remove them if they are not needed."
        )
    try:
        root.mkdir(mode, parents=True, exist_ok=True)
        if remote is not None:
            remote.pull()
            pull_claim(remote)
        run_id = read_run_id(run_dir.path)
        if run_id is None:
            run_id = secrets.token_hex(16)
            replace_file(run_dir.path / RUN_ID, f"{run_id}\n", durable=True)
        if exclusive:
            (root / CLAIM).touch(exist_ok=False)
        _write(root, Claim(run_id, run_dir.path, socket.gethostname(), history), remote)
    except FileExistsError:
        raise ConfigError(
            f"trainer.checkpoint_dir={where} belongs to another run, which has just claimed it ({where}/{CLAIM}): "
            "each run needs a directory of its own. Give another one, or continue that run with resume=auto."
        ) from None
    except OSError as error:
        raise disk_error(Path(error.filename or root), error) from error


def record_history(run_dir: RunDir, history: LineageHistory, call_s: float = DEFAULT_CALL_S) -> None:
    """Record a rewind in the claim, if the run has a `trainer.checkpoint_dir`.

    Raises:
        FencedError: another launch has claimed the directory.
        ConfigError, InfraError: the claim cannot be read or written.
    """
    if (root := run_dir.checkpoint_dir) is None:
        return
    run_id = read_run_id(run_dir.path) or ""
    if (remote := remote_checkpoints(run_dir, call_s)) is not None:
        pull_claim(remote)
    claim = check_claim(root, run_id, history.lineage)
    try:
        _write(root, Claim(run_id, run_dir.path, claim.host, history), remote)
    except OSError as error:
        raise disk_error(Path(error.filename or root), error) from error


def check_claim(checkpoint_dir: Path, run_id: str, lineage: int) -> Claim:
    """Return the claim, which must be that of the run `run_id` in `lineage` or an earlier one.

    Raises:
        FencedError: another launch, or a later Trainer of the run, has claimed the directory.
        InfraError: there is no claim any more.
        ConfigError: the claim cannot be read.
    """
    claim = read_claim(checkpoint_dir)
    if claim is None:
        raise InfraError(
            f"{checkpoint_dir / CLAIM} is gone: trainer.checkpoint_dir is no longer the directory that the run began "
            "with, so a checkpoint there could not be found again. Mount the disk again, or restore the file; then "
            "continue with resume=auto."
        )
    if claim.run_id != run_id:
        raise FencedError(
            f"trainer.checkpoint_dir={checkpoint_dir} was claimed by the run in {claim.run_dir} on {claim.host}, which "
            "continues from its checkpoints: this run writes no more of them. End this one; give each run a directory "
            "of its own."
        )
    if claim.history.lineage > lineage:
        raise FencedError(
            f"{checkpoint_dir / CLAIM} is of lineage {claim.history.lineage}: the Trainer of lineage {lineage} was "
            "replaced, and its checkpoints are no longer used"
        )
    return claim


def pull_claim(remote: RemoteCheckpoints) -> None:
    """Make the claim in the mirror that of the URL.

    Raises:
        ConfigError, InfraError: see `RemoteCheckpoints`.
    """
    if (content := remote.read(CLAIM)) is None:
        (remote.mirror / CLAIM).unlink(missing_ok=True)
    else:
        replace_file(remote.mirror / CLAIM, content.decode(errors="replace"), durable=True)


def _write(root: Path, claim: Claim, remote: RemoteCheckpoints | None) -> None:
    record = {
        "run_id": claim.run_id,
        "run_dir": str(claim.run_dir),
        "host": claim.host,
        "history": claim.history.dump(),
    }
    text = json.dumps(record, indent=1) + "\n"
    if remote is not None:
        remote.write(CLAIM, text.encode())
    replace_file(root / CLAIM, text, durable=True)
    sync(root)

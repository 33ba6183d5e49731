"""What an engine needs to go on, as files: torch.distributed.checkpoint over safetensors and JSON, no pickle.

dcp/                 trained weights and optimizer moments by parameter name, in shards that any number of ranks reads
rng_N.safetensors    torch's generators, of each rank
engine.json          optimizer steps taken (all the schedule needs), and what the engine was

With LoRA the weights are the adapters alone: the frozen ones are those of `model.path`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from asyncrl.failures import AsyncRLError, ConfigError, InfraError
from asyncrl.run_dir import disk_error
from trainer.engine.base import EngineSpec
from trainer.engine.dist import rank, world_size
from trainer.engine.export import HfExport
from trainer.engine.live import LiveState, live_state
from trainer.engine.storage import Index, ShardReader, ShardWriter, damaged, read_index, write_json, write_tensors

SHARDS = "dcp"
ENGINE = "engine.json"
WRITE_DEADLINE = timedelta(hours=1)
"""How long a rank waits for the others to have written their files."""

_groups: WeakKeyDictionary[nn.Module, dist.ProcessGroup] = WeakKeyDictionary()


class PendingSave:
    """A checkpoint on its way to disk."""

    def __init__(self, directory: Path, written: Future[None], group: dist.ProcessGroup | None) -> None:
        self._directory, self._written, self._group = directory, written, group

    def wait_for_files(self) -> None:
        """Until this rank has written its files, well or not. Not collective."""
        self._written.exception()

    def wait(self) -> None:
        """Until every rank has written its files. Collective, but on a process group of its own: it may run beside
        collectives of the training.

        Raises (on every rank):
            InfraError: some rank could not write, as when the disk is full; names the file.
            ConfigError: the directory is not writable.
        """
        error = self._written.exception()
        _raise_first(_write_failure(self._directory, error), self._group)


def begin_save(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    spec: EngineSpec,
    *,
    hf: Path | None = None,
) -> PendingSave:
    """Copy the state to CPU, so that training may go on, and write it in a thread. Collective; `directory` exists.

    `hf`: a directory that is to hold the whole model in Hugging Face format, written by rank 0, which then needs
    memory for all of it.

    Raises (on every rank):
        InfraError: the state could not be collected.
    """
    writer = ShardWriter(directory / SHARDS)
    group = _own_group(model)
    export = HfExport.stage(model) if hf is not None else None
    with _dcp("saving", directory):
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save(dict(live_state(model, optimizer).tensors()), storage_writer=writer, planner=planner)
    generators, record = _generators(), _engine_record(step, spec) if rank() == 0 else None

    def write() -> None:
        writer.flush()
        write_tensors(generators, _rng_file(directory))
        if export is not None and hf is not None:
            export.write(hf, spec.model)
        if record is not None:
            write_json(record, directory / ENGINE)

    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = executor.submit(write)
    executor.shutdown(wait=False)
    return PendingSave(directory, written, group)


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: EngineSpec) -> int:
    """Put back what `begin_save` wrote, bit for bit, on any number of ranks. Collective. Returns the steps taken.

    Generators come back only where the rank was there when it was saved. Without `optimizer`, only weights are loaded.

    Raises (on every rank, with nothing changed):
        ConfigError: files are missing or damaged, or belong to another model. The message names the file and the fix.
    """
    live = live_state(model, optimizer)
    found, failure = None, None
    try:
        found = _inspect(directory, live, spec)
    except ConfigError as error:
        failure = error
    _raise_first(failure, None)
    assert found is not None, "_inspect gives one or raises"
    planner = _StagingPlanner()
    with _dcp("loading", directory):
        dcp.load(found.wanted, storage_reader=ShardReader(directory / SHARDS, found.stored), planner=planner)
    # Nothing above has changed the live state, and nothing below depends on what is on disk.
    live.restore(planner.staged, found.wanted)
    _restore_generators(found.generators)
    return found.step


class _Found(NamedTuple):
    """A checkpoint that fits the live model."""

    step: int
    stored: Index
    wanted: dict[str, Tensor]
    """By stored name, what shows how the tensor is sharded here."""
    generators: Mapping[str, Tensor]


class _StagingPlanner(DefaultLoadPlanner):
    """Reads into CPU buffers of the shape of this rank's parts, not into the parts themselves."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged: dict[str, Tensor] = {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn not in self.staged:
            live = super().lookup_tensor(index)
            self.staged[index.fqn] = torch.empty(live.shape, dtype=live.dtype)
        return self.staged[index.fqn]


def _inspect(directory: Path, live: LiveState, spec: EngineSpec) -> _Found:
    record = _read_record(directory / ENGINE)
    _check_adapters(directory / ENGINE, record["lora"], _lora(spec))
    index = read_index(directory / SHARDS)
    if not live.has_optimizer:
        index = {name: entry for name, entry in index.items() if not name.startswith("optimizer.")}
    wanted = live.wanted({name: entry.shape for name, entry in index.items()})
    for name in sorted(wanted.keys() | index.keys()):
        there = (index[name].dtype, index[name].shape) if name in index else "nothing"
        here = (
            (str(wanted[name].dtype).removeprefix("torch."), tuple(wanted[name].shape)) if name in wanted else "nothing"
        )
        if there != here:
            raise ConfigError(
                f"{directory / SHARDS}: the state of another model: {name} is {there} there and {here} here, so "
                "nothing was loaded; give the model.path that this run was started with, or use resume=none"
            )
    generators = _read_generators(directory) if rank() < record["world_size"] else {}
    return _Found(record["step"], index, wanted, generators)


def _engine_record(step: int, spec: EngineSpec) -> dict[str, Any]:
    return {
        "step": step,
        "model_type": spec.model_type,
        "strategy": spec.engine.strategy,
        "world_size": world_size(),
        "lora": _lora(spec),
    }


def _lora(spec: EngineSpec) -> dict[str, Any] | None:
    return {"rank": spec.model.lora_rank, "alpha": spec.model.lora_alpha} if spec.model.lora_rank else None


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(record["step"]), "world_size": int(record["world_size"]), "lora": record["lora"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from None


def _check_adapters(path: Path, saved: Any, live: Any) -> None:
    if saved != live:
        raise ConfigError(
            f"{path}: the checkpoint has {f'LoRA adapters {saved}' if saved else 'no LoRA adapters'}, the "
            f"configuration asks for {live or 'none'}, so nothing was loaded; set model.lora_rank and model.lora_alpha "
            "as they were, or use resume=none"
        )


def _rng_file(directory: Path) -> Path:
    return directory / f"rng_{rank()}.safetensors"


def _generators() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _read_generators(directory: Path) -> Mapping[str, Tensor]:
    path = _rng_file(directory)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from None
    for name, live in _generators().items():
        if name == "cpu" and name not in tensors:
            raise damaged(path, "it lacks the CPU's generator")
        if name in tensors and (tensors[name].shape != live.shape or tensors[name].dtype != live.dtype):
            raise damaged(path, f"it holds no state of a {name} generator")
    return tensors


def _restore_generators(tensors: Mapping[str, Tensor]) -> None:
    if "cpu" in tensors:
        torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def _own_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks once more, for what may run beside the training's collectives. Collective the first time."""
    if world_size() == 1:
        return None
    if model not in _groups:
        _groups[model] = dist.new_group(backend="gloo", timeout=WRITE_DEADLINE)
    return _groups[model]


def _write_failure(directory: Path, error: BaseException | None) -> AsyncRLError | None:
    match error:
        case None | AsyncRLError():
            return error
        case OSError(filename=str() | Path() as name):
            return disk_error(Path(name), error)
        case OSError():
            return disk_error(directory, error)
    return InfraError.wrap(
        f"{directory}: the checkpoint could not be written ({error}), so it does not count; the run's earlier ones are "
        "untouched. Free some space, or put the run elsewhere with run_dir=PATH",
        error,
    )


def _raise_first(failure: AsyncRLError | None, group: dist.ProcessGroup | None) -> None:
    """If any rank has failed, so do all, with the error of the first. Collective."""
    failures = [failure]
    if world_size() > 1:
        failures = [None] * world_size()
        dist.all_gather_object(failures, failure, group=group)
    for first in failures:
        if first is not None:
            raise first


@contextmanager
def _dcp(what: str, directory: Path) -> Iterator[None]:
    """One error for what DCP gathers from all ranks, the same on each of them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        number, (cause, _) = min(error.failures.items())
        if isinstance(cause, AsyncRLError):
            raise cause from None
        raise InfraError.wrap(
            f"{what} {directory} failed on rank {number}: {cause}; see the cause below", cause
        ) from None

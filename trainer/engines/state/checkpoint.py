"""Checkpoints of engines, in safetensors and JSON, without pickles.

dcp/                 trained weights and optimizer moments by parameter name, sharded; any number of ranks can read them
rng_N.safetensors    states of torch's random generators on rank N
engine.json          optimizer steps taken (the schedule needs nothing else), and the kind of the engine

With LoRA, the weights are only the adapters: the frozen weights are those of `model.path`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import AsyncRLError, ConfigError, DeadlineError, InfraError
from asyncrl.storage.run_dir import disk_error
from trainer.engines.base import EngineSpec
from trainer.engines.dist import gather, pick_device, rank, world_size
from trainer.engines.state.storage import (
    Index,
    ShardWriter,
    box_of,
    damaged,
    dtype_name,
    read_index,
    read_shards,
    write_json,
    write_tensors,
)
from trainer.engines.state.weights import HfExport, LiveState, live_state

SHARDS = "dcp"
ENGINE = "engine.json"
WRITE_FACTOR = 12
"""Writing a checkpoint may take this many times `EngineSpec.collective_s`: an hour by default."""

T = TypeVar("T")

_groups: WeakKeyDictionary[nn.Module, dist.ProcessGroup] = WeakKeyDictionary()


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, directory: Path, written: Future[None], group: dist.ProcessGroup | None, limit_s: float) -> None:
        self._directory, self._written, self._group, self._limit_s = directory, written, group, limit_s

    def wait_for_files(self) -> None:
        """Wait until this rank has written its files or failed, within the time limit. Not collective."""
        wait([self._written], self._limit_s)

    def wait(self) -> None:
        """Wait until every rank has written its files. Collective on a separate process group, so that it may run
        concurrently with collectives of the training.

        Raises (on every rank):
            InfraError: a rank could not write, for example because the disk is full; the message names the file.
            DeadlineError: a rank is still writing.
            ConfigError: the directory is not writable.
        """
        failure: AsyncRLError | None
        try:
            failure = _write_failure(self._directory, self._written.exception(self._limit_s))
        except TimeoutError:
            failure = DeadlineError(
                f"{self._directory}: rank {rank()} has not written its part of the checkpoint within "
                f"{self._limit_s:g} s, so this checkpoint is not used; check the disk, or raise "
                f"timeouts.collective_s: the limit is {WRITE_FACTOR} times that"
            )
        _raise_first(failure, self._group)


def begin_save(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    spec: EngineSpec,
    *,
    hf: Path | None = None,
    hf_dtype: Dtype = "float32",
) -> PendingSave:
    """Copy the state to CPU, so that training may continue, and write it in a thread. Collective; `directory` exists.

    `hf`: the directory into which rank 0 writes the whole model in Hugging Face format, in `hf_dtype`; rank 0 then
    needs memory for the whole model.

    Raises (on every rank):
        InfraError: the state could not be collected.
    """
    limit_s = WRITE_FACTOR * spec.collective_s
    group = _own_group(model, limit_s)
    export = HfExport.stage(model, hf_dtype) if hf is not None else None
    tensors = live_state(model, optimizer).tensors()
    boxes = gather({name: box_of(tensor) for name, tensor in tensors.items()})
    writer = ShardWriter(directory / SHARDS, boxes, rank())
    _on_all_ranks(lambda: writer.stage(tensors), f"saving {directory}")
    generators = _generators(pick_device(spec.engine.device))
    record = _engine_record(step, spec) if rank() == 0 else None

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
    return PendingSave(directory, written, group, limit_s)


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: EngineSpec) -> int:
    """Load the state that `begin_save` wrote, bit for bit, on any number of ranks. Collective. Returns the steps taken.

    Random generators are restored only on ranks that existed when it was saved. Without `optimizer`, only weights
    are loaded.

    Raises (on every rank, with nothing changed):
        ConfigError: files are missing or damaged, or belong to another model. The message names the file and the fix.
    """
    live = live_state(model, optimizer)
    what = f"loading {directory}"
    files = _on_all_ranks(lambda: _read(directory, live, spec), what)
    wanted = live.wanted({name: entry.shape for name, entry in files.stored.items()})  # may be collective
    _on_all_ranks(lambda: _check_fit(directory, files.stored, wanted, spec.path_key), what)
    staged = _on_all_ranks(lambda: read_shards(directory / SHARDS, files.stored, wanted), what)
    # Until here the live state is unchanged; from here on nothing depends on the disk.
    live.restore(staged, wanted)
    _restore_generators(files.generators, pick_device(spec.engine.device))
    return files.step


def release(model: nn.Module) -> None:
    """Destroy the process group that `begin_save` keeps for this model. No save may be running."""
    if (group := _groups.pop(model, None)) is not None and dist.is_initialized():
        dist.destroy_process_group(group)


class _Files(NamedTuple):
    """Everything in a checkpoint except the shards."""

    step: int
    stored: Index
    generators: Mapping[str, Tensor]


def _read(directory: Path, live: LiveState, spec: EngineSpec) -> _Files:
    record = _read_record(directory / ENGINE)
    _check_adapters(directory / ENGINE, record["lora"], _lora(spec))
    index = read_index(directory / SHARDS)
    if not live.has_optimizer:
        index = {name: entry for name, entry in index.items() if not name.startswith("optimizer.")}
    was_there = rank() < record["world_size"]
    generators = _read_generators(directory, pick_device(spec.engine.device)) if was_there else {}
    return _Files(record["step"], index, generators)


def _check_fit(directory: Path, stored: Index, wanted: Mapping[str, Tensor], path_key: str) -> None:
    for name in sorted(wanted.keys() | stored.keys()):
        there = (stored[name].dtype, stored[name].shape) if name in stored else "nothing"
        here = (dtype_name(wanted[name]), tuple(wanted[name].shape)) if name in wanted else "nothing"
        if there != here:
            raise ConfigError(
                f"{directory / SHARDS}: this is the state of another model: {name} is {there} there and {here} in this "
                f"run, so nothing was loaded; restore the run's original {path_key}, or use resume=none"
            )


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, error) from None


def _check_adapters(path: Path, saved: Any, live: Any) -> None:
    if saved != live:
        raise ConfigError(
            f"{path}: the checkpoint has {f'LoRA adapters {saved}' if saved else 'no LoRA adapters'}, the "
            f"configuration asks for {live or 'none'}, so nothing was loaded; restore the original model.lora_rank and "
            "model.lora_alpha, or use resume=none"
        )


def _rng_file(directory: Path) -> Path:
    return directory / f"rng_{rank()}.safetensors"


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of the CPU and of the engine's device. A query of another GPU would
    create a CUDA context there."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _read_generators(directory: Path, device: torch.device) -> Mapping[str, Tensor]:
    path = _rng_file(directory)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from None
    states = _generators(device)
    for name, live in states.items():
        if name == "cpu" and name not in tensors:
            raise damaged(path, "it lacks the state of the CPU's generator")
        if name in tensors and (tensors[name].shape != live.shape or tensors[name].dtype != live.dtype):
            raise damaged(path, f"it holds no state of a {name} generator")
    return {name: tensors[name] for name in states if name in tensors}


def _restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _own_group(model: nn.Module, limit_s: float) -> dist.ProcessGroup | None:
    """Return a second process group of all ranks, for use concurrently with the training's. Collective the first
    time."""
    if world_size() == 1:
        return None
    if model not in _groups:
        _groups[model] = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
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
        f"{directory}: the checkpoint could not be written ({error}), so it is not used; the run's earlier checkpoints "
        "are unchanged. Free some space, or put the run elsewhere with run_dir=PATH",
        error,
    )


def _on_all_ranks(act: Callable[[], T], what: str) -> T:
    """Return the result of `act` once it has succeeded on every rank. Collective; `act` itself must not be.

    Raises (on every rank):
        AsyncRLError: the failure of the first rank on which it failed.
    """
    found: list[T] = []
    failure: AsyncRLError | None = None
    try:
        found.append(act())
    except AsyncRLError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - converted, and raised on every rank
        failure = InfraError.wrap(f"{what} failed on rank {rank()}: {error}; see the cause below", error)
    _raise_first(failure, None)
    return found[0]


def _raise_first(failure: AsyncRLError | None, group: dist.ProcessGroup | None) -> None:
    """If any rank has failed, raise the error of the first one on all ranks. Collective."""
    for first in gather(failure, group):
        if first is not None:
            raise first

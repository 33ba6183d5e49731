"""Run the contract of `trainer.engine.contract` on backends, on this machine.

    torchrun --nproc_per_node 2 -m trainer.engine.selfcheck [--backend fsdp2 | all] [--device cpu] [--json]
    python -m trainer.engine.selfcheck

It makes its own tiny models. Exit code 1 if a check fails, 2 if a backend cannot run at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed

from asyncrl.failures import ConfigError, InfraError
from trainer.engine import dist
from trainer.engine.contract import Check, checks_of
from trainer.engine.contract.reference import write_models
from trainer.engine.contract.setting import Setting
from trainer.engine.registry import BUILT_IN

COLLECTIVE_S = 60.0
"""After a rank has failed alone the others wait so long, and what follows is not run."""


@dataclass(frozen=True, slots=True)
class Result:
    backend: str
    check: str
    passed: bool
    seconds: float
    detail: str
    """Of the first rank that failed; empty if none did."""


def run(backends: Sequence[str], device: str, directory: Path) -> list[Result]:
    """All checks of all backends, on every rank of the process group there is. The same result on all ranks.

    Raises:
        ConfigError: a backend is unknown or cannot run on this device.
    """
    results = []
    for backend in backends:
        setting = Setting(backend, device, directory)
        for check in checks_of(backend, device, dist.world_size()):
            results.append(_run(check, setting))
    return results


def _run(check: Check, setting: Setting) -> Result:
    began = time.perf_counter()
    failure = ""
    try:
        check.run(setting)
    except Exception as error:  # noqa: BLE001 - whatever an engine does wrong is a result
        failure = f"rank {dist.rank()}: {type(error).__name__}: {error}"
    failures: list[str] = [""] * dist.world_size()
    if dist.world_size() > 1:
        with dist.guarded(check.name):
            torch.distributed.all_gather_object(failures, failure)
    else:
        failures = [failure]
    detail = next((text for text in failures if text), "")
    return Result(setting.backend, check.name, not detail, round(time.perf_counter() - began, 2), detail)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.engine.selfcheck", description=__doc__)
    parser.add_argument("--backend", default="all", help="a name that trainer.strategy takes, or all built-in ones")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = dist.pick_device(options.device)
    dist.join(device, timeout_s=COLLECTIVE_S)
    alone = dist.world_size() == 1
    backends = (
        [name for name in BUILT_IN if alone or name != "local"] if options.backend == "all" else [options.backend]
    )
    directory = _shared_directory()
    try:
        results = run(backends, device.type, directory)
    except (ConfigError, InfraError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        if dist.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
    if dist.rank() == 0:
        sys.stdout.write(_document(results, device.type) if options.json else _table(results))
    torch.distributed.barrier()  # torchrun ends all ranks as soon as one fails: not before rank 0 has written
    dist.leave()
    return 0 if all(result.passed for result in results) else 1


def _shared_directory() -> Path:
    """Made by rank 0, with the models in it; on one machine all ranks see it."""
    path = [tempfile.mkdtemp(prefix="asyncrl-selfcheck-")] if dist.rank() == 0 else [""]
    if dist.rank() == 0:
        write_models(Path(path[0]))
    if dist.world_size() > 1:
        torch.distributed.broadcast_object_list(path, src=0)
    return Path(path[0])


def _document(results: Sequence[Result], device: str) -> str:
    document = {"ranks": dist.world_size(), "device": device, "results": [asdict(result) for result in results]}
    return json.dumps(document, indent=1) + "\n"


def _table(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        mark = "ok  " if result.passed else "FAIL"
        lines.append(f"{mark}  {result.backend:<10} {result.check.replace('_', ' '):<56} {result.seconds:6.2f} s")
        lines += [f"      {line}" for line in result.detail.splitlines()]
    failed = sum(not result.passed for result in results)
    lines.append(f"{len(results) - failed} passed, {failed} failed, on {dist.world_size()} rank(s)")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())

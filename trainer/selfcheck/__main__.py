"""Run the contract of `trainer.selfcheck.checks` on backends, on this machine.

    torchrun --nproc_per_node 2 -m trainer.selfcheck [--backend fsdp2 | all] [--device cpu] [--json]
    python -m trainer.selfcheck

The checks create tiny models. The exit code is 1 if a check fails, and 2 if a backend cannot run at all, with one line
that gives the reason; torchrun itself exits with 1 in both cases.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed

from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError, UserCodeError
from trainer.engines import dist
from trainer.engines.registry import BUILT_IN
from trainer.selfcheck.checks import checks_of
from trainer.selfcheck.setting import Check, CheckSetting, write_models

logger = logging.getLogger(__name__)

COLLECTIVE_S = 60.0
"""How long the other ranks wait after a failure of only one rank; the remaining checks are then skipped."""
SKIPPED_LOCAL = "it runs in one process: python -m trainer.selfcheck --backend local"


@dataclass(frozen=True, slots=True)
class CheckResult:
    backend: str
    check: str
    passed: bool
    seconds: float
    detail: str
    """The failure of the first rank that failed; empty if none did."""


def run(backends: Sequence[str], device: str, directory: Path) -> list[CheckResult]:
    """Run all checks of all backends, on every rank of the process group. All ranks return the same results.

    Raises (on every rank):
        ConfigError, InfraError: a backend is unknown or cannot run here; no check was run.
    """
    checks = []
    for backend in backends:
        setting = CheckSetting(backend, device, directory)
        checks += [(check, setting) for check in _checks(setting)]
    return [_run(check, setting) for check, setting in checks]


def _checks(setting: CheckSetting) -> list[Check]:
    """Return the checks of a backend, after creating one of its engines on every rank."""
    failure: AsyncRLError | None = None
    checks: list[Check] = []
    try:
        checks = checks_of(setting.backend, setting.device, dist.world_size())
        for check in checks[:1]:
            setting.engine(check.model_type).close()
    except (ConfigError, InfraError, UserCodeError) as error:
        failure = error
    except Exception:  # the checks report any other problem of the backend
        logger.debug("%s: no engine could be made", setting.backend, exc_info=True)
    with dist.guarded(setting.backend):
        failures = dist.gather(failure)
    for first in failures:
        if first is not None:
            raise first
    return checks


def _run(check: Check, setting: CheckSetting) -> CheckResult:
    began = time.perf_counter()
    failure = ""
    try:
        check.run(setting)
    except Exception as error:  # noqa: BLE001 - any failure of an engine is a result
        failure = f"rank {dist.rank()}: {type(error).__name__}: {error}"
    with dist.guarded(check.name):
        detail = next(filter(None, dist.gather(failure)), "")
    return CheckResult(setting.backend, check.name, not detail, round(time.perf_counter() - began, 2), detail)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.selfcheck", description=__doc__)
    parser.add_argument("--backend", default="all", help="a value of trainer.strategy, or all built-in ones")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        device = dist.pick_device(options.device)
        dist.join(device, timeout_s=COLLECTIVE_S)
    except (ConfigError, InfraError) as error:
        parser.exit(2, f"{error.message}\n")
    skipped = {"local": SKIPPED_LOCAL} if options.backend == "all" and dist.world_size() > 1 else {}
    backends = [name for name in BUILT_IN if name not in skipped] if options.backend == "all" else [options.backend]
    directory = _shared_directory()
    results: list[CheckResult] = []
    failure = ""
    try:
        results = run(backends, device.type, directory)
    except (ConfigError, InfraError, UserCodeError) as error:
        failure = error.message
    finally:
        if dist.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
    if dist.rank() == 0 and failure:
        sys.stderr.write(f"{failure}\n")
    elif dist.rank() == 0:
        sys.stdout.write(_document(results, skipped, device.type) if options.json else _table(results, skipped))
    with suppress(RuntimeError):  # the ranks may have lost their connection
        torch.distributed.barrier()  # torchrun ends all ranks once one has failed, so rank 0 has to write first
    dist.leave()
    return 2 if failure else 0 if all(result.passed for result in results) else 1


def _shared_directory() -> Path:
    """Return a directory with the models, which rank 0 creates; on one machine all ranks see it."""
    path = [tempfile.mkdtemp(prefix="asyncrl-selfcheck-")] if dist.rank() == 0 else [""]
    if dist.rank() == 0:
        write_models(Path(path[0]))
    if dist.world_size() > 1:
        torch.distributed.broadcast_object_list(path, src=0)
    return Path(path[0])


def _document(results: Sequence[CheckResult], skipped: Mapping[str, str], device: str) -> str:
    document = {
        "ranks": dist.world_size(),
        "device": device,
        "skipped": skipped,
        "results": [asdict(result) for result in results],
    }
    return json.dumps(document, indent=1) + "\n"


def _table(results: Sequence[CheckResult], skipped: Mapping[str, str]) -> str:
    lines = []
    for result in results:
        mark = "ok  " if result.passed else "FAIL"
        lines.append(f"{mark}  {result.backend:<10} {result.check.replace('_', ' '):<56} {result.seconds:6.2f} s")
        lines += [f"      {line}" for line in result.detail.splitlines()]
    lines += [f"skip  {backend:<10} {reason}" for backend, reason in skipped.items()]
    failed = sum(not result.passed for result in results)
    lines.append(f"{len(results) - failed} passed, {failed} failed, on {dist.world_size()} rank(s)")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())

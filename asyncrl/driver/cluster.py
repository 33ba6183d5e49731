"""Ray for one run: a private cluster on this machine, or a place in an existing one."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from asyncrl.cli import processes
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError

logger = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_DISABLE_DEPLOYMENT_METRICS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A process that inherits a model's files must not look for them on a hub.
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# How soon a call to a process that died fails, and a process that does not end when asked is killed: by default it
# takes Ray seconds, in which a run stands still.
_NOTICE = {
    "timeout_ms_task_wait_for_death_info": 100,
    "core_worker_internal_heartbeat_ms": 100,
    "kill_worker_timeout_milliseconds": 500,
}


def worker_environment(config: Config) -> dict[str, str]:
    """Environment of every worker process of the run."""
    return {**_QUIET, "VLLM_LOGGING_LEVEL": config.logging.level.upper()}


@asynccontextmanager
async def cluster(config: Config, name: str, *, stale: str = "") -> AsyncIterator[str]:
    """Ray for the time of the block; yields the run's Ray namespace. At the end nothing of it is left running.

    Args:
        config: of the run.
        name: of the run; the namespace begins with it.
        stale: namespace of an earlier driver of this run, which may have died: what is left of it on a shared cluster
            is deleted first. A private one has ended with its driver.

    Raises:
        InfraError: Ray cannot start, or the cluster at `ray.address` does not answer.
        DeadlineError: what is stale was not deleted within `timeouts.start_s`.
    """
    processes.adopt_orphans()
    namespace = f"asyncrl-{name}-{secrets.token_hex(3)}"
    try:
        await _in_lasting_thread(partial(_start, config, namespace))
        if stale and config.ray.address is not None:
            await _delete_stale(stale, config.timeouts.start_s)
        yield namespace
    except BaseException:
        # A thread may still be inside a Ray call, and Ray ends the whole process if it is shut down under one. So Ray
        # is left as it is in this process, which is about to exit, and only what it started is ended.
        await _take_down(_abandon, config, namespace)
        raise
    await _take_down(_stop, config, namespace)


async def _delete_stale(namespace: str, limit_s: float) -> None:
    try:
        with anyio.fail_after(limit_s):
            await to_thread.run_sync(_leave_shared, namespace, abandon_on_cancel=True)
    except TimeoutError as error:
        raise DeadlineError(
            f"Ray Serve did not delete what is left of this run's last launch within {limit_s:g} s (timeouts.start_s): "
            f"its apps of {namespace}. See to the cluster at ray.address, or take another"
        ) from error


async def _take_down(how: Callable[[bool, str], None], config: Config, namespace: str) -> None:
    """Cancellation waits for it, but nobody waits longer than `timeouts.stop_s` for a Ray that hangs: what it has
    started here is ended then, and what is on a cluster of others' may stay there until the run is launched again."""
    private, limit_s = config.ray.address is None, config.timeouts.stop_s
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(limit_s) as scope:
            await to_thread.run_sync(how, private, namespace, abandon_on_cancel=True)
        if scope.cancelled_caught:
            left = "" if private else f"; Serve apps of {namespace} may be left on the cluster"
            logger.warning("Ray was not down within timeouts.stop_s=%g: nobody waits for it any more%s", limit_s, left)
            await to_thread.run_sync(processes.end_descendants)


async def _in_lasting_thread(function: Callable[[], None]) -> None:
    """Call it in a thread that lives as long as this process: the kernel kills Ray's processes when that thread ends
    which started them (`PR_SET_PDEATHSIG`), and those of a pool end when they are idle. Nobody waits if cancelled."""
    answer: Future[None] = Future()

    def work() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                function()
            except Exception as error:  # noqa: BLE001  it is raised where the answer is waited for
                answer.set_exception(error)
            else:
                answer.set_result(None)
        threading.Event().wait()

    threading.Thread(target=work, name="ray", daemon=True).start()
    await asyncio.wrap_future(answer)


def link_logs(logs: Path) -> None:
    """Make `logs/ray` lead to what every process of the cluster writes, where that is on this machine."""
    import ray
    from ray._common.utils import get_default_ray_temp_dir

    session = Path(get_default_ray_temp_dir()) / ray.get_runtime_context().get_session_name() / "logs"
    link = logs / "ray"
    if session.is_dir():
        with suppress(OSError):  # a convenience that a file system may not have
            link.unlink(missing_ok=True)
            link.symlink_to(session)


def _start(config: Config, namespace: str) -> None:
    for name, value in worker_environment(config).items():
        os.environ.setdefault(name, value)
    import ray

    logging.getLogger("ray").setLevel("DEBUG" if config.logging.level == "debug" else "ERROR")
    _tell_the_log(ray)
    private = config.ray.address is None
    # Logical slots: the operating system shares the cores; Ray only has to place one engine worker in each slot.
    slots = config.rollout.num_replicas * config.rollout.tensor_parallel_size * config.rollout.cpu_threads
    try:
        ray.init(
            # `local`: without it Ray would join whatever cluster this machine knows of.
            address=config.ray.address or "local",
            namespace=namespace,
            num_cpus=max(os.cpu_count() or 1, slots + 1) if private else None,
            object_store_memory=config.ray.object_store_memory_bytes if private else None,
            include_dashboard=False if private else None,
            log_to_driver=False,
            configure_logging=False,
            _system_config=dict(_NOTICE) if private else None,
        )
    except Exception as error:  # noqa: BLE001  whatever Ray raises here means the same: there is no cluster
        raise InfraError.wrap(
            f"ray.address={config.ray.address!r}: Ray did not start, so nothing runs: {error}; check the address, or "
            "leave it null for a private cluster on this machine",
            error,
        ) from None


def _tell_the_log(ray: Any) -> None:
    """Ray prints what it thinks of each process that died, past its settings. The run tells of those in its own words,
    on a terminal that belongs to the live view; Ray's go into the log."""

    def tell(data: dict[str, Any], **_: Any) -> None:
        logger.info("Ray: %s", " ".join(data["lines"]))

    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = tell


def _stop(private: bool, namespace: str) -> None:
    """An orderly end: nobody is in a Ray call any more."""
    import ray

    if not private:
        _leave_shared(namespace)
    ray.shutdown()
    processes.end_descendants(grace_s=1.0)


def _abandon(private: bool, namespace: str) -> None:
    if not private:
        _leave_shared(namespace)
    processes.end_descendants()


def _leave_shared(namespace: str) -> None:
    """A cluster that others use too keeps nothing of this run: its actors end with the driver, its apps are deleted."""
    import ray

    from rollouter.serving.app import delete_app

    if ray.is_initialized():
        delete_app(namespace)

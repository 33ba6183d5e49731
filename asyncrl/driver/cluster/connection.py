"""The machine and the Ray cluster of a run: a private cluster on this machine, or an existing one."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from asyncrl.config.environment import cpu_build, gpu_memory, usable_cpus, visible_gpus
from asyncrl.config.import_path import own_code
from asyncrl.config.interpolation import texts
from asyncrl.config.resources.plan import MachineResources
from asyncrl.config.resources.threads import share_cpus
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DeadlineError, InfraError
from asyncrl.core.tasks import in_background
from asyncrl.driver.cluster import processes
from asyncrl.storage.run_dir import RAY_LOGS

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

CONNECT_S = 5.0
"""Time limit of the connection that shows whether something listens at an address."""
_CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_PRIVATE = {"RAY_raylet_start_wait_time_s": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""Environment of a private cluster: on a busy machine, its node and Serve's proxy start late. Serve would kill a proxy
that is not ready after 5 s, and `serve.start`, which waits for 60 s, would fail."""
_SLEEPING = {"OMP_WAIT_POLICY": "passive"}
"""Environment of a private cluster whose processes share CPUs (`share_cpus`). torch and vLLM bring GNU's OpenMP, which
follows it, as LLVM's and Intel's do."""
_SHARED = {"RAY_gcs_server_port_wait_time_s": "1"}
"""Environment of a driver on a shared cluster: one attempt to connect, which may take 40 s. Ray makes 20, even if the
cluster refuses its token."""
# With Ray's defaults, seconds pass before a call to a dead process fails, and before a hung process is killed; and the
# GCS, which keeps 100,000 finished calls for Ray's dashboard, grows for hours.
_RAY_SETTINGS = {
    "timeout_ms_task_wait_for_death_info": 100,
    "core_worker_internal_heartbeat_ms": 100,
    "kill_worker_timeout_milliseconds": 500,
    "task_events_max_num_task_in_gcs": 10_000,
}


def detect_machine() -> MachineResources:
    """Return the CPUs this process may use, the visible NVIDIA GPUs and the memory of both, without loading torch: the
    physical memory, or the limit of the container if that is lower."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system has these
        memory_bytes = None
    with suppress(ValueError, OSError):  # "max": no limit
        limit = int(_CONTAINER_MEMORY.read_text(encoding="ascii"))
        memory_bytes = limit if memory_bytes is None else min(limit, memory_bytes)
    gpus = visible_gpus()
    return MachineResources(usable_cpus(), gpus, memory_bytes, gpu_memory() if gpus else None, cpu_build())


def run_environment(config: Config, machine: MachineResources) -> dict[str, str]:
    """Return the environment that the cluster's processes inherit from this one, if it starts the cluster; otherwise
    only this process has it."""
    own = _SHARED
    if config.ray.address is None:
        own = {**_PRIVATE, **(_SLEEPING if share_cpus(config, machine) else {})}
    return {**_QUIET, "VLLM_LOGGING_LEVEL": config.logging.level.upper(), **own}


@contextmanager
def connected(address: str, source: str = "ray.address", **options: Any) -> Iterator[None]:
    """Connect to a running cluster for the block, as a driver of its own. Blocking.

    Args:
        source: The key or option that has the address, for messages.
        options: Further arguments of `ray.init`.

    Raises:
        ConfigError: it does not answer, or requires its token.
    """
    for name, value in {**_QUIET, **_SHARED}.items():
        os.environ.setdefault(name, value)
    import ray

    _init(address, source=source, **options)
    yield
    # Not after an error: a thread of `ask` may still be inside a Ray call. This process is about to exit, which Ray
    # notices.
    ray.shutdown()


def ask(function: Callable[..., Result], *args: Any, limit_s: float, key: str = "") -> Result:
    """Return the result of `function`, which calls Ray or Serve in a thread: their clients wait without a limit for a
    Serve controller that is stopped or restarts. Blocking.

    Args:
        key: The configuration key of the limit, for the message.

    Raises:
        DeadlineError: there is no answer within `limit_s`.
    """
    answer = in_background(function, *args)
    if not wait([answer], limit_s).done:
        raise DeadlineError(
            f"the Ray cluster did not answer within {limit_s:g} s{key and f' ({key})'}: Ray Serve's controller may be "
            "restarting or hung. Check it (`serve status`), and try again"
        )
    result: Result = answer.result()
    return result


@asynccontextmanager
async def cluster(config: Config, name: str, *, stale: str = "") -> AsyncIterator[str]:
    """Start Ray, or connect to it, for the block; yield the run's namespace. At the end, all processes of the run are
    stopped.

    On a shared cluster, what drivers that have ended left there is removed first; a private cluster ends with its
    driver.

    Args:
        config: configuration of the run.
        name: name of the run, from which the namespace derives.
        stale: namespace of an earlier driver of this run that has ended.

    Raises:
        ConfigError: the cluster at `ray.address` does not answer, or requires its token.
        InfraError: Ray cannot start.
        DeadlineError: the removal of leftovers took longer than `timeouts.start_s`.
    """
    processes.adopt_orphans()
    namespace = f"asyncrl-{name}-{secrets.token_hex(3)}"
    try:
        await _in_permanent_thread(partial(_start, config, namespace))
        if config.ray.address is not None:
            await _clean(stale, config.timeouts.start_s)
        yield namespace
    except BaseException:
        # A thread may still be inside a Ray call, during which a shutdown of Ray would end this process. So only the
        # processes that Ray started are ended; this one is about to exit.
        await _take_down(_abandon, config, namespace)
        raise
    await _take_down(_stop, config, namespace)


def _remove_leftovers(stale: str) -> None:
    """Remove what drivers that have ended left. An application that stays is only logged: it may be any user's, and
    this run may have room without its GPUs, which `check_room` reports."""
    from asyncrl.driver.cluster.leftovers import find_leftovers
    from rollouter.serving.app import delete_apps

    if stale:  # Ray may not have noticed yet that this driver has ended
        _try_to_leave(False, stale)
    for app in find_leftovers():  # the user sees warnings, and has to know what ended on a cluster of several users
        try:
            delete_apps([app])
        except DeadlineError as error:
            logger.warning("%s. This launch goes on", error.message)
        else:
            logger.warning(
                "removed the Serve application %s: its driver has ended, and its engines kept their GPUs", app
            )


async def _clean(stale: str, limit_s: float) -> None:
    try:
        with anyio.fail_after(limit_s):
            await to_thread.run_sync(_remove_leftovers, stale, abandon_on_cancel=True)
    except TimeoutError as error:
        raise DeadlineError(
            f"Ray Serve did not delete the applications of launches that have ended within {limit_s:g} s "
            "(timeouts.start_s). Check the cluster at ray.address (`asyncrl clean --dry-run` lists them), or use "
            "another one"
        ) from error


async def _take_down(stop: Callable[[bool, str], None], config: Config, namespace: str) -> None:
    """Shut down, shielded from cancellation, within `timeouts.stop_s`.

    If Ray hangs, its processes on this machine are killed; apps on a shared cluster may stay until the next launch.
    """
    private, limit_s = config.ray.address is None, config.timeouts.stop_s
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(limit_s) as scope:
            await to_thread.run_sync(stop, private, namespace, abandon_on_cancel=True)
        if scope.cancelled_caught:
            left = "" if private else f"; Serve apps of {namespace} may still be on the cluster"
            logger.warning("Ray did not shut down within timeouts.stop_s=%g; its processes are killed%s", limit_s, left)
            await to_thread.run_sync(processes.end_descendants)


async def _in_permanent_thread(function: Callable[[], None]) -> None:
    """Call `function` in a thread that lives as long as this process.

    The kernel kills Ray's processes when the thread that started them ends (`PR_SET_PDEATHSIG`), and a pool's threads
    end when they are idle. A cancelled caller does not wait.
    """
    answer: Future[None] = Future()

    def work() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                function()
            except Exception as error:  # noqa: BLE001  raised in the caller
                answer.set_exception(error)
            else:
                answer.set_result(None)
        threading.Event().wait()

    threading.Thread(target=work, name="ray", daemon=True).start()
    await asyncio.wrap_future(answer)


def link_logs(logs: Path) -> Path | None:
    """Link `logs/ray` to the logs of the cluster's processes, and return their directory; None: it is on another
    machine."""
    import ray
    from ray._common.utils import get_default_ray_temp_dir

    session = Path(get_default_ray_temp_dir()) / ray.get_runtime_context().get_session_name() / "logs"
    link = logs / RAY_LOGS.name
    if not session.is_dir():
        return None
    with suppress(OSError):  # a file system may not support links
        link.unlink(missing_ok=True)
        link.symlink_to(session)
    return session


def _start(config: Config, namespace: str) -> None:
    private = config.ray.address is None
    for name, value in run_environment(config, detect_machine()).items():
        os.environ.setdefault(name, value)
    debug = config.logging.level == "debug"
    if not private:
        _init(config.ray.address, debug=debug, namespace=namespace, runtime_env=_runtime_env(config))
        return
    # Logical slots, one for each thread of the engines; the operating system shares the cores.
    # With GPUs that are used in turns, Ray knows only these, so that it puts both sides on the same ones. It does not
    # know those that the installed packages cannot use.
    shared = config.trainer.num_workers if config.takes_turns else None
    replicas = config.rollout.max_replicas + config.num_lent_replicas
    slots = replicas * config.rollout.replica_size * config.rollout.cpu_threads
    from rollouter.serving.ray_internals import processes_in_own_sessions

    with processes_in_own_sessions():
        _init(
            None,
            debug=debug,
            namespace=namespace,
            num_cpus=max(os.cpu_count() or 1, slots + 1),
            num_gpus=shared if visible_gpus() else 0,
            object_store_memory=config.ray.object_store_memory_bytes,
            include_dashboard=False,
            runtime_env=config.ray.runtime_env or None,
            _system_config=dict(_RAY_SETTINGS),
        )


def _runtime_env(config: Config) -> dict[str, Any] | None:
    """Return Ray's `runtime_env` of a run on an existing cluster.

    Its nodes may lack the user's files: Ray sends them, and every process of the run can import them.
    """
    found = texts(config.model_dump(mode="json", exclude={"ray"}))
    names = [text for at, text in found if ":" in text or at[-1] == "class_name" or at[:2] == ("skip", "modules")]
    given, code = config.ray.runtime_env, [str(path) for path in own_code(names)]
    return {**given, **({"py_modules": [*given.get("py_modules", ()), *code]} if code else {})} or None


def _init(address: str | None, *, debug: bool = False, source: str = "ray.address", **options: Any) -> None:
    """Connect to the cluster at `address`; None: start one.

    Raises:
        ConfigError: the cluster at `address` does not answer, or requires its token.
        InfraError: Ray cannot start here.
    """
    import ray

    logging.getLogger("ray").setLevel("DEBUG" if debug else "ERROR")  # the import has set another level
    _redirect_messages(ray)
    given = f"{source}={address or 'null'}"
    try:
        if address is not None:
            _check_listening(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        # Without `local` Ray would join a running cluster that it finds on this machine.
        ray.init(address=address or "local", log_to_driver=False, configure_logging=False, **options)
    except Exception as error:
        text = "".join(traceback.format_exception(error))  # Ray wraps the error several times
        if "InvalidAuthToken" in text and os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            names = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]
            place = names[0] if names else "~/.ray/auth_token"  # in the order in which Ray looks
            raise ConfigError(
                f"{given}: the token in {place} is not the cluster's, so nothing runs: `ray get-auth-token` prints the "
                "cluster's on the head node"
            ) from None
        if "InvalidAuthToken" in text or "AuthenticationError" in text:
            raise ConfigError(
                f"{given}: the cluster requires its token, so nothing runs: `export RAY_AUTH_MODE=token` and "
                "`export RAY_AUTH_TOKEN=...` (or put the token into ~/.ray/auth_token, or the path of its file into "
                "RAY_AUTH_TOKEN_PATH); `ray get-auth-token` prints it on the head node"
            ) from None
        if address is not None:
            from asyncrl.observe.terminal.live import ALREADY_SHOWN  # not at the top: it loads numpy

            logger.info("%s: Ray's error", given, exc_info=error, extra=ALREADY_SHOWN)
            alone = ", or leave it null for a private cluster on this machine" if source == "ray.address" else ""
            raise ConfigError(
                f"{given}: there is no Ray cluster that answers, so nothing runs: {' '.join(str(error).split())}; "
                f"check the address: `ray status` on a node of the cluster shows whether it runs{alone}"
            ) from None
        logs = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
        fix = f"Ray has a time limit of its own, so try again if the machine was busy; its logs are in {logs}"
        raise InfraError.wrap(f"{given}: Ray did not start, so nothing runs: {error}; {fix}", error) from None


def _check_listening(address: str) -> None:
    """Connect once to an address of the form HOST:PORT. Ray would try for 40 s or longer where nothing listens.

    Raises:
        OSError: nothing listens there, or the host is unknown.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:  # not `ray://` with its own port
        with suppress(TimeoutError):  # a slow network is left to Ray
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _redirect_messages(ray: Any) -> None:
    """Log Ray's messages about dead processes, which Ray would print over the live view whatever its settings."""

    def log(data: dict[str, Any], **_: Any) -> None:
        logger.info("Ray: %s", " ".join(data["lines"]))

    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = log


def _stop(private: bool, namespace: str) -> None:
    """Shut Ray down; requires that no call to Ray is in progress."""
    import ray

    _try_to_leave(private, namespace)
    ray.shutdown()
    processes.end_descendants(grace_s=1.0)


def _abandon(private: bool, namespace: str) -> None:
    _try_to_leave(private, namespace)
    processes.end_descendants()


def _try_to_leave(private: bool, namespace: str) -> None:
    """Leave a shared cluster. A failure is only logged, because the rest has to be shut down in any case."""
    if not private:
        try:
            _leave_shared(namespace)
        except Exception as error:  # noqa: BLE001  a cluster that ends may raise anything
            logger.warning("the run's Serve applications may still be on the cluster: %s", error)


def _leave_shared(namespace: str) -> None:
    """Delete the run's apps from a shared cluster; its actors end with the driver."""
    import ray

    from rollouter.serving.app import delete_app

    if ray.is_initialized():
        delete_app(namespace)

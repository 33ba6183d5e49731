"""Signals, processes, the Ray cluster, and the translation of Ray's errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import anyio
import anyio.lowlevel
import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, DeadlineError, DiskFullError, InfraError, UserCodeError
from asyncrl.core.staleness import Pacing
from asyncrl.core.tasks import Interrupts
from asyncrl.driver.actors import translate
from asyncrl.driver.cluster import connection as cluster_module
from asyncrl.driver.cluster import leftovers
from asyncrl.driver.cluster.connection import _in_permanent_thread
from asyncrl.driver.cluster.processes import end_known
from asyncrl.queue.actor import start_queue
from asyncrl.queue.sample_queue import QueueOptions
from rollouter.actor import start_rollouter
from rollouter.serving import app
from trainer.actor import start_trainer


class Signalled:
    """Listens to interrupts while the test sends signals."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        self.stopping = anyio.Event()

    async def stop(self) -> None:
        self.stopping.set()

    async def stop_forever(self) -> None:
        self.stopping.set()
        await anyio.sleep_forever()

    async def receive(self, *signals: signal.Signals) -> bool:
        """Send the signals, and wait for the orderly stop to begin after each of them. Return whether the scope was
        cancelled."""
        with anyio.fail_after(10), self.interrupts.scope:
            async with anyio.create_task_group() as group:
                await group.start(self.interrupts.listen)
                for number in signals:
                    os.kill(os.getpid(), number)
                    await self.stopping.wait()
                if self.interrupts.on_first != self.stop:
                    await anyio.sleep_forever()
                group.cancel_scope.cancel()
        assert self.interrupts.received
        return self.interrupts.scope.cancelled_caught


async def test_the_first_signal_begins_an_orderly_stop() -> None:
    run = Signalled()
    run.interrupts.on_first = run.stop
    assert not await run.receive(signal.SIGINT)


async def test_the_second_signal_cancels_at_once() -> None:
    run = Signalled()
    run.interrupts.on_first = run.stop_forever
    assert await run.receive(signal.SIGINT, signal.SIGTERM)


async def test_a_sigterm_that_arrives_twice_at_once_is_one() -> None:
    """`timeout` sends it to the driver, and then to the group of both."""
    run = Signalled()
    run.interrupts.on_first = run.stop
    assert not await run.receive(signal.SIGTERM, signal.SIGTERM)


async def test_the_first_signal_during_the_start_cancels_at_once() -> None:
    assert await Signalled().receive(signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_grandchildren_whose_parent_died_are_found_and_ended(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import subprocess, sys
        from asyncrl.driver.cluster.processes import adopt_orphans, end_descendants
        adopt_orphans()
        # A child that starts a grandchild in a new session, prints the grandchild's pid and dies.
        code = (
            "import subprocess as s;"
            "print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, start_new_session=True).pid)"
        )
        child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        print(int(child.stdout), end_descendants())
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    grandchild, ended = map(int, done.stdout.split())
    assert ended == 1
    assert not psutil.pid_exists(grandchild)


def test_a_stopped_process_is_ended_and_one_with_a_reused_pid_is_not() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        began = psutil.Process(child.pid).create_time()
        end_known([child.pid], began - 5.0)
        assert child.poll() is None
        child.send_signal(signal.SIGSTOP)
        end_known([child.pid], began)
        assert not psutil.pid_exists(child.pid)
        end_known([child.pid], began)  # the process no longer exists, so nothing happens
    finally:
        child.kill()


async def test_ray_is_started_in_a_thread_that_outlives_the_pools() -> None:
    seen: list[threading.Thread] = []
    await _in_permanent_thread(lambda: seen.append(threading.current_thread()))
    assert seen[0] is not threading.current_thread() and seen[0].is_alive() and seen[0].daemon

    def fails() -> None:
        raise InfraError("Ray did not start")

    with pytest.raises(InfraError, match="did not start"):
        await _in_permanent_thread(fails)


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("address", [None, "auto"])
async def test_a_hanging_shutdown_of_ray_is_bounded(
    address: str | None, interrupted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung, ended = threading.Event(), threading.Event()
    config = Config.model_validate({"ray": {"address": address}, "timeouts": {"stop_s": 0.05}})
    for name in ("_start", "_remove_leftovers"):
        monkeypatch.setattr(cluster_module, name, lambda *_: None)
    for name in ("_stop", "_abandon"):
        monkeypatch.setattr(cluster_module, name, lambda *_: hung.wait())
    monkeypatch.setattr(cluster_module.processes, "end_descendants", ended.set)
    try:
        with anyio.move_on_after(5) as limit, anyio.CancelScope() as scope:
            async with cluster_module.cluster(config, "run"):
                if interrupted:
                    scope.cancel()
                await anyio.lowlevel.checkpoint()
    finally:
        hung.set()
    assert not limit.cancelled_caught and scope.cancelled_caught is interrupted
    assert ended.is_set(), "the processes of Ray are ended"
    assert "did not shut down within timeouts.stop_s=0.05" in caplog.text
    assert ("may still be on the cluster" in caplog.text) is (address is not None)


async def test_a_launch_removes_what_killed_drivers_have_left_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Applications of living drivers, and those that no driver has marked, stay."""
    deleted: list[str] = []
    for name in ("_start", "_stop"):
        monkeypatch.setattr(cluster_module, name, lambda *_: None)
    monkeypatch.setattr(leftovers, "marked_apps", lambda: {"asyncrl-old-1-rollout": "01", "asyncrl-new-rollout": "02"})
    monkeypatch.setattr(leftovers, "living_drivers", lambda: {"02"})
    monkeypatch.setattr(app, "delete_apps", deleted.extend)
    with caplog.at_level(logging.WARNING):
        async with cluster_module.cluster(Config.model_validate({"ray": {"address": "auto"}}), "run"):
            assert deleted == ["asyncrl-old-1-rollout"]
    assert "removed the Serve application asyncrl-old-1-rollout: its driver has ended" in caplog.text
    assert "asyncrl-new" not in caplog.text


async def test_a_launch_goes_on_although_serve_does_not_delete_the_applications_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Replicas on a lost node may keep them for hours, and the cluster may have room for this run."""
    names = ("asyncrl-stuck-rollout", "asyncrl-old-rollout")
    served = SimpleNamespace(applications=dict.fromkeys(names))
    for name in ("_start", "_stop"):
        monkeypatch.setattr(cluster_module, name, lambda *_: None)
    monkeypatch.setattr(cluster_module, "_leave_shared", Mock(side_effect=DeadlineError("not deleted: asyncrl-mine")))
    monkeypatch.setattr(leftovers, "marked_apps", lambda: dict.fromkeys(names, "01"))
    monkeypatch.setattr(leftovers, "living_drivers", lambda: {"02"})

    def delete(name: str) -> None:
        if name != "asyncrl-old-rollout":
            raise TimeoutError

    monkeypatch.setattr(app.serve, "status", lambda: served)
    monkeypatch.setattr(app.serve, "delete", delete)
    started = False
    async with cluster_module.cluster(Config.model_validate({"ray": {"address": "auto"}}), "run", stale="asyncrl-mine"):
        started = True
    assert started
    assert "not deleted: asyncrl-mine" in caplog.text
    assert "Ray Serve has not deleted asyncrl-stuck-rollout within 60 s" in caplog.text
    assert "removed the Serve application asyncrl-old-rollout: its driver has ended" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
async def test_ray_is_shut_down_although_serve_does_not_delete_the_applications(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, fails: bool
) -> None:
    done: list[str] = []
    leave = Mock(side_effect=DeadlineError("Ray Serve has not deleted run-rollout"))
    monkeypatch.setattr(cluster_module, "_start", lambda *_: None)
    monkeypatch.setattr(cluster_module, "_remove_leftovers", lambda stale: None)
    monkeypatch.setattr(cluster_module, "_leave_shared", leave)
    monkeypatch.setattr("ray.shutdown", lambda: done.append("ray"))
    monkeypatch.setattr(cluster_module.processes, "end_descendants", lambda **_: done.append("descendants"))
    with nullcontext() if not fails else pytest.raises(InfraError, match="the run failed"):
        async with cluster_module.cluster(Config.model_validate({"ray": {"address": "auto"}}), "run"):
            if fails:
                raise InfraError("the run failed")
    assert done == (["descendants"] if fails else ["ray", "descendants"])
    assert "may still be on the cluster: Ray Serve has not deleted run-rollout" in caplog.text


async def test_removing_leftovers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    config = Config.model_validate({"ray": {"address": "auto"}, "timeouts": {"start_s": 0.05}})
    for name in ("_start", "_abandon"):
        monkeypatch.setattr(cluster_module, name, lambda *_: None)
    monkeypatch.setattr(cluster_module, "_remove_leftovers", lambda stale: hung.wait())
    try:
        with anyio.fail_after(5), pytest.raises(DeadlineError, match=r"ray\.address \(`asyncrl clean --dry-run`"):
            async with cluster_module.cluster(config, "run", stale="asyncrl-old-1"):
                raise AssertionError("the leftovers still exist")
    finally:
        hung.set()


def test_ray_errors_of_a_part_are_translated() -> None:
    def task_error(cause: Exception) -> RayTaskError:
        return RayTaskError("run", "the remote traceback", cause)

    original = UserCodeError("the reward function raised", "its traceback")
    assert translate("rollouter", task_error(original)) is original
    full = translate("trainer", task_error(OSError(28, "No space left on device")))
    assert isinstance(full, DiskFullError)
    assert "No space left" in str(full)
    assert isinstance(translate("trainer", task_error(ConnectionResetError("a peer"))), InfraError)
    assert isinstance(translate("trainer", task_error(ActorDiedError())), InfraError), (
        "the Trainer raises the death of a rank"
    )
    gone = translate("trainer", ActorDiedError())
    assert isinstance(gone, InfraError)
    assert gone.message.startswith("the trainer's process died; ") and "logs/ray" in gone.message
    assert "The actor died unexpectedly" in gone.cause
    bug = translate("trainer", task_error(KeyError("x")))
    assert isinstance(bug, BugError)
    assert "the remote traceback" in bug.cause


HERE = "1f" * 28
"""The id of a node, with the length that Ray requires."""


@pytest.mark.parametrize(
    "start",
    [
        lambda: start_queue(QueueOptions(10, Pacing(4, 0, None), None, "drop")),
        lambda: start_rollouter(Config()),
        lambda: start_trainer(Config()),
    ],
    ids=["queue", "rollouter", "trainer"],
)
def test_actors_that_write_the_run_directory_run_on_the_drivers_node(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = MagicMock()
    monkeypatch.setattr(ray, "remote", actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: HERE))
    start()
    where = actor.return_value.options.call_args.kwargs["scheduling_strategy"]
    assert (where.node_id, where.soft) == (HERE, False)


@pytest.mark.parametrize(
    ("source", "fix"),
    [("ray.address", "or leave it null for a private cluster"), ("--address", "shows whether it runs\n")],
)
def test_an_address_that_does_not_answer_is_named_by_its_key_or_option(
    source: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def refuse(**options: Any) -> None:
        raise ConnectionError("nothing listens there")

    monkeypatch.setattr(ray, "init", refuse)
    for names in ("_QUIET", "_SHARED"):
        monkeypatch.setattr(cluster_module, names, {})
    with pytest.raises(ConfigError) as raised, cluster_module.connected("10.0.0.9:6379", source):
        pass
    assert raised.value.message.startswith(f"{source}=10.0.0.9:6379: there is no Ray cluster that answers")
    assert "nothing listens there" in raised.value.message and "\n" not in str(raised.value), "without a traceback"
    assert fix in f"{raised.value.message}\n"


class AuthenticationError(Exception):
    """Has the name of Ray's error, which needs Ray's settings for its text."""


@pytest.mark.parametrize(
    ("variables", "cause", "message"),
    [
        ({}, "RPC error: InvalidAuthToken: it is missing or incorrect", "the cluster requires its token"),
        ({"RAY_AUTH_MODE": "token"}, "no authentication token was found", "the cluster requires its token"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "other"},
            "RPC error: InvalidAuthToken: it is missing or incorrect",
            "the token in RAY_AUTH_TOKEN is not the cluster's",
        ),
        (
            {"RAY_AUTH_MODE": "Token"},
            "RPC error: InvalidAuthToken: it is missing or incorrect",
            "the token in ~/.ray/auth_token is not the cluster's",
        ),
    ],
)
def test_a_missing_token_is_another_error_than_a_wrong_one(
    variables: dict[str, str], cause: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def refuse(**options: Any) -> None:
        raise ConnectionError("failed to connect") from AuthenticationError(cause)

    monkeypatch.setattr(ray, "init", refuse)
    for names in ("_QUIET", "_SHARED"):
        monkeypatch.setattr(cluster_module, names, {})
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster_module, "_check_listening", lambda address: None)
    with pytest.raises(ConfigError) as raised, cluster_module.connected("10.0.0.9:6379"):
        pass
    assert raised.value.message.startswith(f"ray.address=10.0.0.9:6379: {message}, so nothing runs: ")

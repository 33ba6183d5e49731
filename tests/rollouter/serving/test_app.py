"""The start of applications, which polls the status of Serve until a deadline. The tests run no Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import ray
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DeadlineError, InfraError
from rollouter.serving import app, http

NAMESPACE = "run"
NAME = app.app_name(NAMESPACE)


def serving(**statuses: str) -> Any:
    """Return a stand-in for `serve.status` with these applications."""
    applications = {
        app.app_name(NAMESPACE, part): SimpleNamespace(status=app.ApplicationStatus(status), deployments={}, message="")
        for part, status in statuses.items()
    }
    return lambda: SimpleNamespace(applications=applications)


async def start(monkeypatch: pytest.MonkeyPatch, status: Any, *, start_s: float = 60.0) -> None:
    monkeypatch.setattr(app, "_deploy", lambda *args: None)
    monkeypatch.setattr(app.serve, "status", status)
    with anyio.fail_after(30):
        await app.start_app(Config.model_validate({"timeouts": {"start_s": start_s}}), namespace=NAMESPACE)


async def test_the_start_ends_when_the_application_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    await start(monkeypatch, serving(rollout="RUNNING"))


async def test_a_run_that_lends_gpus_starts_and_deletes_a_second_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_gpus", lambda: True)
    monkeypatch.setattr(app.serve, "start", lambda **options: None)
    monkeypatch.setattr(app.serve, "status", lambda: serving(rollout="RUNNING", lent="RUNNING")())
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    deployed: dict[str, Any] = {}
    monkeypatch.setattr(
        app.serve, "run_many", lambda targets, **_: deployed.update({one.name: one.target for one in targets})
    )
    config = Config.model_validate({"trainer": {"lend_after_s": 5, "num_workers": 2}})
    with anyio.fail_after(30):
        await app.start_app(config, namespace=NAMESPACE)
    options = {name: target._bound_deployment.init_args[0] for name, target in deployed.items()}
    assert {name: (one.lent, one.num_replicas) for name, one in options.items()} == {
        "run-rollout": (False, 1), "run-lent": (True, 2),
    }  # fmt: skip
    deleted: list[str] = []
    monkeypatch.setattr(app.serve, "delete", deleted.append)
    app.delete_app(NAMESPACE)
    assert deleted == ["run-lent", "run-rollout"]


def test_applications_that_serve_does_not_delete_in_time_are_named_and_the_others_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deleted: list[str] = []

    def delete(name: str) -> None:
        deleted.append(name)
        if name != "run-rollout":
            raise TimeoutError("Some of these applications weren't deleted after 60s")

    monkeypatch.setattr(app.serve, "status", serving(rollout="RUNNING", lent="RUNNING", reward="RUNNING"))
    monkeypatch.setattr(app.serve, "delete", delete)
    with pytest.raises(DeadlineError, match=r"not deleted run-lent, run-reward within 60 s .*`asyncrl clean` again"):
        app.delete_app(NAMESPACE)
    assert deleted == ["run-lent", "run-reward", "run-rollout"]


async def test_the_end_of_a_run_does_not_wait_for_a_serve_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(app.serve, "status", lambda: answer.wait(5) and serving()())
    try:
        with anyio.move_on_after(0.1) as scope:
            await app.stop_app(NAMESPACE)
        assert scope.cancelled_caught and not answer.is_set()
        assert anyio.current_time() < scope.deadline + 2
    finally:
        answer.set()


async def test_a_start_ends_at_its_deadline_if_serve_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"the rollout engines were not up within 0\.2 s \(timeouts\.start_s\)"):
            await start(monkeypatch, answer.wait, start_s=0.2)
        monkeypatch.setattr(app.serve, "status", answer.wait)
        with anyio.fail_after(30), pytest.raises(DeadlineError, match=r"not replaced within 0\.2 s"):
            await app.replicas_up(NAME, 0.2)
    finally:
        answer.set()


async def test_a_deleted_application_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match=f"no application {NAME} any more .it has run-reward."):
        await start(monkeypatch, serving(reward="RUNNING"))
    with anyio.fail_after(30), pytest.raises(InfraError, match=f"no application {NAME} any more"):
        await app.replicas_up(NAME, 10.0)


def overrides(**args: Any) -> dict[str, str]:
    return dict(text.split("=", 1) for text in app._overrides(args))


def test_arguments_of_a_deployment_are_keys_of_the_configuration() -> None:
    assert overrides(model="m", num_replicas="2", rollout={"max_num_seqs": 8, "sampling": {"stop": ["a"]}}) == {
        "model.path": "m",
        "rollout.num_replicas": "2",
        "rollout.max_num_seqs": "8",
        "rollout.sampling.stop": '["a"]',
    }
    assert overrides(**{"rollout.response_length": "7", "serve": {"api_key_env": None}}) == {
        "rollout.response_length": "7",
        "serve.api_key_env": "null",
    }


def test_a_deployment_with_wrong_arguments_is_refused_with_all_problems() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*num_replica.*max_num_seqs"):
        app.build_app({"rollout": {"num_replica": 2, "max_num_seqs": 0}})
    with pytest.raises(ConfigError) as raised:
        app.build_app({"num_replica": 2, "rollout": {"max_num_seqs": 0}, "rollout.n": "["})
    message = str(raised.value)
    assert message.count("(argument of the application)") == 3 and "command line" not in message, message


def test_a_deployment_has_the_replicas_and_the_api_in_front_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr(http, "build_http_app", lambda *args, **kwargs: built.update(kwargs, options=args[0]))
    app.build_app({"config": "quickstart", "num_replicas": 2})
    assert (built["options"].namespace, built["options"].num_replicas, built["trajectories"]) == (None, 2, True)


class DeployedApp:
    """Replaces Serve by one with the application `servers`.

    `statuses` are its next statuses, the last of which stays. `answers` are the failures of the next broadcasts, or
    None.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *answers: Any, statuses: Sequence[str] = ("RUNNING",), **deployments: Any
    ) -> None:
        self.answers, self.statuses, self.deployments = list(answers), list(statuses), deployments
        monkeypatch.setattr(app.serve, "status", self._status)
        monkeypatch.setattr(app.serve, "get_deployment_handle", lambda *names: self)
        monkeypatch.setattr(app, "STATUS_PERIOD_S", 0.0)
        monkeypatch.setattr(app, "_gpus", lambda: False)

    def _status(self) -> Any:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        deployments = {} if status == "DELETING" else self.deployments
        running = SimpleNamespace(
            status=app.ApplicationStatus(status), deployments=deployments, message=f"Serve says {status}"
        )
        return SimpleNamespace(applications={"servers": running})

    def broadcast(self, method: str) -> Any:
        async def results_async() -> None:
            if (failure := self.answers.pop(0)) is not None:
                raise failure

        assert method == "attach"
        return SimpleNamespace(results_async=results_async)


ENGINES = SimpleNamespace(message="", replica_states={})
PREEMPTED = ray.exceptions.ActorDiedError()
PREEMPTED._preempted = True


async def attach(start_s: float = 60.0, **rollout: Any) -> None:
    config = Config.model_validate(
        {
            "rollout": {"attach": "servers", **rollout},
            "ray": {"address": "auto"},
            "model": {"path": "asyncrl://quickstart"},
            "timeouts": {"start_s": start_s},
        }
    )
    await app.attach(config, app.RolloutApp("servers", "store", attached=True))


async def test_a_run_attaches_to_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = DeployedApp(monkeypatch, None, rollout=ENGINES)
    await attach()
    assert deployed.answers == []


@pytest.mark.parametrize(
    "failure",
    [ray.exceptions.ActorDiedError(), PREEMPTED, DeploymentUnavailableError(DeploymentID("rollout", "servers"))],
)
async def test_a_run_waits_for_replicas_that_are_replaced_while_it_attaches(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """One is being replaced when the run comes, and another one ends during the call."""
    statuses = ["RUNNING", "UNHEALTHY", "RUNNING", "UNHEALTHY", "RUNNING"]
    deployed = DeployedApp(monkeypatch, failure, None, statuses=statuses, rollout=ENGINES)
    await attach()
    assert (deployed.answers, deployed.statuses) == ([], ["RUNNING"])


@pytest.mark.parametrize("status", ["UNHEALTHY", "DEPLOYING"])
async def test_a_run_attaches_to_the_replicas_that_run_if_there_is_no_room_for_the_others(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """A node has died, or more replicas were deployed than fit."""
    monkeypatch.setattr(app, "REPLACED_S", 0.2)
    engines = SimpleNamespace(message="no room", replica_states={"RUNNING": 1, "STARTING": 1})
    deployed = DeployedApp(monkeypatch, PREEMPTED, None, statuses=[status], rollout=engines)
    began = anyio.current_time()
    await attach(start_s=10.0)
    assert deployed.answers == [] and anyio.current_time() - began >= 2 * 0.2, "a successor gets time to start"


async def test_a_run_does_not_wait_without_end_until_a_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REPLACED_S", 0.0)
    engines = SimpleNamespace(message="", replica_states={"STARTING": 2})
    for statuses in (["UNHEALTHY"], ["RUNNING", "DELETING"]):
        DeployedApp(monkeypatch, statuses=statuses, rollout=engines)
        with pytest.raises(DeadlineError, match=r"servers did not attach within 0\.2 s") as raised:
            await attach(start_s=0.2)
        assert f"Serve says {statuses[-1]}" in raised.value.cause


@pytest.mark.parametrize(
    ("statuses", "answer", "message"),
    [
        (["RUNNING"], InfraError("no run is attached any more"), "no run is attached any more"),
        (["RUNNING"], ConfigError("its engines do not fit"), "its engines do not fit"),
        (["DEPLOY_FAILED"], None, "the rollout servers did not start: Serve says DEPLOY_FAILED"),
    ],
)
async def test_a_failure_that_does_not_pass_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, statuses: list[str], answer: Any, message: str
) -> None:
    error = ray.exceptions.RayTaskError("attach", "traceback", answer)
    DeployedApp(monkeypatch, error, statuses=statuses, rollout=ENGINES)
    with pytest.raises(InfraError if not isinstance(answer, ConfigError) else ConfigError, match=message):
        await attach()


async def test_a_serve_that_does_not_answer_delays_no_other_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller restarts, before the run attaches or when it asks for the replicas."""
    answer = threading.Event()
    try:
        for owner, name in ((app, "_applications"), (app.serve, "get_deployment_handle")):
            with monkeypatch.context() as patch:
                DeployedApp(patch, rollout=ENGINES)
                patch.setattr(owner, name, lambda *_: answer.wait(30))
                with anyio.fail_after(15), pytest.raises(DeadlineError, match=r"did not attach within 0\.2 s"):
                    await attach(start_s=0.2)
    finally:
        answer.set()


async def test_a_deployment_that_was_deleted_meanwhile_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def deleted(*names: str) -> None:
        raise KeyError("rollout does not exist")

    DeployedApp(monkeypatch, rollout=ENGINES)
    monkeypatch.setattr(app.serve, "get_deployment_handle", deleted)
    with pytest.raises(InfraError, match="Ray Serve gives no handle") as raised:
        await attach()
    assert "rollout does not exist" in raised.value.brief


async def test_an_application_without_rollout_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    DeployedApp(monkeypatch, [], other=ENGINES)
    with pytest.raises(ConfigError, match=r"rollout\.attach='servers': .* \(rollout servers: none\); deploy them"):
        await attach()

"""The start of applications, which polls the status of Serve until a deadline. The tests run no Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import DeadlineError, InfraError
from rollouter.serving import app

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


async def test_a_start_ends_at_its_deadline_if_serve_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"the rollout engines were not up within 0\.2 s \(timeouts\.start_s\)"):
            await start(monkeypatch, answer.wait, start_s=0.2)
        monkeypatch.setattr(app.serve, "status", answer.wait)
        with anyio.fail_after(30), pytest.raises(DeadlineError, match=r"not replaced within 0\.2 s"):
            await app.replicas_up(NAMESPACE, 0.2)
    finally:
        answer.set()


async def test_a_deleted_application_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match=f"no application {NAME} any more .it has run-reward."):
        await start(monkeypatch, serving(reward="RUNNING"))
    with anyio.fail_after(30), pytest.raises(InfraError, match=f"no application {NAME} any more"):
        await app.replicas_up(NAMESPACE, 10.0)

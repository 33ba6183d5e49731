"""Tests of `asyncrl clean`, with Ray Serve replaced by what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from asyncrl.cli import clean
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.driver.cluster import connection, leftovers
from rollouter.serving import app
from tests.fakes.command_line import CommandLine


@pytest.fixture
def shutdown(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Ray's shutdown, at the end of a connection to a cluster with what one killed driver left."""
    shutdown = Mock()
    monkeypatch.setattr("ray.shutdown", shutdown)
    monkeypatch.setattr(connection, "_init", lambda *_, **options: None)
    monkeypatch.setattr(leftovers, "marked_apps", lambda: {"old-rollout": "01"})
    monkeypatch.setattr(leftovers, "living_drivers", lambda: {"02"})
    return shutdown


@pytest.fixture
def hangs() -> Iterator[Callable[..., object]]:
    answer = threading.Event()
    yield lambda *_: answer.wait(30)
    answer.set()


def test_what_is_left_is_removed_unless_the_run_is_dry(
    cli: CommandLine, shutdown: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(app, "delete_apps", deleted.extend)
    assert cli("clean", "--dry-run", "--json").json == {"applications": ["old-rollout"], "removed": False}
    assert not deleted
    assert cli("clean").out == "removed the Serve application old-rollout, whose driver has ended\n"
    assert deleted == ["old-rollout"] and shutdown.call_count == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", ["leftovers.marked_apps", "app.delete_apps"])
def test_a_controller_that_does_not_answer_ends_the_command(
    cli: CommandLine,
    shutdown: Mock,
    hangs: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    module, name = place.split(".")
    monkeypatch.setattr({"leftovers": leftovers, "app": app}[module], name, hangs)
    monkeypatch.setattr(clean, "TimeoutsConfig", lambda: TimeoutsConfig(call_s=0.3, start_s=0.3))
    assert "the Ray cluster did not answer within 0.3 s: Ray Serve's controller" in cli("clean", code=1).err
    shutdown.assert_not_called()  # a thread still calls Ray


def test_an_application_that_serve_does_not_delete_is_an_error(
    cli: CommandLine, shutdown: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.serve, "status", lambda: SimpleNamespace(applications={"old-rollout": None}))
    monkeypatch.setattr(app.serve, "delete", Mock(side_effect=TimeoutError))
    assert "Ray Serve has not deleted old-rollout within 60 s" in cli("clean", code=1).err

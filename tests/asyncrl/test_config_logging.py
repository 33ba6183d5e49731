"""Rules about where metrics and events go; packages that are missing are told before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from asyncrl.config import rules
from asyncrl.config.compose import load_config
from asyncrl.config.schema import LoggingConfig
from asyncrl.failures import ConfigError
from tests.fakes.configurations import changed, looked, only

OTLP = "profiler.otlp_endpoint"
URL = "http://127.0.0.1:4318/v1/traces"


def told(changes: dict[str, Any]) -> dict[str, str]:
    """Key and consequence of what is wrong with the keys at hand."""
    found = rules.problems(changed(changes), set(changes))
    return {problem.key: problem.consequence for problem in found if problem.key in ("logging.sinks", OTLP)}


def lack(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make it look as if these were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else real(name))


def test_by_default_metrics_go_into_files() -> None:
    assert LoggingConfig().sinks == ("jsonl", "tensorboard")
    assert load_config(overrides=["logging.sinks=[jsonl,prometheus]"]).logging.sinks == ("jsonl", "prometheus")
    assert load_config(overrides=["logging=quiet"]).logging.sinks == ("jsonl",)
    assert told({}) == {}


@pytest.mark.parametrize(
    ("key", "changes", "consequence"),
    [
        ("logging.sinks", {"logging.sinks": ["jsonl", "jsonl"]}, "twice"),
        ("logging.sinks", {"logging.sinks": []}, "no metrics.jsonl"),
        ("logging.sinks", {"logging.sinks": ["tensorboard"]}, "no metrics.jsonl"),
        (OTLP, {OTLP: "127.0.0.1:4318"}, "no address"),
        (OTLP, {OTLP: "grpc://127.0.0.1:4317"}, "no address"),
        (OTLP, {OTLP: "http://127.0.0.1:port/v1/traces"}, "no address"),
        (OTLP, {OTLP: "http:///v1/traces"}, "no address"),
        (OTLP, {OTLP: "http://127.0.0.1:4318"}, "/v1/traces"),
        (OTLP, {OTLP: URL, "profiler.level": "off"}, "profiler.level is off"),
    ],
)
def test_what_cannot_work_or_surprises_is_told(key: str, changes: dict[str, Any], consequence: str) -> None:
    assert consequence in told(changes)[key]


def test_an_address_that_works_is_not_complained_about() -> None:
    assert told({OTLP: URL}) == {}
    assert told({OTLP: "https://collector.example:4318/v1/traces"}) == {}


@pytest.mark.parametrize("old", ["logging.jsonl=true", "logging.tensorboard=false", "logging.sinks=[jsonl,wandbb]"])
def test_keys_and_names_that_are_none(old: str) -> None:
    with pytest.raises(ConfigError, match=r"logging\.(sinks|jsonl|tensorboard)"):
        load_config(overrides=[old])


@pytest.mark.parametrize(
    ("sink", "module", "install"),
    [
        ("wandb", "wandb", "asyncrl[wandb]"),
        ("mlflow", "mlflow", "asyncrl[mlflow]"),
        ("trackio", "trackio", "asyncrl[trackio]"),
        ("prometheus", "prometheus_client", "ray[default]"),
    ],
)
def test_a_package_that_a_sink_needs_and_is_missing(
    sink: str, module: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch, module)
    problem = only(looked({"logging.sinks": ["jsonl", sink]}))
    assert (problem.key, problem.value, problem.fix) == ("logging.sinks", sink, f"pip install '{install}'")
    assert module in problem.consequence
    assert looked({}) == []  # what is not chosen may be missing


def test_packages_for_events_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "opentelemetry.exporter.otlp.proto.http")
    problem = only(looked({OTLP: URL}))
    assert (problem.key, problem.fix) == (OTLP, "pip install 'asyncrl[otlp]'")

    def no_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", no_parent)
    assert "opentelemetry.sdk" in only([one for one in looked({OTLP: URL}) if one.key == OTLP]).consequence

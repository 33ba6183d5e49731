"""Rules for where metrics and events go (`logging`, `profiler`), and the packages that takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config


class Package(NamedTuple):
    modules: tuple[str, ...]
    install: str
    """What pip is to be given."""


SINKS: Mapping[str, Package] = {
    "wandb": Package(("wandb",), "asyncrl[wandb]"),
    "mlflow": Package(("mlflow",), "asyncrl[mlflow]"),
    "trackio": Package(("trackio",), "asyncrl[trackio]"),
    "prometheus": Package(("ray", "prometheus_client"), "ray[default]"),
}
OTLP = Package(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"), "asyncrl[otlp]")


def _sinks(config: Config, given: Given) -> Iterator[Problem]:
    sinks = config.logging.sinks
    for name in sorted({name for name in sinks if sinks.count(name) > 1}):
        yield Problem("logging.sinks", name, "it is named twice, and everything would be told twice", "name it once")
    if "jsonl" not in sinks:
        yield warning(
            "logging.sinks", list(sinks),
            "there is no metrics.jsonl then: a run that goes on does not know what came before, and there is less to "
            "report and nothing to compare",
            "add jsonl, unless you mean it",
        )  # fmt: skip


def _otlp(config: Config, given: Given) -> Iterator[Problem]:
    endpoint = config.profiler.otlp_endpoint
    if endpoint is None:
        return
    url = _parsed(endpoint)
    if url is None:
        yield Problem(
            "profiler.otlp_endpoint", endpoint, "events are sent over HTTP, and this is no address for that",
            "give e.g. http://127.0.0.1:4318/v1/traces",
        )  # fmt: skip
    elif url in ("", "/"):
        yield warning(
            "profiler.otlp_endpoint", endpoint, "it is used as it stands, and collectors take traces at /v1/traces",
            f"give {endpoint.rstrip('/')}/v1/traces",
        )  # fmt: skip
    if config.profiler.level == "off":
        yield Problem(
            "profiler.otlp_endpoint", endpoint, "it would have no effect: profiler.level is off",
            "set profiler.level=summary or full, or leave this key out",
        )  # fmt: skip


def _parsed(endpoint: str) -> str | None:
    """The path of an HTTP address; None: it is none."""
    try:
        url = urlsplit(endpoint)
        fits = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        return None
    return url.path if fits else None


def missing_packages(config: Config) -> Iterator[Problem]:
    """What is chosen and not installed. It is looked for, never imported."""
    for name in config.logging.sinks:
        if name in SINKS and (missing := _missing(SINKS[name])):
            yield _problem("logging.sinks", name, missing, SINKS[name])
    if config.profiler.otlp_endpoint is not None and (missing := _missing(OTLP)):
        yield _problem("profiler.otlp_endpoint", config.profiler.otlp_endpoint, missing, OTLP)


def _missing(package: Package) -> str | None:
    for module in package.modules:
        try:
            if importlib.util.find_spec(module) is None:
                return module
        except ModuleNotFoundError:  # a parent of it is missing
            return module
    return None


def _problem(key: str, value: str, module: str, package: Package) -> Problem:
    return Problem(
        key, value, f"it needs the package {module}, which is not installed here", f"pip install '{package.install}'"
    )


RULES: tuple[Rule, ...] = (_sinks, _otlp)

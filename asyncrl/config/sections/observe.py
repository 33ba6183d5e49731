"""`logging` and `profiler`: metrics, log files, events, and the checks of their keys."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from asyncrl.config.environment import check_code, cpu_build, is_installed, no_gpu, visible_gpus
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect, only_with, warning
from asyncrl.config.sections.base import ConfigSection, NonNegative, Positive
from asyncrl.config.sections.trainer_rules import model_roles

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

BUILTIN_SINKS = ("jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus")
_SINK_PACKAGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "wandb": (("wandb",), "asyncrl[wandb]"),
    "mlflow": (("mlflow",), "asyncrl[mlflow]"),
    "trackio": (("trackio",), "asyncrl[trackio]"),
    "prometheus": (("ray", "prometheus_client"), "ray[default]"),
}
"""The modules that each metric sink imports, and the package to install."""
_OTLP_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class LoggingConfig(ConfigSection):
    """Metrics, log files and the terminal."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: a live view on a terminal, plain lines elsewhere."""
    sinks: tuple[str, ...] = ("jsonl", "tensorboard")
    """Destinations of metrics (docs/profiling.md). `jsonl` and `tensorboard` write files in the run directory. `wandb`,
    `mlflow` and `trackio` work offline unless you set them up for a server; each needs its package, e.g.
    `pip install 'asyncrl[wandb]'`. `prometheus` exports through Ray's metrics. A sink of your own is `module:Class` or
    `path/file.py:Class`."""
    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Minimum level of messages in the log files of the run directory and on the terminal."""


class ProfilerConfig(ConfigSection):
    """Profiling events, which every process writes to the run directory for `asyncrl report` and `asyncrl timeline`
    (docs/profiling.md)."""

    level: Literal["off", "summary", "full"] = "summary"
    """`summary`: steps, samples, trajectories, requests, tool calls, rewards and weight syncs. `full` adds the events
    inside these and between them. docs/events.md lists both."""
    buffer_events: Positive = 100_000
    """Maximum number of events that a process buffers before it writes or sends them; it drops and counts further
    ones."""
    keep_gb: Annotated[float, Field(gt=0)] = 2.0
    """Size in GB (10^9 bytes) of the event files of the run. Above it, the events of the oldest steps are replaced by
    sums, which `asyncrl report` shows."""
    synchronize: bool = False
    """Wait for the GPU at the beginning and end of each span of a rank, so that spans show where GPU time is spent.
    This slows training down."""
    steps: tuple[Positive, ...] = ()
    """Optimizer steps in which `tool` profiles the training processes; empty: `tool` does not run."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Ranks of the training processes that `tool` profiles."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: a trace of torch.profiler for each step and rank, in profiles/ of the run directory. `nsys`: Nsight
    Systems starts the ranks and captures these steps."""
    otlp_endpoint: str | None = None
    """Address that also receives the events, as OpenTelemetry spans over HTTP, e.g. http://127.0.0.1:4318/v1/traces;
    needs `pip install 'asyncrl[otlp]'`."""


def _otlp_address(config: Config) -> Iterator[ConfigProblem]:
    endpoint = config.profiler.otlp_endpoint
    if endpoint is None:
        return
    try:
        url = urlsplit(endpoint)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        valid = False
    key = "profiler.otlp_endpoint"
    if not valid:
        consequence = "events are sent over HTTP, and this is not an HTTP address"
        yield ConfigProblem(key, endpoint, consequence, "give e.g. http://127.0.0.1:4318/v1/traces")
    elif url.path in ("", "/"):
        consequence = "the address is used unchanged, and collectors accept traces at /v1/traces"
        yield warning(key, endpoint, consequence, f"give {endpoint.rstrip('/')}/v1/traces")


def _profiled_ranks(config: Config) -> Iterator[ConfigProblem]:
    profiler, policy_ranks = config.profiler, config.trainer.num_workers
    most = max([policy_ranks, *(role.num_workers or policy_ranks for role in model_roles(config).values())])
    beyond = [rank for rank in profiler.ranks if rank >= most]
    if profiler.steps and beyond:
        yield ConfigProblem(
            "profiler.ranks",
            list(profiler.ranks),
            f"training processes are numbered from 0 to {most - 1}, so there is no rank {beyond[0]}",
            f"name ranks below {most}, or raise trainer.num_workers",
        )


def _packages(config: Config) -> Iterator[ConfigProblem]:
    """Check that metric sinks exist, and that built-in sinks and the OTLP export have the packages they need."""
    for name in config.logging.sinks:
        yield from check_code("logging.sinks", name, BUILTIN_SINKS, "sink")
    needed: list[tuple[str, str, tuple[str, ...], str]] = [
        ("logging.sinks", name, *_SINK_PACKAGES[name]) for name in config.logging.sinks if name in _SINK_PACKAGES
    ]
    if config.profiler.otlp_endpoint is not None:
        needed.append(("profiler.otlp_endpoint", config.profiler.otlp_endpoint, _OTLP_MODULES, "asyncrl[otlp]"))
    for key, value, modules, package in needed:
        if missing := next((module for module in modules if not is_installed(module)), None):
            consequence = f"it needs the package {missing}, which is not installed here"
            yield ConfigProblem(key, value, consequence, f"pip install '{package}'")


def _nsight(config: Config) -> Iterator[ConfigProblem]:
    if config.profiler.tool != "nsys" or not config.profiler.steps or config.trainer.device == "cpu":
        return
    if not visible_gpus():
        consequence = f"{no_gpu(cpu_build())}, and Nsight Systems profiles training processes on GPUs"
        yield ConfigProblem("profiler.tool", "nsys", consequence, "set profiler.tool=torch, or use a machine with GPUs")
    if shutil.which("nsys") is None:
        consequence = "the command nsys is not on PATH here, and the training processes are started under it"
        fix = "install NVIDIA Nsight Systems (https://developer.nvidia.com/nsight-systems), or set profiler.tool=torch"
        yield ConfigProblem("profiler.tool", "nsys", consequence, fix)


RULES: tuple[RuleFunction, ...] = (
    ConfigRule("logging.sinks", lambda c: len(set(c.logging.sinks)) < len(c.logging.sinks),
               "a sink that is listed twice would get every metric twice", "list each once"),
    ConfigRule("logging.sinks", lambda c: "jsonl" not in c.logging.sinks,
               "without metrics.jsonl a resumed run does not know its earlier metrics, reports are shorter, and runs "
               "cannot be compared", "add jsonl, unless you intend this", "warning"),
    _otlp_address,
    ConfigRule("profiler.steps",
               lambda c: max(c.profiler.steps, default=0) > (c.trainer.total_training_steps or math.inf),
               "the run ends at step {c.trainer.total_training_steps} (trainer.total_training_steps), before the last "
               "of these steps", "name steps from 1 to {c.trainer.total_training_steps}", "warning"),
    ConfigRule("profiler.ranks", lambda c: c.profiler.steps and not c.profiler.ranks,
               "no process would be profiled", "name some, e.g. [0], or leave this key out"),
    _profiled_ranks,
    ConfigRule("profiler.tool", lambda c: c.profiler.tool == "nsys" and c.profiler.steps and c.trainer.device == "cpu",
               "trainer.device is cpu, and Nsight Systems profiles GPUs",
               "set profiler.tool=torch, or trainer.device=cuda"),
)  # fmt: skip

ENVIRONMENT: tuple[RuleFunction, ...] = (_nsight,)
DRIVER_ENVIRONMENT: tuple[RuleFunction, ...] = (_packages,)

NO_EFFECT = (
    only_with("profiler.buffer_events profiler.keep_gb profiler.synchronize profiler.otlp_endpoint",
              "profiler.level", "summary", "full"),
    no_effect("profiler.ranks profiler.tool", lambda c: not c.profiler.steps,
              "profiler.steps is empty, so no training process is profiled", "set profiler.steps, e.g. [3]"),
)  # fmt: skip

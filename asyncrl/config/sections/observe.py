"""`logging` and `profiler`: metrics, log files, events, and the rules between their keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect, only_with, warning
from asyncrl.config.sections.base import ConfigSection, NonNegative, Positive
from asyncrl.config.sections.trainer import model_roles

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


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

NO_EFFECT = (
    only_with("profiler.buffer_events profiler.synchronize profiler.otlp_endpoint",
              "profiler.level", "summary", "full"),
    no_effect("profiler.ranks profiler.tool", lambda c: not c.profiler.steps,
              "profiler.steps is empty, so no training process is profiled", "set profiler.steps, e.g. [3]"),
)  # fmt: skip

"""How the parts of a run go together: drift, versions, records, deadlines, the cluster, the HTTP side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.base import NonNegative, Positive, Seconds, Section


class AsyncTrainingConfig(Section):
    """How far generation and training may drift apart. docs/design.md §3 has the four usual modes."""

    staleness_threshold: Annotated[float, Field(ge=0)] = 1.0
    """Generation may run this many versions' worth of samples ahead; 0: on-policy pacing."""
    trigger_parameter_sync_step: Positive = 1
    """A version is published every so many leases."""
    require_batches: Positive = 1
    """Mini-batches per lease; each is one optimizer step."""
    partial_rollout: bool = True
    """Responses in flight at a weight sync go on under the new weights; false: the sync waits for them."""
    partial_mode: Literal["keep", "abort"] = "keep"
    """How they go on: frozen in the engine with their KV cache, or handed back to the client and resubmitted."""
    max_staleness: NonNegative | None = None
    """Bound on `trainer version - oldest version of any token`; null: none."""
    stale_action: Literal["drop", "mask", "keep"] = "drop"
    """Beyond the bound: drop the sample, mask its too old tokens, or train on it and only count it."""
    deterministic: bool = False
    """Samples are trained on in the order in which they were fed, whatever the order in which they were finished: a
    straggler holds up those behind it. With it a replayed run repeats the recorded one, see docs/skip.md."""


class WeightSyncConfig(Section):
    """From trainer to engines."""

    backend: Literal["object_store"] = "object_store"
    """How versions travel."""
    verify: Literal["every", "first", "off"] = "every"
    """Compare the engine's weights with the published checksums after each load, only the first, or never."""
    clear_kv_cache: bool = False
    """With `partial_mode: keep`: recompute the KV cache of running requests under the new weights."""


class LoggingConfig(Section):
    """What a run writes and shows."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: a live view on a terminal, plain lines elsewhere."""
    sinks: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"], ...] = (
        "jsonl",
        "tensorboard",
    )
    """Where metrics go. `jsonl`, `tensorboard`: files in the run directory. `wandb`, `mlflow`, `trackio`: offline,
    unless they are set up for a server; each needs its package, e.g. `pip install 'asyncrl[wandb]'`. `prometheus`:
    Ray's metrics. docs/profiling.md"""
    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of the log files in the run directory and of what reaches the terminal."""


class ProfilerConfig(Section):
    """Where the time goes: events of every part in the run directory, for `asyncrl report` and `asyncrl timeline`.
    docs/profiling.md"""

    level: Literal["off", "summary", "full"] = "summary"
    """`summary`: steps, samples, trajectories, requests, tool calls, rewards, weight syncs. `full`: also what happens
    inside of them and between. docs/events.md lists the events of each."""
    buffer_events: Positive = 100_000
    """What a process holds at most until its events are written or sent; more are dropped and counted."""
    synchronize: bool = False
    """Wait for the GPU at both ends of a rank's spans, so that they show what took the time and not who waited for it.
    Costs speed."""
    steps: tuple[Positive, ...] = ()
    """Optimizer steps in which `tool` looks into the training processes; none: it does not run."""
    ranks: tuple[NonNegative, ...] = (0,)
    """The training processes it looks into."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: a trace of torch.profiler for each step and rank in profiles/ of the run directory. `nsys`: ranges that
    Nsight Systems captures; the ranks are started under it."""
    otlp_endpoint: str | None = None
    """Events are sent there too, as OpenTelemetry spans over HTTP, e.g. http://127.0.0.1:4318/v1/traces; needs
    `pip install 'asyncrl[otlp]'`."""


class TimeoutsConfig(Section):
    """Deadlines, in seconds."""

    start_s: Seconds = 600.0
    """For an engine or the trainer to come up."""
    call_s: Seconds = 60.0
    """For a call between parts that should answer at once."""
    probe_s: Seconds = 30.0
    """A process of the run that does not answer for so long is taken for hung and replaced."""
    generate_s: Seconds = 600.0
    """For one generate call to a replica; past it the call goes on elsewhere, with its tokens."""
    engine_s: Seconds = 120.0
    """An engine that has requests and makes no token for so long, outside a pause, is taken for hung and replaced."""
    sample_s: Seconds = 3600.0
    """For the generation of one sample, with all its retries. Past it the sample is dropped as failed, and another
    takes its place. Scoring has `reward.timeout_s` for each call."""
    train_s: Seconds = 1800.0
    """For one call to the training processes: a step, or a forward pass over a lease."""
    collective_s: Seconds = 300.0
    """For one collective operation between training processes."""
    apply_s: Seconds = 300.0
    """For a replica to load a version."""
    watchdog_s: Seconds = 600.0
    """A run in which nothing moves for so long stops and says what it waits on. A call to the training processes counts
    as movement while it is under way: `train_s` bounds it. So does one to the replicas to load a version, bounded by
    `apply_s` and `engine_s`."""
    stop_s: Seconds = 15.0
    """For a clean stop: checkpoint, summary, Ray and Serve down."""

    @property
    def apply_call_s(self) -> float:
        """For one call to all replicas to load a version. A replica may take `apply_s` to load and once more to verify,
        and its engine `engine_s` for an answer; then it has answered or given itself up (`rollouter.serving.weights`),
        and one that were asked again before would still be at it."""
        return 2 * self.apply_s + self.engine_s + self.call_s


class RecoveryConfig(Section):
    """What may be restarted while the rest of the run lives on."""

    max_restarts: NonNegative = 10
    """Restarts of one part (Rollouter, Trainer, queue, weight store; all replicas together) within `window_s`. One more
    failure ends the run with its cause; 0: the first one does. So does one more than this in a row, however slowly they
    come, in which the run gets past no step that it had not taken before."""
    window_s: Seconds = 3600.0
    """Restarts longer ago than this are forgiven."""
    max_crashes: Positive = 2
    """A sample in whose presence so many engines crashed is dropped as failed, if no other one may be to blame."""


class RayConfig(Section):
    """The Ray cluster."""

    address: str | None = None
    """null: a private one on this machine, gone at the end; else `auto` or `host:port`."""
    object_store_memory_bytes: Positive | None = None
    """Of a private cluster; null: Ray decides."""


class ServeConfig(Section):
    """The HTTP side of `asyncrl serve`, and of launches with `rollout.agent` (there another free port may be taken)."""

    host: str = "127.0.0.1"
    """Loopback unless you say otherwise, and then `api_key_env` is needed."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """TCP port."""
    api_key_env: str | None = None
    """Environment variable that holds the API key clients must send."""

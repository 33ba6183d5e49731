"""`async_training`, `weight_sync`, `timeouts`, `recovery`, `ray`, `serve`, and the rules between their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect, warning
from asyncrl.config.sections.base import ConfigSection, NonNegative, Positive, Seconds

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BYTES_PER_TOKEN = 9
"""Size of a token on disk: id, log-prob, mask."""
_MANY_GIB = 20


class AsyncTrainingConfig(ConfigSection):
    """How far generation may run ahead of training. docs/design.md §3 has the four usual modes."""

    staleness_threshold: Annotated[float, Field(ge=0)] = 1.0
    """Generation may run this many versions' worth of samples ahead; 0: on-policy pacing."""
    trigger_parameter_sync_step: Positive = 1
    """Leases between published versions."""
    require_batches: Positive = 1
    """Mini-batches per lease; each is one optimizer step."""
    partial_rollout: bool = True
    """Responses in flight at a weight sync continue under the new weights; false: the sync waits for them."""
    partial_mode: Literal["keep", "abort"] = "keep"
    """How they continue: frozen in the engine with their KV cache, or returned to the client and resubmitted."""
    max_staleness: NonNegative | None = None
    """Bound on `trainer version - oldest version of any token`; null: none."""
    stale_action: Literal["drop", "mask", "keep"] = "drop"
    """Beyond the bound: drop the sample, mask its too old tokens, or train on it and only count it."""
    deterministic: bool = False
    """Train on samples in feed order instead of completion order: a straggler delays those behind it. A replayed run
    then repeats the recorded one, see docs/skip.md."""


class WeightSyncConfig(ConfigSection):
    """Weight updates from the Trainer to the engines."""

    backend: Literal["object_store"] = "object_store"
    """Transport of versions."""
    verify: Literal["every", "first", "off"] = "every"
    """Compare the engine's weights with the published checksums after each load, only the first, or never."""
    clear_kv_cache: bool = False
    """With `partial_mode: keep`: recompute the KV cache of running requests under the new weights."""


class TimeoutsConfig(ConfigSection):
    """Deadlines, in seconds."""

    start_s: Seconds = 600.0
    """For an engine or the trainer to come up."""
    call_s: Seconds = 60.0
    """For a call between processes that answers immediately."""
    probe_s: Seconds = 30.0
    """A process of the run that does not answer for this long counts as hung and is replaced."""
    generate_s: Seconds = 600.0
    """For one generate call to a replica; then the call continues on another one, with its tokens."""
    engine_s: Seconds = 120.0
    """An engine that has requests and produces no token for this long, outside a pause, is hung and replaced."""
    sample_s: Seconds = 3600.0
    """For the generation of one sample, with all its retries; then the sample is dropped as failed and replaced.
    Scoring has `reward.timeout_s` for each call."""
    train_s: Seconds = 1800.0
    """For one call to the training processes: a step, or a forward pass over a lease."""
    collective_s: Seconds = 300.0
    """For one collective operation between training processes."""
    apply_s: Seconds = 300.0
    """For a replica to load a version."""
    watchdog_s: Seconds = 600.0
    """A run without progress for this long stops and reports its blockers. Calls to the training processes
    (bounded by `train_s`) and calls to the replicas to load a version (`apply_s`, `engine_s`) count as progress."""
    stop_s: Seconds = 15.0
    """For a clean stop: checkpoint, summary, Ray and Serve down."""

    @property
    def apply_call_s(self) -> float:
        """Deadline of a call to all replicas to load a version: a replica takes up to `apply_s` to load, as long to
        verify, and `engine_s` for an answer of its engine (`rollouter.serving.replica.weights`)."""
        return 2 * self.apply_s + self.engine_s + self.call_s


class RecoveryConfig(ConfigSection):
    """Restarts of failed processes while the rest of the run continues."""

    max_restarts: NonNegative = 10
    """Restarts of one part (Rollouter, Trainer, queue, weight store; all replicas together) within `window_s`. One more
    failure ends the run with its cause; 0: the first one does. So does one more than this in a row without a new step,
    however slowly they come."""
    window_s: Seconds = 3600.0
    """Older restarts do not count."""
    max_crashes: Positive = 2
    """A sample during which this many engines crashed is dropped as failed, if no other sample can be to blame."""


class RayConfig(ConfigSection):
    """The Ray cluster."""

    address: str | None = None
    """null: a private cluster on this machine for the time of the run; else `auto` or `host:port`."""
    object_store_memory_bytes: Positive | None = None
    """Object store of a private cluster; null: Ray decides."""


class ServeConfig(ConfigSection):
    """The HTTP API of `asyncrl serve`, and launches with `rollout.agent`, which use another port if it is taken."""

    host: str = "127.0.0.1"
    """Address to listen on; other addresses than loopback need `api_key_env`."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """TCP port."""
    api_key_env: str | None = None
    """Environment variable with the API key that clients must send."""


def _watchdog(config: Config) -> Iterator[ConfigProblem]:
    """Calls to training processes and to replicas that load a version count as progress; other calls do not."""
    limits = config.timeouts
    calls = {f"timeouts.{name}": getattr(limits, name) for name in ("call_s", "probe_s", "generate_s", "engine_s")}
    calls["reward.timeout_s"] = config.reward.timeout_s
    if config.reward.judge.model is not None:
        calls["reward.judge.timeout_s"] = config.reward.judge.timeout_s
    longest = max(calls, key=calls.__getitem__)
    if limits.watchdog_s < calls[longest]:
        yield warning(
            "timeouts.watchdog_s",
            limits.watchdog_s,
            f"one call may take {calls[longest]:g} s ({longest}) without progress, so it could stop a healthy run",
            f"set it to at least {calls[longest]:g}, or lower {longest}",
        )


def _sample_timeout(config: Config) -> Iterator[ConfigProblem]:
    limits = config.timeouts
    replacement = {"timeouts.start_s": limits.start_s, "timeouts.generate_s": limits.generate_s}
    longest = max(replacement, key=replacement.__getitem__)
    if limits.sample_s < replacement[longest]:
        yield warning(
            "timeouts.sample_s",
            limits.sample_s,
            f"the replacement of an engine may take {replacement[longest]:g} s ({longest}), and samples that only wait "
            "for it are dropped as failed",
            f"set it to more than {replacement[longest]:g}, or lower {longest}",
        )


def _disk_space(config: Config) -> Iterator[ConfigProblem]:
    """Payload files of trained samples are deleted once a checkpoint covers them."""
    training = config.trainer
    if config.journal == "off" or training.save_freq != -1 or training.total_training_steps is None:
        return
    samples = training.total_training_steps // training.ppo_epochs * training.ppo_mini_batch_size
    gib = samples * config.rollout.n * config.longest_trajectory * _BYTES_PER_TOKEN / 2**30
    if gib > _MANY_GIB:
        steps = max(1, int(training.total_training_steps * _MANY_GIB / gib))
        yield warning(
            "trainer.save_freq",
            training.save_freq,
            f"samples on disk (journal=on) are deleted when a checkpoint covers them; without one before the end they "
            f"grow to {gib:.0f} GiB, if responses have full length",
            f"set trainer.save_freq={steps} or less (trainer.max_checkpoints_to_keep bounds the checkpoints), or "
            "journal=off",
        )


SERVER_RULES: tuple[RuleFunction, ...] = (
    ConfigRule("serve.host", lambda c: c.serve.host not in _LOOPBACK and not c.serve.api_key_env,
               "anybody who reaches this address could use the model",
               "set serve.api_key_env to the environment variable that holds an API key, or serve.host=127.0.0.1"),
)  # fmt: skip
"""Rules for a run and for `asyncrl serve`."""

RULES: tuple[RuleFunction, ...] = (
    *SERVER_RULES,
    ConfigRule("async_training.max_staleness", lambda c: c.async_training.max_staleness is not None
               and c.async_training.stale_action == "drop"
               and c.async_training.max_staleness < c.async_training.staleness_threshold,
               "pacing lets samples get {c.async_training.staleness_threshold:g} versions old (staleness_threshold), "
               "so some generated samples will be dropped", "raise it, or lower async_training.staleness_threshold",
               "warning"),
    _watchdog,
    _sample_timeout,
    ConfigRule("timeouts.probe_s", lambda c: c.timeouts.probe_s >= c.timeouts.call_s,
               "callers of a queue or weight store that hangs give up after {c.timeouts.call_s:g} s "
               "(timeouts.call_s), before it is replaced, so that Rollouter and Trainer are restarted too",
               "set it to less than {c.timeouts.call_s:g}, or raise timeouts.call_s", "warning"),
    _disk_space,
)  # fmt: skip

NO_EFFECT = (
    no_effect("async_training.stale_action", lambda c: c.async_training.max_staleness is None,
              "async_training.max_staleness is null, so no sample is too stale", "set async_training.max_staleness"),
    no_effect("async_training.partial_mode", lambda c: c.mode != "sync" and not c.async_training.partial_rollout,
              "async_training.partial_rollout is false, so no response continues under new weights",
              "set async_training.partial_rollout=true"),
    no_effect("weight_sync.clear_kv_cache", lambda c: c.mode != "sync" and not (c.async_training.partial_rollout
              and c.async_training.partial_mode == "keep"), "no response keeps its KV cache over a sync",
              "set async_training.partial_rollout=true and async_training.partial_mode=keep"),
    no_effect("recovery.window_s", lambda c: c.recovery.max_restarts == 0,
              "recovery.max_restarts is 0, so the first failure of a part ends the run",
              "set recovery.max_restarts to 1 or more"),
    no_effect("ray.object_store_memory_bytes", lambda c: c.ray.address is not None,
              "the cluster at ray.address has its own object store", "leave one of the two out"),
)  # fmt: skip

"""`async_training`, `weight_sync`, `timeouts`, `recovery`, `ray`, `serve`; their checks, and those of the directory."""

from __future__ import annotations

import ast
import math
import os
import socket
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.environment import (
    check_api_key,
    check_protocol,
    cpu_build,
    no_gpu,
    package_folder,
    similar_path,
    visible_gpus,
    writable_parent,
)
from asyncrl.config.import_path import is_own
from asyncrl.config.problems import (
    ConfigProblem,
    ConfigRule,
    RuleFunction,
    configured,
    format_value,
    no_effect,
    warning,
)
from asyncrl.config.sections.base import ConfigSection, ImportPath, NonNegative, Positive, Seconds
from asyncrl.config.sections.data import engine_lora_rank, num_prompts
from asyncrl.config.sections.trainer_rules import epoch_samples, model_roles

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BYTES_PER_TOKEN = 9
"""Size of a token on disk: id, log-prob and mask."""
_MANY_GIB = 20
_MANY_SAMPLES = 50_000
"""Number of samples without a checkpoint from which rebuilding the queue may take seconds."""
_FILES_OF_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints")


class AsyncTrainingConfig(ConfigSection):
    """How far generation may run ahead of training. docs/design.md §3 has the four usual modes."""

    staleness_threshold: Annotated[float, Field(ge=0)] = 1.0
    """How far generation may run ahead of training, as a multiple of the samples that training consumes for one
    version; 0: generation does not run ahead."""
    trigger_parameter_sync_step: Positive = 1
    """Leases that the Trainer trains on for each published version."""
    require_batches: Positive = 1
    """Mini-batches per lease; each is one optimizer step in every pass over the lease."""
    partial_rollout: bool = True
    """Responses in flight at a weight sync continue under the new weights; false: the sync waits for them."""
    partial_mode: Literal["keep", "abort"] = "keep"
    """How responses in flight continue: `keep` freezes them in the engine with their KV cache, `abort` returns them to
    the client, which resubmits them."""
    max_staleness: NonNegative | None = None
    """Maximum of `trainer version - oldest version of any token` in a sample; null: no bound."""
    stale_action: Literal["drop", "mask", "keep"] = "drop"
    """Treatment of a sample beyond `max_staleness`: drop it, mask its tokens that are too old, or train on it and only
    count it."""
    deterministic: bool = False
    """Train on samples in feed order instead of completion order, so that a replayed run repeats the recorded one
    (docs/skip.md). A slow sample then delays all samples after it."""

    @property
    def mode(self) -> str:
        """The option of the group `async_training` whose mode (docs/design.md §3) these values are."""
        if self.staleness_threshold == 0:
            return "mode_a" if self.trigger_parameter_sync_step == 1 else "mode_b"
        return "mode_d" if self.partial_rollout else "mode_c"


BUCKET_BYTES = 256 << 20


class WeightSyncConfig(ConfigSection):
    """Weight updates from the Trainer to the engines."""

    backend: Literal["object_store", "disk", "nccl"] | ImportPath = "object_store"
    """How versions travel from the Trainer to the engines: through Ray's object store, through safetensors files in
    `dir`, or your own class (docs/extending.md). With `nccl`, rank 0 of the Trainer broadcasts them from its GPU to
    those of all engines at once, and the object store has them too, for replicas that join. After a broadcast that
    fails, they go through the object store until the Trainer restarts (docs/gpu.md: not run on a GPU yet)."""
    dir: Annotated[str, Field(min_length=1)] | None = None
    """Directory or URL of fsspec in which `backend: disk` keeps the last four versions; no other run may use it. All
    nodes with engines must be able to read it. null: `weights` in the run directory."""
    max_deltas: NonNegative = 0
    """With `backend: disk`, how many versions in a row may be sent as changes to the version before, exact to the last
    bit, until one is sent whole; 0: all are whole. This saves most bytes for bfloat16 and small learning rates, and
    none for float32 (docs/performance.md). Rank 0 of the Trainer keeps a copy of the weights in memory, and each node
    with engines needs room for two versions in its temporary directory. A replica that starts reads the last whole
    version and the changes since, together at most twice a version."""
    bucket_bytes: Positive = BUCKET_BYTES
    """The Trainer collects a version tensor by tensor and sends it in buckets of this size while it collects the next
    one, so that publishing takes up to two buckets and the largest tensor of memory. Tensors are not split. Small
    buckets save memory, large ones cost less per byte."""
    lora: Literal["merged", "adapter"] = "merged"
    """What a version consists of if `model.lora_rank` is above 0: `merged`, the full weights with the adapters added;
    or `adapter`, only the adapters, which engines add to the weights of `model.path` by vLLM's own means
    (docs/training.md)."""
    verify: Literal["every", "first", "off"] = "every"
    """Compare the engine's weights with the published checksums, and its log-probs of a few texts (a probe) with the
    Trainer's: after every load; until each replica has passed once, log-probs again after training goes back to a
    checkpoint; or never."""
    max_mismatch_kl: Annotated[float, Field(gt=0)] | None = 1e-4
    """The run stops if log-probs of the engines and of the Trainer for the same weights differ by more than this KL
    divergence, in nats per token. It is measured as `verify` says and, on-policy (`async_training=mode_a`), in every
    step until training goes back to a checkpoint. The default is 1e-3 if `rollout.dtype` or `trainer.dtype` has 16
    bits, and 0.1 with `rollout.quantization`. null: no limit."""
    clear_kv_cache: bool = False
    """With `partial_mode: keep`, recompute the KV cache of running requests under the new weights."""


PROBE_LIMIT_S = 30.0
"""Deadline for an engine to compute the log-probs of a `WeightsProbe`. A full engine begins when one of its requests
has ended."""


class TimeoutsConfig(ConfigSection):
    """Deadlines, in seconds."""

    start_s: Seconds = 600.0
    """Deadline for an engine or the Trainer to start."""
    call_s: Seconds = 60.0
    """Deadline of a call between processes that needs no waiting, and of a call to the filesystem of a URL in
    `trainer.checkpoint_dir` that copies no file."""
    probe_s: Seconds = 30.0
    """A process of the run that does not answer for this long counts as hung and is replaced."""
    generate_s: Seconds = 600.0
    """Deadline of one generate call to a replica. After it, the call continues on another replica, with the tokens so
    far."""
    engine_s: Seconds = 120.0
    """An engine that has requests and produces no token for this long, outside a pause, counts as hung and is
    replaced."""
    sample_s: Seconds = 3600.0
    """Deadline for the generation of one sample, with all its retries. After it, the sample is dropped as failed, and
    another one replaces it. Time in which no replica can take its requests does not count. For scoring,
    `reward.timeout_s` limits each call."""
    train_s: Seconds = 1800.0
    """Deadline of one call to the training processes: a step, or a forward pass over a lease."""
    collective_s: Seconds = 300.0
    """Deadline of one collective operation between training processes."""
    apply_s: Seconds = 300.0
    """Deadline for a replica to load a version."""
    watchdog_s: Seconds = 600.0
    """A run without progress for this long stops and reports its blockers. Calls to the training processes
    (bounded by `train_s`) and calls to the replicas to load a version (`apply_s`, `engine_s`) count as progress."""
    stop_s: Seconds = 15.0
    """Deadline for a clean stop: the step in progress ends, and the checkpoint and the summary are written; then, for
    shutting Ray and Serve down. If steps took longer than a third of it, the step in progress and the checkpoint have
    three times as long as a step took. A run that needs still longer loses the steps since its last checkpoint."""

    @property
    def apply_call_s(self) -> float:
        """Deadline of a call to all replicas to load a version: a replica takes up to `apply_s` to load, as long to
        compare checksums, `PROBE_LIMIT_S` to compute log-probs, and `engine_s` for an answer of its engine
        (`rollouter.serving.replica.weights`)."""
        return 2 * self.apply_s + PROBE_LIMIT_S + self.engine_s + self.call_s


class RecoveryConfig(ConfigSection):
    """Restarts of failed processes while the rest of the run continues."""

    max_restarts: NonNegative = 10
    """Maximum number of restarts of one part (Rollouter, Trainer, queue, weight store; all replicas count as one part)
    within `window_s`. One more failure ends the run; 0: the first failure ends it. Independently of time, the run also
    ends if a part fails more often than this in a row without a new step."""
    window_s: Seconds = 3600.0
    """Time after which a restart no longer counts."""
    max_crashes: Positive = 2
    """A sample is dropped as failed once this many engines have crashed during its generation and no other sample can
    be the cause."""


class RayConfig(ConfigSection):
    """The Ray cluster."""

    address: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running cluster, `auto` or `host:port`; null: start a private cluster on this machine for the
    run."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on demand. Then a run whose processes have no room waits for new nodes, up to
    `timeouts.start_s`; otherwise it is refused at once."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's `runtime_env` of the run's processes: `env_vars`, `py_modules`, `pip`, and others. On a cluster, the Python
    files that the configuration names travel to the nodes anyway. With `working_dir`, relative paths in the
    configuration mean files in it."""
    object_store_memory_bytes: Positive | None = None
    """Size of a private cluster's object store; null: Ray decides."""
    keep_logs_days: Annotated[float, Field(gt=0)] = 7.0
    """Days after which the logs of ended processes of a private cluster (logs/ray in the run directory) are deleted."""


class ServeConfig(ConfigSection):
    """The HTTP API of `asyncrl serve` and of launches with `rollout.agent`. Such a launch uses another port if `port`
    is taken."""

    host: str = "127.0.0.1"
    """Address to listen on; any address other than loopback needs `api_key_env`."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """TCP port."""
    api_key_env: str | None = None
    """Environment variable with the API key that clients must send."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests to loopback may be addressed to, besides localhost, 127.0.0.1 and [::1]: the name under
    which a proxy on this machine forwards requests, for example."""


def check_mode(training: AsyncTrainingConfig, chosen: str | None) -> Iterator[ConfigProblem]:
    """Yield a warning if the values are those of another mode than the one that the user has chosen."""
    if chosen is None or chosen == training.mode:
        return
    consequence = (
        f"the run is in {training.mode}: it has trigger_parameter_sync_step = {training.trigger_parameter_sync_step}, "
        f"staleness_threshold = {training.staleness_threshold:g} and "
        f"partial_rollout = {str(training.partial_rollout).lower()}"
    )
    fix = f"choose async_training={training.mode}, or leave out the keys that differ from {chosen}"
    yield warning("async_training", chosen, consequence, fix)


def _watchdog(config: Config) -> Iterator[ConfigProblem]:
    """Warn if a call that does not count as progress may take longer than the watchdog waits.

    Calls to training processes and to replicas that load a version count as progress."""
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


def _unbounded_journal(config: Config) -> Iterator[ConfigProblem]:
    if (steps := config.trainer.total_training_steps) is not None:
        yield from _check_growth(config, steps // config.trainer.ppo_epochs * config.trainer.ppo_mini_batch_size)


def _unbounded_journal_of_epochs(config: Config) -> Iterator[ConfigProblem]:
    if config.trainer.total_training_steps is None:
        prompts = num_prompts(config)
        yield from _check_growth(config, math.inf if prompts is None else epoch_samples(config, prompts))


def _check_growth(config: Config, samples: float) -> Iterator[ConfigProblem]:
    """Warn if nothing bounds the journal of a run over so many samples: what it has of trained samples, and their
    payload files, are deleted once a checkpoint covers them."""
    training = config.trainer
    if config.journal == "off":
        return
    if training.save_freq > 0 and training.save_freq * training.ppo_mini_batch_size / training.ppo_epochs < samples:
        return
    gib_per_sample = config.rollout.n * config.longest_trajectory * _BYTES_PER_TOKEN / 2**30
    most = min(_MANY_SAMPLES, _MANY_GIB / gib_per_sample)
    if samples > most:
        steps = max(1, int(most / training.ppo_mini_batch_size * training.ppo_epochs))
        size = f" to {samples * gib_per_sample:.0f} GiB, if responses have full length" if samples < math.inf else ""
        yield warning(
            "trainer.save_freq",
            training.save_freq,
            "without a checkpoint before the end nothing bounds the journal (journal=on): it keeps every sample in "
            f"memory and on disk, so a restart of the queue takes longer and longer, and payload files grow{size}",
            f"set trainer.save_freq={steps} or less (trainer.max_checkpoints_to_keep bounds the checkpoints), or "
            "journal=off",
        )


def _api_key(config: Config) -> Iterator[ConfigProblem]:
    yield from check_api_key("serve", config.serve.api_key_env)


def _runtime_env(config: Config) -> Iterator[ConfigProblem]:
    """Refuse names that Ray ignores in a `runtime_env`. They may be those of plugins if Ray has any."""
    if not config.ray.runtime_env or "RAY_RUNTIME_ENV_PLUGINS" in os.environ or not (known := _runtime_env_names()):
        return
    for name in config.ray.runtime_env.keys() - known:
        close = get_close_matches(name, known, n=1)
        fix = f"did you mean {close[0]}? Otherwise leave it out" if close else "leave it out"
        fix += " (for a plugin of the cluster, export RAY_RUNTIME_ENV_PLUGINS)"
        consequence = "a runtime_env of Ray has no such field, and Ray would ignore it"
        yield ConfigProblem(f"ray.runtime_env.{name}", config.ray.runtime_env[name], consequence, fix)


@cache
def _runtime_env_names() -> frozenset[str]:
    """Return the public names that Ray's source declares; empty if Ray is not installed. An import of Ray would take a
    second."""
    if (folder := package_folder("ray")) is None:
        return frozenset()
    source = (folder / "runtime_env" / "runtime_env.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for one in classes["RuntimeEnv"].body:
        if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "known_fields" and one.value is not None:
            return frozenset(ast.literal_eval(one.value))
    return frozenset()


def _port(config: Config) -> Iterator[ConfigProblem]:
    host, port = config.serve.host, config.serve.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
        except OSError as error:
            consequence = f"cannot listen on {host}:{port}: {error.strerror or error}"
            fix = "choose another serve.port or serve.host, or stop the program that uses it"
            yield ConfigProblem("serve.port", port, consequence, fix)


def _resume(config: Config) -> Iterator[ConfigProblem]:
    source = config.resume
    if source in ("none", "auto") or Path(source).expanduser().is_dir():
        return
    close = [] if "/" in source else get_close_matches(source, ("none", "auto"), n=1)
    fix = f"give none, auto, a run directory or one of its checkpoints; {similar_path(Path(source))}"
    fix = f"did you mean {close[0]}?" if close else fix
    yield ConfigProblem("resume", source, "there is no such directory to resume from", fix)


def _run_dir(config: Config) -> Iterator[ConfigProblem]:
    if config.run_dir is None:
        return
    path = Path(config.run_dir).expanduser()
    parent, obstacle = writable_parent(path)
    if obstacle:
        yield ConfigProblem("run_dir", config.run_dir, f"{parent} {obstacle}", "choose another directory")
    elif config.resume == "none" and any((path / name).exists() for name in _FILES_OF_A_RUN):
        yield ConfigProblem(
            "run_dir",
            config.run_dir,
            "it has the files of an earlier run, and this run would overwrite them",
            "choose another directory, or continue that run: resume=auto. Remove it only if `asyncrl status` says that "
            "no run uses it, and you need none of its files",
        )


def _weights_dir(config: Config) -> Iterator[ConfigProblem]:
    key, given = "weight_sync.dir", config.weight_sync.dir
    if given is not None and "://" in given:
        yield from check_protocol(key, given, "weights cannot be stored there")
    if given is not None and given.partition("://")[0] == "memory":
        consequence = "only the Trainer's process would see the weights"
        yield ConfigProblem(key, given, consequence, "give a directory, or the URL of a storage that engines can read")


def _broadcast_gpus(config: Config) -> Iterator[ConfigProblem]:
    if config.weight_sync.backend == "nccl" and config.ray.address is None and not visible_gpus():
        consequence = f"versions are broadcast from a GPU, and {no_gpu(cpu_build())}"
        fix = "set it to object_store, or point ray.address at a cluster that has GPUs"
        yield ConfigProblem("weight_sync.backend", "nccl", consequence, fix)


def _shared_gpus(config: Config) -> Iterator[ConfigProblem]:
    """Check that there are GPUs to use in turns."""
    if not config.shares_gpus:
        return
    key, off = _sharing(config)
    sides = {"trainer.device": config.trainer.device, "rollout.device": config.rollout.device}
    for side in [name for name, device in sides.items() if device == "cpu" and visible_gpus()]:
        given = format_value(configured(config, key))
        consequence = f"with {key}={given} training processes and engines use the same GPUs in turns"
        yield ConfigProblem(side, "cpu", consequence, f"set it to auto, or {off}")
    if not visible_gpus():
        consequence = f"{no_gpu(cpu_build())}: the two sides take turns, which frees no memory on a CPU"
        yield warning(key, configured(config, key), consequence, f"set {off}")


def _sharing(config: Config) -> tuple[str, str]:
    """Return the key by which engines and ranks share GPUs, and the assignment with which they do not."""
    if config.takes_turns:
        return "placement", "placement=separate"
    return "trainer.lend_after_s", "trainer.lend_after_s=null"


def _checkpoint_dir(config: Config) -> Iterator[ConfigProblem]:
    key, given = "trainer.checkpoint_dir", config.trainer.checkpoint_dir
    if given is None:
        return
    if "://" in given:
        yield from check_protocol(key, given, "checkpoints cannot be written there")
        return
    path = Path(given).expanduser()
    parent, obstacle = writable_parent(path)
    run_dir = Path(config.run_dir).expanduser().resolve() if config.run_dir is not None else None
    folder = path.resolve()
    of_run = next((one for one in (folder, *folder.parents) if one == run_dir or _is_run(one)), None)
    if not path.is_absolute():
        consequence = "other machines, and commands in other directories, would look for it elsewhere"
        yield ConfigProblem(key, given, consequence, f"give an absolute path, such as {path.absolute()}")
    elif obstacle:
        yield ConfigProblem(key, given, f"{parent} {obstacle}", "choose another directory")
    elif of_run is not None:
        consequence = f"it is in the run directory {of_run}, and would be lost together with it"
        yield ConfigProblem(key, given, consequence, "choose a directory outside of run directories, or leave it out")
    elif config.resume == "none" and any(found for name in ("run.json", "step_*") for found in path.glob(name)):
        yield ConfigProblem(
            key,
            given,
            "it has the checkpoints of an earlier run, and this run's would be mixed with them",
            "give each run a directory of its own, or continue that run: resume=auto",
        )


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "logs").is_dir()


def _sharing_gpus(config: Config) -> Iterator[ConfigProblem]:
    """Refuse what engines and training processes cannot have if they use the same GPUs in turns."""
    if not config.shares_gpus:
        return
    rollout, trainer = config.rollout, config.trainer
    key, off = _sharing(config)
    one_machine = "both sides share the GPUs of this machine"
    no_room = "a GPU has one training process and one engine, and this would need another GPU"
    bucketed = ("ddp", "megatron_layers")
    buckets = (
        "engines would get less memory: torch's DistributedDataParallel keeps a copy of the gradient on each GPU, "
        "4 bytes per trained parameter (28 GB for 7B)"
    )
    refused = {
        "ray.address": (config.ray.address is not None, one_machine, "set it to null"),
        "trainer.nnodes": (trainer.nnodes is not None, one_machine, "leave it out, with trainer.n_gpus_per_node"),
        "rollout.nnodes": (rollout.nnodes is not None, one_machine, "leave it out, with rollout.n_gpus_per_node"),
        "rollout.autoscaling.enable": (rollout.autoscaling.enable, "the number of engines is fixed", "set it to false"),
        "trainer.num_workers": _number_of_ranks(config),
        "weight_sync.backend": (
            config.weight_sync.backend == "nccl",
            "rank 0 and an engine have the same GPU, and NCCL sends between different ones only",
            "set it to object_store",
        ),
        "reward_model.placement": (
            config.takes_turns and config.reward_model.placement == "serve", no_room, "set it to worker",
        ),
        **{
            f"{name}.placement": (role.placement == "own", no_room, "set it to actor")
            for name, role in model_roles(config).items()
        },
        "trainer.strategy": (trainer.strategy in bucketed and not config.model.lora_rank, buckets, "set it to fsdp2"),
        "critic.strategy": (config.needs_critic and config.critic.strategy in bucketed, buckets, "set it to fsdp2"),
    }  # fmt: skip
    for name, (applies, consequence, fix) in refused.items():
        if applies:
            text = f"with {key}={format_value(configured(config, key))} {consequence}"
            yield ConfigProblem(name, configured(config, name), text, f"{fix}, or use {off}")


def _number_of_ranks(config: Config) -> tuple[bool, str, str]:
    """Return whether the number of ranks does not fit that of engines, why, and how to mend it."""
    each, number = config.rollout.replica_size, config.trainer.num_workers
    if config.lends_gpus:
        consequence = (
            f"an engine has {each} GPUs of the ranks (rollout.tensor_parallel_size x rollout.pipeline_parallel_size)"
        )
        return number % each > 0, consequence, f"set it to a multiple of {each}"
    parts = config.rollout.num_replicas * each
    consequence = (
        "each GPU has one training process and one part of an engine, and the engines have rollout.num_replicas x "
        f"rollout.tensor_parallel_size x rollout.pipeline_parallel_size = {config.rollout.num_replicas} x {each} parts"
    )
    return number != parts, consequence, f"set it to {parts}"


SERVER_RULES: tuple[RuleFunction, ...] = (
    ConfigRule("serve.host", lambda c: c.serve.host not in LOOPBACK and not c.serve.api_key_env,
               "anybody who reaches this address could use the model",
               "set serve.api_key_env to the environment variable that holds an API key, or serve.host=127.0.0.1"),
    ConfigRule("serve.allowed_hosts", lambda c: any(set(":/*") & set(name) for name in c.serve.allowed_hosts),
               "names are compared without scheme, port and wildcards, so requests would be refused",
               "give plain host names, such as [models.example.org]"),
)  # fmt: skip
"""Rules for a run and for `asyncrl serve`."""

RULES: tuple[RuleFunction, ...] = (
    *SERVER_RULES,
    ConfigRule("placement", lambda c: c.placement == "colocated" and c.mode == "fully_async",
               "engines and Trainer would use the same GPUs in turns, and here both compute all the time",
               "use `asyncrl launch sync`, or set placement=separate; trainer.lend_after_s lends the Trainer's GPUs to "
               "generation while it waits"),
    _sharing_gpus,
    ConfigRule("trainer.lend_after_s",
               lambda c: c.lends_gpus and c.rollout.max_concurrent_samples >= c.max_unconsumed_samples,
               "all {c.max_unconsumed_samples} samples that async_training.staleness_threshold permits are in "
               "generation at once (rollout.max_concurrent_samples={c.rollout.max_concurrent_samples}), so none is "
               "left for further engines when the Trainer waits, and only the start of the run lends GPUs",
               "raise async_training.staleness_threshold, or set rollout.max_concurrent_samples below "
               "{c.max_unconsumed_samples}", "warning"),
    ConfigRule("async_training.max_staleness", lambda c: c.async_training.max_staleness is not None
               and c.async_training.stale_action == "drop"
               and c.async_training.max_staleness < c.async_training.staleness_threshold,
               "generation may run {c.async_training.staleness_threshold:g} versions ahead (staleness_threshold), so "
               "some of its samples will be dropped as stale", "raise it, or lower async_training.staleness_threshold",
               "warning"),
    _watchdog,
    ConfigRule("timeouts.sample_s", lambda c: c.timeouts.sample_s < c.timeouts.generate_s,
               "the loss of a call to a replica may be noticed only after {c.timeouts.generate_s:g} s "
               "(timeouts.generate_s), and by then its sample is dropped as failed",
               "set it to more than {c.timeouts.generate_s:g}, or lower timeouts.generate_s", "warning"),
    ConfigRule("timeouts.probe_s", lambda c: c.timeouts.probe_s >= c.timeouts.call_s,
               "calls to a hung queue or weight store time out after {c.timeouts.call_s:g} s (timeouts.call_s), before "
               "the hung process is replaced, so Rollouter and Trainer are restarted too",
               "set it to less than {c.timeouts.call_s:g}, or raise timeouts.call_s", "warning"),
    _unbounded_journal,
    ConfigRule("weight_sync.backend",
               lambda c: c.weight_sync.backend == "nccl" and "cpu" in (c.trainer.device, c.rollout.device),
               "rank 0 of the Trainer broadcasts from a GPU to those of the engines, and trainer.device or "
               "rollout.device is cpu", "set weight_sync.backend=object_store, or both to auto"),
    ConfigRule("weight_sync.backend", lambda c: c.weight_sync.backend == "nccl" and c.weight_sync.lora == "adapter",
               "vLLM loads adapters (weight_sync.lora=adapter) from files", "set weight_sync.backend=object_store"),
    ConfigRule("weight_sync.backend", lambda c: c.weight_sync.backend == "nccl"
               and not c.async_training.partial_rollout and c.async_training.staleness_threshold > 0,
               "all engines would stand still until the last response in flight has ended "
               "(async_training.partial_rollout=false)",
               "set async_training.partial_rollout=true, or weight_sync.backend=object_store"),
    ConfigRule("weight_sync.backend", lambda c: is_own(c.weight_sync.backend) and c.rollout.attach is not None,
               "the replicas of {c.rollout.attach} have only the code of their own deployment, so the run ends at its "
               "first version if they cannot import this class",
               "add its file or module to the runtime_env of the application in the Serve file, or install it on the "
               "nodes of the replicas", "warning"),
    ConfigRule("weight_sync.max_deltas", lambda c: c.weight_sync.max_deltas > 0 and c.weight_sync.backend != "disk",
               "only files in weight_sync.dir are sent as changes, and weight_sync.backend is {c.weight_sync.backend}",
               "set weight_sync.backend=disk, or weight_sync.max_deltas=0"),
    ConfigRule("weight_sync.max_deltas", lambda c: c.weight_sync.max_deltas > 0 and c.weight_sync.lora == "adapter",
               "adapters (weight_sync.lora=adapter) are small and change as a whole", "set weight_sync.max_deltas=0"),
    ConfigRule("weight_sync.max_deltas", lambda c: c.weight_sync.max_deltas > 0 and c.rollout.dtype == "float32",
               "a step changes nearly all weights in float32 (rollout.dtype), so versions will still be sent whole",
               "set rollout.dtype=bfloat16, or weight_sync.max_deltas=0", "warning"),
    ConfigRule("weight_sync.lora", lambda c: c.weight_sync.lora == "adapter" and c.model.lora_rank == 0,
               "model.lora_rank is 0, so there are no adapters", "set model.lora_rank, or weight_sync.lora=merged"),
    ConfigRule("model.lora_rank", lambda c: c.weight_sync.lora == "adapter" and engine_lora_rank(c.model) is None,
               "vLLM loads adapters up to rank 512, and engines load the adapters (weight_sync.lora=adapter)",
               "lower it, or set weight_sync.lora=merged"),
    ConfigRule("weight_sync.lora", lambda c: c.weight_sync.lora == "adapter"
               and c.trainer.strategy in ("torchtitan", "megatron_layers"),
               "trainer.strategy={c.trainer.strategy} has layers of its own, whose adapters do not fit the engines'",
               "set weight_sync.lora=merged, or trainer.strategy=fsdp2"),
    ConfigRule("weight_sync.lora", lambda c: c.weight_sync.lora == "adapter" and c.rollout.attach is not None,
               "the engines of {c.rollout.attach} were started without adapters, and may have other weights than "
               "model.path", "set weight_sync.lora=merged, or leave rollout.attach out"),
    ConfigRule("weight_sync.lora", lambda c: c.weight_sync.lora == "adapter" and c.rollout.spans_nodes,
               "an engine on several nodes (rollout.tensor_parallel_size={c.rollout.tensor_parallel_size}) cannot read "
               "the adapters, which are files in the memory of one node",
               "set weight_sync.lora=merged, or lower rollout.tensor_parallel_size"),
    ConfigRule("rollout.pipeline_parallel_size",
               lambda c: c.weight_sync.lora == "adapter" and c.rollout.pipeline_parallel_size > 1,
               "whether each stage loads its layers' parts of an adapter has not been checked",
               "set it to 1, or weight_sync.lora=merged"),
    ConfigRule("trainer.checkpoint_dir", lambda c: c.trainer.checkpoint_dir is not None and c.trainer.save_freq == -1,
               "a run writes its only checkpoint at the end (trainer.save_freq=-1), so a lost machine loses everything",
               "set trainer.save_freq to the number of steps that may be lost", "warning"),
    ConfigRule("trainer.nnodes",
               lambda c: (c.trainer.nnodes or 1) > 1 and c.trainer.checkpoint_dir is None and c.has_checkpoints,
               "checkpoints go to the run directory, which has to be on a local disk of the driver's node, and every "
               "rank writes a part of them: they fail on the other nodes",
               "set trainer.checkpoint_dir to a directory that all these nodes share", "warning"),
)  # fmt: skip

SERVER_ENVIRONMENT: tuple[RuleFunction, ...] = (_api_key, _runtime_env)
"""Checks for rollout servers."""
PORT_ENVIRONMENT: tuple[RuleFunction, ...] = (_port,)
"""A check for `asyncrl serve`. An application that is deployed separately uses the port of Ray Serve."""

ENVIRONMENT: tuple[RuleFunction, ...] = (_api_key, _resume, _weights_dir, _broadcast_gpus, _shared_gpus)
DRIVER_ENVIRONMENT: tuple[RuleFunction, ...] = (_run_dir, _checkpoint_dir, _runtime_env, _unbounded_journal_of_epochs)

NO_EFFECT = (
    no_effect("serve.allowed_hosts", lambda c: c.serve.host not in LOOPBACK,
              "serve.host is not loopback, so requests need an API key and may use any host name",
              "set serve.host=127.0.0.1"),
    no_effect("async_training.stale_action", lambda c: c.async_training.max_staleness is None,
              "async_training.max_staleness is null, so no sample is too stale", "set async_training.max_staleness"),
    no_effect("async_training.partial_mode", lambda c: c.mode != "sync" and not c.async_training.partial_rollout,
              "async_training.partial_rollout is false, so no response continues under new weights",
              "set async_training.partial_rollout=true"),
    no_effect("weight_sync.dir", lambda c: c.weight_sync.backend != "disk",
              "weight_sync.backend is {c.weight_sync.backend}", "set weight_sync.backend=disk"),
    no_effect("weight_sync.clear_kv_cache", lambda c: c.mode != "sync" and not (c.async_training.partial_rollout
              and c.async_training.partial_mode == "keep"), "no response keeps its KV cache over a sync",
              "set async_training.partial_rollout=true and async_training.partial_mode=keep"),
    no_effect("recovery.window_s", lambda c: c.recovery.max_restarts == 0,
              "recovery.max_restarts is 0, so the first failure of a part ends the run",
              "set recovery.max_restarts to 1 or more"),
    no_effect("ray.autoscaling", lambda c: c.ray.address is None, "a private cluster is this machine",
              "set ray.address"),
    no_effect("ray.object_store_memory_bytes", lambda c: c.ray.address is not None,
              "the cluster at ray.address has its own object store", "leave one of the two out"),
    no_effect("ray.keep_logs_days", lambda c: c.ray.address is not None,
              "the cluster at ray.address keeps its own logs", "leave one of the two out"),
)  # fmt: skip

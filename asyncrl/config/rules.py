"""Rules between keys, as a table of small functions, and the transform that makes a run synchronous. Pure.

A rule looks at a typed configuration and yields what cannot work (an error) or what will surprise (a warning). All
rules run, so one look tells everything. Those of the Trainer are in `trainer_rules` and `algorithm_rules`, keys without
an effect in `idle`; what needs files or the environment is in `checks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from asyncrl.config import (
    algorithm_rules,
    logging_rules,
    multi_turn_rules,
    profiler_rules,
    reward_rules,
    skip_rules,
    trainer_rules,
)
from asyncrl.config.idle import no_effect
from asyncrl.config.keys import leaves
from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config, SamplingConfig

_BYTES_PER_TOKEN = 9
"""Of a sample on disk: id, log-prob, mask."""
_MANY_GIB = 20

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_OWN_ENGINE_KWARGS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
        "rollout.tensor_parallel_size or rollout.num_replicas: an engine is given GPUs for these",
    ),
    "load_format": "nothing: weights are read from safetensors, never from a pickle",
    "logprobs_mode": "nothing: log-probs must be those the loss expects",
    "worker_cls": "nothing: weight updates need the engine's own",
    "worker_extension_cls": "nothing: weight updates need it",
}


def problems(config: Config, given: Given = (), *, serve_only: bool = False) -> list[Problem]:
    """Everything the rules have to say of `config`; `serve_only`: those for engines without training."""
    return [problem for rule in (SERVE_RULES if serve_only else RULES) for problem in rule(config, given)]


def as_sync(config: Config) -> Config:
    """The same run with a barrier between generation and training.

    One lease is a whole version's samples and nothing may run ahead, so the Rollouter waits for the new weights and
    the Trainer for the whole batch.
    """
    drift = config.async_training
    return config.model_copy(
        update={
            "mode": "sync",
            "async_training": drift.model_copy(
                update={
                    "require_batches": drift.require_batches * drift.trigger_parameter_sync_step,
                    "trigger_parameter_sync_step": 1,
                    "staleness_threshold": 0.0,
                    "partial_rollout": False,
                }
            ),
        }
    )


def _finite(config: Config, given: Given) -> Iterator[Problem]:
    for key, value in leaves(config.model_dump()).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, value, "infinite and NaN cannot be computed with", "give a finite number")


def _names(config: Config, given: Given) -> Iterator[Problem]:
    where = {"experiment_name": "runs/"}
    if any(role.enable for role in config.skip.by_role().values()):
        where["project_name"] = "skip.<role>.dump_dir"
    for key, parent in where.items():
        if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name := getattr(config, key)):
            yield Problem(
                key,
                name,
                f"it names a directory below {parent} and would not be one there",
                "use letters, digits, '_', '-', '+' and '.'",
            )


def _prompts(config: Config, given: Given) -> Iterator[Problem]:
    data = config.data
    if data.reasoning_gym is None and not data.train_files:
        yield Problem(
            "data.train_files",
            [],
            "there are no prompts to train on",
            "set data.train_files=[FILE.parquet] (or .jsonl), or data.reasoning_gym.task, or data=quickstart",
        )
    if data.reasoning_gym is not None:
        for name in ("train_files", "val_files"):
            if files := getattr(data, name):
                yield Problem(
                    f"data.{name}",
                    list(files),
                    f"data.reasoning_gym.task = {data.reasoning_gym.task} makes the prompts, and files are not read",
                    f"set data.{name}=[] or data.reasoning_gym=null",
                )


def _context(config: Config, given: Given) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length, config.rollout.response_length
    limit = config.rollout.max_model_len
    if limit is not None and prompt + response > limit:
        yield Problem(
            "rollout.max_model_len",
            limit,
            f"a prompt of {prompt} tokens (data.max_prompt_length) and a response of {response} "
            f"(rollout.response_length) do not fit the engine's context",
            f"set it to null or at least {prompt + response}",
        )


def _groups(config: Config, given: Given) -> Iterator[Problem]:
    if config.rollout.sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            0,
            "greedy decoding always gives a prompt the same response: nothing is explored, and there is nothing better "
            "to learn from",
            "set it above 0, usually 1.0; rollout.val.temperature is the one for validation",
        )
    if config.rollout.val.temperature == 0 and config.rollout.val.n > 1:
        yield warning(
            "rollout.val.n",
            config.rollout.val.n,
            "greedy validation gives equal responses, so all but the first cost time and tell nothing",
            "set rollout.val.n=1 or rollout.val.temperature above 0",
        )


def _sampling(config: Config, given: Given) -> Iterator[Problem]:
    sections: dict[str, SamplingConfig] = {
        "rollout.sampling": config.rollout.sampling,
        "rollout.val": config.rollout.val,
    }
    for name, sampling in sections.items():
        if sampling.top_k == 0 or sampling.top_k < -1:
            yield Problem(
                f"{name}.top_k", sampling.top_k, "no token could be drawn", "give a count of 1 or more, or -1 for off"
            )
    train = config.rollout.sampling
    for key, value, neutral in (("top_p", train.top_p, 1.0), ("top_k", train.top_k, -1), ("min_p", train.min_p, 0.0)):
        if value != neutral:
            yield warning(
                f"rollout.sampling.{key}",
                value,
                "tokens come from a truncated distribution while recorded log-probs and the loss are of the full one, "
                "which biases the policy ratio",
                f"set it to {neutral} for training unless you mean it",
            )


def _frequencies(config: Config, given: Given) -> Iterator[Problem]:
    for key in ("test_freq", "save_freq"):
        value = getattr(config.trainer, key)
        if value == 0 or value < -1:
            yield Problem(
                f"trainer.{key}", value, "that is no number of steps", "give 1 or more, or -1 for never in between"
            )
    if config.trainer.test_freq > 0 and not config.data.val_files and config.data.reasoning_gym is None:
        yield warning(
            "trainer.test_freq", config.trainer.test_freq, "there is no validation set, so nothing is validated",
            "set data.val_files",
        )  # fmt: skip


def _staleness(config: Config, given: Given) -> Iterator[Problem]:
    drift = config.async_training
    if (
        drift.max_staleness is not None
        and drift.stale_action == "drop"
        and drift.max_staleness < drift.staleness_threshold
    ):
        yield warning(
            "async_training.max_staleness",
            drift.max_staleness,
            f"pacing lets samples get {drift.staleness_threshold:g} versions old (staleness_threshold), "
            "so part of what is generated will be dropped",
            "raise it, or lower async_training.staleness_threshold",
        )


def _engine(config: Config, given: Given) -> Iterator[Problem]:
    for name, value in config.rollout.engine_kwargs.items():
        if own := _OWN_ENGINE_KWARGS.get(name):
            yield Problem(
                f"rollout.engine_kwargs.{name}",
                value,
                "the engine gets it from elsewhere; two values could differ",
                f"set {own}",
            )
    quantization = config.rollout.engine_kwargs.get("quantization")
    if quantization and config.weight_sync.verify != "off":
        yield Problem(
            "rollout.engine_kwargs.quantization",
            quantization,
            "quantized weights never equal the published ones, so the first weight sync would fail",
            "set weight_sync.verify=off",
        )
    if config.rollout.max_num_seqs < config.rollout.n:
        yield warning(
            "rollout.max_num_seqs",
            config.rollout.max_num_seqs,
            f"a group of {config.rollout.n} responses (rollout.n) is decoded in several rounds",
            f"set it to {config.rollout.n} or more",
        )


def _deadlines(config: Config, given: Given) -> Iterator[Problem]:
    limits = config.timeouts
    # Calls to the training processes, and to the replicas to load a version, count as movement while they are under
    # way: train_s, collective_s and apply_s may be longer.
    silent = {
        "timeouts.call_s": limits.call_s,
        "timeouts.probe_s": limits.probe_s,
        "timeouts.generate_s": limits.generate_s,
        "timeouts.engine_s": limits.engine_s,
        "reward.timeout_s": config.reward.timeout_s,
    }
    if config.reward.judge.model is not None:
        silent["reward.judge.timeout_s"] = config.reward.judge.timeout_s
    longest = max(silent, key=silent.__getitem__)
    if limits.watchdog_s < silent[longest]:
        yield warning(
            "timeouts.watchdog_s",
            limits.watchdog_s,
            f"one call may take {silent[longest]:g} s ({longest}) in which nothing else moves, so a healthy run could "
            "be stopped",
            f"set it to at least {silent[longest]:g}, or lower {longest}",
        )


def _recovery(config: Config, given: Given) -> Iterator[Problem]:
    limits, recovery = config.timeouts, config.recovery
    longer = {"timeouts.start_s": limits.start_s, "timeouts.generate_s": limits.generate_s}
    longest = max(longer, key=longer.__getitem__)
    if limits.sample_s < longer[longest]:
        yield warning(
            "timeouts.sample_s",
            limits.sample_s,
            f"while an engine is replaced, which may take {longer[longest]:g} s ({longest}), samples that only wait "
            "for it are dropped as failed",
            f"set it to more than {longer[longest]:g}, or lower {longest}",
        )
    if limits.probe_s >= limits.call_s:
        yield warning(
            "timeouts.probe_s",
            limits.probe_s,
            f"whoever calls a queue or weight store that hangs gives up after {limits.call_s:g} s (timeouts.call_s), "
            "before it is replaced, so that Rollouter and Trainer are restarted too",
            f"set it to less than {limits.call_s:g}, or raise timeouts.call_s",
        )
    if recovery.max_restarts == 0 and "recovery.window_s" in given:
        yield Problem(
            "recovery.window_s",
            recovery.window_s,
            "it would have no effect: recovery.max_restarts is 0, so the first failure of a part ends the run",
            "set recovery.max_restarts to 1 or more, or leave this key out",
        )


def _journal(config: Config, given: Given) -> Iterator[Problem]:
    """A checkpoint covers what was trained before it, and only then its payload files are deleted."""
    training = config.trainer
    if config.journal == "off" or training.save_freq != -1 or training.total_training_steps is None:
        return
    samples = training.total_training_steps // training.ppo_epochs * training.ppo_mini_batch_size
    tokens = config.rollout.n * (config.data.max_prompt_length + config.rollout.response_length)
    gib = samples * tokens * _BYTES_PER_TOKEN / 2**30
    if gib > _MANY_GIB:
        steps = max(1, int(training.total_training_steps * _MANY_GIB / gib))
        yield warning(
            "trainer.save_freq",
            training.save_freq,
            f"samples on disk (journal=on) are deleted when a checkpoint covers them; without one before the end they "
            f"grow to {gib:.0f} GiB, if responses get as long as they may",
            f"set trainer.save_freq={steps} or less (trainer.max_checkpoints_to_keep bounds the checkpoints), or "
            "journal=off",
        )


def _serving(config: Config, given: Given) -> Iterator[Problem]:
    if config.serve.host not in LOOPBACK and not config.serve.api_key_env:
        yield Problem(
            "serve.host",
            config.serve.host,
            "anybody who reaches this address could use the model",
            "set serve.api_key_env to the environment variable that holds an API key, or serve.host=127.0.0.1",
        )


SERVE_RULES: tuple[Rule, ...] = (_finite, _names, _context, _engine, _serving)
RULES: tuple[Rule, ...] = (
    *SERVE_RULES,
    _prompts,
    _groups,
    _sampling,
    _frequencies,
    _staleness,
    *trainer_rules.RULES,
    *algorithm_rules.RULES,
    *reward_rules.RULES,
    *multi_turn_rules.RULES,
    *skip_rules.RULES,
    *profiler_rules.RULES,
    *logging_rules.RULES,
    no_effect,
    _deadlines,
    _recovery,
    _journal,
)

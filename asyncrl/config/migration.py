"""A configuration of verl as one of asyncrl: what `asyncrl migrate` prints. The table of keys is foreign_keys.toml.

verl's defaults that differ from asyncrl's are written, too, so that the result trains as verl does.
"""

from __future__ import annotations

import ast
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from asyncrl.config.foreign_keys import VERL, ForeignKey, foreign_keys, of_verl
from asyncrl.config.keys import ConfigKey, all_keys
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.rules import RULES, keys_without_effect
from asyncrl.config.schema import Config
from asyncrl.config.sources import commented_yaml, inline
from asyncrl.config.yaml_files import read_yaml
from asyncrl.core.failures import ConfigError

How = Literal["same", "renamed", "derived", "default"]
_ASYNC_SECTIONS = ("async_training.", "rollout.")
_ENVIRONMENT = "${oc.env:"


@dataclass(frozen=True, slots=True)
class MigratedKey:
    """A key of asyncrl with its value, and where it comes from."""

    name: str
    value: Any
    how: How
    sources: tuple[str, ...]
    """The keys of verl that decide the value."""
    note: str = ""

    @property
    def comment(self) -> str:
        """Return the text of the comment above the key."""
        keys = ", ".join(self.sources)
        text = {
            "same": "same",
            "renamed": f"renamed: {keys}",
            "derived": f"derived from {keys}",
            "default": f"verl's default, {keys}",
        }[self.how]
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True, slots=True)
class Migration:
    """The translation of a configuration."""

    keys: Mapping[str, MigratedKey]
    left_out: Sequence[tuple[str, Any, str]]
    """Keys of verl without counterpart: name, value, reason."""
    problems: Sequence[ConfigProblem] = ()
    """What `asyncrl launch` would say about the result, apart from files and devices."""

    def as_yaml(self) -> str:
        """Return the configuration with a comment for each key, and the keys without counterpart at the end."""
        counts = Counter(key.how for key in self.keys.values())
        lines = [
            f"# Translated from verl by `asyncrl migrate`: {counts['same']} keys are the same, {counts['renamed']} "
            f"renamed, {counts['derived']} derived,\n# {counts['default']} are defaults of verl; {len(self.left_out)} "
            "without counterpart or effect are at the end."
        ]
        ordered = sorted(self.keys.values(), key=lambda key: _schema_order(key.name))
        lines.append(commented_yaml({key.name: (key.value, key.comment) for key in ordered}, above=True))
        if self.left_out:
            lines.append("\n# Without counterpart in asyncrl, or without effect:")
            for reason in dict.fromkeys(reason for _, _, reason in self.left_out):
                lines.append(f"# - {reason}:")
                lines += [f"#     {name} = {inline(value)}" for name, value, why in self.left_out if why == reason]
        return "\n".join(lines) + "\n"


def migrate(file: Path | None, overrides: Sequence[str] = (), *, config_name: str = "") -> Migration:
    """Translate a configuration of verl.

    Args:
        file: a YAML file of verl; None: only overrides.
        overrides: `key=value`, `+key=value`, `++key=value` or `~key`, as launch scripts give them.
        config_name: the value of `--config-name`; names with `fully_async` or `megatron` choose verl's other defaults.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    run = _VerlRun(read_verl(file, overrides), config_name)
    for name in run.given:
        run.translate(name)
    run.add_defaults()
    return _without_idle_keys(run)


def _without_idle_keys(run: _VerlRun) -> Migration:
    """Return the migration without the keys that have no effect in it, and with the problems of the rest."""
    try:
        config = Config.model_validate_json(json.dumps(_tree(run.keys), default=str), strict=True)
    except pydantic.ValidationError as error:
        return Migration(run.keys, run.left_out, [_invalid(detail) for detail in error.errors(include_url=False)])
    changed = {name for name, key in run.keys.items() if name in all_keys() and key.value != all_keys()[name].default}
    for idle in list(keys_without_effect(config, changed)):
        key = run.keys.pop(idle.key)
        if key.how != "default":
            run.left_out += [(source, run.given.get(source), idle.consequence) for source in key.sources]
    config = Config.model_validate_json(json.dumps(_tree(run.keys), default=str), strict=True)
    return Migration(run.keys, run.left_out, [problem for rule in RULES for problem in rule(config)])


def _invalid(detail: Any) -> ConfigProblem:
    name = ".".join(map(str, detail["loc"]))
    return ConfigProblem(name, detail["input"], detail["msg"], "correct the value in the translated file")


def _tree(keys: Mapping[str, MigratedKey]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, key in keys.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = key.value
    return tree


def _schema_order(name: str) -> tuple[int, ...]:
    order = {known: number for number, known in enumerate(all_keys())}
    parts = name.split(".")
    return tuple(order.get(".".join(parts[: end + 1]), len(order)) for end in range(len(parts)))


# ------------------------------------------------------------------------------------------------ reading


def read_verl(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, with references to other keys resolved.

    Texts that depend on the environment stay as they are, because asyncrl resolves them as well.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("oc.select"):
        raise ConfigError("omegaconf has no resolver oc.select, which verl's files use; update omegaconf")
    try:
        tree = OmegaConf.create({}) if file is None else OmegaConf.load(io.StringIO(read_yaml(file)))
        if not isinstance(tree, DictConfig):
            raise ConfigError(f"{file}: it is not a mapping of keys to values; give a configuration of verl")
        for text in overrides:
            override = OverridesParser.create().parse_override(text.replace("\n", " ").strip())
            key = override.key_or_group.replace("/", ".")
            if not override.is_delete():
                OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(f"{file or 'overrides'}: cannot be read: {' '.join(str(error).split())}") from error
    return {name: value for name, value in _leaves(tree, "") if value is not None}


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in node:
        name = f"{prefix}{key}"
        raw = OmegaConf.to_container(node, resolve=False)[key]
        try:
            value = node[key]
        except OmegaConfBaseException:
            value = None if raw == "???" else raw
        entry = of_verl(name)
        ours = all_keys().get(entry.to[0]) if entry and entry.to and not entry.is_pattern else None
        if isinstance(value, DictConfig) and not (ours and ours.open_ended):
            yield from _leaves(value, f"{name}.")
        elif key not in ("_target_", "defaults", "searchpath"):
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            yield name, raw if _ENVIRONMENT in str(raw) and isinstance(plain, str | list) else plain


# ------------------------------------------------------------------------------------------------ translation


class _NoCounterpart(Exception):
    """Raised by a derivation: the value has no counterpart, for the reason in its message."""


@dataclass
class _VerlRun:
    """A run of verl, and what it has been translated into so far."""

    given: Mapping[str, Any]
    config_name: str = ""
    keys: dict[str, MigratedKey] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    @property
    def asynchronous(self) -> bool:
        return "fully_async" in self.config_name or any(name.startswith(_ASYNC_SECTIONS) for name in self.given)

    @property
    def megatron(self) -> bool:
        chosen = {str(self.get(key)) for key in (f"{_ACTOR}.strategy", "model_engine", "critic.strategy")}
        return (
            "megatron" in chosen | {self.config_name}
            or "megatron" in self.config_name
            or any(".megatron." in name for name in self.given)
        )

    def get(self, name: str) -> Any:
        """Return a value of verl, or its default if the table has one."""
        if name in self.given:
            return self.given[name]
        entry = of_verl(name)
        if entry is None:
            return None
        default = entry.async_default if self.asynchronous else None
        return entry.default if default is None else default

    def number(self, name: str, otherwise: float) -> float:
        value = self.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise

    def translate(self, name: str, how: How | None = None) -> None:
        """Translate one key, which has no value of its own if `how` is verl's default."""
        value, entry = self.get(name), of_verl(name)
        if entry is None and name in all_keys():
            entry = ForeignKey(VERL, name, (name,))
        if entry is None:
            known = [key.name for key in foreign_keys() if key.system == VERL and not key.is_pattern]
            close = get_close_matches(name, known, n=1, cutoff=0.85)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.left_out.append((name, value, f"it is no documented key of verl{hint}"))
            return
        try:
            values = _DERIVATIONS[entry.by](self, name, value) if entry.by else _renamed(entry, name, value)
        except _NoCounterpart as reason:
            if how is None:
                self.left_out.append((name, value, str(reason)))
            return
        for ours, translated in values.items():
            before = self.keys.get(ours)
            if before and how:
                continue
            sources = (*(before.sources if before else ()), name)
            notes = dict.fromkeys([*(before.note.split("; ") if before and before.note else ()), entry.note])
            kind: How = how or ("same" if ours == name else "renamed")
            if not how and (before or translated not in (value, [value])):
                kind = "derived"
            self.keys[ours] = MigratedKey(ours, translated, kind, sources, "; ".join(filter(None, notes)))

    def add_defaults(self) -> None:
        """Add verl's values of keys that are not given, where asyncrl's default is another one."""
        for entry in foreign_keys():
            if entry.system == VERL and entry.name not in self.given and self.get(entry.name) not in (None, ""):
                self.translate(entry.name, "default")
        if "reward.function" not in self.keys and "reward_model.placement" not in self.keys:
            gsm8k = "gsm8k" in str(self.given.get("data.train_files"))
            scorer = "exact_match" if gsm8k else "math_verify"
            note = "verl scores by data_source; other scorers are in docs/rewards.md"
            self._add("reward.function", scorer, ("the column data_source",), note)
        if not self.asynchronous:
            self._add("rollout.num_replicas", _replicas(self, "rollout.nnodes", None)["rollout.num_replicas"],
                      ("trainer.nnodes", "trainer.n_gpus_per_node", f"{_ROLLOUT}.tensor_model_parallel_size"),
                      "the other half of the GPUs")  # fmt: skip
        if self.megatron:
            section = f"{_ACTOR}.megatron."
            parallel = tuple(name for name in self.given if name.startswith(section) and "parallel" in name)
            self._add("trainer.strategy", self.keys["trainer.strategy"].value, parallel or (f"{_ACTOR}.strategy",),
                      "asyncrl's megatron has the whole model on each rank, fsdp2 shards it")  # fmt: skip
        for name, key in list(self.keys.items()):
            if key.how == "default" and name in all_keys() and key.value == all_keys()[name].default:
                del self.keys[name]

    def _add(self, name: str, value: Any, sources: tuple[str, ...], note: str) -> None:
        self.keys[name] = MigratedKey(name, value, "derived", sources, note)

    # What verl counts, in asyncrl's units

    @property
    def mini_batch(self) -> int:
        return max(1, int(self.number(f"{_ACTOR}.ppo_mini_batch_size", 256)))

    @property
    def passes(self) -> int:
        return max(1, int(self.number(f"{_ACTOR}.ppo_epochs", 1)))

    @property
    def batches_per_lease(self) -> int:
        if self.asynchronous:
            return int(self.number("async_training.require_batches", 1))
        return max(1, int(self.number("data.train_batch_size", 1024)) // self.mini_batch)

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of one call of verl's trainer to the actor."""
        return self.batches_per_lease * self.passes

    @property
    def gpus(self) -> int:
        return int(self.number("trainer.nnodes", 1) * self.number("trainer.n_gpus_per_node", 8))

    @property
    def longest(self) -> int:
        lengths = self.number("data.max_prompt_length", 512), self.number("data.max_response_length", 512)
        return int(sum(lengths))


def _renamed(entry: ForeignKey, name: str, value: Any) -> dict[str, Any]:
    if not entry.to:
        raise _NoCounterpart(entry.note)
    ours = entry.targets(name)
    value = entry.values.get(str(value), value)
    for one in ours:
        _check_choice(all_keys().get(one), one, value)
    return dict.fromkeys(ours, value)


def _check_choice(key: ConfigKey | None, name: str, value: Any) -> None:
    """Refuse a value that is none of the choices of a key."""
    options = key.kind.partition("one of ")[2].removesuffix(" or null").split(", ") if key else [""]
    if options != [""] and isinstance(value, str) and value not in options:
        raise _NoCounterpart(f"{name} has no such value; it is one of {', '.join(options)}")


# ------------------------------------------------------------------------------------------------ derivations

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_Derivation = Callable[[_VerlRun, str, Any], dict[str, Any]]
_DERIVATIONS: dict[str, _Derivation] = {}


def _derivation(function: _Derivation) -> _Derivation:
    _DERIVATIONS[function.__name__.removeprefix("_")] = function
    return function


def _to(name: str) -> str:
    entry = of_verl(name)
    assert entry is not None
    return entry.to[0]


@_derivation
def _as_list(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): [value] if isinstance(value, str) else list(value)}


@_derivation
def _positive(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value <= 0:
        raise _NoCounterpart(f"all rows are used, as by asyncrl's default of {_to(name)}")
    return {_to(name): value}


@_derivation
def _none(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): value or "none"}


@_derivation
def _batches_per_lease(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if run.asynchronous:
        raise _NoCounterpart("as in verl's fully asynchronous trainer, it would have no effect")
    return {_to(name): run.batches_per_lease}


@_derivation
def _overlong(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    cut = run.get("data.truncation") or "error"
    return {_to(name): "filter" if run.get("data.filter_overlong_prompts") else cut}


@_derivation
def _strategy(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if run.megatron:
        value = "megatron"
        parallel = [
            run.number(f"{_ACTOR}.megatron.{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline", "expert")
        ]
        if math.prod(parallel) * run.number(f"{_ACTOR}.megatron.context_parallel_size", 1) > 1:
            value = "fsdp2"  # asyncrl's megatron has the whole model on each rank
    elif name != f"{_ACTOR}.fsdp_config.strategy" and f"{_ACTOR}.fsdp_config.strategy" in run.given:
        value = run.given[f"{_ACTOR}.fsdp_config.strategy"]
    if value not in ("fsdp", "fsdp2", "megatron", "torchtitan"):
        raise _NoCounterpart("trainer.strategy is fsdp2, fsdp, ddp, local, torchtitan or megatron")
    return {_to(name): value}


@_derivation
def _micro_batch(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): _tokens(run, _ACTOR, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", value)}


@_derivation
def _micro_batch_critic(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): _tokens(run, "critic", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", value)}


@_derivation
def _micro_batch_ref(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    ref = "actor_rollout_ref.ref"
    return {_to(name): _tokens(run, ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", value)}


def _tokens(run: _VerlRun, section: str, per_gpu: str, max_tokens: str, value: Any) -> int:
    """Return the tokens of a micro-batch: verl's limit, or its number of the longest sequences."""
    own = f"{section}.{'log_prob_use_dynamic_bsz' if section.endswith('ref') else 'use_dynamic_bsz'}"
    packed = run.given.get(own, run.given.get(f"{_ACTOR}.use_dynamic_bsz", False))
    shards = run.number(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
    if packed or f"{section}.{per_gpu}" not in run.given:
        return int(run.number(f"{section}.{max_tokens}", 16384) * shards)
    return int(run.given[f"{section}.{per_gpu}"] * run.longest * shards)


@_derivation
def _clip(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {
        f"algorithm.clip_ratio_{side}": run.given.get(f"{_ACTOR}.clip_ratio_{side}", value) for side in ("low", "high")
    }


@_derivation
def _steps(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    factor = run.steps_per_update
    if run.asynchronous and name.endswith("_freq"):  # verl counts versions there
        factor *= int(run.number("async_training.trigger_parameter_sync_step", 4))
    if value < 0 and not name.endswith("_freq"):
        raise _NoCounterpart("it is not set")
    return {_to(name): value * factor if value > 0 else value}


@_derivation
def _share_of_steps(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not value:
        raise _NoCounterpart("there is no warm-up, as by asyncrl's default")
    if run.asynchronous:
        total = run.number("rollout.total_rollout_steps", 100) / run.mini_batch * run.passes
    elif "trainer.total_training_steps" in run.given:
        total = run.number("trainer.total_training_steps", 0) * run.steps_per_update
    else:
        raise _NoCounterpart(f"set {_to(name)} to this share of the optimizer steps, which `launch --dry-run` shows")
    return {_to(name): round(value * total)}


@_derivation
def _rollout_steps(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not run.asynchronous:
        raise _NoCounterpart("it belongs to verl's fully asynchronous trainer")
    return {_to(name): max(1, value // run.mini_batch * run.passes)}


@_derivation
def _workers(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): run.gpus if run.asynchronous else max(1, run.gpus // 2)}


@_derivation
def _replicas(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    size = max(1, int(run.number(f"{_ROLLOUT}.tensor_model_parallel_size", 2)))
    if run.asynchronous:
        gpus = int(run.number("rollout.nnodes", 1) * run.number("rollout.n_gpus_per_node", 8))
    else:
        gpus = run.gpus - run.gpus // 2
    return {_to(name): max(1, gpus // size)}


@_derivation
def _gpu_memory(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not run.asynchronous:
        raise _NoCounterpart("in verl the engine shares its GPU with training; here it has the GPU for itself")
    return {_to(name): value}


@_derivation
def _concurrency(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): value * _replicas(run, "rollout.nnodes", None)["rollout.num_replicas"]}


@_derivation
def _val_sampling(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    sampled = run.given.get(f"{_ROLLOUT}.val_kwargs.do_sample", False)
    return {_to(name): run.number(f"{_ROLLOUT}.val_kwargs.temperature", 0) if sampled else 0}


@_derivation
def _sinks(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    chosen = [value] if isinstance(value, str) else list(value)
    known = [one for one in chosen if one in ("tensorboard", "wandb", "mlflow", "trackio")]
    return {_to(name): ["jsonl", *known]}


@_derivation
def _resume(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    mode = run.get("trainer.resume_mode")
    if mode == "resume_path":
        return {"resume": run.given.get("trainer.resume_from_path", "auto")}
    return {"resume": {"disable": "none"}.get(mode, mode)}


@_derivation
def _bypass_loss(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value != "reinforce" or not run.get(f"{_CORRECTION}.bypass_mode"):
        raise _NoCounterpart(f"the loss is that of {_ACTOR}.policy_loss.loss_mode")
    return {_to(name): value}


@_derivation
def _filter_limit(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value <= 0:
        raise _NoCounterpart("there is no limit in verl; asyncrl's default stops a run that no longer learns")
    return {_to(name): int(value * run.number("data.train_batch_size", 1024))}


@_derivation
def _is_threshold(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or "_" not in value:
        return {_to(name): float(value)}
    low, high = _bounds(value)
    return {_to(name): high, f"{_to(name)}_low": low, f"{_CORRECTION}.rollout_is_mode": "mask"}


@_derivation
def _rejection(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    kind, threshold = run.given.get(f"{_CORRECTION}.rollout_rs"), run.given.get(f"{_CORRECTION}.rollout_rs_threshold")
    kind_key, bound_key = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    if not kind or "," in kind or threshold is None:
        raise _NoCounterpart("asyncrl has one rejection with one threshold" if kind else "nothing is rejected")
    if kind == "seq_mean_k1":  # a bound of the geometric mean of ratios
        low, high = _bounds(threshold)
        return {kind_key: "geometric", bound_key: high, f"{bound_key}_low": low}
    if kind.endswith("k1"):  # verl bounds the ratio, asyncrl its logarithm
        low, high = _bounds(threshold)
        return {kind_key: kind, bound_key: round(max(-math.log(low), math.log(high)), 6)}
    return {kind_key: kind, bound_key: float(threshold)}


def _bounds(value: Any) -> tuple[float, float]:
    """Return verl's lower and upper bound of a ratio: "0.5_2.0", or an upper bound, whose inverse is the lower one."""
    low, _, high = str(value).partition("_")
    return (float(low), float(high)) if high else (1 / float(value), float(value))


@_derivation
def _reward_function(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    section = name.rpartition(".")[0]
    path = run.given.get(f"{section}.path")
    if path is None:
        raise _NoCounterpart("there is no file of reward functions")
    return {_to(name): f"{path}:{run.given.get(f'{section}.name') or 'compute_score'}"}


@_derivation
def _reward_model(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not value:
        raise _NoCounterpart("there is no reward model, as by asyncrl's default")
    return {_to(name): "serve"}


@_derivation
def _tool_file(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): [_with_own_class(name, entry) for entry in _entries(name, value, "tools")]}


@_derivation
def _interaction_file(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): [_with_own_class(name, entry) for entry in _entries(name, value, "interaction")]}


def _entries(name: str, file: str, key: str) -> list[Mapping[str, Any]]:
    try:
        content = yaml.safe_load(read_yaml(Path(file).expanduser()))
        return list(content[key])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise _NoCounterpart(f"{file} cannot be read ({error}); write its entries into {_to(name)}") from error


def _with_own_class(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a tool or interaction file; classes of verl that asyncrl has too get its name and settings."""
    table = of_verl(name)
    ours = table.values.get(entry.get("class_name", "")) if table else None
    return {"class_name": ours, **({"name": entry["name"]} if "name" in entry else {})} if ours else dict(entry)


@_derivation
def _tool_functions(run: _VerlRun, name: str, value: Any) -> dict[str, Any]:
    try:
        tree = ast.parse(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise _NoCounterpart(f"{value} cannot be read ({error}); write its functions into {_to(name)}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tools = [node.name for node in functions if any("function_tool" in ast.unparse(d) for d in node.decorator_list)]
    return {_to(name): [{"function": f"{value}:{tool}"} for tool in tools]}


def derivations() -> frozenset[str]:
    """Return the names that `by` may have in foreign_keys.toml."""
    return frozenset(_DERIVATIONS)

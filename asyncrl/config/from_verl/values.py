"""A run of verl: its values and defaults, and what they are in asyncrl's units. `migration` writes the result.

Each function of the second half computes values of our keys, or says why there is none; foreign_keys.toml names it
in `by`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.foreign_keys import ForeignKey, of_verl
from asyncrl.config.interpolation import bounded_references
from asyncrl.config.keys import ConfigKey, all_keys, choices
from asyncrl.config.tool_file import tool_entries
from asyncrl.config.yaml_files import NamedText, load_yaml, read_yaml
from asyncrl.core.failures import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_ASYNC_SECTIONS = ("async_training.", "rollout.")
_ENVIRONMENT = "${oc.env:"
_MAX_REFERENCES = 2_000
"""Limit for the references that are resolved. A complete configuration of verl has some hundreds."""


class NoCounterpart(Exception):
    """A value of verl has no counterpart, for the reason in the message."""


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
        tree = OmegaConf.create({}) if file is None else OmegaConf.load(NamedText(read_yaml(file), file))
        if not isinstance(tree, DictConfig):
            raise ConfigError(f"{file}: it is not a mapping of keys to values; give a configuration of verl")
        for text in overrides:
            override = OverridesParser.create().parse_override(text.replace("\n", " ").strip())
            key = override.key_or_group.replace("/", ".")
            if not override.is_delete():
                OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)
    except (yaml.YAMLError, ValueError, OSError, RecursionError, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(f"{file or 'overrides'}: cannot be read: {' '.join(str(error).split())}") from error
    with bounded_references(_MAX_REFERENCES):
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


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run of verl by the keys that its user gave."""

    given: Mapping[str, Any]
    config_name: str = ""

    @property
    def asynchronous(self) -> bool:
        return "fully_async" in self.config_name or any(name.startswith(_ASYNC_SECTIONS) for name in self.given)

    @property
    def megatron(self) -> bool:
        chosen = {str(self.get(key)) for key in (f"{ACTOR}.strategy", "model_engine", "critic.strategy")}
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

    # What verl counts, in asyncrl's units

    @property
    def mini_batch(self) -> int:
        return max(1, int(self.number(f"{ACTOR}.ppo_mini_batch_size", 256)))

    @property
    def passes(self) -> int:
        return max(1, int(self.number(f"{ACTOR}.ppo_epochs", 1)))

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
    def num_workers(self) -> int:
        """Training ranks of asyncrl: verl's GPUs for training, or half of those that training and generation share."""
        return self.gpus if self.asynchronous else max(1, self.gpus // 2)

    @property
    def num_replicas(self) -> int:
        """Engines of asyncrl: verl's GPUs for generation, or half of those that training and generation share."""
        size = max(1, int(self.number(f"{ROLLOUT}.tensor_model_parallel_size", 2)))
        if self.asynchronous:
            gpus = int(self.number("rollout.nnodes", 1) * self.number("rollout.n_gpus_per_node", 8))
        else:
            gpus = self.gpus - self.gpus // 2
        return max(1, gpus // size)

    @property
    def longest(self) -> int:
        lengths = self.number("data.max_prompt_length", 512), self.number("data.max_response_length", 512)
        return int(sum(lengths))


def translate(entry: ForeignKey, run: VerlRun, name: str) -> dict[str, Any]:
    """Return the values of our keys that mean the key `name` of a run.

    Raises:
        NoCounterpart: there is none.
    """
    value = run.get(name)
    try:
        return _DERIVATIONS[entry.by](run, name, value) if entry.by else _renamed(entry, name, value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise NoCounterpart(f"its value cannot be translated ({error})") from error


def _renamed(entry: ForeignKey, name: str, value: Any) -> dict[str, Any]:
    if not entry.to:
        raise NoCounterpart(entry.note)
    ours = entry.targets(name)
    value = entry.values.get(str(value), value)
    for one in ours:
        _check_choice(all_keys().get(one), one, value)
    return dict.fromkeys(ours, value)


def _check_choice(key: ConfigKey | None, name: str, value: Any) -> None:
    """Refuse a value that is none of the choices of a key."""
    options = choices(key.kind) if key else []
    if options and isinstance(value, str) and value not in options:
        own = ", or a function of your own (docs/extending.md)" if "module:name" in (key.kind if key else "") else ""
        raise NoCounterpart(f"{name} has no such value; it is one of {', '.join(options)}{own}")


# ------------------------------------------------------------------------------------------------ derivations

_Derivation = Callable[[VerlRun, str, Any], dict[str, Any]]
_DERIVATIONS: dict[str, _Derivation] = {}


def _derivation(function: _Derivation) -> _Derivation:
    _DERIVATIONS[function.__name__.removeprefix("_")] = function
    return function


def _to(name: str) -> str:
    entry = of_verl(name)
    assert entry is not None
    return entry.to[0]


@_derivation
def _as_list(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): [value] if isinstance(value, str) else list(value)}


@_derivation
def _positive(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value <= 0:
        raise NoCounterpart(f"all rows are used, as by asyncrl's default of {_to(name)}")
    return {_to(name): value}


@_derivation
def _importance_weights(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value and run.get(f"{_CORRECTION}.bypass_mode") and run.get(f"{_CORRECTION}.loss_type") != "reinforce":
        raise NoCounterpart("in bypass mode the ratio of verl's ppo_clip is the weight, and these are only measured")
    return {_to(name): value or "none"}


@_derivation
def _batches_per_lease(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if run.asynchronous:
        raise NoCounterpart("as in verl's fully asynchronous trainer, it would have no effect")
    return {_to(name): run.batches_per_lease}


@_derivation
def _overlong(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    cut = run.get("data.truncation") or "error"
    return {_to(name): "filter" if run.get("data.filter_overlong_prompts") else cut}


@_derivation
def _strategy(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if run.megatron:
        value = "megatron_layers"
        parallel = [
            run.number(f"{ACTOR}.megatron.{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline", "expert")
        ]
        if math.prod(parallel) * run.number(f"{ACTOR}.megatron.context_parallel_size", 1) > 1:
            value = "fsdp2"  # asyncrl's megatron_layers has the whole model on each rank
    elif name != f"{ACTOR}.fsdp_config.strategy" and f"{ACTOR}.fsdp_config.strategy" in run.given:
        value = run.given[f"{ACTOR}.fsdp_config.strategy"]
    value = "nemo_automodel" if value == "automodel" else value
    if value not in ("fsdp", "fsdp2", "megatron_layers", "torchtitan", "nemo_automodel", "veomni"):
        raise NoCounterpart(
            "trainer.strategy is fsdp2, fsdp, ddp, local, torchtitan, megatron_layers, nemo_automodel or veomni"
        )
    return {_to(name): value}


@_derivation
def _tensor_parallel(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value > 1 and run.num_workers % value:
        raise NoCounterpart(
            f"the {run.num_workers} ranks of the Trainer cannot be divided into groups of {value}; "
            "fsdp2 shards the model all the same"
        )
    return {_to(name): value}


@_derivation
def _micro_batch(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): _tokens(run, ACTOR, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", value)}


@_derivation
def _micro_batch_critic(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): _tokens(run, "critic", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", value)}


@_derivation
def _micro_batch_ref(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    ref = "actor_rollout_ref.ref"
    return {_to(name): _tokens(run, ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", value)}


def _tokens(run: VerlRun, section: str, per_gpu: str, max_tokens: str, value: Any) -> int:
    """Return the tokens of a micro-batch: verl's limit, or its number of the longest sequences."""
    own = f"{section}.{'log_prob_use_dynamic_bsz' if section.endswith('ref') else 'use_dynamic_bsz'}"
    packed = run.given.get(own, run.given.get(f"{ACTOR}.use_dynamic_bsz", False))
    shards = run.number(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    if packed or f"{section}.{per_gpu}" not in run.given:
        return int(run.number(f"{section}.{max_tokens}", 16384) * shards)
    return int(run.given[f"{section}.{per_gpu}"] * run.longest * shards)


@_derivation
def _clip(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {
        f"algorithm.clip_ratio_{side}": run.given.get(f"{ACTOR}.clip_ratio_{side}", value) for side in ("low", "high")
    }


@_derivation
def _steps(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if name == "trainer.total_training_steps" and run.get("trainer.val_only"):
        raise NoCounterpart("trainer.val_only is true, and nothing is trained")
    factor = run.steps_per_update
    if run.asynchronous and name.endswith("_freq"):  # verl counts versions there
        factor *= int(run.number("async_training.trigger_parameter_sync_step", 4))
    if value < 0 and not name.endswith("_freq"):
        raise NoCounterpart("it is not set")
    return {_to(name): value * factor if value > 0 else value}


@_derivation
def _share_of_steps(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not value:
        raise NoCounterpart("there is no warm-up, as by asyncrl's default")
    if run.asynchronous:
        total = run.number("rollout.total_rollout_steps", 100) / run.mini_batch * run.passes
    elif "trainer.total_training_steps" in run.given:
        total = run.number("trainer.total_training_steps", 0) * run.steps_per_update
    else:
        raise NoCounterpart(f"set {_to(name)} to this share of the optimizer steps, which `launch --dry-run` shows")
    return {_to(name): round(value * total)}


@_derivation
def _rollout_steps(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not run.asynchronous:
        raise NoCounterpart("it belongs to verl's fully asynchronous trainer")
    if run.get("trainer.val_only"):
        raise NoCounterpart("trainer.val_only is true, and nothing is trained")
    return {_to(name): max(1, value // run.mini_batch * run.passes)}


@_derivation
def _trainer_gpus(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {name: value} if run.asynchronous else {"trainer.num_workers": run.num_workers}


@_derivation
def _fsdp_size(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value <= 0 or value >= run.num_workers:
        raise NoCounterpart(f"all ranks share the model, as by asyncrl's default of {_to(name)}")
    return {_to(name): value}


@_derivation
def _gpu_memory(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not run.asynchronous:
        raise NoCounterpart("in verl the engine shares its GPU with training; here it has the GPU for itself")
    return {_to(name): value}


@_derivation
def _concurrency(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): value * run.num_replicas}


@_derivation
def _val_sampling(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    sampled = run.given.get(f"{ROLLOUT}.val_kwargs.do_sample", False)
    return {_to(name): run.number(f"{ROLLOUT}.val_kwargs.temperature", 0) if sampled else 0}


@_derivation
def _val_only(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not value:
        raise NoCounterpart("the run trains, as without this key")
    return {_to(name): 0}


@_derivation
def _sinks(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    chosen = [value] if isinstance(value, str) else list(value)
    known = [one for one in chosen if one in ("tensorboard", "wandb", "mlflow", "trackio")]
    return {_to(name): ["jsonl", *known]}


@_derivation
def _hf_export(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    return {_to(name): "every" if "hf_model" in list(value) else "never"}


@_derivation
def _resume(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    mode = run.get("trainer.resume_mode")
    if mode == "resume_path":
        return {"resume": run.given.get("trainer.resume_from_path", "auto")}
    return {"resume": {"disable": "none"}.get(mode, mode)}


@_derivation
def _bypass_loss(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value != "reinforce" or not run.get(f"{_CORRECTION}.bypass_mode"):
        raise NoCounterpart(f"the loss is that of {ACTOR}.policy_loss.loss_mode")
    return {_to(name): value}


@_derivation
def _filter_limit(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if value <= 0:
        raise NoCounterpart("there is no limit in verl; asyncrl's default stops a run that no longer learns")
    batch = run.mini_batch * run.batches_per_lease if run.asynchronous else run.number("data.train_batch_size", 1024)
    return {_to(name): int(value * batch)}


@_derivation
def _is_threshold(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or "_" not in value:
        return {_to(name): float(value)}
    low, high = _bounds(value)
    return {_to(name): high, f"{_to(name)}_low": low, f"{_CORRECTION}.rollout_is_mode": "mask"}


@_derivation
def _rejection(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    kinds, thresholds = run.given.get(f"{_CORRECTION}.rollout_rs"), run.given.get(f"{_CORRECTION}.rollout_rs_threshold")
    if not kinds or thresholds is None:
        raise NoCounterpart("verl needs both a statistic and a threshold" if kinds else "nothing is rejected")
    names, bounds = str(kinds).split(","), str(thresholds).split(",")
    if len(bounds) == 1:
        bounds *= len(names)
    rules = [_rejection_rule(kind.strip(), bound.strip()) for kind, bound in zip(names, bounds, strict=True)]
    columns = [list(column) for column in zip(*rules, strict=True)]
    keys = [f"{_CORRECTION}.{key}" for key in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_low")]
    found = {key: column if len(column) > 1 else column[0] for key, column in zip(keys, columns, strict=True)}
    return found if any(columns[2]) else {key: found[key] for key in keys[:2]}


def _rejection_rule(kind: str, threshold: str) -> tuple[str, float, float]:
    """Return the statistic with its upper and lower bound, which verl gives as ratios and asyncrl as log ratios of the
    opposite sign."""
    if not kind.endswith("k1"):
        return kind, float(threshold), 0.0
    low, high = _bounds(threshold)
    above, below = round(-math.log(low), 6), round(math.log(high), 6)
    return kind, above, 0.0 if above == below else below


def _bounds(value: Any) -> tuple[float, float]:
    """Return verl's lower and upper bound of a ratio: "0.5_2.0", or an upper bound, whose inverse is the lower one."""
    low, _, high = str(value).partition("_")
    return (float(low), float(high)) if high else (1 / float(value), float(value))


@_derivation
def _reward_function(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    section = name.rpartition(".")[0]
    path = run.given.get(f"{section}.path")
    if path is None:
        raise NoCounterpart("there is no file of reward functions")
    return {_to(name): f"{path}:{run.given.get(f'{section}.name') or 'compute_score'}"}


@_derivation
def _reward_model(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    if not value:
        raise NoCounterpart("there is no reward model, as by asyncrl's default")
    return {_to(name): "serve"}


@_derivation
def _tool_file(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    try:
        return {_to(name): tool_entries(value)}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoCounterpart(f"{value} cannot be read ({error}); write its entries into {_to(name)}") from error


@_derivation
def _interaction_file(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    """Return the entries of an interaction file; classes of verl that asyncrl has too get its name and settings."""
    table = of_verl(name)
    assert table is not None
    try:
        entries = [dict(entry) for entry in load_yaml(Path(value).expanduser())["interaction"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise NoCounterpart(f"{value} cannot be read ({error}); write its entries into {_to(name)}") from error
    for entry in entries:
        if (ours := table.values.get(str(entry.get("class_name")))) is not None:
            entry["class_name"] = ours
            entry.pop("config", None)
    return {_to(name): entries}


@_derivation
def _tool_functions(run: VerlRun, name: str, value: Any) -> dict[str, Any]:
    try:
        tree = ast.parse(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise NoCounterpart(f"{value} cannot be read ({error}); write its functions into {_to(name)}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tools = [node.name for node in functions if any("function_tool" in ast.unparse(d) for d in node.decorator_list)]
    return {_to(name): [{"function": f"{value}:{tool}"} for tool in tools]}


def derivations() -> frozenset[str]:
    """Return the names that `by` may have in foreign_keys.toml."""
    return frozenset(_DERIVATIONS)

"""A configuration of verl as one of asyncrl: what `asyncrl migrate` prints. The table of keys is foreign_keys.toml.

verl's defaults that differ from asyncrl's are written, too, so that the result trains as verl does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import pydantic

from asyncrl.config.foreign_keys import VERL, ForeignKey, foreign_keys, of_verl
from asyncrl.config.from_verl.values import ACTOR, ROLLOUT, NoCounterpart, VerlRun, read_verl, translate
from asyncrl.config.keys import all_keys, leaves
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.resources.placement import count_processes
from asyncrl.config.rules import RULES, keys_without_effect
from asyncrl.config.schema import Config
from asyncrl.config.sections import quantization
from asyncrl.config.sources import commented_yaml, inline

_TOOLS = "rollout.multi_turn.tools"
_MISSPELT = 0.965
"""Similarity above which a key that only a pattern matches is taken for a misspelt one: verl has many similar keys."""
How = Literal["same", "renamed", "derived", "default"]


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
    translation = _Translation(VerlRun(read_verl(file, overrides), config_name))
    for name in translation.run.given:
        translation.add(name)
    translation.add_defaults()
    return _without_idle_keys(translation)


def _without_idle_keys(done: _Translation) -> Migration:
    """Return the migration without the keys that have no effect in it, and with the problems of the rest."""
    try:
        config = _config(done.keys)
    except pydantic.ValidationError as error:
        return Migration(done.keys, done.left_out, [_invalid(detail) for detail in error.errors(include_url=False)])
    changed = {name for name, key in done.keys.items() if name in all_keys() and key.value != all_keys()[name].default}
    for idle in list(keys_without_effect(config, changed)):
        key = done.keys.pop(idle.key)
        if key.how != "default":
            done.left_out += [(source, done.run.given.get(source), idle.consequence) for source in key.sources]
    problems = [problem for rule in RULES for problem in rule(_config(done.keys))]
    return Migration(done.keys, done.left_out, problems)


def _config(keys: Mapping[str, MigratedKey]) -> Config:
    values = {name: key.value for name, key in keys.items()}
    values |= quantization.defaults_of_run(_tree(values), leaves(Config().model_dump()))
    tree = _tree(values)
    count_processes(tree, keys)
    return Config.model_validate_json(json.dumps(tree, default=str), strict=True)


def _invalid(detail: Any) -> ConfigProblem:
    name = ".".join(map(str, detail["loc"]))
    return ConfigProblem(name, detail["input"], detail["msg"], "correct the value in the translated file")


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def _schema_order(name: str) -> tuple[int, ...]:
    order = {known: number for number, known in enumerate(all_keys())}
    parts = name.split(".")
    return tuple(order.get(".".join(parts[: end + 1]), len(order)) for end in range(len(parts)))


def _hint(name: str, cutoff: float) -> str:
    """Return the end of a sentence about a key that may be a misspelt one of verl; empty if none is similar."""
    known = [key.name for key in foreign_keys() if key.system == VERL and not key.is_pattern]
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass
class _Translation:
    """What a run of verl has been translated into so far."""

    run: VerlRun
    keys: dict[str, MigratedKey] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def add(self, name: str, how: How | None = None) -> None:
        """Translate one key, which has no value of its own if `how` is verl's default."""
        value, entry = self.run.get(name), of_verl(name)
        if entry is None and name in all_keys():
            entry = ForeignKey(VERL, name, (name,))
        if entry is None:
            self.left_out.append((name, value, f"it is no documented key of verl{_hint(name, 0.85)}"))
            return
        try:
            values = translate(entry, self.run, name)
        except NoCounterpart as reason:
            if how is None:
                hint = _hint(name, _MISSPELT) if entry.is_pattern else ""
                self.left_out.append((name, value, f"{reason}{hint}"))
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
            if before and ours == _TOOLS:  # verl merges the tools of both its keys
                translated = [*before.value, *translated]
            self.keys[ours] = MigratedKey(ours, translated, kind, sources, "; ".join(filter(None, notes)))

    def add_defaults(self) -> None:
        """Add verl's values of keys that are not given, where asyncrl's default is another one."""
        for entry in foreign_keys():
            if entry.system == VERL and entry.name not in self.run.given and self.run.get(entry.name) not in (None, ""):
                self.add(entry.name, "default")
        if "reward.function" not in self.keys and "reward_model.placement" not in self.keys:
            gsm8k = "gsm8k" in str(self.run.given.get("data.train_files"))
            scorer = "exact_match" if gsm8k else "math_verify"
            note = "verl scores by data_source; other scorers are in docs/rewards.md"
            self._add("reward.function", scorer, ("the column data_source",), note)
        if not self.run.asynchronous:
            self._add("rollout.num_replicas", self.run.num_replicas,
                      ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"),
                      "the other half of the GPUs")  # fmt: skip
        if nodes := [name for name in ("trainer.nnodes", "rollout.nnodes") if self.run.number(name, 1) > 1]:
            self._add("ray.address", "auto", tuple(nodes), "a cluster that `ray start` has started (docs/deploy.md)")
        if self.run.megatron:
            section = f"{ACTOR}.megatron."
            parallel = tuple(name for name in self.run.given if name.startswith(section) and "parallel" in name)
            self._add("trainer.strategy", self.keys["trainer.strategy"].value, parallel or (f"{ACTOR}.strategy",),
                      "asyncrl's megatron_layers has the whole model on each rank, fsdp2 shards it")  # fmt: skip
        for name, key in list(self.keys.items()):
            if key.how == "default" and name in all_keys() and key.value == all_keys()[name].default:
                del self.keys[name]

    def _add(self, name: str, value: Any, sources: tuple[str, ...], note: str) -> None:
        self.keys[name] = MigratedKey(name, value, "derived", sources, note)

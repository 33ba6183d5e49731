"""Composition of packaged YAML, a user's file and overrides into one typed Config; no other module sees a DictConfig.

Values come from the schema's defaults, the groups, the recipe, the user's file and the overrides; later ones win.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml

import asyncrl
from asyncrl.config.foreign_keys import VERL, system_of
from asyncrl.config.interpolation import (
    ReadVariables,
    ValuePath,
    hide_secrets,
    resolvers,
    secret_name,
    texts_from_environment,
    without_secrets,
)
from asyncrl.config.keys import advice, all_keys, leaves, unknown_keys, validate
from asyncrl.config.problems import ConfigProblem, errors, format_problems
from asyncrl.config.resources.placement import count_processes
from asyncrl.config.resources.threads import resolve_auto, resolve_device, take_auto
from asyncrl.config.rules import UNUSED_BY_SFT, Scope, as_evaluation, as_sft, as_sync, check_environment, check_rules
from asyncrl.config.schema import Config
from asyncrl.config.sections import quantization
from asyncrl.config.sections.run import check_mode
from asyncrl.config.sources import (
    ARGUMENT,
    COMMAND_LINE,
    DTYPE,
    EVALUATION,
    QUANTIZATION,
    SYNC,
    lines,
    sources_of_files,
)
from asyncrl.config.tool_file import TOOL_FILE, TOOLS, add_tool_file
from asyncrl.config.yaml_files import NamedText, read_yaml
from asyncrl.core.failures import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Mode = Literal["fully_async", "sync", "sft"]
Tree = dict[str, Any]

CONF = Path(asyncrl.__file__).parent / "conf"
_QUICKSTART = "quickstart"
_BASE = "base"
"""The packaged config that all others build on: the schema's defaults and a place for each group."""
_SCHEMA_NODE = "schema"
_USER_NODE = "user"
_LONGEST_NAME = 200
_TOO_DEEP = "the brackets of a value or of a ${...} are nested too deeply"
_MOST_ADVICE = 100
"""Limit for the unknown keys for which similar ones are looked up: each takes a millisecond."""
_PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """A configuration and its problems; `config` is None if values have invalid types."""

    config: Config | None
    problems: tuple[ConfigProblem, ...]
    places: Mapping[str, str] = field(default_factory=dict)
    """Where values were written, by dotted key."""
    variables: ReadVariables = field(default_factory=ReadVariables)
    """Values of the environment, which problems do not show."""

    def with_problems(self, more: Iterable[ConfigProblem]) -> Self:
        """Return the configuration with further problems, which get their places and show no secrets."""
        placed = _with_places(more, self.places)
        return replace(self, problems=(*self.problems, *(_without_values(one, self.variables) for one in placed)))

    @property
    def warnings(self) -> list[ConfigProblem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    def require(self) -> Config:
        """Return the configuration.

        Raises:
            ConfigError: it has errors; the message has all of them.
        """
        failed = errors(self.problems)
        if failed or self.config is None:
            raise ConfigError(format_problems(failed))
        return self.config


def load_config(
    source: str | Path | None = None, overrides: Sequence[str] = (), *, mode: Mode = "fully_async"
) -> Config:
    """Compose, type and check a configuration.

    Args:
        source: a YAML file, or the name of a shipped recipe; None: the quickstart.
        overrides: `key=value` or `group=option`.
        mode: `sync` puts a barrier between generation and training (`rules.as_sync`); `sft` is a supervised run
            (`rules.as_sft`).

    Raises:
        ConfigError: with every problem in one message.
    """
    return check_config(source, overrides, mode=mode).require()


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the config of a command line, None if the first argument is an override (`key=value` or `~key`), and the
    overrides. A file may have `=` in its path."""
    if arguments and (os.path.isfile(arguments[0]) or ("=" not in arguments[0] and arguments[0][:1] != "~")):
        return arguments[0], tuple(arguments[1:])
    return None, tuple(arguments)


def check_config(
    source: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    mode: Mode = "fully_async",
    scope: Scope = "run",
) -> CheckedConfig:
    """Return a configuration with all its problems.

    Args:
        scope: its purpose; the overrides of an application (`app`) are its arguments and not a command line.
    """
    with resolvers() as read:
        return _check(source, overrides, mode, scope, read)


def _check(
    source: str | Path | None, overrides: Sequence[str], mode: Mode, scope: Scope, read: ReadVariables
) -> CheckedConfig:
    place = ARGUMENT if scope == "app" else COMMAND_LINE
    try:
        base = _read_source(_QUICKSTART if source is None else str(source))
        arguments, overridden, problems = _parse_overrides(overrides, base, place)
        tree, unresolved = _compose(base, arguments, read)
    except _CompositionError as refused:
        return CheckedConfig(None, (), variables=read).with_problems([refused.problem])
    user_values = {**base.values, **overridden}
    unknown = list(_remove_unknown(tree))
    removed = tuple(f"{one.key}." for one in unknown)
    unresolved = {path: text for path, text in unresolved.items() if not _dotted(path).startswith(removed)}
    problems = [*_of_other_system(base, unknown), *problems, *unknown]
    count_processes(tree, user_values)
    automatic = take_auto(tree)
    config, type_problems = validate(tree | {"mode": "fully_async"})
    evaluates = config is not None and config.validates_only  # of a run of any mode
    if "mode" in user_values and tree.get("mode") != mode and not evaluates:
        command = "asyncrl sft" if mode == "sft" else f"asyncrl launch {mode}"
        consequence = f"it contradicts `{command}`"
        fix = f"leave the key out, because the command sets it; or, as in the config.yaml of a run, set mode={mode}"
        problems.append(ConfigProblem("mode", tree.get("mode"), consequence, fix))
    problems += type_problems
    if config is not None:
        hide_secrets(config.model_dump(mode="json"))  # errors of user code and of other processes may have them
        problems += check_mode(config.async_training, _chosen_option("async_training", base, arguments))
        config = config.with_unresolved(unresolved)
        config = as_sync(config) if mode == "sync" else as_sft(config) if mode == "sft" else config
        config = as_evaluation(config) if config.validates_only else config
        if scope == "run":
            config, alone = resolve_device(config)
            problems += alone
        config, misplaced = resolve_auto(config, automatic, trains=scope in ("run", "simulation"))
        problems += misplaced
        unused = UNUSED_BY_SFT if mode == "sft" else ()
        set_keys = {key for key in _set_keys(user_values) if key.partition(".")[0] not in unused}
        problems += check_rules(config, set_keys, scope=scope)
        problems += check_environment(config, scope=scope)
    # The user's section may name a key's place although an option of the group, which comes first, sets the key.
    has_own = base.node is not None or any(text[:1] not in "+~" for text in arguments)
    places = {**base.places, **_file_sources(base, arguments)} if has_own else base.places
    kept = {key: found for key, found in places.items() if not any(key.startswith(f"{one}.") for one in overridden)}
    places = {**kept, **dict.fromkeys(overridden, place)}
    return CheckedConfig(config, (), places, read).with_problems(problems)


def _dotted(path: ValuePath) -> str:
    """Return the path with a dot after each part."""
    return "".join(f"{part}." for part in path)


def _without_values(problem: ConfigProblem, read: ReadVariables) -> ConfigProblem:
    """Return the problem without secrets and without values of environment variables."""
    return replace(
        problem,
        value=read.hidden(without_secrets(problem.value, secret_name(problem.key.split(".")))),
        consequence=read.hidden(without_secrets(problem.consequence)),
        fix=read.hidden(without_secrets(problem.fix)),
    )


def value_sources(
    source: str | Path | None, overrides: Sequence[str], config: Config, *, mode: Mode = "fully_async"
) -> dict[str, str]:
    """Return where the values of a valid configuration come from, by dotted key; other values are defaults."""
    base = _read_source(_QUICKSTART if source is None else str(source))
    arguments, overridden, _ = _parse_overrides(overrides, base)
    _register(base)
    found = _file_sources(base, arguments)
    for name in overridden:
        found = {key: place for key, place in found.items() if not key.startswith(f"{name}.")} | {name: COMMAND_LINE}
    for key in ("trainer.num_workers", "rollout.num_replicas", "rollout.autoscaling.max_replicas"):
        if f"{(part := key.partition('.')[0])}.nnodes" in found:  # see count_processes
            found.setdefault(key, f"{part}.nnodes x {part}.n_gpus_per_node")
            if config.ray.autoscaling:
                found.setdefault(f"{part}.device", f"ray.autoscaling with {part}.n_gpus_per_node")
    if config.trainer.device == "cpu":  # see resolve_device
        found.setdefault("trainer.device", "the engine has the only GPU")
    if config.rollout.quantization is not None:
        now = leaves(config.public_values())
        set_by_it = [key for key, value in quantization.QUANTIZED_DEFAULTS.items() if now[key] == value]
        found = dict.fromkeys(set_by_it, QUANTIZATION) | found
    elif config.rollout.dtype != "float32" or config.trainer.dtype != "float32":
        found = dict.fromkeys(quantization.HALF_PRECISION, DTYPE) | found
    if TOOL_FILE in found:
        found.setdefault(TOOLS, found[TOOL_FILE])
    if config.validates_only:
        found |= {"profiler.level": EVALUATION}
    if mode == "sync":
        without = check_config(source, [*overrides, "mode=fully_async"]).config
        before = {} if without is None else leaves(without.public_values())
        found |= {key: SYNC for key, value in leaves(config.public_values()).items() if before.get(key, value) != value}
    return found


def _file_sources(base: _BaseConfig, arguments: Sequence[str]) -> dict[str, str]:
    """Return where the values of a registered configuration come from, without those of the command line."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        read = loader.compute_defaults_list(base.primary, [*_search_path(base), *arguments], RunMode.RUN).defaults
    files = [(entry.config_path, entry.package) for entry in read if entry.config_path]
    places = {key: base.places[key] for key in base.values}
    return sources_of_files(files, CONF, base.folder, {_USER_NODE: places})


def changed_values(config: Config) -> Tree:
    """Return the values that differ from the schema's defaults, by dotted key."""
    defaults = leaves(Config().public_values())
    return {key: one for key, one in leaves(config.public_values()).items() if defaults.get(key, ...) != one}


def to_yaml(config: Config) -> str:
    """Return every key with its value as YAML; in the same environment, a file with this text composes to the same
    configuration."""
    return yaml.safe_dump(config.saved_values(), sort_keys=False, allow_unicode=True)


def groups() -> list[str]:
    """Return the names of the packaged groups."""
    return sorted(entry.name for entry in CONF.iterdir() if entry.is_dir() and any(entry.glob("*.yaml")))


def recipes() -> list[str]:
    """Return the names of the packaged configs that can be launched."""
    return sorted(file.stem for file in CONF.glob("*.yaml") if file.stem != _BASE)


class _CompositionError(Exception):
    """A problem that prevents composition."""

    def __init__(self, key: str, value: Any, consequence: str, fix: str, where: str = "") -> None:
        self.problem = ConfigProblem(key, value, consequence, fix, where=where)
        super().__init__(str(self.problem))


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class _BaseConfig:
    """The primary config of Hydra: a shipped recipe or the user's file."""

    name: str
    primary: str
    node: Tree | None = None
    """The user's file with a completed defaults list."""
    folder: Path | None = None
    """The folder of the user's own group options."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values in the file by dotted key."""
    places: Mapping[str, str] = field(default_factory=dict)
    """`file line N` by dotted key."""

    def options(self, group: str) -> list[str]:
        return _options(group, self.folder)


def _read_source(name: str) -> _BaseConfig:
    file = Path(name).expanduser()
    if file.is_file():
        return _read_file(name, file)
    if name in recipes():
        return _BaseConfig(name, primary=name)
    if file.exists():
        what = "a directory" if file.is_dir() else "a pipe, a socket or a device, and to read it could wait forever"
        fix = "write the configuration into a file, and give that file"
        raise _CompositionError("config", name, f"it is no regular file but {what}", fix)
    neighbours = [*file.parent.glob("*.yaml"), *file.parent.glob("*.yml")]
    close = get_close_matches(name, [*recipes(), *map(str, neighbours)], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    fix = f"{hint}Give a YAML file or one of the recipes {', '.join(recipes())}; overrides are written key=value"
    raise _CompositionError("config", name, "there is no such file", fix)


def _read_file(name: str, file: Path) -> _BaseConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = read_yaml(file)
        tree = OmegaConf.to_container(OmegaConf.load(NamedText(text, file)), resolve=False)
        root = yaml.compose(NamedText(text, file), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError, OmegaConfBaseException) as error:
        raise _unreadable(name, error) from error
    if not isinstance(tree, dict):
        raise _CompositionError("config", name, "it is not a mapping of keys to values", "write it as `key: value`")
    node: Tree = {str(key): value for key, value in tree.items()}
    values = leaves({key: value for key, value in node.items() if key != "defaults"})
    folder, places = file.parent.resolve(), dict(lines(root, "", file.name))
    node["defaults"] = _complete_defaults(node.get("defaults"), name, folder, places)
    return _BaseConfig(name, _USER_NODE, node, folder, values, places)


def _options(group: str, folder: Path | None) -> list[str]:
    """Return the options of a group: the packaged ones, and those in the user's folder."""
    folders = [CONF / group, *([folder / group] if folder else [])]
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def _unreadable(name: str, error: Exception) -> _CompositionError:
    why = _TOO_DEEP if isinstance(error, RecursionError) else " ".join(str(error).split())
    consequence = f"it cannot be read as YAML: {why}"
    return _CompositionError("config", name, consequence, "correct the file")


def _complete_defaults(defaults: Any, name: str, folder: Path, places: Mapping[str, str]) -> list[Any]:
    """Return the defaults list of the file `name` in `folder` as Hydra needs it.

    The list starts with `base` unless it names a recipe. `_self_` follows the configs, so that the file's own keys
    override theirs. Choices of packaged groups become overrides, which Hydra requires at the end of the list.
    """
    if defaults is None:
        return [_BASE, "_self_"]
    if not isinstance(defaults, list):
        fix = "write it as a list: `defaults: [quickstart, {algorithm: grpo_kl}]`"
        raise _CompositionError("defaults", defaults, f"{name}: Hydra's defaults are a list", fix)
    configs: list[Any] = []
    choices: list[Any] = []
    for number, entry in enumerate(defaults):
        _check_default(entry, folder, places.get(f"defaults.{number}", name))
        group, option = next(iter(entry.items())) if isinstance(entry, Mapping) and len(entry) == 1 else (None, None)
        group = _group(group)
        if group in groups():
            choices.append({f"override /{group}": option})
        else:
            configs.append(entry)
    if not any(entry in (_BASE, *recipes()) for entry in configs):
        configs.insert(0, _BASE)
    if "_self_" not in configs:
        configs.append("_self_")
    return [*configs, *choices]


def _group(name: Any) -> str:
    """Return the group that an entry `name: option` of a defaults list chooses."""
    return str(name).removeprefix("override ").strip().removeprefix("/")


def _check_default(entry: Any, folder: Path, where: str) -> None:
    """Refuse an entry of a defaults list that names no recipe, group or option. Hydra checks other forms of entries."""
    if isinstance(entry, str) and _PLAIN_NAME.fullmatch(entry):
        names = [_BASE, "_self_", *recipes()]
        own = sorted(file.stem for file in folder.glob("*.yaml"))
        if entry.removesuffix(".yaml") not in (*names, *own):
            close = get_close_matches(entry, [*names, *own], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            consequence = f"there is no recipe of this name, and no file {entry}.yaml in {folder}"
            fix = f"{hint}Recipes are {', '.join(recipes())}; a group's option is chosen with {{GROUP: OPTION}}"
            raise _CompositionError("defaults", entry, consequence, fix, where)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return
    ((name, option),) = entry.items()
    group = _group(name)
    if not _PLAIN_NAME.fullmatch(group):
        return
    if not (options := _options(group, folder)):
        close = get_close_matches(group, groups(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        fix = f"{hint}Groups are {', '.join(groups())}; keys of a section are not written in `defaults`"
        raise _CompositionError("defaults", dict(entry), f"there is no group {group}", fix, where)
    if not isinstance(option, str | list | None):
        consequence = "a group's option is the name of a file, and this is none"
        fix = f"write keys of {group} outside of `defaults`; its options are {', '.join(options)}"
        raise _CompositionError("defaults", dict(entry), consequence, fix, where)
    if isinstance(option, str) and _PLAIN_NAME.fullmatch(option):
        try:
            _check_option(group, option, options)
        except _CompositionError as refused:
            raise _CompositionError(
                "defaults", dict(entry), refused.problem.consequence, refused.problem.fix, where
            ) from None


# ------------------------------------------------------------------------------------------------ overrides


def _parse_overrides(
    texts: Sequence[str], base: _BaseConfig, place: str = COMMAND_LINE
) -> tuple[list[str], Tree, list[ConfigProblem]]:
    """Return the arguments for Hydra, the overridden values by dotted key, and the problems, which are at `place`.

    Keys are set with Hydra's `++`, so that keys below a section that is off, or in a mapping with arbitrary keys, can
    be set like any other; unknown keys are found after composition.
    """
    arguments: list[str] = []
    values: Tree = {}
    problems: list[ConfigProblem] = []
    for text in texts:
        try:
            name, raw = _split_override(text)
            if name in groups():
                arguments.append(f"{name}={_check_option(name, raw, base.options(name))}")
            else:
                _check_list_index(name, raw)
                argument, values[name] = _parse_value(name, raw)
                key = all_keys().get(name)
                if key is not None and key.open_ended and values[name] == {}:
                    arguments.append(f"++{name}=null")  # Hydra merges mappings, so {} alone would remove nothing
                arguments.append(argument)
        except _CompositionError as refused:
            problems.append(replace(refused.problem, where=place))
    return arguments, values, problems


def _split_override(text: str) -> tuple[str, str]:
    name, equals, raw = text.partition("=")
    if text.startswith("~"):
        fix = f"set {text[1:] or 'KEY'}=null"
        raise _CompositionError(text, "?", "every key has a default, so none can be removed", fix)
    if text in recipes() or (not equals and Path(text).expanduser().is_file()):
        fix = f"put it first: {text} KEY=VALUE ...; a group's option is chosen with GROUP=OPTION"
        raise _CompositionError(text, "?", "a config comes before all overrides, and there can be only one", fix)
    if not equals or not name.strip("+ "):
        raise _CompositionError(text, "?", "it is neither a config file nor an override", "write key=value")
    name = name.lstrip("+").strip()
    if name.partition(".")[0] == "hydra" or name.startswith("hydra/"):
        consequence = "Hydra only composes the configuration, so its run and sweep settings have no effect"
        raise _CompositionError(name, raw, consequence, "leave it out")
    if "@" in name:
        consequence = "a group always sets the section of the same name"
        raise _CompositionError(name, raw, consequence, f"write {name.partition('@')[0]}={raw}")
    if len(name) > _LONGEST_NAME:  # Hydra looks for a file of this name
        raise _CompositionError(name, raw, "there is no such key, so it would have no effect", advice(name))
    return name, raw


def _check_option(group: str, raw: str, options: Sequence[str]) -> str:
    if raw in options:
        return raw
    close = get_close_matches(raw, options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    fix = f"{hint}Options are {', '.join(options)}; single keys are set as {group}.KEY=VALUE"
    raise _CompositionError(group, raw, f"{group} is a group and has no option of this name", fix)


def _check_list_index(name: str, raw: str) -> None:
    """Refuse a key such as `LIST.name`, which lacks the number of a list entry; Hydra's error for it is unspecific."""
    *parts, _ = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        key, entry = all_keys().get(path), name.split(".")[end]
        if key is not None and key.kind.startswith("a list") and not entry.isdecimal():
            fix = f"give the whole list, {path}=[...], or the number of an entry, {path}.0"
            raise _CompositionError(name, raw, f"{path} is a list, and {entry} is not the number of an entry", fix)


def _parse_value(name: str, raw: str) -> tuple[str, Any]:
    """Return Hydra's argument for `name=raw`, and the parsed value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key = all_keys().get(name)
    if key is not None and key.takes_text and raw != "null" and raw[:1] not in ("'", '"'):
        # Free text needs none of Hydra's quoting: 007, a (b).py and x,y are used literally.
        raw = _quote(raw)
    try:
        override = OverridesParser.create().parse_override(f"++{name}={raw}")
        if override.is_sweep_override():
            fix = f"run the command once for each value; a list is written {name}=[{raw}]"
            raise _CompositionError(name, raw, "these are several values, and a launch is one run", fix)
        return f"++{name}={raw}", override.value()
    except HydraException as error:
        reason = str(error).partition("\nSee ")[0].splitlines()[0]
        fix = f"put the value in quotes, twice for the shell: {name}='\"{raw}\"'"
        raise _CompositionError(name, raw, f"it cannot be read: {reason}", fix) from error
    except RecursionError as error:
        raise _CompositionError(name, raw, _TOO_DEEP, "write the value with fewer brackets") from error


def _quote(text: str) -> str:
    """Return a string in Hydra's override grammar, where a backslash is literal unless a quote follows."""
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text) + '"'


# ------------------------------------------------------------------------------------------------ composition


def _compose(base: _BaseConfig, arguments: Sequence[str], read: ReadVariables) -> tuple[Tree, Mapping[ValuePath, str]]:
    """Return the resolved values, and the texts of those that depend on the environment."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register(base)
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            composed = compose(base.primary, overrides=[*_search_path(base), *arguments])
        if (problem := add_tool_file(composed)) is not None:
            raise _CompositionError(problem.key, problem.value, problem.consequence, problem.fix)
        tree = _resolved(composed)
        for key, value in quantization.defaults_of_run(tree, leaves(Config().model_dump())).items():
            OmegaConf.update(composed, key, value)
        tree = _resolved(composed)  # again, because other keys may refer to those
        unresolved = texts_from_environment(composed, read)
    except OmegaConfBaseException as error:
        key = str(error.full_key or base.name)
        raise _CompositionError(key, "?", _first_line(error), "correct the ${...} or give the value") from error
    except HydraException as error:
        raise _CompositionError(base.name, "?", _first_line(error), f"see the groups and recipes in {CONF}") from error
    except RecursionError as error:
        raise _CompositionError(base.name, "?", _TOO_DEEP, "correct the ${...} or give the value") from error
    return tree, unresolved


def _resolved(composed: DictConfig) -> Tree:
    """Return all values with their references resolved."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(tree, dict)  # the schema node is a mapping, and merging keeps it one
    return {str(key): value for key, value in tree.items()}


def _register(base: _BaseConfig) -> None:
    """Store the schema and the user's file under the names by which they are composed."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    schema = Config().model_dump(mode="json")
    for key in quantization.QUANTIZED_DEFAULTS:
        *sections, name = key.split(".")
        place = schema
        for section in sections:
            place = place[section]
        place[name] = quantization.NOT_GIVEN
    store.store(name=_SCHEMA_NODE, node=schema)
    if base.node is not None:
        store.store(name=_USER_NODE, node=base.node)


def _search_path(base: _BaseConfig) -> list[str]:
    return [f"hydra.searchpath=[{_quote(f'{_checked_files()}://{base.folder}')}]"] if base.folder else []


def _checked_files() -> str:
    """Return the scheme of a Hydra source that reads the user's own group options within the limits of `read_yaml`."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.plugins.config_source import ConfigResult

    class CheckedFiles(FileConfigSource):
        @staticmethod
        def scheme() -> str:
            return "checked"

        def load_config(self, config_path: str) -> ConfigResult:
            file = Path(self.path, self._normalize_file_name(config_path))
            try:
                read_yaml(file)
                return super().load_config(config_path)
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise _unreadable(str(file.relative_to(self.path)), error) from error

    SourcesRegistry.instance().register(CheckedFiles)
    return CheckedFiles.scheme()


def _first_line(error: Exception) -> str:
    return "Hydra: " + " ".join(str(error).split("\n    full_key")[0].split())


def _of_other_system(base: _BaseConfig, unknown: Sequence[ConfigProblem]) -> Iterator[ConfigProblem]:
    """Yield a problem for a file that is a configuration of verl, TRL or another system."""
    names = [one.key for one in unknown if one.key in base.values]
    if (system := system_of(names)) is not None:
        fix = f"translate it: asyncrl migrate {base.name} > my.yaml"
        if system != VERL:
            fix = f"write the keys below as asyncrl names them; docs/coming-from.md has a table for {system}"
        yield ConfigProblem("config", base.name, f"it is a configuration of {system}", fix)


def _chosen_option(group: str, base: _BaseConfig, arguments: Sequence[str]) -> str | None:
    """Return the packaged option of a group that the user has chosen in the file or on the command line."""
    listed = [entry for entry in (base.node or {}).get("defaults", ()) if isinstance(entry, Mapping)]
    chosen = [option for entry in listed for name, option in entry.items() if _group(name) == group]
    chosen += [text.partition("=")[2] for text in arguments if text.startswith(f"{group}=")]
    return chosen[-1] if chosen and chosen[-1] in _options(group, None) else None


def _remove_unknown(tree: Tree) -> Iterator[ConfigProblem]:
    """Remove keys from `tree` that are not in the schema, and yield a problem for each."""
    for number, (path, value) in enumerate(list(unknown_keys(tree))):
        _remove(tree, path)
        key = ".".join(path)
        fix = advice(key) if number < _MOST_ADVICE else "take it out; docs/config.md has all keys"
        yield ConfigProblem(key, value, "there is no such key, so it would have no effect", fix)


def _remove(tree: Tree, path: Sequence[str]) -> None:
    """Delete `path` and the mappings that become empty."""
    name, *rest = path
    if rest:
        _remove(tree[name], rest)
    if not rest or not tree[name]:
        del tree[name]


def _set_keys(values: Mapping[str, Any]) -> set[str]:
    """Return the keys that the user set to other values than the default.

    Keys of a skip role that the user switched off are left out: a file may describe a role that a run does not use.
    """
    known = all_keys()
    off = tuple(key[: -len("enable")] for key, value in values.items() if value is False and key.endswith(".enable"))
    return {
        key
        for key, value in values.items()
        if key in known and value != known[key].default and not (key.startswith("skip.") and key.startswith(off))
    }


def _with_places(problems: Iterable[ConfigProblem], places: Mapping[str, str]) -> tuple[ConfigProblem, ...]:
    return tuple(one if one.where else replace(one, where=_place(one.key, places)) for one in problems)


def _place(key: str, places: Mapping[str, str]) -> str:
    known = key
    while known and known not in places:
        known = known.rpartition(".")[0]
    return places[known] if known else next((at for name, at in places.items() if name.startswith(f"{key}.")), "")

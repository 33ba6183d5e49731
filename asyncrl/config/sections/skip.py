"""`skip`: stages that are recorded and replayed, and the checks of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from asyncrl.config.environment import is_importable, writable_parent
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, only_with, warning
from asyncrl.config.sections.base import ConfigSection, Positive
from asyncrl.core.failures import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

_COUNTED_FROM_ONE = ("skip.async_rollout", "skip.rollout", "skip.reward", "skip.ref_log_prob")
_ONE = re.compile(r"(\d+)")
_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")
_EXPECTED = "a step (12), a range (1-128), several of them (1-128,200), or `all`"
_EXAMPLE = 'e.g. "all", "1-128,200" or [1,2,5]'


class _Range(NamedTuple):
    first: int
    last: int


class StepSet:
    """A set of steps, stored as ranges."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), *, every: bool = False) -> None:
        """`ranges` of first and last step, both inclusive; `every`: all steps."""
        self._every = every
        self._ranges = () if every else _joined(ranges)

    @classmethod
    def parse(cls, value: object) -> StepSet:
        """Parse `12`, `"1-128,200"`, `"all"`, or a list of these.

        Raises:
            ValueError: it is something else; the message gives the value and the expected form.
        """
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        ranges: list[tuple[int, int]] = []
        every = False
        for item in items:
            for part in str(item).split(",") if isinstance(item, str) else [item]:
                if isinstance(part, str) and part.strip() == "all":
                    every = True
                else:
                    ranges.append(_parse_range(part))
        return cls(ranges, every=every)

    def __contains__(self, step: int) -> bool:
        return self._every or any(first <= step <= last for first, last in self._ranges)

    def __iter__(self) -> Iterator[int]:
        """Yield the steps. Raises `ValueError` for `all`, which has no last one."""
        if self._every:
            raise ValueError("`all` steps cannot be listed")
        return (step for first, last in self._ranges for step in range(first, last + 1))

    def __bool__(self) -> bool:
        return self._every or bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepSet) and (self._every, self._ranges) == (other._every, other._ranges)

    def __hash__(self) -> int:
        return hash((self._every, self._ranges))

    def __str__(self) -> str:
        if self._every:
            return "all"
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self._ranges)

    def __repr__(self) -> str:
        return f"StepSet({self})"

    def has_from(self, first: int) -> bool:
        """Return whether the set has a step at or after `first`."""
        return self._every or any(last >= first for _, last in self._ranges)


def _parse_range(part: object) -> tuple[int, int]:
    if isinstance(part, int) and not isinstance(part, bool) and part >= 0:
        return part, part
    if isinstance(part, str):
        if match := _ONE.fullmatch(part.strip()):
            return int(match[1]), int(match[1])
        if match := _RANGE.fullmatch(part.strip()):
            first, last = int(match[1]), int(match[2])
            if first <= last:
                return first, last
            raise ValueError(f"{part.strip()!r} ends before it begins; expected {_EXPECTED}")
    raise ValueError(f"{part!r} is no step; expected {_EXPECTED}")


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[_Range, ...]:
    joined: list[_Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1].last + 1:
            joined[-1] = _Range(joined[-1].first, max(last, joined[-1].last))
        else:
            joined.append(_Range(first, last))
    return tuple(joined)


class SkipRoleConfig(ConfigSection):
    """A stage that can be recorded and replayed."""

    enable: bool = False
    """Record this stage and replay it from its records."""
    dump_dir: str = "~/.asyncrl/skip"
    """Directory of the records, which are in <dump_dir>/<project_name>/<experiment_name>/<role>/<step>/. `~` is your
    home directory."""
    steps: Any = Field(default_factory=list, json_schema_extra={"type": "list of steps"})
    """Steps to record and replay: `[1, 2, 5]`, `"1-128,200"`, or `all`. Other steps run normally."""
    action: Literal["cache", "repeat"] = "cache"
    """`cache`: replay the record of exactly this step; without one, run the stage and record it. `repeat`: without a
    record of this step, replay that of the nearest recorded step below, or else above."""
    on_mismatch: Literal["regenerate", "error"] = "regenerate"
    """With `cache`, treatment of a record that was made with another prompt, sampling, model, tool set or `n`: run the
    stage and replace the record, or stop and report the difference."""
    max_bytes: Positive | None = None
    """Maximum size of all records of this role together; beyond it, nothing is recorded. null: no limit."""


class OwnSkipRoleConfig(SkipRoleConfig):
    """A stage of your own, with a class of a module in `skip.modules`."""

    action: Literal["cache", "repeat", "random", "empty"] = "cache"  # type: ignore[assignment]
    """One of the actions that the class supports (`support_actions`)."""


class CachedSkipConfig(SkipRoleConfig):
    """A stage whose result is valid for exactly one input."""

    action: Literal["cache"] = "cache"
    """Replay the record of exactly this step; without one, run the stage and record it. `repeat` is not available,
    because it would replay results of other inputs."""


class RolloutSkipConfig(SkipRoleConfig):
    """Generation of a whole batch in `asyncrl launch sync`; its step is the Trainer's step."""

    replay_versions: Literal["recorded", "current"] = "recorded"
    """`recorded`: tokens keep the versions that sampled them, so their age counts for staleness and corrections.
    `current`: tokens get the version that the replicas serve now."""


class AsyncRolloutSkipConfig(RolloutSkipConfig):
    """Generation of one sample; its step is the `index` in `sample_{epoch}_{index}`."""

    engines: Literal["auto", "always"] = "always"
    """`auto`: start no engine if every sample of the run is recorded and there is no validation. `always`: always start
    the engines."""


class SkipConfig(ConfigSection):
    """Stages that are recorded and replayed, by role. See docs/skip.md."""

    modules: tuple[str, ...] = ()
    """Python modules that register roles of your own; their settings are in `roles`."""
    async_rollout: AsyncRolloutSkipConfig = AsyncRolloutSkipConfig()
    rollout: RolloutSkipConfig = RolloutSkipConfig()
    reward: SkipRoleConfig = SkipRoleConfig()
    """Scoring of one sample."""
    ref_log_prob: CachedSkipConfig = CachedSkipConfig()
    """Log-probs of the reference model for one step of the Trainer."""
    tool: CachedSkipConfig = CachedSkipConfig()
    """One call to a tool."""
    roles: dict[str, OwnSkipRoleConfig] = Field(default_factory=dict)
    """Roles that `modules` register, by name."""

    def by_role(self) -> dict[str, SkipRoleConfig]:
        """Return the settings of all roles by name; roles of `modules` come last."""
        own = (name for name in type(self).model_fields if name not in ("modules", "roles"))
        return {**{name: getattr(self, name) for name in own}, **self.roles}

    def key_of(self, role: str) -> str:
        """Return the key of the settings of a role."""
        return f"skip.roles.{role}" if role in self.roles else f"skip.{role}"


class _ForeignRoleConfig(OwnSkipRoleConfig, extra="allow"):
    """The settings of a role in a mapping that is not ours; a class may read keys of its own."""


def skip_settings(config: Config | Mapping[str, Any]) -> tuple[Sequence[str], dict[str, tuple[str, SkipRoleConfig]]]:
    """Return the modules to import, and the key and settings of each role.

    Args:
        config: our configuration, or any mapping whose section `skip` has settings by the name of the role.

    Raises:
        ConfigError: a mapping has no such settings.
    """
    if not isinstance(config, Mapping):
        ours = config.skip
        return ours.modules, {role: (ours.key_of(role), section) for role, section in ours.by_role().items()}
    if not isinstance(config.get("skip"), Mapping):
        raise ConfigError("skip: the configuration has no such section, with settings by the name of a role")
    given: dict[str, Any] = dict(config["skip"])
    modules: Sequence[str] = given.pop("modules", ())
    sections: dict[str, tuple[str, SkipRoleConfig]] = {}
    for role, values in given.items():
        try:
            section = _ForeignRoleConfig.model_validate(dict(values))
            StepSet.parse(section.steps)
        except (TypeError, ValueError) as error:  # also pydantic's ValidationError
            raise ConfigError(f"skip.{role}: these are no settings of a role: {error}") from error
        sections[role] = f"skip.{role}", section
    return modules, sections


def enabled_roles(config: Config) -> dict[str, SkipRoleConfig]:
    """Return the enabled roles by the key of their settings."""
    return {config.skip.key_of(name): role for name, role in config.skip.by_role().items() if role.enable}


def _steps(config: Config) -> Iterator[ConfigProblem]:
    for key, role in enabled_roles(config).items():
        fix = f"give steps, {_EXAMPLE}, or set {key}.enable=false"
        try:
            steps = StepSet.parse(role.steps)
        except ValueError as error:
            yield ConfigProblem(f"{key}.steps", role.steps, str(error), fix)
            continue
        if not steps:
            consequence = f"{key}.enable=true with no steps would record and replay nothing"
            yield ConfigProblem(f"{key}.steps", role.steps, consequence, fix)
        elif key in _COUNTED_FROM_ONE and not steps.has_from(1):
            consequence = "samples are counted from 1, so nothing would be recorded"
            yield ConfigProblem(f"{key}.steps", role.steps, consequence, fix)


def _directories(config: Config) -> Iterator[ConfigProblem]:
    for key, role in enabled_roles(config).items():
        if not role.dump_dir:
            consequence = "records would go to the directory in which the run is started"
            fix = "name a directory, or leave this key out"
            yield ConfigProblem(f"{key}.dump_dir", role.dump_dir, consequence, fix)
        elif "://" not in role.dump_dir and not Path(role.dump_dir).expanduser().is_absolute():
            consequence = "a relative path depends on where a run is started: elsewhere the run has other records"
            yield warning(f"{key}.dump_dir", role.dump_dir, consequence, "give an absolute path")


def _own_roles(config: Config) -> Iterator[ConfigProblem]:
    shipped = type(config.skip).model_fields.keys() - {"modules", "roles"}
    for name in sorted(config.skip.roles):
        if name in shipped:
            consequence = "this role is part of asyncrl and has its own section, so these settings would not be read"
            yield ConfigProblem(f"skip.roles.{name}", name, consequence, f"write skip.{name} instead")
        elif not config.skip.modules:
            consequence = f"no module registers this role; the built-in roles are {', '.join(sorted(shipped))}"
            fix = "name the module that registers it in skip.modules"
            yield ConfigProblem(f"skip.roles.{name}", name, consequence, fix)


def _ageing_records(config: Config) -> Iterator[ConfigProblem]:
    name, role = "async_rollout" if config.skip.async_rollout.enable else "rollout", config.generation_skip
    training = config.async_training
    drops = training.max_staleness is not None and training.stale_action == "drop"
    if role is not None and drops and role.action == "repeat" and role.replay_versions == "recorded":
        yield warning(
            f"skip.{name}.replay_versions",
            role.replay_versions,
            "a repeated record of an early step grows older with every version, and is dropped beyond "
            "async_training.max_staleness; the sample that replaces it may be as old",
            "set replay_versions=current, or async_training.max_staleness=null",
        )


def _modules_and_directories(config: Config) -> Iterator[ConfigProblem]:
    for module in config.skip.modules:
        if not is_importable(module):
            fix = "give its dotted name, and put it on the Python path or into this directory"
            yield ConfigProblem("skip.modules", module, "there is no module of this name to import", fix)
    for key, role in enabled_roles(config).items():
        parent, obstacle = writable_parent(Path(role.dump_dir))
        if role.dump_dir and obstacle:
            consequence = f"{parent} {obstacle}, so nothing could be recorded"
            yield ConfigProblem(f"{key}.dump_dir", role.dump_dir, consequence, "give a writable directory")


RULES: tuple[RuleFunction, ...] = (
    _steps,
    _directories,
    _own_roles,
    ConfigRule("skip.tool.enable",
               lambda c: c.skip.tool.enable and not (c.rollout.multi_turn.enable and c.rollout.multi_turn.tools),
               "it would have no effect: the run calls no tools",
               "set rollout.multi_turn.enable=true and name rollout.multi_turn.tools, or set skip.tool.enable=false"),
    ConfigRule("skip.ref_log_prob.enable", lambda c: c.skip.ref_log_prob.enable and not c.needs_reference,
               "it would have no effect: the run has no reference model",
               "set algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true"),
    ConfigRule("skip.rollout.enable", lambda c: c.skip.rollout.enable and c.mode != "sync",
               "only `asyncrl launch sync` generates whole batches; this run generates single samples",
               "set skip.async_rollout.enable=true instead"),
    ConfigRule("skip.async_rollout.enable", lambda c: c.skip.rollout.enable and c.skip.async_rollout.enable,
               "with skip.rollout.enable the same generation would be recorded twice", "enable one of the two"),
    ConfigRule("skip.async_rollout.engines",
               lambda c: c.skip.async_rollout.enable and c.skip.async_rollout.engines == "auto" and c.has_validation,
               "the validation set is never replayed, so engines are started anyway",
               "set data.val_files=[] (or data.reasoning_gym.val_size=0)", "warning"),
    _ageing_records,
)  # fmt: skip

ENVIRONMENT: tuple[RuleFunction, ...] = (_modules_and_directories,)

_ROLES = [f"skip.{name}" for name in SkipConfig.model_fields if name not in ("modules", "roles")]

NO_EFFECT = (
    *(only_with(f"{role}.*", f"{role}.enable", True) for role in _ROLES),
    *(only_with(f"{role}.on_mismatch", f"{role}.action", "cache") for role in _ROLES),
)

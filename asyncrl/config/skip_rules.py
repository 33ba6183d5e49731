"""Rules for the stages that are recorded and replayed (`skip`). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.config.keys import leaves
from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config, SkipRoleConfig
from asyncrl.steps import StepSet

_FROM_ONE = ("skip.async_rollout", "skip.rollout", "skip.reward", "skip.ref_log_prob")
_EXAMPLE = 'e.g. "all", "1-128,200" or [1,2,5]'


def _steps(config: Config, given: Given) -> Iterator[Problem]:
    for key, section in _sections(config).items():
        if not section.enable:
            continue
        try:
            steps = StepSet.parse(section.steps)
        except ValueError as error:
            yield Problem(f"{key}.steps", section.steps, str(error), f"give steps, {_EXAMPLE}")
        else:
            if steps and key in _FROM_ONE and not steps.has_from(1):
                yield Problem(
                    f"{key}.steps", section.steps, "samples are counted from 1, so nothing would be recorded", _EXAMPLE
                )
            if not steps:
                yield Problem(
                    f"{key}.steps",
                    section.steps,
                    f"{key}.enable=true with no steps would record and replay nothing",
                    f"give steps, {_EXAMPLE}, or set {key}.enable=false",
                )


def _idle(config: Config, given: Given) -> Iterator[Problem]:
    for key, section in _sections(config).items():
        if not section.enable:
            # Switched off by hand, whatever else a file says of it.
            for name in sorted(given if f"{key}.enable" not in given else ()):
                if name.startswith(f"{key}."):
                    yield Problem(
                        name,
                        leaves(config.model_dump(mode="json")).get(name),
                        f"it would have no effect: {key}.enable is false",
                        f"set {key}.enable=true, or leave this key out",
                    )
        elif section.action == "repeat" and f"{key}.on_mismatch" in given:
            yield Problem(
                f"{key}.on_mismatch",
                section.on_mismatch,
                "it would have no effect: `repeat` serves whatever is recorded",
                f"set {key}.action=cache, or leave this key out",
            )
    turns = config.rollout.multi_turn
    if config.skip.tool.enable and not (turns.enable and turns.tools):
        told = "no tools are named" if turns.enable else "rollout.multi_turn.enable is false"
        yield Problem(
            "skip.tool.enable",
            True,
            f"it would have no effect: the run calls no tools, for {told}",
            "set rollout.multi_turn.enable=true and name rollout.multi_turn.tools, or set skip.tool.enable=false",
        )
    if config.skip.ref_log_prob.enable and not config.needs_reference:
        yield Problem(
            "skip.ref_log_prob.enable",
            True,
            "it would have no effect: nothing asks for a reference model",
            "set algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true",
        )


def _places(config: Config, given: Given) -> Iterator[Problem]:
    for key, section in _sections(config).items():
        if section.enable and not section.dump_dir:
            yield Problem(
                f"{key}.dump_dir",
                section.dump_dir,
                "records would go to wherever the run is started",
                "name a directory, or leave this key out",
            )
        elif section.enable and not Path(section.dump_dir).expanduser().is_absolute():
            yield warning(
                f"{key}.dump_dir",
                section.dump_dir,
                "it is found from the directory that a run is started in, so a run started elsewhere has other records",
                "give an absolute path",
            )


def _roles(config: Config, given: Given) -> Iterator[Problem]:
    shipped = type(config.skip).model_fields.keys() - {"modules", "roles"}
    for role in sorted(config.skip.roles):
        if role in shipped:
            yield Problem(
                f"skip.roles.{role}",
                role,
                "this role comes with the package and has a section of its own, so these settings would not be read",
                f"write skip.{role} instead",
            )
        elif not config.skip.modules:
            yield Problem(
                f"skip.roles.{role}",
                role,
                f"nothing registers a role of this name; those of the package are {', '.join(sorted(shipped))}",
                "name the module that registers it in skip.modules",
            )


def _generation(config: Config, given: Given) -> Iterator[Problem]:
    skip = config.skip
    if skip.rollout.enable and config.mode != "sync":
        yield Problem(
            "skip.rollout.enable",
            True,
            "only `asyncrl launch sync` generates whole batches; here samples are generated one by one",
            "set skip.async_rollout.enable=true instead",
        )
    if skip.rollout.enable and skip.async_rollout.enable:
        yield Problem(
            "skip.async_rollout.enable",
            True,
            "with skip.rollout.enable the same generation would be recorded twice",
            "enable one of the two",
        )
    role = config.generation_skip
    if role is None:
        return
    if skip.async_rollout.enable and not skip.async_rollout.serve_when_covered and config.has_validation:
        yield warning(
            "skip.async_rollout.serve_when_covered",
            False,
            "the validation set is never replayed, so engines are started all the same",
            "set data.val_files=[] (or data.reasoning_gym.val_size=0)",
        )
    drift = config.async_training
    drops = drift.max_staleness is not None and drift.stale_action == "drop"
    if drops and role.action == "repeat" and role.replay_versions == "recorded":
        yield warning(
            "skip.async_rollout.replay_versions" if skip.async_rollout.enable else "skip.rollout.replay_versions",
            role.replay_versions,
            "a record of an early step that is repeated grows older with every version, and is dropped beyond "
            "async_training.max_staleness; another sample is fed in its place, and may be as old",
            "set replay_versions=current, or async_training.max_staleness=null",
        )


def _sections(config: Config) -> Mapping[str, SkipRoleConfig]:
    """Of all roles, by key."""
    own = config.skip.roles
    return {f"skip.roles.{role}" if role in own else f"skip.{role}": one for role, one in config.skip.by_role().items()}


RULES: tuple[Rule, ...] = (_steps, _idle, _places, _roles, _generation)

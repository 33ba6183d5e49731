"""Recording stages and replaying them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import Positive, Section


class SkipRoleConfig(Section):
    """One stage."""

    enable: bool = False
    """Record this stage and replay it from its records."""
    dump_dir: str = "~/.asyncrl/skip"
    """Records are in <dump_dir>/<project_name>/<experiment_name>/<role>/<step>/. `~` is your home directory."""
    steps: Any = Field(default_factory=list, json_schema_extra={"type": "list of steps"})
    """Which steps: `[1, 2, 5]`, `"1-128,200"`, or `all`. Others run as if nothing were recorded."""
    action: Literal["cache", "repeat"] = "cache"
    """`cache`: the record of exactly this step, else run and record. `repeat`: the nearest recorded step too, first
    below, then above."""
    on_mismatch: Literal["regenerate", "error"] = "regenerate"
    """With `cache`, when a record was made by another prompt, sampling, model, tool set or `n`: run and replace the
    record, or stop and say what differs."""
    max_bytes: Positive | None = None
    """Of all records of this role; what would go beyond is not recorded. null: no limit."""


class CachedSkipConfig(SkipRoleConfig):
    """A stage whose result belongs to exactly what it was asked."""

    action: Literal["cache"] = "cache"
    """The record of exactly this step, else run and record. There is no `repeat`: the result of something else would be
    wrong here."""


class RolloutSkipConfig(SkipRoleConfig):
    """Generation of a whole batch of `launch sync`; its step is the Trainer's."""

    replay_versions: Literal["recorded", "current"] = "recorded"
    """`recorded`: tokens keep the versions that made them, so staleness and corrections see their age. `current`: they
    count as made by the version that is served now."""


class AsyncRolloutSkipConfig(RolloutSkipConfig):
    """Generation of one sample; its step is the last part of `sample_{epoch}_{index}`."""

    serve_when_covered: bool = True
    """False: no engine is started if every sample of the run is recorded and nothing is validated."""


class SkipConfig(Section):
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
    roles: dict[str, SkipRoleConfig] = Field(default_factory=dict)
    """Roles that `modules` register, by name."""

    def by_role(self) -> dict[str, SkipRoleConfig]:
        """All roles, those of the user's own last."""
        own = (name for name in type(self).model_fields if name not in ("modules", "roles"))
        return {**{name: getattr(self, name) for name in own}, **self.roles}

"""Every key a user can set, with its one default. Pure: importing this loads pydantic and nothing heavier.

Key names follow verl's where verl has the concept. The sections are in `sections/`, and `docs/config.md` is generated
from them.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.config.sections.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KlControlConfig,
    RolloutCorrectionConfig,
)
from asyncrl.config.sections.base import Dtype, NonNegative, Section, Switch
from asyncrl.config.sections.data import DataConfig, ModelConfig, ReasoningGymConfig
from asyncrl.config.sections.multi_turn import (
    AgentConfig,
    InteractionConfig,
    McpServerConfig,
    MultiTurnConfig,
    OverSampleConfig,
    ToolConfig,
)
from asyncrl.config.sections.reward import JudgeConfig, OverlongBufferConfig, RewardConfig, RewardFunctionConfig
from asyncrl.config.sections.rollout import RolloutConfig, SamplingConfig, ValSamplingConfig
from asyncrl.config.sections.run import (
    AsyncTrainingConfig,
    LoggingConfig,
    ProfilerConfig,
    RayConfig,
    RecoveryConfig,
    ServeConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from asyncrl.config.sections.skip import AsyncRolloutSkipConfig, RolloutSkipConfig, SkipConfig, SkipRoleConfig
from asyncrl.config.sections.trainer import (
    CriticConfig,
    EngineConfig,
    OptimConfig,
    RefConfig,
    RewardModelConfig,
    RoleConfig,
    TrainerConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "AsyncRolloutSkipConfig",
    "AsyncTrainingConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "Dtype",
    "EngineConfig",
    "FilterGroupsConfig",
    "InteractionConfig",
    "JudgeConfig",
    "KlControlConfig",
    "LoggingConfig",
    "McpServerConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverSampleConfig",
    "OverlongBufferConfig",
    "ProfilerConfig",
    "RayConfig",
    "ReasoningGymConfig",
    "RecoveryConfig",
    "RefConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RoleConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutSkipConfig",
    "SamplingConfig",
    "Section",
    "ServeConfig",
    "SkipConfig",
    "SkipRoleConfig",
    "TimeoutsConfig",
    "ToolConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WeightSyncConfig",
]


class Config(Section):
    """The whole run."""

    mode: Literal["fully_async", "sync"] = "fully_async"
    """Set by `asyncrl launch`."""
    project_name: str = "asyncrl"
    """Groups experiments in metric sinks."""
    experiment_name: str = "quickstart"
    """Names the directory of its runs below runs/."""
    run_dir: str | None = None
    """null: runs/<experiment_name>/<time>/. With `resume`, only the directory of the run that goes on."""
    resume: str = "none"
    """`none`; `auto`: the newest checkpoint of this experiment (with `run_dir`: of the run there), if there is one; or
    a run or checkpoint directory. A run goes on in its own directory; to start another from its weights, give
    `model.path=<checkpoint>/hf` instead."""
    journal: Switch = "on"
    """Keep every transition of every sample, and finished samples until a checkpoint covers them, on disk in the run
    directory: what dies then loses nothing. `off`: a restart goes on from the last checkpoint, and a lost queue ends
    the run."""
    seed: NonNegative = 0
    """Of data order and torch. Same seed: same prompts in the same feed order."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    logging: LoggingConfig = LoggingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    skip: SkipConfig = SkipConfig()
    ray: RayConfig = RayConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def samples_per_lease(self) -> int:
        return self.trainer.ppo_mini_batch_size * self.async_training.require_batches

    @property
    def samples_per_version(self) -> int:
        """`S` of docs/design.md §3."""
        return self.samples_per_lease * self.async_training.trigger_parameter_sync_step

    @property
    def steps_per_lease(self) -> int:
        """Optimizer steps of the policy that one lease gives."""
        return self.async_training.require_batches * self.trainer.ppo_epochs

    @property
    def generation_skip(self) -> RolloutSkipConfig | None:
        """The role that records and replays generation, if one is enabled (`rules` allow for one)."""
        roles = (self.skip.async_rollout, self.skip.rollout)
        return next((role for role in roles if role.enable), None)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def has_validation(self) -> bool:
        """There are prompts to validate on."""
        gym = self.data.reasoning_gym
        return bool(self.data.val_files) or (gym is not None and gym.val_size > 0)

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.data.max_prompt_length + self.rollout.response_length

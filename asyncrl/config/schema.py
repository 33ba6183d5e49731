"""The whole configuration: every key, with its one default. Pure: it imports pydantic and nothing heavier.

Key names follow verl's where verl has the concept. docs/config.md is generated from the sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pydantic import PrivateAttr

from asyncrl.config.interpolation import ValuePath, with_digest, without_secrets
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import ConfigSection, Seed, Switch
from asyncrl.config.sections.data import DataConfig, ModelConfig, SftConfig
from asyncrl.config.sections.observe import LoggingConfig, ProfilerConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import RolloutConfig
from asyncrl.config.sections.run import (
    AsyncTrainingConfig,
    RayConfig,
    RecoveryConfig,
    ServeConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from asyncrl.config.sections.skip import RolloutSkipConfig, SkipConfig
from asyncrl.config.sections.trainer import CriticConfig, RefConfig, RewardModelConfig, TeacherConfig, TrainerConfig


class Config(ConfigSection):
    """The whole run."""

    mode: Literal["fully_async", "sync", "sft"] = "fully_async"
    """Mode of the run, which `asyncrl launch` and `asyncrl sft` set."""
    project_name: str = "asyncrl"
    """Groups experiments in metric sinks."""
    experiment_name: str = "quickstart"
    """Names the directory of the runs below runs/."""
    placement: Literal["separate", "colocated"] = "separate"
    """GPUs of engines and training processes: `separate`, each has its own; `colocated`, both use the same ones in
    turns. The engines sleep while the Trainer computes, and what the training processes have is in the memory of the
    machine while the engines generate. For `asyncrl launch sync` on one machine (docs/gpu.md)."""
    run_dir: str | None = None
    """Directory of the run; null: runs/<experiment_name>/<time>/. With `resume`, it can only be the directory of the
    resumed run."""
    resume: str = "none"
    """What to continue from: `none`; `auto`, which is the newest run of this experiment that has a checkpoint or a
    journal, whatever its other settings were (with `run_dir`: the run in that directory), if one exists; or a run or
    checkpoint directory. A run continues in its own directory. To start a new run from its weights, give
    `model.path=<checkpoint>/hf` instead."""
    journal: Switch = "on"
    """Write every transition of every sample, and the finished samples that no checkpoint covers yet, to the run
    directory, so that a crash loses nothing. `off`: a restart continues from the last checkpoint, and a lost queue ends
    the run."""
    directory_access: Literal["private", "group", "umask"] = "private"
    """Access to the directories that a run creates: the run directory, the records of `skip` and the dump of
    trajectories. `private`: only the user who starts it (mode 0700); `group`: the group may read them (0750); `umask`:
    what the umask allows. Existing directories keep their mode, and files inside follow the umask."""
    seed: Seed = 0
    """Seed of the data order and of torch. The same seed gives the same prompts in the same feed order."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    ref: RefConfig = RefConfig()
    teacher: TeacherConfig = TeacherConfig()
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
    _unresolved: Mapping[ValuePath, str] = PrivateAttr(default_factory=dict)
    """Texts with `${oc.env:…}`, as they were given, by the paths of their values, which are texts and collections."""

    def with_unresolved(self, texts: Mapping[ValuePath, str]) -> Config:
        """Return the configuration with the texts that `saved_values` has for values from the environment."""
        config = self.model_copy()
        config._unresolved = dict(texts)
        return config

    def without(self, sections: Collection[str]) -> Config:
        """Return the configuration with the defaults in these sections."""
        config = self.model_copy(update={name: getattr(Config(), name) for name in sections})
        return config.with_unresolved(
            {path: text for path, text in self._unresolved.items() if path[0] not in sections}
        )

    def saved_values(self) -> dict[str, Any]:
        """Return all values in JSON types, as config.yaml has them, from which the same configuration is composed.

        A text or collection that depends on environment variables is replaced by its unresolved text, such as
        `${oc.env:HOME}/data`. Numbers and switches are not replaced. Secrets in plain text stay.
        """
        return self._replaced(lambda text, value: text)

    def public_values(self) -> dict[str, Any]:
        """Return `saved_values` as they may be shown and sent: without secrets in plain text."""
        return dict(without_secrets(self.saved_values()))

    def identity_values(self) -> dict[str, Any]:
        """Return all values in JSON types, as they may be written to be compared with those of another run.

        Each text that depends on environment variables is replaced by its unresolved text and a digest of its
        value, and each secret in plain text by a digest.
        """
        return dict(without_secrets(self._replaced(_digests), digests=True))

    def _replaced(self, replacement: Callable[[str, Any], Any]) -> dict[str, Any]:
        values = self.model_dump(mode="json")
        for (*parents, name), text in self._unresolved.items():
            place: Any = values
            for parent in parents:
                place = place[parent]
            place[name] = replacement(text, place[name])
        return values

    @property
    def directory_mode(self) -> int:
        """Mode of the directories that the run creates, before the umask."""
        return {"private": 0o700, "group": 0o750, "umask": 0o777}[self.directory_access]

    @property
    def samples_per_lease(self) -> int:
        return self.trainer.ppo_mini_batch_size * self.async_training.require_batches

    @property
    def samples_per_version(self) -> int:
        """`S` of docs/design.md §3."""
        return self.samples_per_lease * self.async_training.trigger_parameter_sync_step

    @property
    def max_unconsumed_samples(self) -> int:
        """Maximum number of samples that are generated and not yet trained."""
        # An admission needs fed - dropped < bound, so a fractional bound rounds up.
        return math.ceil((1 + self.async_training.staleness_threshold) * self.samples_per_version)

    @property
    def steps_per_lease(self) -> int:
        """Optimizer steps of the policy per lease."""
        return self.async_training.require_batches * self.trainer.ppo_epochs

    @property
    def generation_skip(self) -> RolloutSkipConfig | None:
        """The enabled role that records and replays generation; the rules allow at most one."""
        roles = (self.skip.async_rollout, self.skip.rollout)
        return next((role for role in roles if role.enable), None)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_teacher(self) -> bool:
        return self.teacher.path is not None

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def has_validation(self) -> bool:
        gym = self.data.reasoning_gym
        return bool(self.data.val_files) or (gym is not None and gym.val_size > 0)

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run writes checkpoints or continues from one."""
        return self.trainer.save_last or self.trainer.save_freq != -1 or self.resume != "none"

    @property
    def validates_only(self) -> bool:
        """Whether nothing is trained, so that neither a Trainer nor a training set is needed."""
        return self.trainer.total_training_steps == 0

    @property
    def syncs_adapters(self) -> bool:
        """Whether versions consist of LoRA adapters, which the engines add to the weights in the model's files."""
        return self.weight_sync.lora == "adapter" and not self.validates_only

    @property
    def takes_turns(self) -> bool:
        """Whether engines and ranks use the same GPUs in turns. A file for such a run may also be that of a command
        that has only one of the two."""
        return self.placement == "colocated" and self.mode == "sync" and not self.validates_only

    @property
    def lends_gpus(self) -> bool:
        """Whether the Trainer lends its GPUs to additional engines while it waits for samples."""
        return self.trainer.lend_after_s is not None and self.mode == "fully_async" and not self.validates_only

    @property
    def shares_gpus(self) -> bool:
        """Whether engines sleep on GPUs while ranks use them."""
        return self.takes_turns or self.lends_gpus

    @property
    def num_lent_replicas(self) -> int:
        """Replicas on the Trainer's GPUs, besides `rollout.num_replicas`."""
        return self.trainer.num_workers // self.rollout.replica_size if self.lends_gpus else 0

    @property
    def longest_trajectory(self) -> int:
        """Most tokens of a prompt and its response, or of a demonstration."""
        if self.mode == "sft":
            return self.sft.max_length
        return self.data.max_prompt_length + self.rollout.response_length

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.longest_trajectory


def _digests(text: str, value: Any) -> Any:
    """Return `value` (JSON types), with `text` and a digest in place of each text."""
    if isinstance(value, str):
        return with_digest(text, value)
    if isinstance(value, dict):
        return {name: _digests(text, item) for name, item in value.items()}
    return [_digests(text, item) for item in value] if isinstance(value, list) else value
